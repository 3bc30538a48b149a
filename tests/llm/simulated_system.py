"""A whole run in simulated time whose processes die and are started again."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady
from sharpwave.llm.agent_worker import AgentWorker
from sharpwave.llm.controller import Controller
from sharpwave.llm.episode import Episode, train_flow
from sharpwave.llm.events import EventLog
from sharpwave.llm.generators import Sampling
from sharpwave.llm.items import Items
from sharpwave.llm.rules import Rules
from sharpwave.llm.simulation import (
    Costs,
    Device,
    SimulatedGenerator,
    SimulatedLearner,
    SimulatedWeights,
    log_normal_lengths,
)
from sharpwave.llm.training import complete, follow, train


class Letters:
    """A tokenizer of letters, enough for agents that do not read."""

    def encode(self, text):
        return [ord(one) for one in text]

    def decode(self, tokens):
        return "".join(chr(one) for one in tokens)


async def coin_agent(item, generate):
    """One answer; the reward is a coin's, so that half of the groups of two have no signal. The first item always has
    one: an epoch without any ends a run."""
    episode = Episode([1, 2, 3])
    await generate(episode)
    episode.reward = float(generate.seed % (2**20 if item["id"] == "i0" else 2))
    return episode


class Link:
    """What a client in another process has of the controller: calls that are sent again to its next incarnation."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self._changed = asyncio.Event()

    def set(self, controller: Controller | None) -> None:
        self.controller = controller
        self._changed.set()
        self._changed = asyncio.Event()

    def __getattr__(self, name):
        if name in ("start", "finish", "reject", "take", "trained", "confirm", "checkpoint", "lend", "amend"):
            return lambda *given: self._call(name, given)
        return getattr(self.controller, name)

    async def there(self) -> None:
        """Until there is a controller."""
        while self.controller is None:
            await self._changed.wait()

    def hear(self, owner) -> None:
        if self.controller is not None:
            self.controller.hear(owner)

    async def _call(self, name, given):
        while True:
            controller, changed = self.controller, self._changed
            if controller is None:
                await changed.wait()
                continue
            call = asyncio.ensure_future(getattr(controller, name)(*given))
            change = asyncio.ensure_future(changed.wait())
            try:
                await asyncio.wait([call, change], return_when=asyncio.FIRST_COMPLETED)
                if call.done() and self.controller is controller:
                    return call.result()
            except ClosedError:
                if self.controller is controller:
                    raise
            finally:
                change.cancel()
                call.cancel()
                await asyncio.gather(call, change, return_exceptions=True)


class Router:
    """The generator that is alive now."""

    def __init__(self) -> None:
        self.generator: SimulatedGenerator | None = None

    def __getattr__(self, name):
        if self.generator is None:
            raise NotReady("no generator is there")
        return getattr(self.generator, name)


class Learner(SimulatedLearner):
    """One whose checkpoints take time: it may die in between, and so may the controller."""

    def __init__(self, clock, save_s, *given):
        super().__init__(*given)
        self._clock, self._save_s = clock, save_s

    async def save(self, cut):
        await self._clock.sleep(self._save_s)
        await super().save(cut)


@dataclass
class System:
    """Args:
    deaths: (seconds, role) in order; a dead process is started again after `restart_s`, while others may die.
    """

    clock: object
    folder: Path | None
    items: int = 12
    epochs: int = 2
    batch: int = 3
    max_staleness: int = 1
    stale: str = "mask"
    workers: int = 2
    concurrent: int = 3
    group: int = 2
    slots: int = 8
    save_every: int = 2
    deaths: list = field(default_factory=list)
    restart_s: float = 0.05
    save_s: float = 0.0  # between the controller's mark and the end of the learner's checkpoint
    seed: int = 0
    reference_s: float | None = None  # of a stage before the learner, for each call; None for no stage
    watchdog_s: float | None = None
    restarts: bool = True
    follow_s: float = 0.002
    agent: object = coin_agent
    costs: Costs = field(default_factory=lambda: Costs(decode_s=1e-3, train_s=2e-2))

    def __post_init__(self) -> None:
        self.log = EventLog(self.clock)
        self.device, self.weights = Device(), SimulatedWeights()
        self.link, self.router = Link(), Router()
        self.learner = self.make_learner()
        self.lanes = [f"worker{number}" for number in range(self.workers)]
        self.highest = 0  # most items that were started and not trained when one started
        self.tasks: dict[str, asyncio.Task] = {}
        self.names = 0

    def make_learner(self):
        return Learner(self.clock, self.save_s, self.device, self.weights, self.costs)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def record(self, event, **about):
        self.log(event, **about)
        if event == "start":
            controller = self.link.controller
            self.highest = max(self.highest, len(controller._permits) + len(controller.buffer))

    def start_controller(self, resume):
        saved = self.learner.saved
        latest = self.weights.latest()
        controller = Controller(
            Items([{"id": f"i{place}"} for place in range(self.items)]),
            Rules(
                batch=self.batch,
                max_staleness=self.max_staleness,
                stale=self.stale,
                epochs=self.epochs,
                seed=self.seed,
                max_losses=1000,
                watchdog_s=self.watchdog_s,
            ),
            self.clock,
            flow=train_flow(self.batch, reference=self.reference_s is not None),
            journal=None if self.folder is None else self.folder / "journal",
            cut=saved[0] if resume and saved is not None else None,
            resume=resume,
            version=0 if latest is None or not resume else latest.version,
            log=self.record,
        )
        self.link.set(controller)
        self.tasks["watch"] = asyncio.ensure_future(controller.watch())

    def stop_controller(self):
        controller, _ = self.link.controller, self.link.set(None)
        self.tasks.pop("watch").cancel()
        controller.halt()

    def start_generator(self):
        lengths = log_normal_lengths(median=20, most=200, least=1)
        generator = self.router.generator = SimulatedGenerator(
            self.device, slots=self.slots, costs=self.costs, length=lengths
        )
        self.tasks["generator"] = asyncio.ensure_future(generator.run())
        self.tasks["follow"] = asyncio.ensure_future(
            follow(self.weights, generator, clock=self.clock, poll_s=self.follow_s)
        )

    def start_worker(self, role):
        self.names += 1
        worker = AgentWorker(
            f"{role}-{self.names}",
            self.link,
            self.router,
            self.agent,
            tokenizer=Letters(),
            clock=self.clock,
            group=self.group,
            concurrent=self.concurrent,
            sampling=Sampling(max_tokens=1000),
        )
        self.tasks[role] = asyncio.ensure_future(worker.run())
        self.tasks[role].owner = worker.name

    def start_reference(self):
        self.names += 1

        async def make(batch):
            await self.clock.sleep(self.reference_s)
            lens = batch.seqlens["input_ids"]
            made = np.zeros(sum(map(sum, lens)), np.float32)
            return sw.SequenceSample(batch.ids, {"ref_logprobs": lens}, {"ref_logprobs": made})

        lane = complete(self.link, "reference", make, owner=f"reference-{self.names}", clock=self.clock)
        self.tasks["reference"] = asyncio.ensure_future(lane)
        self.tasks["reference"].owner = f"reference-{self.names}"

    def start_learner(self):
        step = 0 if self.learner.saved is None else self.learner.saved[0].step
        self.tasks["learner"] = asyncio.ensure_future(
            train(self.link, self.learner, clock=self.clock, step=step, save_every=self.save_every)
        )

    # ---- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        self.start_controller(resume=True)
        self.start_generator()
        for role in self.lanes:
            self.start_worker(role)
        self.start_learner()
        if self.reference_s is not None:
            self.start_reference()
        for moment, role in self.deaths:
            await self.clock.sleep(max(0.0, moment - self.clock.now()))
            if self.has_ended:
                break
            await self.kill(role)
        while not self.has_ended:
            for task in self.tasks.values():
                if task.done() and not task.cancelled():
                    task.result()  # no lane ends by an error of its own
            lanes = {task for task in self.tasks.values() if not task.done()}
            await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
        return self.tasks["learner"].result()

    @property
    def has_ended(self) -> bool:
        """Whether the learner has ended by itself."""
        return self.tasks["learner"].done() and not self.is_coming("learner")

    def is_coming(self, role) -> bool:
        """Whether a dead process is being started again."""
        return f"restart of {role}" in self.tasks and not self.tasks[f"restart of {role}"].done()

    async def kill(self, role) -> None:
        """Others may die before the process is there again; one that is not there cannot die."""
        if self.is_coming(role) or (role == "reference" and self.reference_s is None):
            return
        self.log("kill", role=role)
        if role == "controller":
            self.stop_controller()
            come = self.restart_controller
        elif role == "learner":
            await self.end("learner")
            come = self.restart_learner
        elif role == "generator":
            await self.end("follow")
            await self.end("generator")
            come = self.restart_generator
        else:
            owner = self.tasks[role].owner
            await self.end(role)
            come = functools.partial(self.restart_lane, role, owner)
        self.tasks[f"restart of {role}"] = asyncio.ensure_future(come())

    async def restart_controller(self) -> None:
        await self.clock.sleep(self.restart_s)
        self.start_controller(resume=False)
        self.start_ended()

    async def restart_learner(self) -> None:
        """The controller goes on without a learner until the next one says from which checkpoint it begins."""
        saved = self.learner.saved
        await self.clock.sleep(self.restart_s)
        self.learner = self.make_learner()
        if saved is not None:
            self.learner.saved, self.learner.learnt = saved, list(saved[1])
        await self.link.there()
        self.stop_controller()
        self.start_controller(resume=True)
        self.start_learner()
        self.start_ended()

    async def restart_generator(self) -> None:
        if self.restarts:
            await self.clock.sleep(self.restart_s)
            self.start_generator()

    async def restart_lane(self, role, owner) -> None:
        """Its death is noticed when the next process of its role calls."""
        if self.restarts:
            await self.clock.sleep(self.restart_s)
        if self.link.controller is not None:
            self.link.controller.lose(owner)
        if self.restarts:
            self.start_lane(role)

    def start_lane(self, role) -> None:
        if role == "reference":
            self.start_reference()
        else:
            self.start_worker(role)

    def start_ended(self) -> None:
        """Lanes that had heard that the run was over: a controller that was made again may have items again."""
        for role in [one for one, task in self.tasks.items() if one in (*self.lanes, "reference") and task.done()]:
            if not self.is_coming(role):
                self.start_lane(role)

    async def end(self, role) -> None:
        self.tasks[role].cancel()
        await asyncio.gather(self.tasks[role], return_exceptions=True)
