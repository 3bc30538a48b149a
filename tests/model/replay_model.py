"""The specification of priorities, n-step returns, derived observations and stacks, slow and obvious.

`Model` is a list of steps, each with what a batch must hold of it. `Pair` gives the same calls to a model and to a
buffer and compares every answer. A stream of steps is written as a string, one letter a row:

    .  goes on          T  terminated        U  truncated        B  both
    R  a reset that nobody flags follows     M  masked out: its place is kept, the environment does not step
    Z  terminated, and Y truncated, with the first observation of the next episode as next observation
    C  goes on, but an agent that others go on without is truncated: only where each agent has its own end

Every schema has an `id`, which tells what row a batch shows.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

# From both rooms: tests/contract imports the models as a package.
try:
    import agents_model as agents
    from oracle import leaf_in, leaves_of
except ImportError:
    from model import agents_model as agents
    from model.oracle import leaf_in, leaves_of

import sharpwave as sw
from sharpwave.errors import NotReady

ID = sw.Field((), "int64")
DEFAULTS: dict[str, Any] = {
    "alpha": 0.6,
    "beta": 0.4,
    "eps": 1e-6,
    "rank_based": False,
    "stratified": True,
    "normalize": "batch",
    "mix": 0.0,
    "new_rows": "live_max",
}


@dataclass(eq=False)
class Step:
    number: int  # of all rows ever made, in order
    frames: dict[str, np.ndarray]  # by path, as it was added: one frame
    terminated: bool = False
    truncated: bool = False
    masked: bool = False
    given: float | None = None  # priority= of its add
    told_truncated: bool = False  # truncated= of its add
    starts_over: bool = False  # its next observation was given as the stack that starts the next episode
    dones: dict[str, np.ndarray] = field(default_factory=dict)  # by path: of each agent, where each has its own
    told: dict[str, np.ndarray] = field(default_factory=dict)  # and truncated=, likewise
    cut: bool = False  # n-step examples end here though the episode does not
    values: dict[str, np.ndarray] = field(default_factory=dict)  # by path, as a batch gives it: stacks filled in
    raw: np.float32 | None = None  # its priority; None until it is caught up
    next: Step | None = None  # of the same environment and episode
    before: Step | None = None  # likewise
    skips: bool = False  # whether masked rows lie between it and the one before
    serial: int | None = None  # as soon as a batch told


class Model:
    """`prioritized` holds the settings of sw.Prioritized that differ from the default; None is Uniform."""

    def __init__(
        self,
        capacity: int,
        schema: dict[str, Any],
        *,
        next_obs: str | None = "stored",
        num_envs: int | None = None,
        prioritized: dict[str, Any] | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        truncated: bool = False,
    ) -> None:
        self.capacity = capacity
        self.fields = leaves_of(full_schema(schema, next_obs))
        self.next_obs = next_obs
        self.by_agent = agents.is_by_agent(self.fields)
        self.reward_paths = [path for path in self.fields if path.split("/")[0] == "reward"]
        self.width = num_envs or 1
        self.prioritized = None if prioritized is None else {**DEFAULTS, **prioritized}
        self.n_step, self.gamma = n_step, gamma
        self.tells_truncated = truncated  # whether batches do
        self.ring: list[Step] = []
        self.waiting: dict[Hashable, Step] = {}  # the last step of each stream's unfinished episode
        self.skipping: set[Hashable] = set()  # streams whose last row was masked
        self.running_max = np.float32(1.0)
        self.resets_unflagged = 0
        self.slots = capacity  # rows that exist, drawable or not
        self.one_writer = True  # otherwise what leaves first is the engine's choice: keep() tells

    # ---- rows ----------------------------------------------------------------------------------------------------

    def add(self, writer: Hashable, steps: list[Step]) -> None:
        assert len(steps) % self.width == 0
        for i, step in enumerate(steps):
            self.ring.append(step)
            if self.one_writer and len(self.ring) > self.capacity:
                self.ring.pop(0)
            stream = (writer, i % self.width)
            if step.masked:
                step.values = {path: self.padding(path, frame) for path, frame in step.frames.items()}
                self.skipping.add(stream)
            else:
                step.skips = stream in self.skipping
                self.skipping.discard(stream)
                self.append_to_stream(stream, step)

    def append_to_stream(self, stream: Hashable, step: Step) -> None:
        before = self.waiting.pop(stream, None)
        if before is not None and self.next_obs == "derived" and not self.follows(before, step):
            before.truncated = True
            self.resets_unflagged += 1
            before = None
        if before is not None:
            before.next = step
            step.before = before
        for path, frame in step.frames.items():
            if path.split("/")[0] == "next_obs":
                continue
            past = self.padding(path, frame) if before is None else before.values[path]
            step.values[path] = self.pushed(path, past, frame)
        for path, frame in step.frames.items():
            if path.split("/")[0] == "next_obs":
                now = self.padding(path, frame) if step.starts_over else step.values[path.removeprefix("next_")]
                step.values[path] = self.pushed(path, now, frame)
        if not (step.terminated or step.truncated):
            self.waiting[stream] = step

    def follows(self, before: Step, step: Step) -> bool:
        return all(
            (frame.shape, frame.tobytes()) == (wanted.shape, wanted.tobytes())
            for path, wanted in before.frames.items()
            if path.split("/")[0] == "next_obs"
            for frame in [step.frames[path.removeprefix("next_")]]
        )

    def padding(self, path: str, frame: np.ndarray) -> np.ndarray:
        """The stack before the first frame of an episode."""
        leaf = self.fields[path]
        if leaf.stack == 1:
            return frame
        return np.stack([frame if leaf.padding == "repeat" else np.zeros_like(frame)] * leaf.stack)

    def pushed(self, path: str, past: np.ndarray, frame: np.ndarray) -> np.ndarray:
        return frame if self.fields[path].stack == 1 else np.concatenate([past[1:], frame[None]])

    def keep(self, numbers: Iterable[int]) -> None:
        """Several writers: what the engine kept."""
        kept = set(numbers)
        self.ring = [step for step in self.ring if step.number in kept]

    def close_writer(self, writer: Hashable) -> None:
        for stream in [stream for stream in self.waiting if stream[0] == writer]:  # type: ignore[index]
            self.waiting.pop(stream).truncated = True

    def clear(self) -> None:
        self.ring = []
        self.waiting = {}

    def rows(self) -> list[Step]:
        return [step for step in self.ring if not step.masked and self.has_history(step)]

    def has_history(self, step: Step) -> bool:
        """Stacks look back over masked rows, and what they look back to must be among the rows kept for it."""
        if not self.one_writer:
            return True
        oldest = self.ring[-1].number - self.slots
        for _ in range(max(leaf.stack for leaf in self.fields.values()) - 1):
            if step.before is None:
                return True
            step = step.before
            if step.number <= oldest:
                return False
        return True

    def copy(self) -> Model:
        """What a snapshot holds. An episode that was open then is open for nobody now."""
        twin = Model.__new__(Model)
        twin.__dict__ |= self.__dict__
        twins = {step: replace(step) for step in self.ring}
        for step in twins.values():
            step.next = twins.get(step.next) if step.next is not None else None
        twin.ring, twin.waiting = list(twins.values()), {}
        twin.prioritized = None if self.prioritized is None else dict(self.prioritized)
        return twin

    # ---- priorities ----------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """All rows added since the last draw, update or change of alpha get their priority, from the rows live now."""
        if self.prioritized is None:
            return
        fresh = [step for step in self.rows() if step.raw is None]
        for step in fresh:
            if step.given is not None:
                step.raw = np.float32(step.given)
                self.running_max = max(self.running_max, step.raw)
        rule = self.prioritized["new_rows"]
        if rule == "live_max":
            value = max([step.raw for step in self.rows() if step.raw is not None], default=np.float32(1.0))
        elif rule == "running_max":
            value = self.running_max
        else:
            value = np.float32(rule)
        for step in fresh:
            if step.raw is None:
                step.raw = value

    def update(self, serials: list[int], values: list[float]) -> dict[str, int]:
        self.catch_up()
        live = {step.serial: step for step in self.rows()}
        applied = 0
        for serial, value in zip(serials, values, strict=True):
            if serial in live:
                live[serial].raw = np.float32(abs(value))
                self.running_max = max(self.running_max, live[serial].raw)
                applied += 1
        return {"applied": applied, "stale": len(serials) - applied}

    def masses(self) -> dict[Step, float]:
        assert self.prioritized is not None
        alpha, eps = self.prioritized["alpha"], self.prioritized["eps"]
        rows = self.rows()
        if self.prioritized["rank_based"]:
            ranked = sorted(rows, key=lambda step: -float(step.raw))  # type: ignore[arg-type]
            return {step: (rank + 1.0) ** -alpha for rank, step in enumerate(ranked)}
        raised = [float(step.raw) + eps for step in rows]  # type: ignore[arg-type]
        return {step: float(np.float32(p**alpha)) if p > 0 else 0.0 for step, p in zip(rows, raised, strict=True)}

    def probabilities(self) -> dict[Step, float]:
        """Of every live row. Rank-based: one of the orders that ties allow."""
        assert self.prioritized is not None
        masses, mix = self.masses(), self.prioritized["mix"]
        total, rows = sum(masses.values()), len(masses)
        if total == 0:
            return dict.fromkeys(masses, 1 / rows)
        return {step: (1 - mix) * mass / total + mix / rows for step, mass in masses.items()}

    def beta(self, call: int) -> float:
        assert self.prioritized is not None
        beta = self.prioritized["beta"]
        if isinstance(beta, (int, float)):
            return beta
        return float(beta.start + (beta.end - beta.start) * min(call / beta.steps, 1.0))

    def check_priorities(self, batch: dict[str, Any], steps: list[Step], call: int) -> None:
        """The probabilities and weights of a batch of these rows, drawn by the call of this number."""
        assert self.prioritized is not None
        wanted = self.probabilities()
        given = batch["probabilities"]
        assert given.dtype == np.float64
        assert batch["weights"].dtype == np.float32
        if self.prioritized["rank_based"]:
            chances = self.untie(steps, given, wanted)
        else:
            chances = np.array([wanted[step] for step in steps])
        assert (chances > 0).all()
        np.testing.assert_allclose(given, chances, rtol=1e-6)
        beta, rows = self.beta(call), len(wanted)
        weights = (rows * chances) ** -beta
        if self.prioritized["normalize"] == "batch":
            weights /= weights.max()
        elif self.prioritized["normalize"] == "buffer":
            weights /= (rows * min(p for p in wanted.values() if p > 0)) ** -beta
        np.testing.assert_allclose(batch["weights"], weights, rtol=1e-5)

    def untie(self, steps: list[Step], given: np.ndarray, wanted: dict[Step, float]) -> np.ndarray:
        """Equal priorities may stand in any order, each in a place of its own."""
        places: dict[Any, list[float]] = {}
        for step, chance in wanted.items():
            places.setdefault(step.raw, []).append(chance)
        taken: dict[Step, float] = {}
        for step, chance in zip(steps, given, strict=True):
            nearest = min(places[step.raw], key=lambda place: abs(place - chance))
            assert taken.setdefault(step, nearest) == nearest
        for raw, chances in places.items():
            mine = [chance for step, chance in taken.items() if step.raw == raw]
            assert len(set(mine)) == len(mine) or len(set(chances)) < len(chances)
        return np.array([taken[step] for step in steps])

    # ---- what a batch holds --------------------------------------------------------------------------------------

    def chain(self, step: Step) -> list[Step]:
        """The steps of the n-step example that starts here."""
        live, chain = set(self.rows()), [step]
        while len(chain) < self.n_step and chain[-1].next in live and not chain[-1].cut:
            assert chain[-1].next is not None
            chain.append(chain[-1].next)
        return chain

    def chains(self, step: Step) -> list[list[Step]]:
        """Where several writers share a ring, masked rows inside a chain may have left before it, and cut it there."""
        chain = self.chain(step)
        cuts = [i for i in range(1, len(chain)) if chain[i].skips and not self.one_writer]
        return [chain, *(chain[:i] for i in cuts)]

    def example(self, chain: list[Step]) -> dict[str, np.ndarray]:
        """What a drawn batch holds of the row that this chain starts with, by path."""
        values = dict(chain[0].values)
        for path in values:
            if path.split("/")[0] == "next_obs":
                values[path] = chain[-1].values[path]
        values |= self.ends(chain[-1])
        values["truncated"] = np.array(chain[-1].truncated)
        if self.n_step > 1 and self.by_agent:
            values |= agents.example(chain, self.fields, self.gamma)
        elif self.n_step > 1:
            powers = self.gamma ** np.arange(len(chain), dtype=np.float64)
            for path in self.reward_paths:
                rewards = np.array([link.values[path] for link in chain], np.float64)
                values[path] = np.tensordot(powers, rewards, 1).astype(self.fields[path].dtype)
            values["discount"] = np.float32(self.gamma ** len(chain))
        return values

    def ends(self, step: Step) -> dict[str, np.ndarray]:
        return step.dones if self.by_agent else {"done": np.array(step.terminated, self.fields["done"].dtype)}

    def drawn(self, batch: dict[str, Any], i: int, step: Step) -> dict[str, np.ndarray]:
        examples = [self.example(chain) for chain in self.chains(step)]

        def fits(values: dict[str, np.ndarray], **close: float) -> bool:
            return all(np.allclose(leaf_in(batch, path)[i], values[path], **close) for path in self.reward_paths)

        close = [values for values in examples[1:] if fits(values, rtol=1e-6)]
        return close[0] if close and not fits(examples[0]) else examples[0]

    def single(self, step: Step) -> dict[str, np.ndarray]:
        """What get() and rows() give."""
        return {**step.values, **self.ends(step)}

    def batch_keys(self, drawn: bool) -> set[str]:
        keys = {path.split("/")[0] for path in self.fields} | {"indices"}
        if not drawn:
            return keys | {"truncated"}
        if self.n_step > 1:
            keys.add("discount")
        if self.tells_truncated:
            keys.add("truncated")
        if self.prioritized is not None:
            keys |= {"weights", "probabilities"}
        return keys

    def check_values(self, batch: dict[str, Any], steps: list[Step], drawn: bool) -> None:
        assert set(batch) == self.batch_keys(drawn)
        wanted = [self.drawn(batch, i, step) if drawn else self.single(step) for i, step in enumerate(steps)]
        for path, leaf in self.fields.items():
            parts = [values[path] for values in wanted]
            if drawn and path in self.reward_paths and self.n_step > 1:
                want, got = np.stack(parts), leaf_in(batch, path)
                assert got.dtype == leaf.dtype
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * abs(want).max())
            else:
                assert_leaf(path, leaf, leaf_in(batch, path), parts)
        if drawn and self.n_step > 1:
            for path in [path for path in wanted[0] if path.split("/")[0] == "discount"]:
                got = leaf_in(batch, path)
                assert got.dtype == np.float32
                np.testing.assert_allclose(got, np.stack([values[path] for values in wanted]), rtol=1e-6)
        if drawn and self.tells_truncated:
            assert batch["truncated"].dtype == bool
            assert batch["truncated"].tolist() == [bool(values["truncated"]) for values in wanted]
        if not drawn:
            assert batch["truncated"].tolist() == [step.truncated for step in steps]


def assert_leaf(path: str, leaf: sw.Field, got: Any, parts: list[np.ndarray]) -> None:
    """One leaf of a batch, byte for byte: NaN differs from itself."""
    if not leaf.ragged:
        want = np.stack(parts)
        assert (got.shape, got.dtype) == (want.shape, leaf.dtype), path
        assert got.tobytes() == want.tobytes(), path
        return
    lengths = [len(part) for part in parts]
    if leaf.ragged == "padded":
        assert set(got) == {"values", "mask"}, path
        assert got["mask"].dtype == bool
        assert got["mask"].tolist() == (np.arange(leaf.shape[0]) < np.array(lengths)[:, None]).tolist(), path
        values = np.zeros((len(parts), *leaf.shape), leaf.dtype)
        for row, part in zip(values, parts, strict=True):
            row[: len(part)] = part
    else:
        assert set(got) == {"values", "offsets"}, path
        assert got["offsets"].dtype == np.int64
        assert got["offsets"].tolist() == [0, *np.cumsum(lengths).tolist()], path
        values = np.concatenate(parts)
    assert (got["values"].shape, got["values"].dtype) == (values.shape, leaf.dtype), path
    assert got["values"].tobytes() == values.tobytes(), path


def full_schema(schema: dict[str, Any], next_obs: str | None) -> dict[str, Any]:
    """The user's fields, and what a transition has besides."""
    whole = {"reward": sw.Field((), "float32"), "done": sw.Field((), "bool"), **schema}
    return {**whole, "next_obs": schema["obs"]} if next_obs else whole


def value_of(leaf: sw.Field, number: int, path: str) -> np.ndarray:
    """One frame that follows from its number: half of them compress well."""
    stream = np.random.default_rng([number, zlib.crc32(path.encode())])
    shape = leaf.shape
    if leaf.ragged:
        shape = (int(stream.integers(0, shape[0] + 1)), *shape[1:])
    if path.split("/")[0] == "reward":
        return np.asarray(stream.normal(size=shape)).astype(leaf.dtype)
    size = int(np.prod(shape, dtype=int)) * leaf.dtype.itemsize
    raw = np.frombuffer(bytes([number % 251]) * size if number % 2 else stream.bytes(size), np.uint8)
    return (raw & 1 if leaf.dtype.kind == "b" else raw).view(leaf.dtype).reshape(shape)


class Pair:
    """A buffer and its model, given the same calls.

    `variety` is the number of different observations there are: few of them make resets that cannot be seen.
    """

    def __init__(
        self,
        capacity: int,
        schema: dict[str, Any],
        *,
        next_obs: str | None = "stored",
        num_envs: int | None = None,
        prioritized: dict[str, Any] | None = None,
        n_step: int = 1,
        gamma: float = 0.99,
        truncated: bool = False,
        variety: int | None = None,
        **options: Any,
    ) -> None:
        if prioritized is not None:
            options["sampler"] = sw.Prioritized(**prioritized)
        if n_step > 1 or truncated:
            options["view"] = sw.Transitions(n_step=n_step, gamma=gamma, truncated=truncated)
        schema = {"id": ID, **schema}
        shape: dict[str, Any] = {"next_obs": next_obs, "num_envs": num_envs}
        self.buffer = sw.ReplayBuffer(capacity, schema=schema, **shape, **{"seed": 7, **options})
        self.schema = full_schema(schema, next_obs)
        view: dict[str, Any] = {"n_step": n_step, "gamma": gamma, "truncated": truncated}
        self.model = Model(capacity, schema, prioritized=prioritized, **view, **shape)
        self.model.slots = self.buffer.stats()["blocks"] * self.buffer.stats()["block_rows"]
        self.variety = variety
        self.writers: dict[int, Any] = {}
        self.writers_made = 0
        self.own_writer_used = False
        self.made = self.seen = self.calls = 0
        self.by_stacks = False  # whether the add that is being made gives whole stacks
        self.obs_now: dict[Hashable, int] = {}  # by writer and env: the observation that the next step starts from
        self.by_number: dict[int, Step] = {}
        self.gone: set[int] = set()  # serials of rows that were in the buffer once

    # ---- writing -------------------------------------------------------------------------------------------------

    def fresh_obs(self) -> int:
        self.seen += 1
        return self.seen % self.variety if self.variety else self.seen

    def make_steps(self, codes: str, writer: Hashable, priority: list[float] | None) -> list[Step]:
        steps = []
        for i, code in enumerate(codes):
            place = (writer, i % self.model.width)
            number, self.made = self.made, self.made + 1
            masked = code == "M"
            obs = self.fresh_obs() if masked or place not in self.obs_now else self.obs_now[place]
            after = self.fresh_obs()
            frames = {}
            for path, leaf in self.model.fields.items():
                top, _, rest = path.partition("/")
                if path == "id":
                    frames[path] = np.int64(number)
                elif top in ("obs", "next_obs"):
                    frames[path] = value_of(leaf, obs if top == "obs" else after, f"obs/{rest}")
                elif top != "done":
                    frames[path] = value_of(leaf, number, path)
            if not masked:
                self.obs_now[place] = after if code in ".ZYC" else self.fresh_obs()
            given = None if priority is None else priority[i]
            truncated = code in "UBY"
            step = Step(number, frames, code in "TBZ", truncated, masked, given, truncated)
            step.starts_over = code in "ZY" and self.by_stacks
            if self.model.by_agent:
                step.dones, step.told = agents.draw_ends(code, number, self.model.fields)
                step.terminated, step.truncated, step.cut = agents.row_ends(step.dones, step.told)
                step.told_truncated = step.truncated
            self.by_number[number] = step
            steps.append(step)
        return steps

    def add(
        self,
        codes: str,
        lead: tuple[int, ...] | None = None,
        *,
        writer: int | None = None,
        priority: list[float] | None = None,
        stacks: bool = False,
        indices: bool = False,
    ) -> None:
        """`lead` is () for one row, (n,) flat, (k, num_envs) by steps; `stacks` gives whole stacks, not frames;
        `indices` asks for the serials of the rows, which every later batch must confirm."""
        lead = (len(codes),) if lead is None else lead
        if writer is None and self.writers:
            self.model.one_writer = False
        self.by_stacks = stacks
        steps = self.make_steps(codes, writer, priority)
        self.model.add(writer, steps)
        arguments = self.arguments(steps, lead, stacks)
        if priority is not None:
            arguments["priority"] = np.array(priority, np.float64).reshape(lead)
        if indices:
            arguments["return_indices"] = True
        serials = (self.buffer if writer is None else self.writers[writer]).add(**arguments)
        self.learn(steps, serials if indices else None)
        assert indices or serials is None
        self.own_writer_used |= writer is None
        if not self.model.one_writer:
            self.model.keep(int(number) for batch in self.buffer.rows() for number in batch["id"])

    def learn(self, steps: list[Step], serials: Any) -> None:
        """What an add said of the serials of its rows."""
        if serials is None:
            return
        assert (serials.dtype, serials.shape) == (np.int64, (len(steps),))
        for step, serial in zip(steps, serials.tolist(), strict=True):
            assert (serial == -1) == step.masked
            step.serial = None if step.masked else serial

    def arguments(
        self, steps: list[Step], lead: tuple[int, ...], stacks: bool, by_agent: bool = False
    ) -> dict[str, Any]:
        def build(node: Any, path: str, told: bool = False) -> Any:
            if isinstance(node, dict):
                return {name: build(part, f"{path}/{name}", told) for name, part in node.items()}
            if isinstance(node, tuple):
                return tuple(build(part, f"{path}/{i}", told) for i, part in enumerate(node))
            if path == "done" and not self.model.by_agent:
                return np.array([step.terminated for step in steps]).astype(node.dtype).reshape(lead)
            if path.split("/")[0] == "done":
                parts = [(step.told if told else step.dones)[path] for step in steps]
            else:
                parts = [(step.values if stacks else step.frames)[path] for step in steps]
            if node.ragged:
                return parts if lead else parts[0]
            return np.stack(parts).reshape((*lead, *parts[0].shape))

        values = {name: build(node, name) for name, node in self.schema.items()}
        values["truncated"] = np.array([step.told_truncated for step in steps]).reshape(lead)
        if self.model.by_agent and (by_agent or steps[0].number % 2 or any(step.cut for step in steps)):
            values["truncated"] = build(self.schema["done"], "done", told=True)
        if any(step.masked for step in steps):
            values["mask"] = np.array([not step.masked for step in steps]).reshape(lead)
        return values

    def open_writer(self) -> int:
        """With two at once, the engine says which rows leave first."""
        if self.writers or self.own_writer_used:
            self.model.one_writer = False
        name, self.writers_made = self.writers_made, self.writers_made + 1
        self.writers[name] = self.buffer.writer()
        return name

    def close_writer(self, name: int) -> None:
        self.writers.pop(name).close()
        self.model.close_writer(name)

    def clear(self) -> None:
        self.buffer.clear()
        self.model.clear()
        self.obs_now = {}

    def save_and_open(self, path: Any) -> None:
        """Goes on with the copy, whose next draws must be those of the buffer that was not interrupted."""
        self.buffer.save(path)
        copy = sw.open(path)
        if self.model.rows():
            ours, theirs = self.buffer.sample(33), copy.sample(33)
            for name in ("indices", "weights", "probabilities"):
                assert ours.get(name, np.empty(0)).tolist() == theirs.get(name, np.empty(0)).tolist()
            self.calls += 1
            self.model.catch_up()
        for writer in self.writers.values():
            writer.close()
        self.buffer.close()
        self.buffer = copy
        self.own_writer_used = False
        self.model = self.model.copy()
        self.by_number |= {step.number: step for step in self.model.ring}
        self.obs_now = {}
        self.writers = {}

    # ---- reading -------------------------------------------------------------------------------------------------

    def steps_of(self, batch: dict[str, Any]) -> list[Step]:
        """The steps that a batch shows, all of them live; their serials are learned here."""
        live = set(self.model.rows())
        steps = [self.by_number[int(number)] for number in batch["id"]]
        for step, serial in zip(steps, batch["indices"].tolist(), strict=True):
            assert step in live
            assert step.serial in (None, serial)
            step.serial = serial
        return steps

    def check(self) -> None:
        """Every row, as rows() and get() give it."""
        wanted = self.model.rows()
        found: list[Step] = []
        for batch in self.buffer.rows(7):
            steps = self.steps_of(batch)
            self.model.check_values(batch, steps, drawn=False)
            found += steps
        assert len(self.buffer) == len(wanted)
        if self.model.one_writer:
            assert [step.number for step in found] == [step.number for step in wanted]
        assert {step.number for step in found} == {step.number for step in wanted}
        if found:
            backwards = found[::-1]
            again = self.buffer.get([step.serial for step in backwards])
            self.model.check_values(again, backwards, drawn=False)
        live = {step.serial for step in found}
        self.gone |= {step.serial for step in self.by_number.values() if step.serial is not None} - live

    def sample(self, size: int, out: dict[str, Any] | None = None) -> dict[str, Any]:
        batch = self.buffer.sample(size) if out is None else self.buffer.sample(size, out=out)
        self.model.catch_up()
        steps = self.steps_of(batch)
        self.model.check_values(batch, steps, drawn=True)
        if self.model.prioritized is not None:
            self.model.check_priorities(batch, steps, self.calls)
        self.calls += 1
        return batch

    def sample_all(self, size: int = 256, most: int = 400) -> None:
        """Draws until every row was seen."""
        left = {step.number for step in self.model.rows()}
        while left and most > 0:
            left -= set(self.sample(size)["id"].tolist())
            most -= 1
        assert not left

    # ---- priorities ----------------------------------------------------------------------------------------------

    def update(self, serials: list[int], values: list[float]) -> None:
        report = self.buffer.update_priorities(np.array(serials, np.int64), np.array(values, np.float64))
        assert report == self.model.update(serials, values)

    def tune(self, **settings: Any) -> None:
        assert self.model.prioritized is not None
        self.buffer.tune(**settings)
        if "alpha" in settings:
            self.model.catch_up()
        self.model.prioritized |= settings
        for name, value in settings.items():
            assert getattr(self.buffer.sampler, name) == value

    def check_counts(self) -> None:
        stats = self.buffer.stats()  # milliseconds, so not a part of check()
        assert stats["sample_calls"] == self.calls
        assert stats["size"] == len(self.model.rows())
        if self.model.next_obs == "derived":
            assert stats["resets_unflagged"] == self.model.resets_unflagged

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
        self.buffer.close(unlink=True)


# ---- random calls ----------------------------------------------------------------------------------------------------

priorities = st.one_of(
    st.sampled_from([0.0, 0.0, -0.0, 1e-12, 1e-6, 0.5, 1.0, 1e12]), st.floats(0, 1e6, width=32, allow_subnormal=False)
)
palettes = st.sampled_from([priorities, priorities, st.sampled_from([0.0, -0.0]), st.sampled_from([0.0, 2.0])])
codes = st.sampled_from("......TURBMMZYC")
betas = st.one_of(
    st.sampled_from([0.0, 0.4, 1.0]),
    st.builds(lambda start, end, steps: sw.Linear(start, end, steps), st.just(0.2), st.just(1.0), st.integers(1, 12)),
)


class PairMachine(RuleBasedStateMachine):
    """Random calls on a Pair; `arguments` draws its constructor's."""

    arguments: Callable[[Callable[..., Any]], dict[str, Any]]

    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        self.folder = tempfile.TemporaryDirectory()
        options = type(self).arguments(data.draw)
        self.width = options.get("num_envs") or 1
        options["capacity"] = -(-options["capacity"] // self.width) * self.width
        self.pair = Pair(**options)
        self.most_writers = 0 if options["writers"] == 1 else min(3, self.pair.buffer.stats()["blocks"] - 2)
        model = self.pair.model
        self.has_envs = options.get("num_envs") is not None
        self.has_stacks = any(leaf.stack > 1 for leaf in model.fields.values())
        self.priorities = data.draw(palettes)
        self.has_priorities = model.prioritized is not None
        self.is_ragged = any(leaf.ragged for leaf in model.fields.values())
        # Several rows at once are successive steps only where the buffer knows whose.
        self.by_one = not self.has_envs and (model.n_step > 1 or model.next_obs == "derived" or self.has_stacks)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            try:
                self.pair.check_counts()
            finally:
                self.pair.close()
                self.folder.cleanup()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        most = 1 if self.by_one else min(6, self.pair.model.capacity // self.width)
        steps = data.draw(st.integers(1, most))
        count = steps * self.width
        leads: list[tuple[int, ...]] = [()] if count == 1 else [(count,)]
        if self.has_envs and not self.is_ragged:
            leads.append((steps, self.width))
        letters = "".join(data.draw(codes) for _ in range(count))
        given = None
        if self.has_priorities and data.draw(st.booleans()):
            given = data.draw(st.lists(self.priorities, min_size=count, max_size=count))
        self.pair.add(
            letters,
            data.draw(st.sampled_from(leads)),
            writer=data.draw(st.sampled_from([*self.pair.writers])) if self.pair.writers else None,
            priority=given,
            stacks=self.has_stacks and data.draw(st.booleans()),
            indices=data.draw(st.booleans()),
        )

    # Every writer needs a block of its own.
    @precondition(lambda self: len(self.pair.writers) < self.most_writers)
    @rule()
    def open_writer(self) -> None:
        self.pair.open_writer()

    @precondition(lambda self: self.pair.writers)
    @rule(data=st.data())
    def close_writer(self, data: st.DataObject) -> None:
        self.pair.close_writer(data.draw(st.sampled_from([*self.pair.writers])))

    @rule(size=st.sampled_from([1, 3, 64, 200]), reuse=st.booleans())
    def sample(self, size: int, reuse: bool) -> None:
        if not self.pair.model.rows():
            with pytest.raises(NotReady):
                self.pair.buffer.sample(size)
            return
        batch = self.pair.sample(size)
        has_names = isinstance(batch.get("discount"), dict)  # parts of one array, which cannot be given again
        if reuse and not self.is_ragged and not has_names:
            assert self.pair.sample(size, out=batch) is batch

    @precondition(lambda self: self.has_priorities)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        live = [step.serial for step in self.pair.model.rows()]
        some = [*live, *sorted(self.pair.gone)[:3], 10**9, *live[-1:], *live[:1]]
        serials = data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=12))
        signed = st.builds(lambda value, sign: value * sign, self.priorities, st.sampled_from([1, -1]))
        self.pair.update(serials, data.draw(st.lists(signed, min_size=len(serials), max_size=len(serials))))

    @precondition(lambda self: self.has_priorities)
    @rule(alpha=st.sampled_from([0.0, 0.5, 0.6, 1.0]))
    def tune_alpha(self, alpha: float) -> None:
        self.pair.tune(alpha=alpha)

    @precondition(lambda self: self.has_priorities)
    @rule(beta=betas)
    def tune_beta(self, beta: Any) -> None:
        self.pair.tune(beta=beta)

    @rule(really=st.sampled_from([False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.pair.clear()

    @rule()
    def save_and_open(self) -> None:
        self.pair.save_and_open(f"{self.folder.name}/snapshot")

    @invariant()
    def engine_equals_model(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()
