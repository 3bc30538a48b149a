"""Markdown tables from results. One function a table; none of them measures anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from goals import (
    LONG_PUT,
    WINDOW_ROWS,
    Documents,
    Verdict,
    at_size,
    crowd_case,
    fastest,
    fastest_in_crowd,
    fastest_rival,
    growth,
    minimum,
    percent,
    seconds_a_row,
)
from harness.contest import contender_of
from harness.machine import MOST_LOAD
from harness.results import Document, amount, duration, figure, ratio, size
from names import (
    BESIDE_CASES,
    CONTESTS,
    CROWDS,
    KINDS,
    RATES,
    SERVICE,
    SERVICE_DIRECT,
    TRAJECTORIES,
    TRAJECTORY_RIVALS,
    WAYS,
    case_name,
    entrant_of,
    is_beside,
    is_choice,
    is_ours,
    is_rival,
    is_yardstick,
    name,
)

# The benchmarks of features that a contest measures, in the order of the table.
FEATURES = ("prioritized", "nstep", "hindsight", "frames")
SEQUENCE_CALLS = ("put", "get", "amend")
GPU_TABLES = (
    ("uniform", "cases", "uniform draws of"),
    ("priority", "cases", "draws by priority of"),
    ("priority", "update", "new priorities for"),
    ("add", "cases", "rows added at once:"),
)
HEADLINE_FEATURES = {
    "prioritized": ("sample_256", "update_256"),
    "nstep": ("sample_256",),
    "hindsight": ("sample_256",),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown with the first column left and the others right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def title(label: str) -> str:
    if contender_of(label) == "sharpwave":
        return f"**{name(label)}**"
    return f"*{name(label)}*" if is_yardstick(label) else name(label)


def small(text: str) -> str:
    return f"<sub>{text}</sub>"


def machine_line(document: Document, how: str = "") -> str:
    """Where it was measured, and how: in bursts, unless it says otherwise."""
    facts, settings = document["machine"], document["settings"]
    text = (
        f"{facts['cpu']}, {facts['cores']} cores, {figure(facts['memory_gib'])} GiB, "
        f"Linux {facts['kernel']}, huge pages: {facts['huge_pages']}, "
        f"Python {facts['python']}, {facts['date']}, load at the start {facts['load_at_start']:.2f}."
    )
    if "burst_ms" in settings and not how:
        how = f"Minimum of {settings['rounds']} interleaved bursts of {settings['burst_ms']:g} ms"
        how += "; the median, where given, in brackets."
    looks = ["A quick run: a look, not a result."] if settings["quick"] else []
    looks += ["The machine was busy: a look, not a result."] if is_busy(document) else []
    return small(" ".join(filter(None, (text, how, *looks))))


def is_busy(document: Document) -> bool:
    """Whether others worked on the machine when the run began. A GPU's documents say nothing about that: there the host
    is not what is measured."""
    return document["machine"].get("load_at_start", 0.0) > MOST_LOAD


def compared(cases: Document, case: str) -> list[str] | None:
    """Our time, the strongest rival's, and the ratio; both in the fastest form."""
    ours, rival = fastest(cases, case, is_ours), fastest_rival(cases, case)
    if ours is None:
        return None
    rest = [f"{duration(rival[1])} ({name(rival[0])})", ratio(rival[1] / ours[1])] if rival else ["not measured", ""]
    return [f"{duration(ours[1])}{form_of(ours[0])}", *rest]


def form_of(label: str) -> str:
    """` (out=)` where our fastest form is not the plain call."""
    what = name(label).partition(", ")[2]
    return f" ({what})" if what else ""


COMPARED = ["operation", "Sharpwave", "strongest rival", "ratio"]


def headline(documents: Documents) -> str:
    """The calls of a training loop against the strongest rival of each, libraries and what users write by hand."""
    replay = documents["replay"]
    assert replay is not None  # nothing is written without it
    rows = compared_rows(replay, KINDS)
    for kind, wanted in HEADLINE_FEATURES.items():
        if document := documents.get(kind):
            rows += compared_rows(document, CONTESTS, wanted)
    rows += window_rows(documents) + training_rows(documents)
    sizes = "; ".join(f"{KINDS[kind]}: {stored(workload)}" for kind, workload in replay["workloads"].items())
    return "\n\n".join([table(COMPARED, rows), small(f"Full buffers. {sizes}."), machine_line(replay)])


def compared_rows(document: Document, titles: dict[str, str], wanted: tuple[str, ...] = ()) -> list[list[str]]:
    rows = []
    for kind, workload in document["workloads"].items():
        for case in workload["cases"]:
            if (not wanted or case in wanted) and (row := compared(workload["cases"], case)):
                rows.append([f"{case_name(case)}, {titles[kind]}", *row])
    return rows


def window_rows(documents: Documents) -> list[list[str]]:
    windows = documents.get("windows")
    row = compared(at_size(windows, WINDOW_ROWS), "windows") if windows else None
    return [[drawn_windows(windows), *row]] if windows and row else []


def training_rows(documents: Documents) -> list[list[str]]:
    rows = []
    for training in (documents.get("training") or {}).get("trainings", {}).values():
        if row := compared({"step": training["cases"]}, "step"):
            rows.append([f"time in the buffer of a step, {training['title']}", *row])
    return rows


def features(documents: Documents) -> str:
    """The cases of each feature beside the strongest rival that has it; windows among a million rows."""
    measured = [document for kind in FEATURES if (document := documents.get(kind))]
    rows = [row for document in measured for row in compared_rows(document, CONTESTS)]
    rows += window_rows(documents) + training_rows(documents)
    return table(COMPARED, rows) + "\n\n" + machine_line(measured[0])


def stored(workload: Document) -> str:
    return f"{workload['capacity']:,} x ({workload['title']}), {size(workload['row_bytes'])} a row"


Columns = dict[str, dict[str, str]]  # by head, then by label


def contest(workload: Document, document: Document, how: str = "", more: Columns | None = None) -> str:
    """Every contender and every case of a contest; bold is the fastest that a user could choose."""
    cases, contenders = workload["cases"], workload["contenders"]
    seen = dict.fromkeys(label for times in cases.values() for label in times)
    # Who stands beside does so in the plain form alone.
    labels = [label for entrant in contenders for label in seen if entrant_of(label) == entrant]
    labels = [label for label in labels if not (is_beside(label) and "/" in label)]
    best = {case: fastest(cases, case, is_choice) for case in cases}
    rows = []
    for label in labels:
        cells = [cell(times.get(label), label == (best[case] or [""])[0]) for case, times in cases.items()]
        rows.append([title(label), *cells, *(column.get(label, "") for column in (more or {}).values())])
    parts = [
        f"Full buffers of {stored(workload)}." if "capacity" in workload else f"{workload['title']}.",
        table(["", *map(case_name, cases), *(more or {})], rows),
        *notes_and_versions(contenders),
        machine_line(document, how),
    ]
    return "\n\n".join(filter(None, parts))


def notes_and_versions(contenders: Document) -> tuple[str, str]:
    notes = [f"- {title(who)}: {about['note']}" for who, about in contenders.items() if about["note"]]
    # A set: the peers' environments hold different versions of what they share, such as NumPy.
    versions = {f"{k} {v}" for about in contenders.values() for k, v in about["versions"].items()}
    return "\n".join(notes), small(", ".join(sorted(versions)))


def cell(times: dict[str, float] | None, is_best: bool = False) -> str:
    if times is None:
        return ""
    least = duration(times["min_ns"])
    shown = f"**{least}**" if is_best else least
    return shown if times["bursts"] == 1 else f"{shown} ({duration(times['median_ns'])})"


def memory(document: Document) -> str:
    rows = []
    for kind, curves in document["workloads"].items():
        for contender, points in curves.items():
            for point in points:
                sizes = (size(point["raw_bytes"]), size(point["resident_bytes"]))
                beyond = f"{100 * point['beyond_raw']:+.1f}%"
                rows.append([title(contender), KINDS[kind], f"{point['rows']:,}", *sizes, beyond])
    head = ["", "kind", "rows", "raw", "resident", "beyond raw"]
    return table(head, rows) + "\n\n" + machine_line(document)


def footprints(document: Document) -> str:
    """Resident memory of each entrant's full buffer."""
    rows = []
    for label, point in document["memory"].items():
        count, raw, resident = point["rows"], point["raw_bytes"], point["resident_bytes"]
        rows.append([title(label), f"{count:,}", size(raw / count), size(resident / count), percent(resident / raw)])
    head = ["", "rows", "raw bytes a row", "resident a row", "of raw"]
    return table(head, rows) + "\n\n" + memory_line(document)


def memory_line(document: Document) -> str:
    return machine_line({**document, "settings": {"quick": document["settings"]["quick"]}})


def compression(document: Document) -> str:
    rows = []
    for film, workload in document["workloads"].items():
        points, cases = document["memory"].get(film, {}), workload["cases"]
        plain, plain_ns = points.get("sharpwave@plain"), minimum(cases, "sample_256", "sharpwave@plain")
        for label, point in points.items():
            taken, resident = cases["sample_256"].get(label), point["resident_bytes"]
            kept = [size(resident / point["rows"]), percent(resident / plain["resident_bytes"]) if plain else ""]
            slower = ratio(taken["min_ns"] / plain_ns) if taken and plain_ns else ""
            form = name(label).partition(", ")[2]
            rows.append([film, form, *kept, cell(taken), slower, cell(cases["add_1"].get(label))])
    head = ["frames", "kept", "bytes a row", "of stored", "sample(256)", "of stored", "add 1 row"]
    return table(head, rows) + "\n\n" + machine_line(document)


def crowds(form: str, document: Document) -> str:
    """Writers and a learner at once: rows a second and single calls, by rows an add."""
    settings, contenders = document["settings"], document["crowds"][form]["contenders"]
    parts = [f"Full buffers of {stored(document)}; every sample draws {document['batch']}."]
    for writers, title_of_it in ((1, "One writer and one learner:"), (2, "Two writers and one learner:")):
        rows = [row for count in (1, 64) for row in crowd_rows(form, document, count, writers)]
        verbs = ["add", "sample", *(["update"] if form == "prioritized" else [])]
        latencies = [f"{verb} p50, p99" for verb in verbs]
        parts += [title_of_it, table(["", "rows an add", *RATES.values(), *latencies], rows)]
    how = f"Median of {settings['slices']} interleaved slices of {settings['slice_s']:g} s, fewer with two writers"
    how += "; the lowest and the highest in brackets."
    return "\n\n".join(filter(None, [*parts, *notes_and_versions(contenders), machine_line(document, how)]))


def crowd_rows(form: str, document: Document, rows: int, writers: int) -> list[list[str]]:
    case, cells = crowd_case(document, form, rows, writers), []
    best = {rate: fastest_in_crowd(case, rate, lambda _: True) for rate in RATES}
    for label, figures in case.items():
        rates = [rate_cell(figures[rate], label == (best[rate] or [""])[0]) for rate in RATES]
        verbs = ("add", "sample", *(("update",) if form == "prioritized" else ()))
        cells.append([title(label), str(rows), *rates, *(latency_cell(figures, verb) for verb in verbs)])
    return cells


def rate_cell(rate: Document, is_best: bool) -> str:
    median = amount(rate["median"])
    return f"{f'**{median}**' if is_best else median} ({amount(rate['min'])} to {amount(rate['max'])})"


def latency_cell(figures: Document, verb: str) -> str:
    times = [figures.get(f"{verb}_p{share}_ns") for share in (50, 99)]
    return ", ".join(duration(time["median"]) for time in times if time)


def snapshot(document: Document) -> str:
    how = f"Minimum of {document['settings']['rounds']} interleaved calls, the median in brackets, or the only one; "
    how += f"files on {document['file_system']}, read while the system still has them in memory."
    more = {
        "size on disk": {label: size(count) for label, count in document["file_bytes"].items()},
        "memory besides, to save": {label: size(count) for label, count in document["save_memory"].items()},
    }
    return contest(document["workloads"]["snapshot"], document, how, more)


def open(document: Document) -> str:
    names = {
        "verified": "open, every row checked",
        "unverified": "open, verify=False",
        "close": "close, nothing changed",
        "read": "a read of the file, the limit",
    }
    rows = []
    for workload in document["workloads"].values():
        cases = workload["cases"]
        ratio = cases["verified"]["min_ns"] / cases["read"]["min_ns"]
        cells = [cell(cases[case]) for case in names]
        rows.append([f"{workload['title']}, {size(workload['file_bytes'])}", *cells, f"{ratio:.2f}x"])
    how = f"Minimum of {document['settings']['rounds']} interleaved calls, the median in brackets; files on "
    how += f"{document['file_system']}, read while the system still has them in memory."
    return "\n\n".join([table(["", *names.values(), "checked over the limit"], rows), machine_line(document, how)])


def trajectories(document: Document) -> str:
    how = f"Minimum of {document['settings']['rounds']} interleaved bursts, the median in brackets; ratios of minima."
    return f"{trajectory_rows(document['workloads']['trajectories'])}\n\n{machine_line(document, how)}"


def trajectory_rows(workload: Document) -> str:
    rows = []
    for case, summaries in workload["cases"].items():
        for label in (label for label in summaries if label.startswith("sharpwave")):
            ours, cells = summaries[label], []
            for rival in TRAJECTORY_RIVALS:
                theirs = summaries.get(rival)
                cells += [cell(theirs), ratio(theirs["min_ns"] / ours["min_ns"]) if theirs else ""]
            rows.append([TRAJECTORIES[case] + label.removeprefix("sharpwave"), cell(ours), *cells])
    heads = [head for called in TRAJECTORY_RIVALS.values() for head in (called, "ratio")]
    return table(["", "Sharpwave", *heads], rows)


def gpu_returns(document: Document) -> str:
    facts, bandwidth = document["machine"], document["copy_bytes_per_s"]
    labels = list(document["gae"][0]["cases"])
    rows = []
    for label in labels:
        times = [case["cases"][label] for case in document["gae"]]
        called = f"**{label.replace('sharpwave', 'Sharpwave')}**" if label.startswith("sharpwave") else label
        rows.append([called, *(f"{duration(one['min_ns'])} ({duration(one['median_ns'])})" for one in times)])
    graph = labels[-1]
    shares = [case["bytes"] / case["cases"][graph]["min_ns"] * 1e9 / bandwidth for case in document["gae"]]
    rows.append(["bytes moved by the last one, of what a copy moves", *map(percent, shares)])
    cycle = document["cycle"]
    kind = (
        f"{cycle['steps']} steps of {cycle['envs']} environments, {cycle['obs']} numbers seen, {cycle['actions']} done"
    )
    whole = [[label, f"{duration(t['min_ns'])} ({duration(t['median_ns'])})"] for label, t in cycle["cases"].items()]
    line = (
        f"{facts['gpu']}, a copy moves {figure(bandwidth / 1e12)} TB/s, torch {facts['torch']}, "
        f"Triton {facts['triton']}, Python {facts['python']}, {facts['date']}. "
        f"Minimum of {document['settings']['rounds']} interleaved slices of {document['settings']['slice_ms']:g} ms, "
        "the median in brackets; by events on the device around calls in a row."
    )
    head = ["", *(f"{case['steps']} x {case['envs']}" for case in document["gae"])]
    return "\n\n".join(
        [table(head, rows), f"A whole rollout and its returns: {kind}.", table(["", ""], whole), small(line)]
    )


def sequences(measured: Document) -> str:
    said = []
    calls = measured["capacities"]
    sizes = sorted({int(label.split()[1]) for label in calls})
    pairs = [(call, who) for call in SEQUENCE_CALLS for who in ("sharpwave", "scan")]

    def least(who: str, count: int, call: str) -> float:
        return calls[f"{who} {count}"][call]["min_ns"]

    head = ["capacity", *(f"{call}, {who.replace('sharpwave', 'Sharpwave')}" for call, who in pairs)]
    rows = [[f"{count:,}", *(duration(least(who, count, call)) for call, who in pairs)] for count in sizes]
    grown = [ratio(least(who, sizes[-1], call) / least(who, sizes[0], call)) for call, who in pairs]
    said.append(table(head, [*rows, ["largest / smallest", *grown]]))
    journal = measured["journal"]
    names = [*SEQUENCE_CALLS, "ack"]
    rows = [[label, *(duration(journal[label][call]["min_ns"]) for call in names)] for label in journal]
    said.append(table(["journal", *names], rows))
    if building := measured.get("building"):
        said.append(table(["256 samples of 64 tokens", ""], [[label, cell(one)] for label, one in building.items()]))
    if long := measured.get("long_puts"):
        rows = []
        for label, times in long.items():
            put, written = times[LONG_PUT], times["writing the bytes"]
            rows.append([label, cell(put), cell(written), ratio(put["min_ns"] / written["min_ns"])])
        said.append(table(["journal", "put of 256 x 2,048 tokens", "writing the bytes", "ratio"], rows))
    if putters := measured.get("putters"):
        rows = [[label, f"{amount(rate)} puts/s"] for label, rate in putters.items()]
        said.append(table(["putters that wait for the disk", "16 samples a put"], rows))
    crowd = measured["getters"]
    rows = [
        [kind, *(f"{amount(crowd[f'{kind} {many}'])} samples/s" for many in (1, 64))]
        for kind in ("coroutines", "threads")
    ]
    said.append(table(["getters", "1", "64"], rows))
    flows = measured["stream"]
    rows = [[form, f"{amount(one['samples_s'])}", f"{figure(one['bytes_s'] / 1e9)}"] for form, one in flows.items()]
    ours, theirs = flows["safetensors"], flows["lists in JSON"]
    rows.append(["ratio", ratio(ours["samples_s"] / theirs["samples_s"]), ratio(ours["bytes_s"] / theirs["bytes_s"])])
    said.append(table(["stream, 2048 tokens a sample", "samples/s", "GB/s"], rows))
    if "machine" in measured:  # printed by the benchmark itself, it has none yet
        said.append(machine_line(measured, f"Minimum of {measured['settings']['rounds']} calls in turn."))
    return "\n\n".join(said)


def service(document: Document) -> str:
    """Each call by each way beside a bare echo of the same bytes, and Reverb; then rates, images, and `direct`."""
    workload, settings = document["workloads"]["service"], document["service"]
    cases = workload["cases"]
    fixed = f"{settings['window']:,} rows on their way, {settings['ahead']} batches ahead"
    fixed += f", {settings['images_ahead']} of images."
    parts = [f"Full buffers of {stored(workload)}; {fixed}", table(["", "by", *SERVICE_HEAD], service_rows(cases))]
    rates = service_rates(cases)
    parts.append(table(["", *(f"{how}, a second" for how in WAYS.values()), "Reverb"], rates))
    rows = []
    for case, call in SERVICE_DIRECT.items():
        ours, shm = (cases[case][label] for label in ("sharpwave@direct", "sharpwave@shm"))
        rows.append([call, cell(ours), cell(shm), ratio(ours["min_ns"] / shm["min_ns"])])
    parts.append(table(["past the server", "direct", "shm://", "ratio"], rows))
    parts += notes_and_versions(workload["contenders"])
    if "machine" in document:  # printed by the benchmark itself, it has none yet
        parts.append(machine_line(document, "Minimum of calls in turn, the median in brackets; ratios of minima."))
    return "\n\n".join(filter(None, parts))


SERVICE_HEAD = ["Sharpwave", "bare echo", "ratio", "echo, copied first", "ratio", "price of keys"]


def service_rows(cases: Document) -> list[list[str]]:
    rows = []
    for case, what in SERVICE.items():
        plain = minimum(cases, case, "sharpwave@tcp")
        for way, how in WAYS.items():
            ours = cases[case][f"sharpwave@{way}"]
            echoes: list[str] = []
            for label in (f"echo@{way}", f"echo@{way}_fresh"):
                echo = cases[case].get(label)
                echoes += [cell(echo), ratio(ours["min_ns"] / echo["min_ns"])] if echo else ["", ""]
            price = ratio(ours["min_ns"] / plain) if way == "keys" and plain else ""
            rows.append([what, how, cell(ours), *echoes, price])
        if reverb := cases[case].get("reverb"):
            rows.append([what, name("reverb"), cell(reverb), "", "", "", "", ""])
    return rows


def service_rates(cases: Document) -> list[list[str]]:
    """Rows a second, and bytes a second of images."""
    rows = []
    for case, what, count in (("adds", "rows added", 1), ("batches_256", "rows drawn", 256)):
        labels = [*(f"sharpwave@{way}" for way in WAYS), "reverb"]
        rates = [amount(1e9 * count / ns) if (ns := minimum(cases, case, label)) else "" for label in labels]
        rows.append([what, *rates])
    for case, how in (("images", "one by one"), ("image_batches", "asked for ahead")):
        for who, called in (("sharpwave", "Sharpwave"), ("echo", "bare echo")):
            taken = [cases[case][f"{who}@{way}"] for way in WAYS]
            rates = [size(1e9 * one["bytes"] / one["min_ns"]) for one in taken]
            rows.append([f"bytes of images, {how}, {called}", *rates, ""])
    return rows


def gpu_line(document: Document) -> str:
    facts = document["machine"]
    return (
        f"{facts['gpu']}, torch {facts['torch']}, Triton {facts['triton']}, Python {facts['python']}, {facts['date']}. "
        "Minimum of interleaved slices, the median in brackets."
    )


def gpu_times(cases: list[Document], key: str) -> list[list[str]]:
    """A row a contender, a column a size."""
    rows = []
    for label in cases[0][key]:
        called = f"**{label.replace('sharpwave', 'Sharpwave')}**" if label.startswith("sharpwave") else label
        times = [case[key][label] for case in cases]
        rows.append([called, *(f"{duration(one['min_ns'])} ({duration(one['median_ns'])})" for one in times)])
    return rows


def gpu_replay(document: Document) -> str:
    parts = []
    for kind, key, title in GPU_TABLES:
        cases = document[kind]
        parts.append(table([title, *(f"{case['size']:,}" for case in cases)], gpu_times(cases, key)))
    return "\n\n".join([*parts, small(gpu_line(document))])


def gpu_direct(document: Document) -> str:
    direct, stacked = document["direct"], document["stacked"]
    link = direct["link_bytes_per_s"]
    parts = []
    for case, what in ((direct, "rows of images"), (stacked, "rows with stacks of frames")):
        rows = []
        for label, took in case["cases"].items():
            called = f"**{label.replace('sharpwave', 'Sharpwave')}**" if label.startswith("sharpwave") else label
            share = case["crossing_bytes"] / took["min_ns"] * 1e9 / link
            rows.append([called, f"{duration(took['min_ns'])} ({duration(took['median_ns'])})", percent(share)])
        made, crossing = (figure(case[key] / 1e6) for key in ("bytes", "crossing_bytes"))
        size = f"{made} MB" if made == crossing else f"{made} MB, of which {crossing} MB differ"
        parts.append(table([f"{case['size']} {what}, {size}", "", "of the link"], rows))
    fed = []
    for form, title in (("eager", "launched one by one"), ("graph", "as a CUDA graph")):
        one = direct["dqn"][form]
        times = [duration(one[key] * 1e9) for key in ("update_with_stream_s", "update_on_one_batch_s")]
        fed.append([title, *times, percent(one["waiting_share"]), duration(one["host_in_next_s"] * 1e9)])
    head = ["a DQN update on 256 images", "fed by stream()", "on one batch", "waiting for data", "host in next()"]
    line = f"The link carries {figure(link / 1e9)} GB/s. " + gpu_line(document)
    return "\n\n".join([*parts, table(head, fed), small(line)])


def drawn_windows(document: Document) -> str:
    return f"sample({document['windows']}) of {document['steps']} steps"


def windows(document: Document) -> str:
    notes = [f"- {title(label)}: {note}" for label, note in document["notes"].items() if note]
    curves, _, machine = scaling(document, drawn_windows(document)).rpartition("\n\n")
    return "\n\n".join([curves, "\n".join(notes), machine])


def scaling(document: Document, what: str = "sample(256)") -> str:
    sizes = sorted({int(rows) for curve in document["curves"].values() for rows in curve})
    rows = []
    for label, curve in document["curves"].items():
        grown = growth(curve)
        cells = [cell(curve.get(str(count))) for count in sizes]
        rows.append([title(label), *cells, ratio(grown) if grown else ""])
    head = [f"{what} among", *(f"{count:,} rows" for count in sizes), "10^7 over 10^5"]
    return table(head, rows) + "\n\n" + machine_line(document)


def forms_of_a_call(title: str, times: Document) -> list[list[str]]:
    """A row a form, each beside the first."""
    first = next(iter(times.values()))["min_ns"]
    cells = [[label, cell(one), ratio(one["min_ns"] / first)] for label, one in times.items()]
    return [[title if at == 0 else "", *row] for at, row in enumerate(cells)]


def inputs(document: Document) -> str:
    workload = document["workloads"]["inputs"]
    rows = [row for case, times in workload["cases"].items() for row in forms_of_a_call(input_case(case), times)]
    stored_rows = f"Full buffers of {workload['capacity']:,} x ({workload['title']})."
    versions = small(", ".join(f"{key} {value}" for key, value in workload["versions"].items()))
    return "\n\n".join(
        [stored_rows, table(["call", "given", "", "over the first"], rows), versions, machine_line(document)]
    )


def input_case(case: str) -> str:
    count = case.removeprefix("rollout_add_")
    return f"RolloutBuffer.add, {count} environments" if count != case else case_name(case)


def overheads(document: Document) -> str:
    rows = [row for one in document["workloads"].values() for row in forms_of_a_call(one["title"], one["cases"])]
    how = f"Minimum of up to {document['settings']['rounds']} turns, the median in brackets."
    return "\n\n".join([table(["", "", "", "over the first"], rows), machine_line(document, how)])


def masked(document: Document) -> str:
    times, shares = document["times"], document["shares"]
    labels = dict.fromkeys(f"{contender_of(label)}/{label.partition('/')[2]}".rstrip("/") for label in times)
    rows = []
    for label in labels:
        contender, _, variant = label.partition("/")
        found = [times.get(f"{contender}@{share}" + (f"/{variant}" if variant else "")) for share in shares]
        rows.append([title(label), *map(cell, found)])
    head = ["sample(256), rows left out:", *(f"{share}%" for share in shares)]
    capacity = f"{document['capacity']:,} rows stored; which ones are left out is random."
    notes = {label.partition("@")[0]: about for label, about in document["contenders"].items()}
    return "\n\n".join([capacity, table(head, rows), *notes_and_versions(notes), machine_line(document)])


def training(document: Document) -> str:
    trainings = document["trainings"].values()
    labels = dict.fromkeys(label for one in trainings for label in one["cases"])
    rows = []
    for label in labels:
        cells = []
        for one in trainings:
            times, best = one["cases"].get(label), fastest({"step": one["cases"]}, "step", is_choice)
            share = f", {percent(times['share'])}" if times else ""
            cells.append(cell(times, label == (best or [""])[0]) + share)
        rows.append([title(label), *cells])
    steps = [duration(min(times["step_ns"] for times in one["cases"].values())) for one in trainings]
    about = {label: facts for one in trainings for label, facts in one["contenders"].items()}
    how = f"Minimum of {document['settings']['rounds']} interleaved bursts of steps, the median in brackets, then the "
    how += "share of the whole step; one thread of torch for everybody."
    head = ["time in the buffer of a step", *(one["title"] for one in trainings)]
    parts = [
        "\n".join(
            f"- {one['title']}: full buffers of {one['stored']}; a whole step from {took} on"
            for one, took in zip(trainings, steps, strict=True)
        ),
        table(head, rows),
        *notes_and_versions(about),
        machine_line(document, how),
    ]
    return "\n\n".join(filter(None, parts))


def seed_targets(document: Document) -> str:
    rows = []
    for entry in document["lines"]:
        times = [duration(entry[key]) for key in ("p50_ns", "p99_ns", "min_ns")]
        rows.append([entry["name"], str(entry["target"]), *times, figure(entry["per_second"])])
    head = ["C++ API", "target", "p50", "p99", "min", "a second"]
    return table(head, rows) + "\n\n" + machine_line(document, "Single calls; adds a hundred at a time.")


def goals(verdicts: list[Verdict]) -> str:
    words = {True: "held", False: "**not held**", None: "-"}
    return table(["goal", "measured", ""], [[v.goal, v.measured, words[v.held]] for v in verdicts])


def wins(documents: Documents, verdicts: list[Verdict]) -> str:
    """Every line that somebody else wins and every goal missed, from the results: both sides in their fastest form."""
    measured = [document for document in documents.values() if document]
    lines = []
    for what, ours, theirs in lost(documents):
        told = ", ".join(f"{name(label)} {duration(ns)} ({ratio(ours / ns)})" for label, ns in theirs.items())
        lines.append(f"- {what}: Sharpwave {duration(ours)}; faster: {told}.")
    lines += memory_wins(documents)
    if processes := documents.get("processes"):
        lines += crowd_wins(processes)
    lines += [f"- Goal not held: {v.goal}; measured {v.measured}." for v in verdicts if v.held is False]
    lines += [f"- Not measured: {v.goal}." for v in verdicts if v.held is None]
    left_out = [line for document in measured for line in document.get("left_out", [])]
    lines += [f"- Left out: {line['who']} ({line['reason']})." for line in left_out]
    return "\n".join(lines) or "- In this run nobody was faster in any case, and every goal held."


def lost(documents: Documents) -> Iterator[tuple[str, float, dict[str, float]]]:
    """The lines of all tables of times, where the fastest that a user could choose is not ours: our time, and that of
    everybody who is faster, each in its fastest form."""
    for what, ours, theirs in duels(documents):
        faster: dict[str, str] = {}
        for label in sorted(theirs, key=theirs.__getitem__):
            if ours and theirs[label] < min(ours):
                faster.setdefault(contender_of(label), label)
        if faster:
            yield what, min(ours), {label: theirs[label] for label in faster.values()}


Duel = tuple[str, list[float], dict[str, float]]  # what, our times, the rivals' by label


def duel(what: str, times: Document, is_one_of_us: Callable[[str], bool], is_other: Callable[[str], bool]) -> Duel:
    least = {label: one["min_ns"] for label, one in times.items()}
    others = {label: ns for label, ns in least.items() if is_other(label)}
    return what, [ns for label, ns in least.items() if is_one_of_us(label)], others


def duels(documents: Documents) -> Iterator[Duel]:
    """Everybody's times of every line that has a rival in it."""
    for document in filter(None, documents.values()):
        for kind, workload in document.get("workloads", {}).items():
            # The documents about memory have other things there.
            for case in workload.get("cases", {}) if kind in CONTESTS else ():
                if case not in BESIDE_CASES:
                    yield duel(f"{case_name(case)}, {CONTESTS[kind]}", workload["cases"][case], is_ours, is_rival)
    for kind, what in (("windows", "windows of 80 steps"), ("scaling", "sample(256)")):
        curves = (documents.get(kind) or {}).get("curves", {})
        for rows in sorted({int(count) for curve in curves.values() for count in curve}):
            times = {label: curve[str(rows)] for label, curve in curves.items() if str(rows) in curve}
            yield duel(f"{what} among {rows:,} rows", times, is_ours, is_rival)
    if masked := documents.get("masked"):
        for share in masked["shares"]:
            here = {
                label.replace(f"@{share}", ""): times
                for label, times in masked["times"].items()
                if entrant_of(label).endswith(f"@{share}")
            }
            yield duel(f"sample(256), {share}% of the rows left out", here, is_ours, is_rival)
    for training in (documents.get("training") or {}).get("trainings", {}).values():
        yield duel(f"time in the buffer of a step, {training['title']}", training["cases"], is_ours, is_rival)
    trajectories = (documents.get("trajectories") or {}).get("workloads", {}).get("trajectories", {"cases": {}})
    for case, times in trajectories["cases"].items():
        yield duel(f"trajectories, {TRAJECTORIES[case]}", times, begins_ours, begins_theirs)
    yield from overhead_duels(documents)
    yield from sequence_duels(documents.get("sequences"))
    yield from service_duels(documents.get("service"))
    yield from gpu_duels(documents)


def begins_ours(label: str) -> bool:
    return label.startswith("sharpwave")


def begins_theirs(label: str) -> bool:
    return not begins_ours(label)


def overhead_duels(documents: Documents) -> Iterator[Duel]:
    """A loop by hand beside collect, the buffers of Stable-Baselines3 beside ours, arrays and tensors by hand."""
    rollouts = (documents.get("inputs") or {}).get("workloads", {}).get("inputs", {"cases": {}})["cases"]
    for case in (case for case in rollouts if case.startswith("rollout")):
        yield duel(input_case(case), rollouts[case], lambda label: not is_sb3(label), is_sb3)
    for key, one in (documents.get("overheads") or {}).get("workloads", {}).items():
        if key.startswith(("collect", "sb3", "rows", "minibatches")):
            yield duel(one["title"], one["cases"], is_of_the_package, lambda label: not is_of_the_package(label))


def is_sb3(label: str) -> bool:
    return label == "Stable-Baselines3"


def is_of_the_package(label: str) -> bool:
    return label.startswith(("sw.", "sharpwave"))


def sequence_duels(document: Document | None) -> Iterator[Duel]:
    calls = (document or {}).get("capacities", {})
    for label in (label for label in calls if label.startswith("scan")):
        capacity = label.split()[1]
        for call in SEQUENCE_CALLS:
            times = {who: calls[f"{who} {capacity}"][call] for who in ("scan", "sharpwave")}
            yield duel(f"sequences, {call} at a capacity of {int(capacity):,}", times, begins_ours, begins_theirs)


def service_duels(document: Document | None) -> Iterator[Duel]:
    cases = (document or {}).get("workloads", {}).get("service", {}).get("cases", {})
    for case, what in SERVICE.items():
        if case in cases:
            yield duel(f"at a server, {what}", cases[case], is_ours, is_rival)


def gpu_duels(documents: Documents) -> Iterator[Duel]:
    replay = documents.get("gpu_replay") or {}
    for kind, key, what in GPU_TABLES:
        for case in replay.get(kind, []):
            yield duel(f"on a GPU, {what} {case['size']:,}", case[key], begins_ours, begins_theirs)
    for kind, what in (("direct", "rows of images"), ("stacked", "rows with stacks of frames")):
        if case := replay.get(kind):
            yield duel(f"{case['size']} {what} to a GPU", case["cases"], begins_ours, begins_theirs)
    for case in (documents.get("llm_generation") or {}).get("contests", []):
        what = f"generation, {case['model']}, {case['batch']} side by side"
        yield duel(what, case["cases"], begins_ours, begins_theirs)
    for case in (documents.get("gpu_returns") or {}).get("gae", []):
        yield duel(f"GAE on a GPU, {case['steps']} x {case['envs']}", case["cases"], begins_ours, begins_theirs)


def memory_wins(documents: Documents) -> list[str]:
    """Whose full buffers are smaller. Sizes that read the same are the same."""
    found: list[tuple[str, Document, Document]] = []
    for kind, curves in (documents.get("memory") or {}).get("workloads", {}).items():
        for ours in curves.get("sharpwave", []):
            same = {who: p for who, points in curves.items() for p in points if p["rows"] == ours["rows"]}
            found.append((f"{KINDS[kind]}, {ours['rows']:,}", same, ours))
    for kind in FEATURES:
        points = (documents.get(kind) or {}).get("memory", {})
        if "sharpwave" in points:
            found.append((CONTESTS[kind], points, points["sharpwave"]))
    lines = []
    for what, points, ours in found:
        a_row = {label: point["resident_bytes"] / point["rows"] for label, point in points.items() if is_rival(label)}
        own = ours["resident_bytes"] / ours["rows"]
        told = [
            f"{name(label)} {size(a_row[label])} ({ratio(own / a_row[label])})"
            for label in sorted(a_row, key=a_row.__getitem__)
            if a_row[label] < own and size(a_row[label]) != size(own)
        ]
        if told:
            lines.append(f"- memory, {what}: Sharpwave {size(own)} a row; less: {', '.join(told)}.")
    return lines


def crowd_wins(document: Document) -> list[str]:
    lines = []
    for form in CROWDS:
        for writers in (1, 2):
            for rows in (1, 64):
                case = crowd_case(document, form, rows, writers)
                for rate, what in RATES.items():
                    ours, rival = seconds_a_row(case, rate, "sharpwave"), fastest_in_crowd(case, rate, is_rival)
                    if ours and rival and rival[1] < ours:
                        lines.append(
                            f"- {what}, {form}, writers: {writers}, rows an add: {rows}: {name(rival[0])} has more, "
                            f"{amount(1 / rival[1])} against {amount(1 / ours)}."
                        )
    return lines
