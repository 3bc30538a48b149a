"""Vector environments that stack frames themselves fill buffers that store one frame a row: every batch is that of a
buffer that stores the stacks whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError

gym = pytest.importorskip("gymnasium")
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from stacked_envs import FRAME, StackedEnvs  # noqa: E402

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]
VIEWS: dict[str, Any] = {
    "one step": sw.Transitions(),
    "three steps": sw.Transitions(n_step=3, gamma=0.9),
    "windows": sw.Windows(3, burn_in=2, bootstrap=1),
}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == set(theirs)
    for name in ours:
        assert (ours[name].shape, ours[name].dtype) == (theirs[name].shape, theirs[name].dtype), name
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def assert_same_buffers(frames: sw.ReplayBuffer, whole: sw.ReplayBuffer) -> None:
    """Every row and every batch to the byte. (Rows of both have the same serials: nothing was overwritten.)"""
    assert len(frames) == len(whole) > 0
    for ours, theirs in zip(frames.rows(), whole.rows(), strict=True):
        assert_same(ours, theirs)
    for _ in range(8):
        assert_same(frames.sample(64), whole.sample(64))
    assert frames.stats()["resets_unflagged"] == 0


def pair_for(envs: Any, padding: str, next_obs: Any, view: str = "one step", **field: Any) -> tuple[Any, Any]:
    options: dict[str, Any] = {"view": VIEWS[view], "writers": 1, "seed": 3}
    whole = sw.ReplayBuffer.for_env(envs, 1_200, **options)
    if not field:
        frames = sw.ReplayBuffer.for_env(envs, 1_200, stack=4, padding=padding, next_obs=next_obs, **options)
    else:
        obs = sw.Field(FRAME, "uint8", stack=4, padding=padding, **field)
        frames = sw.ReplayBuffer.for_env(envs, 1_200, schema={"obs": obs}, next_obs=next_obs, **options)
    return frames, whole


def random_policy(width: int, actions: int) -> Callable[[Any], Any]:
    stream = np.random.default_rng(0)
    return lambda obs: stream.integers(0, actions, width)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("padding", ["repeat", "zero"])
@pytest.mark.parametrize("mode", MODES)
def test_collected_stacks_are_stored_as_frames_and_come_back_whole(
    mode: AutoresetMode, padding: Any, next_obs: Any, view: str
) -> None:
    buffers = pair_for(StackedEnvs(3, 4, padding, mode), padding, next_obs, view)
    frame_bytes = FRAME[0] * FRAME[1]
    assert buffers[0].stats()["payload_bytes"] < (1 + (next_obs == "stored")) * frame_bytes + 16
    for buffer in buffers:
        envs = StackedEnvs(3, 4, padding, mode)
        assert list(sw.collect(envs, random_policy(3, 3), buffer, 400, seed=5))
    assert_same_buffers(*buffers)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("padding", ["repeat", "zero"])
def test_next_observations_of_the_reset_come_back_as_they_were_given(
    padding: Any, next_obs: Any, compression: Any, view: str
) -> None:
    """As programs do that never look at final_obs: the last row of an episode has the first observation of the next."""
    envs = StackedEnvs(3, 4, padding, AutoresetMode.SAME_STEP)
    frames, whole = pair_for(envs, padding, next_obs, view, compression=compression)
    obs, _ = envs.reset(seed=5)
    policy, ends = random_policy(3, 3), 0
    for _ in range(150):
        action = policy(obs)
        after, reward, terminated, truncated, _ = envs.step(action)
        for buffer in (frames, whole):
            buffer.add(obs, action, reward, after, terminated, truncated=truncated)
        obs, ends = after, ends + int((terminated | truncated).sum())
    assert ends > 20
    assert frames.stats()["episodes"] == whole.stats()["episodes"] == ends
    assert_same_buffers(frames, whole)


def test_next_observation_of_the_reset_is_kept_in_every_storage(tmp_path: Any) -> None:
    """The ring goes round, the file is closed and opened, the rows are saved and loaded."""
    schema = {"obs": sw.Field(FRAME, "uint8", stack=4, padding="zero"), "action": sw.Field((), "int64")}
    places = [None, "shm://stacks-of-resets", f"file://{tmp_path}/live.sw"]
    made = [
        sw.ReplayBuffer(
            60, schema=schema, next_obs="derived", num_envs=3, writers=1, seed=1, storage=place, exist="replace"
        )
        for place in places
    ]
    wide = {"obs": sw.Field((4, *FRAME), "uint8"), "action": sw.Field((), "int64")}
    whole = sw.ReplayBuffer(60, schema=wide, num_envs=3, writers=1, seed=1)
    envs = StackedEnvs(3, 4, "zero", AutoresetMode.SAME_STEP)
    obs, _ = envs.reset(seed=6)
    for _ in range(70):
        action = np.zeros(3, np.int64)
        after, reward, terminated, truncated, _ = envs.step(action)
        for buffer in (*made, whole):
            buffer.add(obs, action, reward, after, terminated, truncated=truncated)
        obs = after
    (theirs,) = whole.rows()
    names = ("obs", "next_obs", "done", "reward")
    made[0].save(tmp_path / "saved")
    made[2].close()
    made += [sw.open(tmp_path / "saved"), sw.open(places[2])]
    for buffer in (made[0], made[1], made[3], made[4]):
        (ours,) = buffer.rows()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in names)
    made[1].close(unlink=True)


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("mode", [*MODES, AutoresetMode.DISABLED])
def test_gymnasiums_own_stacks_fill_a_buffer_of_frames(mode: AutoresetMode, padding: Any) -> None:
    def make() -> Any:
        return gym.wrappers.FrameStackObservation(gym.make("CartPole-v1"), 4, padding_type=padding)

    ours = "zero" if padding == "zero" else "repeat"
    envs = SyncVectorEnv([make] * 3, autoreset_mode=mode)
    frames, whole = pair_for(envs, ours, "derived")
    assert frames.schema["obs"] == sw.Field((4,), stack=4, padding=ours)
    for buffer in (frames, whole):
        list(sw.collect(envs, random_policy(3, 2), buffer, 300, seed=7))
    assert_same_buffers(frames, whole)


@pytest.mark.parametrize("mode", MODES)
def test_ales_own_vector_environment_fills_a_buffer_of_frames(mode: AutoresetMode) -> None:
    ale = pytest.importorskip("ale_py.vector_env")

    def make() -> Any:
        return ale.AtariVectorEnv(
            "breakout", 2, img_height=20, img_width=20, episodic_life=True, noop_max=4, autoreset_mode=mode
        )

    frames, whole = pair_for(make(), "zero", "derived", "three steps")
    assert frames.schema["obs"] == sw.Field((20, 20), "uint8", stack=4, padding="zero")
    for buffer in (frames, whole):
        assert list(sw.collect(make(), random_policy(2, 4), buffer, 300, seed=8))
    assert_same_buffers(frames, whole)


def test_ales_next_observations_of_the_reset_come_back_as_they_were_given() -> None:
    ale = pytest.importorskip("ale_py.vector_env")
    envs = ale.AtariVectorEnv(
        "breakout",
        2,
        img_height=20,
        img_width=20,
        episodic_life=True,
        noop_max=4,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    frames, whole = pair_for(envs, "zero", "derived")
    obs, _ = envs.reset(seed=8)
    obs, policy = obs.copy(), random_policy(2, 4)
    for _ in range(150):
        action = policy(obs)
        after, reward, terminated, truncated, _ = envs.step(action)
        after = after.copy()
        for buffer in (frames, whole):
            buffer.add(obs, action, reward, after, terminated, truncated=truncated)
        obs = after
    assert frames.stats()["episodes"] > 5
    assert_same_buffers(frames, whole)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_number_of_frames_that_the_environment_does_not_stack_is_refused() -> None:
    with pytest.raises(
        SchemaError, match=r"observation_space: expected stack=3 frames on the first axis, got shape \(4,"
    ):
        sw.ReplayBuffer.for_env(StackedEnvs(2), 100, stack=3)
    with pytest.raises(SchemaError, match="padding='zero' is for stacks of frames; give stack="):
        sw.ReplayBuffer.for_env(StackedEnvs(2), 100, padding="zero")
    with pytest.raises(SchemaError, match="expected stack= or schema= with 'obs', got both"):
        sw.ReplayBuffer.for_env(StackedEnvs(2), 100, stack=4, schema={"obs": sw.Field(FRAME, "uint8", stack=4)})
    with pytest.raises(SchemaError, match="padding: expected 'repeat' or 'zero', got 'reset'"):
        sw.Field((2,), stack=2, padding="reset")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="padding='zero' is for stacks"):
        sw.Field((2,), padding="zero")
