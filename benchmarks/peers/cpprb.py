"""cpprb `ReplayBuffer` and `PrioritizedReplayBuffer`: Cython over C++, NumPy in and out."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any, ClassVar

import numpy as np
from cpprb import HindsightReplayBuffer, PrioritizedReplayBuffer, ReplayBuffer
from harness.worker import (
    ALPHA,
    BETA,
    GAMMA,
    GOAL_RATIO,
    STEPS,
    Contender,
    Operation,
    batch_priorities,
    goal_reward,
    random_priorities,
    updating,
)
from harness.workloads import Row, Workload


class Cpprb(Contender):
    packages = ("cpprb", "numpy")
    settings: ClassVar[dict[str, Any]] = {}
    ends_episodes = False

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.buffer = ReplayBuffer(capacity, self.fields(), **self.settings)
        for chunk in workload.chunks(capacity):
            # A copy: with Nstep it writes the folded rewards into what it is given.
            self.buffer.add(**chunk | {"reward": chunk["reward"].copy()})
            if self.ends_episodes:
                self.buffer.on_episode_end()

    def fields(self) -> dict[str, dict[str, Any]]:
        specs = self.workload.field_specs
        return {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in specs.items()}

    def add_one(self) -> dict[str, Operation]:
        return {"": self.adding(self.rows())}

    def rows(self, count: int = 0) -> list[Row]:
        return self.workload.rows(count)

    def adding(self, rows: list[Row]) -> Operation:
        buffer, endless = self.buffer, cycle(rows)

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(endless, calls):
                buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        def add_and_end(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(endless, calls):
                buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
                if done:
                    buffer.on_episode_end()

        return Operation(add_and_end if self.ends_episodes else add)

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, self.workload.columns(count)

        def add(calls: int) -> None:
            for _ in range(calls):
                buffer.add(**batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        return {"": Operation(sample)}


class Prioritized(Cpprb):
    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.buffer = PrioritizedReplayBuffer(capacity, self.fields(), alpha=ALPHA)
        for chunk in workload.chunks(capacity):
            self.buffer.add(priorities=random_priorities(len(chunk["reward"])), **chunk)

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count, BETA)

        return {"": Operation(sample)}

    def update(self, count: int) -> dict[str, Operation]:
        buffer, priorities = self.buffer, batch_priorities(count)
        return {"": updating(lambda: buffer.sample(count, BETA)["indexes"], buffer.update_priorities, priorities)}

    def learn(self, count: int) -> dict[str, Operation]:
        buffer, steps = self.buffer, zip(cycle(self.workload.rows()), cycle(batch_priorities(count)), strict=False)

        def learn(calls: int) -> None:
            for (obs, action, reward, next_obs, done), priorities in islice(steps, calls):
                buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)
                batch = buffer.sample(count, BETA)
                buffer.update_priorities(batch["indexes"], priorities)

        return {"": Operation(learn)}


class NStep(Cpprb):
    note = "folds the steps when it adds, so that a sample is a plain one"
    settings: ClassVar[dict[str, Any]] = {"Nstep": {"size": STEPS, "gamma": GAMMA, "rew": "reward", "next": "next_obs"}}
    ends_episodes = True


class Derived(Cpprb):
    note = "next_of"
    settings: ClassVar[dict[str, Any]] = {"next_of": "obs"}
    ends_episodes = True

    def fields(self) -> dict[str, dict[str, Any]]:
        fields = super().fields()
        del fields["next_obs"]
        return fields


class Stacked(Derived):
    note = "next_of and stack_compress; the stack is the last axis, and inputs are prebuilt so"
    settings: ClassVar[dict[str, Any]] = {"next_of": "obs", "stack_compress": "obs"}

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.buffer = ReplayBuffer(capacity, self.fields(), **self.settings)
        self.adding(self.rows(workload.chunk_rows)).run(capacity)

    def fields(self) -> dict[str, dict[str, Any]]:
        fields = super().fields()
        stack, *shape = self.workload.obs_shape
        fields["obs"]["shape"] = (*shape, stack)
        return fields

    def rows(self, count: int = 0) -> list[Row]:
        turned: dict[int, np.ndarray] = {}  # one array for each stack, shared between steps as the stacks are
        rows = self.workload.rows(count)

        def turn(stack: np.ndarray) -> np.ndarray:
            return turned.setdefault(id(stack), np.ascontiguousarray(np.moveaxis(stack, 0, -1)))

        return [(turn(obs), action, reward, turn(after), done) for obs, action, reward, after, done in rows]


class Hindsight(Cpprb):
    note = "HindsightReplayBuffer: stores every row once more for each of four goals when an episode ends"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        goals = workload.goal_size
        more = round(GOAL_RATIO / (1 - GOAL_RATIO))
        observed = workload.obs_shape[0] - goals  # the goal has a field of its own
        # It computes all rewards itself, into a field of its own.
        fields = {name: spec for name, spec in self.fields().items() if name in ("action", "done")}
        for name in ("obs", "next_obs"):
            fields[name] = {"shape": observed, "dtype": np.dtype(workload.obs_dtype)}
        self.buffer = HindsightReplayBuffer(
            (1 + more) * capacity,
            fields,
            max_episode_len=workload.episode_steps,
            reward_func=lambda state, _action, goal: goal_reward(state[..., -goals:], goal),
            goal_func=lambda state: state[..., -goals:],
            goal_shape=goals,
            action="action",
            additional_goals=more,
            prioritized=False,
        )
        for chunk in workload.chunks(capacity):
            ends = np.flatnonzero(chunk["done"]) + 1
            for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
                episode = {name: values[start:end] for name, values in chunk.items() if name != "reward"}
                goal = episode["obs"][0, -goals:]
                for name in ("obs", "next_obs"):
                    episode[name] = episode[name][:, :-goals]
                self.buffer.add(**episode)
                self.buffer.on_episode_end(goal)

    def adding(self, rows: list[Row]) -> Operation:
        buffer, goals = self.buffer, self.workload.goal_size
        split = [
            (obs[:-goals].copy(), action, after[:-goals].copy(), done, obs[-goals:].copy())
            for obs, action, _reward, after, done in rows
        ]

        def add(calls: int) -> None:
            # From the start of an episode to the end of one: what is begun must be ended before it is full.
            for obs, action, next_obs, done, goal in islice(cycle(split), calls):
                buffer.add(obs=obs, action=action, next_obs=next_obs, done=done)
                if done:
                    buffer.on_episode_end(goal)
            buffer.on_episode_end(goal)

        return Operation(add)


FORMS = {
    "plain": Cpprb,
    "prioritized": Prioritized,
    "nstep": NStep,
    "derived": Derived,
    "stacked": Stacked,
    "hindsight": Hindsight,
}
