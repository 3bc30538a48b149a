"""Staleness: how many rollouts may start, and which samples are too old to train on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ..checks import whole
from ..errors import ClosedError, SchemaError
from ..process import fork_count
from .column import Column, is_tensor
from .sample import SequenceSample

__all__ = ["FRESH", "VERSIONS", "Admission", "are_all_older", "first_version", "mark_fresh"]

VERSIONS = "versions"  # the key that holds the version of each token
FRESH = "fresh"  # the key that tells which tokens may be learnt from


class Admission:
    """How many rollouts may start now, so that none is learnt from more than ``max_staleness`` versions later.

    AReaL's bound: ``min(max_concurrent - running, (max_staleness + version + 1) * batch_size - (accepted + running))``.
    ``accepted`` counts every sample that was put and not evicted, trained or not: whatever waits between the generator
    and the trainer keeps counting. It bounds all together; the buffer's ``max_staleness`` bounds each sample.

    Made by ``SequenceBuffer.admission``. For threads: every call is atomic.
    """

    def __init__(
        self, batch_size: int, max_staleness: int, max_concurrent: int | None, progress: Callable[[], tuple[int, int]]
    ) -> None:
        where = "admission()"
        self.batch_size = whole(where, "batch_size", batch_size)
        self.max_staleness = whole(where, "max_staleness", max_staleness, 0)
        self.max_concurrent = None if max_concurrent is None else whole(where, "max_concurrent", max_concurrent)
        self._progress = progress  # version and accepted, of one instant
        self._lock = threading.Lock()
        self._running = 0
        self._forks = fork_count()

    def capacity(self) -> int:
        """How many may start; negative when the bound was lowered by a recovery or a smaller batch."""
        with self._locked("capacity()"):
            return self._capacity()

    def start(self, count: int = 1) -> bool:
        """Whether ``count`` rollouts may start; if so, they count as running."""
        count = whole("start()", "count", count)
        with self._locked("start()"):
            if self._capacity() < count:
                return False
            self._running += count
            return True

    def finish(self, count: int = 1) -> None:
        """So many are no longer running: put into the buffer (which counts them from now on) or thrown away."""
        count = whole("finish()", "count", count)
        with self._locked("finish()"):
            if count > self._running:
                raise SchemaError(f"finish(): expected at most {self._running}, those that run, got {count}")
            self._running -= count

    @property
    def running(self) -> int:
        return self._running

    def _locked(self, where: str) -> threading.Lock:
        if fork_count() != self._forks:  # its lock may be held by a thread that is not in this process
            raise ClosedError(f"{where}: the gate belongs to the parent of this process; ask it there")
        return self._lock

    def _capacity(self) -> int:
        version, accepted = self._progress()
        bound = (self.max_staleness + version + 1) * self.batch_size - (accepted + self._running)
        return bound if self.max_concurrent is None else min(self.max_concurrent - self._running, bound)


def first_version(sample: SequenceSample) -> int | None:
    """The version of the oldest token, by the key ``versions``; None where there is no such key."""
    column = sample._columns.get(VERSIONS)
    if column is None or column.data is None:
        return None
    values = column.data.cpu().numpy() if is_tensor(column.data) else column.data
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise SchemaError(
            f"put(): key {VERSIONS!r}: expected one whole number a token, got {values.dtype} {values.shape}"
        )
    if not len(values):
        return None
    at = 0
    for length in (n for row in column.lens for n in row):
        if length > 1 and (values[at + 1 : at + length] < values[at : at + length - 1]).any():
            raise SchemaError(
                f"put(): key {VERSIONS!r} of {sample._ids[0]!r}: versions never fall within a sequence; "
                "a token is made by the newest policy of its time"
            )
        at += length
    return int(values.min())


def are_all_older(sample: SequenceSample, oldest: int) -> bool:
    """Whether every token is of a version below ``oldest``, by the key ``versions``; False without that key."""
    column = sample._columns.get(VERSIONS)
    return column is not None and column.data is not None and bool((column.data < oldest).all())


def mark_fresh(batch: SequenceSample, versions: list[int | None], oldest: int) -> tuple[SequenceSample, int]:
    """The batch with the key ``fresh``, and how many tokens in it are False.

    One truth value a token where the batch has ``versions``, else one a datum.
    """
    column = batch._columns.get(VERSIONS)
    fresh: Any
    if column is not None and column.data is not None:
        lens, fresh = column.lens, column.data >= oldest
        if is_tensor(fresh):
            stale = int((~fresh).sum())
            made = Column(lens, fresh, (), fresh.dtype)
            return batch._make(batch._ids, {**batch._columns, FRESH: made}, batch._metadata), stale
    else:
        lens = [[1]] * len(batch)
        fresh = np.array([version is None or version >= oldest for version in versions])
    made = Column(lens, fresh, (), fresh.dtype)
    return batch._make(batch._ids, {**batch._columns, FRESH: made}, batch._metadata), int((~fresh).sum())
