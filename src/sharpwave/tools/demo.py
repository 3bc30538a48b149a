"""`sharpwave demo`: DQN learns CartPole-v1 with prioritized 3-step replay; prints results and timings."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sharpwave.tools import per_dqn

_INK, _MUTED, _BLUE, _ORANGE = "#1f2933", "#9aa5b1", "#1f6feb", "#e8590c"


def run_demo(steps: int, seed: int, out: Path) -> None:
    """Trains with a live progress bar, prints a table and writes the results into a folder.

    Args:
        steps: Environment steps to train for.
        seed: Seed of all random numbers.
        out: Folder for the policy, the curve, the buffer and `learning_curve.png`; made where it is missing.
    """
    out.mkdir(parents=True, exist_ok=True)  # an error here comes before training, not after it
    console = Console()
    result = _train_with_bar(per_dqn.Config(steps=steps, seed=seed), console)
    per_dqn.save(result, out)
    figure_path = out / "learning_curve.png"
    plot_learning_curve(result, figure_path)
    console.print(summary_table(result))
    console.print(f"learning curve: {figure_path}\nreplay buffer:  sharpwave info {out / 'replay'}", highlight=False)


def summary_table(result: per_dqn.Result) -> Table:
    """Returns the run's numbers as a Rich table."""
    wall_s = result.wall_ns / 1e9
    stats, buffer_ns = result.buffer.stats(), result.buffer_ns
    updates = stats["updates_applied"]
    table = Table("Prioritized 3-step DQN on CartPole-v1", title="sharpwave demo")
    table.add_column("", justify="right")
    table.add_row("greedy return, mean of 100 episodes", f"{result.greedy_return:.1f}")
    table.add_row("rows in the buffer", f"{len(result.buffer):,}")
    table.add_row("adds/s (time inside add)", _rate(stats["rows_added"], buffer_ns["add"]))
    table.add_row("samples/s, rows (time inside sample)", _rate(stats["rows_sampled"], buffer_ns["sample"]))
    table.add_row("updates/s, rows (time inside update_priorities)", _rate(updates, buffer_ns["update"]))
    table.add_row("priorities updated, stale", f"{updates:,}, {stats['updates_stale']:,}")
    table.add_row("wall time of training", f"{wall_s:.1f} s")
    table.add_row("share of it spent in the buffer", f"{buffer_ns.total() / result.wall_ns:.2%}")
    return table


def plot_learning_curve(result: per_dqn.Result, path: Path) -> None:
    """Writes return per episode, its running mean and the greedy evaluations as a PNG."""
    # A Figure on the Agg canvas needs no display and does not change pyplot's global state.
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if result.episodes:
        steps, returns = np.array(result.episodes).T
        axes.plot(steps, returns, ".", color=_MUTED, markersize=4, alpha=0.6, label="training episode")
        axes.plot(steps, _running_mean(returns, 20), color=_BLUE, linewidth=2, label="mean of the last 20 episodes")
    steps, returns = np.array(result.evaluations).T
    axes.plot(
        steps,
        returns,
        "o",
        color=_ORANGE,
        markersize=5,
        markeredgecolor="white",
        clip_on=False,
        zorder=3,
        label="greedy evaluation, mean of 100",
    )
    axes.axhline(500, color=_MUTED, linewidth=1, linestyle=(0, (4, 4)), zorder=0)
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(0, 530)
    axes.set_xlabel("environment steps", color=_INK)
    axes.set_ylabel("return", color=_INK)
    title = f"Prioritized 3-step double DQN on CartPole-v1: greedy return {result.greedy_return:.0f} of 500"
    axes.set_title(title, loc="left", color=_INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=_INK)
    figure.savefig(path, dpi=150)


def _train_with_bar(config: per_dqn.Config, console: Console) -> per_dqn.Result:
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("return {task.fields[recent_return]:5.1f}  rows {task.fields[rows]:,}"),
        TextColumn("loss {task.fields[loss]:.5f}"),
        TimeRemainingColumn(),
        console=console,
    )
    with bar:
        task = bar.add_task("train", total=config.steps, recent_return=np.nan, rows=0, loss=np.nan)

        def show(step: int, now: per_dqn.Result) -> None:
            rows, recent_return = len(now.buffer), now.recent_return()
            bar.update(task, completed=step, recent_return=recent_return, rows=rows, loss=now.loss)

        return per_dqn.train(config, progress=show)


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)])


def _rate(count: int, elapsed_ns: int) -> str:
    # A run shorter than learning_starts never samples.
    return f"{count / elapsed_ns * 1e9:,.0f}" if elapsed_ns else "none"
