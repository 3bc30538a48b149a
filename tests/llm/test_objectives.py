"""Objectives and their gradients, against slow NumPy and gradients derived by hand."""

import dataclasses

import numpy as np
import objective_references as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_batches import batch_of

import sharpwave as sw
from sharpwave.errors import SchemaError
from sharpwave.llm.learner import _token_shares
from sharpwave.llm.objectives import GRPO, PPO, SFT, Scores, ValueFit, clipped_loss, reference_kl, value_loss
from sharpwave.llm.token_batch import TokenBatch

torch.set_num_threads(1)
METHODS = ("naive", "recompute", "decoupled")
number = st.floats(-30, 2, allow_nan=False)
caps = st.sampled_from([None, 1.0, 2.0, 5.0])


@given(
    number, number, number, st.floats(-4, 4), st.sampled_from(METHODS), st.floats(0.001, 0.9),
    st.sampled_from([None, 0.05, 0.3, 3.0]), caps, st.sampled_from(["mask", "clamp"]),
)  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_clipped_loss_and_its_gradient_are_the_oracle_s(lp, old, prox, advantage, method, clip, high, cap, over_cap):
    base = old if method == "naive" else prox
    ratio = np.exp(np.clip(lp - base, -20, 20))
    for edge in (1 - clip, 1 + (clip if high is None else high)):
        if abs(ratio - edge) < 1e-6:  # where the slope jumps
            return
    tensor = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    made = clipped_loss(
        tensor, *(torch.tensor(value, dtype=torch.float64) for value in (old, prox, advantage)),
        method=method, clip=clip, clip_high=high, cap=cap, over_cap=over_cap,
    )  # fmt: skip
    made.loss.backward()
    loss, slope = oracle.clipped(lp, old, prox, advantage, method, clip, high, cap, over_cap)
    assert float(made.loss.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert float(tensor.grad) == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_by_hand_are_finite_differences(method):
    """So the oracle itself is tested."""
    for lp, old, prox, advantage in [(-1.0, -1.1, -1.05, 2.0), (-1.0, -1.4, -0.9, -1.0), (-2.0, -1.0, -1.9, -0.5)]:
        given = (old, prox, advantage, method, 0.2, None, 5.0, "mask")
        slope = oracle.clipped(lp, *given)[1]
        up, down = (oracle.clipped(lp + step, *given)[0] for step in (1e-6, -1e-6))
        assert (up - down) / 2e-6 == pytest.approx(slope, abs=1e-6)


@given(number, number)
@settings(max_examples=100, deadline=None)
def test_kl_and_its_gradient_are_the_oracle_s(lp, reference):
    if abs(lp - reference) > 19:
        return
    tensor = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    made = reference_kl(tensor, torch.tensor(reference, dtype=torch.float64))
    made.backward()
    assert float(made.detach()) >= -1e-12
    assert (float(made.detach()), float(tensor.grad)) == pytest.approx(oracle.kl(lp, reference), rel=1e-9, abs=1e-9)


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.sampled_from([None, 0.1, 0.5]))
@settings(max_examples=200, deadline=None)
def test_value_loss_and_its_gradient_are_the_oracle_s(value, old, target, clip):
    if clip is not None:
        near = min(max(value, old - clip), old + clip)
        if abs(abs(value - old) - clip) < 1e-6 or (
            near != value and abs((near - target) ** 2 - (value - target) ** 2) < 1e-6
        ):
            return
    tensor = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    made = value_loss(tensor, *(torch.tensor(each, dtype=torch.float64) for each in (old, target)), clip)
    made.backward()
    assert (float(made.detach()), float(tensor.grad)) == pytest.approx(
        oracle.fitted(value, old, target, clip), abs=1e-9
    )


@pytest.mark.parametrize("method", METHODS)
def test_numbers_far_apart_give_finite_gradients(method):
    """exp() of these overflows; a clipped or masked token must not turn the others into NaN."""
    lp = torch.tensor([0.0, -300.0, -1.0, -1.0], requires_grad=True)
    behaviour, proximal = torch.tensor([-200.0, -1.0, -300.0, -1.0]), torch.tensor([-200.0, -1.0, -1.0, -300.0])
    for advantage in (1.0, -1.0):
        made = clipped_loss(lp, behaviour, proximal, torch.full((4,), advantage), method=method)
        assert torch.isfinite(torch.autograd.grad(made.loss.sum(), lp)[0]).all()


def test_all_methods_are_one_where_the_data_are_of_the_policy_itself():
    lp, advantages = torch.randn(50), torch.randn(50)
    old = lp + 0.3 * torch.randn(50)
    losses = [clipped_loss(lp, old, old, advantages, method=method).loss for method in METHODS]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def test_members_side_by_side_with_clips_of_their_own_are_members_alone():
    lp, old, prox, advantages = torch.randn(4, 3, 5, 6).unbind(0)
    clips = torch.tensor([0.01, 0.1, 0.5])
    together = clipped_loss(lp, old, prox, advantages, clip=clips.view(-1, 1, 1))
    for at, clip in enumerate(clips.tolist()):
        one = clipped_loss(lp[at], old[at], prox[at], advantages[at], clip=clip)
        assert torch.allclose(together.loss[at], one.loss, atol=1e-6)
        assert torch.equal(together.is_clipped[at], one.is_clipped)


# ---- whole batches ---------------------------------------------------------------------------------------------------


def pieces(tokens, column):
    return np.split(np.asarray(column), np.cumsum(tokens.lens)[:-1])


def compare_policy(objective, batch, seed):
    """The loss of a minibatch of all sequences, and its gradient by each token's log-probability and entropy."""
    tokens = TokenBatch.read("test", batch, objective.inputs, objective.optional)
    columns = objective.prepare(tokens)
    random = np.random.default_rng(seed)
    total = int(tokens.lens.sum())
    lps = columns["behaviour"] + random.normal(0, 0.3, total).astype(np.float32)
    entropies = random.random(total).astype(np.float32)
    lp, entropy = (torch.tensor(each, requires_grad=True) for each in (lps, entropies))
    made, _ = objective.loss(Scores(lp, entropy), {name: torch.from_numpy(each) for name, each in columns.items()})
    share = torch.from_numpy(_token_shares(tokens, np.arange(len(tokens.lens)), objective.level))
    loss = (made * share).sum()
    loss.backward()

    told = {
        name: columns.get(name, columns["behaviour"]) for name in ("behaviour", "proximal", "reference", "advantages")
    }
    cut = {
        name: pieces(tokens, each) for name, each in {**told, "learned": tokens.learned, "fresh": tokens.fresh}.items()
    }
    sequences = [{name: each[at] for name, each in cut.items()} for at in range(len(tokens.lens))]
    expected, by_lp, by_entropy = oracle.policy(objective, sequences, pieces(tokens, lps), pieces(tokens, entropies))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.allclose(lp.grad, np.concatenate(by_lp), atol=1e-5)
    assert np.allclose(0 if entropy.grad is None else entropy.grad, np.concatenate(by_entropy), atol=1e-6)
    return tokens, columns


objectives = st.fixed_dictionaries(
    {
        "method": st.sampled_from(METHODS),
        "clip": st.sampled_from([0.005, 0.2]),
        "clip_high": st.sampled_from([None, 0.3]),
        "cap": caps,
        "over_cap": st.sampled_from(["mask", "clamp"]),
        "level": st.sampled_from(["token", "sequence"]),
        "kl": st.sampled_from([0.0, 0.1]),
        "entropy": st.sampled_from([0.0, 0.01]),
    }
)


@given(
    objectives,
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from(["std", None]),
    st.sampled_from(["mean", "others"]),
)
@settings(max_examples=60, deadline=None)
def test_grpo_of_a_batch_is_the_oracle_s(chosen, seed, stale, scale, baseline):
    objective = GRPO(**chosen, scale=scale, baseline=baseline)
    batch = batch_of(seed, stale=stale, ref_logprobs=-5.0, prox_logprobs=-5.0)
    tokens, columns = compare_policy(objective, batch, seed)
    groups = np.repeat(np.arange(4), 3)
    expected = oracle.group_advantages(batch["rewards"].tolist(), groups.tolist(), scale, baseline)
    assert np.allclose(columns["advantages"], np.repeat(expected, tokens.lens), atol=1e-4)


@given(
    objectives,
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([1.0, 0.9]),
    st.sampled_from([1.0, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_ppo_and_its_values_of_a_batch_are_the_oracle_s(chosen, seed, stale, gamma, gae_lambda):
    batch = batch_of(seed, stale=stale, ref_logprobs=-5.0, prox_logprobs=-5.0, values=0.0)
    objective = PPO(**chosen, gamma=gamma, gae_lambda=gae_lambda, normalise=False)
    tokens, columns = compare_policy(objective, batch, seed)
    fit = ValueFit(gamma=gamma, gae_lambda=gae_lambda, level=chosen["level"])
    targets = pieces(tokens, fit.prepare(TokenBatch.read("test", batch, fit.inputs))["targets"])
    values, learned = pieces(tokens, tokens.columns["values"]), pieces(tokens, tokens.learned)
    for at, advantages in enumerate(pieces(tokens, columns["advantages"])):
        steps = np.flatnonzero(learned[at])
        own = values[at][steps].astype(float).tolist()
        # One reward a sequence: on its last token, or on the last learned one where a tool spoke last.
        rewards = [0.0] * (len(steps) - 1) + [float(batch["rewards"][at])]
        expected = oracle.estimated(rewards, own, gamma, gae_lambda)
        assert np.allclose(advantages[steps], expected, atol=1e-4)
        assert np.allclose(targets[at][steps], np.array(expected) + own, atol=1e-4)
        assert not advantages[~learned[at]].any()


def test_rewards_within_an_answer_belong_to_the_token_before():
    """Two sequences: a prompt token, then an answer with a tool's output in it. Rewards on the tool's tokens count."""
    mask = [False, True, False, False, True, False, True, True]
    lens = [[5, 3]]
    data = {
        "input_ids": np.arange(8),
        "loss_mask": np.array(mask),
        "logprobs": np.zeros(8, np.float32),
        "values": np.array([9, 0.5, 9, 9, 0.25, 9, 1, 2], np.float32),
        "rewards": np.array([0, 1, 2, 4, 8, 0, 16, 32], np.float32),
    }
    objective = PPO(gamma=0.9, gae_lambda=0.8, normalise=False)

    def advantages(**changes):
        given = {**data, **changes}
        batch = sw.SequenceSample(["a"], dict.fromkeys(given, lens), given)
        return objective.prepare(TokenBatch.read("test", batch, objective.inputs))["advantages"]

    expected = oracle.estimated([7, 8], [0.5, 0.25], 0.9, 0.8) + oracle.estimated([16, 32], [1, 2], 0.9, 0.8)
    assert advantages()[mask].tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(SchemaError, match="'a': rewards has a reward before the first token with loss_mask; no token"):
        advantages(rewards=np.array([0, 1, 2, 4, 8, 3, 16, 32], np.float32))


def test_normalised_advantages_of_fresh_tokens_have_mean_0_and_deviation_1():
    batch = batch_of(stale=0.3, values=0.0)
    objective = PPO()
    tokens = TokenBatch.read("test", batch, objective.inputs)
    used = objective.prepare(tokens)["advantages"][tokens.fresh]
    assert used.mean() == pytest.approx(0, abs=1e-5)
    assert used.std() == pytest.approx(1, abs=1e-3)


def test_sft_is_the_mean_negative_log_probability():
    tokens = TokenBatch.read("test", batch_of(), ())
    lp = torch.randn(len(tokens.learned), requires_grad=True)
    for level in ("token", "sequence"):
        each, _ = SFT(level).loss(Scores(lp, torch.zeros_like(lp)), {})
        share = torch.from_numpy(_token_shares(tokens, np.arange(len(tokens.lens)), level))
        made = (each * share).sum()
        parts = [
            -part[own].mean()
            for part, own in zip(pieces(tokens, lp.detach()), pieces(tokens, tokens.learned), strict=True)
        ]
        expected = -lp[torch.from_numpy(tokens.learned)].mean() if level == "token" else np.mean(parts)
        assert float(made.detach()) == pytest.approx(float(torch.as_tensor(expected).detach()), abs=1e-5)


def test_data_of_one_group_are_compared_with_each_other():
    batch = batch_of(data=4, group=1)
    together = type(batch)(batch.ids, batch.seqlens, batch.data, metadata={"group": ["x", "y", "x", "y"]})
    rewards = batch["rewards"]
    made = GRPO(scale=None).prepare(TokenBatch.read("test", together, GRPO().inputs))["advantages"]
    firsts = made[np.cumsum([0, *[row[0] for row in batch.seqlens["input_ids"]]])[:-1]]
    middle = [(rewards[0] + rewards[2]) / 2, (rewards[1] + rewards[3]) / 2] * 2
    assert np.allclose(firsts, rewards - middle, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GRPO(method="off"), "GRPO(): method: expected 'naive', 'recompute' or 'decoupled', got 'off'"),
        (lambda: GRPO(clip=2.0), "GRPO(): clip: expected a number, 0 to 1, got 2.0"),
        (lambda: GRPO(cap=0.5), "GRPO(): cap: expected a number, 1 to 1e+09, got 0.5"),
        (lambda: GRPO(scale="max"), "GRPO(): scale: expected 'std' or None, got 'max'"),
        (lambda: PPO(gamma=1.5), "PPO(): gamma: expected a number, 0 to 1, got 1.5"),
        (lambda: PPO(level="word"), "PPO(): level: expected 'token' or 'sequence', got 'word'"),
        (lambda: ValueFit(gae_lambda=-1), "ValueFit(): gae_lambda: expected a number, 0 to 1, got -1"),
        (lambda: SFT("word"), "SFT(): level: expected 'token' or 'sequence', got 'word'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, words):
    with pytest.raises(SchemaError) as raised:
        make()
    assert str(raised.value) == words


def test_objectives_are_settings_that_can_be_replaced():
    assert dataclasses.replace(GRPO(), clip=0.1) == GRPO(clip=0.1)
