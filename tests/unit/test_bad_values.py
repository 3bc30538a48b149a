"""Every public callable is fed a table of bad values: what it does not take it refuses as one of our errors.

A raw TypeError, ValueError, AttributeError or OverflowError names neither the argument nor what was expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError, SharpwaveError

torch = pytest.importorskip("torch")
gymnasium = pytest.importorskip("gymnasium")


class Own(Exception):
    pass


class Hostile:
    """Has the attributes of an array, and none of them works."""

    dtype = "nonsense"
    shape = "nonsense"
    ndim = -1

    def __len__(self) -> int:
        return -1

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise Own("no array")

    def __index__(self) -> int:
        raise Own("no index")

    def __float__(self) -> float:
        raise Own("no float")

    def __bool__(self) -> bool:
        raise Own("no truth")

    def __eq__(self, other: object) -> bool:
        raise Own("no equality")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Hostile()"


def bad_values() -> dict[str, Any]:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    return {
        "None": None,
        "True": True,
        "text": "nonsense",
        "empty text": "",
        "bytes": b"\xff",
        "complex": 1 + 2j,
        "nan": float("nan"),
        "inf": float("inf"),
        "huge": 10**400,
        "large": 1e300,
        "negative": -1,
        "zero": 0,
        "fraction": 1.5,
        "list": [],
        "dict": {},
        "dict of nonsense": {1: 2},
        "tuple": (),
        "set": {1},
        "ragged": [[1], [2, 3]],
        "nested": [[[[[[[[[[[[1]]]]]]]]]]]],
        "object": object(),
        "function": len,
        "type": int,
        "hostile": Hostile(),
        "iterator": iter([1]),
        "objects": np.array([object(), None]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "texts": np.array(["a", "b"]),
        "records": np.zeros(2, [("a", "f4")]),
        "empty array": np.zeros((0, 2)),
        "array": np.zeros((2, 2, 2)),
        "nan array": np.full(2, np.nan),
        "masked": masked,
        "masked 2": np.ma.masked_array(np.zeros((2, 2)), np.eye(2, dtype=bool)),
        "long double": np.zeros(2, np.longdouble),
        "byte order": np.zeros(2, ">f8"),
        "tensor": torch.zeros(3),
        "bfloat16": torch.zeros(2, dtype=torch.bfloat16),
        "meta": torch.zeros(2, device="meta"),
        "sparse": torch.zeros(2).to_sparse(),
        "grad": torch.zeros(2, requires_grad=True),
        "bad dtype": np.dtype("O"),
    }


Z = np.zeros(2)
ROW = {"obs": Z, "action": 0.0, "reward": 0.0, "next_obs": Z, "done": False}
STEP = {"observations": np.zeros((2, 3)), "actions": Z, "rewards": Z, "dones": Z, "values": Z, "log_probs": Z}


def replay(**options: Any) -> sw.ReplayBuffer:
    buffer = sw.ReplayBuffer(16, obs_shape=2, seed=0, **options)
    for _ in range(4):
        buffer.add(**ROW)
    return buffer


def rollout(**options: Any) -> sw.RolloutBuffer:
    roll = sw.RolloutBuffer(2, 3, obs_shape=3, seed=0, **options)
    for _ in range(3):
        roll.add(**STEP)
    roll.compute_returns_and_advantages(Z)
    return roll


def teacher(**options: Any) -> sw.DistillationBuffer:
    rows = sw.DistillationBuffer(16, obs_shape=2, num_envs=2, teacher={"mean": 2}, seed=0, **options)
    rows.add(np.zeros((2, 2)), Z, mean=np.zeros((2, 2)))
    return rows


def first(iterator: Any) -> Any:
    return next(iter(iterator))


TWO = np.zeros((3, 2))
FLAGS = np.zeros((3, 2), bool)
GAE = {"rewards": TWO, "values": TWO, "dones": FLAGS, "last_values": Z, "gamma": 0.9}
ENDS = {"truncated": FLAGS, "final_values": TWO}
GOALS = {"obs": {name: sw.Field((2,)) for name in ("observation", "achieved_goal", "desired_goal")}}

# A call by name, and its arguments that are good together: each of them is replaced in turn.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ReplayBuffer": (
        lambda **given: sw.ReplayBuffer(**given).close(),
        {
            "capacity": 8,
            "obs_shape": 2,
            "obs_dtype": "float32",
            "action_shape": (),
            "action_dtype": "float32",
            "next_obs": "stored",
            "sampler": None,
            "view": None,
            "pace": None,
            "exist": "error",
            "storage": None,
            "device": None,
            "num_envs": None,
            "writers": 2,
            "seed": 0,
        },
    ),
    "ReplayBuffer, schema": (lambda schema: sw.ReplayBuffer(8, schema=schema).close(), {"schema": {"obs": sw.Field()}}),
    "ReplayBuffer, part of a schema": (
        lambda obs: sw.ReplayBuffer(8, schema={"obs": obs, "extra": sw.Field()}).close(),
        {"obs": sw.Field()},
    ),
    "ReplayBuffer.for_env": (sw.ReplayBuffer.for_env, {"env": gymnasium.make("CartPole-v1"), "capacity": 8}),
    "ReplayBuffer.add": (lambda **given: replay().add(**given), {**ROW, "truncated": False, "mask": True}),
    "ReplayBuffer.add, positions": (
        lambda **given: replay().add(*given.values()),
        {"obs": Z, "action": 0.0, "reward": 0.0, "next_obs": Z, "done": False},
    ),
    "ReplayBuffer.add, priority": (
        lambda **given: replay(sampler=sw.Prioritized()).add(**ROW, **given),
        {"priority": 1.0},
    ),
    "ReplayBuffer.add, paced": (
        lambda **given: replay(pace=sw.Pace.min_size(1)).add(**ROW, **given),
        {"timeout": 0},
    ),
    "ReplayBuffer.add, rows": (
        lambda **given: sw.ReplayBuffer(16, obs_shape=2, num_envs=2).add(
            **{"obs": np.zeros((2, 2)), "next_obs": np.zeros((2, 2)), "action": Z, "reward": Z, "done": Z, **given}
        ),
        {"reward": Z, "done": FLAGS[0], "truncated": FLAGS[0], "mask": ~FLAGS[0]},
    ),
    "ReplayBuffer.sample": (
        lambda **given: replay().sample(**given),
        {"batch_size": 2, "out": None, "device": None, "timeout": None},
    ),
    "ReplayBuffer.sample, paced": (
        lambda **given: replay(pace=sw.Pace.min_size(1)).sample(2, **given),
        {"timeout": 0},
    ),
    "ReplayBuffer.get": (lambda indices: replay().get(indices), {"indices": [0, 1]}),
    "ReplayBuffer.rows": (lambda batch_size: first(replay().rows(batch_size)), {"batch_size": 2}),
    "ReplayBuffer.batches": (
        lambda **given: first(replay().batches(**given)),
        {"batch_size": 2, "prefetch": 1, "device": None, "timeout": 1},
    ),
    "ReplayBuffer.stream": (
        lambda **given: first(replay().stream(**given)),
        {"batch_size": 2, "device": "cpu", "prefetch": 1, "timeout": 1},
    ),
    "ReplayBuffer.update_priorities": (
        lambda **given: replay(sampler=sw.Prioritized()).update_priorities(**given),
        {"indices": [0, 1], "priorities": [1.0, 2.0], "mask": None},
    ),
    "ReplayBuffer.tune": (lambda **given: replay(sampler=sw.Prioritized()).tune(**given), {"alpha": 0.5, "beta": 0.5}),
    "ReplayBuffer.close": (lambda unlink: replay().close(unlink), {"unlink": False}),
    "ReplayBuffer.save": (
        lambda incremental: replay().save("/nowhere/x", incremental=incremental),
        {"incremental": False},
    ),
    "open": (
        lambda **given: sw.open(**given),
        {"address": "/nowhere/x", "view": None, "timeout": 0, "recover": False, "device": None},
    ),
    "RolloutBuffer": (
        lambda **given: sw.RolloutBuffer(**given),
        {
            "num_envs": 2,
            "num_steps": 3,
            "obs_shape": 3,
            "device": None,
            "privileged_obs_shape": None,
            "action_shape": (),
            "action_dtype": "float32",
            "hidden_states": None,
            "extras": None,
            "autoreset": "same_step",
            "seed": 0,
        },
    ),
    "RolloutBuffer.add": (
        lambda **given: sw.RolloutBuffer(2, 3, obs_shape=3).add(**given),
        {**STEP, "truncated": Z, "final_values": Z, "privileged_observations": None, "hidden_states": None},
    ),
    "RolloutBuffer.add, tensors": (
        lambda **given: sw.RolloutBuffer(2, 3, obs_shape=3, device="cpu").add(**given),
        {**{name: torch.from_numpy(value) for name, value in STEP.items()}},
    ),
    "RolloutBuffer.compute_returns_and_advantages": (
        lambda **given: rollout().compute_returns_and_advantages(**given),
        {"last_values": Z, "gamma": 0.9, "gae_lambda": 0.9, "partial": False},
    ),
    "RolloutBuffer.clear": (lambda reset: rollout().clear(reset=reset), {"reset": False}),
    "RolloutBuffer.all": (
        lambda normalize_advantages: rollout().all(normalize_advantages=normalize_advantages),
        {"normalize_advantages": False},
    ),
    "RolloutBuffer.save": (lambda path: rollout().save(path), {"path": "roll.sw"}),
    "RolloutBuffer.minibatches": (
        lambda **given: first(rollout().minibatches(**given)),
        {"num_minibatches": 2, "epochs": 1, "drop_remainder": False, "normalize_advantages": None},
    ),
    "RolloutBuffer.recurrent_minibatches": (
        lambda **given: first(rollout().recurrent_minibatches(**given)),
        {"num_minibatches": 2, "epochs": 1, "normalize_advantages": None},
    ),
    "RolloutBuffer.advantages": (lambda value: setattr(rollout(), "advantages", value), {"value": TWO}),
    "DistillationBuffer": (
        lambda **given: sw.DistillationBuffer(**given).close(),
        {
            "capacity": 8,
            "obs_shape": 2,
            "device": None,
            "action_shape": (),
            "action_dtype": "float32",
            "teacher": None,
            "num_envs": None,
            "storage": None,
            "exist": "error",
            "seed": 0,
        },
    ),
    "DistillationBuffer.add": (
        lambda **given: teacher().add(**given),
        {"obs": np.zeros((2, 2)), "action": Z, "done": FLAGS[0], "mean": np.zeros((2, 2)), "timeout": 0},
    ),
    "DistillationBuffer.add, first": (
        lambda **given: sw.DistillationBuffer(8, obs_shape=2).add(**given),
        {"obs": np.zeros((2, 2)), "action": Z, "done": FLAGS[0], "timeout": 0},
    ),
    "DistillationBuffer.sample": (
        lambda **given: teacher().sample(**given),
        {"batch_size": 2, "out": None, "device": None, "timeout": 1},
    ),
    "DistillationBuffer.save": (lambda path: teacher().save(path), {"path": "teacher.sw"}),
    "DistillationBuffer.batches": (
        lambda **given: first(teacher().batches(**given)),
        {"batch_size": 2, "epochs": 1, "drop_remainder": False, "device": None},
    ),
    "DistillationBuffer.steps": (lambda **given: first(teacher().steps(**given)), {"length": 1, "device": None}),
    "DistillationBuffer.close": (lambda unlink: teacher().close(unlink), {"unlink": False}),
    "Field": (
        sw.Field,
        {"shape": (2,), "dtype": "float32", "stack": 1, "compression": None, "ragged": False},
    ),
    "Linear": (sw.Linear, {"start": 0.0, "end": 1.0, "steps": 10}),
    "Uniform": (sw.Uniform, {"newest": 0, "max_reads": None}),
    "Prioritized": (
        sw.Prioritized,
        {"alpha": 0.6, "beta": 0.4, "eps": 1e-6, "newest": 0, "max_reads": None, "normalize": "batch"},
    ),
    "Recent": (sw.Recent, {"n": 5, "newest": 0, "max_reads": None}),
    "Shuffle": (sw.Shuffle, {"max_reads": None}),
    "Fifo": (sw.Fifo, {"max_reads": 1}),
    "Lifo": (sw.Lifo, {"max_reads": 1}),
    "Transitions": (sw.Transitions, {"n_step": 1, "gamma": 0.9, "hindsight": None}),
    "Windows": (
        sw.Windows,
        {"length": 4, "burn_in": 0, "stride": 1, "end": "pad", "start": "uniform", "bootstrap": 0, "priority_eta": 0.9},
    ),
    "Hindsight": (
        sw.Hindsight,
        {"strategy": "future", "ratio": 0.5, "reward": lambda achieved, desired: achieved[:, 0]},
    ),
    "Pace": (sw.Pace, {"min_size": 1, "samples_per_insert": 1.0, "min_diff": -1.0, "max_diff": 10.0}),
    "Pace.min_size": (sw.Pace.min_size, {"n": 2}),
    "Pace.queue": (sw.Pace.queue, {"n": 2}),
    "Pace.samples_per_insert": (sw.Pace.samples_per_insert, {"ratio": 1.0, "min_size": 1, "error": 5.0}),
    "Pace.samples_per_insert, two": (
        lambda low, high: sw.Pace.samples_per_insert(1.0, 1, (low, high)),
        {"low": -5.0, "high": 10.0},
    ),
    "gae": (sw.returns.gae, {**GAE, **ENDS, "gae_lambda": 0.9, "mask": FLAGS}),
    "gae, tensors": (
        lambda **given: sw.returns.gae(**given),
        {name: torch.from_numpy(value) for name, value in {**GAE, **ENDS}.items() if name != "gamma"},
    ),
    "lambda_returns": (sw.returns.lambda_returns, {**GAE, **ENDS, "lam": 0.9, "mask": FLAGS}),
    "discounted_returns": (
        sw.returns.discounted_returns,
        {"rewards": TWO, "dones": FLAGS, "last_values": Z, "gamma": 0.9, **ENDS},
    ),
    "vtrace": (
        sw.returns.vtrace,
        {
            **GAE,
            **ENDS,
            "log_probs": TWO,
            "behaviour_log_probs": TWO,
            "lam": 1.0,
            "mask": FLAGS,
            "rho_clip": 1.0,
            "c_clip": 1.0,
            "pg_rho_clip": 1.0,
        },
    ),
    "group_relative_advantages, size": (
        sw.returns.group_relative_advantages,
        {"rewards": np.zeros(4), "group_size": 2, "baseline": "mean", "scale": "std", "eps": 1e-6},
    ),
    "group_relative_advantages, groups": (
        sw.returns.group_relative_advantages,
        {"rewards": np.zeros(4), "groups": [0, 0, 1, 1]},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_values_are_refused_as_our_errors(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, good = CALLS[name]
    if name not in ("open", "ReplayBuffer.save"):
        call(**good)
    raw, refused = [], 0
    for argument in good:
        for what, value in bad_values().items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    call(**{**good, argument: value})
                except SharpwaveError:
                    refused += 1
                except Exception as error:
                    if type(value) is Hostile and type(error) is Own:
                        continue  # what an object itself raises is its author's
                    raw.append(f"{argument}={what}: {type(error).__name__}: {error}")
    assert not raw, "\n".join([f"{len(raw)} raw errors of {name}", *raw])
    assert refused > len(good) * len(bad_values()) / 4, "the table is not that good"


# ---- values that would change their meaning in silence ---------------------------------------------------------------


def masked(*shape: int, dtype: str = "float64") -> Any:
    return np.ma.masked_array(np.ones(shape, dtype), np.arange(np.prod(shape)).reshape(shape) == 0)


MASKED = "expected an array without a mask, got one with 1 of"


@pytest.mark.parametrize("field", ["obs", "action", "reward", "next_obs", "done", "truncated", "mask", "priority"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bool"])
def test_masked_values_are_not_added(field: str, dtype: str) -> None:
    rows = sw.ReplayBuffer(16, obs_shape=2, num_envs=2, sampler=sw.Prioritized(), seed=0)
    good: dict[str, Any] = {"obs": np.zeros((2, 2)), "next_obs": np.zeros((2, 2)), "action": Z, "reward": Z, "done": Z}
    shape = (2, 2) if "obs" in field else (2,)
    with pytest.raises(SchemaError, match=MASKED):
        rows.add(**{**good, field: masked(*shape, dtype=dtype)})
    assert len(rows) == 0
    unmasked = np.ma.masked_array(np.ones(shape, dtype), False)
    rows.add(**{**good, field: unmasked})
    assert len(rows) == 2


def test_masked_values_are_refused_everywhere() -> None:
    prioritized = replay(sampler=sw.Prioritized())
    calls: list[Callable[[], Any]] = [
        lambda: prioritized.update_priorities(np.arange(2), masked(2)),
        lambda: prioritized.update_priorities(masked(2, dtype="int64"), np.ones(2)),
        lambda: prioritized.get(masked(2, dtype="int64")),
        lambda: sw.RolloutBuffer(2, 3, obs_shape=3).add(**{**STEP, "rewards": masked(2)}),
        lambda: sw.RolloutBuffer(2, 3, obs_shape=3).add(**{**STEP, "actions": masked(2)}),
        lambda: sw.RolloutBuffer(2, 3, obs_shape=3, device="cpu").add(**{**STEP, "observations": masked(2, 3)}),
        lambda: rollout().compute_returns_and_advantages(masked(2)),
        lambda: setattr(rollout(), "advantages", masked(3, 2)),
        lambda: teacher().add(masked(2, 2), Z, mean=np.zeros((2, 2))),
        lambda: teacher().add(np.zeros((2, 2)), masked(2), mean=np.zeros((2, 2))),
        lambda: sw.DistillationBuffer(8, obs_shape=2).add(np.zeros((2, 2)), masked(2)),
        lambda: sw.returns.gae(masked(3, 2), TWO, FLAGS, Z),
        lambda: sw.returns.gae(TWO, TWO, masked(3, 2), Z),
        lambda: sw.returns.group_relative_advantages(masked(4), group_size=2),
    ]
    for call in calls:
        with pytest.raises(SchemaError, match=MASKED):
            call()
    assert len(prioritized) == 4


def test_arrays_in_files_are_added_as_any_other(tmp_path: Any) -> None:
    rows = sw.ReplayBuffer(16, obs_shape=2, seed=0)
    mapped = np.memmap(tmp_path / "obs", np.float32, "w+", shape=(4, 2))
    mapped[...] = 7
    rows.add(mapped[0], 0.0, 0.0, mapped[1], False)
    assert (rows.sample(2)["obs"] == 7).all()


@pytest.mark.parametrize("value", [1e300, -1e300, 3.5e38])
def test_numbers_beyond_the_dtype_are_refused_and_infinite_ones_are_the_users(value: float) -> None:
    beyond = np.array([0.0, value])
    words = "beyond float32|float32 can hold"
    for add in (
        lambda reward: sw.ReplayBuffer(8, obs_shape=2).add(Z, 0.0, reward[1], Z, False),
        lambda reward: sw.ReplayBuffer(8, obs_shape=2).add(Z, 0.0, float(reward[1]), Z, False),
        lambda reward: sw.ReplayBuffer(8, obs_shape=2).add(reward, 0.0, 0.0, Z, False),
        lambda reward: sw.DistillationBuffer(8, obs_shape=2).add(reward, 0),
        lambda reward: sw.RolloutBuffer(2, 3, obs_shape=3).add(**{**STEP, "rewards": reward}),
        lambda reward: sw.RolloutBuffer(2, 3, obs_shape=3).add(**{**STEP, "rewards": reward[:, None]}),
        lambda reward: sw.RolloutBuffer(2, 3, obs_shape=3, device="cpu").add(
            **{**STEP, "values": torch.from_numpy(reward)}
        ),
        lambda reward: sw.RolloutBuffer(2, 3, obs_shape=3, device="cpu").add(**{**STEP, "values": reward}),
        lambda reward: rollout().compute_returns_and_advantages(reward),
        lambda reward: rollout(device="cpu").compute_returns_and_advantages(torch.from_numpy(reward)),
        lambda reward: setattr(rollout(), "returns", np.stack([reward] * 3)),
        lambda reward: sw.returns.gae(TWO.astype("f4"), TWO.astype("f4"), FLAGS, reward),
        lambda reward: sw.returns.gae(TWO.astype("f4"), TWO.astype("f4"), FLAGS, float(reward[1])),
    ):
        with pytest.raises(SchemaError, match=words):
            add(beyond)
        for mine in (np.inf, -np.inf, np.nan):
            add(np.array([0.0, mine]))
    # A second add with the same shape and dtype is looked at as well.
    roll = sw.RolloutBuffer(2, 3, obs_shape=3)
    roll.add(**STEP)
    with pytest.raises(SchemaError, match="add\\(\\): rewards: expected numbers that float32 can hold, got"):
        roll.add(**{**STEP, "rewards": beyond})
    assert roll.step == 1


def test_wide_numbers_stay_wide_in_returns() -> None:
    advantages, _ = sw.returns.gae(np.full((3, 2), 1e300), TWO, FLAGS, Z)
    assert advantages.dtype == np.float64
    assert np.isfinite(advantages).all()


def test_nan_is_neither_done_nor_not() -> None:
    nan = np.array([0.0, np.nan])
    tensor = torch.from_numpy(nan)
    flags = np.stack([nan] * 3)
    floats = {"obs": sw.Field(2), "done": sw.Field((), "float32")}
    calls: list[Callable[[], Any]] = [
        lambda: sw.ReplayBuffer(8, obs_shape=2).add(Z, 0.0, 0.0, Z, np.nan),
        lambda: sw.ReplayBuffer(8, schema=floats).add(obs=Z, reward=0.0, next_obs=Z, done=np.nan),
        lambda: sw.ReplayBuffer(8, schema=floats).add(obs=Z, reward=0.0, next_obs=Z, done=np.float32(np.nan)),
        lambda: sw.RolloutBuffer(2, 3, obs_shape=3).add(**{**STEP, "dones": nan}),
        lambda: sw.RolloutBuffer(2, 3, obs_shape=3).add(**STEP, truncated=nan, final_values=Z),
        lambda: sw.RolloutBuffer(2, 3, obs_shape=3, device="cpu").add(**{**STEP, "dones": tensor}),
        lambda: setattr(rollout(), "dones", flags),
        lambda: teacher().add(np.zeros((2, 2)), Z, nan, mean=np.zeros((2, 2))),
        lambda: sw.returns.gae(TWO, TWO, flags, Z),
        lambda: sw.returns.gae(TWO.astype("f4"), TWO.astype("f4"), flags, Z),
        lambda: sw.returns.gae(TWO, TWO, FLAGS, Z, truncated=flags, final_values=TWO),
        lambda: sw.returns.gae(TWO, TWO, FLAGS, Z, mask=flags),
        lambda: sw.returns.gae(*(torch.from_numpy(value) for value in (TWO, TWO, flags, Z))),
        lambda: sw.returns.discounted_returns(TWO, flags, Z),
        lambda: sw.returns.vtrace(TWO, TWO, flags, Z, TWO, TWO),
    ]
    for call in calls:
        with pytest.raises(SchemaError, match=r"got NaN|values other than 0 and 1"):
            call()


def test_iterator_with_a_bad_timeout_does_not_hang() -> None:
    for timeout in ("soon", float("nan"), -1):
        for verb in ("batches", "stream"):
            with pytest.raises(SchemaError, match=rf"{verb}\(\): timeout: expected a number"):
                getattr(replay(), verb)(2, timeout=timeout)
