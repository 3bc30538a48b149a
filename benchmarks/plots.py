"""Plots from results, as PNG files that read well on a light and on a dark page."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed or asked for

import matplotlib.pyplot as plt
from goals import MOST_BEYOND_RAW
from harness.results import Document, duration
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from names import KINDS, contender_of, name

OURS, RING, LIMIT, LIBRARY = "#d1495b", "#00798c", "#2b2d42", "#8d99ae"
ROLE_COLORS = {"sharpwave": OURS, "numpy_ring": RING, "c_limit": LIMIT}
LINE_COLORS = ROLE_COLORS | {"cpprb": "#edae49", "sb3": LIBRARY}
# One bar or line a contender, two where users choose between two forms.
LEFT_OUT = ("empty_loop", "engine", "sharpwave/keyword", "sharpwave/torch")
PANELS = {"add_1": "add one row", "sample_256": "sample a batch of 256"}


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # White, not transparent: dark text on a dark page cannot be read.
    figure.savefig(path, dpi=160, facecolor="white", bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def short_duration(ns: float, _position: float = 0) -> str:
    """A power of ten as an axis shows it: `10 µs`, not `10.0 µs`."""
    value, unit = duration(ns).split()
    return f"{float(value):g} {unit}"


def headline(replay: Document, path: Path) -> None:
    cases = replay["workloads"]["w1"]["cases"]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, (case, title) in zip(panels, PANELS.items(), strict=True):
        shown = {label: times["min_ns"] for label, times in cases[case].items() if label not in LEFT_OUT}
        labels = sorted(shown, key=shown.__getitem__, reverse=True)
        lengths = [shown[label] for label in labels]
        colors = [ROLE_COLORS.get(contender_of(label), LIBRARY) for label in labels]
        bars = axes.barh([name(label) for label in labels], lengths, color=colors)
        axes.bar_label(bars, [duration(length) for length in lengths], padding=4, fontsize=9)
        axes.set_xscale("log")
        axes.set_xlim(min(lengths) / 2, max(lengths) * 6)
        axes.xaxis.set_major_formatter(short_duration)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
        axes.set_xlabel("time of a call, minimum, log scale; shorter is better", fontsize=9)
        axes.tick_params(axis="y", length=0)
        plain(axes)
        axes.grid(visible=False, axis="y")
    facts, capacity = replay["machine"], replay["workloads"]["w1"]["capacity"]
    where = f"{capacity:,} small rows, called from Python; {facts['cpu']}, {facts['date']}"
    figure.supxlabel(where, fontsize=8, color="#555")
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


def scaling(document: Document, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for label, curve in document["curves"].items():
        if label in LEFT_OUT:
            continue
        rows = sorted(map(int, curve))
        times = [curve[str(count)]["min_ns"] for count in rows]
        style = "--" if "/" in label else "-"
        axes.plot(rows, times, style, marker="o", label=name(label), color=LINE_COLORS[contender_of(label)])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(short_duration)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("rows stored")
    axes.set_ylabel("sample(256), minimum")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    plain(axes)
    save(figure, path)
