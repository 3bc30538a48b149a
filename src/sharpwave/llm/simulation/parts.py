"""A generator, weights and a learner that compute nothing and take simulated time."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from ...errors import NotReady, SchemaError
from ...sequences.sample import SequenceSample
from ..cut import Cut
from ..generators.answer import Answer
from ..generators.protocol import Health
from ..generators.sampling import Sampling
from ..weights import Published
from .device import Device

__all__ = ["Costs", "SimulatedGenerator", "SimulatedLearner", "SimulatedWeights", "log_normal_lengths"]


@dataclass(frozen=True)
class Costs:
    """Seconds: `decode_s + decode_slot_s * slots` a decode step, `train_s + train_token_s * tokens` a training step."""

    decode_s: float = 2e-4
    decode_slot_s: float = 2e-7
    train_s: float = 4e-3
    train_token_s: float = 5e-7
    swap_s: float = 1e-3


def log_normal_lengths(
    median: float = 64, sigma: float = 1.0, most: int = 1024, least: int = 8
) -> Callable[[int], int]:
    """Lengths of answers by seed, with a long tail."""

    def length(seed: int) -> int:
        drawn = math.exp(np.random.default_rng(seed).normal(0, sigma)) * median
        return min(most, max(least, int(drawn)))

    return length


@dataclass(eq=False)
class _Slot:
    length: int
    versions: list[int]
    end: asyncio.Future[Answer]


class SimulatedGenerator:
    """Answers whose lengths are drawn and whose tokens are zeros. `run` has to run beside its users.

    Args:
        device: What it computes on.
        slots: Answers at once; further ones wait.
        length: The length of an answer, by its seed.
        chunk: Answers end, begin and take new weights every so many tokens.
    """

    def __init__(
        self,
        device: Device,
        *,
        slots: int,
        costs: Costs | None = None,
        length: Callable[[int], int] | None = None,
        chunk: int = 8,
    ) -> None:
        self._device, self._slots, self._chunk = device, slots, chunk
        self._costs = Costs() if costs is None else costs
        self._length = log_normal_lengths() if length is None else length
        self.version = 0
        self._waiting: deque[_Slot] = deque()
        self._busy: list[_Slot] = []
        self._wake = asyncio.Event()
        self._next: tuple[int, asyncio.Future[None]] | None = None
        self._is_dead = False
        self.tokens = 0

    async def run(self) -> None:
        try:
            while True:
                if self._next is not None:
                    await self._swap()
                self._busy = [slot for slot in self._busy if not slot.end.done()]  # without cancelled ones
                while self._waiting and len(self._busy) < self._slots:
                    self._busy.append(self._waiting.popleft())
                if self._busy:
                    await self._decode()
                else:
                    self._wake.clear()
                    await self._wake.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """Every answer on its way is lost."""
        self._is_dead = True
        for slot in [*self._busy, *self._waiting]:
            if not slot.end.done():
                slot.end.set_exception(NotReady("generate(): the generator died"))
        self._busy, self._waiting = [], deque()
        if self._next is not None and not self._next[1].done():
            self._next[1].set_exception(NotReady("update(): the generator died"))

    async def _decode(self) -> None:
        left = np.array([slot.length - len(slot.versions) for slot in self._busy])
        steps = int(min(self._chunk, left.max()))
        made = np.minimum(left, steps)
        await self._device.use(self._costs.decode_s * steps + self._costs.decode_slot_s * int(made.sum()))
        self.tokens += int(made.sum())
        for slot, count in zip(self._busy, made.tolist(), strict=True):
            slot.versions += [self.version] * count
            if len(slot.versions) == slot.length and not slot.end.done():
                length = slot.length
                slot.end.set_result(Answer([0] * length, [-1.0] * length, slot.versions, "stop"))

    async def _swap(self) -> None:
        assert self._next is not None
        await self._device.use(self._costs.swap_s)
        (self.version, done), self._next = self._next, None
        if not done.done():
            done.set_result(None)

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        self._check()
        sampling = Sampling() if sampling is None else sampling
        length = min(self._length(sampling.seed or 0), sampling.max_tokens)
        slot = _Slot(length, [], asyncio.get_running_loop().create_future())
        self._waiting.append(slot)
        self._wake.set()
        return await slot.end

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        self._check()
        if version <= self.version:
            raise SchemaError(f"update(): version={version}, but the generator has {self.version}; versions only grow")
        self._next = (version, asyncio.get_running_loop().create_future())
        self._wake.set()
        await self._next[1]

    async def score(self, ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(ids) - 1)

    async def abort(self) -> int:
        slots = [slot for slot in [*self._busy, *self._waiting] if not slot.end.done()]
        for slot in slots:
            count = len(slot.versions)
            slot.end.set_result(Answer([0] * count, [-1.0] * count, slot.versions, "abort"))
        return len(slots)

    async def health(self) -> Health:
        self._check()
        return Health(self.version, len(self._busy), len(self._waiting))

    async def close(self) -> None:
        self.kill()

    def _check(self) -> None:
        if self._is_dead:
            raise NotReady("the generator is dead")


@dataclass
class SimulatedWeights:
    """Published versions without weights."""

    versions: list[int] = field(default_factory=list)

    def latest(self) -> Published | None:
        return Published(self.versions[-1], Path(f"v{self.versions[-1]}")) if self.versions else None


class SimulatedLearner:
    """Steps that only take time. It remembers which items are in its weights, as a model would."""

    def __init__(self, device: Device, weights: SimulatedWeights, costs: Costs | None = None) -> None:
        self._device, self._weights = device, weights
        self._costs = Costs() if costs is None else costs
        self.learnt: list[str] = []
        self.staleness: list[int] = []  # of each token trained on
        self.untaught: list[str] = []  # items of which no token was trained on
        self.saved: tuple[Cut, list[str]] | None = None
        self.ends: list[float] = []
        self.keys: frozenset[str] = frozenset()  # that every batch had

    async def train(self, batch: SequenceSample) -> Mapping[str, float]:
        self.keys = frozenset(batch.keys) & (self.keys or batch.keys)
        tokens = sum(map(sum, batch.seqlens["input_ids"]))
        await self._device.use(self._costs.train_s + self._costs.train_token_s * tokens)
        is_trained = np.asarray(batch["loss_mask"])
        if "fresh" in batch.keys:
            is_trained = is_trained & np.asarray(batch["fresh"])
        ends = np.cumsum([sum(lens) for lens in batch.seqlens["input_ids"]])
        parts = np.split(is_trained, ends[:-1])
        self.untaught += [one for one, part in zip(batch.ids, parts, strict=True) if not part.any()]
        made = np.asarray(batch["versions"])[is_trained]
        latest = self._weights.latest()
        self.staleness += ((0 if latest is None else latest.version) - made).tolist()
        self.learnt += batch.ids
        return {}

    async def publish(self) -> int:
        latest = self._weights.latest()
        version = 1 if latest is None else latest.version + 1
        self._weights.versions.append(version)
        self.ends.append(asyncio.get_running_loop().time())
        return version

    async def save(self, cut: Cut) -> None:
        self.saved = (cut, list(self.learnt))
