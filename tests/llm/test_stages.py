"""Stages of training as consumers of one buffer."""

import asyncio
import functools

import numpy as np
import pytest
import torch
from learner_batches import batch_of

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError
from sharpwave.llm.checkpoints import Checkpoints
from sharpwave.llm.learner import Learner, OptimizerConfig
from sharpwave.llm.model import ValueModel, small_model
from sharpwave.llm.objectives import GRPO, PPO, SFT, ValueFit
from sharpwave.llm.run_learner import RunLearner
from sharpwave.llm.scorer import Scorer
from sharpwave.llm.stages import add_key, train_once, training_flow
from sharpwave.llm.weights import Weights

torch.set_num_threads(1)
ROWS = {"row_tokens": 32, "rows": 2}


def learner_of(objective, model=None):
    return Learner(model or small_model(), objective, optimizer=OptimizerConfig(learning_rate=1e-3), **ROWS)


def test_an_objective_says_which_stages_it_needs():
    def names(flow):
        return {consumer.name: (set(consumer.inputs), set(consumer.outputs)) for consumer in flow}

    assert names(training_flow(SFT(), batch_size=2)) == {"train": ({"input_ids", "loss_mask"}, set())}
    flow = training_flow(GRPO(kl=0.1), batch_size=2, proximal=True, reward=True)
    assert list(names(flow)) == ["reward", "reference", "proximal", "train"]
    assert names(flow)["reference"] == ({"input_ids"}, {"ref_logprobs"})
    assert flow.given_keys == {"input_ids", "loss_mask", "logprobs", "versions"}
    assert list(names(training_flow(GRPO(method="naive"), batch_size=2, proximal=True))) == ["train"]
    flow = training_flow(PPO(), batch_size=2, values=ValueFit())
    assert flow.sinks == ["train", "train_values"]


def test_ppo_goes_through_all_its_stages():
    policy, values = learner_of(PPO(kl=0.1)), learner_of(ValueFit(gae_lambda=1.0), ValueModel.like(small_model()))
    reference = Scorer(small_model(seed=1), **ROWS)
    flow = training_flow(policy.objective, batch_size=2, values=values.objective, proximal=True, reward=True)
    buffer = sw.SequenceBuffer(100, flow=flow, max_staleness=1, stale="mask", version=2)
    made = batch_of(data=2)
    buffer.put(made.select(made.keys - {"rewards"}))

    def reward(batch):
        rewards = np.ones(sum(map(len, batch.seqlens["input_ids"])), np.float32)
        return sw.SequenceSample(
            batch.ids, {"rewards": [[1] * len(row) for row in batch.seqlens["input_ids"]]}, {"rewards": rewards}
        )

    async def run():
        with pytest.raises(NotReady, match="lack"):
            await train_once(buffer, policy, timeout=0)
        for consumer, make in [
            ("reward", reward),
            ("reference", functools.partial(reference.column, key="ref_logprobs")),
            ("values", functools.partial(values.scorer.column, key="values")),
            ("proximal", functools.partial(policy.scorer.column, key="prox_logprobs")),
        ]:
            assert await add_key(buffer, consumer, make, timeout=0) == 2
        return await train_once(buffer, policy, timeout=0), await train_once(buffer, values, "train_values", timeout=0)

    report, of_values = asyncio.run(run())
    assert report.updates == of_values.updates == 1
    assert report.statistics["kl"] > 0
    assert report.statistics["ratio"] == pytest.approx(1, abs=1e-4)
    assert report.stale_tokens == (made["loss_mask"] & (made["versions"] < 1)).sum()
    assert of_values.statistics["value_error"] == pytest.approx(1, abs=1e-4)  # values start at 0, every return is 1
    assert len(buffer) == 0


def test_a_stage_that_fails_gives_its_batch_back():
    buffer = sw.SequenceBuffer(100, flow=training_flow(GRPO(), batch_size=2))
    made = batch_of(data=2)
    column = made["logprobs"].copy()
    column[np.flatnonzero(made["loss_mask"])[0]] = np.nan
    handles = buffer.put(
        made.update(sw.SequenceSample(made.ids, {"logprobs": made.seqlens["logprobs"]}, {"logprobs": column}))
    )
    learner = learner_of(GRPO())
    with pytest.raises(SchemaError, match="logprobs is nan"):
        asyncio.run(train_once(buffer, learner, timeout=0))
    buffer.amend(handles, made.select(["logprobs"]))
    assert asyncio.run(train_once(buffer, learner, timeout=0)).updates == 1
    assert len(buffer) == 0


class Moment:
    """The controller's part of a checkpoint."""

    mark, step = "m3", 3

    def to_json(self):
        return {"mark": self.mark, "step": self.step, "version": 1}


def test_a_run_s_learner_trains_publishes_saves_and_resumes(tmp_path):
    def made(seed):
        values = learner_of(ValueFit(), ValueModel.like(small_model(seed=seed)))
        weights, saved = Weights(tmp_path / "weights"), Checkpoints(tmp_path / "saved")
        return RunLearner(learner_of(PPO(), small_model(seed=seed)), weights, saved, values=values)

    async def run(learner):
        line = await learner.train(batch_of())
        counts = {"step", "updates", "sequences", "tokens", "learned_tokens", "stale_tokens", "refused"}
        assert {name for name, value in line.items() if type(value) is int} == counts
        assert {type(line[name]) for name in line.keys() - counts} == {float}
        assert {"loss", "values_loss", "clip_share", "entropy", "tokens", "refused"} <= set(line)
        assert [await learner.publish(), await learner.publish()] == [0, 1]
        await learner.save(Moment())

    first, again = made(0), made(1)
    assert first.resume() is None
    asyncio.run(run(first))
    assert again.resume() == {"mark": "m3", "step": 3, "version": 1}
    assert asyncio.run(first.train(batch_of(1))) == asyncio.run(again.train(batch_of(1)))
    assert asyncio.run(again.publish()) == 2
    with pytest.raises(SchemaError, match=r"give RunLearner\(checkpoints=\)"):
        asyncio.run(RunLearner(first.policy, first.weights).save(Moment()))
