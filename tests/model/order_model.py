"""The specification of windows, hindsight, samplers with an order, and pace: slow and obvious.

`OrderModel` adds to the model of rows which of them an example may start at (`legal_starts`), what such an example is
(`window`, `goals`) and what the samplers remember between calls (`accept`). `OrderPair` gives the same calls to a model
and to a buffer. `Limiter` is the pace, its two inequalities and nothing else. Exact for one writer; for several where
nothing has been overwritten.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from oracle import leaf_in
from replay_model import Model, Pair, Step, assert_leaf

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError

# Which writer's env, which episode of it, which step of that: what a row says of itself, told by nobody but the stream.
WHERE = sw.Field((3,), "int64")

# Whether a step that an environment was masked out of counts in the step numbers that stride= looks at.
MASKED_STEPS_COUNT = False


# ---- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Single:
    """sw.Transitions."""

    n_step: int = 1
    gamma: float = 0.9
    hindsight: dict[str, Any] | None = None  # the arguments of sw.Hindsight
    truncated: bool = False

    def public(self) -> Any:
        more = {} if self.hindsight is None else {"hindsight": sw.Hindsight(**self.hindsight)}
        return sw.Transitions(n_step=self.n_step, gamma=self.gamma, truncated=self.truncated, **more)


@dataclass(frozen=True)
class Slices:
    """sw.Windows."""

    length: int
    burn_in: int = 0
    stride: int = 1
    bootstrap: int = 0
    end: str = "pad"
    start: str = "uniform"
    priority_eta: float = 0.9
    n_step: int = 1
    gamma: float = 0.9
    truncated: bool = False
    place_indices: bool = False

    @property
    def places(self) -> int:
        return self.burn_in + self.length + self.bootstrap

    def public(self) -> Any:
        return sw.Windows(
            self.length,
            burn_in=self.burn_in,
            stride=self.stride,
            bootstrap=self.bootstrap,
            end=self.end,
            start=self.start,
            priority_eta=self.priority_eta,
            n_step=self.n_step,
            gamma=self.gamma,
            truncated=self.truncated,
            place_indices=self.place_indices,
        )


RANDOM = ("Uniform", "Prioritized", "Recent")  # with replacement


@dataclass(frozen=True)
class Draw:
    """A sampler by its name. `settings` are those of sw.Prioritized; `n` is that of sw.Recent."""

    kind: str = "Uniform"
    n: int = 0
    newest: int = 0
    max_reads: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def public(self) -> Any:
        options: dict[str, Any] = {"max_reads": self.max_reads}
        if self.kind in RANDOM:
            options["newest"] = self.newest
        if self.kind == "Prioritized":
            # A number, because what "the largest in the buffer" is of rows that cannot be drawn is nobody's business.
            options |= {"new_rows": 1.0, **self.settings}
        positional = (self.n,) if self.kind == "Recent" else ()
        return getattr(sw, self.kind)(*positional, **options)


# ---- the model -------------------------------------------------------------------------------------------------------


@dataclass
class Window:
    rows: list[Step]
    before: int  # how many of them are burn-in
    valid: list[bool]
    mask: list[bool]
    first: list[bool]
    shown: list[Step]  # one a place: the last row stands in the places that are left


class OrderModel(Model):
    """A Model that knows legal starts and the memory of a sampler."""

    def __init__(
        self,
        capacity: int,
        schema: dict[str, Any],
        *,
        view: Single | Slices,
        draw: Draw,
        next_obs: str | None = "stored",
        num_envs: int | None = None,
    ) -> None:
        settings = None
        if draw.kind == "Prioritized":
            settings = {"new_rows": 1.0, **draw.settings}
        super().__init__(
            capacity,
            schema,
            next_obs=next_obs,
            num_envs=num_envs,
            prioritized=settings,
            n_step=view.n_step,
            gamma=view.gamma,
            truncated=view.truncated,
        )
        self.view, self.draw = view, draw
        self.last_of: dict[Hashable, Step] = {}  # of each stream
        self.stream_of: dict[Step, Hashable] = {}
        self.stream_next: dict[Step, Step] = {}
        self.stream_before: dict[Step, Step] = {}
        self.void_before: dict[Step, int] = {}  # masked steps of its stream and episode just before it
        self.voids: dict[Hashable, int] = {}
        self.numbers: dict[Step, int] = {}  # step numbers in the episode, as far as they are known
        self.reads: dict[Step, int] = {}
        self.consumed: set[Step] = set()
        self.rows_consumed = 0
        self.epoch = 0
        self.epoch_left: set[Step] = set()

    # ---- rows ----------------------------------------------------------------------------------------------------

    def add(self, writer: Hashable, steps: list[Step]) -> None:
        super().add(writer, steps)
        for i, step in enumerate(steps):
            stream = (writer, i % self.width)
            if step.masked:
                self.voids[stream] = self.voids.get(stream, 0) + 1
                continue
            self.stream_of[step] = stream
            self.void_before[step] = self.voids.pop(stream, 0)
            if stream in self.last_of:
                self.stream_before[step] = self.last_of[stream]
                self.stream_next[self.last_of[stream]] = step
            self.last_of[stream] = step
            if self.prioritized is not None:
                step.raw = np.float32(self.prioritized["new_rows"] if step.given is None else step.given)

    def clear(self) -> None:
        super().clear()
        self.last_of, self.voids = {}, {}

    def ordered(self) -> list[Step]:
        """The live rows in the order of their serials; one writer's are in that order."""
        rows = self.rows()
        return rows if self.one_writer else sorted(rows, key=lambda step: step.serial or 0)

    def numbered(self) -> dict[Step, int]:
        """Step numbers in the episode. Rows that came and went between two looks of a sampler were never counted."""
        numbers = dict(self.numbers)
        for step in self.ring:  # also rows whose stack has lost its history: they cannot be drawn, and they count
            if step.masked or step in numbers:
                continue
            if step.before is None or step.before not in numbers:
                numbers[step] = 0
            else:
                numbers[step] = numbers[step.before] + 1 + (self.void_before[step] if MASKED_STEPS_COUNT else 0)
        return numbers

    def look(self) -> None:
        """A sampler looks at what has come: at every sample()."""
        self.numbers = self.numbered()

    # ---- examples ------------------------------------------------------------------------------------------------

    def walk(self, step: Step, most: int, live: set[Step], *, back: bool = False, cross: bool = False) -> list[Step]:
        """Up to `most` rows from the one after (before) `step` on, nearest first."""
        found: list[Step] = []
        while len(found) < most:
            if cross:
                other = (self.stream_before if back else self.stream_next).get(step)
            else:
                other = step.before if back else step.next
            if other is None or other not in live:
                break
            found.append(other)
            step = other
        return found

    def episode(self, step: Step, live: set[Step]) -> list[Step]:
        """The live rows of its episode, in order."""
        huge = 10**9
        return [*self.walk(step, huge, live, back=True)[::-1], step, *self.walk(step, huge, live)]

    def is_finished(self, step: Step, live: set[Step]) -> bool:
        last = self.episode(step, live)[-1]
        return last.terminated or last.truncated

    def legal_starts(self) -> list[Step]:
        """In the order of serials; without those that were read often enough."""
        live = self.ordered()
        among, numbers = set(live), self.numbered()
        return [step for step in live if step not in self.consumed and self.may_start(step, among, numbers)]

    def may_start(self, step: Step, live: set[Step], numbers: dict[Step, int]) -> bool:
        view = self.view
        if isinstance(view, Single):
            return view.hindsight is None or self.is_finished(step, live)
        if view.start == "episode" and step.before is not None:
            return False
        if view.end == "cross":
            assert step.serial is not None
            if step.serial // self.width % view.stride:
                return False
            return len(self.walk(step, view.length - 1, live, cross=True)) == view.length - 1
        if numbers[step] % view.stride:
            return False
        if view.end == "pad" or len(self.walk(step, view.length - 1, live)) == view.length - 1:
            return True
        return step.before is None and self.is_finished(step, live)

    def window(self, anchor: Step) -> Window:
        view = self.view
        assert isinstance(view, Slices)
        live, cross = set(self.rows()), view.end == "cross"
        before = self.walk(anchor, view.burn_in, live, back=True, cross=cross)[::-1]
        after = self.walk(anchor, view.length - 1 + view.bootstrap, live, cross=cross)
        rows = [*before, anchor, *after]
        b, places = len(before), range(view.places)
        valid = [place < len(rows) for place in places]
        return Window(
            rows=rows,
            before=b,
            valid=valid,
            mask=[valid[place] and b <= place < b + view.length for place in places],
            first=[valid[place] and rows[place].before is None for place in places],
            shown=[rows[min(place, len(rows) - 1)] for place in places],
        )

    def goals(self, step: Step, strategy: str) -> list[Step]:
        """The steps after which the goal of a relabelled example may have been reached."""
        episode = self.episode(step, set(self.rows()))
        return {"future": episode[episode.index(step) :], "final": episode[-1:], "episode": episode}[strategy]

    # ---- samplers ------------------------------------------------------------------------------------------------

    def refusal(self, n: int) -> type[Exception] | None:
        """What sample(n) raises."""
        if n < self.draw.newest or (self.draw.kind not in RANDOM and n > self.capacity):
            return SchemaError
        legal = len(self.legal_starts())
        return NotReady if (legal == 0 if self.draw.kind in RANDOM else legal < n) else None

    def accept(self, drawn: list[Step]) -> None:
        """These anchors were delivered by one call: may they, and what is remembered of it."""
        legal, kind = self.legal_starts(), self.draw.kind
        if kind == "Fifo":
            assert drawn == legal[: len(drawn)]
        elif kind == "Lifo":
            assert drawn == legal[::-1][: len(drawn)]
        elif kind == "Shuffle":
            self.go_through_epochs(drawn, legal)
        else:
            k = self.draw.newest
            newest = legal[::-1][:k]
            assert drawn[: len(newest)] == newest
            assert set(drawn[:k]) <= set(newest)  # where fewer exist they repeat
            among = legal[-self.draw.n :] if kind == "Recent" else legal
            assert set(drawn[k:]) <= set(among)
        for step in drawn:
            self.reads[step] = self.reads.get(step, 0) + 1
        if self.draw.max_reads is not None:
            done = {step for step in drawn if self.reads[step] >= self.draw.max_reads}
            self.consumed |= done
            self.rows_consumed += len(done)

    def go_through_epochs(self, drawn: list[Step], legal: list[Step]) -> None:
        left = self.epoch_left & set(legal)
        now, rest = drawn[: len(left)], drawn[len(left) :]
        assert len(set(now)) == len(now)
        assert set(now) <= left
        if rest:
            assert set(now) == left
            most = self.draw.max_reads
            spent = {step for step in now if most is not None and self.reads.get(step, 0) + 1 >= most}
            left = set(legal) - spent
            self.epoch += 1
            assert len(set(rest)) == len(rest)
            assert set(rest) <= left
        self.epoch_left = left - set(rest if rest else now)

    # ---- priorities ----------------------------------------------------------------------------------------------

    def update(self, serials: list[int], values: list[float]) -> dict[str, int]:
        live = {step.serial: step for step in self.rows() if step not in self.consumed}
        applied = 0
        for serial, value in zip(serials, values, strict=True):
            if serial in live:
                live[serial].raw = np.float32(abs(value))
                applied += 1
        return {"applied": applied, "stale": len(serials) - applied}

    def start_chances(self) -> dict[Step, float]:
        """The probability of each legal start."""
        assert self.prioritized is not None
        legal = self.legal_starts()
        alpha, eps = self.prioritized.get("alpha", 0.6), self.prioritized.get("eps", 1e-6)
        raised = [float(step.raw) + eps for step in legal]  # type: ignore[arg-type]
        masses = [float(np.float32(p**alpha)) if p > 0 else 0.0 for p in raised]
        total, mix = sum(masses), self.prioritized.get("mix", 0.0)
        if total == 0:
            return dict.fromkeys(legal, 1 / len(legal))
        return {s: (1 - mix) * mass / total + mix / len(legal) for s, mass in zip(legal, masses, strict=True)}

    def check_weights(self, batch: dict[str, Any], drawn: list[Step], wanted: dict[Step, float]) -> None:
        assert self.prioritized is not None
        k, beta = self.draw.newest, self.prioritized.get("beta", 0.4)
        assert batch["probabilities"].dtype == np.float64
        assert batch["weights"].dtype == np.float32
        assert batch["probabilities"].shape == batch["weights"].shape == (len(drawn),)
        assert batch["probabilities"][:k].tolist() == [1.0] * k
        assert batch["weights"][:k].tolist() == [1.0] * k
        chances = np.array([wanted[step] for step in drawn[k:]])
        if len(chances) == 0:
            return
        assert (chances > 0).all()
        np.testing.assert_allclose(batch["probabilities"][k:], chances, rtol=1e-6)
        weights = (len(wanted) * chances) ** -beta
        rule = self.prioritized.get("normalize", "batch")
        if rule == "batch":
            weights /= weights.max()
        elif rule == "buffer":
            weights /= (len(wanted) * min(p for p in wanted.values() if p > 0)) ** -beta
        np.testing.assert_allclose(batch["weights"][k:], weights, rtol=1e-5)


class OrderPair(Pair):
    """A buffer with any view and sampler, and its model. Rows say where they are: (stream, episode, step)."""

    model: OrderModel

    def __init__(
        self,
        capacity: int,
        schema: dict[str, Any],
        *,
        view: Single | Slices,
        draw: Draw,
        next_obs: str | None = "stored",
        num_envs: int | None = None,
        **options: Any,
    ) -> None:
        schema = {"where": WHERE, **schema}
        shape: dict[str, Any] = {"next_obs": next_obs, "num_envs": num_envs}
        super().__init__(capacity, schema, view=view.public(), sampler=draw.public(), **shape, **options)
        slots = self.model.slots
        schema = {name: node for name, node in self.schema.items() if name != "next_obs"}
        self.model = OrderModel(capacity, schema, view=view, draw=draw, **shape)
        self.model.slots = slots
        self.is_by_priority = draw.kind == "Prioritized" and not draw.settings.get("rank_based")
        self.at: dict[Hashable, tuple[int, int]] = {}  # episode and step of the row that comes next
        self.streams: list[Hashable] = []
        self.refusals = 0

    def make_steps(self, codes: str, writer: Hashable, priority: list[float] | None) -> list[Step]:
        steps = super().make_steps(codes, writer, priority)
        for i, (step, code) in enumerate(zip(steps, codes, strict=True)):
            stream = (writer, i % self.model.width)
            if stream not in self.streams:
                self.streams.append(stream)
            episode, number = self.at.get(stream, (0, 0))
            step.frames["where"] = np.array([self.streams.index(stream), episode, number])
            if code == "M":
                continue
            is_over = code in "TUB" or (code == "R" and self.model.next_obs == "derived")
            self.at[stream] = (episode + 1, 0) if is_over else (episode, number + 1)
        return steps

    def clear(self) -> None:
        super().clear()
        self.at = {stream: (episode + 1, 0) for stream, (episode, _) in self.at.items()}

    def learn_serials(self) -> None:
        if any(step.serial is None for step in self.model.rows()):
            self.check()

    def legal_starts(self) -> list[Step]:
        self.learn_serials()
        return self.model.legal_starts()

    def legal_serials(self) -> list[int]:
        return [step.serial for step in self.legal_starts()]  # type: ignore[misc]

    def refuse_or_sample(self, n: int) -> dict[str, Any] | None:
        """sample(n) if the model allows it; otherwise it must be refused and change nothing."""
        self.learn_serials()
        refusal = self.model.refusal(n)
        if refusal is None:
            return self.sample(n)
        if refusal is NotReady:
            self.model.look()
        self.refusals += 1
        before = self.memory() if self.refusals % 4 == 1 else None
        with pytest.raises(refusal):
            self.buffer.sample(n)
        if before is not None:
            assert self.memory() == before
        return None

    def memory(self) -> tuple[Any, ...]:
        """What a failed call must leave as it was. Milliseconds, so not at every one."""
        stats = self.buffer.stats()
        names = ("size", "rows_added", "rows_sampled", "sample_calls", "epoch", "rows_consumed")
        return tuple(stats.get(name) for name in names)

    def sample(self, size: int, out: dict[str, Any] | None = None) -> dict[str, Any]:
        self.learn_serials()
        by_serial = {step.serial: step for step in self.model.rows()}
        self.model.look()
        chances = self.model.start_chances() if self.is_by_priority else None
        batch = self.buffer.sample(size) if out is None else self.buffer.sample(size, out=out)
        self.calls += 1
        assert batch["indices"].dtype == np.int64
        assert batch["indices"].shape == (size,)
        drawn = [by_serial[serial] for serial in batch["indices"].tolist()]
        if isinstance(self.model.view, Slices):
            self.check_windows(batch, drawn)
        elif self.model.view.hindsight is None:
            self.model.check_values(batch, drawn, drawn=True)
        if chances is not None:
            self.model.check_weights(batch, drawn, chances)
        self.model.accept(drawn)
        if self.calls % 8 == 1:
            self.check_memory()
        return batch

    def check_memory(self) -> None:
        stats, model = self.buffer.stats(), self.model
        assert stats["sample_calls"] == self.calls
        if model.draw.max_reads is not None:
            assert stats["rows_consumed"] == model.rows_consumed
        if model.draw.kind == "Shuffle":
            assert stats["epoch"] == model.epoch

    def check_windows(self, batch: dict[str, Any], anchors: list[Step]) -> None:
        """Place by place what the model gives, and of one piece by what the rows say of themselves."""
        model, view = self.model, self.model.view
        assert isinstance(view, Slices)
        places = {"place_indices"} if view.place_indices else set()
        assert set(batch) == model.batch_keys(True) | {"valid", "mask", "first"} | places
        windows = {anchor: model.window(anchor) for anchor in set(anchors)}
        for name in ("valid", "mask", "first"):
            assert batch[name].dtype == bool, name
            assert batch[name].tolist() == [getattr(windows[anchor], name) for anchor in anchors], name
        if view.place_indices:
            assert batch["place_indices"].dtype == np.int64
            assert batch["place_indices"].tolist() == [
                [step.serial if valid else -1 for step, valid in zip(window.shown, window.valid, strict=True)]
                for window in (windows[anchor] for anchor in anchors)
            ]
        # Every place is what a transition that starts at its row would be.
        shown = {step for window in windows.values() for step in window.shown}
        examples = {step: model.example(model.chain(step) if view.n_step > 1 else [step]) for step in shown}
        wanted = [[examples[step] for step in windows[anchor].shown] for anchor in anchors]
        for name, dtype in (("truncated", bool), ("discount", np.float32)):
            if name in batch:
                assert batch[name].dtype == dtype, name
                told = np.array([[values[name] for values in row] for row in wanted], dtype)
                assert batch[name].shape == told.shape, name
                np.testing.assert_allclose(batch[name], told, rtol=1e-6, err_msg=name)
        for path, leaf in model.fields.items():
            got = leaf_in(batch, path)
            if path == "reward" and view.n_step > 1:
                told = np.array([[values[path] for values in row] for row in wanted], leaf.dtype)
                assert (got.shape, got.dtype) == (told.shape, leaf.dtype)
                np.testing.assert_allclose(got, told, rtol=1e-6, atol=1e-6 * abs(told).max())
                continue
            parts = got if isinstance(got, dict) else {"": got}
            if "offsets" in parts:  # the places of all windows one after the other
                flat = got
            else:
                assert all(part.shape[:2] == (len(anchors), view.places) for part in parts.values()), path
                parts = {name: part.reshape(-1, *part.shape[2:]) for name, part in parts.items()}
                flat = parts if leaf.ragged else parts[""]
            assert_leaf(path, leaf, flat, [values[path] for row in wanted for values in row])
        check_of_one_piece(batch, view)

    def check(self) -> None:
        super().check()
        for step in self.model.rows():
            assert step.serial is not None


def check_of_one_piece(batch: dict[str, Any], view: Slices) -> None:
    """By the rows' own words: one stream, step after step, one episode unless windows may cross; anchors in place."""
    where, valid, mask = batch["where"], batch["valid"], batch["mask"]
    assert where.shape[1:] == (view.places, 3)
    both = valid[:, 1:]
    assert (both <= valid[:, :-1]).all()  # padding only at the right end
    assert valid[:, 0].all()
    stream, episode, step = np.moveaxis(where, 2, 0)
    assert (stream == stream[:, :1]).all()
    goes_on = (episode[:, 1:] == episode[:, :-1]) & (step[:, 1:] == step[:, :-1] + 1)
    starts = (episode[:, 1:] > episode[:, :-1]) & (step[:, 1:] == 0)
    assert (goes_on | (starts & (view.end == "cross")) | ~both).all()
    repeats = (where[:, 1:] == where[:, :-1]).all(axis=2)
    assert (repeats | both).all()
    assert (batch["first"] == (valid & (step == 0))).all()
    assert (mask <= valid).all()
    assert mask.any(axis=1).all()
    assert (mask.sum(axis=1) <= view.length).all()
    if view.end == "cross":
        assert (mask.sum(axis=1) == view.length).all()


def letters(stream: np.random.Generator, count: int, kinds: str = "........TURBM") -> str:
    return "".join(stream.choice(list(kinds), count))


def enough(starts: int) -> int:
    """Draws after which a start is missing once in a thousand million times."""
    return max(1, math.ceil(starts * (math.log(max(starts, 1)) + 21)))


def pairwise(axes: Sequence[Sequence[Any]], cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Extends each cell by one value of every axis, so that all pairs of values come as early as they can."""
    seen: set[Any] = set()
    combinations = list(itertools.product(*axes))
    found = []
    for cell in cells:

        def pairs(combination: tuple[Any, ...], cell: tuple[Any, ...] = cell) -> set[Any]:
            named = list(enumerate((*cell, *combination)))
            return set(itertools.combinations(named, 2))

        best = max(combinations, key=lambda combination: len(pairs(combination) - seen))
        seen |= pairs(best)
        combinations.remove(best)  # so that ties go round
        combinations.append(best)
        found.append((*cell, *best))
    return found


def chi_square(counts: Iterable[float], expected: Iterable[float]) -> float:
    """How many standard deviations the statistic lies above its mean."""
    counts, expected = np.array(list(counts), float), np.array(list(expected), float)
    freedom = max(len(counts) - 1, 1)
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# ---- pace ------------------------------------------------------------------------------------------------------------


@dataclass
class Limiter:
    """I rows inserted, S rows delivered, both since creation or clear; size is told by who keeps the rows."""

    min_size: int = 1
    samples_per_insert: float = 1.0
    min_diff: float = -math.inf
    max_diff: float = math.inf
    inserts: int = 0
    samples: int = 0

    def public(self) -> Any:
        return sw.Pace(self.min_size, self.samples_per_insert, self.min_diff, self.max_diff)

    def may_sample(self, n: int, size: int) -> bool:
        return size >= self.min_size and self.inserts * self.samples_per_insert - self.samples - n >= self.min_diff

    def may_add(self, n: int, size: int) -> bool:
        if size + n <= self.min_size:
            return True
        return (self.inserts + n) * self.samples_per_insert - self.samples <= self.max_diff

    def refuses_sample(self, n: int) -> bool:
        return n > self.max_diff - self.min_diff

    def refuses_add(self, n: int, size: int) -> bool:
        return n * self.samples_per_insert > self.max_diff - self.min_diff and size + n > self.min_size

    def clear(self) -> None:
        self.inserts = self.samples = 0


Reward = Callable[[np.ndarray, np.ndarray], np.ndarray]


def eta_mix(errors: np.ndarray, mask: np.ndarray, eta: float) -> np.ndarray:
    """One priority a window, over its learning rows."""
    rows = [np.abs(row[part].astype(np.float64)) for row, part in zip(errors, mask, strict=True)]
    return np.array([eta * row.max() + (1 - eta) * row.mean() for row in rows])
