"""Who may use a SequenceBuffer: the process that built it, while it is open, one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ClosedError, NotReady
from ..process import fork_count

__all__ = ["Gate", "wait_s"]

_LEAST_WAIT_S = 0.1  # for a lock: held for microseconds, but not by a thread that the system has stopped


def wait_s(deadline: float | None) -> float:
    """For a lock, until a deadline. A timeout is about room or samples: one of 0 still waits for a call's turn."""
    return -1 if deadline is None else max(_LEAST_WAIT_S, deadline - time.monotonic())


class Gate:
    """``lock`` is around everything that the buffer has in memory, and held for no disk work."""

    def __init__(self) -> None:
        # It knows its owner, so that an interrupt behind acquire() cannot leave it locked. Nobody takes it twice.
        self.lock: Any = threading.RLock()
        self.is_closed = False
        self._forks = fork_count()

    @property
    def is_mine(self) -> bool:
        return fork_count() == self._forks

    def check_process(self, where: str) -> None:
        """Before any lock: a forked child has copies of them that no thread of it may ever release."""
        if not self.is_mine:
            raise ClosedError(
                f"{where}: the buffer belongs to the parent of this process; build one here with a journal= of its "
                "own, or push into the parent's with sharpwave.sequences.stream.Pusher"
            )

    def check_open(self, where: str) -> None:
        if self.is_closed:
            more = "; the samples count as not used" if where.startswith("ack") else ""
            raise ClosedError(f"{where}: the buffer was closed{more}")

    @contextmanager
    def locked(self, where: str, deadline: float | None = None) -> Iterator[None]:
        self.check_process(where)
        wait = wait_s(deadline)
        try:
            if not self.lock.acquire(timeout=wait):
                raise NotReady(f"{where}: another thread has held the buffer's lock for {wait:.1f} s")
            yield
        finally:
            if self.lock._is_owned():
                self.lock.release()
