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
from sharpwave.errors import BufferFull, NotReady, SchemaError

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
    buffer.add(*empty, critic_observations=torch.zeros(0, 2), next_critic_observations=torch.zeros(0, 2))
    assert len(buffer) == 0
    critic = torch.arange(6.0).reshape(3, 2)
    buffer.add(*numbers(0, 3), critic_observations=critic, next_critic_observations=critic + 1)
    batch = buffer.sample(3)
    assert torch.equal(batch["critic_observations"], critic[batch["rewards"].long()])
    assert torch.equal(batch["next_critic_observations"], critic[batch["rewards"].long()] + 1)


def test_apexrl_state_goes_round(apex: Any) -> None:
    buffer, other = apex(5, (1,)), apex(5, (1,))
    buffer.add(*numbers(0, 3))
    buffer.add(*numbers(3, 4))
    other.load_state_dict(buffer.state_dict())
    assert len(other) == 5
    assert other.state_dict()["rewards"].tolist() == [5, 6, 2, 3, 4], "by slot, as upstream has them"
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


# The page's blocks of its sections "RolloutBuffer" and "DistillationBuffer"; DEVICE stands where they say "cuda".
APEX_ROLLOUT_SNIPPET = """
from sharpwave.compat.apexrl import RolloutBuffer

buffer = RolloutBuffer(
    num_envs=4096,
    num_steps=24,
    obs_shape=(48,),
    device=DEVICE,
    num_privileged_obs=0,
)

# Collect data
for step in range(24):
    actions, log_probs = actor.act(obs)
    next_obs, rewards, dones, extras = env.step(actions)
    values = critic.get_value(obs)

    buffer.add(
        observations=obs,
        privileged_observations=None,
        actions=actions,
        rewards=rewards,
        dones=dones.float(),
        values=values,
        log_probs=log_probs,
    )

    obs = next_obs

# Compute advantages
last_values = critic.get_value(obs)
buffer.compute_returns_and_advantages(
    last_values=last_values,
    gamma=0.99,
    gae_lambda=0.95,
)

# Get training data
data = buffer.get_all_data()
"""
APEX_DISTILLATION_SNIPPET = """
from sharpwave.compat.apexrl import DistillationBuffer

buffer = DistillationBuffer(
    capacity=100_000,
    obs_shape=(48,),
    device=DEVICE,
)

# Store expert demonstration
buffer.add(obs, action)

# Sample for distillation
obs, expert_actions = buffer.sample(batch_size=256)
"""


class Walkers:
    """4096 points that are pushed about: a small environment, an actor and a critic, which remember what they gave."""

    def __init__(self, torch: Any, device: str) -> None:
        torch.manual_seed(0)
        self.torch, self.state = torch, torch.randn(4096, 48, device=device)
        self.mean = torch.nn.Linear(48, 12, device=device)
        self.value = torch.nn.Sequential(torch.nn.Linear(48, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
        self.seen: dict[str, list[Any]] = {name: [] for name in ("obs", "actions", "rewards", "dones", "log_probs")}

    def act(self, obs: Any) -> tuple[Any, Any]:
        policy = self.torch.distributions.Normal(self.mean(obs), 0.5)
        actions = policy.sample()
        return actions, self._keep(log_probs=policy.log_prob(actions).sum(dim=-1), obs=obs, actions=actions)

    def step(self, actions: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        self.state = 0.95 * self.state + 0.1 * actions.repeat(1, 4)
        rewards = -self.state.square().mean(dim=-1)
        dones = self.torch.rand_like(rewards) < 0.1
        self.state = self.torch.where(dones[:, None], self.torch.randn_like(self.state), self.state)
        self._keep(rewards=rewards, dones=dones)
        return self.state, rewards, dones, {}

    def get_value(self, obs: Any) -> Any:
        return self.value(obs).squeeze(-1)

    def _keep(self, **values: Any) -> Any:
        for name, value in values.items():
            self.seen[name].append(value.detach().clone())
        return next(iter(values.values()))

    def all(self, name: str) -> np.ndarray[Any, Any]:
        return self.torch.stack(self.seen[name]).cpu().numpy()


@pytest.fixture(scope="module")
def rolled() -> tuple[dict[str, Any], Walkers]:
    """The names that the rollout's snippet leaves behind, and what it was given."""
    torch = pytest.importorskip("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    walkers = Walkers(torch, device)
    names = {"actor": walkers, "critic": walkers, "env": walkers, "obs": walkers.state, "DEVICE": device}
    exec(APEX_ROLLOUT_SNIPPET, names)
    return names, walkers


def test_apexrl_rollout_snippet_has_the_layout_of_its_page(rolled: Any) -> None:
    names, walkers = rolled
    buffer = names["buffer"]
    assert buffer.observations.shape == (24, 4096, 48)
    assert buffer.actions.shape == (24, 4096, 12)
    for name in ("rewards", "dones", "values", "log_probs", "advantages", "returns"):
        stored = getattr(buffer, name)
        assert stored.shape == (24, 4096)
        assert stored.dtype == walkers.torch.float32
        assert stored.device.type == names["DEVICE"]
        assert not stored.requires_grad
    assert np.array_equal(buffer.observations.cpu(), walkers.all("obs"))
    assert np.array_equal(buffer.dones.cpu(), walkers.all("dones"))
    assert np.array_equal(buffer.rewards.cpu(), walkers.all("rewards"))
    assert len(buffer) == 24 * 4096


def test_apexrl_rollout_snippet_gives_the_pages_advantages(rolled: Any) -> None:
    names, walkers = rolled
    buffer = names["buffer"]
    rewards, ongoing = walkers.all("rewards").astype(np.float64), 1.0 - walkers.all("dones")
    values = buffer.values.cpu().numpy().astype(np.float64)
    following = names["last_values"].detach().cpu().numpy().astype(np.float64)
    wanted, later = np.zeros((24, 4096)), np.zeros(4096)
    for t in reversed(range(24)):  # the page's loop, in float64
        later = rewards[t] + 0.99 * following * ongoing[t] - values[t] + 0.99 * 0.95 * ongoing[t] * later
        following, wanted[t] = values[t], later
    assert 0 < ongoing.mean() < 1
    np.testing.assert_allclose(buffer.advantages.cpu(), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(buffer.returns.cpu(), wanted + values, rtol=1e-5, atol=1e-5)

    data = names["data"]
    keys = "observations privileged_observations actions old_log_probs advantages returns values"
    assert set(data) == set(keys.split())
    assert data["privileged_observations"] is None
    assert data["observations"].shape == (24 * 4096, 48)
    np.testing.assert_allclose(data["advantages"].cpu(), wanted.reshape(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(data["actions"].cpu(), walkers.all("actions").reshape(-1, 12))
    np.testing.assert_array_equal(data["old_log_probs"].cpu(), walkers.all("log_probs").reshape(-1))


def test_apexrl_full_rollout_is_upstreams_error_and_ours() -> None:
    torch = pytest.importorskip("torch")
    from sharpwave.compat.apexrl import RolloutBuffer

    buffer = RolloutBuffer(num_envs=2, num_steps=3, obs_shape=(1,), device="cpu")

    def add(number: float) -> None:
        numbers = torch.full((2,), number)
        buffer.add(numbers[:, None], None, numbers, numbers, torch.zeros(2), numbers, numbers)

    for number in (1.0, 2.0, 3.0):
        add(number)
    for error in (ValueError, BufferFull):
        with pytest.raises(error, match=r"Rollout buffer is full \(capacity: 3\)"):
            add(4.0)
    assert buffer.rewards[:, 0].tolist() == [1.0, 2.0, 3.0]
    buffer.clear()
    add(4.0)
    assert len(buffer) == 2


def test_apexrl_rollout_moves_and_goes_on() -> None:
    torch = pytest.importorskip("torch")
    from sharpwave.compat.apexrl import RolloutBuffer

    buffer = RolloutBuffer(num_envs=2, num_steps=3, obs_shape=(1,), device="cpu")
    numbers = torch.ones(2)
    buffer.add(numbers[:, None], None, numbers, numbers, torch.zeros(2), numbers, numbers)
    assert buffer.to("cpu") is buffer
    buffer.add(numbers[:, None], None, numbers * 2, numbers, torch.zeros(2), numbers, numbers)
    assert buffer.actions[:, 0].tolist() == [1.0, 2.0, 0.0]


def test_apexrl_minibatch_is_upstreams_seven(rolled: Any) -> None:
    names, _ = rolled
    batch = names["buffer"].get_minibatch(512)
    assert len(batch) == 7
    observations, privileged, actions, old_log_probs, advantages, returns, values = batch
    assert privileged is None
    assert observations.shape == (512, 48)
    assert actions.shape == (512, 12)
    data = names["data"]
    row_of = {tuple(action): row for row, action in enumerate(data["actions"].tolist())}
    rows = [row_of[tuple(action)] for action in actions.tolist()]
    assert len(set(rows)) > 400, "drawn all over the rollout"
    parts = {"observations": observations, "old_log_probs": old_log_probs, "advantages": advantages}
    for name, part in (parts | {"returns": returns, "values": values}).items():
        assert bool((data[name][rows] == part).all()), name


def test_apexrl_privileged_observations_come_back_in_both_forms() -> None:
    torch = pytest.importorskip("torch")
    from sharpwave.compat.apexrl import RolloutBuffer

    buffer = RolloutBuffer(num_envs=2, num_steps=1, obs_shape=(3,), device="cpu", num_privileged_obs=5)
    seen, zeros = torch.arange(10.0).reshape(2, 5), torch.zeros(2)
    buffer.add(torch.zeros(2, 3), seen, torch.zeros(2, dtype=torch.int64), zeros, zeros, zeros, zeros)
    buffer.compute_returns_and_advantages(zeros)
    assert torch.equal(buffer.privileged_observations, seen[None])
    assert torch.equal(buffer.get_all_data()["privileged_observations"], seen)
    assert {tuple(row.tolist()) for row in buffer.get_minibatch(64)[1]} == {tuple(row.tolist()) for row in seen}


@pytest.mark.parametrize("rows", [None, 1_000], ids=["one", "many"])
def test_apexrl_distillation_snippet_runs(rows: int | None) -> None:
    torch = pytest.importorskip("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lead = () if rows is None else (rows,)
    expert = torch.nn.Linear(48, 12, device=device)
    seen = torch.randn(*lead, 48, device=device)
    names = {"obs": seen, "action": expert(seen), "DEVICE": device}
    exec(APEX_DISTILLATION_SNIPPET, names)
    obs, actions = names["obs"], names["expert_actions"]
    assert obs.shape == (256, 48)
    assert actions.shape == (256, 12)
    assert obs.device.type == actions.device.type == device
    assert torch.allclose(expert(obs), actions, atol=1e-5), "each observation with what the expert did there"
    assert len(names["buffer"]) == (rows or 1)
    drawn = {tuple(row.tolist()) for row in obs}
    assert drawn <= {tuple(row.tolist()) for row in seen.reshape(-1, 48)}
    assert len(drawn) > 200 or rows is None
