"""What a run shows on the console, and its reward curve."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich import console as rich_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sharpwave.llm.experiment import Experiment
from sharpwave.llm.log import EVENTS, STEPS, read_lines
from sharpwave.llm.run import Result
from sharpwave.llm.run_folder import RunFolder

__all__ = ["Console", "plot_rewards", "print_result"]

_INK, _MUTED, _BLUE, _ORANGE = "#1f2933", "#9aa5b1", "#1f6feb", "#e8590c"
_EVERY = 10  # steps between two lines where the output is no terminal
_REJECTED = 5  # items whose reasons are shown
_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward", "{:.3f}"),
    ("held out", "held_out", "{:.3f}"),
    ("staleness", "staleness", "{:.2f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("clipped", "clip_share", "{:.3f}"),
    ("weight", "importance_weight", "{:.3f}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("waited", "waited", "{:.0%}"),
)


class Console:
    """A bar and the numbers of the last steps on a terminal; elsewhere a table that grows by a line now and then."""

    def __init__(self, experiment: Experiment) -> None:
        self._console = rich_console.Console()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_EVERY)
        self._held_out = float("nan")
        self._rejected = self._failed = 0
        self._is_live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(), console=self._console, disable=not self._is_live,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=experiment.steps, said="starting")

    def __enter__(self) -> Console:
        self._bar.start()
        if not self._is_live:
            print("  ".join(f"{title:>9}" for title, _, _ in _COLUMNS), flush=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, event: str, about: dict[str, Any]) -> None:
        """Takes what a `RunLog` says."""
        if event == "score":
            self._held_out = about["reward"]
            if about["failed"] > self._failed:
                self._failed = about["failed"]
                self._print(
                    f"{about['failed']} of {about['episodes']} episodes of held-out items failed and count as 0, the "
                    f"last by {about['why']}"
                )
        elif event == "why":
            self._rejected += 1
            if self._rejected <= _REJECTED:
                self._print(f"{about['key']} was rejected: {about['why']}")
            if self._rejected == _REJECTED:
                self._print("items that are rejected from now on are in logs/events.jsonl")
        elif event == "died":
            again = " and is started again" if about.get("again") else ""
            self._print(f"{about['who']} died{again}" + (f": {about['why']}" if "why" in about else ""))
        elif event == "step":
            self._recent.append(about)
            if self._is_live:
                said = self._numbers()
                shown = "  ".join(f"{title} {said[key]}" for title, key, _ in _COLUMNS[1:5])
                self._bar.update(self._task, completed=about["step"], said=shown)
            elif about["step"] % _EVERY == 0:
                said = self._numbers()
                print("  ".join(f"{said[key]:>9}" for _, key, _ in _COLUMNS), flush=True)

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _numbers(self) -> dict[str, str]:
        """Means over the last steps, as text."""
        lines = self._recent
        means: dict[str, float] = {"held_out": self._held_out}
        for _, key, _ in _COLUMNS:
            if key in lines[-1]:
                means[key] = float(np.mean([line[key] for line in lines if key in line]))
        means["step"] = lines[-1]["step"]
        waited = sum(line["waited_s"] for line in lines)
        means["waited"] = waited / max(1e-9, waited + sum(line["train_s"] for line in lines))
        return {key: form.format(means[key]) if key in means else "-" for _, key, form in _COLUMNS}


def print_result(result: Result, folder: RunFolder, experiment: Experiment, has_curve: bool) -> None:
    table = Table("", title=f"sharpwave train {experiment.task}")
    table.add_column("", justify="right")
    goal = experiment.evaluation.goal
    if result.reward is not None:
        late = "" if result.scored == result.version else f" (version {result.scored}; the last is {result.version})"
        table.add_row(f"mean reward of held-out items{late}", f"{result.reward:.3f}" + _of_goal(goal, result.reached))
    if result.best is not None:
        table.add_row("best version's", f"{result.best:.3f}")
    table.add_row("steps", f"{result.step:,}")
    outcomes = f"{result.trained:,}, {result.no_signal:,}, {result.rejected:,}"
    table.add_row("items trained, without signal, rejected", outcomes)
    table.add_row("wall time", f"{result.took_s:.1f} s")
    for who, share in result.idle.items():
        table.add_row(f"idle share of {who}", f"{share:.0%}")
    console = rich_console.Console()
    console.print(table)
    if result.is_stopped:
        console.print(f"stopped; go on with: sharpwave resume {folder.path}", highlight=False, soft_wrap=True)
    elif result.why is not None:
        console.print(result.why, highlight=False, markup=False, soft_wrap=True)
    if has_curve:
        console.print(f"reward curve:  {folder.curve}", highlight=False, soft_wrap=True)
    console.print(f"timeline:      {folder.timeline} (open it at ui.perfetto.dev)", highlight=False, soft_wrap=True)
    best = folder.evaluation / "best"
    if best.is_dir():
        console.print(f"best version:  {best}", highlight=False, soft_wrap=True)


def _of_goal(goal: float | None, reached: bool) -> str:
    if goal is None:
        return ""
    return f" (goal {goal:g}: {'reached' if reached else 'not reached'})"


def plot_rewards(logs: Path, path: Path, goal: float | None) -> bool:
    """Writes the rewards of training and of held-out items as a PNG. Returns whether there was anything to draw."""
    steps = read_lines(logs / STEPS)
    if not steps:
        return False
    scores = [line for line in read_lines(logs / EVENTS) if line["event"] == "score"]
    figure = Figure(figsize=(9, 5), layout="constrained")  # on the Agg canvas it needs no display
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rewards = np.array([line["reward"] for line in steps])
    means = [rewards[max(0, end - _EVERY) : end].mean() for end in range(1, len(rewards) + 1)]
    versions = [line["version"] for line in steps]
    axes.plot(versions, rewards, ".", color=_MUTED, markersize=4, alpha=0.6, label="batch")
    axes.plot(versions, means, color=_BLUE, linewidth=2, label=f"mean of {_EVERY} batches")
    if scores:
        where = [line["version"] for line in scores], [line["reward"] for line in scores]
        axes.plot(*where, "o-", color=_ORANGE, markersize=5, linewidth=1, label="held-out items")
    if goal is not None:
        axes.axhline(goal, color=_MUTED, linewidth=1, linestyle=(0, (4, 4)), zorder=0)
    axes.set_xlabel("version of the weights", color=_INK)
    axes.set_ylabel("mean reward", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=_INK)
    figure.savefig(path, dpi=150)
    return True
