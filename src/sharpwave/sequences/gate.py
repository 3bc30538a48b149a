"""The gate of a SequenceBuffer: it admits the process that made the buffer, while it is open, one thread at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

from ..checks import seconds
from ..errors import ClosedError, NotReady
from ..process import fork_count

__all__ = ["Gate", "to_deadline", "wait_s"]

_LEAST_WAIT_S = 0.1
_TURN_S = 10.0


def to_deadline(where: str, timeout: Any) -> float | None:
    """The moment of the steady clock at which a timeout that begins now ends; None for never."""
    length = seconds(where, timeout)
    return None if length is None else time.monotonic() + length


def wait_s(deadline: float | None) -> float:
    """Seconds for a lock or a turn, until a deadline; -1 for ever.

    A timeout is about room or samples. One of 0 does not wait for these, but it waits for its turn: calls are made one
    after the other, and a busy machine is no reason to refuse one.
    """
    if deadline is None:
        return -1
    left = deadline - time.monotonic()
    return _TURN_S if left <= 0 else max(_LEAST_WAIT_S, left)


class Gate:
    """``lock`` is around everything that the buffer has in memory, and held for no disk work."""

    def __init__(self) -> None:
        # It knows its owner, so that an interrupt behind acquire() cannot leave it locked. No thread takes it twice.
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
                "own, or serve() the parent's and open it here by its address"
            )

    def check(self, where: str) -> None:
        """For calls that only read: the right process, and not closed."""
        self.check_process(where)
        self.check_open(where)

    def check_open(self, where: str) -> None:
        if self.is_closed:
            more = "; the samples count as not used" if where.startswith("ack") else ""
            raise ClosedError(f"{where}: the buffer was closed{more}")

    def locked(self, where: str, deadline: float | None = None) -> Any:
        """For a ``with``: the lock, before a deadline. ``close`` may run until it is taken: changes check again."""
        self.check(where)
        return self.lock if deadline is None else _InTime(self.lock, where, deadline)


class _InTime:
    """The lock of a gate, until a deadline.

    ``__exit__`` is the lock's own, which is one step for the interpreter. An interrupt (Ctrl-C) may raise where a
    Python function begins: a method here could end before it releases the lock, and all other threads would wait.
    """

    __slots__ = ("__exit__", "_deadline", "_lock", "_where")

    def __init__(self, lock: Any, where: str, deadline: float) -> None:
        self._lock, self._where, self._deadline = lock, where, deadline
        self.__exit__ = lock.__exit__

    def __enter__(self) -> None:
        wait = wait_s(self._deadline)
        try:
            if not self._lock.acquire(timeout=wait):
                raise NotReady(f"{self._where}: another thread has held the buffer's lock for {wait:.1f} s")
        except BaseException:
            try:  # noqa: SIM105 (suppress() is Python code: an interrupt may end it before the release)
                self._lock.release()  # asking before whether it is this thread's would be a second step
            except RuntimeError:
                pass  # it is not
            raise
