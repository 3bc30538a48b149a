"""Hindsight: goals that the same episode reached, rewards worked out again, nothing written back."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from oracle import leaf_in
from order_model import RANDOM, Draw, OrderPair, Single, chi_square, enough, letters
from replay_model import Step

import sharpwave as sw

GOAL = sw.Field((2,), "int32")


def schema(stack: int = 1, compression: str | None = None, goal: sw.Field = GOAL) -> dict[str, Any]:
    seen = sw.Field((3,), "uint8", stack=stack, compression=compression)
    return {
        "obs": {"seen": seen, "achieved_goal": GOAL, "desired_goal": goal},
        "action": sw.Field((), "int64"),
    }


# Any function of both goals will do, and one that tells every pair apart does best.
def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return ((achieved.astype(np.int64) * [3, 5]).sum(axis=1) % 1009 - (desired.astype(np.int64).sum(axis=1) % 499)) / 8


def success(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return (achieved == desired).all(axis=1)


def mapped(achieved: np.ndarray) -> np.ndarray:
    return (achieved[:, :1].astype(np.int64) % 100_000).astype(np.int32)


class HindsightPair(OrderPair):
    """A buffer with hindsight and what every example of it may be."""

    def __init__(
        self,
        capacity: int,
        *,
        strategy: str = "future",
        ratio: float = 0.8,
        n_step: int = 1,
        terminated: Any = None,
        goal: Any = None,
        stack: int = 1,
        compression: str | None = None,
        draw: Draw | None = None,
        next_obs: str = "derived",
        **options: Any,
    ) -> None:
        self.calls_of_reward: list[tuple[np.ndarray, np.ndarray]] = []
        self.calls_of_terminated: list[tuple[np.ndarray, np.ndarray]] = []
        self.strategy, self.ratio, self.terminated, self.goal = strategy, ratio, terminated, goal

        def watched_reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
            self.calls_of_reward.append((achieved.copy(), desired.copy()))
            return reward(achieved, desired)

        def watched_terminated(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
            self.calls_of_terminated.append((achieved.copy(), desired.copy()))
            return terminated(achieved, desired)

        arguments: dict[str, Any] = {"strategy": strategy, "ratio": ratio, "reward": watched_reward}
        if terminated is not None:
            arguments["terminated"] = watched_terminated
        if goal is not None:
            arguments["goal"] = goal
        super().__init__(
            capacity,
            schema(stack, compression, GOAL if goal is None else sw.Field((1,), "int32")),
            view=Single(n_step=n_step, gamma=0.9, hindsight=arguments, truncated=True),
            draw=Draw() if draw is None else draw,
            next_obs=next_obs,
            **options,
        )

    def goal_after(self, step: Step) -> tuple[int, ...]:
        achieved = step.values["next_obs/achieved_goal"]
        return tuple((achieved if self.goal is None else self.goal(achieved[None])[0]).tolist())

    def sample(self, size: int, out: Any = None) -> dict[str, Any]:
        self.calls_of_reward.clear()
        self.calls_of_terminated.clear()
        batch = super().sample(size, out)
        model = self.model
        assert set(batch) == model.batch_keys(True) | {"relabelled"}
        assert batch["relabelled"].dtype == bool
        assert batch["relabelled"].shape == (size,)
        by_serial = {step.serial: step for step in model.rows()}
        rows: dict[int, tuple[dict[str, np.ndarray], list[Step], set[tuple[int, ...]]]] = {}
        for serial in set(batch["indices"].tolist()):
            step = by_serial[serial]
            chain = model.chain(step)
            goals = {self.goal_after(other) for other in model.goals(step, self.strategy)}
            rows[serial] = (model.example(chain), chain, goals)
        paths = [path for path in model.fields if path not in ("reward", "done")]
        asked: list[tuple[list[int], list[int]]] = []  # achieved and desired, of every step of every relabelled example
        for i, serial in enumerate(batch["indices"].tolist()):
            example, chain, goals = rows[serial]
            relabelled = bool(batch["relabelled"][i])
            desired = batch["obs"]["desired_goal"][i]
            for path in paths:
                if relabelled and path.endswith("desired_goal"):
                    assert leaf_in(batch, path)[i].tolist() == desired.tolist()
                else:
                    assert leaf_in(batch, path)[i].tobytes() == np.asarray(example[path]).tobytes(), path
            wanted = example["reward"]
            done = bool(example["done"])
            length = len(chain)
            if relabelled:
                assert tuple(desired.tolist()) in goals
                achieved = np.stack([link.values["next_obs/achieved_goal"] for link in chain])
                steps = self.rewards_of(achieved, desired)
                wanted = (0.9 ** np.arange(len(chain))) @ steps
                asked += [(row.tolist(), desired.tolist()) for row in achieved]
                if self.terminated is not None:
                    # The first success ends the example: nothing counts after it.
                    ends = self.terminated(achieved, np.repeat(desired[None], len(chain), axis=0))
                    done = bool(ends.any())
                    length = int(ends.argmax()) + 1 if done else length
                    wanted = (0.9 ** np.arange(length)) @ steps[:length]
            if model.n_step > 1:
                assert batch["discount"][i] == pytest.approx(0.9**length)
            assert batch["reward"][i] == pytest.approx(wanted, rel=1e-5, abs=1e-4)
            assert bool(batch["done"][i]) == done
            assert bool(batch["truncated"][i]) == chain[length - 1].truncated
        self.check_calls(batch, asked)
        return batch

    def rewards_of(self, achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        return reward(achieved, np.repeat(desired[None], len(achieved), axis=0)).astype(np.float64)

    def check_calls(self, batch: dict[str, Any], asked: list[tuple[list[int], list[int]]]) -> None:
        """The function is asked once a batch, about relabelled examples and nothing else."""
        assert len(self.calls_of_reward) == 1 or not asked
        assert len(self.calls_of_reward) <= 1
        told = [
            (a.tolist(), d.tolist())
            for achieved, desired in self.calls_of_reward
            for a, d in zip(achieved, desired, strict=True)
        ]
        assert sorted(told) == sorted(asked)
        relabelled = int(batch["relabelled"].sum())
        assert len(self.calls_of_terminated) <= 1
        if self.terminated is not None and relabelled:
            assert len(self.calls_of_terminated[0][0]) == len(asked)


def feed(pair: OrderPair, stream: np.random.Generator, steps: int) -> None:
    # A masked row has no bytes of its own: with compression the others' then make room for new ones early.
    kinds = "........TURB" + ("" if pair.buffer.schema["obs"]["seen"].compression else "M")
    if pair.buffer.num_envs is None:
        for code in letters(stream, steps, kinds):
            pair.add(code, ())
    else:
        pair.add(letters(stream, steps * pair.model.width, kinds))


MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1


# ---- through wraps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_of_the_same_finished_episode(strategy: str, next_obs: str, num_envs: int | None) -> None:
    stream = np.random.default_rng([num_envs or 0])
    options = [
        {"n_step": 1},
        {"n_step": 3, "terminated": success},
        {"n_step": 1, "goal": mapped, "stack": 2},
        {"n_step": 2, "compression": "lz4", "draw": Draw("Prioritized")},
        {"n_step": 1, "draw": Draw("Fifo"), "ratio": 1.0},
    ]
    for more in options:
        pair = HindsightPair(
            13 * (num_envs or 1), strategy=strategy, next_obs=next_obs, num_envs=num_envs, writers=1, **more
        )
        for _ in range(12 if MORE > 1 else 6):
            feed(pair, stream, 4)
            legal = pair.legal_starts()
            if not legal:
                pair.refuse_or_sample(1)
                continue
            kind = pair.model.draw.kind
            batch = pair.sample(enough(len(legal)) if kind in RANDOM else len(legal))
            assert set(batch["indices"].tolist()) == {step.serial for step in legal}
            pair.check()  # nothing was written back
        pair.close()


def test_derived_and_stored_observations_give_the_same_examples() -> None:
    found = []
    for next_obs in ("stored", "derived"):
        pair = HindsightPair(20, next_obs=next_obs, num_envs=2, n_step=2, terminated=success)
        stream = np.random.default_rng(1)
        batches = []
        for _ in range(12):
            pair.add(letters(stream, 4, "......TU"))
            batch = pair.refuse_or_sample(40)
            if batch is not None:
                paths = [*pair.model.fields, "relabelled", "indices"]
                batches.append([leaf_in(batch, path).tolist() for path in paths if path in pair.model.fields])
                batches[-1] += [batch["relabelled"].tolist(), batch["indices"].tolist()]
        found.append(batches)
    assert found[0] == found[1]


# ---- numbers by hand -------------------------------------------------------------------------------------------------


def line(strategy: str, codes: str, capacity: int = 20, **more: Any) -> sw.ReplayBuffer:
    """On a line: after step i the place is i + 1. The goal is 100; reaching it is worth 0, else -1."""
    place = sw.Field((1,))
    hindsight = sw.Hindsight(
        strategy=strategy,
        reward=lambda achieved, desired: -(np.abs(achieved - desired)[:, 0] > 0.5).astype(np.float32),
        **{"ratio": 1.0, **{name: more.pop(name) for name in ("ratio", "terminated") if name in more}},
    )
    buffer = sw.ReplayBuffer(
        capacity,
        schema={"obs": {"achieved_goal": place, "desired_goal": place}},
        view=sw.Transitions(
            hindsight=hindsight, **{name: more.pop(name) for name in ("n_step", "gamma") if name in more}
        ),
        seed=3,
        **more,
    )
    for i, code in enumerate(codes):
        goal = np.array([100.0], np.float32)
        buffer.add(
            obs={"achieved_goal": np.array([i], np.float32), "desired_goal": goal},
            reward=-1.0,
            next_obs={"achieved_goal": np.array([i + 1], np.float32), "desired_goal": goal},
            terminated=code == "T",
            truncated=code == "U",
        )
    return buffer


def goals_by_row(buffer: sw.ReplayBuffer, draws: int = 4000) -> dict[int, Counter[int]]:
    batch = buffer.sample(draws)
    found: dict[int, Counter[int]] = {}
    for own, goal in zip(batch["obs"]["achieved_goal"][:, 0], batch["obs"]["desired_goal"][:, 0], strict=True):
        found.setdefault(int(own), Counter())[int(goal)] += 1
    return found


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("end", ["T", "U"])
def test_goals_by_hand(end: str, next_obs: str) -> None:
    # Rows 0, 1, 2 end at place 3; row 3 ends at place 4; rows 4 and 5 are of an open episode.
    codes = f"..{end}U.."
    found = goals_by_row(line("future", codes, next_obs=next_obs))
    assert {row: set(goals) for row, goals in found.items()} == {0: {1, 2, 3}, 1: {2, 3}, 2: {3}, 3: {4}}
    found = goals_by_row(line("final", codes, next_obs=next_obs))
    assert {row: set(goals) for row, goals in found.items()} == {0: {3}, 1: {3}, 2: {3}, 3: {4}}
    found = goals_by_row(line("episode", codes, next_obs=next_obs))
    assert {row: set(goals) for row, goals in found.items()} == {0: {1, 2, 3}, 1: {1, 2, 3}, 2: {1, 2, 3}, 3: {4}}


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
def test_goals_of_an_episode_that_was_cut(next_obs: str) -> None:
    # Rows 3 to 8 are left, of which 3, 4, 5 end an episode of six.
    buffer = line("episode", ".....T..T", capacity=6, next_obs=next_obs)
    wanted = {row: {4, 5, 6} for row in (3, 4, 5)} | {row: {7, 8, 9} for row in (6, 7, 8)}
    assert {row: set(goals) for row, goals in goals_by_row(buffer).items()} == wanted
    buffer = line("final", ".....T..T", capacity=6, next_obs=next_obs)
    assert {row: set(goals) for row, goals in goals_by_row(buffer).items()} == {
        row: {6 if row < 6 else 9} for row in range(3, 9)
    }


def test_rewards_by_hand() -> None:
    batch = line("future", "..T").sample(500)
    own, goal = batch["obs"]["achieved_goal"][:, 0], batch["obs"]["desired_goal"][:, 0]
    assert batch["relabelled"].all()
    assert (batch["reward"] == np.where(own + 1 == goal, 0.0, -1.0)).all()
    assert (batch["next_obs"]["desired_goal"][:, 0] == goal).all()
    assert (batch["done"] == (own == 2)).all()  # as stored
    # Three steps from row 0 with gamma 0.5: goal 1 is reached at once and left, goal 3 at the third step.
    batch = line("future", "...T", n_step=3, gamma=0.5).sample(2000)
    own, goal = batch["obs"]["achieved_goal"][:, 0], batch["obs"]["desired_goal"][:, 0]
    told = {(int(a), int(g)): float(r) for a, g, r in zip(own, goal, batch["reward"], strict=True)}
    assert told == {
        (0, 1): -0.75,
        (0, 2): -1.25,
        (0, 3): -1.5,
        (0, 4): -1.75,
        (1, 2): -0.75,
        (1, 3): -1.25,
        (1, 4): -1.5,
        (2, 3): -0.5,
        (2, 4): -1.0,
        (3, 4): 0.0,
    }


def test_success_may_end() -> None:
    buffer = line("future", "...U", terminated=lambda achieved, desired: np.abs(achieved - desired)[:, 0] < 0.5)
    batch = buffer.sample(500)
    own, goal = batch["obs"]["achieved_goal"][:, 0], batch["obs"]["desired_goal"][:, 0]
    assert (batch["done"] == (own + 1 == goal)).all()
    half = line("future", "...T", ratio=0.5, terminated=lambda a, d: np.zeros(len(a), bool)).sample(500)
    own, relabelled = half["obs"]["achieved_goal"][:, 0], half["relabelled"]
    assert (half["done"] == ((own == 3) & ~relabelled)).all()  # the others keep what is stored


# ---- how often -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.8, 1.0])
def test_share_of_relabelled_examples(ratio: float) -> None:
    buffer = line("future", "...T....U", ratio=ratio)
    draws = 20_000
    batch = buffer.sample(draws)
    found, spread = int(batch["relabelled"].sum()), math.sqrt(draws * ratio * (1 - ratio))
    assert abs(found - draws * ratio) <= 5 * spread
    kept = ~batch["relabelled"]
    assert (batch["obs"]["desired_goal"][kept] == 100).all()
    assert (batch["obs"]["desired_goal"][~kept] < 100).all()
    assert (batch["reward"][kept] == -1).all()
    # Each position tosses its own coin: relabelled ones do not come in runs, and no place is preferred.
    if 0 < ratio < 1:
        hits = batch["relabelled"].astype(float)
        assert abs(np.corrcoef(hits[1:], hits[:-1])[0, 1]) < 5 / math.sqrt(draws)
        small = np.mean([buffer.sample(8)["relabelled"] for _ in range(1500)], axis=0)
        assert (np.abs(small - ratio) < 5 * math.sqrt(ratio * (1 - ratio) / 1500)).all()


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_every_goal_is_equally_likely(strategy: str) -> None:
    for row, goals in goals_by_row(line(strategy, "......T...U"), 60_000).items():
        last = 7 if row < 7 else 11
        first = row + 1 if strategy == "future" else (1 if row < 7 else 8)
        assert set(goals) == set(range(first, last + 1))
        if len(goals) > 1:
            total = sum(goals.values())
            assert chi_square(goals.values(), [total / len(goals)] * len(goals)) < 5
    counts = Counter(line(strategy, "......T...U").sample(44_000)["obs"]["achieved_goal"][:, 0].astype(int).tolist())
    assert chi_square([counts[row] for row in range(11)], [4000] * 11) < 5


# ---- random calls ----------------------------------------------------------------------------------------------------


class HindsightCalls(RuleBasedStateMachine):
    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        draw = data.draw
        self.num_envs = draw(st.sampled_from([None, 1, 3]))
        kind = draw(st.sampled_from(["Uniform", "Prioritized", "Recent", "Shuffle", "Fifo", "Lifo"]))
        self.pair = HindsightPair(
            (self.num_envs or 1) * draw(st.integers(1, 12)),
            strategy=draw(st.sampled_from(["future", "final", "episode"])),
            ratio=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
            n_step=draw(st.integers(1, 4)),
            terminated=draw(st.sampled_from([None, success])),
            goal=draw(st.sampled_from([None, mapped])),
            stack=draw(st.sampled_from([1, 1, 2])),
            next_obs=draw(st.sampled_from(["stored", "derived"])),
            draw=Draw(kind, n=draw(st.integers(1, 9)), max_reads=draw(st.sampled_from([None, None, 2]))),
            num_envs=self.num_envs,
            writers=1,
        )

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        width, capacity = self.pair.model.width, self.pair.model.capacity
        steps = 1 if self.num_envs is None else data.draw(st.integers(1, min(5, capacity // width)))
        codes = "".join(data.draw(st.sampled_from("......TURBMM")) for _ in range(steps * width))
        self.pair.add(codes, () if self.num_envs is None else None)
        self.pair.check()

    @rule(n=st.sampled_from([1, 2, 3, 30]))
    def sample(self, n: int) -> None:
        self.pair.refuse_or_sample(n)
        self.pair.check()

    @rule()
    def sample_all(self) -> None:
        legal = len(self.pair.legal_starts())
        if legal:
            self.pair.sample(legal)

    @rule(really=st.sampled_from([False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.pair.clear()


TestHindsightCalls = HindsightCalls.TestCase
TestHindsightCalls.settings = settings(max_examples=MORE * 30, stateful_step_count=20)


def test_closed_writer_finishes_its_episode() -> None:
    pair = HindsightPair(30, num_envs=1, next_obs="derived")
    name = pair.open_writer()
    pair.add("....", writer=name)
    assert pair.refuse_or_sample(4) is None
    pair.close_writer(name)
    assert {tuple(goal) for goal in pair.sample(400)["obs"]["desired_goal"].tolist()}
    assert len(pair.legal_starts()) == 4


def test_opened_copy_relabels_as_the_buffer_does(tmp_path: Path) -> None:
    def make(function: Callable[..., Any]) -> Any:
        return sw.Transitions(n_step=2, hindsight=sw.Hindsight(reward=function))

    buffer = sw.ReplayBuffer(30, schema=schema(), view=make(reward), next_obs="derived", num_envs=1, seed=1)
    stream = np.random.default_rng(0)
    pair = HindsightPair(30, num_envs=1)
    steps = pair.make_steps(letters(stream, 25, "....TU") + "U", None, None)
    arguments = pair.arguments(steps, (26,), stacks=False)
    buffer.add(**{name: value for name, value in arguments.items() if name not in ("id", "where")})
    buffer.sample(5)
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot", view=make(reward))
    for _ in range(3):
        ours, theirs = buffer.sample(40), copy.sample(40)
        for path in ("indices", "relabelled", "reward", "obs/desired_goal", "next_obs/desired_goal", "done"):
            assert leaf_in(ours, path).tolist() == leaf_in(theirs, path).tolist()
