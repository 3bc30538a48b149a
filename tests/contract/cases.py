"""What the contract runs over: every sampler, every view, observations kept twice or once; and one order of calls for
all of them, given call by call to whoever adds and whoever learns.

Imported by the tests and by the process that attaches, so the functions of hindsight have the same name in both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import sharpwave as sw
from sharpwave.errors import NotReady

WIDTH = 2  # environments
CAPACITY = 40
ENDS, MASKS, RESETS = 5, 9, 13  # every so-manieth step of an environment


def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return (achieved.astype(np.int64) * 3 - desired).sum(axis=1) % 101


def reached(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return (achieved == desired).all(axis=1)


SAMPLERS: dict[str, sw.sampling.Sampler] = {
    "Uniform()": sw.Uniform(),
    "Uniform(newest=2)": sw.Uniform(newest=2),
    "Uniform(max_reads=3)": sw.Uniform(max_reads=3),
    "Prioritized()": sw.Prioritized(alpha=0.7, beta=sw.Linear(0.4, 1.0, 20)),
    "Prioritized(rank_based=True)": sw.Prioritized(rank_based=True, normalize="buffer"),
    "Prioritized(newest=2, max_reads=4)": sw.Prioritized(newest=2, max_reads=4, mix=0.25, stratified=False),
    "Recent(7)": sw.Recent(7),
    "Recent(7, newest=1, max_reads=3)": sw.Recent(7, newest=1, max_reads=3),
    "Shuffle()": sw.Shuffle(),
    "Shuffle(max_reads=2)": sw.Shuffle(max_reads=2),
    "Fifo()": sw.Fifo(),
    "Fifo(max_reads=2)": sw.Fifo(max_reads=2),
    "Lifo()": sw.Lifo(),
    "Lifo(max_reads=None)": sw.Lifo(max_reads=None),
}
VIEWS: dict[str, sw.views.View] = {
    "Transitions()": sw.Transitions(),
    "Transitions(n_step=3)": sw.Transitions(n_step=3, gamma=0.9),
    "Windows(3, burn_in=2, bootstrap=1)": sw.Windows(3, burn_in=2, bootstrap=1),
    "Windows(3, stride=2, end='stop')": sw.Windows(3, stride=2, end="stop"),
    "Windows(3, end='cross', n_step=2, truncated, place_indices)": sw.Windows(
        3, end="cross", n_step=2, gamma=0.9, truncated=True, place_indices=True
    ),
    "Windows(3, start='episode')": sw.Windows(3, start="episode", burn_in=1),
    "Windows(3, start='per_episode')": sw.Windows(3, start="per_episode"),
    "Hindsight('future')": sw.Transitions(hindsight=sw.Hindsight("future", 0.8, reward)),
    "Hindsight('episode', n_step=2)": sw.Transitions(
        n_step=2, hindsight=sw.Hindsight("episode", 0.5, reward, terminated=reached), truncated=True
    ),
}
NEXT_OBS = ("stored", "derived")


class Case(NamedTuple):
    sampler: str
    view: str
    next_obs: str

    def __str__(self) -> str:
        return " ".join(self)

    def make(self, storage: str | None) -> sw.ReplayBuffer:
        """Fields that stand in the row and one that stands in the heap; goals for hindsight."""
        seen = sw.Field((12, 8), "uint8", compression="lz4")
        goals = {"achieved_goal": sw.Field((2,), "int32"), "desired_goal": sw.Field((2,), "int32")}
        return sw.ReplayBuffer(
            CAPACITY,
            schema={"obs": {"seen": seen, "state": sw.Field((3,)), **goals}, "action": sw.Field((), "int64")},
            next_obs=self.next_obs,  # type: ignore[arg-type]
            sampler=SAMPLERS[self.sampler],
            view=VIEWS[self.view],
            num_envs=WIDTH,
            writers=2,  # small blocks: the ring of forty rows has ten of them
            seed=7,
            storage=storage,
        )

    def open(self, address: str) -> sw.ReplayBuffer:
        return sw.open(address, view=VIEWS[self.view])

    @property
    def by_priority(self) -> bool:
        return self.sampler.startswith("Prioritized")


# The one pair without a meaning: both say how likely each start is.
CASES = [
    Case(*names)
    for names in itertools.product(SAMPLERS, VIEWS, NEXT_OBS)
    if "start='per_episode'" not in names[1] or names[0].startswith("Uniform")
]


# ---- rows ------------------------------------------------------------------------------------------------------------


class Environments:
    """Streams of steps in which every byte follows from the environment, the episode and the step."""

    def __init__(self, first: int = 0) -> None:
        self.first = first  # of the environments' numbers
        self.steps = [0] * WIDTH
        self.episodes = [0] * WIDTH
        self.places = [0] * WIDTH

    def obs(self, env: int, place: int) -> dict[str, np.ndarray]:
        name = (self.first + env) * 1_000_000 + self.episodes[env] * 1_000 + place
        seen = np.zeros((12, 8), np.uint8)
        seen[: 1 + name % 11] = name % 251
        state = np.array([env, self.episodes[env], place], np.float32)
        achieved, desired = (np.array([number % 4, env], np.int32) for number in (place, self.episodes[env]))
        return {"seen": seen, "state": state, "achieved_goal": achieved, "desired_goal": desired}

    def step(self, ends: bool) -> list[dict[str, Any]]:
        """One row an environment; `ends` truncates all of them."""
        rows = []
        for env in range(WIDTH):
            number = self.steps[env] + 3 * env
            row = {"mask": number % MASKS != MASKS - 1 or ends, "obs": self.obs(env, self.places[env])}
            row |= {"terminated": False, "truncated": ends, "action": number, "reward": np.float32(number / 8)}
            row["next_obs"] = self.obs(env, self.places[env] + 1)
            self.steps[env] += 1
            if row["mask"]:
                self.places[env] += 1
                row["terminated"] = number % ENDS == ENDS - 1 and not ends
                # Every now and then an environment starts anew and nobody says so.
                if ends or row["terminated"] or number % RESETS == RESETS - 1:
                    self.episodes[env], self.places[env] = self.episodes[env] + 1, 0
            rows.append(row)
        return rows

    def add(self, steps: int, ends: bool = False) -> dict[str, Any]:
        """The arguments of an add of so many steps; `ends`: the last of them ends every episode."""
        rows = [row for step in range(steps) for row in self.step(ends and step == steps - 1)]

        def column(values: list[Any]) -> Any:
            if isinstance(values[0], dict):
                return {name: column([value[name] for value in values]) for name in values[0]}
            return np.array(values).reshape(steps, WIDTH, *np.shape(values[0]))

        return column(rows)


# ---- calls -----------------------------------------------------------------------------------------------------------

Call = tuple[Any, ...]


@functools.lru_cache(maxsize=4)
def script(by_priority: bool, cut_at_ends: bool = True) -> tuple[Call, ...]:
    return tuple(calls(by_priority, cut_at_ends))


def calls(by_priority: bool, cut_at_ends: bool) -> Iterator[Call]:
    """In their order: ("add", values), what a learner does, and once ("cut",). The cut comes where a block is full."""
    environments = Environments()
    for turn in range(14):
        is_cut = turn == 7
        yield "add", environments.add(1 + turn % 4, ends=is_cut and cut_at_ends)
        yield "sample", 3
        if is_cut:
            yield ("cut",)
        yield "sample", 5
        if by_priority:
            yield "update", turn
        if turn == 4 and by_priority:
            yield "tune", 0.4
        if turn == 11:
            yield ("clear",)
            yield "add", environments.add(5)
        if turn % 3 == 1:
            yield "sample", 16
            yield ("get",)
            yield ("rows",)
    yield ("stats",)


Answer = dict[str, Any]


def flatten(node: Any, path: str = "") -> Answer:
    """A batch as bytes, by the path of each array: NaN differs from itself, and -0.0 does not from 0."""
    if isinstance(node, dict):
        return {leaf: value for name, part in node.items() for leaf, value in flatten(part, f"{path}/{name}").items()}
    if isinstance(node, np.ndarray):
        return {path: (node.dtype.str, node.shape, node.tobytes())}
    return {path: node}


class Learner:
    """Does what a script says to a buffer, and tells what came of it."""

    COUNTS = ("size", "rows_added", "rows_voided", "episodes", "rows_sampled", "sample_calls", "redraws")

    def __init__(self, buffer: sw.ReplayBuffer) -> None:
        self.buffer = buffer
        self.batch: dict[str, Any] | None = None

    def do(self, call: Call) -> Answer | None:
        return getattr(self, call[0])(*call[1:])

    def sample(self, size: int) -> Answer:
        try:
            self.batch = self.buffer.sample(size)
        except NotReady as refusal:
            return {"refused": str(refusal)}
        return flatten(self.batch)

    def update(self, turn: int) -> Answer:
        if self.batch is None:
            return {}
        is_window = "mask" in self.batch
        shape = self.batch["mask"].shape if is_window else self.batch["indices"].shape
        errors = np.random.default_rng(turn).normal(size=shape).astype(np.float32)
        mask = self.batch["mask"] if is_window else None
        return flatten(self.buffer.update_priorities(self.batch["indices"], errors, mask))

    def get(self) -> Answer:
        """The newest rows: whatever was drawn long ago may be gone."""
        serials = [serial for batch in self.buffer.rows() for serial in batch["indices"]]
        return flatten(self.buffer.get(serials[-3:]))

    def rows(self) -> Answer:
        return flatten({str(i): batch for i, batch in enumerate(self.buffer.rows(7))})

    def stats(self) -> Answer:
        stats = self.buffer.stats()
        return {name: stats[name] for name in self.COUNTS}

    def tune(self, alpha: float) -> None:
        self.buffer.tune(alpha=alpha)

    def clear(self) -> None:
        self.buffer.clear()

    def add(self, values: dict[str, Any]) -> Answer:
        return flatten({"added": self.buffer.add(**values, return_indices=True)})
