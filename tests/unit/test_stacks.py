"""Whole stacks given to add(): taken only where the frames before say the same, so that batches give back what came."""

from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError


def stack(*frames: int) -> np.ndarray:
    return np.array(frames)[:, None]


def make(next_obs: Any, compression: Any = None, frames: int = 3) -> sw.ReplayBuffer:
    field = sw.Field((1,), "int64", stack=frames, compression=compression)
    return sw.ReplayBuffer(16, schema={"obs": field, "action": sw.Field((), "int64")}, next_obs=next_obs, num_envs=1)


def add(buffer: sw.ReplayBuffer, obs: tuple[int, ...], new: int, done: bool = False) -> None:
    buffer.add(obs=stack(*obs), action=0, reward=0.0, next_obs=stack(*obs[1:], new), done=done)


def stacks(buffer: sw.ReplayBuffer, name: str) -> list[list[int]]:
    return [row for batch in buffer.rows() for row in batch[name][:, :, 0].tolist()]


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
def test_stack_that_starts_over_ends_the_episode_before_it(next_obs: str, compression: str | None) -> None:
    buffer = make(next_obs, compression)
    add(buffer, (1, 1, 1), 2)
    add(buffer, (1, 1, 2), 3)
    add(buffer, (9, 9, 9), 10)  # a reset that nobody flagged
    assert stacks(buffer, "obs") == [[1, 1, 1], [1, 1, 2], [9, 9, 9]]
    assert stacks(buffer, "next_obs") == [[1, 1, 2], [1, 2, 3], [9, 9, 10]]
    assert [batch["truncated"].tolist() for batch in buffer.rows()] == [[False, True, False]]
    assert buffer.stats()["resets_unflagged"] == 1


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("jump", [(7, 8, 2), (7, 8, 50), (0, 0, 2)])
def test_stack_that_neither_goes_on_nor_starts_is_refused(next_obs: str, compression: str | None, jump: Any) -> None:
    buffer = make(next_obs, compression)
    add(buffer, (1, 1, 1), 2)
    with pytest.raises(SchemaError, match="does not go on from the frames added before; end an episode with truncated"):
        add(buffer, jump, 3)
    add(buffer, (1, 1, 2), 3, done=True)
    with pytest.raises(SchemaError, match="starts an episode holds different frames"):
        add(buffer, (0, 0, 5), 6)
    add(buffer, (5, 5, 5), 6)
    assert stacks(buffer, "obs") == [[1, 1, 1], [1, 1, 2], [5, 5, 5]]


def test_stacks_of_several_steps_are_compared_with_each_other() -> None:
    buffer = make(None)
    rows = {"action": np.zeros(3, int), "reward": np.zeros(3), "done": np.zeros(3, bool)}
    good = np.array([[1, 1, 1], [1, 1, 2], [1, 2, 3]])[:, :, None]
    buffer.add(obs=good, **rows)
    with pytest.raises(SchemaError, match="does not go on"):
        buffer.add(obs=np.array([[2, 3, 4], [3, 4, 5], [9, 4, 6]])[:, :, None], **rows)
    assert stacks(buffer, "obs") == good[:, :, 0].tolist()


def test_shapes_that_are_no_stack_are_told_apart() -> None:
    plain, stacked = sw.Field((84, 84)), sw.Field((84, 84), stack=4)
    for field, shape, words in [
        (
            plain,
            (4, 84, 84),
            r"got \(4, 84, 84\); give the field shape .*, or pass single frames with Field\(stack=4\)",
        ),
        (
            stacked,
            (84, 84, 4),
            r"expected shape \(84, 84\) or \(4, 84, 84\), got \(84, 84, 4\); pass single frames, or",
        ),
        (
            stacked,
            (3, 84, 84),
            r"expected shape \(84, 84\) or \(4, 84, 84\), got \(3, 84, 84\); pass single frames, or",
        ),
    ]:
        buffer = sw.ReplayBuffer(4, schema={"obs": field}, next_obs=None)
        with pytest.raises(SchemaError, match=words):
            buffer.add(obs=np.zeros(shape), reward=0.0, done=False)


@pytest.mark.parametrize("capacity", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 3, 4, 5])
def test_ring_of_few_blocks_keeps_its_capacity_after_a_clear(capacity: int, before: int) -> None:
    schema = {"obs": sw.Field((2,), "float32", stack=2)}
    buffer = sw.ReplayBuffer(capacity, schema=schema, next_obs="derived", num_envs=1, seed=0)

    def add(number: int) -> None:
        frame = np.full((1, 2), number, np.float32)
        buffer.add(obs=frame, reward=np.zeros(1), next_obs=frame + 1, done=np.zeros(1, bool))

    for number in range(before):
        add(number)
    buffer.clear()
    for number in range(before, before + 8):
        add(number)
        assert len(buffer) <= capacity
        assert sum(len(batch["indices"]) for batch in buffer.rows()) == len(buffer)


def test_batches_of_short_stacks_after_few_long_ones() -> None:
    """What a thread keeps between batches fits each of them: few examples of many frames, then many of few."""
    buffers = [make("derived", frames=frames) for frames in (64, 2)]
    for buffer in buffers:
        for number in range(40):
            frame = np.full((1, 1), number)
            buffer.add(obs=frame, action=[0], reward=[0.0], next_obs=frame + 1, done=[number % 5 == 4])
    for size in (1, 3, 64):
        for buffer in buffers:
            batch = buffer.sample(size)
            starts = batch["obs"][:, -1, 0] // 5 * 5
            wanted = np.maximum(batch["obs"][:, -1:, 0] - np.arange(batch["obs"].shape[1])[::-1], starts[:, None])
            assert (batch["obs"][:, :, 0] == wanted).all()
