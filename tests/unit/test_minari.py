"""Minari data sets into a ReplayBuffer and back, without the package of the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError, StorageError

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")
from gymnasium import spaces  # noqa: E402
from gymnasium.envs.registration import EnvSpec  # noqa: E402

from sharpwave.adapters import minari as adapter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Minari recommends to name an author
SPEC = EnvSpec("Nowhere-v0", entry_point="package_that_is_not_there.envs:Nowhere", max_episode_steps=9)
LENGTHS = [5, 1, 8, 3]
NAMES = ("observations", "actions", "rewards", "terminations", "truncations")
SPACES = {
    "box": (spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float64)),
    "discrete": (spaces.Discrete(7), spaces.Discrete(4)),
    "image": (spaces.Box(0, 255, (40, 36, 3), np.uint8), spaces.MultiDiscrete([3, 5])),
    "dict": (
        spaces.Dict({"image": spaces.Box(0, 255, (4, 4), np.uint8), "inner": spaces.Dict({"x": spaces.Discrete(5)})}),
        spaces.Dict({"move": spaces.Box(-1, 1, (), np.float32), "press": spaces.MultiBinary(3)}),
    ),
    "tuple": (
        spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)]),
        spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,), np.float16)]),
    ),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def values(space: Any, count: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: values(part, count) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(values(part, count) for part in space.spaces)
    return np.stack([np.asarray(space.sample()) for _ in range(count)])


def make(name: str, kind: str, *, env: Any = SPEC, rewards: Any = np.float64) -> Any:
    """A data set whose episodes end in every way."""
    both = SPACES[kind]
    for number, space in enumerate(both):
        space.seed(number)
    episodes = []
    for number, steps in enumerate(LENGTHS):
        ends = np.arange(steps) == steps - 1
        episodes.append(
            {
                "observations": values(both[0], steps + 1),
                "actions": values(both[1], steps),
                "rewards": np.random.default_rng(number).normal(size=steps).astype(rewards),
                "terminations": ends & (number % 2 == 0),
                "truncations": ends & (number > 0),
            }
        )
    two = {"observation_space": both[0], "action_space": both[1]}
    return adapter.write_dataset("test", name, episodes, two, env)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(part, other[key]) for key, part in one.items())
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one.shape == other.shape and np.array_equal(one, other)


def assert_same(one: Any, other: Any) -> None:
    assert one.total_episodes == other.total_episodes
    for ours, theirs in zip(one.iterate_episodes(), other.iterate_episodes(), strict=True):
        for name in NAMES:
            assert same(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("kind", SPACES)
def test_data_set_goes_into_a_buffer_and_back_exactly(kind: str, next_obs: Any) -> None:
    data = make("test/there-v0", kind)
    buffer = adapter.load("test/there-v0", next_obs=next_obs, seed=0)
    assert len(buffer) == buffer.capacity == sum(LENGTHS)
    for ours, theirs in zip(buffer.episodes(), data.iterate_episodes(), strict=True):
        assert same(ours["obs"], adapter.cut(theirs.observations, slice(0, -1)))
        assert same(ours["next_obs"], adapter.cut(theirs.observations, slice(1, None)))
        assert same(ours["action"], theirs.actions)
        assert same(ours["reward"], theirs.rewards)
        assert ours["reward"].dtype == np.float64
        assert same(ours["done"], theirs.terminations)
        assert same(ours["truncated"], theirs.truncations)
    back = adapter.save(
        buffer,
        "test/back-v0",
        observation_space=data.observation_space,
        action_space=data.action_space,
        env_spec=data.env_spec,
    )
    assert_same(back, data)
    assert (back.observation_space, back.action_space) == (data.observation_space, data.action_space)
    assert back.env_spec == data.env_spec
    assert_same(minari.load_dataset("test/back-v0"), data)
    # And without spaces, told from the fields.
    assert_same(adapter.save(buffer, "test/told-v0"), data)
    again = adapter.load("test/told-v0", seed=0)
    assert_same(adapter.save(again, "test/again-v0"), data)


def test_data_set_is_named_in_three_ways(place: Path) -> None:
    data = make("test/there-v0", "box")
    for source in (data, "test/there-v0", place / "test" / "there-v0", str(place / "test" / "there-v0" / "data")):
        assert len(adapter.load(source, seed=0)) == sum(LENGTHS)
    some = data.filter_episodes(lambda episode: len(episode) > 4)
    assert len(adapter.load(some, seed=0)) == 13
    with pytest.raises(StorageError, match=r"load\(\): minari:test/none-v0: there is no such data set on this machine"):
        adapter.load("test/none-v0")
    with pytest.raises(SchemaError, match="expected a MinariDataset, its name or its folder, got 7"):
        adapter.load(7)


@pytest.mark.parametrize("kind", ["box", "dict", "tuple", "discrete"])
def test_older_data_set_without_spaces_needs_no_environment(place: Path, kind: str) -> None:
    data = make("test/old-v0", kind)
    file = place / "test" / "old-v0" / "data" / "metadata.json"
    metadata = json.loads(file.read_text())
    del metadata["observation_space"], metadata["action_space"]
    file.write_text(json.dumps(metadata))
    with pytest.raises(Exception, match="package_that_is_not_there"):
        minari.load_dataset("test/old-v0")
    buffer = adapter.load("test/old-v0", seed=0)
    for ours, theirs in zip(buffer.episodes(), data.iterate_episodes(), strict=True):
        assert same(ours["obs"], adapter.cut(theirs.observations, slice(0, -1)))
        assert same(ours["action"], theirs.actions)


def test_options_go_to_the_buffer(tmp_path: Path) -> None:
    make("test/there-v0", "box")
    with adapter.load(
        "test/there-v0",
        capacity=6,
        storage=f"file://{tmp_path}/live.sw",
        sampler=sw.Prioritized(),
        view=sw.Transitions(n_step=3),
        schema={"obs": sw.Field((3,), "float32", compression="lz4"), "reward": sw.Field((), "float32")},
        seed=0,
    ) as buffer:
        assert (len(buffer), buffer.sample(4)["weights"].shape) == (6, (4,))
        assert [len(one["reward"]) for one in buffer.episodes()] == [3], "the newest rows"
        assert buffer.get(buffer.sample(1)["indices"])["reward"].dtype == np.float32
    with pytest.raises(SchemaError, match="num_envs: episodes are added as those of one environment, got 2"):
        adapter.load("test/there-v0", num_envs=2)


def test_failed_load_leaves_no_file(tmp_path: Path) -> None:
    make("test/there-v0", "box")
    with pytest.raises(SchemaError, match="missing 'extra'"):
        adapter.load("test/there-v0", schema={"extra": sw.Field(())}, storage=f"file://{tmp_path}/live.sw")
    assert not (tmp_path / "live.sw").exists()


def test_numbers_that_a_field_cannot_hold_exactly_are_refused() -> None:
    both = {"observation_space": SPACES["box"][0], "action_space": SPACES["box"][1]}

    def episode(dtype: Any) -> dict[str, Any]:
        steps = {"actions": np.zeros((2, 2)), "rewards": np.zeros(2), "terminations": np.array([False, True])}
        return steps | {"observations": np.zeros((3, 3), dtype), "truncations": np.zeros(2, bool)}

    wide = adapter.write_dataset("test", "test/wide-v0", [episode(np.float64)], both)
    assert adapter.load(wide).schema["obs"].dtype == np.float64, "the space says float32"
    adapter.write_dataset("test", "test/mixed-v0", [episode(np.float32), episode(np.float64)], both)
    with pytest.raises(SchemaError, match=r"episode 1: obs: expected float32 as in the first episode, got float64"):
        adapter.load("test/mixed-v0")
    buffer = adapter.load("test/mixed-v0", schema={"obs": sw.Field((3,), "float32")})
    assert len(buffer) == 4


def test_an_end_that_nobody_told_is_a_truncation() -> None:
    both = {"observation_space": SPACES["discrete"][0], "action_space": SPACES["discrete"][1]}
    no = np.zeros(3, bool)
    episode = {"observations": np.arange(4), "actions": np.zeros(3, int), "rewards": np.array([1, 2, 3])}
    data = adapter.write_dataset("test", "test/a-v0", [episode | {"terminations": no, "truncations": no}] * 2, both)
    buffer = adapter.load(data)
    assert [one["truncated"].tolist() for one in buffer.episodes()] == [[False, False, True]] * 2
    assert buffer.schema["reward"].dtype == np.float64, "whole numbers by chance"


def filled(**options: Any) -> sw.ReplayBuffer:
    buffer = sw.ReplayBuffer(40, obs_shape=(2,), num_envs=1, seed=0, **options)
    for number in range(12):
        buffer.add([number] * 2, 0.5, 1.0, [number + 1] * 2, number % 5 == 4)
    return buffer


def test_only_finished_episodes_without_loss_are_saved() -> None:
    assert [len(one) for one in adapter.save(filled(), "test/a-v0").iterate_episodes()] == [5, 5]
    short = sw.ReplayBuffer(8, obs_shape=(2,), num_envs=1, seed=0)
    for part in filled().rows():
        for i in range(12):
            short.add(**{name: part[name][i] for name in ("obs", "action", "reward", "next_obs", "done")})
    assert [len(one) for one in adapter.save(short, "test/b-v0").iterate_episodes()] == [5]


def test_many_episodes_are_written_in_parts() -> None:
    buffer = sw.ReplayBuffer(400, obs_shape=(1,), action_dtype="int64", num_envs=1, seed=0)
    for number in range(300):
        buffer.add([number], number % 3, number, [number + 1], number % 2 == 1)
    data = adapter.save(buffer, "test/many-v0")
    assert (data.total_episodes, data.total_steps, data.action_space) == (150, 300, spaces.Discrete(3))
    again = minari.load_dataset("test/many-v0")
    rewards = np.concatenate([one.rewards for one in again.iterate_episodes()])
    assert rewards.tolist() == list(range(300))


def test_what_a_data_set_cannot_hold_is_told(place: Path) -> None:
    with pytest.raises(SchemaError, match=r"save\(\): there is no finished episode"):
        adapter.save(sw.ReplayBuffer(9, obs_shape=(2,), seed=0), "test/a-v0")
    with pytest.raises(SchemaError, match="a data set needs next_obs, which the buffer does not have"):
        adapter.save(sw.ReplayBuffer(9, obs_shape=(2,), next_obs=None, seed=0), "test/a-v0")
    ragged = sw.ReplayBuffer(9, schema={"obs": sw.Field((2,), ragged=True), "action": sw.Field(())}, seed=0)
    with pytest.raises(SchemaError, match="obs: a data set holds numbers of one shape"):
        adapter.save(ragged, "test/a-v0")
    with pytest.raises(SchemaError, match="expected a ReplayBuffer, got 3"):
        adapter.save(3, "test/a-v0")  # type: ignore[arg-type]
    for name in ("no version", "test/a", 5):
        with pytest.raises(SchemaError, match="name: expected"):
            adapter.save(filled(), name)  # type: ignore[arg-type]
    torn = sw.ReplayBuffer(9, obs_shape=(1,), num_envs=1, seed=0)
    torn.add([[0], [7]], [0, 0], [0, 0], [[1], [8]], [False, True])
    with pytest.raises(SchemaError, match="obs: in the episode of row 0 a next_obs is not the obs of the next row"):
        adapter.save(torn, "test/a-v0")
    assert not (place / "test" / "a-v0").exists()
    adapter.save(filled(), "test/a-v0")
    with pytest.raises(StorageError, match="there is a data set of that name"):
        adapter.save(filled(), "test/a-v0")
    text = {"observation_space": spaces.Text(5), "action_space": spaces.Discrete(2)}
    flags = {"terminations": np.array([True]), "truncations": np.array([False])}
    words = {"observations": ["a", "b"], "actions": np.array([1]), "rewards": np.array([1.0]), **flags}
    adapter.write_dataset("test", "test/text-v0", [words], text)
    with pytest.raises(SchemaError, match=r"load\(\): obs space: expected Box, .* got Text"):
        adapter.load("test/text-v0")


def test_further_fields_are_left_out_with_a_warning() -> None:
    schema = {"obs": sw.Field((1,)), "action": sw.Field(()), "logp": sw.Field(())}
    buffer = sw.ReplayBuffer(9, schema=schema, seed=0)
    buffer.add(obs=[0], action=0, logp=1, reward=0, next_obs=[1], done=True)
    with pytest.warns(UserWarning, match="logp: a Minari data set has no place"):
        adapter.save(buffer, "test/a-v0")


def test_failed_write_leaves_no_data_set(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = sw.ReplayBuffer(400, obs_shape=(1,), num_envs=1, seed=0)
    for number in range(200):
        buffer.add([number], 0, 0, [number + 1], True)

    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(minari.MinariDataset, "update_dataset_from_buffer", fail)
    with pytest.raises(StorageError, match=r"save\(\): minari:test/a-v0: OSError: no space"):
        adapter.save(buffer, "test/a-v0")
    assert not (place / "test" / "a-v0").exists()
    monkeypatch.undo()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(place))
    assert adapter.save(buffer, "test/a-v0").total_episodes == 200
