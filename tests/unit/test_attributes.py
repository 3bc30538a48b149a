"""Attributes of buffers and settings: an assignment is stored where it counts, or it is an error."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.compat import replay_buffer as seed
from sharpwave.errors import SchemaError

torch = pytest.importorskip("torch")
from sharpwave.compat import apexrl  # noqa: E402

FLOW = sw.Dataflow([sw.Consumer("train", inputs={"input_ids"}, batch_size=1)])
FACES: dict[str, Any] = {
    "ReplayBuffer": lambda: sw.ReplayBuffer(8, obs_shape=2),
    "RolloutBuffer": lambda: sw.RolloutBuffer(2, 3, obs_shape=4),
    "DistillationBuffer": lambda: sw.DistillationBuffer(8, obs_shape=2),
    "TrajectoryReplayBuffer": lambda: sw.TrajectoryReplayBuffer(None, seed=0),
    "SequenceBuffer": lambda: sw.SequenceBuffer(8, flow=FLOW),
    "apexrl.ReplayBuffer": lambda: apexrl.ReplayBuffer(8, (2,)),
    "apexrl.RolloutBuffer": lambda: apexrl.RolloutBuffer(2, 3, (4,)),
    "replay_buffer.ReplayBuffer": lambda: seed.ReplayBuffer(seed.BufferConfig(8), (2,), 1),
}


def filled(cls: Any = sw.RolloutBuffer, device: Any = None) -> Any:
    roll = cls(num_envs=2, num_steps=3, obs_shape=(4,), device=device, seed=0)
    for t in range(3):
        row = np.array([t, t + 0.5], np.float32)
        given: dict[str, Any] = {"observations": np.ones((2, 4), np.float32), "actions": np.zeros(2, np.int64)}
        given |= {"rewards": row, "dones": np.array([t == 1, False]), "values": row, "log_probs": row}
        roll.add(**{name: value if device is None else torch.from_numpy(value) for name, value in given.items()})
    zeros = np.zeros(2, np.float32)
    roll.compute_returns_and_advantages(zeros if device is None else torch.from_numpy(zeros))
    return roll


def whole(roll: Any) -> Any:
    return roll.get_all_data() if isinstance(roll, apexrl.RolloutBuffer) else roll.all()


KINDS = [(sw.RolloutBuffer, None), (sw.RolloutBuffer, "cpu"), (apexrl.RolloutBuffer, "cpu")]


@pytest.mark.parametrize(("cls", "device"), KINDS)
@pytest.mark.parametrize("name", ["advantages", "returns", "values", "log_probs"])
def test_what_is_assigned_to_a_rollout_is_what_batches_hold(cls: Any, device: Any, name: str) -> None:
    roll = filled(cls, device)
    key = "old_log_probs" if name == "log_probs" else name
    kept, flat = getattr(roll, name), whole(roll)[key]
    normal = (kept - kept.mean()) / (kept.std() + 1e-8)
    setattr(roll, name, normal)
    assert np.allclose(whole(roll)[key].reshape(3, 2), normal)
    assert np.allclose(flat.reshape(3, 2), normal), "the same memory as before"
    assert getattr(roll, name) is kept
    seen = np.concatenate([batch[key] for batch in roll.minibatches(2)])
    assert np.allclose(np.sort(seen), np.sort(np.asarray(normal).reshape(-1)))


@pytest.mark.parametrize(("cls", "device"), KINDS)
@pytest.mark.parametrize("how", ["one", "all"])
def test_dones_written_to_a_rollout_count_in_its_advantages(cls: Any, device: Any, how: str) -> None:
    roll, other = filled(cls, device), filled(cls, device)
    if how == "one":
        roll.dones[0, 1] = 1
    else:
        dones = np.array([[0, 1], [1, 0], [0, 0]], np.float32)
        roll.dones = dones if device is None else torch.from_numpy(dones)
    assert np.asarray(roll.dones).tolist() == [[0, 1], [1, 0], [0, 0]]
    last = np.zeros(2, np.float32)
    for each in (roll, other):
        each.compute_returns_and_advantages(last if device is None else torch.from_numpy(last), 0.9, 1.0)
    assert float(roll.returns[0, 1]) == 0.5, "its own reward alone"
    assert float(other.returns[0, 1]) == pytest.approx(0.5 + 0.9 * 1.5 + 0.81 * 2.5)
    batches = roll.minibatches(2)
    next(batches)
    roll.advantages -= 1
    with pytest.raises(sw.errors.NotReady, match="the rollout has changed"):
        next(batches)


@pytest.mark.parametrize(("cls", "device"), KINDS)
def test_what_does_not_fit_a_rollout_is_refused_and_changes_nothing(cls: Any, device: Any) -> None:
    roll = filled(cls, device)
    before = np.asarray(roll.advantages).copy()
    wide = np.zeros((3, 3), np.float32)
    with pytest.raises(
        SchemaError, match=r"RolloutBuffer.advantages: advantages: expected shape \(3, 2\), got \(3, 3\)"
    ):
        roll.advantages = wide if device is None else torch.from_numpy(wide)
    with pytest.raises(SchemaError, match=r"RolloutBuffer.actions: actions: expected int64, got (torch.)?float32"):
        roll.actions = roll.values
    assert np.array_equal(roll.advantages, before)


@pytest.mark.parametrize("face", FACES)
def test_attributes_that_a_face_does_not_have_cannot_be_set(face: str) -> None:
    buffer = FACES[face]()
    before = dict(vars(buffer))
    for name in ("advantage", "rewrads", "alpha", "beta", "obs_shape", "seed", "priorities", "size_limit"):
        with pytest.raises(AttributeError, match=f"'{name}' cannot be set: settings are given to the constructor"):
            setattr(buffer, name, 1)
    assert vars(buffer) == before


def is_fact(attribute: Any) -> bool:
    return isinstance(attribute, property) and attribute.fset is None


@pytest.mark.parametrize("face", FACES)
def test_facts_of_a_face_cannot_be_set(face: str) -> None:
    buffer = FACES[face]()
    cls = type(buffer)
    facts = [name for name in dir(cls) if not name.startswith("_") and is_fact(getattr(cls, name))]
    facts += [name for name in ("capacity", "flow", "max_staleness") if name in vars(buffer)]
    for name in facts:
        with pytest.raises(AttributeError):
            setattr(buffer, name, 1)


@pytest.mark.parametrize("face", FACES)
def test_subclasses_have_attributes_of_their_own_and_methods_can_be_replaced(face: str) -> None:
    buffer = FACES[face]()
    mine = type("Mine", (type(buffer),), {})
    made = mine.__new__(mine)
    made.__dict__.update(vars(buffer))
    made.history = [1]
    assert made.history == [1]
    verb = next(name for name in ("sample", "put", "minibatches") if hasattr(buffer, name))
    setattr(buffer, verb, lambda: 7)  # an observer's wrapper, for example
    assert getattr(buffer, verb)() == 7


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (sw.Uniform(), "newest"),
        (sw.Prioritized(), "alpha"),
        (sw.Linear(0.4, 1.0, 100), "steps"),
        (sw.Recent(5), "n"),
        (sw.Shuffle(), "max_reads"),
        (sw.Fifo(), "max_reads"),
        (sw.Lifo(), "max_reads"),
        (sw.Transitions(3), "n_step"),
        (sw.Windows(4), "length"),
        (sw.Field((3,)), "shape"),
    ],
)
def test_settings_do_not_change_after_they_are_made(settings: Any, name: str) -> None:
    before = getattr(settings, name)
    with pytest.raises(AttributeError, match=f"{type(settings).__name__}: '{name}' cannot be changed; make another"):
        setattr(settings, name, 1)
    with pytest.raises(AttributeError):
        settings.unheard_of = 1
    for other in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert getattr(other, name) == before
