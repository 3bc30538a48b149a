"""Evaluation beside training: it changes nothing there, scores one version at a time, and keeps the best."""

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from engine_generator import EngineGenerator
from patience import HANG_S
from simulated_system import Letters, System, coin_agent

from sharpwave.errors import SchemaError, StaleHandle
from sharpwave.llm.agent import single_turn
from sharpwave.llm.agent_worker import AgentWorker
from sharpwave.llm.clock import WallClock
from sharpwave.llm.controller import Controller
from sharpwave.llm.evaluation import Evaluation
from sharpwave.llm.generators import Answer, Engine, Sampling
from sharpwave.llm.items import Items
from sharpwave.llm.model import small_model
from sharpwave.llm.rules import Rules
from sharpwave.llm.simulation import Device, SimulatedGenerator, simulate
from sharpwave.llm.tasks import load_task
from sharpwave.llm.training import follow, train
from sharpwave.llm.weights import Published, Weights

HELD_OUT = Items([{"id": f"e{place}", "prompt": "abc"} for place in range(6)])


def test_training_goes_on_as_if_there_were_no_evaluation():
    def run(is_evaluated):
        async def main(clock):
            system = System(clock, None, items=60)
            lanes = []
            if is_evaluated:
                generator = SimulatedGenerator(Device(), slots=2, costs=system.costs)
                evaluation = Evaluation(
                    system.weights, generator, coin_agent, HELD_OUT, tokenizer=Letters(), clock=clock, every=2
                )
                lanes = [asyncio.ensure_future(one) for one in (generator.run(), evaluation.run())]
            await system.run()
            for lane in lanes:
                lane.cancel()
            return system.log.lines, evaluation.scores if is_evaluated else []

        return simulate(main)

    (alone, _), (beside, scores) = run(False), run(True)
    assert alone == beside
    assert len(scores) > 1
    assert [score.version for score in scores] == sorted({score.version for score in scores})
    assert scores[-1].began_s < scores[-1].ended_s
    later = [json.loads(line) for line in alone if '"trained"' in line]
    during = [event for event in later if scores[0].began_s < event["s"] < scores[0].ended_s]
    assert during  # steps were made while it was scoring


class ByVersion:
    """A generator whose every answer has as many tokens as its version."""

    version = 0

    async def health(self):
        from sharpwave.llm.generators import Health

        return Health(self.version, 0, 0)

    async def update(self, path, version, kv="keep"):
        assert (path / "model.safetensors").exists()
        self.version = version

    async def generate(self, ids, sampling=None):
        from sharpwave.llm.generators import Answer

        assert sampling.temperature == 0
        return Answer([65] * self.version, [0.0] * self.version, [self.version] * self.version, "stop")


@pytest.mark.parametrize(("given", "asked"), [({}, 0.0), ({"temperature": 0.7}, 0.7), ({"temperature": None}, 1.3)])
def test_answers_are_drawn_at_the_temperature_of_evaluation(given, asked):
    seen = set()

    class Seeing(ByVersion):
        async def generate(self, ids, sampling):
            seen.add(sampling.temperature)
            return Answer([1], [0.0], [0], "stop")

    async def main(clock):
        sampling = Sampling(temperature=1.3)
        evaluation = Evaluation(
            None, Seeing(), coin_agent, HELD_OUT, tokenizer=Letters(), clock=clock, sampling=sampling, **given
        )
        await evaluation.score(Published(0, Path("nowhere")))

    simulate(main)
    assert seen == {asked}


def test_the_best_version_is_kept_although_the_publisher_removes_it(tmp_path):
    weights = Weights(tmp_path / "weights", keep=1)
    rewards = {1: 0.2, 2: 0.9, 3: 0.5}
    agent = single_turn(lambda item, text: rewards[len(text)])

    async def main():
        evaluation = Evaluation(
            weights, ByVersion(), agent, HELD_OUT, tokenizer=Letters(), clock=WallClock(), folder=tmp_path / "run"
        )
        gone = None
        for version in rewards:
            published = weights.publish({"w": torch.full((2,), float(version))}, version)
            gone = gone or published
            await evaluation.score(published)
        with pytest.raises(StaleHandle, match="version 1 was removed"):
            await evaluation.score(gone)
        return evaluation

    evaluation = asyncio.run(main())
    assert [round(score.reward, 6) for score in evaluation.scores] == [0.2, 0.9, 0.5]
    best = Published(2, tmp_path / "run" / "best")
    assert best.read()["w"].tolist() == [2.0, 2.0]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["best"]
    again = Evaluation(
        weights, ByVersion(), agent, HELD_OUT, tokenizer=Letters(), clock=WallClock(), folder=tmp_path / "run"
    )
    assert again.best == evaluation.scores[1]  # a restarted evaluation does not replace it by a worse one


class Slow(WallClock):
    """One piece of its blocking work, by its number, begins when the test lets it."""

    def __init__(self, number):
        self.works, self.number, self.begins = 0, number, threading.Event()

    async def outside(self, work):
        self.works += 1
        if self.works != self.number:
            return await super().outside(work)
        return await super().outside(lambda: (self.begins.wait(HANG_S), work()))


@pytest.mark.parametrize("number", [pytest.param(1, id="linked"), pytest.param(2, id="kept")])
def test_a_run_that_ends_while_a_version_is_linked_or_kept_leaves_nothing_half_done(tmp_path, number):
    weights, clock, told = Weights(tmp_path / "weights"), Slow(number), []
    published = weights.publish({"w": torch.full((2,), 1.0)}, 1)

    async def main():
        evaluation = Evaluation(
            weights, ByVersion(), single_turn(lambda item, text: 1.0), HELD_OUT,
            tokenizer=Letters(), clock=clock, folder=tmp_path / "run", log=lambda event, **about: told.append(about),
        )  # fmt: skip
        scoring = asyncio.ensure_future(evaluation.score(published))
        while clock.works < number:
            await asyncio.sleep(0.001)
        scoring.cancel()
        for _ in range(3):
            await asyncio.sleep(0)  # it may end now, and must not
        clock.begins.set()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert len(evaluation.scores) == len(told) == number - 1
        if not told:
            await evaluation.score(published)

    asyncio.run(main())
    assert [one["version"] for one in told] == [1]
    assert Published(1, tmp_path / "run" / "best").read()["w"].tolist() == [1.0, 1.0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["best"]


def test_a_score_after_one_that_was_cancelled_in_its_update_does_not_repeat_the_update(tmp_path):
    weights, begins = Weights(tmp_path), threading.Event()
    published = weights.publish({"w": torch.ones(2)}, 1)

    class Slow(ByVersion):
        """Its update goes on where its caller is cancelled, as that of an engine in a thread does."""

        async def update(self, path, version, kv="keep"):
            await asyncio.to_thread(self.put, version)

        def put(self, version):
            begun.append(version)
            begins.wait(HANG_S)
            if version <= self.version:
                raise SchemaError("versions only grow")
            self.version = version

    begun = []

    async def main():
        evaluation = Evaluation(
            weights, Slow(), single_turn(lambda item, text: 1.0), HELD_OUT, tokenizer=Letters(), clock=WallClock()
        )
        first = asyncio.ensure_future(evaluation.score(published))
        while not begun:
            await asyncio.sleep(0.001)
        first.cancel()
        second = asyncio.ensure_future(_after(first, evaluation, published))
        for _ in range(5):
            await asyncio.sleep(0.001)
        begins.set()
        return await second

    async def _after(first, evaluation, published):
        await asyncio.wait([first])
        return await evaluation.score(published)

    assert asyncio.run(main()).reward == 1.0
    assert begun == [1]


def test_what_killed_evaluations_left_is_removed_and_the_best_version_stays(tmp_path):
    def evaluation():
        return Evaluation(
            Weights(tmp_path / "weights"), ByVersion(), single_turn(lambda item, text: 1.0), HELD_OUT,
            tokenizer=Letters(), clock=WallClock(), folder=tmp_path / "run",
        )  # fmt: skip

    published = Weights(tmp_path / "weights").publish({"w": torch.ones(2)}, 1)
    score, run = asyncio.run(evaluation().score(published)), tmp_path / "run"
    for left in (".scoring-1", ".scoring-2", ".old-1"):  # each of a process of its own
        (run / left).mkdir()
    assert evaluation().best == score
    assert [path.name for path in run.iterdir()] == ["best"]
    (run / "best").rename(run / ".old-2")  # killed between the two renames
    (run / ".scoring-2").mkdir()
    assert evaluation().best == score
    assert [path.name for path in run.iterdir()] == ["best"]


async def raises():
    raise RuntimeError("no")


async def cancels():
    own = asyncio.ensure_future(asyncio.sleep(60))
    own.cancel()
    await own


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(raises, "RuntimeError: no (test_evaluation.py:", id="raises"),
        pytest.param(
            cancels, "CancelledError: ", id="cancels a task of its own",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="a task cannot tell whether it is cancelled"),
        ),
    ],
)  # fmt: skip
def test_an_episode_that_fails_counts_as_nothing(fault, why):
    async def agent(item, generate):
        if item["id"] == "e1":
            await fault()
        return await coin_agent(item, generate)

    async def main(clock):
        generator = SimulatedGenerator(Device(), slots=8)
        running = asyncio.ensure_future(generator.run())
        system = System(clock, None)
        system.weights.versions.append(1)
        evaluation = Evaluation(
            system.weights,
            generator,
            agent,
            HELD_OUT,
            tokenizer=Letters(),
            clock=clock,
            log=lambda _, **about: said.append(about),
        )
        score = await evaluation.score(system.weights.latest())
        running.cancel()
        return score

    said = []
    score = simulate(main)
    assert (score.episodes, score.failed) == (6, 1)
    assert why in said[0]["why"]


class Rerandom:
    """A learner that publishes other random weights at each step: what is tested is the way of data around it."""

    def __init__(self, weights, size):
        self.weights, self.size, self.batches, self.saved = weights, size, [], []

    async def train(self, batch):
        self.batches.append(batch)
        return {}

    async def publish(self):
        version = self.weights.latest().version + 1
        return self.weights.publish(small_model(seed=version, **self.size), version).version

    async def save(self, cut):
        self.saved.append(cut)


def test_real_parts_in_real_time(tmp_path):
    """Engine, weights, journal, agents and evaluation, as in a run; only the learner learns nothing."""
    torch.set_num_threads(1)
    task = load_task("guess", highest=20, turns=3, count=100, held_out=4)
    size = {"vocab_size": task.vocabulary, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    weights = Weights(tmp_path / "weights")
    weights.publish(small_model(seed=0, **size), 0)

    def generator():
        return EngineGenerator(Engine(small_model(seed=0, **size), slots=8, context=task.context + 8))

    async def main():
        clock = WallClock()
        controller = Controller(
            task.items, Rules(4, max_staleness=1, skip_no_signal=False), clock, journal=tmp_path / "journal"
        )
        first, second = generator(), generator()
        worker = AgentWorker(
            "worker", controller, first, task.agent,
            tokenizer=task.tokenizer, clock=clock, group=2, concurrent=4, sampling=task.sampling,
        )  # fmt: skip
        evaluation = Evaluation(
            weights, second, task.agent, task.held_out,
            tokenizer=task.tokenizer, clock=clock, sampling=task.sampling, folder=tmp_path / "run",
        )  # fmt: skip
        learner = Rerandom(weights, size)
        lanes = (first.run(), second.run(), worker.run(), follow(weights, first, clock=clock), evaluation.run())
        lanes = [asyncio.ensure_future(one) for one in lanes]
        steps = await train(controller, learner, clock=clock, steps=4, save_every=2)
        while not evaluation.scores:
            await clock.sleep(0.01)
        controller.stop()
        for lane in lanes:
            lane.cancel()
        failed = [one for one in await asyncio.gather(*lanes, return_exceptions=True) if isinstance(one, Exception)]
        controller.close()
        return steps, learner, controller, failed

    steps, learner, controller, failed = asyncio.run(main())
    assert not failed
    assert (steps, controller.step) == (4, 4)
    assert [cut.step for cut in learner.saved] == [0, 2, 4]
    names = [name for batch in learner.batches for name in batch.ids]
    assert len(set(names)) == 16
    for step, batch in enumerate(learner.batches):
        versions, is_made = batch["versions"], batch["loss_mask"]
        assert (versions[is_made] <= step).all()  # weights of later steps were not there yet
        assert (batch["fresh"] == (versions >= step - 1)).all()
        assert (batch["logprobs"][is_made] < 0).all()
        assert (batch["logprobs"][~is_made] == 0).all()
    assert (tmp_path / "run" / "best" / "config.json").exists()
