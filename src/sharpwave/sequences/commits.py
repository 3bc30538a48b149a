"""Commits: a change is checked, written to the journal, then made in memory; all of it or nothing.

There are two locks. ``_writing`` is held for each change that has a record, from its check until it is made, disk work
included; it is taken first, and never on an event loop. The gate's lock protects memory alone: a get, and every
coroutine, needs only that one, so neither waits for a disk.

With a journal, coroutines and the main thread hand their changes to one worker thread. Coroutines do so because of the
disk. The main thread does so because a signal's exception (Ctrl-C) may come between any two of its instructions; one
between the write and the change would leave a buffer that differs from its journal.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..errors import NotReady, SharpwaveError, StorageError
from ..files import Journal
from .gate import Gate, wait_s
from .history import needed
from .store import Change, Store
from .turns import Turns
from .worker import Worker

__all__ = ["Commits"]

_Result = TypeVar("_Result")
_Plan = Callable[[], Change[_Result] | None]


class Commits:
    """Makes the changes of one buffer, for threads and coroutines, and wakes the calls that wait for them."""

    def __init__(self, gate: Gate, store: Store, turns: Turns) -> None:
        self._gate, self._store, self._turns = gate, store, turns
        self._writing = threading.Lock()
        self._worker: Worker | None = None

    def commit(self, where: str, plan: _Plan[_Result], deadline: float | None = None) -> _Result | None:
        """Makes the change that ``plan``, called with the lock held, gives; None where it gives none.

        Not on an event loop where there is a journal.
        """
        gate, store = self._gate, self._store
        gate.check_process(where)
        if store.journal is None:
            with gate.lock:
                gate.check_open(where)
                change = plan()
                return None if change is None else self._turns.make(change)
        return self._undisturbed(where, lambda: self._write(where, plan, deadline), deadline)

    def _write(self, where: str, plan: _Plan[_Result], deadline: float | None) -> _Result | None:
        gate, store = self._gate, self._store
        with self._journal(where, deadline) as journal:
            with gate.lock:
                gate.check_open(where)
                change = plan()
                if change is None:
                    return None
                unsaid = store.unsaid()
            try:
                if change.records:
                    journal.append([*unsaid, *change.records])
            except BaseException:
                with gate.lock:
                    change.undo()
                raise
            with gate.lock:
                if change.records:
                    store.say(unsaid)
                result = self._turns.make(change)
                late = store.unsaid()
            if late:
                try:
                    journal.append(late)
                except StorageError:
                    return result  # the call itself is done; the next one writes this first, or fails
                with gate.lock:
                    store.say(late)
            return result

    async def commit_async(self, where: str, plan: _Plan[_Result], deadline: float | None = None) -> _Result | None:
        """``commit`` without disk work on the event loop."""
        if self._store.journal is None:
            return self.commit(where, plan)
        return await self.off_loop(where, lambda: self._write(where, plan, deadline), deadline)

    async def off_loop(self, where: str, work: Callable[[], _Result], deadline: float | None = None) -> _Result:
        wait = wait_s(deadline)
        try:
            return await self._started(where).do(work, None if wait < 0 else wait)
        except TimeoutError as error:
            if isinstance(error, SharpwaveError):
                raise  # of the work itself
            raise self._still_writing(where) from None

    def _still_writing(self, where: str) -> NotReady:
        return NotReady(f"{where}: other calls have written the journal until the timeout; give a larger one")

    def _undisturbed(self, where: str, work: Callable[[], _Result], deadline: float | None = None) -> _Result:
        """The result of work that no signal's exception may cut in two."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        task = self._started(where).submit(work)
        try:
            # Once it runs it has the deadline itself.
            if not task.wait(wait_s(deadline)) and task.cancel():
                raise self._still_writing(where)
            task.wait()
        except BaseException:
            task.cancel()  # not begun: then it never is
            raise
        return task.result()

    def _started(self, where: str) -> Worker:
        # A thread of its own: the event loop's may all be busy with calls that wait for this one.
        with self._gate.locked(where):
            self._gate.check_open(where)
            if self._worker is None:
                self._worker = Worker("sharpwave-journal")
            return self._worker

    @contextmanager
    def _journal(self, where: str, deadline: float | None) -> Iterator[Journal]:
        """The journal, for one thread at a time."""
        wait = wait_s(deadline)
        if not self._writing.acquire(timeout=wait):
            raise NotReady(f"{where}: another call has written the journal for {wait:.1f} s; give a larger timeout")
        try:
            assert self._store.journal is not None
            yield self._store.journal
        finally:
            self._writing.release()

    def rewrite(self, where: str) -> None:
        """Rewrites the journal without the records that no restart needs. Gets go on meanwhile; writes wait."""
        error = self._undisturbed(where, lambda: self._leave_out(where))
        if error is not None:
            message = f"{where}: the name is written, but the journal could not be made smaller: {error}"
            warnings.warn(message, stacklevel=3)

    def _leave_out(self, where: str) -> StorageError | None:
        with self._journal(where, None) as journal:
            with self._gate.lock:
                self._gate.check_open(where)
                keep = self._store.needed()
                waste, self._store.waste_bytes = self._store.waste_bytes, 0
            try:
                journal.replace(needed(journal, *keep))
            except StorageError as error:
                with self._gate.lock:
                    self._store.waste_bytes += waste
                return error
        return None

    def flush(self, where: str) -> None:
        """Waits until the journal is on the disk."""
        self._gate.check(where)
        if self._store.journal is not None:
            self._undisturbed(where, lambda: self._flush(where))

    async def flush_async(self, where: str) -> None:
        self._gate.check(where)
        if self._store.journal is not None:
            await self.off_loop(where, lambda: self._flush(where))

    def _flush(self, where: str) -> None:
        with self._journal(where, None) as journal:
            with self._gate.lock:
                self._gate.check_open(where)
                unsaid = self._store.unsaid()
            if unsaid:
                journal.append(unsaid)
                with self._gate.lock:
                    self._store.say(unsaid)
            journal.flush()

    def close(self) -> None:
        """Every waiting call is woken, and finds the buffer closed; the journal has everything, on the disk."""
        with self._writing:
            with self._gate.lock:
                if self._gate.is_closed:
                    return
                self._gate.is_closed = True
                self._turns.wake_all()
                unsaid = self._store.unsaid()
            if self._worker is not None:
                self._worker.stop()
            journal = self._store.journal
            if journal is not None:
                try:
                    if unsaid:
                        journal.append(unsaid)
                finally:
                    journal.close()
