"""Insight into a buffer: why a batch is not ready, and its numbers. Both read every sample: not for hot loops."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from .dataflow import Dataflow
from .index import SampleIndex
from .leases import Book
from .lines import HeldSample

__all__ = ["explain", "stats"]


def explain(flow: Dataflow, index: SampleIndex, book: Book, name: str, now: float) -> str:
    line = index.lines[name]
    consumer = line.consumer
    ready = line.ready
    said = [f"{name!r}: {ready} of {consumer.batch_size} samples ready; {len(index.entries)} held"]
    if line.waiters:
        said[0] += f"; {len(line.waiters)} waiting for a batch"
    wanting = [entry for entry in index.entries.values() if not entry.done & line.bit]
    lacking = Counter(
        key for entry in wanting if entry.have & line.need != line.need for key in consumer.inputs - entry.sample.keys
    )
    for key, count in sorted(lacking.items(), key=lambda pair: (-pair[1], pair[0])):
        said.append(f"{count} lack {key!r}, {_maker(flow, index, book, key)}")
    complete = [entry for entry in wanting if entry.have & line.need == line.need and not entry.gone]
    if consumer.window is not None and (behind := sum(bool(e.queued & line.bit) for e in complete) - ready) > 0:
        said.append(f"{behind} are complete but not among the oldest window={consumer.window}")
    if consumer.group_size is not None and (apart := sum(bool(e.queued & line.bit) for e in complete) - ready) > 0:
        said.append(f"{apart} wait for the rest of their group of {consumer.group_size}")
    waiting = [entry for entry in wanting if not entry.leased & line.bit]
    if waiting:
        oldest = min(waiting, key=lambda entry: (entry.birth, entry.serial))
        said.append(f"the oldest, {oldest.sample._ids[0]!r}, has waited {now - oldest.put_at:.1f} s")
    mine = [claim for claim in book.out.values() if claim.line is line]
    if mine:
        held = sum(len(claim.entries) for claim in mine)
        owners = sorted({claim.owner or "no name" for claim in mine})
        longest = now - min(claim.begun for claim in mine)
        said.append(f"{held} are leased by {', '.join(owners)}, the longest for {longest:.1f} s")
    done = len(index.entries) - len(wanting)
    if done:
        said.append(f"{done} are done with and wait for {', '.join(_late(index, line.bit)) or 'no consumer'}")
    return "\n  ".join(said)


def _maker(flow: Dataflow, index: SampleIndex, book: Book, key: str) -> str:
    maker = flow.producers.get(key)
    if maker is None:
        return "which no consumer makes: put() or amend() has to bring it"
    leased = sum(len(claim.entries) for claim in book.out.values() if claim.line.consumer.name == maker)
    return f"which {maker!r} makes ({index.lines[maker].ready} ready for it, {leased} leased to it)"


def _late(index: SampleIndex, bit: int) -> list[str]:
    """The consumers that are not done with samples that this one is done with."""
    held = [entry for entry in index.entries.values() if entry.done & bit]
    return [name for name, line in index.lines.items() if any(not entry.done & line.bit for entry in held)]


def stats(
    index: SampleIndex, book: Book, capacity: int, counters: dict[str, int], version: int, now: float
) -> dict[str, Any]:
    entries = list(index.entries.values())
    ages = np.array([now - entry.put_at for entry in entries]) if entries else np.zeros(1)
    return {
        "size": len(entries),
        "capacity": capacity,
        "tokens": index.tokens,
        "data_bytes": index.bytes,
        "version": version,
        "staleness": {version - made: count for made, count in index.versions().items()},
        "mean_age_s": float(ages.mean()),
        "max_age_s": float(ages.max()),
        "leases": len(book.out),
        "leased": sum(len(claim.entries) for claim in book.out.values()),
        "consumers": {
            name: {
                "ready": line.ready,
                "taken": line.taken,
                "waiting": len(line.waiters),
                "done": _done(entries, line.bit),
            }
            for name, line in index.lines.items()
        },
        **counters,
    }


def _done(entries: list[HeldSample], bit: int) -> int:
    return sum(bool(entry.done & bit) for entry in entries)
