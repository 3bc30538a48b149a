"""The learner's lane of a run: take a batch, train, publish, say so, now and then a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal, Protocol

from ..errors import StaleHandle, StorageError
from ..sequences.sample import SequenceSample
from .clock import Clock
from .controller import Controller
from .cut import Cut
from .generators.protocol import Generator
from .weights import Published

__all__ = ["Learns", "Versions", "follow", "train"]


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
    beats, is_saved = asyncio.ensure_future(_beat(controller, owner, clock, beat_s)), True
    try:
        if save_every is not None and step == 0:  # a learner that dies before its first checkpoint begins here
            await learner.save(await controller.checkpoint())
        while steps is None or step < steps:
            lease = await controller.take(owner)
            if lease is None:
                break
            is_saved = False
            await learner.train(lease.batch)
            version, step = await learner.publish(), step + 1
            try:
                await controller.trained(lease, version, step)
            except StaleHandle:  # the controller was restarted, or took this learner for dead
                await controller.confirm(lease.batch.ids, owner, version, step)
            if save_every is not None and step % save_every == 0:
                await learner.save(await controller.checkpoint())
                is_saved = True
        if save_every is not None and not is_saved:
            await learner.save(await controller.checkpoint())
        return step
    finally:
        beats.cancel()


async def _beat(controller: Controller, owner: str, clock: Clock, beat_s: float) -> None:
    while True:
        await clock.sleep(beat_s)
        controller.hear(owner)


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
