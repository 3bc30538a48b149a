"""The goals, as code: each names what it compares, so that no figure is ever typed in by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.results import Document, duration, figure, ratio
from names import KINDS, contender_of, is_library, name

Cases = dict[str, dict[str, dict[str, float]]]
MOST_BEYOND_RAW = 0.10


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
    candidates = [label for label in cases.get(case, {}) if wanted(contender_of(label))]
    least = min(candidates, key=lambda label: cases[case][label]["min_ns"], default=None)
    return (least, cases[case][least]["min_ns"]) if least else None


def fastest_library(cases: Cases, case: str) -> tuple[str, float] | None:
    return fastest(cases, case, is_library)


def fastest_ring(cases: Cases, case: str) -> tuple[str, float] | None:
    return fastest(cases, case, lambda contender: contender == "numpy_ring")


def at_most(goal: str, limit: float, value: float | None, show: Callable[[float], str]) -> Verdict:
    goal = f"{goal} at most {show(limit)}"
    if value is None:
        return Verdict(goal, "not measured", None)
    return Verdict(goal, show(value), value <= limit)


def times_faster(goal: str, least: float, ours: float | None, rival: tuple[str, float] | None) -> Verdict:
    goal = f"{goal}: at least {least:g}x the speed"
    if ours is None or rival is None:
        return Verdict(goal, "not measured", None)
    return Verdict(goal, f"{ratio(rival[1] / ours)} ({name(rival[0])})", rival[1] / ours >= least)


def replay_goals(workloads: Document) -> Iterator[Verdict]:
    w1: Cases = workloads.get("w1", {}).get("cases", {})
    atari: Cases = workloads.get("atari", {}).get("cases", {})

    add_one = minimum(w1, "add_1", "sharpwave")
    yield at_most("add one row, positional,", 150, add_one, duration)
    yield at_most("add one row, by keyword,", 200, minimum(w1, "add_1", "sharpwave/keyword"), duration)
    yield times_faster("add one row, fastest peer library", 20, add_one, fastest_library(w1, "add_1"))
    yield times_faster("add one row, NumPy ring", 8, add_one, fastest_ring(w1, "add_1"))
    for count, least in ((64, 4), (1024, 2)):
        ours, case = minimum(w1, f"add_{count}", "sharpwave"), f"add_{count}"
        yield times_faster(f"add {count} rows, fastest peer library", least, ours, fastest_library(w1, case))

    # The largest batch with out=: fresh arrays of that size are page faults more than sampling.
    forms = ((32, "sharpwave", 8, 4), (256, "sharpwave", 6, 3), (4096, "sharpwave/out", 4, 2.5))
    for count, label, least_library, least_ring in forms:
        case = f"sample_{count}"
        ours, title = minimum(w1, case, label), f"sample({count}{', out=' if label.endswith('out') else ''})"
        take = minimum(w1, case, "numpy_ring/take")
        yield times_faster(f"{title}, fastest peer library", least_library, ours, fastest_library(w1, case))
        ring = ("numpy_ring/take", take) if take else None
        yield times_faster(f"{title}, NumPy ring with take", least_ring, ours, ring)
    for count, limit in ((32, 2.0), (256, 1.3), (4096, 1.3)):
        ours, bare = (minimum(w1, f"sample_{count}", label) for label in ("sharpwave/out", "c_limit"))
        share = ours / bare if ours and bare else None
        yield at_most(f"sample({count}, out=) over a bare C gather", limit, share, ratio)
    ours, engine = (minimum(w1, "sample_256", label) for label in ("sharpwave/out", "engine"))
    over = ours / engine if ours and engine else None
    yield at_most("sample(256, out=) from Python over the engine from C++", 1.10, over, ratio)
    ours, peer = minimum(atari, "sample_256", "sharpwave"), fastest_library(atari, "sample_256")
    yield times_faster("image rows, sample(256), fastest peer library", 1.3, ours, peer)


def memory_goals(workloads: Document) -> Iterator[Verdict]:
    def percent(share: float) -> str:
        return f"{figure(100 * share)}%"

    for workload, kind in KINDS.items():
        points = workloads.get(workload, {}).get("sharpwave")
        beyond = max(points, key=lambda point: point["rows"])["beyond_raw"] if points else None
        yield at_most(f"memory beyond the raw bytes, {kind},", MOST_BEYOND_RAW, beyond, percent)


def growth(curve: dict[str, dict[str, float]]) -> float | None:
    """Time at 10^7 rows over time at 10^5 rows."""
    few, many = curve.get("100000"), curve.get("10000000")
    return many["min_ns"] / few["min_ns"] if few and many else None


def all_goals(replay: Document | None, memory: Document | None, scaling: Document | None) -> list[Verdict]:
    curve = (scaling or {}).get("curves", {}).get("sharpwave", {})
    return [
        *replay_goals((replay or {}).get("workloads", {})),
        *memory_goals((memory or {}).get("workloads", {})),
        at_most("sample(256) at 10^7 rows over 10^5 rows", 2.5, growth(curve), ratio),
    ]
