"""A run of ``sharpwave train`` from its first line to its last."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from sharpwave.errors import NotReady, SchemaError, StorageError
from sharpwave.llm.agent import Generate, describe_error, play
from sharpwave.llm.checkpoints import Checkpoint
from sharpwave.llm.clock import WallClock
from sharpwave.llm.cut import Cut
from sharpwave.llm.evaluation import Evaluation
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.full_disk import tell_full_disk
from sharpwave.llm.generators.local import LocalGenerator
from sharpwave.llm.generators.protocol import Generator
from sharpwave.llm.log import EVENTS, STEPS, RunLog, read_lines
from sharpwave.llm.model.folder import load_model
from sharpwave.llm.parts import LearnerSettings, make_engine, make_model
from sharpwave.llm.permits import derive_seed
from sharpwave.llm.position import Position
from sharpwave.llm.presets import preset
from sharpwave.llm.run import LocalRun, Result, check_workers
from sharpwave.llm.run_folder import RunFolder, write_whole
from sharpwave.llm.tasks import Task
from sharpwave.llm.weights import Published

from .train_console import Console, plot_rewards, print_result

__all__ = ["begin", "drive", "evaluate", "print_status", "reopen", "stop"]

_LOOK_S = 0.05
_STOPPING = b"stopping after this step; Ctrl-C again ends at once\n"


def begin(what: str, changes: list[str], out: Path | None, processes: bool = False) -> RunFolder:
    """A new run folder. All settings are checked before it is made.

    Args:
        processes: Whether the run will have a process for each of its roles.

    Raises:
        SchemaError: A key is unknown or a value makes no sense.
    """
    source: Any = Path(what) if what.endswith(".toml") else preset(what)
    experiment = Experiment.read(source, changes)
    _check(experiment, processes)
    name = Path(what).stem.rpartition(":")[2]
    return RunFolder.create(Path(f"sharpwave-{name}") if out is None else out, experiment)


def reopen(path: Path, changes: list[str], processes: bool = False) -> RunFolder:
    """The folder of an earlier run, with changed settings.

    Raises:
        SchemaError: A setting makes no sense, or does not fit the run's checkpoint, or the run would have nothing to
            do. The settings of before stay.
        StorageError: There is no run, or the disk is full.
        NotReady: Another process drives it.
    """
    folder = RunFolder(path)
    experiment = Experiment.read(folder.experiment().to_json(), changes)
    if folder.is_driven:
        raise NotReady(f"{path}: a process drives this run; end it with: sharpwave stop {path}")
    if done := _why_done(folder, experiment):
        raise SchemaError(f"resume: {done}")
    _check(experiment, processes, folder.checkpoints().latest())
    if changes:
        with tell_full_disk(path):
            write_whole(path / "experiment.json", experiment.to_json())
    return folder


def _check(experiment: Experiment, processes: bool, checkpoint: Checkpoint | None = None) -> None:
    """What only the task, the model, the device, the kind of run and the checkpoint to go on from can say."""
    if not processes:
        check_workers(experiment)
    settings, task = LearnerSettings.of(experiment), experiment.load_task()
    settings.row_tokens_for(task)
    model = make_model(experiment, task)
    if checkpoint is None:
        return
    rules = experiment.rules
    try:
        checkpoint.check(model, settings.learners)
        # A position of its own: only its checks are wanted.
        position = Position(task.items, epochs=rules.epochs, seed=rules.seed, shuffle=rules.shuffle)
        position.restore(Cut.from_json(checkpoint.position).position, (), ())
    except SchemaError as error:
        raise SchemaError(
            f"resume: {error}. A run keeps its model, task, seed and learner.objective; for others begin a new run"
        ) from None


def drive(folder: RunFolder, processes: bool = False) -> bool:
    """Runs to the end, with progress on the console. Returns whether the goal was reached.

    The first SIGINT or SIGTERM ends the run in order, with a checkpoint; a second one as a kill does.
    """
    with tell_full_disk(folder.path):
        return _drive(folder, processes)


def _drive(folder: RunFolder, processes: bool) -> bool:
    folder.take()
    try:
        experiment = folder.experiment()
        if LearnerSettings.of(experiment).device == "cpu":
            torch.set_num_threads(1)  # the engines' threads and the learner's share the cores
        try:
            with Console(experiment) as console:
                if processes:
                    from sharpwave.llm.launchers.keeper import Keeper

                    for name in ("outcome", "failure"):  # of a run that goes on now
                        folder.forget(name)
                    keeper = Keeper(folder, show=console.show)
                    with _signals(keeper.stop):
                        result = keeper.run()
                else:
                    result = asyncio.run(_run_here(folder, console))
        except Exception:
            with contextlib.suppress(OSError):  # a full disk may be why the run failed, and is told
                plot_rewards(folder.logs, folder.curve, experiment.evaluation.goal)
            raise
        has_curve = plot_rewards(folder.logs, folder.curve, experiment.evaluation.goal)
        print_result(result, folder, experiment, has_curve)
        return result.reached
    finally:
        folder.give_back()


async def _run_here(folder: RunFolder, console: Console) -> Result:
    log = RunLog(folder.logs, tensorboard=True, show=console.show)
    try:
        run = LocalRun(folder, log)
        loop = asyncio.get_running_loop()
        with _signals(lambda: loop.call_soon_threadsafe(run.stop)):
            return await run.run()
    finally:
        log.close()


@contextlib.contextmanager
def _signals(stop: Any) -> Any:
    """Calls `stop` at the first SIGINT or SIGTERM, and says so; the next one has its default effect."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def tell(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # not print(): it may be what the signal interrupts
            os.write(2, b"\n" * os.isatty(2) + _STOPPING)  # a terminal shows ^C in the line
        stop()

    for number in numbers:
        signal.signal(number, tell)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def evaluate(path: Path, model: Path | None, show: int = 0) -> None:
    """Prints the mean reward of a version on the held-out items, and the episodes of the first of them.

    Args:
        show: Of so many items.

    Raises:
        StorageError: There is no run, or no version.
    """
    folder = RunFolder(path)
    experiment = folder.experiment()
    best = folder.evaluation / "best"
    latest = folder.weights().latest()
    place = model or (best if best.is_dir() else None if latest is None else latest.path)
    if place is None:
        raise StorageError(f"{path} has no version yet")
    task = experiment.load_task()
    torch.set_num_threads(1)
    told: dict[str, Any] = {}

    async def main() -> Any:
        slots = min(experiment.slots, experiment.evaluation.concurrent)
        engine = make_engine(experiment, task, load_model(place, dtype="float32"), 0, slots=slots)
        async with LocalGenerator(engine) as generator:
            scoring = Evaluation(
                folder.weights(), generator, task.agent, task.held_out,
                tokenizer=task.tokenizer, clock=WallClock(), concurrent=experiment.evaluation.concurrent,
                sampling=task.sampling, temperature=experiment.evaluation.temperature,
                log=lambda _, **about: told.update(about),
            )  # fmt: skip
            score = await scoring.score(Published(0, place))
            for name in task.held_out.ids[:show]:
                print(f"{name}: {await _played(task, name, generator, experiment.evaluation.temperature)}")
            return score

    score = asyncio.run(main())
    why = f", the last by {told['why']}" if score.failed else ""
    print(f"{place}: mean reward {score.reward:.4f} of {score.episodes} held-out items, {score.failed} failed{why}")


async def _played(task: Task, name: str, generator: Generator, temperature: float | None) -> str:
    """A held-out item as it was scored: what was asked and answered, turn by turn, and the reward."""
    sampling = task.sampling if temperature is None else dataclasses.replace(task.sampling, temperature=temperature)
    generate = Generate(generator, task.tokenizer, sampling, derive_seed("evaluation", name))
    try:
        episodes = await play(task.agent, task.held_out[name], generate, repr(name))
    except Exception as error:
        return f"failed by {describe_error(error)}"
    told = []
    for episode in episodes:
        turns = itertools.groupby(zip(episode.tokens, episode.is_made, strict=True), key=lambda one: one[1])
        texts = [repr(task.tokenizer.decode([token for token, _ in turn])) for _, turn in turns]
        told.append(f"{' -> '.join(texts)}, reward {episode.reward:g}")
    return "; ".join(told)


def print_status(path: Path, as_json: bool) -> None:
    folder = RunFolder(path)
    folder.experiment()
    said = {"is_driven": folder.is_driven, **folder.status(), **_last_numbers(folder)}
    if not folder.is_driven:
        said["why"] = _why_ended(folder)
    if as_json:
        print(json.dumps(said, indent=2))
        return
    state = "runs" if folder.is_driven else "does not run; go on with: sharpwave resume " + str(path)
    print(f"{path}: {state}")
    for name, value in said.items():
        if name not in ("is_driven", "explain", "why") and value is not None:
            print(f"  {name:<14} {value:.4g}" if isinstance(value, float) else f"  {name:<14} {value}")
    if last := said.get("explain" if said["is_driven"] else "why"):
        print(f"  {last}")


def _why_ended(folder: RunFolder) -> str | None:
    """Why the run failed, or why `resume` without other settings is refused, or why the run ended."""
    lines = read_lines(folder.logs / EVENTS)
    # The end of a run is its last event. Others after it are of a run that went on, and was killed.
    last = lines[-1] if lines else {"event": "none"}
    if last["event"] == "fail":
        return f"The run failed: {last['why']}"
    return _why_done(folder, folder.experiment()) or (last["why"] if last["event"] == "end" else None)


def _why_done(folder: RunFolder, experiment: Experiment) -> str | None:
    """Why a run with these settings would have nothing to do."""
    steps, goal = experiment.steps, experiment.evaluation.goal
    said = _last_numbers(folder)
    if goal is not None and said.get("held_out", -math.inf) >= goal:
        return f"The goal {goal:g} is reached; resume with evaluation.goal=none trains on."
    saved = folder.checkpoints().latest()
    if steps is not None and saved is not None and saved.step >= steps:
        made = f"All {steps} steps are made" if saved.step == steps else f"steps={steps}, and {saved.step} are made"
        return f"{made}; resume with steps={2 * saved.step} trains on."
    return None


def _last_numbers(folder: RunFolder) -> dict[str, Any]:
    """Of the last step and the last evaluation, as the logs have them."""
    steps = read_lines(folder.logs / STEPS)
    scores = [line for line in read_lines(folder.logs / EVENTS) if line["event"] == "score"]
    names = ("reward", "staleness", "entropy", "clip_share", "importance_weight", "tokens_per_s")
    found = {name: steps[-1][name] for name in names if name in steps[-1]} if steps else {}
    return {**found, **({"held_out": scores[-1]["reward"]} if scores else {})}


def stop(path: Path, timeout_s: float) -> None:
    """Ends the process that drives the run, and waits for its end.

    Raises:
        NotReady: No process drives it, or it has not ended in time.
    """
    folder = RunFolder(path)
    folder.experiment()
    found = folder.find("run")
    if not folder.is_driven or found is None:
        raise NotReady(f"stop: no process drives {path}")
    os.kill(found["pid"], signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while folder.is_driven:
        if time.monotonic() > deadline:
            raise NotReady(f"stop: the run has not ended within {timeout_s:g} s; wait longer with --timeout")
        time.sleep(_LOOK_S)
    print(f"stopped; go on with: sharpwave resume {path}")
