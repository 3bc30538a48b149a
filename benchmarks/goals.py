"""The goals, as code: each names what it compares, so that no figure is ever typed in by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.contest import contender_of
from harness.results import Document, duration, figure, ratio, size
from names import (
    CROWDS,
    KINDS,
    RATES,
    SERVICE_DIRECT,
    TRAININGS,
    TRAJECTORIES,
    TRAJECTORY_RIVALS,
    case_name,
    is_choice,
    is_library,
    is_ours,
    is_ring,
    is_rival,
    name,
)

Cases = dict[str, dict[str, dict[str, float]]]
Documents = dict[str, Document | None]
WINDOW_ROWS = 1_000_000  # at which windows are compared with the peers
LONG_PUT = "journal put 256 x 2,048 tokens"
MOST_BEYOND_RAW = 0.10
MOST_BYTES_A_PRIORITY = 16
MOST_BYTES_TO_SAVE = 64_000_000
MOST_TO_OPEN_NS = 1e9
AT_THE_LIMIT = 1.05  # times the limit: no more than two runs of the same copy differ
LEAST_HUGE_SHARE = 0.5  # of a buffer's bytes, for huge pages to count as got


@dataclass(frozen=True)
class Verdict:
    goal: str
    measured: str
    held: bool | None  # None: not measured in these results


def minimum(cases: Cases, case: str, label: str) -> float | None:
    times = cases.get(case, {}).get(label)
    return times["min_ns"] if times else None


def fastest(cases: Cases, case: str, wanted: Callable[[str], bool]) -> tuple[str, float] | None:
    """Label and minimum of the fastest contender among those wanted."""
    candidates = [label for label in cases.get(case, {}) if wanted(label)]
    least = min(candidates, key=lambda label: cases[case][label]["min_ns"], default=None)
    return (least, cases[case][least]["min_ns"]) if least else None


def fastest_library(cases: Cases, case: str) -> tuple[str, float] | None:
    return fastest(cases, case, is_library)


def fastest_rival(cases: Cases, case: str) -> tuple[str, float] | None:
    """Of libraries and of what users write by hand."""
    return fastest(cases, case, is_rival)


def of(cases: Cases, case: str, contender: str) -> tuple[str, float] | None:
    """The fastest form of one contender."""
    return fastest(cases, case, lambda label: contender_of(label) == contender and is_choice(label))


def at_most(goal: str, limit: float, value: float | None, show: Callable[[float], str]) -> Verdict:
    goal = f"{goal} at most {show(limit)}"
    if value is None:
        return Verdict(goal, "not measured", None)
    return Verdict(goal, show(value), value <= limit)


def at_least(goal: str, limit: float, value: float | None, show: Callable[[float], str]) -> Verdict:
    goal = f"{goal} at least {show(limit)}"
    if value is None:
        return Verdict(goal, "not measured", None)
    return Verdict(goal, show(value), value >= limit)


def times_faster(goal: str, least: float, ours: float | None, rival: tuple[str, float] | None) -> Verdict:
    goal = f"{goal}: at least {least:g}x the speed"
    if ours is None or rival is None:
        return Verdict(goal, "not measured", None)
    return Verdict(goal, f"{ratio(rival[1] / ours)} ({name(rival[0])})", rival[1] / ours >= least)


def percent(share: float) -> str:
    return f"{figure(100 * share)}%"


def over(value: float | None, other: float | None) -> float | None:
    return value / other if value and other else None


def cases_of(document: Document | None, contest: str) -> Cases:
    return (document or {}).get("workloads", {}).get(contest, {}).get("cases", {})


def bytes_a_row(document: Document | None, label: str) -> float | None:
    point = (document or {}).get("memory", {}).get(label)
    return point["resident_bytes"] / point["rows"] if point else None


def replay_goals(document: Document | None) -> Iterator[Verdict]:
    w1, atari = cases_of(document, "w1"), cases_of(document, "atari")

    yield at_most("add one row, positional,", 150, minimum(w1, "add_1", "sharpwave"), duration)
    yield at_most("add one row, by keyword,", 200, minimum(w1, "add_1", "sharpwave/keyword"), duration)
    for count, least in ((1, 1.7), (64, 1.5), (1024, 1.3)):
        case = f"add_{count}"
        yield times_faster(f"{case_name(case)}, rlox", least, minimum(w1, case, "sharpwave"), of(w1, case, "rlox"))

    # The largest batch with out=: fresh arrays of that size are page faults more than sampling.
    for count, label, least in ((32, "sharpwave", 5), (256, "sharpwave", 6), (4096, "sharpwave/out", 7)):
        case = f"sample_{count}"
        title = f"sample({count}{', out=' if label.endswith('out') else ''}), fastest peer"
        yield times_faster(title, least, minimum(w1, case, label), fastest_rival(w1, case))
    for count, limit in ((32, 2.0), (256, 1.3), (4096, 1.3)):
        ours, bare = (minimum(w1, f"sample_{count}", label) for label in ("sharpwave/out", "c_limit"))
        yield at_most(f"sample({count}, out=) over a bare C gather", limit, over(ours, bare), ratio)
    ours, engine = (minimum(w1, "sample_256", label) for label in ("sharpwave/out", "engine"))
    yield at_most("sample(256, out=) from Python over the engine from C++", 1.10, over(ours, engine), ratio)
    yield image_goal(atari)


def image_goal(cases: Cases) -> Verdict:
    """Faster than everybody, or as fast as the machine copies: both sides in their fastest form."""
    goal = f"image rows, sample(256), fastest peer: at least 1.2x the speed, or at most {ratio(AT_THE_LIMIT)} the time "
    goal += "in which all cores copy the bytes"
    ours, rival = fastest(cases, "sample_256", is_ours), fastest_rival(cases, "sample_256")
    limit = minimum(cases, "sample_256", "c_limit/threads")
    if not (ours and rival and limit):
        return Verdict(goal, "not measured", None)
    faster, of_limit = rival[1] / ours[1], ours[1] / limit
    measured = f"{ratio(faster)} ({name(rival[0])}), {ratio(of_limit)} of the limit"
    return Verdict(goal, measured, faster >= 1.2 or of_limit <= AT_THE_LIMIT)


def memory_goals(document: Document | None) -> Iterator[Verdict]:
    workloads = (document or {}).get("workloads", {})
    for workload, kind in KINDS.items():
        points = workloads.get(workload, {}).get("sharpwave")
        beyond = max(points, key=lambda point: point["rows"])["beyond_raw"] if points else None
        yield at_most(f"memory beyond the raw bytes, {kind},", MOST_BEYOND_RAW, beyond, percent)


def growth(curve: dict[str, dict[str, float]]) -> float | None:
    """Time at 10^7 rows over time at 10^5 rows."""
    few, many = curve.get("100000"), curve.get("10000000")
    return many["min_ns"] / few["min_ns"] if few and many else None


def scaling_goals(document: Document | None) -> Iterator[Verdict]:
    curve = (document or {}).get("curves", {}).get("sharpwave", {})
    yield at_most("sample(256) at 10^7 rows over 10^5 rows", 2.5, growth(curve), ratio)


def prioritized_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "prioritized")
    for label, language in (("sharpwave", "Python"), ("engine", "C++")):
        ours = minimum(cases, "sample_32", label)
        yield at_most(f"prioritized sample(32) from {language}", 10_000, ours, duration)
    for case, title, least in (
        ("sample_32", "prioritized sample(32)", 8),
        ("sample_256", "prioritized sample(256)", 8),
        ("update_256", "update of 256 priorities", 3),
    ):
        peer = fastest_rival(cases, case)
        yield times_faster(f"{title}, fastest peer", least, minimum(cases, case, "sharpwave"), peer)
    ours, uniform = (bytes_a_row(document, label) for label in ("sharpwave", "sharpwave@uniform"))
    more = ours - uniform if ours and uniform else None
    yield at_most("memory of a priority", MOST_BYTES_A_PRIORITY, more, size)


def nstep_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "nstep")
    ours, sb3 = (minimum(cases, "sample_256", label) for label in ("sharpwave", "sb3"))
    yield times_faster("3-step sample(256), Stable-Baselines3", 8, ours, ("sb3", sb3) if sb3 else None)
    plain = minimum(cases, "sample_256", "sharpwave@one_step")
    yield at_most("3-step sample(256) over plain sample(256)", 2.0, over(ours, plain), ratio)


def windows_goals(document: Document | None) -> Iterator[Verdict]:
    for label, end in (("sharpwave", "stop"), ("sharpwave@pad", "pad")):
        curve = (document or {}).get("curves", {}).get(label, {})
        goal = f'64 windows of 80 steps, end="{end}", at 10^7 rows over 10^5 rows'
        yield at_most(goal, 2.5, growth(curve), ratio)
    cases: Cases = at_size(document, WINDOW_ROWS) if document else {}
    ours, title = minimum(cases, "windows", "sharpwave"), f"64 windows of 80 steps among {WINDOW_ROWS:,} rows"
    yield times_faster(f"{title}, rlox", 1.5, ours, of(cases, "windows", "rlox"))
    yield times_faster(f"{title}, NumPy's overlapping views", 1.2, ours, of(cases, "windows", "numpy_ring"))


def at_size(document: Document, count: int) -> Document:
    """The curves' times at one number of rows, as a case."""
    return {"windows": {label: curve[str(count)] for label, curve in document["curves"].items() if str(count) in curve}}


def hindsight_goals(document: Document | None) -> Iterator[Verdict]:
    cases, case = cases_of(document, "hindsight"), "sample_256"
    ours = minimum(cases, case, "sharpwave")
    yield times_faster("hindsight sample(256), rlox", 1.5, ours, of(cases, case, "rlox"))
    yield times_faster("hindsight sample(256), NumPy by hand", 1.7, ours, of(cases, case, "numpy_ring"))


def masked_goals(document: Document | None) -> Iterator[Verdict]:
    times = (document or {}).get("times", {})
    for share in (50, 99):
        taken = times.get(f"sharpwave@{share}")
        yield at_most(f"sample(256), {share}% of the rows left out,", 20_000, taken and taken["min_ns"], duration)


def training_goals(document: Document | None) -> Iterator[Verdict]:
    trainings = (document or {}).get("trainings", {})
    for key in TRAININGS:
        training = trainings.get(key, {"title": key, "cases": {}})
        cases = {"step": training["cases"]}
        goal = f"time in the buffer of a training step, {training['title']}, fastest peer"
        yield times_faster(goal, 1, minimum(cases, "step", "sharpwave"), fastest_rival(cases, "step"))


def engine_goals(document: Document | None) -> Iterator[Verdict]:
    """The targets of the first specification, by medians of single calls, and the limit of the machine."""
    lines = {line["name"]: line for line in (document or {}).get("lines", [])}
    for title, line in lines.items():
        # `< 100 ns`, `> 1,000,000`: a time at most, or a rate at least.
        relation, _, amount = line["target"].partition(" ")
        bound = float(amount.removesuffix(" ns").replace(",", "") or 0)
        if relation == "<":
            yield at_most(f"C++: {title}, p50", bound, line["p50_ns"], duration)
        elif relation == ">":
            yield at_least(f"C++: {title}", bound, line["per_second"], figure)
    title = "sample(32) among 1,000,000 rows"
    ours, bare = (lines.get(one, {}).get("p50_ns") for one in (title, title.replace("sample(32)", "bare gather of 32")))
    yield at_most(f"C++: {title} over a bare gather, p50", 1.3, over(ours, bare), ratio)


def pace_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "pace")
    paced, free = (minimum(cases, "add_1", label) for label in ("sharpwave", "sharpwave@free"))
    yield at_most("add one row with a pace over without", 2.0, over(paced, free), ratio)


def write_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "write")
    ours = minimum(cases, "write_256", "sharpwave")
    scatter = of(cases, "write_256", "numpy_ring")
    yield at_most("write of 256 states over a NumPy scatter", 1.5, over(ours, scatter and scatter[1]), ratio)
    mutable, fixed = (minimum(cases, "sample_256", label) for label in ("sharpwave", "sharpwave@written_once"))
    yield at_most("sample(256) with mutable states over states written once", 1.5, over(mutable, fixed), ratio)


def frames_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "frames")
    ours, peer = minimum(cases, "sample_256", "sharpwave"), fastest_library(cases, "sample_256")
    yield times_faster("stacked and derived sample(256), fastest peer that deduplicates", 1, ours, peer)
    for label, given in (("sharpwave", "stacks"), ("sharpwave/frame", "single frames")):
        add = minimum(cases, "add_1", label)
        yield at_most(f"add one row, stacked and derived, given {given},", 3_000, add, duration)
    stored = bytes_a_row(document, "sharpwave@stored")
    for label, title, limit in (
        ("sharpwave@derived", "derived", 0.55),
        ("sharpwave", "derived, stack=4", 0.14),
    ):
        share = over(bytes_a_row(document, label), stored)
        yield at_most(f"memory of image rows, {title}, over stored", limit, share, percent)


def compression_goals(document: Document | None) -> Iterator[Verdict]:
    goal, shares = "LZ4 on real rendered frames, measured against speed", []
    for film, points in (document or {}).get("memory", {}).items():
        plain, packed = points.get("sharpwave@plain"), points.get("sharpwave@lz4")
        if plain and packed:
            shares.append(f"{percent(packed['resident_bytes'] / plain['resident_bytes'])} of the bytes ({film})")
    yield Verdict(goal, ", ".join(shares) or "not measured", True if shares else None)


def crowd_case(document: Document | None, form: str, rows: int, writers: int) -> Document:
    return (document or {}).get("crowds", {}).get(form, {}).get("cases", {}).get(f"{rows}_{writers}", {})


def seconds_a_row(case: Document, rate: str, label: str) -> float | None:
    """Infinite for one who moved nothing; None for one who was not there."""
    if label not in case:
        return None
    median = case[label][rate]["median"]
    return 1 / median if median else math.inf


def fastest_in_crowd(case: Document, rate: str, wanted: Callable[[str], bool]) -> tuple[str, float] | None:
    """Label and seconds a row of the one with the highest median among those wanted."""
    times = {label: time for label in case if wanted(label) and (time := seconds_a_row(case, rate, label))}
    least = min(times, key=times.__getitem__, default=None)
    return (least, times[least]) if least else None


def got_huge_pages(document: Document | None, contest: str, label: str) -> bool | None:
    about = (document or {}).get("workloads", {}).get(contest, {}).get("contenders", {}).get(label)
    return about["huge_page_bytes"] >= LEAST_HUGE_SHARE * about["storage_bytes"] if about else None


def processes_goals(document: Document | None) -> Iterator[Verdict]:
    for form in CROWDS:
        for rows in (1, 64):
            case = crowd_case(document, form, rows, writers=1)
            for rate, what in RATES.items():
                ours, title = seconds_a_row(case, rate, "sharpwave"), f"writer and learner, {form}, add {rows}, {what}"
                peer = fastest_in_crowd(case, rate, is_library)
                yield times_faster(f"{title}, fastest library", 10, ours, peer)
                if form == "uniform":
                    ring = fastest_in_crowd(case, rate, is_ring)
                    yield times_faster(f"{title}, NumPy ring under a lock", 4, ours, ring)
    for contest, case, call in (
        ("shm", "add_1", "add one row"),
        ("shm", "sample_256", "sample(256)"),
        ("shm_prioritized", "sample_256", "prioritized sample(256)"),
    ):
        cases, got = cases_of(document, contest), got_huge_pages(document, contest, "sharpwave@shm")
        shared, own = (minimum(cases, case, label) for label in ("sharpwave@shm", "sharpwave"))
        pages = "got no huge pages" if got is False else "got huge pages"
        limit = 1.40 if got is False else 1.15
        yield at_most(f"{call} in shared memory, which {pages}, over in process", limit, over(shared, own), ratio)


def snapshot_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "snapshot")
    ours, tofile = (minimum(cases, "save", label) for label in ("sharpwave", "numpy_ring"))
    yield at_most("save before fsync over NumPy's tofile", 1.2, over(ours, tofile), ratio)
    ours, peer = minimum(cases, "load", "sharpwave"), fastest_library(cases, "load")
    yield times_faster("load of a snapshot, fastest peer library", 3, ours, peer)
    extra = (document or {}).get("save_memory", {}).get("sharpwave")
    yield at_most("memory that save takes besides", MOST_BYTES_TO_SAVE, extra, size)


def returns_goals(document: Document | None) -> Iterator[Verdict]:
    cases, case = cases_of(document, "returns"), "gae_128x1024"
    title = case_name(case)
    ours, peer = minimum(cases, case, "sharpwave"), fastest_library(cases, case)
    yield times_faster(f"{title}, fastest peer library", 3, ours, peer)
    # Both write into arrays that exist.
    stored, bare = (minimum(cases, case, label) for label in ("sharpwave/rollout", "c_loop"))
    yield at_most(f"{title}, RolloutBuffer, over a bare C loop (-O3)", 1.5, over(stored, bare), ratio)


def trajectories_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "trajectories")
    for case, title in TRAJECTORIES.items():
        ours = minimum(cases, case, "sharpwave")
        if case == "open":
            yield at_most(f"trajectories: {title}", MOST_TO_OPEN_NS, ours, duration)
            continue
        for rival, called in TRAJECTORY_RIVALS.items():
            least = 1.0 if rival == "lean torch" else 3 if case.startswith("add") else 20
            taken = minimum(cases, case, rival)
            goal = f"trajectories: {title}, {called}"
            yield times_faster(goal, least, ours, (rival, taken) if taken else None)


def gpu_returns_goals(document: Document | None) -> Iterator[Verdict]:
    for case in (document or {}).get("gae", []):
        title = f"GAE on a GPU, {case['steps']} x {case['envs']}, RolloutBuffer, the loop over steps"
        ours, loop = (case["cases"][label]["min_ns"] for label in ("sharpwave, RolloutBuffer", "loop"))
        yield times_faster(title, 90, ours, ("loop", loop))


def sequences_goals(document: Document | None) -> Iterator[Verdict]:
    calls = (document or {}).get("capacities", {})
    for call in ("put", "get", "amend"):
        small, large = (minimum(calls, f"sharpwave {capacity}", call) for capacity in (10**4, 10**7))
        title = f"SequenceBuffer, {call} of 256 samples at a capacity of 10^7"
        yield at_most(f"{title}, over 10^4,", 1.5, over(large, small), ratio)
        yield at_most(title, 1.5e6, large, duration)
    for journal in ("on", "waits for the disk"):
        taken = (document or {}).get("long_puts", {})
        put, written = (minimum(taken, journal, label) for label in (LONG_PUT, "writing the bytes"))
        title = f"put of 256 x 2,048 tokens, journal {journal}, over writing the bytes"
        yield at_most(title, 1.3, over(put, written), ratio)


def service_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "service")
    for case, call in (("sample_256", "sample(256)"), ("add_1", "add one row")):
        ours, echo = (minimum(cases, case, label) for label in ("sharpwave@tcp", "echo@tcp"))
        yield at_most(f"{call} at a server over a bare echo of the bytes", 1.6, over(ours, echo), ratio)
    row = minimum(cases, "adds", "sharpwave@tcp")
    yield at_least("rows a second to a server, one client", 1e6, row and 1e9 / row, figure)
    for case, what in (("batches_256", "batches of 256 from a server, asked for ahead"), ("adds", "rows to a server")):
        yield times_faster(f"{what}, Reverb", 100, minimum(cases, case, "sharpwave@tcp"), of(cases, case, "reverb"))
    for case, how in (("images", "one by one"), ("image_batches", "asked for ahead")):
        ours, fresh, constant = (
            minimum(cases, case, label) for label in ("sharpwave@tcp", "echo@tcp_fresh", "echo@tcp")
        )
        goal = f"batches of images from a server, {how}: of the bytes a second of an echo that copies them first,"
        verdict = at_least(goal, 0.7, over(fresh, ours), percent)
        if constant and ours:
            told = f"{verdict.measured} ({percent(constant / ours)} of one that sends a constant)"
            verdict = Verdict(verdict.goal, told, verdict.held)
        yield verdict
    for case, call in SERVICE_DIRECT.items():
        ours, shm = (minimum(cases, case, label) for label in ("sharpwave@direct", "sharpwave@shm"))
        yield at_most(f"{call} by way of a server of this machine, over shm://,", 1.1, over(ours, shm), ratio)


def gpu_replay_goals(document: Document | None) -> Iterator[Verdict]:
    for kind, title, times in (("uniform", "a field at a time", 3), ("priority", "cumsum and searchsorted", 5)):
        for case in (document or {}).get(kind, []):
            peer = case["cases"][f"torch, {title}"]["min_ns"]
            for label in ("sharpwave", "sharpwave, as a CUDA graph"):
                ours = case["cases"][label]["min_ns"]
                called = f"{kind} draws of {case['size']:,} on a GPU{label.removeprefix('sharpwave')}, torch, {title}"
                yield times_faster(called, times, ours, ("torch", peer))
    if document is None:
        return
    direct = document["direct"]
    labels = "sharpwave, stream(device=)", "torch, gather and pinned copy"
    for case, what in ((direct, "rows of images"), (document["stacked"], "rows with stacks of frames")):
        ours, peer = (case["cases"][label]["min_ns"] for label in labels)
        yield times_faster(f"256 {what} to a GPU, gather and pinned copy", 3, ours, ("torch", peer))
    share = direct["crossing_bytes"] / direct["cases"][labels[0]]["min_ns"] * 1e9 / direct["link_bytes_per_s"]
    yield at_least("256 rows of images to a GPU, of the link", 0.8, share, percent)
    waits = direct["dqn"]["graph"]["waiting_share"]
    yield at_most("a DQN fed by stream(), as a CUDA graph: share of time waiting for data", 0.05, waits, percent)


def llm_generation_goals(document: Document | None) -> Iterator[Verdict]:
    for case in (document or {}).get("contests", []):
        cases = {"tokens": case["cases"]}
        title = f"generation on a GPU, {case['model']} parameters, {case['batch']} side by side, transformers"
        ours, theirs = minimum(cases, "tokens", "sharpwave"), fastest(cases, "tokens", is_of_transformers)
        yield times_faster(title, 3, ours, theirs)


def is_of_transformers(label: str) -> bool:
    return label.startswith("transformers")


def llm_decode_goals(document: Document | None) -> Iterator[Verdict]:
    for case in (document or {}).get("swaps", []):
        if case["model"] == "3.4M":
            taken = minimum({"swap": case["cases"]}, "swap", "from a folder in memory")
            yield at_most(
                "weights of 3.4M parameters into a running engine, from a folder in memory", 10e6, taken, duration
            )


def gpu_learner_goals(document: Document | None) -> Iterator[Verdict]:
    for case in (document or {}).get("cases", []):
        if case["model"] == "3.4M":
            title = "a learner's tokens a second, 3.4M parameters, packed rows of 4,096"
            yield at_least(title, 1e6, case["tokens_per_s"], "{:,.0f}".format)
        elif case["model"] == "0.5B":
            share = case["operations_per_s"] / document["bf16_operations_per_s"]
            yield at_least("a learner's share of the device's bfloat16 rate, 0.5B parameters", 0.35, share, percent)


def llm_async_goals(document: Document | None) -> Iterator[Verdict]:
    if document is None or document["settings"]["goal"] is None:
        return
    reached: dict[bool, list[float | None]] = {True: [], False: []}
    for run in document["runs"]:
        reached[run["max_staleness"] == 0].append(run["reached_s"])
    sync, other = reached[True], reached[False]
    if sync and other and None not in (*sync, *other):
        times = sum(sync) / len(sync) / (sum(other) / len(other))
        yield at_least("asynchronous over synchronous training, wall time to the same reward", 2.77, times, ratio)


def inputs_goals(document: Document | None) -> Iterator[Verdict]:
    cases = cases_of(document, "inputs")
    plain = minimum(cases, "add_1", "plain")
    for form in ("int reward", "done=0", "strided", "float64"):
        yield at_most(
            f"add one row, {form}, over the plain add", 2.0, over(minimum(cases, "add_1", form), plain), ratio
        )
    for form, limit in (("tensors", 2_500), ("lists", 3_000)):
        yield at_most(f"add one row, {form},", limit, minimum(cases, "add_1", form), duration)
    counts = sorted(
        int(case.removeprefix("add_")) for case in cases if re.fullmatch(r"add_\d+", case) and case != "add_1"
    )
    for count in counts or (8, 4096):
        # Of the bytes given: a row has 41 numbers and a truth value.
        wide, narrow = (minimum(cases, f"add_{count}", form) for form in ("float64", "float32"))
        slower = over(wide, narrow)
        a_byte = None if slower is None else slower * (41 * 4 + 1) / (41 * 8 + 1)
        yield at_most(f"a byte of {count:,} rows of float64 over one of float32", 2.0, a_byte, ratio)


def overheads_goals(document: Document | None) -> Iterator[Verdict]:
    taken = {
        name: cases_of(document, name) for name in ("import", "collect_trivial", "collect_kept", "collect_cart_pole")
    }
    import_ns = minimum({"import": taken["import"]}, "import", "import sharpwave")
    yield at_most("import sharpwave, beyond NumPy,", 25e6, import_ns, duration)
    for key, environment, by_hand in (
        ("collect_trivial", "an environment that does nothing", "loop by hand"),
        # Without a copy the loop would store observations that the environment has changed since.
        ("collect_kept", "one that keeps its arrays", "loop by hand that copies observations"),
        ("collect_cart_pole", "CartPole", "loop by hand"),
    ):
        ours, loop = (minimum(taken, key, label) for label in ("sw.collect", by_hand))
        yield at_most(f"a step of sw.collect over a {by_hand}, {environment},", 1.3, over(ours, loop), ratio)


def objectives_goals(document: Document | None) -> Iterator[Verdict]:
    """Where clips are small against the movement over the lag."""
    for cell in (document or {}).get("cells", []):
        if cell["is_bold"] and all("share_of_gain" in cell.get(name, {}) for name in ("decoupled", "naive")):
            title = f"eps {cell['eps']:g}, clip {cell['clip']:g}, rate {cell['learning_rate']:g}, share of sync's gain:"
            yield at_least(f"{title} decoupled", 0.95, cell["decoupled"]["share_of_gain"], percent)
            yield at_most(f"{title} naive", 0.45, cell["naive"]["share_of_gain"], percent)


def no_goals(document: Document | None) -> Iterator[Verdict]:
    """For figures that are told and not judged."""
    del document
    return iter(())


GOALS: dict[str, Callable[[Document | None], Iterator[Verdict]]] = {
    "engine": engine_goals,
    "replay": replay_goals,
    "memory": memory_goals,
    "scaling": scaling_goals,
    "prioritized": prioritized_goals,
    "nstep": nstep_goals,
    "windows": windows_goals,
    "hindsight": hindsight_goals,
    "inputs": inputs_goals,
    "overheads": overheads_goals,
    "masked": masked_goals,
    "training": training_goals,
    "pace": pace_goals,
    "write": write_goals,
    "frames": frames_goals,
    "compression": compression_goals,
    "processes": processes_goals,
    "snapshot": snapshot_goals,
    "open": no_goals,
    "returns": returns_goals,
    "trajectories": trajectories_goals,
    "gpu_returns": gpu_returns_goals,
    "gpu_replay": gpu_replay_goals,
    "llm_generation": llm_generation_goals,
    "llm_decode": llm_decode_goals,
    "gpu_learner": gpu_learner_goals,
    "llm_async": llm_async_goals,
    "llm_methods": no_goals,
    "sequences": sequences_goals,
    "service": service_goals,
    "objectives": objectives_goals,
}


def all_goals(documents: Documents) -> list[Verdict]:
    """Every goal, in the order of the benchmarks that measure them."""
    return [verdict for name, goals in GOALS.items() for verdict in goals(documents.get(name))]
