"""What is stored: two kinds of row, the same bytes for every contender."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

FIELDS = ("obs", "action", "reward", "next_obs", "done")
EPISODE_STEPS = 1000

Columns = dict[str, np.ndarray]
Row = tuple[np.ndarray, np.ndarray | int, float, np.ndarray, bool]


@dataclass(frozen=True)
class Workload:
    """A transition: obs, action, reward (float32), next_obs, done (bool).

    Attributes:
        capacity: Rows in a full buffer unless a benchmark asks for another size.
        chunk_rows: Rows of one prefill chunk; small enough to matter in no memory figure.
        pool_rows: Prebuilt rows that `add` cycles through. Few, because in a training loop the
            observation has just been made and is warm in the cache.
        cases: The operations timed, as `<verb>_<rows>`.
    """

    name: str
    title: str
    obs_shape: tuple[int, ...]
    obs_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str
    capacity: int
    chunk_rows: int
    pool_rows: int
    cases: tuple[str, ...]

    @property
    def field_specs(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each stored field, in the order of `FIELDS`."""
        obs = (self.obs_shape, np.dtype(self.obs_dtype))
        action = (self.action_shape, np.dtype(self.action_dtype))
        return dict(zip(FIELDS, (obs, action, ((), np.dtype("float32")), obs, ((), np.dtype("bool"))), strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row without any padding or header: what "raw" means in the memory tables."""
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.field_specs.values())

    def columns(self, rows: int) -> Columns:
        """Consecutive steps as one array per field; the same arrays on every call."""
        return _columns(self, rows)

    def chunks(self, rows: int) -> Iterator[Columns]:
        """Pieces of at most `chunk_rows` rows that together prefill `rows` rows."""
        chunk = self.columns(self.chunk_rows)
        for start in range(0, rows, self.chunk_rows):
            count = min(self.chunk_rows, rows - start)
            yield chunk if count == self.chunk_rows else {name: x[:count] for name, x in chunk.items()}

    def rows(self) -> list[Row]:
        """Steps as an environment loop holds them: small arrays, a Python float and a Python bool."""
        return [
            (
                obs.copy(),
                action.copy() if action.shape else int(action),
                float(reward),
                after.copy(),
                bool(done),
            )
            for obs, action, reward, after, done in zip(*self.columns(self.pool_rows).values(), strict=True)
        ]


@cache
def _columns(workload: Workload, rows: int) -> Columns:
    rng = np.random.default_rng(0)
    if workload.obs_dtype == "uint8":
        steps = _frame_stacks(rows + 1)
    else:
        steps = rng.standard_normal((rows + 1, *workload.obs_shape), np.float32)
    if workload.action_shape:
        action = rng.standard_normal((rows, *workload.action_shape)).astype(workload.action_dtype)
    else:
        action = rng.integers(0, 6, rows).astype(workload.action_dtype)
    values = (
        np.ascontiguousarray(steps[:-1]),
        action,
        rng.standard_normal(rows, np.float32),
        np.ascontiguousarray(steps[1:]),
        np.arange(1, rows + 1) % EPISODE_STEPS == 0,
    )
    return dict(zip(FIELDS, values, strict=True))


def _frame_stacks(count: int) -> np.ndarray:
    """Stacks of four game-like frames: a still background with moving squares.

    Not noise, because one contender compresses what it stores and noise would be unfair to it.
    """
    background = np.add.outer(np.arange(84), np.arange(84)).astype(np.uint8)
    frames = np.repeat(background[None], count + 3, axis=0)
    for step, frame in enumerate(frames):
        for sprite in range(1, 5):
            y, x = sprite * step % 76, (sprite + 2) * step % 76
            frame[y : y + 8, x : x + 8] = 40 * sprite
    windows = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0)
    return np.ascontiguousarray(windows.transpose(0, 3, 1, 2))


W1 = Workload(
    name="w1",
    title="obs f32(17), action f32(6), reward, next_obs f32(17), done",
    obs_shape=(17,),
    obs_dtype="float32",
    action_shape=(6,),
    action_dtype="float32",
    capacity=1_000_000,
    chunk_rows=10_000,
    pool_rows=512,
    cases=("add_1", "add_64", "add_1024", "sample_32", "sample_256", "sample_4096"),
)
ATARI = Workload(
    name="atari",
    title="obs and next_obs u8(4, 84, 84) both stored, action i64, reward, done",
    obs_shape=(4, 84, 84),
    obs_dtype="uint8",
    action_shape=(),
    action_dtype="int64",
    capacity=20_000,
    chunk_rows=250,
    pool_rows=64,
    cases=("add_1", "sample_256"),
)
WORKLOADS = {workload.name: workload for workload in (W1, ATARI)}
