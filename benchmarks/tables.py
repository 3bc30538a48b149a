"""Markdown tables from results. One function a table; none of them measures anything."""

from __future__ import annotations

from goals import Documents, Verdict, fastest, fastest_library, fastest_ring, growth, minimum, percent
from harness.contest import contender_of
from harness.results import Document, duration, figure, ratio, size
from names import CONTESTS, KINDS, case_name, entrant_of, is_beside, is_choice, is_rival, is_yardstick, name

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


def machine_line(document: Document) -> str:
    facts, settings = document["machine"], document["settings"]
    text = (
        f"{facts['cpu']}, {facts['cores']} cores, {figure(facts['memory_gib'])} GiB, "
        f"Linux {facts['kernel']}, huge pages: {facts['huge_pages']}, "
        f"Python {facts['python']}, {facts['date']}."
    )
    if "rounds" in settings:
        text += f" Minimum of {settings['rounds']} interleaved bursts of {settings['burst_ms']:g} ms"
        text += "; the median, where given, in brackets."
    return small(text + (" A quick run: a look, not a result." if settings["quick"] else ""))


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


def contest(workload: Document, document: Document) -> str:
    """Every contender and every case of one kind of row; bold is the fastest that a user could choose."""
    cases, contenders = workload["cases"], workload["contenders"]
    seen = dict.fromkeys(label for times in cases.values() for label in times)
    # Who stands beside does so in the plain form alone.
    labels = [label for entrant in contenders for label in seen if entrant_of(label) == entrant]
    labels = [label for label in labels if not (is_beside(label) and "/" in label)]
    best = {case: fastest(cases, case, is_choice) for case in cases}
    rows = []
    for label in labels:
        cells = [cell(times.get(label), label == (best[case] or [""])[0]) for case, times in cases.items()]
        rows.append([title(label), *cells])
    notes = [f"- {title(who)}: {about['note']}" for who, about in contenders.items() if about["note"]]
    # A set: the peers' environments hold different versions of what they share, such as NumPy.
    versions = {f"{k} {v}" for about in contenders.values() for k, v in about["versions"].items()}
    parts = [
        f"Full buffers of {stored(workload)}.",
        table(["", *map(case_name, cases)], rows),
        "\n".join(notes),
        small(", ".join(sorted(versions))),
        machine_line(document),
    ]
    return "\n\n".join(filter(None, parts))


def cell(times: dict[str, float] | None, is_best: bool = False) -> str:
    if times is None:
        return ""
    least = duration(times["min_ns"])
    return f"{f'**{least}**' if is_best else least} ({duration(times['median_ns'])})"


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
        for case in cases:
            ours, rival = minimum(cases, case, "sharpwave"), fastest(cases, case, is_rival)
            if ours and rival and rival[1] < ours:
                lines.append(
                    f"- {case_name(case)}, {kind}: {name(rival[0])} is faster, {duration(rival[1])} "
                    f"against {duration(ours)} ({ratio(ours / rival[1])})."
                )
    lines += [f"- Goal not held: {v.goal}; measured {v.measured}." for v in verdicts if v.held is False]
    lines += [f"- Not measured: {v.goal}." for v in verdicts if v.held is None]
    left_out = [line for document in measured for line in document["left_out"]]
    lines += [f"- Left out: {line['who']} ({line['reason']})." for line in left_out]
    return "\n".join(lines) or "- In this run nobody was faster in any case, and every goal held."
