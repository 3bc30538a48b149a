"""Plots from results, as PNG files that read well on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed or asked for

import matplotlib.pyplot as plt
from goals import MOST_BEYOND_RAW, WINDOW_ROWS, Documents, at_size, crowd_case
from harness.contest import contender_of
from harness.results import Document, amount, duration, size
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from names import CONTESTS, CROWDS, KINDS, RATES, case_name, is_beside, is_rival, name
from tables import drawn_windows

OURS, RING, LIMIT, LIBRARY, BESIDE = "#d1495b", "#00798c", "#2b2d42", "#8d99ae", "#e9b4bb"
ROLE_COLORS = {"sharpwave": OURS, "numpy_ring": RING, "torch_ring": RING, "c_limit": LIMIT}
LINE_COLORS = ROLE_COLORS | {
    "cpprb": "#edae49",
    "sb3": LIBRARY,
    "torchrl": LIBRARY,
    "rlox": "#7a5195",
    "flashbax": "#66a182",
}
STRONGEST = 6  # rivals in the first chart, each in its fastest form
# One bar or line a contender, two where users choose between two forms.
LEFT_OUT = ("empty_loop", "engine")
LEFT_OUT_VARIANTS = ("keyword", "torch")
PANELS = {"add_1": "add one row", "sample_256": "sample a batch of 256"}
FEATURES = (
    ("prioritized", "sample_256"),
    ("prioritized", "update_256"),
    ("nstep", "sample_256"),
    ("hindsight", "sample_256"),
    ("frames", "sample_256"),
)


def is_shown(label: str) -> bool:
    beside = is_beside(label) and "/" in label
    return label not in LEFT_OUT and label.partition("/")[2] not in LEFT_OUT_VARIANTS and not beside


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # White, not transparent: dark text on a dark page cannot be read.
    figure.savefig(path, dpi=160, facecolor="white", bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def short(text: str) -> str:
    """A number as an axis shows it: `10 µs`, not `10.0 µs`."""
    value, unit = text.split()
    return f"{float(value.replace(',', '')):g} {unit}"


def short_duration(ns: float, _position: float = 0) -> str:
    return short(duration(ns))


def short_size(count: float, _position: float = 0) -> str:
    return short(size(count))


def bars(axes: Axes, title: str, times: dict[str, dict[str, float]]) -> None:
    """One bar for each entry, the fastest at the top."""
    shown = {label: entry["min_ns"] for label, entry in times.items() if is_shown(label)}
    labels = sorted(shown, key=shown.__getitem__, reverse=True)
    draw_bars(axes, title, {label: shown[label] for label in labels}, duration)
    axes.xaxis.set_major_formatter(short_duration)
    axes.set_xlabel("time of a call, minimum, log scale; shorter is better", fontsize=9)


def rate_bars(axes: Axes, title: str, rates: dict[str, float]) -> None:
    """One bar for each entry, the fastest at the top."""
    draw_bars(axes, title, {label: rates[label] for label in sorted(rates, key=rates.__getitem__)}, amount)
    axes.xaxis.set_major_formatter(lambda value, _position: amount(value).replace(".00", "").replace(".0", ""))
    axes.set_xlabel("rows a second, median, log scale; longer is better", fontsize=9)


def draw_bars(axes: Axes, title: str, shown: dict[str, float], text: Callable[[float], str]) -> None:
    labels, lengths = list(shown), list(shown.values())
    colors = [BESIDE if is_beside(label) else ROLE_COLORS.get(contender_of(label), LIBRARY) for label in labels]
    drawn = axes.barh([name(label) for label in labels], lengths, color=colors)
    axes.bar_label(drawn, [text(length) for length in lengths], padding=4, fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(min(lengths) / 2, max(lengths) * 6)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    plain(axes)
    axes.grid(visible=False, axis="y")


def processes(document: Document, path: Path) -> None:
    """One writer and one learner at once, 64 rows an add."""
    figure, grid = plt.subplots(len(CROWDS), 2, figsize=(12, 3.4 * len(CROWDS)), layout="constrained")
    for form, row in zip(CROWDS, grid, strict=True):
        case = crowd_case(document, form, rows=64, writers=1)
        for axes, (rate, what) in zip(row, RATES.items(), strict=True):
            # A log scale has no place for nothing at all.
            rates = {label: figures[rate]["median"] for label, figures in case.items() if figures[rate]["median"]}
            if rates:
                rate_bars(axes, f"{what}, {form}", rates)
            else:
                axes.set_visible(False)
    caption(figure, document, f"a writer, 64 rows an add, and a learner, {document['batch']} rows a sample, at once")
    save(figure, path)


def caption(figure: Figure, document: Document, what: str) -> None:
    facts = document["machine"]
    figure.supxlabel(f"{what}; {facts['cpu']}, {facts['date']}", fontsize=8, color="#555")


def strongest(times: Document) -> Document:
    """All of ours and the limits; of the rivals the fastest few, libraries and what users write by hand."""
    kept: dict[str, str] = {}
    for label in sorted(filter(is_rival, times), key=lambda label: times[label]["min_ns"]):
        kept.setdefault(contender_of(label), label)
    chosen = list(kept.values())[:STRONGEST]
    return {label: entry for label, entry in times.items() if not is_rival(label) or label in chosen}


def headline(replay: Document, path: Path) -> None:
    workload = replay["workloads"]["w1"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, (case, title) in zip(panels, PANELS.items(), strict=True):
        bars(axes, title, strongest(workload["cases"][case]))
    caption(figure, replay, f"{workload['capacity']:,} small rows, called from Python")
    save(figure, path)


def feature_panels(documents: Documents) -> list[tuple[str, Document, Document]]:
    """Title, times and origin of each panel of `features` that was measured."""
    panels = []
    for contest, case in FEATURES:
        document = documents.get(contest)
        times = (document or {}).get("workloads", {}).get(contest, {}).get("cases", {}).get(case)
        if document and times:
            panels.append((f"{case_name(case)}, {CONTESTS[contest]}", times, document))
    if document := documents.get("windows"):
        times = at_size(document, WINDOW_ROWS)["windows"]
        panels += [(drawn_windows(document), times, document)] if times else []
    return panels


def features(panels: list[tuple[str, Document, Document]], path: Path) -> None:
    rows = (len(panels) + 1) // 2
    figure, grid = plt.subplots(rows, 2, figsize=(12, 3.6 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, times, _) in zip(grid.flat, panels, strict=False):
        bars(axes, title, times)
    caption(figure, panels[0][2], "full buffers, called from Python")
    save(figure, path)


def memory(document: Document, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
    for axes, (workload, kind) in zip(panels, KINDS.items(), strict=True):
        for contender, points in document["workloads"].get(workload, {}).items():
            rows = [point["rows"] for point in points]
            beyond = [100 * point["beyond_raw"] for point in points]
            axes.plot(rows, beyond, marker="o", label=name(contender), color=LINE_COLORS[contender])
        goal = 100 * MOST_BEYOND_RAW
        axes.axhline(goal, color=LIMIT, linestyle=":", linewidth=1, label=f"goal: at most {goal:g}%")
        axes.set_xscale("log")
        axes.set_title(kind, loc="left", fontsize=12, fontweight="bold")
        axes.set_xlabel("rows in a full buffer")
        plain(axes)
    panels[0].set_ylabel("resident memory\nbeyond the raw bytes, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    save(figure, path)


def windows(document: Document, path: Path) -> None:
    scaling(document, path, drawn_windows(document))


def scaling(document: Document, path: Path, what: str = "sample(256)") -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for label, curve in document["curves"].items():
        if not is_shown(label) or ("@" in label and "/" in label):
            continue
        rows = sorted(map(int, curve))
        times = [curve[str(count)]["min_ns"] for count in rows]
        style = "--" if "/" in label else ":" if "@" in label else "-"
        axes.plot(rows, times, style, marker="o", label=name(label), color=LINE_COLORS[contender_of(label)])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(short_duration)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("rows stored")
    axes.set_ylabel(f"{what}, minimum")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    plain(axes)
    save(figure, path)


def compression(document: Document, path: Path) -> None:
    """Down and to the left is better: fewer bytes, less time."""
    films = document["workloads"]
    figure, panels = plt.subplots(
        1, len(films), figsize=(3.6 * len(films) + 1.6, 3.8), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (film, workload) in zip(panels.flat, films.items(), strict=True):
        times, points = workload["cases"]["sample_256"], document["memory"].get(film, {})
        for prefix, title, color in (("", "both stored", LIBRARY), ("stacked", "each frame once", OURS)):
            labels = [f"sharpwave@{form}" for form in (prefix or "plain", *packed_forms(prefix))]
            known = [label for label in labels if label in times and label in points]
            kept = [points[label]["resident_bytes"] / points[label]["rows"] for label in known]
            taken = [times[label]["min_ns"] for label in known]
            axes.plot(kept, taken, marker="o", color=color, label=title)
            for label, x, y in zip(known, kept, taken, strict=True):
                how = next((word for word in ("lz4", "zstd") if label.endswith(word)), "none")
                axes.annotate(how, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(short_size)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(short_duration)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(film, loc="left", fontsize=12, fontweight="bold")
        axes.set_xlabel("resident bytes a row")
        plain(axes)
    panels.flat[0].set_ylabel("sample(256), minimum")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    save(figure, path)


def packed_forms(prefix: str) -> list[str]:
    return ["_".join(filter(None, (prefix, codec))) for codec in ("lz4", "zstd")]
