"""The seeds' own snippets, with only the import line changed, and the promises made about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.compat.replay_buffer import BufferConfig
from sharpwave.compat.replay_buffer import ReplayBuffer as ServiceBuffer
from sharpwave.errors import NotReady, SchemaError

# ---- "Experience Replay Buffer Service": the snippet of the specification's section "Python API" ---------------------

SERVICE_SNIPPET = """
from sharpwave.compat.replay_buffer import ReplayBuffer, BufferConfig

# Initialize
config = BufferConfig(
    capacity=1_000_000,
    strategy="prioritized",
    alpha=0.6,
    beta=0.4
)
buffer = ReplayBuffer(config, obs_shape=(84, 84, 4), action_dim=6)

# Add transition
buffer.add(obs, action, reward, next_obs, done)

# Sample batch (returns dict of numpy arrays)
batch = buffer.sample(batch_size=32)
# batch = {'obs': ndarray, 'action': ndarray, 'reward': ndarray, ...}
"""
SERVICE_UPDATE = """
# Update priorities after computing TD errors
buffer.update_priorities(indices, td_errors)
"""


def resident_bytes() -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024  # type: ignore[union-attr]


@pytest.mark.parametrize("action", [3, np.int64(3), np.linspace(0, 1, 6), np.arange(6)], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_service_snippet_runs(action: Any, dtype: Any) -> None:
    obs = np.random.default_rng(0).integers(0, 255, (84, 84, 4)).astype(dtype)
    names: dict[str, Any] = {"obs": obs, "action": action, "reward": 1.5, "next_obs": obs + 1, "done": True}
    exec(SERVICE_SNIPPET, names)
    batch, buffer = names["batch"], names["buffer"]
    exec(SERVICE_UPDATE, names | {"indices": batch["indices"], "td_errors": np.linspace(-1, 1, 32)})
    assert buffer.inner.stats()["updates_applied"] == 32
    assert set(batch) == {"obs", "action", "reward", "next_obs", "done", "indices", "weights", "probabilities"}
    assert batch["obs"].shape == (32, 84, 84, 4)
    assert batch["obs"].dtype == (np.uint8 if dtype is np.uint8 else np.float32)
    assert np.array_equal(batch["obs"][7], obs.astype(batch["obs"].dtype))
    assert np.array_equal(batch["next_obs"][7], (obs + 1).astype(batch["obs"].dtype))
    assert np.allclose(batch["action"][7], action)
    assert (batch["reward"] == 1.5).all()
    assert batch["done"].all()
    assert (buffer.size(), len(buffer), buffer.capacity(), buffer.is_full()) == (1, 1, 1_000_000, False)


def test_a_million_images_may_be_asked_for_and_only_what_is_filled_is_used() -> None:
    before = resident_bytes()
    buffer = ServiceBuffer(BufferConfig(capacity=1_000_000), obs_shape=(84, 84, 4), action_dim=6)
    obs = np.ones((84, 84, 4), np.float32)
    buffer.add(obs, 0, 0.0, obs, False)
    assert buffer.inner is not None
    assert buffer.inner.stats()["storage_bytes"] > 200 << 30
    assert resident_bytes() - before < 64 << 20
    direct = sw.ReplayBuffer(1_000_000, obs_shape=(84, 84, 4), obs_dtype="float32")
    direct.add(obs, 0.0, 0.0, obs, False)
    assert resident_bytes() - before < 128 << 20


def test_service_buffer_is_a_ring_and_is_full_at_its_capacity() -> None:
    buffer = ServiceBuffer(BufferConfig(capacity=3), obs_shape=(2,), action_dim=4, seed=0)
    with pytest.raises(NotReady, match="empty"):
        buffer.sample(1)
    assert (buffer.size(), buffer.is_full()) == (0, False)
    for number in range(5):
        buffer.add(np.full(2, number), number % 4, float(number), np.full(2, number), False)
    assert (buffer.size(), buffer.is_full()) == (3, True)
    assert set(buffer.sample(200)["reward"].tolist()) == {2.0, 3.0, 4.0}


def test_service_buffer_compresses_and_draws_uniformly_when_told() -> None:
    config = BufferConfig(capacity=50, strategy="uniform", enable_compression=True)
    buffer = ServiceBuffer(config, obs_shape=(64, 64), action_dim=2)
    with pytest.raises(NotReady):
        buffer.update_priorities([0], [1.0])
    for number in range(60):
        buffer.add(np.full((64, 64), number), 1, 0.0, np.full((64, 64), number + 1), False)
    batch = buffer.sample(32)
    assert (batch["next_obs"] == batch["obs"] + 1).all()
    assert buffer.inner is not None
    assert buffer.inner.stats()["heap_bytes"] < 50 * 64 * 64  # of 50 * 2 * 64 * 64 * 4
    with pytest.raises(SchemaError, match="drawn uniformly"):
        buffer.update_priorities(batch["indices"], np.ones(32))


def test_service_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(SchemaError, match="strategy: expected 'uniform' or 'prioritized', got 'rank'"):
        BufferConfig(capacity=10, strategy="rank")
    with pytest.raises(SchemaError, match=r"alpha: expected a number, 0 to 1, got 1\.5"):
        BufferConfig(capacity=10, alpha=1.5)
    with pytest.raises(SchemaError, match="capacity"):
        ServiceBuffer(BufferConfig(capacity=0), obs_shape=(2,), action_dim=4)


def test_service_first_add_that_fails_decides_nothing() -> None:
    buffer = ServiceBuffer(BufferConfig(capacity=10), obs_shape=(2,), action_dim=3)
    with pytest.raises(SchemaError):
        buffer.add(np.zeros(3), 0, 0.0, np.zeros(3), False)
    with pytest.raises(SchemaError, match="expected a whole number or 3 entries"):
        buffer.add(np.zeros(2), 0.5, 0.0, np.zeros(2), False)
    assert buffer.size() == 0
    buffer.add(np.zeros((4, 2)), np.zeros((4, 3)), np.zeros(4), np.zeros((4, 2)), np.zeros(4, bool))
    assert buffer.size() == 4


# ---- ApexRL ----------------------------------------------------------------------------------------------------------

APEX_SNIPPET = """
from sharpwave.compat.apexrl import ReplayBuffer

buffer = ReplayBuffer(
    capacity=1_000_000,
    obs_shape=(4,),
    action_shape=(2,),
    device="cpu",
)

# Store transition
buffer.add(obs, action, reward, next_obs, done)

# Sample batch
batch = buffer.sample(batch_size=256)
"""


@pytest.fixture
def apex() -> Any:
    pytest.importorskip("torch")
    from sharpwave.compat import apexrl

    return apexrl.ReplayBuffer


def test_apexrl_snippet_runs() -> None:
    torch = pytest.importorskip("torch")
    obs = torch.arange(256 * 4, dtype=torch.float32).reshape(256, 4)
    names: dict[str, Any] = {"obs": obs, "next_obs": obs + 1, "action": torch.randn(256, 2), "reward": obs[:, 0]}
    names["done"] = torch.zeros(256)
    exec(APEX_SNIPPET, names)
    batch = names["batch"]
    assert set(batch) == {"observations", "actions", "rewards", "next_observations", "dones"}
    assert {type(value) for value in batch.values()} == {torch.Tensor}
    assert torch.equal(batch["next_observations"], batch["observations"] + 1)
    assert torch.equal(batch["rewards"], batch["observations"][:, 0])
    assert batch["dones"].dtype == torch.float32
    rows = (batch["rewards"] / 4).long()
    assert torch.equal(batch["actions"], names["action"][rows])


def test_apexrl_action_of_a_half_stays_a_half(apex: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer = apex(10, (1,))
    buffer.add(torch.zeros(3, 1), torch.full((3,), 0.5), torch.zeros(3), torch.zeros(3, 1), torch.zeros(3))
    assert buffer.sample(3)["actions"].tolist() == [0.5, 0.5, 0.5]
    whole = apex(10, (1,))
    whole.add(torch.zeros(1), torch.tensor(2), 0.0, torch.zeros(1), False)
    assert whole.sample(1)["actions"].dtype == torch.int64


def test_apexrl_unbatched_row_is_one_row(apex: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer = apex(10, (4,), (2,))
    buffer.add(torch.arange(4.0), torch.ones(2), torch.tensor(1.0), torch.arange(4.0), torch.tensor(0.0))
    assert len(buffer) == 1
    assert buffer.sample(1)["observations"].tolist() == [[0, 1, 2, 3]]


def test_apexrl_draws_no_more_than_it_holds(apex: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer = apex(10, (1,))
    for wrong in (1, 0):
        with pytest.raises(SchemaError, match="expected 1 to the 0 rows held"):
            buffer.sample(wrong)
    buffer.add(torch.zeros(3, 1), torch.zeros(3), torch.zeros(3), torch.zeros(3, 1), torch.zeros(3))
    assert len(buffer.sample(3)["rewards"]) == 3
    for wrong in (4, 0, -1):
        with pytest.raises(SchemaError, match="expected 1 to the 3 rows held"):
            buffer.sample(wrong)


def numbers(first: int, count: int) -> list[Any]:
    torch = pytest.importorskip("torch")
    flat = torch.arange(first, first + count, dtype=torch.float32)
    return [flat[:, None], flat, flat, flat[:, None], torch.zeros(count)]


def test_apexrl_nine_rows_in_threes_at_capacity_five_leave_the_last_five(apex: Any) -> None:
    buffer = apex(5, (1,), seed=0)
    for first in (0, 3, 6):
        buffer.add(*numbers(first, 3))
    assert len(buffer) == 5
    drawn = {n for _ in range(50) for n in buffer.sample(5)["rewards"].tolist()}
    assert drawn == {4.0, 5.0, 6.0, 7.0, 8.0}


def test_apexrl_empty_batch_does_nothing_and_critic_observations_come_back(apex: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer = apex(5, (1,), critic_obs_shape=(2,))
    empty = [value[:0] for value in numbers(0, 3)]
    buffer.add(*empty, critic_obs=torch.zeros(0, 2), next_critic_obs=torch.zeros(0, 2))
    assert len(buffer) == 0
    critic = torch.arange(6.0).reshape(3, 2)
    buffer.add(*numbers(0, 3), critic_obs=critic, next_critic_obs=critic + 1)
    batch = buffer.sample(3)
    assert torch.equal(batch["critic_observations"], critic[batch["rewards"].long()])
    assert torch.equal(batch["next_critic_observations"], critic[batch["rewards"].long()] + 1)


def test_apexrl_state_goes_round(apex: Any) -> None:
    buffer, other = apex(5, (1,)), apex(5, (1,))
    buffer.add(*numbers(0, 3))
    buffer.add(*numbers(3, 4))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 5
    assert other.state_dict()["rows"]["reward"].tolist() == [2, 3, 4, 5, 6]
    with pytest.raises(SchemaError, match="capacity: expected 6, got 5"):
        apex(6, (1,)).load_state_dict(buffer.state_dict())
    fresh = apex(5, (1,))
    other.load_state_dict(fresh.state_dict())
    assert len(other) == 0


def test_apexrl_state_that_does_not_fit_changes_nothing(apex: Any) -> None:
    buffer, other = apex(5, (1,)), apex(5, (2,))
    buffer.add(*numbers(0, 3))
    wide = [value.repeat(1, 2) if value.ndim == 2 else value for value in numbers(0, 3)]
    other.add(*wide)
    with pytest.raises(SchemaError):
        buffer.load_state_dict(other.state_dict())
    assert len(buffer) == 3


def test_apexrl_clear_keeps_the_buffer_and_its_random_stream(apex: Any) -> None:
    buffer = apex(5, (1,), seed=0)
    buffer.add(*numbers(0, 5))
    inner, first = buffer.inner, buffer.sample(5)["rewards"].tolist()
    buffer.clear()
    buffer.add(*numbers(0, 5))
    assert buffer.sample(5)["rewards"].tolist() != first
    assert buffer.inner is inner
