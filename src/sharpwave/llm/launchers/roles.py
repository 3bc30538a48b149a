"""What the processes of a run do: controller, learner, reference, generators, agent workers, evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from typing import Any, cast

import torch

from ..clock import WallClock
from ..controller import Controller
from ..cut import Cut
from ..evaluation import Evaluation
from ..experiment import Experiment
from ..generators.local import LocalGenerator
from ..generators.server import GeneratorServer
from ..log import RunLog
from ..parts import (
    LearnerSettings,
    beat_s_of,
    make_engine,
    make_flow,
    make_learner,
    make_model,
    make_reference,
    make_worker,
)
from ..run import LoggedLearner, note_score, say_goal, say_steps, score_outside
from ..run_engines import watch_engine
from ..run_folder import STOP, RunFolder
from ..tasks import Task
from ..training import complete, follow, train
from .alive import describe_process, is_alive
from .controller_client import ControllerClient
from .controller_server import ControllerServer
from .found_generators import FoundGenerators
from .launcher import LocalLauncher

__all__ = ["main", "role_names"]

_LOOK_S = 0.5
_POLL_S = 0.005
_ABANDONED_S = 60.0


def role_names(experiment: Experiment) -> list[str]:
    """The processes of a run, in the order in which they are started."""
    generators = [f"generator-{number}" for number in range(experiment.generators)]
    agents = [f"agents-{number}" for number in range(experiment.agent_workers)]
    evaluation = ["evaluation"] if experiment.evaluation.every else []
    reference = ["reference"] if LearnerSettings.of(experiment).kl else []
    return ["controller", "learner", *reference, *generators, *agents, *evaluation]


def main(path: str, role: str) -> None:
    """Runs a role to its end, and ends the process. Exit code 0: its work is done."""
    code = 1
    try:
        folder = RunFolder(path)
        if LocalLauncher(folder).enter(role):
            asyncio.run(_Role(folder, role).run())
        code = 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the disk is full
            RunFolder(path).register(f"{role}-error", {"said": f"{type(error).__name__}: {error}"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a forked process does not run its parent's exit handlers


class _Role:
    """One process."""

    def __init__(self, folder: RunFolder, role: str) -> None:
        self.folder, self.role = folder, role
        self.experiment = folder.experiment()
        self.task: Task = self.experiment.load_task()
        self.log = RunLog(folder.logs, tensorboard=role == "learner")
        self.owner = f"{role}.{os.getpid()}"
        self.clock = WallClock()
        if LearnerSettings.of(self.experiment).device == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(self.experiment.seed)

    async def run(self) -> None:
        kinds = {"generator": self._generator, "agents": self._agents}
        kinds |= {"reference": self._reference}
        kinds |= {"controller": self._controller, "learner": self._learner, "evaluation": self._evaluation}
        work = kinds[self.role.partition("-")[0]]()
        lanes = [work] if self.role == "controller" else [work, self._leave_when_abandoned()]
        await _first(lanes)

    def _is_ready(self, **about: Any) -> None:
        self.folder.register(self.role, {**describe_process(os.getpid()), **about})

    async def _leave_when_abandoned(self) -> None:
        """A run whose keeper and controller are both dead has nobody left that would end this process."""
        alone_s = 0.0
        while alone_s < _ABANDONED_S:
            await asyncio.sleep(_LOOK_S)
            has_company = any(is_alive(self.folder.find(name)) for name in ("keeper", "controller"))
            alone_s = 0.0 if has_company else alone_s + _LOOK_S

    # ---- roles -------------------------------------------------------------------------------------------------------

    async def _controller(self) -> None:
        before = self.folder.find("controller-address")
        server = ControllerServer(
            self.task.items, self.experiment.rules, flow=make_flow(self.experiment),
            journal=self.folder.journal, log=self._note,
            address=None if before is None else before["address"],
        )  # fmt: skip
        address = await server.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        if (told := self.folder.find(STOP)) is not None:
            server.stop(told["why"])
        self.folder.register("controller-address", {"address": address})
        self._is_ready(address=address)
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                if server.controller is not None:
                    said = server.controller.stats()
                    del said["buffer"]
                    self.folder.write_status({**said, "explain": server.controller.explain()})
                self._watch_keeper()
        finally:
            await server.close()

    def _note(self, event: str, **about: Any) -> None:
        """Writes an event of the controller. One that says that the run cannot go on is for the keeper, too."""
        if event == "fail":
            self.folder.register("failure", {"why": about["why"]})
        self.log(event, **about)

    def _watch_keeper(self) -> None:
        """A keeper that was killed is started again. One that ended in order has forgotten its address."""
        found = self.folder.find("keeper")
        if found is not None and not is_alive(found):
            from .keeper import start_keeper

            self.log("died", who="keeper")
            start_keeper(self.folder)

    async def _learner(self) -> None:
        experiment = self.experiment
        inner = make_learner(experiment, self.task, self.folder)
        inner.resume()
        inner.warm_up()
        cut = None if inner.said is None else Cut.from_json(inner.said)
        version = await inner.publish()
        learner = LoggedLearner(inner, self.log, version)
        client = ControllerClient(self.folder, self.owner)
        await client.begin(cut, version)
        self._is_ready()
        step = await train(
            cast(Controller, client), learner,
            clock=self.clock, owner=self.owner, step=0 if cut is None else cut.step, steps=experiment.steps,
            save_every=experiment.save_every, beat_s=beat_s_of(experiment),
        )  # fmt: skip
        await client.stop(say_steps(step))
        counts = await client.stats()
        self.folder.register("outcome", {"step": step, "version": learner.version, **counts})
        await client.close()

    async def _reference(self) -> None:
        scorer = make_reference(self.experiment, self.task)
        assert scorer is not None
        client = ControllerClient(self.folder, self.owner)
        make, beat_s = score_outside(scorer, "ref_logprobs", self.log), beat_s_of(self.experiment)
        self._is_ready()
        try:
            while True:  # a controller that was started again may have samples again; the keeper ends this process
                await complete(
                    cast(Controller, client), "reference", make, owner=self.owner, clock=self.clock, beat_s=beat_s
                )
                await asyncio.sleep(_LOOK_S)
        finally:
            await client.close()

    async def _generator(self) -> None:
        weights = self.folder.weights()
        model = make_model(self.experiment, self.task)
        engine = make_engine(self.experiment, self.task, model, -1, slots=self.experiment.slots)
        before = self.folder.find(f"{self.role}-port")
        async with LocalGenerator(engine) as generator:
            following = asyncio.ensure_future(follow(weights, generator, clock=self.clock))
            while engine.version < 0 and not following.done():  # its own weights are nobody's
                await asyncio.sleep(_POLL_S)
            server = await _serve(generator, 0 if before is None else before["port"])
            self.folder.register(f"{self.role}-port", {"port": int(server.address.rpartition(":")[2])})
            self._is_ready(address=server.address)
            try:
                await _first([_until(following), watch_engine(engine, self.log, self.role)])
            finally:
                await server.close()

    async def _agents(self) -> None:
        names = [name for name in role_names(self.experiment) if name.startswith("generator-")]
        generators, client = FoundGenerators(self.folder, names), ControllerClient(self.folder, self.owner)
        worker = make_worker(self.experiment, self.task, self.owner, client, generators, self.clock)
        self._is_ready()
        try:
            while True:  # a controller that was started again may have items again; the keeper ends this process
                await worker.run()
                await asyncio.sleep(_LOOK_S)
        finally:
            await client.close()
            await generators.close()

    async def _evaluation(self) -> None:
        settings, task, weights = self.experiment.evaluation, self.task, self.folder.weights()
        slots = min(self.experiment.slots, settings.concurrent)
        engine = make_engine(self.experiment, task, make_model(self.experiment, task), -1, slots=slots)
        client = ControllerClient(self.folder, self.owner)
        async with LocalGenerator(engine) as generator:
            reached = asyncio.Event()

            def tell(event: str, **about: Any) -> None:
                note_score(self.log, event, **about)
                if settings.goal is not None and about["reward"] >= settings.goal:
                    reached.set()

            lane = Evaluation(
                weights, generator, task.agent, task.held_out,
                tokenizer=task.tokenizer, clock=self.clock, every=settings.every, concurrent=settings.concurrent,
                temperature=settings.temperature, sampling=task.sampling, folder=self.folder.evaluation, log=tell,
            )  # fmt: skip

            self._is_ready()
            await _first([lane.run(), _wait(reached)])  # no score comes after the one that ends the run
            why = say_goal(self.experiment)
            self.folder.register(STOP, {"why": why})  # first: a controller that is started again reads it
            await client.stop(why)
            await asyncio.Event().wait()  # the keeper ends this process; one that ended by itself would come back


async def _serve(generator: LocalGenerator, port: int) -> GeneratorServer:
    """At the port of an earlier process, so that its clients find this one; at another one where it is taken."""
    try:
        return await GeneratorServer(generator, port=port).start()
    except Exception:
        if not port:
            raise
        return await GeneratorServer(generator, port=0).start()


async def _until(task: asyncio.Future[None]) -> None:
    await task


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def _first(lanes: list[Coroutine[Any, Any, Any]]) -> None:
    """Until the first of them ends; its error is raised."""
    tasks = [asyncio.ensure_future(lane) for lane in lanes]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
