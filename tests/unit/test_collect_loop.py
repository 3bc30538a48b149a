"""collect as the loop of a training script: a report every k rows, runs without an end, and values that the policy adds
to its actions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_collect import MODES, SEED, Corridor, assert_rows_are, by_hand, cart_policy, corridor_policy, make_cart

import sharpwave as sw
from sharpwave.errors import SchemaError

gym = pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402


def vector(mode: Any = AutoresetMode.NEXT_STEP, width: int = 3) -> Any:
    return SyncVectorEnv([make_cart] * width, autoreset_mode=mode)


@pytest.mark.parametrize("steps", [40, 42])
def test_single_environment_reports_every_k_rows_and_at_the_end(steps: int) -> None:
    env = make_cart()
    one, other = (sw.ReplayBuffer.for_env(env, 100) for _ in range(2))
    plain = list(sw.collect(env, cart_policy, one, steps, seed=SEED))
    reports = list(sw.collect(env, cart_policy, other, steps, every=8, seed=SEED))
    assert [list(report) for report in reports] == [["step", "episodes"]] * len(reports)
    assert [report["step"] for report in reports] == [8, 16, 24, 32, 40, *([42] if steps == 42 else [])]
    assert [episode for report in reports for episode in report["episodes"]] == plain
    assert len(plain) >= 2
    for report, before in zip(reports, [0, *(report["step"] for report in reports)], strict=False):
        assert all(before < episode["step"] <= report["step"] for episode in report["episodes"])
    for mine, its in zip(one.rows(), other.rows(), strict=True):
        assert all(np.array_equal(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize("mode", MODES)
def test_vector_environments_report_at_the_first_step_that_reaches_a_multiple(mode: Any) -> None:
    one, other = (sw.ReplayBuffer.for_env(vector(mode), 300) for _ in range(2))
    plain = list(sw.collect(vector(mode), cart_policy, one, 100, seed=SEED))
    reports = list(sw.collect(vector(mode), cart_policy, other, 100, every=10, seed=SEED))
    told = [report["step"] for report in reports]
    assert told[-1] == len(other) == len(one)
    assert len({step // 10 for step in told}) >= 10
    assert all(step - 10 * (step // 10) < 3 for step in told[:-1])  # within one vector step
    assert [episode for report in reports for episode in report["episodes"]] == plain


def test_one_report_where_a_vector_step_passes_several_multiples() -> None:
    envs = vector(width=8)
    buffer = sw.ReplayBuffer.for_env(envs, 96)
    assert [report["step"] for report in sw.collect(envs, cart_policy, buffer, 40, every=3)] == [8, 16, 24, 32, 40]


@pytest.mark.parametrize("is_vector", [False, True])
def test_the_rows_are_in_the_buffer_when_a_report_comes(is_vector: bool) -> None:
    envs = vector() if is_vector else make_cart()
    buffer = sw.ReplayBuffer.for_env(envs, 300)
    for report in sw.collect(envs, cart_policy, buffer, 60, every=5, seed=SEED):
        assert len(buffer) == report["step"]
        buffer.sample(4)


@pytest.mark.parametrize("is_vector", [False, True])
def test_without_steps_it_goes_on_until_the_loop_is_left(is_vector: bool) -> None:
    envs = vector() if is_vector else make_cart()
    buffer = sw.ReplayBuffer.for_env(envs, 999)
    for report in sw.collect(envs, cart_policy, buffer, None, every=4, seed=SEED):
        if report["step"] >= 100:
            break
    width = 3 if is_vector else 1
    assert 100 <= len(buffer) < 104 + width
    lengths = assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED + i, 200) for i in range(width)])
    assert sum(lengths) == len(buffer)  # open episodes ended as truncated


def test_an_iterator_that_is_kept_continues_after_a_break() -> None:
    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 1_000)
    run = sw.collect(env, cart_policy, buffer, None, every=10, seed=SEED)
    for _ in run:
        break
    assert len(buffer) == 10
    assert next(run)["step"] == 20
    run.close()
    assert assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED, 50)]) == [20]


def test_without_steps_and_every_it_yields_episodes_without_end() -> None:
    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 1_000)
    run = sw.collect(env, cart_policy, buffer, None, seed=SEED)
    episodes = list(itertools.islice(run, 5))
    assert sum(episode["length"] for episode in episodes) == len(buffer)


def test_bar_of_a_run_without_end(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    env = make_cart()
    run = sw.collect(env, cart_policy, sw.ReplayBuffer.for_env(env, 100), None, every=5, progress=True)
    next(run), next(run)
    run.close()
    assert "10/?" in capsys.readouterr().out


def with_logp(obs: Any) -> Any:
    return cart_policy(obs), {"logp": obs[..., 0] * 2, "state": {"h": obs[..., 1:3]}}


def logp_buffer(envs: Any, **options: Any) -> sw.ReplayBuffer:
    fields = {"logp": sw.Field(()), "state": {"h": sw.Field((2,))}}
    return sw.ReplayBuffer.for_env(envs, 300, schema=fields, **options)


@pytest.mark.parametrize("next_obs", ["stored", "derived", None])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_policy_fills_the_fields_that_collect_does_not_know(mode: Any, next_obs: Any) -> None:
    envs = make_cart() if mode is None else vector(mode)
    buffer = logp_buffer(envs, next_obs=next_obs)
    list(sw.collect(envs, with_logp, buffer, 80, seed=SEED))
    width = 1 if mode is None else 3
    assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED + i, 100) for i in range(width)])
    (rows,) = buffer.rows()
    assert np.array_equal(rows["logp"], rows["obs"][:, 0] * 2)
    assert np.array_equal(rows["state"]["h"], rows["obs"][:, 1:3])


def test_policy_may_return_tensors_beside_its_action() -> None:
    torch = pytest.importorskip("torch")
    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 300, schema={"logp": sw.Field(())})

    def policy(obs: Any) -> Any:
        return torch.as_tensor(cart_policy(obs)), {"logp": torch.as_tensor(obs)[0].requires_grad_() * 3}

    list(sw.collect(env, policy, buffer, 30, seed=SEED))
    (rows,) = buffer.rows()
    assert np.array_equal(rows["logp"], rows["obs"][:, 0] * 3)


def test_actions_that_are_dicts_need_no_rule_of_their_own() -> None:
    env = Corridor()
    plain, fuller = sw.ReplayBuffer.for_env(env, 50), sw.ReplayBuffer.for_env(env, 50, schema={"logp": sw.Field(())})
    list(sw.collect(env, corridor_policy, plain, 20, seed=SEED))
    list(sw.collect(env, lambda obs: (corridor_policy(obs), {"logp": 1.0}), fuller, 20, seed=SEED))
    for mine, its in zip(plain.rows(), fuller.rows(), strict=True):
        assert np.array_equal(mine["action"]["force"], its["action"]["force"])
        assert (its["logp"] == 1).all()


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (0, "got int"),
        ((0, 1), "got a tuple of 2"),
        ((0, {"logp": 1.0}, 2), "got a tuple of 3"),
        ((0, {"logp": 1.0}), "got no state"),
        ((0, {"state": {"h": [0, 0]}, "value": 1.0}), "got no logp and 'value', which is none of them"),
    ],
)
@pytest.mark.parametrize("is_vector", [False, True])
def test_policy_that_returns_something_else_is_told_what_is_missing(made: Any, got: str, is_vector: bool) -> None:
    envs = vector() if is_vector else make_cart()
    buffer = logp_buffer(envs)
    with pytest.raises(SchemaError) as caught:
        list(sw.collect(envs, lambda obs: made, buffer, 20))
    assert str(caught.value) == (
        "collect(): policy: the buffer has the fields logp, state besides; expected (action, dict of these fields), "
        + got
    )
    assert len(buffer) == 0


@pytest.mark.parametrize("every", [0, 2.5, True])
def test_every_must_be_a_whole_number(every: Any) -> None:
    env = make_cart()
    with pytest.raises(SchemaError, match=r"collect\(\): every: expected a whole number, at least 1, got"):
        sw.collect(env, cart_policy, sw.ReplayBuffer.for_env(env, 10), 5, every=every)
