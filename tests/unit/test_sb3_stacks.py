"""Stacked frames in the buffer for Stable-Baselines3: rows store single frames, batches are those of its own buffer."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from sharpwave.errors import SchemaError

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
import gymnasium as gym  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.wrappers import FrameStackObservation  # noqa: E402
from sb3_streams import assert_same_examples, one_thread, rows_of  # noqa: E402, F401
from stable_baselines3 import DQN  # noqa: E402
from stable_baselines3.common import buffers  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecTransposeImage  # noqa: E402

from sharpwave.adapters.sb3 import ReplayBuffer  # noqa: E402


class Screen(gym.Env):  # type: ignore[misc]
    """Frames that show a counter; episodes of several lengths end in both ways."""

    action_space = spaces.Discrete(3)

    def __init__(self, shape: tuple[int, ...], start: int, kind: str = "image") -> None:
        image = spaces.Box(0, 255, shape, np.uint8)
        self.observation_space: Any = image
        if kind == "dict":
            self.observation_space = spaces.Dict({"image": image, "place": spaces.Box(-1e6, 1e6, (2,))})
        self.now, self.kind, self.image = start, kind, image

    def see(self) -> Any:
        size = int(np.prod(self.image.shape))
        frame = ((np.arange(size) * 3 + self.now * 7 + 1) % 256).astype(np.uint8)
        frame[:2] = self.now % 256, self.now // 256
        frame = frame.reshape(self.image.shape)
        if self.kind == "image":
            return frame
        return {"image": frame, "place": np.array([self.now, -self.now], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.now += 13
        self.end = self.now + 2 + self.now % 7
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.now += 1
        over = self.now >= self.end
        return self.see(), float(self.now), over and self.now % 2 == 0, over and self.now % 2 == 1, {}


def play(steps: int, env: VecEnv, *targets: Any) -> None:
    """Steps the environments as the algorithms of Stable-Baselines3 do, and adds to every buffer."""
    last = copied(env.reset())
    for _ in range(steps):
        action = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        new, reward, done, infos = env.step(action)
        after = copied(new)
        for i in np.flatnonzero(done):
            final = infos[i]["terminal_observation"]
            for key in after if isinstance(after, dict) else ():
                after[key][i] = final[key]
            if not isinstance(after, dict):
                after[i] = final
        for target in targets:
            target.add(copied(last), copied(after), action, reward, done, infos)
        last = copied(new)


def copied(obs: Any) -> Any:
    return {key: part.copy() for key, part in obs.items()} if isinstance(obs, dict) else obs.copy()


def both(env: VecEnv, steps: int = 70, rows: int = 50, **options: Any) -> tuple[Any, Any]:
    shape = (rows * env.num_envs, env.observation_space, env.action_space, "cpu", env.num_envs)
    kind = buffers.DictReplayBuffer if isinstance(env.observation_space, spaces.Dict) else buffers.ReplayBuffer
    mine, theirs = ReplayBuffer(*shape, **options), kind(*shape)
    play(steps, env, mine, theirs)
    return mine, theirs


def screens(shape: tuple[int, ...], number: int, kind: str = "image") -> DummyVecEnv:
    return DummyVecEnv([lambda i=i: Screen(shape, 1_000 * i, kind) for i in range(number)])


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize(
    ("shape", "order", "transposed"),
    [
        ((5, 6, 1), None, False),
        ((5, 6, 3), None, False),
        ((5, 6, 1), None, True),
        ((14, 15, 3), None, True),
        ((1, 5, 6), None, False),
        ((3, 8, 8), "first", False),
        ((6, 6, 6), "last", False),
    ],
    ids=str,
)
def test_stacks_of_vec_frame_stack_come_back(shape: tuple[int, ...], order: Any, transposed: bool, n_envs: int) -> None:
    env: VecEnv = VecFrameStack(screens(shape, n_envs), 4, channels_order=order)
    env = VecTransposeImage(env) if transposed else env
    mine, theirs = both(env, stack=4, channels_order=order)
    assert_same_examples(mine, theirs, 50 * n_envs)
    frame = int(np.prod(shape))
    assert mine.inner.stats()["payload_bytes"] == frame + 8 + 4 + 1
    assert mine.inner.stats()["resets_unflagged"] == 0


@pytest.mark.parametrize("stack", [4, {"image": 4, "place": 4}, {"image": 4}], ids=str)
def test_dicts_of_stacks_come_back(stack: Any) -> None:
    env = VecFrameStack(screens((5, 6, 2), 2, "dict"), 4)
    mine, theirs = both(env, stack=stack)
    assert_same_examples(mine, theirs, 100)
    place = 2 if stack != {"image": 4} else 8
    assert mine.inner.stats()["payload_bytes"] == 60 + 4 * place + 8 + 4 + 1


def test_stacks_come_back_with_n_steps_and_compression() -> None:
    env = VecTransposeImage(VecFrameStack(screens((8, 12, 1), 2), 4))
    options: Any = {"n_steps": 3, "gamma": 0.5}
    shape = (100, env.observation_space, env.action_space, "cpu", 2)
    mine = ReplayBuffer(*shape, stack=4, compression="lz4", **options)
    theirs = buffers.NStepReplayBuffer(*shape, **options)
    play(45, env, mine, theirs)
    assert_same_examples(mine, theirs, 90, rel=1e-6)


def test_dqn_learns_from_single_frames() -> None:
    env = VecFrameStack(screens((36, 36, 1), 2), 4)
    options: Any = {"replay_buffer_kwargs": {"stack": 4}, "buffer_size": 100, "learning_starts": 20, "batch_size": 8}
    model = DQN("CnnPolicy", env, replay_buffer_class=ReplayBuffer, device="cpu", **options).learn(60)
    assert model.replay_buffer.observation_space.shape == (4, 36, 36)
    assert model.replay_buffer.inner.stats()["payload_bytes"] == 36 * 36 + 8 + 4 + 1
    assert model.replay_buffer.sample(3).observations.shape == (3, 4, 36, 36)
    model.learn(30)  # which resets in the middle of an episode
    assert model.replay_buffer.inner.stats()["resets_unflagged"] > 0


class Repeating(gym.vector.SyncVectorEnv):  # type: ignore[misc]
    """Gymnasium's stacks, which start with their first frame repeated, as CleanRL's scripts have them."""

    def __init__(self, number: int) -> None:
        super().__init__(
            [lambda i=i: FrameStackObservation(Screen((5, 6), 1_000 * i), 4) for i in range(number)],
            autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
        )


@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("real", [True, False], ids=["final observations", "those of the reset"])
def test_stacks_of_gymnasium_come_back(n_envs: int, real: bool) -> None:
    """CleanRL's scripts put the final observation in at truncations, and leave the reset's at terminations."""
    envs = Repeating(n_envs)
    shape = (40 * n_envs, envs.single_observation_space, envs.single_action_space, "cpu", n_envs)
    mine = ReplayBuffer(*shape, handle_timeout_termination=False, stack=4, padding="repeat")
    theirs = buffers.ReplayBuffer(*shape, handle_timeout_termination=False)
    obs, _ = envs.reset()
    for _ in range(60):
        actions = envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        after = next_obs.copy()
        for i in np.flatnonzero(truncations | terminations if real else truncations):
            after[i] = infos["final_obs"][i]
        for target in (mine, theirs):
            target.add(obs, after, actions, rewards, terminations, infos)
        obs = next_obs
    assert_same_examples(mine, theirs, 40 * n_envs)


def test_stacked_buffer_is_saved_and_loaded() -> None:
    envs = Repeating(2)
    mine = ReplayBuffer(
        80, envs.single_observation_space, envs.single_action_space, "cpu", 2, stack=4, padding="repeat", seed=0
    )
    obs, _ = envs.reset()
    for _ in range(5):
        next_obs, rewards, done, _, _ = envs.step(envs.action_space.sample())
        mine.add(obs, next_obs, np.zeros((2, 1)), rewards, np.zeros(2), [{}, {}])
        if done.any():
            break
        obs = next_obs
    other = pickle.loads(pickle.dumps(mine))
    assert rows_of(mine.sample(16)) == rows_of(other.sample(16))


@pytest.mark.parametrize(
    ("space", "options", "words"),
    [
        (spaces.Box(0, 255, (9, 9, 9), np.uint8), {"stack": 3}, "stack: the first or the last axis of (9, 9, 9) may"),
        (spaces.Box(0, 255, (5, 6, 7), np.uint8), {"stack": 4}, "stack: expected 4 frames on the last axis of an"),
        (spaces.Box(0, 255, (8, 8, 4), np.uint8), {"stack": 3, "channels_order": "first"}, "expected 3 frames on the"),
        (spaces.Box(0, 1, (4,)), {"stack": 0}, "stack: expected a whole number, 1 to 256, got 0"),
        (spaces.Box(0, 1, (4,)), {"stack": {"a": 4}}, "stack: expected a whole number for Box(0.0, 1.0, (4,)"),
        (spaces.Dict({"a": spaces.Box(0, 1, (4,))}), {"stack": {"b": 4}}, "stack: expected keys of the observation"),
        (spaces.Box(0, 1, (4,)), {"stack": 4, "padding": "edge"}, "padding: expected 'zero' or 'repeat', got 'edge'"),
    ],
    ids=str,
)
def test_stacks_that_cannot_be_are_refused(space: Any, options: Any, words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        ReplayBuffer(100, space, spaces.Discrete(2), "cpu", **options)
    assert f"ReplayBuffer(): {words}" in str(caught.value) or words in str(caught.value)


def test_observations_that_are_no_stacks_are_refused() -> None:
    mine = ReplayBuffer(100, spaces.Box(0, 255, (4, 5, 5), np.uint8), spaces.Discrete(2), "cpu", stack=4)
    frames = np.random.default_rng(0).integers(0, 255, (2, 1, 4, 5, 5), np.uint8)
    words = (
        r"add\(\): obs: expected stacks of successive frames, oldest first, with padding='zero' at the start of an "
        r"episode, got others \(.*\); give the buffer the stack=, channels_order= and padding= of the wrapper"
    )
    with pytest.raises(SchemaError, match=words):
        mine.add(frames[0], frames[1], np.array([0]), np.array([0.0]), np.array([False]), [{}])
    assert (mine.size(), len(mine.inner)) == (0, 0)
