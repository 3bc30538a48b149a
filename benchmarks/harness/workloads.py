"""What is stored: the kinds of row, the same bytes for every contender."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np

from harness import footage

FIELDS = ("obs", "action", "reward", "next_obs", "done")
GOAL_PARTS = ("observation", "achieved_goal", "desired_goal")

DISCRETE_ACTIONS = 2

Columns = dict[str, np.ndarray]
Row = tuple[np.ndarray, np.ndarray | int, float, np.ndarray, bool]


@dataclass(frozen=True)
class Workload:
    """A transition: obs, action, reward (float32), next_obs, done (bool).

    Attributes:
        capacity: Rows in a full buffer unless a benchmark asks for another size.
        episode_steps: Length of an episode, where the rows are made up.
        chunk_rows: Rows of one prefill chunk; small enough to matter in no memory figure.
        pool_rows: Prebuilt rows that `add` cycles through. Few, because in a training loop the
            observation has just been made and is warm in the cache.
        filmed: The environment whose rendered frames fill the images; made up if empty.
        goal_size: Numbers of a goal. An observation ends with the goal achieved and the one desired, which is the
            same throughout an episode; `split_goals` takes them apart.
        state_items: Numbers (float32) of a recurrent state beside each row, which the contenders make up.
    """

    name: str
    title: str
    obs_shape: tuple[int, ...]
    obs_dtype: str
    action_shape: tuple[int, ...]
    action_dtype: str
    capacity: int
    episode_steps: int
    chunk_rows: int
    pool_rows: int
    filmed: str = ""
    goal_size: int = 0
    state_items: int = 0

    @property
    def field_specs(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each stored field, in the order of `FIELDS`."""
        obs = (self.obs_shape, np.dtype(self.obs_dtype))
        action = (self.action_shape, np.dtype(self.action_dtype))
        return dict(zip(FIELDS, (obs, action, ((), np.dtype("float32")), obs, ((), np.dtype("bool"))), strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row without any padding or header: what "raw" means in the memory tables."""
        of_fields = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in self.field_specs.values())
        return of_fields + 4 * self.state_items

    def columns(self, rows: int) -> Columns:
        """Consecutive steps as one array per field, whole episodes; the same arrays on every call."""
        return _columns(self, rows)

    def split_goals(self, obs: np.ndarray) -> Columns:
        """Observations as a goal-conditioned environment gives them."""
        parts = np.split(obs, [-2 * self.goal_size, -self.goal_size], axis=-1)
        return {name: np.ascontiguousarray(part) for name, part in zip(GOAL_PARTS, parts, strict=True)}

    def chunks(self, rows: int) -> Iterator[Columns]:
        """Pieces of at most `chunk_rows` rows that together prefill `rows` rows; each goes on where the last ended.
        The last row ends an episode: whatever is added then starts one."""
        pieces = _filmed_pieces(self) if self.filmed else cycle([self.columns(self.chunk_rows)])
        while rows > 0:
            piece = next(pieces)
            count = min(rows, len(piece["reward"]))
            rows -= count
            if rows == 0:
                piece = {name: x[:count] for name, x in piece.items()}
                piece["done"] = np.append(piece["done"][:-1], True)
            yield piece

    def rows(self, count: int = 0) -> list[Row]:
        """The first `count` steps, or the pool, as an environment loop holds them: arrays, a Python float and bool.

        A step's next_obs is the very array that the next step has as its obs, except where an episode ends.
        """
        columns = self.columns(count or self.pool_rows)
        before, action = [obs.copy() for obs in columns["obs"]], columns["action"]
        after = [*before[1:], before[0]]
        for step in np.flatnonzero(columns["done"]):
            after[step] = columns["next_obs"][step].copy()
        actions = [x.copy() for x in action] if action.ndim > 1 else action.tolist()
        return list(zip(before, actions, columns["reward"].tolist(), after, columns["done"].tolist(), strict=True))


@cache
def _columns(workload: Workload, rows: int) -> Columns:
    rng = np.random.default_rng(0)
    done = np.arange(1, rows + 1) % workload.episode_steps == 0
    # Whatever follows these rows starts an episode.
    done[-1] = True
    if workload.obs_dtype == "uint8":
        lengths = np.diff(np.flatnonzero(done), prepend=-1)
        film = footage.load(workload.filmed) if workload.filmed else footage.made_up(lengths)
        columns = next(footage.transitions(film, rows))
        columns["done"][-1] = True
        return columns
    steps = rng.standard_normal((rows + 1, *workload.obs_shape), np.float32)
    action = rng.standard_normal((rows, *workload.action_shape)).astype(workload.action_dtype)
    if not workload.action_shape:
        action = rng.integers(0, DISCRETE_ACTIONS, rows)
    reward = rng.standard_normal(rows, np.float32)
    before, after = np.ascontiguousarray(steps[:-1]), np.ascontiguousarray(steps[1:])
    if goals := workload.goal_size:
        start = np.arange(rows) // workload.episode_steps * workload.episode_steps
        before, after = before.copy(), after.copy()  # views of one array so far
        before[:, -goals:] = after[:, -goals:] = before[start, -goals:]
    values = (before, action, reward, after, done)
    return dict(zip(FIELDS, values, strict=True))


def _filmed_pieces(workload: Workload) -> Iterator[Columns]:
    film = footage.load(workload.filmed)
    while True:
        yield from footage.transitions(film, workload.chunk_rows)


W1 = Workload(
    name="w1",
    title="obs f32(17), action f32(6), reward, next_obs f32(17), done",
    obs_shape=(17,),
    obs_dtype="float32",
    action_shape=(6,),
    action_dtype="float32",
    capacity=1_000_000,
    episode_steps=1000,
    chunk_rows=10_000,
    pool_rows=512,
)
STATE_ITEMS = 256
RECURRENT = replace(
    W1,
    name="recurrent",
    title=f"small rows with a recurrent state f32({STATE_ITEMS})",
    capacity=100_000,
    state_items=STATE_ITEMS,
)
DISCRETE: dict[str, Any] = {"action_shape": (), "action_dtype": "int64"}
ATARI = Workload(
    name="atari",
    title="obs and next_obs u8(4, 84, 84) both stored, action i64, reward, done",
    obs_shape=(4, 84, 84),
    obs_dtype="uint8",
    action_shape=(),
    action_dtype="int64",
    capacity=20_000,
    episode_steps=250,
    chunk_rows=250,
    pool_rows=128,
)
GOALS = Workload(
    name="goals",
    title="obs f32(10) and two goals f32(3), action f32(4), reward, next_obs alike, done",
    obs_shape=(16,),
    obs_dtype="float32",
    action_shape=(4,),
    action_dtype="float32",
    capacity=100_000,
    episode_steps=50,
    chunk_rows=10_000,
    pool_rows=500,
    goal_size=3,
)
CARTPOLE = replace(
    W1, name="pole", title="obs f32(4), action i64, reward, next_obs f32(4), done", obs_shape=(4,), **DISCRETE
)
CONTROL = replace(W1, name="control", title="obs f32(17), action i64, reward, next_obs f32(17), done", **DISCRETE)
FILMED = {name: replace(ATARI, name=name, filmed=name) for name in footage.ENVIRONMENTS}
WORKLOADS = {workload.name: workload for workload in (W1, RECURRENT, ATARI, GOALS, CARTPOLE, CONTROL, *FILMED.values())}
