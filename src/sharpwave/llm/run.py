"""`LocalRun`: a whole run in one process, on the real clock, by the coroutines that the simulation runs, too."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import SchemaError
from ..sequences.sample import SequenceSample
from .channel import Door
from .clock import WallClock
from .controller import STOPPED, Controller
from .cut import Cut
from .evaluation import Evaluation, Score
from .experiment import Experiment
from .full_disk import tell_full_disk
from .log import RunLog, describe_batch
from .parts import beat_s_of, make_flow, make_reference, make_worker, runs_children
from .process_learner import ProcessLearner, start_learner
from .run_agents import KeptAgents
from .run_engines import RunGenerator, start_generator
from .run_folder import RunFolder
from .scorer import Scorer
from .timeline import idle_shares, write_timeline
from .training import Learns, complete, follow, train

__all__ = [
    "LocalRun", "LoggedLearner", "Result", "check_workers", "note_score", "say_goal", "say_steps", "score_outside",
]  # fmt: skip

_STATUS_S = 0.5
_TURN_S = 2e-4


@dataclass(frozen=True)
class Result:
    """What a run came to. `reward` is of the last evaluation; None where none was made."""

    step: int
    version: int
    why: str | None  # it ended; None where the controller was restarted at the very end
    scored: int | None  # the version of the last evaluation
    reward: float | None
    best: float | None
    reached: bool  # the goal of the evaluation; True where there is none
    took_s: float
    trained: int
    no_signal: int
    rejected: int
    idle: dict[str, float]

    @property
    def is_stopped(self) -> bool:
        """Whether it ended because it was told to, and not by itself."""
        return self.why == STOPPED


class LoggedLearner:
    """A learner whose steps, publications and checkpoints are written to a log."""

    def __init__(self, learner: Learns, log: RunLog, version: int, who: str = "learner") -> None:
        self._learner, self._log, self._who = learner, log, who
        self.version = version
        self._ended_s = time.monotonic()
        self._line: dict[str, Any] = {}

    async def train(self, batch: SequenceSample) -> Mapping[str, float]:
        began = time.monotonic()
        with self._log.busy(self._who, "train", items=len(batch)):
            told = await self._learner.train(batch)
        self._line = {
            **describe_batch(batch, self.version), **told, "keys": list(batch.ids),
            "waited_s": began - self._ended_s, "train_s": time.monotonic() - began,
        }  # fmt: skip
        return told

    async def publish(self) -> int:
        with self._log.busy(self._who, "publish"):
            self.version = await self._learner.publish()
        if self._line:
            now = time.monotonic()
            rate = self._line["tokens"] / max(1e-9, now - self._ended_s)
            self._log.step({**self._line, "version": self.version, "tokens_per_s": rate})
            self._line, self._ended_s = {}, now
        return self.version

    async def save(self, cut: Cut) -> None:
        with self._log.busy(self._who, "save", step=cut.step):
            await self._learner.save(cut)


def say_steps(step: int) -> str:
    """Why a run is over."""
    return f"All {step} steps are made."


def say_goal(experiment: Experiment) -> str:
    """Why a run is over."""
    return f"The goal {experiment.evaluation.goal:g} is reached."


def note_score(log: RunLog, event: str, **about: Any) -> None:
    """Writes an event, and a span for a score."""
    log(event, **about)
    if event == "score":
        took_s = about["ended_s"] - about["began_s"]
        log.span_at("evaluation", f"version {about['version']}", about["began_s"], took_s, reward=about["reward"])


def score_outside(scorer: Scorer, key: str, log: RunLog) -> Callable[[SequenceSample], Awaitable[SequenceSample]]:
    """A stage's work beside the event loop: what a model says of samples, as a key. The log says when it was busy."""

    async def make(batch: SequenceSample) -> SequenceSample:
        with log.busy("reference", "score", items=len(batch)):
            return await asyncio.to_thread(scorer.column, batch, key)

    return make


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Threads get the interpreter sooner.

    A learner that publishes asks for it dozens of times, and would wait 5 ms each time for the agents' event loop.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_workers(experiment: Experiment) -> None:
    """Raises:
    SchemaError: Some generators of a run without --processes would have no worker.
    """
    if experiment.agent_workers < experiment.generators:
        raise SchemaError(
            f"Experiment(): agent_workers={experiment.agent_workers}, but generators={experiment.generators}: in a "
            "run without --processes each worker asks one generator; give "
            f"agent_workers={experiment.generators} or more"
        )


async def _close_started(starting: asyncio.Future[RunGenerator]) -> None:
    """Closes an engine, or ends its start."""
    starting.cancel()  # does nothing where it has started
    made: Any = (await asyncio.gather(starting, return_exceptions=True))[0]
    if not isinstance(made, BaseException):
        await made.close()


class LocalRun:
    """A run in this process. On a GPU its learner, its engines and its agents have child processes.

    Args:
        folder: Of the run. A run that was stopped or killed goes on from its last checkpoint.
        log: Where it tells what it does.
    """

    def __init__(self, folder: RunFolder, log: RunLog) -> None:
        self.folder, self.log = folder, log
        self.experiment: Experiment = folder.experiment()
        self._controller: Controller | None = None
        self._evaluation: Evaluation | None = None
        self._is_stopped = False
        self._began_s = 0.0

    def stop(self) -> None:
        """Ends the run after the step that is being made, with a checkpoint. For the event loop's thread."""
        self._is_stopped = True
        if self._controller is not None:
            self._controller.stop()

    async def run(self) -> Result:
        """Trains until the experiment's end.

        Raises:
            SchemaError: A setting does not fit the task, the model or the checkpoint.
            StorageError: The disk is full, or a file is damaged. The last checkpoint stays.
            NotReady: Nothing has moved for `watchdog_s`, or nothing could be trained in a whole epoch.
        """
        check_workers(self.experiment)
        try:
            with tell_full_disk(self.folder.path), _short_turns():
                async with contextlib.AsyncExitStack() as ends:
                    ends.callback(self._end)  # the last of all
                    return await self._run(ends)
        except Exception as error:
            self.log.fail(error)
            raise

    async def _run(self, ends: contextlib.AsyncExitStack) -> Result:
        began, self._began_s = time.monotonic(), time.time()
        experiment, task = self.experiment, self.experiment.load_task()
        torch.manual_seed(experiment.seed)
        clock, weights = WallClock(), self.folder.weights()
        engines = {f"generator-{number}": experiment.slots for number in range(experiment.generators)}
        workers = [f"agents-{number}" for number in range(experiment.agent_workers)]
        doors: dict[str, Door] = {}
        if runs_children(experiment):
            doors = {who: Door() for who in engines}
        for door in doors.values():
            ends.callback(door.close)
        if experiment.evaluation.every:
            engines["evaluation"] = min(experiment.slots, experiment.evaluation.concurrent)
        # Everything that takes long to start starts side by side.
        starting = {
            who: asyncio.ensure_future(start_generator(self.folder, self.log, who, slots, doors.get(who)))
            for who, slots in engines.items()
        }
        for one in starting.values():
            ends.push_async_callback(_close_started, one)
        agents = {
            name: KeptAgents(self.folder, name, list(doors.values())[number % len(doors)], task.items, self.log)
            for number, name in enumerate(workers)
            if doors
        }
        for kept in agents.values():
            ends.push_async_callback(kept.close)
        inner = await start_learner(self.folder, experiment, task)
        if isinstance(inner, ProcessLearner):
            ends.push_async_callback(inner.close)
        started = {who: await one for who, one in starting.items()}
        for kept in agents.values():
            await kept.ready()
        scoring = started.pop("evaluation", None)
        generators = list(started.values())
        reference = make_reference(experiment, task)
        cut = None if inner.said is None else Cut.from_json(inner.said)
        version = await inner.publish()
        first = weights.latest()
        assert first is not None
        for generator in generators:
            await generator.update(first.path, first.version)
        learner = LoggedLearner(inner, self.log, version)
        controller = self._controller = Controller(
            task.items, experiment.rules, clock, flow=make_flow(experiment),
            journal=self.folder.journal, cut=cut, version=version, log=self._log_event,
        )  # fmt: skip
        if scoring is not None:
            self._evaluation = Evaluation(
                weights, scoring, task.agent, task.held_out,
                tokenizer=task.tokenizer, clock=clock, every=experiment.evaluation.every,
                concurrent=experiment.evaluation.concurrent, sampling=task.sampling,
                temperature=experiment.evaluation.temperature,
                folder=self.folder.evaluation, log=self._log_event,
            )  # fmt: skip
        if self._is_stopped:
            controller.stop()
        # From here to `_drive` nothing waits: a coroutine that was made is also run.
        lanes: list[Coroutine[Any, Any, Any]] = [controller.watch(), self._tell()]
        if isinstance(inner, ProcessLearner):
            lanes.append(inner.join())
        for generator in generators:
            lanes += [follow(weights, generator, clock=clock), generator.join()]
        for number, name in enumerate(workers):
            if agents:
                lanes.append(agents[name].run(controller, experiment.owner_timeout_s))
            else:
                asked = generators[number % len(generators)]
                lanes.append(make_worker(experiment, task, name, controller, asked, clock).run())
        if reference is not None:
            make = score_outside(reference, "ref_logprobs", self.log)
            beat_s = beat_s_of(experiment)
            lanes.append(complete(controller, "reference", make, owner="reference", clock=clock, beat_s=beat_s))
        if self._evaluation is not None:
            lanes.append(self._evaluation.run())
        step = await self._drive(controller, learner, lanes, 0 if cut is None else cut.step)
        await self._score_last()
        version = controller.version
        self.folder.write_status(self.status())
        return self._result(step, version, time.monotonic() - began)

    def _end(self) -> None:
        """After everything else of the run has ended."""
        if self._controller is not None:
            self._controller.close()
            write_timeline(self.log.folder, self.folder.timeline)

    async def _drive(
        self, controller: Controller, learner: Learns, lanes: list[Coroutine[Any, Any, Any]], step: int
    ) -> int:
        """Runs the learner's lane to its end beside the others. One that raises ends the run with its error."""
        experiment = self.experiment
        training = asyncio.ensure_future(
            train(
                controller, learner,
                clock=WallClock(), step=step, steps=experiment.steps, save_every=experiment.save_every,
                beat_s=beat_s_of(experiment),
            )
        )  # fmt: skip
        beside = {asyncio.ensure_future(lane) for lane in lanes}
        try:
            while not training.done():
                done, _ = await asyncio.wait([training, *beside], return_when=asyncio.FIRST_COMPLETED)
                for one in done & beside:
                    one.result()
                beside -= done
            controller.stop(say_steps(training.result()))
            return training.result()
        finally:
            controller.stop()
            for one in (training, *beside):
                one.cancel()
            await asyncio.gather(training, *beside, return_exceptions=True)

    async def _score_last(self) -> None:
        """The newest version, unless it was scored or the run reached its goal."""
        evaluation, newest = self._evaluation, self.folder.weights().latest()
        if evaluation is None or newest is None or self._has_reached() or self._is_stopped:
            return
        if not evaluation.scores or evaluation.scores[-1].version < newest.version:
            await evaluation.score(newest)

    def _log_event(self, event: str, **about: Any) -> None:
        note_score(self.log, event, **about)
        if event == "score" and self._has_reached() and self._controller is not None:
            self._controller.stop(say_goal(self.experiment))

    def _has_reached(self) -> bool:
        goal, scores = self.experiment.evaluation.goal, self._scores()
        return goal is not None and bool(scores) and scores[-1].reward >= goal

    def _scores(self) -> list[Score]:
        return [] if self._evaluation is None else self._evaluation.scores

    async def _tell(self) -> None:
        while True:
            self.folder.write_status(self.status())
            await asyncio.sleep(_STATUS_S)

    def status(self) -> dict[str, Any]:
        """What `sharpwave status` shows."""
        assert self._controller is not None
        said = self._controller.stats()
        del said["buffer"]
        last = self.log.recent[-1] if self.log.recent else {}
        scores = self._scores()
        return {
            **said,
            "steps": self.experiment.steps,
            "reward": last.get("reward"),
            "held_out": scores[-1].reward if scores else None,
            "staleness": last.get("staleness"),
            "tokens_per_s": last.get("tokens_per_s"),
            "explain": self._controller.explain(),
        }

    def _result(self, step: int, version: int, took_s: float) -> Result:
        assert self._controller is not None
        counts, scores = self._controller.position.outcomes, self._scores()
        goal = self.experiment.evaluation.goal
        best = None if self._evaluation is None else self._evaluation.best
        made = Result(
            step=step,
            version=version,
            why=self._controller.why_over,
            scored=scores[-1].version if scores else None,
            reward=scores[-1].reward if scores else None,
            best=None if best is None else best.reward,
            reached=goal is None or self._has_reached(),
            took_s=took_s,
            trained=counts["trained"],
            no_signal=counts["no_signal"],
            rejected=counts["rejected"],
            idle=idle_shares(self.log.folder, self._began_s),
        )
        self.log("end", **asdict(made))
        return made
