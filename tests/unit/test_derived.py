"""Next observations taken from the row after, where writers share the ring."""

import numpy as np

import sharpwave as sw


def test_row_keeps_its_next_observation_when_a_masked_step_and_the_row_after_it_are_written_over() -> None:
    buffer = sw.ReplayBuffer(48, obs_shape=(), num_envs=2, next_obs="derived", writers=3, seed=0)
    steps = buffer.stats()["block_rows"] // 2  # of a block
    shown = np.array([0, 1000], np.float32)

    def step(writer: sw.ReplayBuffer | sw.buffers.replay.Writer, *, first_env: bool = True) -> None:
        mask = np.array([first_env, True])
        after = shown + mask
        flat = np.zeros(2, np.float32)
        writer.add(obs=shown, action=flat, reward=flat, next_obs=after, done=flat.astype(bool), mask=mask)
        shown[:] = after

    first, second, third = buffer.writer(), buffer.writer(), buffer.writer()
    for number in range(steps * buffer.stats()["blocks"]):
        step(first, first_env=number != steps)  # env 0 sits out the first step of the second block
    step(second)  # writes over the first step of the first block
    second.close()
    for _ in range(steps):
        step(third)  # and over the second block
    (rows,) = buffer.rows()
    next_of = dict(zip(rows["obs"].tolist(), rows["next_obs"].tolist(), strict=True))
    assert next_of[steps - 1] == steps
