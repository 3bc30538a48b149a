"""Next observations taken from the row after, where writers share the ring."""

import subprocess
import sys

import numpy as np
from patience import HANG_S

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


FULL_OF_ENDS = """
import numpy as np, sharpwave as sw
buffer = sw.ReplayBuffer(64, obs_shape=(2,), next_obs="derived", writers=4, seed=0)
assert (buffer.stats()["block_rows"], buffer.stats()["blocks"]) == (4, 16)
def add(writer, now, then, done=False):
    writer.add(np.full(2, now), 0.0, float(now), np.full(2, then), done)
first, second, third = buffer.writer(), buffer.writer(), buffer.writer()
for i in range(4): add(first, i, i + 1)                     # block 0: an episode goes on ...
for i in range(4): add(first, 4 if i == 0 else 10 * i, 99, True)  # ... and ends in block 1, where every row is an end
for i in range(13 * 4): add(first, 1000 + i, 0, True)       # blocks 2 to 14
for i in range(4): add(second, i, i + 1)                    # block 15, whose newest row is open
add(third, 7, 8)                                            # block 0 again, the row before block 1 still there
add(second, 55, 56)                                         # block 1 again, and a reset that was not reported
add(second, 56, 57)
rows = {}
for batch in buffer.rows():
    for obs, then in zip(batch["obs"], batch["next_obs"]): rows[float(obs[0])] = float(then[0])
assert rows[3.0] == 4.0 and rows[55.0] == 56.0 and rows[56.0] == 57.0, rows
print("fine")
"""


def test_block_full_of_ends_has_room_for_those_of_its_neighbours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_OF_ENDS], capture_output=True, text=True, timeout=2 * HANG_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-500:]
