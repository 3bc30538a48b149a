"""The learner: one large batch however it is cut, steps that are refused, and models that learn."""

import copy

import numpy as np
import pytest
import torch
from learner_batches import batch_of

import sharpwave as sw
from sharpwave.errors import SchemaError
from sharpwave.llm.learner import Learner, OptimizerConfig
from sharpwave.llm.model import ValueModel, small_model
from sharpwave.llm.objectives import GRPO, PPO, SFT, ValueFit
from sharpwave.llm.scorer import Scorer
from sharpwave.llm.weights import Weights

torch.set_num_threads(1)
# eps far above every gradient: a step is then linear in the gradient, and shows its errors at their size.
LINEAR = OptimizerConfig(learning_rate=1.0, eps=10.0)


def learner_of(objective=None, model=None, **more):
    given = {"row_tokens": 32, "rows": 2, "optimizer": LINEAR, **more}
    return Learner(model or small_model(), objective or GRPO(), **given)


def weights_of(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


def own_logprobs(batch, model=None, key="logprobs"):
    """The batch as if the model had made it."""
    return batch.update(Scorer(model or small_model(), row_tokens=32, rows=2).column(batch, key))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("method", ["naive", "recompute", "decoupled"])
def test_accumulated_rows_are_one_large_batch(method, level):
    batch = own_logprobs(batch_of(stale=0.2), small_model(seed=1))
    objective = GRPO(method=method, level=level, entropy=0.01, cap=None)
    start = weights_of(learner_of())
    large, small = (learner_of(objective, rows=rows) for rows in (16, 1))
    reports = [each.step(batch) for each in (large, small)]
    moved = weights_of(large) - start
    assert moved.abs().max() > 1e-3
    assert (weights_of(small) - weights_of(large)).abs().max() < 1e-5 * max(1.0, float(moved.abs().max()))
    assert reports[0].loss == pytest.approx(reports[1].loss, abs=1e-5)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-4)
    for name, value in reports[0].statistics.items():
        assert reports[1].statistics[name] == pytest.approx(value, abs=1e-4), name


def test_a_step_moves_the_weights_along_the_gradient_of_the_plain_loss():
    """Against a loop over sequences that knows nothing of packing, shares or pieces of the head."""
    batch = batch_of()
    learner = learner_of(
        SFT(), head_tokens=16, optimizer=OptimizerConfig(learning_rate=1.0, eps=10.0, max_grad_norm=None)
    )
    model = small_model()
    at, losses = 0, []
    for length in (n for row in batch.seqlens["input_ids"] for n in row):
        ids = torch.from_numpy(batch["input_ids"][at : at + length])
        every = torch.log_softmax(model(ids[None])[0], -1)
        lps = every[:-1].gather(-1, ids[1:, None])[:, 0]
        losses.append(-lps[torch.from_numpy(batch["loss_mask"][at + 1 : at + length])])
        at += length
    loss = torch.cat(losses).mean()
    loss.backward()
    report = learner.step(batch)
    assert report.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    assert report.learned_tokens == batch["loss_mask"].sum()
    for (name, now), before in zip(learner.model.named_parameters(), model.parameters(), strict=True):
        gradient = before.grad
        expected = before - gradient / (gradient.abs() + 10.0)  # Adam's first step
        assert torch.allclose(now, expected, atol=1e-6), name


def test_activations_computed_again_give_the_same_step():
    batch = batch_of()
    plain, again = learner_of(), learner_of(recompute_layers=True)
    assert plain.step(batch).grad_norm == pytest.approx(again.step(batch).grad_norm, rel=1e-6)
    assert torch.allclose(weights_of(plain), weights_of(again), atol=1e-7)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    "objective", [SFT(), GRPO(kl=0.1, entropy=0.01), PPO(), ValueFit()], ids=lambda one: type(one).__name__
)
def test_a_warm_up_changes_nothing(objective, minibatches):
    model = (lambda: ValueModel.like(small_model())) if objective.is_of_values else small_model
    batch = batch_of(values=0.0, ref_logprobs=-5.0)
    cold, warm = (learner_of(objective, model(), minibatches=minibatches) for _ in range(2))
    warm.warm_up()
    assert torch.equal(weights_of(cold), weights_of(warm))
    assert cold.step(batch) == warm.step(batch)
    assert torch.equal(weights_of(cold), weights_of(warm))


def test_a_pass_for_which_the_memory_is_too_small_names_its_size():
    learner = learner_of(rows=10**9)
    words = r"a pass of rows=1000000000 x row_tokens=32 tokens needs more memory than cpu has; lower rows"
    with pytest.raises(SchemaError, match=r"warm_up\(\): " + words):
        learner.warm_up()
    with pytest.raises(SchemaError, match=r"step\(\): " + words):
        learner.step(batch_of())


def test_capturing_without_a_gpu_is_refused():
    with pytest.raises(
        SchemaError, match="capture=True needs a model on CUDA with fixed positions, but the model is on cpu"
    ):
        learner_of(capture=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("method", ["naive", "decoupled"])
def test_captured_passes_make_the_steps_of_plain_ones(method):
    made = []
    for capture in (False, True):
        learner = learner_of(
            GRPO(method=method), small_model().cuda(), autocast=False, capture=capture, row_tokens=128, rows=1
        )
        learner.warm_up()
        made.append(([learner.step(batch_of(seed, data=24)) for seed in range(3)], weights_of(learner).cpu()))
    (plain, moved), (captured, also_moved) = made
    assert (moved - weights_of(learner_of())).abs().max() > 1e-3
    assert (moved - also_moved).abs().max() < 1e-4
    assert [one.loss for one in captured] == pytest.approx([one.loss for one in plain], abs=1e-4)


def test_matrix_products_in_bfloat16_give_about_the_same_step():
    batch = batch_of()
    wide, narrow = learner_of(), learner_of(autocast=True)
    assert narrow.step(batch).grad_norm == pytest.approx(wide.step(batch).grad_norm, rel=0.05)
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.float32}
    assert not torch.equal(weights_of(wide), weights_of(narrow))


def test_one_minibatch_needs_no_pass_for_proximal_log_probabilities():
    batch = own_logprobs(batch_of(), small_model(seed=1))
    alone, given = learner_of(), learner_of()
    passes = []
    alone.scorer.flat = lambda *_: passes.append(1)
    alone.step(batch)
    given.step(own_logprobs(batch, key="prox_logprobs"))
    assert not passes
    assert torch.allclose(weights_of(alone), weights_of(given), atol=1e-6)


def test_several_minibatches_clip_around_the_policy_at_the_start_of_the_step():
    batch = own_logprobs(batch_of(), small_model(seed=1))
    with_key = own_logprobs(batch, key="prox_logprobs")
    learners = [learner_of(minibatches=3, seed=5) for _ in range(2)]
    reports = [learners[0].step(batch), learners[1].step(with_key)]
    assert torch.equal(weights_of(learners[0]), weights_of(learners[1]))
    assert reports[0].updates == 3
    assert reports[0].statistics["ratio"] != 1.0
    moved = learner_of(minibatches=3, seed=6)
    moved.step(batch)
    assert not torch.equal(weights_of(moved), weights_of(learners[0]))  # another order


def test_tokens_that_are_too_old_teach_nothing_and_make_the_step_smaller():
    batch = batch_of(data=2, group=2)
    none = batch.update(
        sw.SequenceSample(
            batch.ids, {"fresh": batch.seqlens["input_ids"]}, {"fresh": np.zeros(len(batch["input_ids"]), bool)}
        )
    )
    learner = learner_of()
    before = weights_of(learner)
    report = learner.step(none)
    assert report.refusals == ["no token to learn from: all of them are masked or too old"]
    assert report.updates == 0
    assert report.stale_tokens == report.learned_tokens > 0
    assert torch.equal(weights_of(learner), before)
    half = np.arange(len(batch["input_ids"])) >= len(batch["input_ids"]) // 2
    fresh = batch.update(sw.SequenceSample(batch.ids, {"fresh": batch.seqlens["input_ids"]}, {"fresh": half}))
    losses = [learner_of(SFT()).step(each).loss for each in (batch, fresh)]
    assert 0.2 * losses[0] < losses[1] < 0.8 * losses[0]


def test_one_fresh_flag_a_datum_is_read():
    batch = batch_of(data=2, group=2)
    flags = sw.SequenceSample(batch.ids, {"fresh": [[1], [1]]}, {"fresh": np.array([True, False])})
    report = learner_of().step(batch.update(flags))
    own = sum(batch.seqlens["input_ids"][0])
    assert report.stale_tokens == batch["loss_mask"][own:].sum()


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_refused_and_told(broken):
    learner, batch = learner_of(GRPO(scale=None)), own_logprobs(batch_of())
    learner.step(batch)
    state = copy.deepcopy(learner.optimizer.state_dict()["state"])
    if broken == "loss":
        with torch.no_grad():
            learner.model.lm_head.weight[0, 0] = float("nan")
    before = weights_of(learner).nan_to_num(0)
    bad = batch
    if broken == "gradient":
        rewards = np.where(np.arange(len(batch["rewards"])) % 3 == 0, 3e38, -1e38).astype(np.float32)
        bad = batch.update(sw.SequenceSample(batch.ids, {"rewards": batch.seqlens["rewards"]}, {"rewards": rewards}))
    report = learner.step(bad)
    assert report.updates == 0
    assert len(report.refusals) == 1
    assert report.refusals[0].startswith(("loss is ", "grad_norm is "))
    assert torch.equal(weights_of(learner).nan_to_num(0), before)
    after = learner.optimizer.state_dict()["state"]
    assert all(torch.equal(state[at][name], after[at][name]) for at in state for name in state[at])
    if broken == "gradient":
        assert learner.step(batch).updates == 1  # the next one is as good as ever


def changed(batch, key, at, value):
    column = batch[key].copy()
    column[at] = value
    return batch.update(sw.SequenceSample(batch.ids, {key: batch.seqlens[key]}, {key: column}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b.select(["input_ids", "loss_mask"]), r"step\(\): the batch lacks logprobs, rewards; put or amend"),
        (lambda b: changed(b, "loss_mask", 0, True), r"'d0': loss_mask is True on the first token of a sequence"),
        (lambda b: changed(b, "logprobs", np.flatnonzero(b["loss_mask"])[-1], np.nan), "'d3': logprobs is nan at"),
        (lambda b: changed(b, "rewards", 5, np.inf), r"'d1': rewards is inf at token"),
        (
            lambda b: b.update(sw.SequenceSample(b.ids, {"logprobs": [[1]] * 4}, {"logprobs": np.zeros(4, "f")})),
            r"'d0': logprobs has lengths \[1\], input_ids \[\d+, \d+, \d+\]; each token needs one value",
        ),
        (
            lambda b: b.update(sw.SequenceSample(b.ids, {"rewards": [[2]] * 4}, {"rewards": np.zeros(8, "f")})),
            r"'d0': rewards has lengths \[2\] for 3 sequences; expected one reward a sequence, or one a token",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_trained_on_is_refused_and_changes_nothing(change, words):
    learner, batch = learner_of(), batch_of()
    before = weights_of(learner)
    with pytest.raises(SchemaError, match=words):
        learner.step(change(batch))
    assert torch.equal(weights_of(learner), before)
    assert learner.steps == 0


def test_values_at_tokens_that_are_not_learned_do_not_matter():
    batch = batch_of()
    prompts = np.flatnonzero(~batch["loss_mask"])
    learners = [learner_of(), learner_of()]
    for learner, each in zip(learners, (batch, changed(batch, "logprobs", prompts, np.nan)), strict=True):
        assert learner.step(each).updates == 1
    assert torch.equal(weights_of(learners[0]), weights_of(learners[1]))


def test_a_sequence_longer_than_a_row_is_named():
    with pytest.raises(
        SchemaError, match=r"step\(\): 'd\d' has \d+ tokens, row_tokens=8; raise Learner\(row_tokens=\)"
    ):
        learner_of(row_tokens=8).step(batch_of())


def test_a_model_that_the_objective_does_not_train_is_refused():
    with pytest.raises(SchemaError, match=r"model: ValueFit trains a ValueModel, got a Transformer"):
        learner_of(ValueFit())
    with pytest.raises(SchemaError, match=r"model: GRPO trains a Transformer, got a ValueModel"):
        learner_of(GRPO(), ValueModel.like(small_model()))


def test_the_learning_rate_rises_and_falls():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, decay_steps=2)
    assert [config.rate(step) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0, 0.0]
    learner = learner_of(SFT(), optimizer=config)
    assert [learner.step(batch_of()).learning_rate for _ in range(3)] == [0.25, 0.5, 0.75]


def test_published_weights_are_the_learner_s(tmp_path):
    learner, weights = learner_of(SFT()), Weights(tmp_path)
    learner.step(batch_of())
    published = learner.publish(weights, version=1)
    state = published.read()
    assert all(torch.equal(state[name], parameter) for name, parameter in learner.model.named_parameters())


# ---- learning --------------------------------------------------------------------------------------------------------

FAST = OptimizerConfig(learning_rate=3e-3, warmup_steps=2)


def test_supervised_tokens_become_likely():
    learner, batch = learner_of(SFT(), optimizer=FAST), batch_of()
    losses = [learner.step(batch).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def guesses(model, prompts, wanted, random):
    """Two tokens after a prompt of two, drawn from the model; the reward is the share of them that are wanted."""
    ids = torch.from_numpy(prompts)
    lps = []
    with torch.no_grad():
        for _ in range(2):
            every = torch.log_softmax(model(ids)[:, -1], -1)
            drawn = torch.from_numpy((every.exp().numpy().cumsum(-1) > random.random((len(ids), 1))).argmax(-1))[
                :, None
            ]
            ids = torch.cat([ids, drawn], 1)
            lps.append(every.gather(1, drawn))
    rewards = (ids[:, 2:] == wanted).float().mean(1).numpy()
    count = len(prompts)
    logprobs = torch.cat([torch.zeros(count, 2), *lps], 1).flatten().numpy()
    lens, mask = [[4] * 8] * (count // 8), np.tile([False, False, True, True], count)
    columns = {"input_ids": ids.flatten().numpy(), "loss_mask": mask, "logprobs": logprobs}
    seqlens = {**dict.fromkeys(columns, lens), "rewards": [[1] * 8] * (count // 8)}
    return sw.SequenceSample(
        [str(at) for at in range(count // 8)], seqlens, {**columns, "rewards": rewards}
    ), rewards.mean()


@pytest.mark.parametrize(
    "objective", [GRPO(), GRPO(method="naive", level="sequence"), PPO()], ids=lambda o: f"{type(o).__name__}-{o.method}"
)
def test_rewarded_tokens_become_likely(objective):
    """With data that are two steps old. PPO has a value model that learns beside it."""
    model = small_model(vocab_size=12, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    learner = learner_of(
        objective, model, rows=16, row_tokens=32, minibatches=2, optimizer=OptimizerConfig(learning_rate=5e-3)
    )
    values = ValueModel.like(model)
    critic = learner_of(ValueFit(), values, rows=16, optimizer=OptimizerConfig(learning_rate=5e-3))
    random, old, means = np.random.default_rng(0), [], []
    for _ in range(25):
        old = [*old[-2:], copy.deepcopy(model)]
        prompts = np.repeat(random.integers(0, 12, (16, 2)), 8, 0)
        batch, mean = guesses(old[0], prompts, 7, random)
        means.append(mean)
        if isinstance(objective, PPO):
            batch = batch.update(critic.scorer.column(batch, "values"))
            critic.step(batch)
        assert learner.step(batch).refusals == []
    assert np.mean(means[:3]) < 0.25
    assert means[-1] > 0.6
