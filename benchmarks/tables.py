"""Markdown tables from results. One function a table; none of them measures anything."""

from __future__ import annotations

from goals import (
    Documents,
    Verdict,
    crowd_case,
    fastest,
    fastest_in_crowd,
    fastest_library,
    fastest_ring,
    growth,
    minimum,
    percent,
    plain_over_ours,
    seconds_a_row,
)
from harness.contest import contender_of
from harness.results import Document, amount, duration, figure, ratio, size
from names import (
    BESIDE_CASES,
    CONTESTS,
    CROWDS,
    KINDS,
    RATES,
    TRAJECTORIES,
    case_name,
    entrant_of,
    is_beside,
    is_choice,
    is_rival,
    is_yardstick,
    name,
)

# The benchmarks of features that a contest measures, in the order of the table.
FEATURES = ("prioritized", "nstep", "hindsight", "frames")
WINDOW_ROWS = 1_000_000


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
        f"Python {facts['python']}, {facts['date']}."
    )
    if "burst_ms" in settings and not how:
        how = f"Minimum of {settings['rounds']} interleaved bursts of {settings['burst_ms']:g} ms"
        how += "; the median, where given, in brackets."
    return small(" ".join(filter(None, (text, how, "A quick run: a look, not a result." if settings["quick"] else ""))))


def headline(replay: Document) -> str:
    rows = []
    for kind, workload in replay["workloads"].items():
        for case in workload["cases"]:
            if row := headline_row(workload["cases"], case):
                rows.append([f"{case_name(case)}, {KINDS[kind]}", *row])
    head = ["operation", "Sharpwave", "fastest peer library", "ratio", "NumPy ring", "ratio"]
    sizes = "; ".join(f"{KINDS[kind]}: {stored(workload)}" for kind, workload in replay["workloads"].items())
    return "\n\n".join([table(head, rows), small(f"Full buffers. {sizes}."), machine_line(replay)])


def headline_row(cases: Document, case: str) -> list[str] | None:
    ours = minimum(cases, case, "sharpwave")
    if ours is None:
        return None
    peer, ring = fastest_library(cases, case), fastest_ring(cases, case)
    row = [duration(ours)]
    row += [f"{duration(peer[1])} ({name(peer[0])})", ratio(peer[1] / ours)] if peer else ["not measured", ""]
    row += [duration(ring[1]), ratio(ring[1] / ours)] if ring else ["not measured", ""]
    return row


def features(documents: Documents) -> str:
    """The cases of each feature beside the fastest peer that has it; windows among a million rows."""
    rows, measured = [], [document for kind in FEATURES if (document := documents.get(kind))]
    for document in measured:
        for kind, workload in document["workloads"].items():
            for case in workload["cases"]:
                if row := headline_row(workload["cases"], case):
                    rows.append([f"{case_name(case)}, {CONTESTS[kind]}", *row[:3]])
    if (windows := documents.get("windows")) and (row := headline_row(at_size(windows, WINDOW_ROWS), "windows")):
        measured.append(windows)
        rows.append([drawn_windows(windows), *row[:3]])
    head = ["operation", "Sharpwave", "fastest peer library", "ratio"]
    return table(head, rows) + "\n\n" + machine_line(measured[0])


def at_size(document: Document, count: int) -> Document:
    """The curves' times at one number of rows, as a case."""
    return {"windows": {label: curve[str(count)] for label, curve in document["curves"].items() if str(count) in curve}}


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
    how = f"Minimum of {document['settings']['rounds']} interleaved bursts, the median in brackets; "
    how += "the ratio of adds is that of the medians."
    return f"{trajectory_rows(document['workloads']['trajectories'])}\n\n{machine_line(document, how)}"


def trajectory_rows(workload: Document) -> str:
    cases, rows = workload["cases"], []
    for case, summaries in cases.items():
        plain = summaries.get("plain torch")
        for label, ours in summaries.items():
            if label == "plain torch":
                continue
            cells = [
                f"{duration(one['min_ns'])} ({duration(one['median_ns'])})" if one else "" for one in (plain, ours)
            ]
            faster = plain_over_ours(cases, case, label)
            rows.append([TRAJECTORIES[case] + label.removeprefix("sharpwave"), *cells, ratio(faster) if faster else ""])
    return table(["", "RLinf's algorithm in torch", "Sharpwave", "times faster"], rows)


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
    calls_of = ("put", "get", "amend")
    said = []
    calls = measured["capacities"]
    sizes = sorted({int(label.split()[1]) for label in calls})
    head = ["capacity", *(f"{call}, {who}" for call in calls_of for who in ("Sharpwave", "scan"))]
    rows = [
        [
            f"{size:,}",
            *(
                duration(calls[f"{who} {size}"][call]["median_ns"])
                for call in calls_of
                for who in ("sharpwave", "scan")
            ),
        ]
        for size in sizes
    ]
    grown = ["largest / smallest"]
    for call in calls_of:
        for who in ("sharpwave", "scan"):
            big, small = (calls[f"{who} {size}"][call]["median_ns"] for size in (sizes[-1], sizes[0]))
            grown.append(ratio(big / small))
    said.append(table(head, [*rows, grown]))
    journal = measured["journal"]
    names = [*calls_of, "ack"]
    rows = [[label, *(duration(journal[label][call]["median_ns"]) for call in names)] for label in journal]
    said.append(table(["journal", *names], rows))
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
    return "\n\n".join(said)


def gpu_line(document: Document) -> str:
    facts = document["machine"]
    return (
        f"{facts['gpu']}, torch {facts['torch']}, Triton {facts['triton']}, Python {facts['python']}, {facts['date']}. "
        "Medians of interleaved slices, the minimum in brackets."
    )


def gpu_times(cases: list[Document], key: str) -> list[list[str]]:
    """A row a contender, a column a size."""
    rows = []
    for label in cases[0][key]:
        called = f"**{label.replace('sharpwave', 'Sharpwave')}**" if label.startswith("sharpwave") else label
        times = [case[key][label] for case in cases]
        rows.append([called, *(f"{duration(one['median_ns'])} ({duration(one['min_ns'])})" for one in times)])
    return rows


def gpu_replay(document: Document) -> str:
    parts = []
    for kind, key, title in (
        ("uniform", "cases", "uniform draws of"),
        ("priority", "cases", "draws by priority of"),
        ("priority", "update", "new priorities for"),
        ("add", "cases", "rows added at once:"),
    ):
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
            share = case["crossing_bytes"] / took["median_ns"] * 1e9 / link
            rows.append([called, f"{duration(took['median_ns'])} ({duration(took['min_ns'])})", percent(share)])
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


def seed_targets(engine: list[Document]) -> str:
    rows = []
    for entry in engine:
        times = [duration(entry[key]) for key in ("p50_ns", "p99_ns", "min_ns")]
        rows.append([entry["name"], str(entry["target"]), *times, figure(entry["per_second"])])
    return table(["C++ API", "target", "p50", "p99", "min", "a second"], rows)


def goals(verdicts: list[Verdict]) -> str:
    words = {True: "held", False: "**not held**", None: "-"}
    return table(["goal", "measured", ""], [[v.goal, v.measured, words[v.held]] for v in verdicts])


def wins(documents: Documents, verdicts: list[Verdict]) -> str:
    """Where a rival is faster and which goals are missed: what one would rather not write by hand."""
    lines, measured = [], [document for document in documents.values() if document]
    contests = [
        (CONTESTS[kind], workload["cases"])
        for document in measured
        for kind, workload in document.get("workloads", {}).items()
        if kind in CONTESTS and "cases" in workload
    ]
    for kind, cases in contests:
        for case in (case for case in cases if case not in BESIDE_CASES):
            ours, rival = minimum(cases, case, "sharpwave"), fastest(cases, case, is_rival)
            if ours and rival and rival[1] < ours:
                lines.append(
                    f"- {case_name(case)}, {kind}: {name(rival[0])} is faster, {duration(rival[1])} "
                    f"against {duration(ours)} ({ratio(ours / rival[1])})."
                )
    if processes := documents.get("processes"):
        lines += crowd_wins(processes)
    lines += [f"- Goal not held: {v.goal}; measured {v.measured}." for v in verdicts if v.held is False]
    lines += [f"- Not measured: {v.goal}." for v in verdicts if v.held is None]
    left_out = [line for document in measured for line in document["left_out"]]
    lines += [f"- Left out: {line['who']} ({line['reason']})." for line in left_out]
    return "\n".join(lines) or "- In this run nobody was faster in any case, and every goal held."


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
