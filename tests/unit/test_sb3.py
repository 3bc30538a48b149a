"""Stable-Baselines3 over our buffer: one stream gives the same batches, and its algorithms learn from priorities."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
import gymnasium as gym  # noqa: E402
from gymnasium import spaces  # noqa: E402
from sb3_streams import BOX, DICT, NAMES, assert_same_examples, fill, rows_of  # noqa: E402
from stable_baselines3.common import buffers  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402
from torch.nn import functional  # noqa: E402

from sharpwave.adapters.sb3 import ReplayBuffer, samples  # noqa: E402
from sharpwave.adapters.sb3 import buffer as buffer_module  # noqa: E402

# ---- the same stream, the same batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [40, 130], ids=["partly filled", "wrapped"])
@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True}, {"compression": "lz4"}], ids=str)
def test_batches_are_those_of_its_own_buffer(n_envs: int, steps: int, options: Any) -> None:
    shape = (60 * n_envs, BOX, spaces.Discrete(5), "cpu", n_envs)
    mine, theirs = ReplayBuffer(*shape, **options), buffers.ReplayBuffer(*shape)
    fill(steps, n_envs, BOX, mine, theirs)
    assert (mine.size(), mine.full, mine.pos, mine.buffer_size) == (theirs.size(), theirs.full, theirs.pos, 60)
    held = min(steps, 60)
    order = (np.arange(held) + theirs.pos) % 60 if theirs.full else np.arange(held)
    (rows,) = mine.inner.rows()
    assert np.array_equal(rows["obs"], theirs.observations[order].reshape(-1, 3))
    assert np.array_equal(rows["next_obs"], theirs.next_observations[order].reshape(-1, 3))
    assert np.array_equal(rows["action"], theirs.actions[order].reshape(-1, 1))
    assert np.array_equal(rows["reward"], theirs.rewards[order].reshape(-1))
    timeouts = theirs.timeouts[order].reshape(-1)
    assert np.array_equal(rows["done"], theirs.dones[order].reshape(-1) * (1 - timeouts))
    assert 0 < timeouts.sum() < theirs.dones[order].sum()
    assert_same_examples(mine, theirs, held * n_envs)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_timeouts_count_as_done_where_they_are_not_handled(n_envs: int) -> None:
    shape = (100, BOX, spaces.Discrete(5), "cpu", n_envs, False, False)
    mine, theirs = ReplayBuffer(*shape), buffers.ReplayBuffer(*shape)
    fill(50 // n_envs, n_envs, BOX, mine, theirs)
    assert_same_examples(mine, theirs, 50)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [40, 130], ids=["partly filled", "wrapped"])
@pytest.mark.parametrize("handle", [True, False])
@pytest.mark.parametrize("n_steps", [2, 5])
def test_n_step_batches_are_those_of_its_own_buffer(n_envs: int, steps: int, handle: bool, n_steps: int) -> None:
    options: Any = {"n_steps": n_steps, "gamma": 0.9, "handle_timeout_termination": handle}
    shape = (60 * n_envs, BOX, spaces.Discrete(5), "cpu", n_envs)
    mine, theirs = ReplayBuffer(*shape, **options), buffers.NStepReplayBuffer(*shape, **options)
    fill(steps, n_envs, BOX, mine, theirs)
    assert_same_examples(mine, theirs, min(steps, 60) * n_envs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True}, {"compression": "zstd"}], ids=str)
def test_dict_observations_are_those_of_its_own_buffer(options: Any) -> None:
    shape = (120, DICT, spaces.Discrete(5), "cpu", 2)
    mine, theirs = ReplayBuffer(*shape, **options), buffers.DictReplayBuffer(*shape)
    fill(90, 2, DICT, mine, theirs)
    assert_same_examples(mine, theirs, 120)
    one, other = mine.sample(4), theirs.sample(4)
    assert type(one) is type(other)
    for name, value in other.observations.items():
        assert one.observations[name].shape == value.shape
        assert one.observations[name].dtype == value.dtype


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (BOX, spaces.Discrete(4)),
        (spaces.Discrete(7), spaces.Box(-1, 1, (2,), np.float64)),
        (spaces.MultiDiscrete([3, 4]), spaces.MultiDiscrete([3, 4, 5])),
        (spaces.MultiBinary(6), spaces.MultiBinary(3)),
        (spaces.Box(0, 255, (3, 8, 8), np.uint8), spaces.Box(-1, 1, (2, 2))),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_tensors_have_the_shapes_and_dtypes_of_its_own(observations: Any, actions: Any, n_envs: int) -> None:
    mine = ReplayBuffer(20, observations, actions, "cpu", n_envs)
    theirs = buffers.ReplayBuffer(20, observations, actions, "cpu", n_envs)
    for buffer in (mine, theirs):
        draw = [(observations.sample(), observations.sample(), actions.sample()) for _ in range(n_envs)]
        obs, next_obs, action = (np.stack(parts) for parts in zip(*draw, strict=True))
        buffer.add(obs, next_obs, action, np.ones(n_envs), np.zeros(n_envs), [{}] * n_envs)
    one, other = mine.sample(6), theirs.sample(6)
    assert type(one) is type(other)
    for name in NAMES:
        assert getattr(one, name).shape == getattr(other, name).shape, name
        assert getattr(one, name).dtype == getattr(other, name).dtype, name
        assert type(getattr(one, name)) is torch.Tensor
    assert one.discounts is None


def normalizer(observation_space: spaces.Space[Any] = BOX) -> VecNormalize:
    """Statistics of nothing in particular."""

    class Idle(gym.Env):  # type: ignore[misc]
        def __init__(self) -> None:
            self.observation_space, self.action_space = observation_space, spaces.Discrete(5)

    env = VecNormalize(DummyVecEnv([Idle]), norm_obs_keys=["where"] if observation_space is DICT else None)
    rms = env.obs_rms["where"] if observation_space is DICT else env.obs_rms
    rms.mean, rms.var, env.ret_rms.var = np.full(3, 20.0), np.full(3, 9.0), np.float64(4.0)
    return env


@pytest.mark.parametrize("n_steps", [1, 3])
def test_vec_normalize_normalises_batches_as_with_its_own_buffer(n_steps: int) -> None:
    env = normalizer()
    options: Any = {"n_steps": n_steps, "gamma": 0.9}
    mine = ReplayBuffer(100, BOX, spaces.Discrete(5), "cpu", **options)
    theirs = buffers.NStepReplayBuffer(100, BOX, spaces.Discrete(5), "cpu", **options)
    fill(100, 1, BOX, mine, theirs)
    one, other = (rows_of(buffer.sample(2_500, env=env)) for buffer in (mine, theirs))
    # Clipped observations are no longer told apart; the rest are.
    assert len(one) == len(other) > 20
    inner = [key for key in one if "10.0" not in key]
    for key in inner:
        assert one[key]["rewards"] == pytest.approx(other[key]["rewards"], rel=1e-4, abs=1e-6)
        assert one[key]["next_observations"] == other[key]["next_observations"]
    assert len(inner) > 20


def test_vec_normalize_normalises_the_keys_it_was_given() -> None:
    env = normalizer(DICT)
    mine = ReplayBuffer(100, DICT, spaces.Discrete(5), "cpu")
    fill(10, 1, DICT, mine)
    plain, normal = (
        {row["observations"]["mode"][0]: row for row in rows_of(mine.sample(300, env=e)).values()} for e in (None, env)
    )
    for mode, row in plain.items():
        expected = (np.array(row["observations"]["where"]) - 20) / 3
        assert normal[mode]["observations"]["where"] == pytest.approx(expected, rel=1e-5)
        assert normal[mode]["observations"]["image"] == row["observations"]["image"]


def test_extend_adds_step_by_step_and_reset_forgets() -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", 2)
    zeros = np.zeros((4, 2, 3), np.float32)
    mine.extend(zeros, zeros, np.ones((4, 2), int), np.ones((4, 2)), np.zeros((4, 2)), [[{}, {}]] * 4)
    assert (mine.size(), len(mine.inner)) == (4, 8)
    mine.reset()
    assert (mine.size(), len(mine.inner), mine.full) == (0, 0, False)


def test_a_timeout_that_nobody_flags_ends_an_n_step_return() -> None:
    """CleanRL adds terminations as done, and a truncated episode's true final observation."""
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", handle_timeout_termination=False, n_steps=3, gamma=0.5)
    for now, after in ((0, 1), (1, 2), (50, 51), (51, 52)):  # 2 was final: the environment has reset to 50
        obs, next_obs = np.full((1, 3), now), np.full((1, 3), after)
        mine.add(obs, next_obs, np.array([0]), np.array([1.0]), np.array([False]), {"final_obs": None})
    rows = {row["observations"][0]: row for row in rows_of(mine.sample(200)).values()}
    assert [rows[n]["next_observations"][0] for n in (0, 1, 50, 51)] == [2, 2, 52, 52]
    assert [rows[n]["rewards"] for n in (0, 1, 50, 51)] == [[1.5], [1.0], [1.5], [1.0]]
    assert [rows[n]["discounts"] for n in (0, 1, 50, 51)] == [[0.25], [0.5], [0.25], [0.5]]


# ---- batches by priority ---------------------------------------------------------------------------------------------


def prioritized_buffer(rows: int = 8, **options: Any) -> ReplayBuffer:
    sampler = sw.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="none")
    mine = ReplayBuffer(rows, BOX, spaces.Discrete(5), "cpu", sampler=sampler, seed=3, **options)
    for i in range(rows):
        obs = np.full((1, 3), i, np.float32)
        mine.add(obs, obs + 1, np.array([1]), np.array([float(i)]), np.array([False]), [{}])
    mine.inner.update_priorities(mine.inner.sample(256)["indices"], np.ones(256))
    serials = next(iter(mine.inner.rows()))["indices"]
    mine.inner.update_priorities(serials, 1.0 + np.arange(rows))
    return mine


def chances(mine: ReplayBuffer) -> np.ndarray[Any, Any]:
    """The probability of every row, by its number."""
    batch = mine.inner.sample(8_192)
    result = np.zeros(len(mine.inner))
    result[batch["obs"][:, 0].astype(int)] = batch["probabilities"]
    assert (result > 0).all()
    return result


@pytest.mark.parametrize("flat", [False, True], ids=["as SB3", "as CleanRL"])
def test_batch_by_priority_carries_weights_and_the_names_of_its_rows(flat: bool) -> None:
    mine = prioritized_buffer()
    data = mine.sample(16)
    for name in (*NAMES, "weights", "indices"):
        assert type(getattr(data, name)) is torch.Tensor, name
    # P is in proportion to 1 + i, and the weight is its inverse times the number of rows.
    weights = (36 / 8) / (1 + data.observations[:, 0])
    assert torch.allclose(data.weights, weights.reshape(-1, 1))
    errors = torch.linspace(0.5, 3, 16).requires_grad_()
    losses = errors**2 if flat else (errors**2).reshape(-1, 1)
    assert torch.allclose(data.weighted_mean(losses), (weights * errors**2).mean())
    assert mine.update_priorities(data.indices, errors if flat else -errors.reshape(-1, 1)) == {
        "applied": 16,
        "stale": 0,
    }
    priorities = 1.0 + np.arange(8)
    for i, error in zip(data.observations[:, 0].long(), errors.detach(), strict=True):
        priorities[i] = error  # of rows that come twice, the last
    assert np.allclose(chances(mine), priorities / priorities.sum(), rtol=1e-4)


def test_weighted_mean_refuses_what_is_not_one_loss_a_row() -> None:
    data = prioritized_buffer().sample(4)
    for shape in ((), (4, 4), (2,), (1, 4), (5, 1)):
        with pytest.raises(SchemaError, match=r"weighted_mean\(\): losses: expected shape \(4, 1\) or \(4,\)"):
            data.weighted_mean(torch.zeros(shape))


def test_reordered_rows_and_other_losses_change_no_priority() -> None:
    mine = prioritized_buffer()
    before = chances(mine)
    data = mine.sample(64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for target in (data.rewards[order], data.rewards.sort(dim=0).values, data.rewards):
        loss = functional.mse_loss(torch.full((64, 1), 5.0), target)  # a reward model's, for example
        assert torch.allclose(loss, ((5.0 - data.rewards) ** 2).mean())
    assert np.array_equal(chances(mine), before)
    # The same rows in another order, named by the same indices.
    mine.update_priorities(data.indices[order], 2.0 + data.rewards[order])
    expected = 2.0 + np.arange(8)
    drawn = np.unique(data.observations[:, 0].numpy().astype(int))
    assert len(drawn) == 8
    assert np.allclose(chances(mine), expected / expected.sum(), rtol=1e-4)


def test_compiled_losses_work_on_batches_by_priority() -> None:
    mine = prioritized_buffer()

    @torch.compile(backend="eager", fullgraph=True)  # type: ignore[untyped-decorator]
    def td_loss(rewards: Any, weights: Any) -> Any:
        errors = rewards + 0.9 - 1.0
        return (weights * functional.mse_loss(rewards + 0.9, torch.ones_like(rewards), reduction="none")).mean(), errors

    data = mine.sample(16)
    loss, errors = td_loss(data.rewards, data.weights)
    assert torch.allclose(loss, data.weighted_mean((data.rewards - 0.1) ** 2))
    assert mine.update_priorities(data.indices, errors)["applied"] == 16


def test_drawing_on_and_on_without_priorities_is_refused() -> None:
    mine = prioritized_buffer()
    mine.update_priorities([0], [1.0])
    for _ in range(20):  # ten for the updates that the fixture made on .inner
        data = mine.sample(4)
    with pytest.raises(SchemaError) as caught:
        mine.sample(4)
    assert str(caught.value) == (
        "sample(): 10 batches were drawn by priority and no row got a new one; train with PrioritizedDQN of "
        "sharpwave.adapters.sb3, or in your own loop use data.weighted_mean(losses) and "
        "update_priorities(data.indices, td_errors); or give the buffer sampler=Uniform(). To look at rows "
        "only, draw with .inner.sample()"
    )
    mine.update_priorities(data.indices, np.ones(4))
    for _ in range(10):
        mine.sample(4)
    mine.inner.update_priorities(data.indices, np.ones(4))  # as another process would
    mine.sample(4)
    uniform = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    fill(5, 1, BOX, uniform)
    for _ in range(12):
        uniform.sample(4)


def test_errors_that_are_not_finite_are_refused() -> None:
    mine = prioritized_buffer()
    data = mine.sample(4)
    with pytest.raises(SchemaError, match="expected finite numbers, got nan"):
        mine.update_priorities(data.indices, torch.full((4, 1), float("nan")))


# ---- what it takes and refuses ---------------------------------------------------------------------------------------


def test_n_steps_without_gamma_is_refused() -> None:
    with pytest.raises(SchemaError) as caught:
        ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", n_steps=3)
    assert str(caught.value) == (
        "ReplayBuffer(): gamma: n_steps=3 needs a discount; give gamma= the discount of your targets"
    )


BYTES = spaces.Box(0, 255, (2, 2), np.uint8)


@pytest.mark.parametrize(
    ("obs_space", "action_space", "obs", "action", "reward", "done"),
    [
        (BOX, spaces.Discrete(5), np.arange(3.0), np.array(2), 1.5, True),
        (BOX, spaces.Discrete(5), np.arange(3.0)[None], np.array([2.0]), np.array([[1.5]]), np.float32(1)),
        (BOX, spaces.Box(-1, 1, (2, 2)), np.arange(3), np.full((2, 2), 0.5), np.float64(2), np.array([0.0])),
        (BYTES, spaces.MultiBinary(3), np.full((2, 2), 7.0), np.array([1.0, 0, 1]), np.array(3), np.array([False])),
        (spaces.Discrete(9), spaces.Discrete(5), np.array(4.0), np.array([[2]]), 1, 0),
        (
            spaces.Dict({"a": BYTES}),
            spaces.Discrete(5),
            {"a": np.full((2, 2), 7.0), "extra": 1},
            np.array(1),
            0.5,
            False,
        ),
    ],
    ids=str,
)
def test_one_environment_may_add_whatever_its_own_buffer_takes(
    obs_space: Any, action_space: Any, obs: Any, action: Any, reward: Any, done: Any
) -> None:
    mine = ReplayBuffer(10, obs_space, action_space, "cpu")
    kind = buffers.DictReplayBuffer if isinstance(obs_space, spaces.Dict) else buffers.ReplayBuffer
    theirs = kind(10, obs_space, action_space, "cpu")
    for buffer in (mine, theirs):
        buffer.add(obs, obs, action, reward, done, [{}])
    assert rows_of(mine.sample(1)) == rows_of(theirs.sample(1))


FORMS: dict[str, Any] = {  # ways to give an array of one environment's value
    "as it is": lambda array: array,
    "without the axis of environments": lambda array: array[0],
    "with one axis more": lambda array: array[None],
    "float64": lambda array: array.astype(np.float64),
    "float32": lambda array: array.astype(np.float32),
    "int64": lambda array: array.astype(np.int64),
    "uint8": lambda array: array.astype(np.uint8),
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "halves": lambda array: array.astype(np.float64) + 0.5,
    "large": lambda array: array.astype(np.float64) + 300,
    "infinite": lambda array: np.full(array.shape, np.inf),
    "not a number": lambda array: np.full(array.shape, np.nan),
    "turned": lambda array: array.reshape(-1, 1),
    "flat": lambda array: array.reshape(-1),
}
SPACES = [BOX, BYTES, spaces.Discrete(9), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3), spaces.Box(-9, 9, (1,))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_form_is_taken_as_its_own_buffer_takes_it_or_refused_where_it_changes_values(
    space: Any, form: str
) -> None:
    for argument in ("obs", "next_obs", "action", "reward", "done"):
        spaces_of = (BOX, space) if argument == "action" else (space, spaces.Discrete(5))
        value_space = {"obs": spaces_of[0], "next_obs": spaces_of[0], "action": spaces_of[1]}.get(argument)
        whole = np.ones((1,)) if value_space is None else np.asarray(value_space.sample())[None] * 0 + 2
        given = FORMS[form](whole if argument != "done" else np.ones(1))
        mine, theirs = ReplayBuffer(4, *spaces_of, "cpu"), buffers.ReplayBuffer(4, *spaces_of, "cpu")
        good = {"obs": np.zeros((1, *mine.obs_shape)), "next_obs": np.zeros((1, *mine.obs_shape))}
        good |= {"action": np.zeros((1, mine.action_dim)), "reward": np.zeros(1), "done": np.zeros(1), "infos": [{}]}
        try:
            with np.errstate(invalid="ignore"):
                theirs.add(**{**good, argument: given})
            stored = getattr(
                theirs, {"obs": "observations", "next_obs": "next_observations"}.get(argument, argument + "s")
            )
            kept = np.array_equal(stored[0].reshape(-1), np.float32(given).reshape(-1), equal_nan=True)
            kept = kept and (argument != "done" or set(stored[0]) <= {0, 1})
        except ValueError:
            kept = False  # refused there as well; ours may take a shape more
            stored = None
        try:
            mine.add(**{**good, argument: given})
        except SchemaError:
            assert not kept, argument
            continue
        assert kept or stored is None, argument
        if kept:
            assert repr(rows_of(mine.sample(1))) == repr(rows_of(theirs.sample(1)))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "obs",
            np.full((1, 2, 2), 0.5),
            "values that uint8 can hold, got float64 with others",
        ),
        ("obs", np.full((1, 2, 2), 256), "values that uint8 can hold, got int64 with others"),
        ("obs", np.full((1, 2, 2), np.nan), "can hold, got float64 with others; scale or round them in a wrapper"),
        ("next_obs", np.zeros((1, 2)), "expected shape (1, 2, 2), n_envs=1 values of the space's shape, got (1, 2)"),
        ("next_obs", np.zeros((2, 2, 2)), "expected shape (1, 2, 2), n_envs=1 values of the space's shape"),
        ("action", np.array([1.5]), "values that int64 can hold"),
        ("action", np.array([1, 2]), "expected shape (1, 1), n_envs=1 values"),
        ("action", "left", "expected numbers of shape (1, 1), got 'left'"),
        ("reward", {}, "expected numbers, got Python objects (dict)"),
        ("reward", np.array([1e300]), "values that float32 can hold"),
        ("reward", None, "expected numbers, got Python objects (NoneType)"),
        ("done", np.array([np.nan]), "values that bool can hold"),
        ("done", np.array([2]), "values that bool can hold"),
        ("infos", [], "expected a list of n_envs=1 dicts, got 0"),
    ],
    ids=str,
)
def test_values_that_do_not_fit_are_refused_and_nothing_is_added(name: str, value: Any, words: str) -> None:
    mine = ReplayBuffer(10, BYTES, spaces.Discrete(5), "cpu")
    good: dict[str, Any] = {"obs": np.zeros((1, 2, 2)), "next_obs": np.zeros((1, 2, 2)), "action": np.array([1])}
    good |= {"reward": np.array([1.0]), "done": np.array([False]), "infos": [{}]}
    with pytest.raises(SchemaError) as caught:
        mine.add(**{**good, name: value})
    assert words in str(caught.value)
    assert f"add(): {name}" in str(caught.value)
    assert (mine.size(), len(mine.inner)) == (0, 0)
    mine.add(**good)
    assert mine.size() == 1


def test_dict_observations_that_lack_a_key_are_refused() -> None:
    mine = ReplayBuffer(10, DICT, spaces.Discrete(5), "cpu")
    with pytest.raises(
        SchemaError, match=r"add\(\): obs: expected a dict with \['image', 'mode', 'where'\], got \['mode'\]"
    ):
        mine.add({"mode": 1}, {"mode": 1}, np.array([1]), np.array([0.0]), np.array([False]), [{}])


# ---- life ------------------------------------------------------------------------------------------------------------


def test_a_buffer_in_a_storage_pickles_as_its_address(shm_address: str) -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", storage=shm_address)
    fill(4, 1, BOX, mine)
    other = pickle.loads(pickle.dumps(mine))
    fill(3, 1, BOX, mine, seed=1)
    assert len(other.inner) == len(mine.inner) == 7
    again = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", storage=shm_address, exist="attach")
    assert (again.size(), again.pos) == (7, 7)
    for buffer in (again, other):
        buffer.inner.close()
    mine.inner.close(unlink=True)


def test_its_arrays_are_named_with_where_their_rows_are() -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    with pytest.raises(AttributeError) as caught:
        mine.observations  # noqa: B018
    assert str(caught.value) == "ReplayBuffer: observations: the engine keeps the rows; read them with .inner.rows()"
    with pytest.raises(AttributeError, match=r"rewards: the engine keeps the rows; write them with add\(\)"):
        mine.rewards = np.zeros(10)
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        mine.unheard_of  # noqa: B018


def test_infos_of_a_gymnasium_vector_environment_are_refused_where_timeouts_are_read() -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    zeros = np.zeros((1, 3), np.float32)
    with pytest.raises(SchemaError) as caught:
        mine.add(zeros, zeros, np.array([1]), np.array([0.0]), np.array([False]), {"final_obs": None})
    assert str(caught.value) == (
        "add(): infos: expected a list of dicts, one per environment, got a dict, which has no timeouts; give the "
        "buffer handle_timeout_termination=False and add terminations as done"
    )
    assert mine.size() == 0


def test_versions_whose_losses_take_no_discounts_refuse_n_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(NamedTuple):
        observations: Any
        actions: Any
        next_observations: Any
        dones: Any
        rewards: Any

    monkeypatch.setattr(samples, "ReplayBufferSamples", Old)
    monkeypatch.setattr(buffer_module, "ReplayBufferSamples", Old)
    monkeypatch.setattr(samples, "SB3_VERSION", "2.6.0")
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    fill(5, 1, BOX, mine)
    assert type(mine.sample(4)) is Old
    with pytest.raises(SchemaError) as caught:
        ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", n_steps=3, gamma=0.9)
    assert str(caught.value) == (
        "ReplayBuffer(): n_steps: expected 1 with Stable-Baselines3 2.6.0, whose losses take no discounts, got 3; "
        "pip install -U stable-baselines3"
    )
