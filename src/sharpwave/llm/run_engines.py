"""The engines of a run: threads of this process on a CPU, processes of their own on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from .channel import Door
from .generators.engine import Engine
from .generators.local import LocalGenerator
from .generators.process import ProcessGenerator
from .log import RunLog
from .parts import make_engine, make_model, runs_children
from .run_folder import RunFolder

__all__ = ["RunGenerator", "make_watched", "start_generator", "watch_engine"]

_LOOK_S = 0.25
_GAP_NS = 5_000_000  # steps of an engine that are closer together are one span of the timeline
_EVALUATION = "evaluation"  # its scores are its spans

RunGenerator = LocalGenerator | ProcessGenerator


async def start_generator(
    folder: RunFolder, log: RunLog, who: str, slots: int, door: Door | None = None
) -> RunGenerator:
    """An engine with the weights at the beginning of the run, which has no version yet.

    Args:
        door: Through which channels of agents come; only an engine in a process of its own has one.
    """
    experiment = folder.experiment()
    if runs_children(experiment):
        maker = f"{__name__}:{make_watched.__name__}"
        return await ProcessGenerator.start(maker, door=door, run=str(folder.path), slots=slots, who=who)
    task = experiment.load_task()
    engine = make_engine(experiment, task, make_model(experiment, task), -1, slots=slots)
    return _Watched(engine, log, who)


def make_watched(run: str, slots: int, who: str) -> tuple[Engine, Callable[[], None]]:
    """The same in a child process: the engine, and what writes when it was busy."""
    folder = RunFolder(run)
    experiment = folder.experiment()
    task = experiment.load_task()
    engine = make_engine(experiment, task, make_model(experiment, task), -1, slots=slots)
    return engine, _watch(engine, RunLog(folder.logs), who)


class _Watched(LocalGenerator):
    """Writes when its engine was busy, while it is joined."""

    def __init__(self, engine: Engine, log: RunLog, who: str) -> None:
        super().__init__(engine)
        self._watching = (log, who)

    async def join(self) -> None:
        watching = asyncio.ensure_future(watch_engine(self.engine, *self._watching))
        try:
            await super().join()
        finally:
            watching.cancel()


async def watch_engine(engine: Engine, log: RunLog, who: str) -> None:
    """Writes when an engine was busy, for ever."""
    look = _watch(engine, log, who)
    try:
        while True:
            await asyncio.sleep(_LOOK_S)
            look()
    finally:
        look()


def _watch(engine: Engine, log: RunLog, who: str) -> Callable[[], None]:
    """Writes what the engine did since the last call."""
    seen = -1

    def look() -> None:
        nonlocal seen
        if who != _EVALUATION:
            seen = _note_steps(engine, log, who, seen)

    return look


def _note_steps(engine: Engine, log: RunLog, who: str, seen: int) -> int:
    steps = [step for step in list(engine.timeline) if step.number > seen]
    while steps:
        count = 1
        while count < len(steps) and steps[count].began_ns - _end(steps[count - 1]) < _GAP_NS:
            count += 1
        run, steps = steps[:count], steps[count:]
        began, took = run[0].began_ns / 1e9, (_end(run[-1]) - run[0].began_ns) / 1e9
        slots = sum(step.decoding for step in run) / count
        log.span(who, f"version {run[-1].version}", began, took, steps=count, slots=round(slots, 2))
        seen = run[-1].number
    return seen


def _end(step: Any) -> int:
    return int(step.began_ns + step.took_ns)
