"""Lanes of a run: the learner's (take a batch, train, publish, say so), a stage's, and a generator that follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Literal, Protocol

from ..errors import StaleHandle, StorageError
from ..sequences.sample import SequenceSample
from .clock import Clock
from .controller import Controller
from .cut import Cut
from .generators.protocol import Generator
from .weights import Published

__all__ = ["Learns", "Versions", "complete", "follow", "train"]


class Learns(Protocol):
    """What trains. Its calls may take long: they do not block the event loop."""

    async def train(self, batch: SequenceSample) -> Mapping[str, float]:
        """One step. Returns numbers for the log."""
        ...

    async def publish(self) -> int:
        """Puts the weights in place. Returns their version, above every one that was published before."""
        ...

    async def save(self, cut: Cut) -> None:
        """Writes a checkpoint of model, optimizer and `cut`, completely or not at all."""
        ...


class Versions(Protocol):
    """Where versions are published; `Weights` is one."""

    def latest(self) -> Published | None: ...


async def train(
    controller: Controller,
    learner: Learns,
    *,
    clock: Clock,
    owner: str = "learner",
    step: int = 0,
    steps: int | None = None,
    save_every: int | None = None,
    beat_s: float = 5.0,
) -> int:
    """Trains until the controller has no more batches, or `steps` steps are made. Returns the number of steps.

    Args:
        step: Steps that the learner has made before.
        save_every: A checkpoint after so many steps, before the first and after the last one; None for none.
        beat_s: How often the controller hears that the learner is alive, also during a long step.
    """
    beats, is_saved = asyncio.ensure_future(_beat(controller, owner, clock, beat_s)), False
    try:
        if save_every is not None and step == 0:  # a learner that dies before its first checkpoint begins here
            await learner.save(await controller.checkpoint(step))
        while steps is None or step < steps:
            lease = await controller.take(owner)
            if lease is None and (is_saved or save_every is None):
                return step
            if lease is None:  # asks once more: a controller that was restarted meanwhile may have items again
                await learner.save(await controller.checkpoint(step))
                is_saved = True
                continue
            is_saved = False
            await learner.train(lease.batch)
            version, step = await learner.publish(), step + 1
            try:
                await controller.trained(lease, version, step)
            except StaleHandle:  # the controller was restarted, or took this learner for dead
                await controller.confirm(lease.batch.ids, owner, version, step)
            if save_every is not None and (step % save_every == 0 or step == steps):
                await learner.save(await controller.checkpoint(step))
        return step
    finally:
        beats.cancel()


async def _beat(controller: Controller, owner: str, clock: Clock, beat_s: float) -> None:
    while True:
        await clock.sleep(beat_s)
        controller.hear(owner)


async def complete(
    controller: Controller,
    consumer: str,
    make: Callable[[SequenceSample], Awaitable[SequenceSample]],
    *,
    owner: str,
    clock: Clock,
    beat_s: float = 5.0,
) -> None:
    """The lane of a stage before training: adds the keys that `make` gives to samples, until the run is over.

    Args:
        consumer: The stage's name in the run's dataflow, for instance "reference".
        make: From leased samples to samples of the same ids with the stage's keys.
    """
    beats = asyncio.ensure_future(_beat(controller, owner, clock, beat_s))
    try:
        while (lease := await controller.lend(consumer, owner)) is not None:
            made = await make(lease.batch)
            with suppress(StaleHandle):  # the controller was restarted meanwhile, and hands the samples out again
                await controller.amend(lease, made)
    finally:
        beats.cancel()


async def follow(
    versions: Versions,
    generator: Generator,
    *,
    clock: Clock,
    poll_s: float = 0.002,
    kv: Literal["keep", "recompute"] = "keep",
) -> None:
    """Keeps a generator at the newest published version, for ever. Answers on their way go on."""
    have = (await generator.health()).version
    while True:
        found = versions.latest()
        if found is not None and found.version > have:
            try:
                await generator.update(found.path, found.version, kv=kv)
            except (StorageError, StaleHandle):
                if found.path.exists():
                    raise
                continue  # newer versions took its place while it was read
            have = found.version
        else:
            await clock.sleep(poll_s)
