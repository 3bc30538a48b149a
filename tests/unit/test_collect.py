"""collect: what vector environments bring, in each way of resetting, is what single ones stepped by hand bring."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError

gym = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402

MODES = list(AutoresetMode)
SEED = 11


class Corridor(gym.Env):  # type: ignore[misc]
    """Nested observations and actions; ends by itself or by truncation, at lengths that the seed decides."""

    observation_space = spaces.Dict(
        {
            "where": spaces.Box(-100, 100, (2,), np.float64),
            "pair": spaces.Tuple((spaces.Discrete(1000), spaces.MultiBinary(3))),
        }
    )
    action_space = spaces.Dict({"move": spaces.Discrete(5), "force": spaces.Box(-1, 1, (2,))})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(1, 9))
        self.where = self.np_random.uniform(-1, 1, 2)
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.where = self.where + action["force"] + int(action["move"])
        over = self.t == self.length
        return self.see(), float(self.where[0]), over and self.length % 2 == 0, over and self.length % 2 == 1, {}

    def see(self) -> Any:
        return {"where": self.where.copy(), "pair": (self.t, (self.np_random.random(3) < 0.5).astype(np.int8))}


def corridor_policy(obs: Any) -> Any:
    where = obs["where"]
    return {"move": (np.abs(where[..., 0]) * 1000).astype(np.int64) % 5, "force": np.sin(where).astype(np.float32)}


def make_cart() -> Any:
    return gym.make("CartPole-v1", max_episode_steps=18)


def cart_policy(obs: Any) -> Any:
    """As good as random, and a function of the observation alone."""
    return (np.abs(obs[..., 1]) * 10_000).astype(np.int64) % 2


def key(value: Any) -> Any:
    """Something to compare by, of any nested value."""
    if isinstance(value, dict):
        return tuple((name, key(value[name])) for name in sorted(value))
    return tuple(key(part) for part in value) if isinstance(value, tuple) else np.asarray(value).tobytes()


def part(value: Any, i: int) -> Any:
    if isinstance(value, dict):
        return {name: part(item, i) for name, item in value.items()}
    return tuple(part(item, i) for item in value) if isinstance(value, tuple) else value[i]


def by_hand(make: Callable[[], Any], policy: Callable[[Any], Any], seed: int, steps: int) -> list[dict[str, Any]]:
    """The transitions of one environment, stepped as everybody knows how."""
    env = make()
    obs, _ = env.reset(seed=seed)
    rows = []
    for _ in range(steps):
        action = policy(obs)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        row = {"obs": obs, "action": action, "reward": np.float32(reward), "next_obs": next_obs}
        rows.append({**row, "done": terminated, "truncated": truncated})
        obs = env.reset()[0] if terminated or truncated else next_obs
    return rows


def assert_rows_are(buffer: sw.ReplayBuffer, streams: list[list[dict[str, Any]]]) -> list[int]:
    """Every row is one of the streams', once, and of each stream there is the beginning. Returns their lengths."""
    names = [name for name in ("obs", "action", "reward", "next_obs") if name in buffer.schema]
    places = {tuple(key(row[n]) for n in names): (i, t) for i, rows in enumerate(streams) for t, row in enumerate(rows)}
    assert len(places) == sum(map(len, streams)), "the streams' rows differ from each other"
    found: list[dict[int, tuple[bool, bool]]] = [{} for _ in streams]
    for batch in buffer.rows():
        for j in range(len(batch["indices"])):
            i, t = places[tuple(key(part(batch[name], j)) for name in names)]  # a fake transition is in no stream
            assert t not in found[i]
            found[i][t] = bool(batch["done"][j]), bool(batch["truncated"][j])
    for rows, mine in zip(streams, found, strict=True):
        last = len(mine) - 1
        assert sorted(mine) == list(range(len(mine)))
        for t, flags in mine.items():
            ended = rows[t]["done"] or rows[t]["truncated"]
            cut = t == last and not ended  # where collecting stopped, the episode ends as truncated
            assert flags == (rows[t]["done"], rows[t]["truncated"] or cut)
    assert sum(map(len, found)) == len(buffer)
    return [len(mine) for mine in found]


def assert_ends_are_of_both_kinds(streams: list[list[dict[str, Any]]]) -> None:
    rows = [row for stream in streams for row in stream]
    assert any(row["done"] for row in rows)
    assert any(row["truncated"] for row in rows)


@pytest.mark.parametrize("next_obs", ["stored", "derived", None])
@pytest.mark.parametrize("mode", MODES)
def test_vector_environments_bring_what_single_ones_bring(mode: AutoresetMode, next_obs: Any) -> None:
    envs = SyncVectorEnv([make_cart] * 3, autoreset_mode=mode)
    buffer = sw.ReplayBuffer.for_env(envs, 1_200, next_obs=next_obs)
    episodes = list(sw.collect(envs, cart_policy, buffer, 400, seed=SEED))
    streams = [by_hand(make_cart, cart_policy, SEED + i, 200) for i in range(3)]
    assert_ends_are_of_both_kinds(streams)
    lengths = assert_rows_are(buffer, streams)
    assert 400 <= len(buffer) < 403

    expected = []
    for i, rows in enumerate(streams):
        total, start = 0.0, 0
        for t, row in enumerate(rows[: lengths[i]]):
            total += float(row["reward"])
            if row["done"] or row["truncated"]:
                flags = {"terminated": row["done"], "truncated": row["truncated"]}
                expected.append({"env": i, "length": t + 1 - start, "return": total, **flags})
                total, start = 0.0, t + 1
    told = [{name: value for name, value in episode.items() if name != "step"} for episode in episodes]
    assert sorted(told, key=repr) == sorted(expected, key=repr)
    assert all(type(value) in (int, float, bool) for episode in episodes for value in episode.values())
    assert [episode["step"] for episode in episodes] == sorted(episode["step"] for episode in episodes)
    assert buffer.stats().get("resets_unflagged", 0) == 0


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("mode", MODES)
def test_nested_spaces_are_stored_in_every_mode(mode: AutoresetMode, next_obs: Any) -> None:
    envs = SyncVectorEnv([Corridor] * 4, autoreset_mode=mode)
    buffer = sw.ReplayBuffer.for_env(envs, 1_200, next_obs=next_obs)
    list(sw.collect(envs, corridor_policy, buffer, 300, seed=SEED))
    streams = [by_hand(Corridor, corridor_policy, SEED + i, 200) for i in range(4)]
    assert_ends_are_of_both_kinds(streams)
    assert_rows_are(buffer, streams)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_environments_in_processes_bring_the_same(shared_memory: bool) -> None:
    mode = AutoresetMode.DISABLED if shared_memory else AutoresetMode.SAME_STEP
    envs = AsyncVectorEnv([make_cart] * 2, autoreset_mode=mode, shared_memory=shared_memory)
    try:
        buffer = sw.ReplayBuffer.for_env(envs, 1_000)
        list(sw.collect(envs, cart_policy, buffer, 150, seed=SEED))
    finally:
        envs.close()
    assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED + i, 150) for i in range(2)])


def test_vectorised_cart_pole_brings_only_what_its_physics_allow() -> None:
    envs = gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point", max_episode_steps=18)
    buffer = sw.ReplayBuffer.for_env(envs, 1_000)
    episodes = list(sw.collect(envs, cart_policy, buffer, 400, seed=SEED))
    assert {episode["truncated"] for episode in episodes} == {True, False}
    assert buffer.stats()["rows_voided"] > 0, "steps that only reset were left out"
    single = gym.make("CartPole-v1").unwrapped
    (rows,) = buffer.rows()
    for obs, action, next_obs, done in zip(rows["obs"], rows["action"], rows["next_obs"], rows["done"], strict=True):
        single.reset()
        single.state = tuple(obs)
        expected, _, terminated, _, _ = single.step(int(action))
        np.testing.assert_allclose(next_obs, expected, atol=1e-5)
        assert terminated == done


@pytest.mark.parametrize("num_envs", [None, 1])
def test_single_environment_brings_what_it_brings_by_hand(num_envs: int | None) -> None:
    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 1_000, num_envs=num_envs)
    episodes = list(sw.collect(env, cart_policy, buffer, 100, seed=SEED))
    rows = by_hand(make_cart, cart_policy, SEED, 100)
    assert assert_rows_are(buffer, [rows]) == [100]
    ends = [t + 1 for t, row in enumerate(rows) if row["done"] or row["truncated"]]
    assert [episode["step"] for episode in episodes] == ends
    assert all(episode["env"] == 0 for episode in episodes)
    assert sum(episode["length"] for episode in episodes) == ends[-1]


def test_single_environment_of_nested_spaces_is_stored() -> None:
    buffer = sw.ReplayBuffer.for_env(Corridor(), 1_000, next_obs="derived")
    list(sw.collect(Corridor(), corridor_policy, buffer, 100, seed=SEED))
    assert_rows_are(buffer, [by_hand(Corridor, corridor_policy, SEED, 100)])


@pytest.mark.parametrize("mode", MODES)
def test_n_step_examples_are_those_of_the_single_environments(mode: AutoresetMode) -> None:
    options: Any = {"next_obs": "derived", "view": sw.Transitions(n_step=3, gamma=0.9), "seed": 0}
    envs = SyncVectorEnv([make_cart] * 3, autoreset_mode=mode)
    mine = sw.ReplayBuffer.for_env(envs, 1_200, **options)
    list(sw.collect(envs, cart_policy, mine, 300, seed=SEED))
    streams = [by_hand(make_cart, cart_policy, SEED + i, 150) for i in range(3)]
    theirs = sw.ReplayBuffer.for_env(make_cart(), 1_200, **options)
    for rows, length in zip(streams, assert_rows_are(mine, streams), strict=True):
        with theirs.writer() as writer:
            for row in rows[:length]:
                writer.add(**row)

    def examples(buffer: sw.ReplayBuffer) -> set[Any]:
        batch = buffer.sample(20_000)  # of 300 rows: each comes up
        names = ("obs", "action", "reward", "next_obs", "done", "discount")
        return {tuple(key(batch[name][i]) for name in names) for i in range(20_000)}

    assert examples(mine) == examples(theirs)
    assert len(examples(mine)) == len(mine)


@pytest.mark.parametrize("mode", MODES)
def test_frame_stacks_come_back_whole(mode: AutoresetMode) -> None:
    def make() -> Any:
        return gym.wrappers.FrameStackObservation(make_cart(), 3)

    def policy(stack: Any) -> Any:
        return cart_policy(stack[..., -1, :])

    envs = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    schema = {"obs": sw.Field((4,), stack=3)}
    buffer = sw.ReplayBuffer.for_env(envs, 1_200, schema=schema, next_obs="derived")
    list(sw.collect(envs, policy, buffer, 300, seed=SEED))
    assert_rows_are(buffer, [by_hand(make, policy, SEED + i, 150) for i in range(3)])


def test_environments_that_hand_out_one_array_are_stored_step_by_step() -> None:
    envs = SyncVectorEnv([make_cart] * 2, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    buffer = sw.ReplayBuffer.for_env(envs, 1_000)
    list(sw.collect(envs, cart_policy, buffer, 100, seed=SEED))
    assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED + i, 100) for i in range(2)])


class InPlace(gym.Env):  # type: ignore[misc]
    """One environment that changes its observation in place; its rewards have the type that is asked for."""

    observation_space = spaces.Box(-100, 100, (2,), np.float64)
    action_space = spaces.Discrete(5)

    def __init__(self, as_reward: Callable[[float], Any] = float) -> None:
        self.state, self.as_reward = np.zeros(2), as_reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.state[:] = 0
        return self.state, {}

    def step(self, action: Any) -> Any:
        self.state += (1, action)
        t = self.state[0]
        return self.state, self.as_reward(t), np.bool_(t == 5), False, {}


def test_single_environment_that_hands_out_one_array_is_stored_step_by_step() -> None:
    buffer = sw.ReplayBuffer.for_env(InPlace(), 100)
    list(sw.collect(InPlace(), lambda obs: 2, buffer, 7))
    (rows,) = buffer.rows()
    assert rows["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert rows["next_obs"].tolist() == [[t, 2 * t] for t in (1, 2, 3, 4, 5, 1, 2)]


@pytest.mark.parametrize("as_reward", [float, int, np.float32, np.float64, np.int64, np.asarray])
def test_rewards_of_every_type_sum_to_a_float(as_reward: Any) -> None:
    buffer = sw.ReplayBuffer.for_env(InPlace(), 100)
    (episode,) = sw.collect(InPlace(as_reward), lambda obs: 2, buffer, 7)
    assert episode == {"env": 0, "step": 5, "length": 5, "return": 15.0, "terminated": True, "truncated": False}
    assert all(type(value) in (int, float, bool) for value in episode.values())


def test_a_vector_of_one_keeps_no_place_for_resets() -> None:
    envs = SyncVectorEnv([make_cart])
    buffer = sw.ReplayBuffer.for_env(envs, 50)
    list(sw.collect(envs, cart_policy, buffer, 120, seed=SEED))
    assert len(buffer) == 50
    assert buffer.stats()["rows_voided"] == 0


def test_nothing_happens_until_it_is_iterated_and_it_can_be_left_and_taken_up() -> None:
    envs = SyncVectorEnv([make_cart] * 2)
    buffer = sw.ReplayBuffer.for_env(envs, 1_000, next_obs="derived")
    episodes = sw.collect(envs, cart_policy, buffer, 120, seed=SEED)
    assert len(buffer) == 0
    first = next(episodes)
    assert len(buffer) == first["step"] < 120
    buffer.sample(8)  # what a learner does between two episodes
    rest = list(episodes)
    whole = sw.ReplayBuffer.for_env(envs, 1_000)
    assert [first, *rest] == list(sw.collect(envs, cart_policy, whole, 120, seed=SEED))
    streams = [by_hand(make_cart, cart_policy, SEED + i, 100) for i in range(2)]
    assert assert_rows_are(buffer, streams) == assert_rows_are(whole, streams)


def test_closing_it_ends_open_episodes_and_another_call_starts_anew() -> None:
    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 1_000, view=sw.Transitions(n_step=5), seed=0)
    episodes = sw.collect(env, cart_policy, buffer, 1_000, seed=SEED)
    first = next(episodes)
    episodes.close()
    assert len(buffer) == first["length"]
    list(sw.collect(env, cart_policy, buffer, 7, seed=SEED))  # shorter than the episode: cut
    list(sw.collect(env, cart_policy, buffer, 7, seed=SEED))
    (rows,) = buffer.rows()
    assert np.flatnonzero(rows["truncated"] | rows["done"]).tolist() == [
        len(buffer) - 15,
        len(buffer) - 8,
        len(buffer) - 1,
    ]
    assert np.array_equal(rows["obs"][-14], rows["obs"][-7])
    assert buffer.stats()["writers"] == 0


def test_an_error_of_the_policy_reaches_the_caller_and_the_rows_stay() -> None:
    calls = 0

    def policy(obs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("the policy's own")
        return cart_policy(obs)

    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 100)
    with pytest.raises(RuntimeError, match="the policy's own"):
        list(sw.collect(env, policy, buffer, 50, seed=SEED))
    (rows,) = buffer.rows()
    assert len(buffer) == 5
    assert rows["truncated"].tolist() == [False] * 4 + [True]


def test_policies_may_return_tensors() -> None:
    torch = pytest.importorskip("torch")
    envs = SyncVectorEnv([make_cart] * 2)
    buffer = sw.ReplayBuffer.for_env(envs, 100)
    list(sw.collect(envs, lambda obs: torch.as_tensor(cart_policy(obs)), buffer, 60, seed=SEED))
    assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED + i, 60) for i in range(2)])

    table = {(state, action): 0.0 for state in range(16) for action in range(4)}

    def greedy(state: Any) -> Any:
        values = torch.tensor([table[state, action] for action in range(4)], requires_grad=True)
        return (values * 1).argmax()

    lake = gym.make("FrozenLake-v1", is_slippery=False)  # looks actions up in a dict
    tabular = sw.ReplayBuffer.for_env(lake, 100)
    list(sw.collect(lake, greedy, tabular, 20))
    assert len(tabular) == 20


def test_continuous_actions_are_stored_as_given() -> None:
    envs = gym.make_vec("Pendulum-v1", 2, vectorization_mode="sync")
    buffer = sw.ReplayBuffer.for_env(envs, 1_000)
    (episode, *_) = sw.collect(envs, lambda obs: np.tanh(obs[:, :1]), buffer, 500, seed=SEED)
    assert (episode["length"], episode["terminated"], episode["truncated"]) == (200, False, True)
    (rows,) = buffer.rows()
    assert np.array_equal(rows["action"], np.tanh(rows["obs"][:, :1]))


def test_a_bar_is_shown_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    env = make_cart()
    buffer = sw.ReplayBuffer.for_env(env, 100)
    list(sw.collect(env, cart_policy, buffer, 40))
    assert capsys.readouterr().out == ""
    list(sw.collect(env, cart_policy, buffer, 40, progress=True))
    assert "40/40" in capsys.readouterr().out


def test_a_bar_without_rich_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    env = make_cart()
    with pytest.raises(SchemaError) as caught:
        sw.collect(env, cart_policy, sw.ReplayBuffer.for_env(env, 100), 40, progress=True)
    assert str(caught.value) == 'collect(): progress: needs rich; pip install "sharpwave[cli]"'


def test_same_step_environments_without_final_observations_are_refused() -> None:
    class Forgetful(SyncVectorEnv):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:
            *rest, info = super().step(actions)
            return *rest, {"reward_terms": 1} if info else {}

    envs = Forgetful([make_cart] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    buffer = sw.ReplayBuffer.for_env(envs, 100)
    with pytest.raises(SchemaError) as caught:
        list(sw.collect(envs, cart_policy, buffer, 90, seed=SEED))
    assert str(caught.value) == (
        "collect(): envs: expected info['final_obs'] at an episode's end, as same-step autoreset gives it, got "
        "reward_terms; use environments with AutoresetMode.NEXT_STEP"
    )


def vector_without_a_mode() -> Any:
    envs = SyncVectorEnv([make_cart] * 2)
    envs.metadata = {}
    return envs


def test_gymnasium_that_names_no_modes_means_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = vector_without_a_mode()
    buffer = sw.ReplayBuffer.for_env(envs, 100)
    monkeypatch.delattr(gym.vector, "AutoresetMode")
    list(sw.collect(envs, cart_policy, buffer, 60, seed=SEED))
    assert_rows_are(buffer, [by_hand(make_cart, cart_policy, SEED + i, 60) for i in range(2)])


class NotGymnasium:
    """Has what a VecEnv of Stable-Baselines3 has."""

    num_envs = 2
    observation_space = spaces.Discrete(2)


def for_one(**options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer.for_env(make_cart(), 10, **options)


def for_two() -> sw.ReplayBuffer:
    return for_one(num_envs=2)


def two() -> Any:
    return SyncVectorEnv([make_cart] * 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NotGymnasium, cart_policy, for_two, 5), "envs: expected a Gymnasium environment, got NotGymnasium"),
        (
            (vector_without_a_mode, cart_policy, for_two, 5),
            "envs: expected an AutoresetMode in envs.metadata['autoreset_mode'], got None; set it to what the "
            "environments do: with a wrong mode, wrong transitions would be stored",
        ),
        ((two, 3, for_two, 5), "policy: expected a function of observations, got int"),
        ((two, cart_policy, list, 5), "buffer: expected a ReplayBuffer, got list"),
        (
            (two, cart_policy, for_one, 5),
            "buffer: expected num_envs=2 as the environments have, got None; give num_envs=2 to its constructor, or "
            "make it with ReplayBuffer.for_env(envs, ...)",
        ),
        (
            (make_cart, cart_policy, for_two, 5),
            "buffer: expected num_envs=None as the environments have, got 2; give num_envs=None to its constructor, or "
            "make it with ReplayBuffer.for_env(envs, ...)",
        ),
        (
            (make_cart, cart_policy, lambda: sw.ReplayBuffer(10, schema={"action": sw.Field()}, next_obs=None), 5),
            "buffer: expected the fields obs and action, got no obs; give it another schema=, or step the environments "
            "yourself",
        ),
        ((make_cart, cart_policy, for_one, 0), "steps: expected a whole number, at least 1, got 0"),
        ((make_cart, cart_policy, for_one, 2.5), "steps: expected a whole number, at least 1, got 2.5"),
    ],
)
def test_a_wrong_argument_is_told_before_anything_is_stepped(arguments: Any, message: str) -> None:
    make, policy, make_buffer, steps = arguments
    with pytest.raises(SchemaError) as caught:
        sw.collect(make(), policy, make_buffer(), steps)
    assert str(caught.value) == f"collect(): {message}"
