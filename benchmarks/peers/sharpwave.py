"""Sharpwave itself, through its public API."""

from __future__ import annotations

import os
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
from harness.footage import STACK
from harness.worker import (
    ALPHA,
    BETA,
    GAMMA,
    GOAL_RATIO,
    STEPS,
    WINDOW_STEPS,
    Contender,
    Operation,
    batch_priorities,
    batch_states,
    goal_reward,
    kept_rows,
    random_priorities,
    updating,
)
from harness.workloads import STATE_ITEMS, Columns, Workload

import sharpwave as sw

NEVER_BLOCKS = 1e12  # samples: no run of this benchmark gets so far ahead


class Sharpwave(Contender):
    packages = ("sharpwave", "numpy")

    def __init__(
        self,
        *,
        prioritized: bool = False,
        n_step: int = 1,
        derived: bool = False,
        stacked: bool = False,
        windows: str = "",
        paced: bool = False,
        shared: bool = False,
        **field: str,
    ) -> None:
        self.prioritized, self.stacked, self.shared, self.field = prioritized, stacked, shared, field
        self.settings: dict[str, Any] = {}
        notes = [f'{name}="{value}"' for name, value in field.items()]
        if prioritized:
            self.settings["sampler"] = sw.Prioritized(alpha=ALPHA, beta=BETA)
            notes.append("sampler=Prioritized()")
        if n_step > 1:
            self.settings["view"] = sw.Transitions(n_step=n_step, gamma=GAMMA)
            notes.append(f"view=Transitions(n_step={n_step})")
        if derived:
            self.settings["next_obs"] = "derived"
            notes.append('next_obs="derived"')
        if stacked:
            notes.append(f"Field(stack={STACK})")
        if windows:
            self.settings["view"] = sw.Windows(WINDOW_STEPS, end=windows)
            notes.append(f'view=Windows({WINDOW_STEPS}, end="{windows}")')
        if paced:
            self.settings["pace"] = sw.Pace.samples_per_insert(1.0, min_size=1, error=NEVER_BLOCKS)
            notes.append("pace=Pace.samples_per_insert(1.0, ...)")
        if shared:
            self.settings["storage"] = f"shm://sharpwave-bench-{os.getpid()}"
            notes.append('storage="shm://name"')
        self.note = ", ".join(notes)
        if n_step > 1 or derived or stacked or windows:
            # Rows added together are steps of one stream.
            self.settings["num_envs"] = 1

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        if self.stacked:
            obs = sw.Field(workload.obs_shape[1:], workload.obs_dtype, stack=STACK, **self.field)
        else:
            obs = sw.Field(workload.obs_shape, workload.obs_dtype, **self.field)
        schema = {"obs": obs, "action": sw.Field(workload.action_shape, workload.action_dtype)}
        self.buffer = sw.ReplayBuffer(capacity, schema=schema, seed=0, **self.settings)
        for chunk in workload.chunks(capacity):
            given = {"priority": random_priorities(len(chunk["reward"]))} if self.prioritized else {}
            self.buffer.add(**chunk, **given)
        if self.shared:
            # As another process has it, and no name is left however this one ends.
            other = sw.open(self.settings["storage"])
            self.buffer.close(unlink=True)
            self.buffer = other
        # The index takes rows in when somebody draws; until then its memory is untouched.
        self.buffer.sample(1)
        stats = self.buffer.stats(huge_pages=True)
        self.facts = {name: stats[name] for name in ("storage_bytes", "huge_page_bytes")}

    def add_one(self) -> dict[str, Operation]:
        rows = self.workload.rows()
        if not self.stacked:
            return {"": self.adding(rows), "keyword": self.adding_by_name(rows)}
        newest: dict[int, Any] = {}  # one frame for each stack, shared between steps as the stacks are

        def frame(stack: Any) -> Any:
            return newest.setdefault(id(stack), stack[-1].copy())

        frames = [(frame(obs), action, reward, frame(after), done) for obs, action, reward, after, done in rows]
        return {"": self.adding_from_a_start(rows), "frame": self.adding_from_a_start(frames)}

    def adding(self, rows: list[tuple]) -> Operation:
        buffer, endless = self.buffer, cycle(rows)

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(endless, calls):
                buffer.add(obs, action, reward, next_obs, done)

        return Operation(add)

    def adding_from_a_start(self, rows: list[tuple]) -> Operation:
        """A stack goes on from the one before. Two that add in turn leave each other at an episode's end."""
        buffer = self.buffer

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(cycle(rows), calls - 1):
                buffer.add(obs, action, reward, next_obs, done)
            obs, action, reward, next_obs, _ = rows[(calls - 1) % len(rows)]
            buffer.add(obs, action, reward, next_obs, True)

        return Operation(add)

    def adding_by_name(self, rows: list[tuple]) -> Operation:
        buffer, endless = self.buffer, cycle(rows)

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(endless, calls):
                buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        return Operation(add)

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, tuple(self.workload.columns(count).values())

        def add(calls: int) -> None:
            for _ in range(calls):
                buffer.add(*batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer
        kept = buffer.sample(count)

        def fresh(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        def out(calls: int) -> None:
            for _ in range(calls):
                buffer.sample(count, out=kept)

        def torch(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count, device="cpu")

        return {"": Operation(fresh), "out": Operation(out), "torch": Operation(torch)}

    def update(self, count: int) -> dict[str, Operation]:
        if not self.prioritized:
            return {}
        buffer = self.buffer
        return {
            "": updating(lambda: buffer.sample(count)["indices"], buffer.update_priorities, batch_priorities(count))
        }

    def learn(self, count: int) -> dict[str, Operation]:
        if not self.prioritized:
            return {}
        buffer, steps = self.buffer, zip(cycle(self.workload.rows()), cycle(batch_priorities(count)), strict=False)

        def learn(calls: int) -> None:
            for (obs, action, reward, next_obs, done), priorities in islice(steps, calls):
                buffer.add(obs, action, reward, next_obs, done)
                batch = buffer.sample(count)
                buffer.update_priorities(batch["indices"], priorities)

        return {"": Operation(learn)}


class Masked(Sharpwave):
    """Some rows are left out as they are added, at random places: `share` percent."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.share = share
        self.note = "add(mask=)" if share else ""

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        schema = {
            "obs": sw.Field(workload.obs_shape, workload.obs_dtype),
            "action": sw.Field(workload.action_shape, workload.action_dtype),
        }
        # A mask leaves out environments: every row is one.
        rows = workload.chunk_rows
        self.buffer = sw.ReplayBuffer(capacity, schema=schema, seed=0, num_envs=rows)
        kept = kept_rows(capacity, self.share).reshape(-1, rows)
        for chunk, mask in zip(workload.chunks(capacity), kept, strict=True):
            self.buffer.add(**chunk, mask=mask)
        self.buffer.sample(1)


class Goals(Sharpwave):
    """Observations with goals; `relabels` draws with hindsight."""

    def __init__(self, *, relabels: bool) -> None:
        super().__init__()
        if relabels:
            hindsight = sw.Hindsight("future", GOAL_RATIO, goal_reward)
            self.settings = {"view": sw.Transitions(hindsight=hindsight), "num_envs": 1}
            self.note = f'view=Transitions(hindsight=Hindsight("future", {GOAL_RATIO}, reward))'

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        parts = workload.split_goals(workload.columns(1)["obs"])
        schema = {
            "obs": {name: sw.Field(part.shape[1:], part.dtype) for name, part in parts.items()},
            "action": sw.Field(workload.action_shape, workload.action_dtype),
        }
        self.buffer = sw.ReplayBuffer(capacity, schema=schema, seed=0, **self.settings)
        for chunk in workload.chunks(capacity):
            self.buffer.add(**self.nested(chunk))
        self.buffer.sample(1)

    def nested(self, columns: Columns) -> dict[str, Any]:
        split = self.workload.split_goals
        return {**columns, "obs": split(columns["obs"]), "next_obs": split(columns["next_obs"])}

    def add_one(self) -> dict[str, Operation]:
        split = self.workload.split_goals
        rows = [
            (split(obs), action, reward, split(after), done)
            for obs, action, reward, after, done in self.workload.rows()
        ]
        return {"": self.adding(rows), "keyword": self.adding_by_name(rows)}


class Recurrent(Sharpwave):
    """Rows with a recurrent state, `mutable` or written once."""

    def __init__(self, *, mutable: bool) -> None:
        super().__init__()
        self.mutable = mutable
        self.note = "Field(..., mutable=True); write(indices, state=...)" if mutable else "the state is written once"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        schema = {
            "obs": sw.Field(workload.obs_shape, workload.obs_dtype),
            "action": sw.Field(workload.action_shape, workload.action_dtype),
            "state": sw.Field((STATE_ITEMS,), mutable=self.mutable),
        }
        self.buffer = sw.ReplayBuffer(capacity, schema=schema, seed=0)
        for chunk in workload.chunks(capacity):
            self.buffer.add(**chunk, state=np.zeros((len(chunk["reward"]), STATE_ITEMS), np.float32))
        if self.mutable:  # so that no later call touches a page first
            for rows in self.buffer.rows(10_000):
                self.buffer.write(rows["indices"], state=rows["state"])
        self.buffer.sample(1)

    def add_one(self) -> dict[str, Operation]:
        buffer, endless, state = self.buffer, cycle(self.workload.rows()), np.zeros(STATE_ITEMS, np.float32)

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(endless, calls):
                buffer.add(obs, action, reward, next_obs, done, state)

        return {"": Operation(add)}

    def write(self, count: int) -> dict[str, Operation]:
        if not self.mutable:
            return {}
        buffer = self.buffer

        def write(indices: Any, states: Any) -> None:
            buffer.write(indices, state=states)

        return {"": updating(lambda: buffer.sample(count)["indices"], write, batch_states(count))}


FORMS = {
    "plain": Sharpwave,
    "prioritized": partial(Sharpwave, prioritized=True),
    "nstep": partial(Sharpwave, n_step=STEPS),
    "derived": partial(Sharpwave, derived=True),
    "stacked": partial(Sharpwave, derived=True, stacked=True),
    # All at once, as Rainbow wants it.
    "rainbow": partial(Sharpwave, prioritized=True, n_step=STEPS, derived=True, stacked=True),
    "lz4": partial(Sharpwave, compression="lz4"),
    "zstd": partial(Sharpwave, compression="zstd"),
    "stacked_lz4": partial(Sharpwave, derived=True, stacked=True, compression="lz4"),
    "stacked_zstd": partial(Sharpwave, derived=True, stacked=True, compression="zstd"),
    "stop": partial(Sharpwave, windows="stop"),
    "pad": partial(Sharpwave, windows="pad"),
    "paced": partial(Sharpwave, paced=True),
    "shm": partial(Sharpwave, shared=True),
    "shm_prioritized": partial(Sharpwave, shared=True, prioritized=True),
    **{f"masked_{share}": partial(Masked, share) for share in (0, 50, 90, 99)},
    "mutable": partial(Recurrent, mutable=True),
    "written_once": partial(Recurrent, mutable=False),
    "hindsight": partial(Goals, relabels=True),
    "own_goals": partial(Goals, relabels=False),
}
