"""Commits: a change is checked, written to the journal, then made in memory; all of it or nothing.

With a journal one worker thread does this for all calls. A call hands over a request and waits for it. The worker takes
the requests in the order in which they came, as many as do not depend on each other, and writes their records in one
go: requests that come while it writes are the next group. So calls that come at the same time share one write, and
with ``sync`` one wait for the disk. ``docs/decisions/0018-group-commit.md`` has the order that is kept, and why.

There are two locks. ``_writing`` is held for each group, from its checks until it is made, disk work included; it is
taken first, and never on an event loop. The gate's lock protects memory alone: a get, and every coroutine, needs only
that one, so neither waits for a disk.

A thread other than the caller's also keeps signals out: the exception of one (Ctrl-C) may come between any two
instructions of the main thread, and one between the write and the change would leave a buffer that differs from its
journal. The caller meanwhile computes what the worker needs next (``Intake.prepare``), and changes nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import NotReady, SharpwaveError, StorageError
from ..files import Journal, warn_caller
from .change import Change, Later
from .gate import Gate, wait_s
from .history import needed
from .store import Store
from .turns import Turns
from .worker import Task, Worker, outcome

__all__ = ["Commits"]

_Result = TypeVar("_Result")
_Plan = Callable[[], Change[_Result] | None]
_MOST_TOGETHER = 64  # requests of a group: bounds the time for which the gate's lock is held


class _Request(Task[_Result]):
    """A change that a call asks for. ``plan`` is called with the gate's lock held, perhaps more than once."""

    def __init__(self, where: str, plan: _Plan[_Result], tell: Callable[[], None] | None = None) -> None:
        super().__init__(lambda: None, tell)  # type: ignore[arg-type, return-value]
        self.where, self.plan = where, plan
        self.alone = False  # its group could not be written: it is tried without the others


class Commits:
    """Makes the changes of one buffer, for threads and coroutines, and wakes the calls that wait for them."""

    def __init__(self, gate: Gate, store: Store, turns: Turns) -> None:
        self._gate, self._store, self._turns = gate, store, turns
        self._writing = threading.Lock()
        self._worker: Worker | None = None
        self._requests: deque[_Request[Any]] = deque()  # in the order of their commits
        self._begun: deque[_Request[Any]] = deque()  # taken from there, and not yet in a group that was written

    def commit(
        self,
        where: str,
        plan: _Plan[_Result],
        deadline: float | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> _Result | None:
        """Makes the change that ``plan``, called with the lock held, gives; None where it gives none.

        Not on an event loop where there is a journal.

        Args:
            meanwhile: Work on this thread that helps the worker, which begins at the same time.
        """
        gate, store = self._gate, self._store
        gate.check_process(where)
        if store.journal is None:
            with gate.lock:
                gate.check_open(where)
                change = plan()
                return None if change is None else self._turns.make(change)
        request = _Request(where, plan)
        try:
            self._hand_over(where, request)
            meanwhile()
            is_late = not request.wait(wait_s(deadline)) and request.cancel()
            if not is_late:
                request.wait()
        except BaseException:
            # Not begun: then it never is. Begun: it reads the samples' arrays, which are the caller's again after this.
            if not request.cancel():
                request.wait()
            raise
        if is_late:
            raise self._still_writing(where)
        return request.result()

    async def commit_async(self, where: str, plan: _Plan[_Result], deadline: float | None = None) -> _Result | None:
        """``commit`` without disk work on the event loop."""
        if self._store.journal is None:
            return self.commit(where, plan)
        wait = wait_s(deadline)
        try:
            return await outcome(
                lambda tell: _Request(where, plan, tell),
                lambda request: self._hand_over(where, request),
                None if wait < 0 else wait,
                stays=True,
            )
        except TimeoutError as error:
            if isinstance(error, SharpwaveError):
                raise  # of the change itself
            raise self._still_writing(where) from None

    def _hand_over(self, where: str, task: Task[Any]) -> None:
        """To the worker. In one step with the check: behind ``close`` the worker would never come to it."""
        with self._gate.locked(where):
            self._gate.check_open(where)
            if self._worker is None:
                # A thread of its own: the event loop's may all be busy with calls that wait for this one.
                self._worker = Worker()
            if isinstance(task, _Request):
                self._requests.append(task)
                task = Task(self._serve)
            self._worker.hand_over(task)

    def _serve(self) -> None:
        """Until no request is left. The worker's."""
        while self._requests or self._begun:
            with self._journal() as journal:
                group = self._plan_group()
                try:
                    self._write(journal, group)
                except BaseException as error:
                    for request, _ in group:
                        request.fail(error)

    def _plan_group(self) -> list[tuple[_Request[Any], Change[Any]]]:
        """The next requests that do not depend on each other's changes, none of which is made yet."""
        group: list[tuple[_Request[Any], Change[Any]]] = []
        written: set[int] = set()  # serials of samples that the group changes
        with self._gate.lock:
            while len(group) < _MOST_TOGETHER and (request := self._take()) is not None:
                try:
                    self._gate.check_open(request.where)
                    change = request.plan()
                except Later:
                    self._begun.appendleft(request)
                    break
                except BaseException as error:
                    request.fail(error)
                    continue
                if change is None:
                    request.finish(None)
                    continue
                is_alone = request.alone or change.alone
                if group and (is_alone or not written.isdisjoint(change.reads)):
                    change.undo()
                    self._begun.appendleft(request)
                    break
                group.append((request, change))
                written.update(change.writes)
                if is_alone:
                    break
        return group

    def _take(self) -> _Request[Any] | None:
        if self._begun:
            return self._begun.popleft()
        while self._requests:
            request = self._requests.popleft()
            if request.begin():
                return request
        return None

    def _write(self, journal: Journal, group: list[tuple[_Request[Any], Change[Any]]]) -> None:
        """The records of a group in one go, in the order of the requests; then its changes, in the same order."""
        gate, store = self._gate, self._store
        records = [record for _, change in group for record in change.records]
        unsaid = []
        if records:
            with gate.lock:
                unsaid = store.unsaid()
            try:
                journal.append([*unsaid, *records])
            except BaseException as error:
                with gate.lock:
                    for _, change in reversed(group):
                        change.undo()
                    self._turns.wake_putter()  # there is room again
                if len(group) == 1:
                    group[0][0].fail(error)
                # Else each for itself: a call fails only because of its own record.
                for request, _ in reversed(group) if len(group) > 1 else ():
                    request.alone = True
                    self._begun.appendleft(request)
                group.clear()
                return
        results = []
        with gate.lock:
            store.say(unsaid)
            for request, change in group:
                results.append((request, self._turns.make(change)))
            late = store.unsaid()
        if late:
            try:
                journal.append(late)
            except StorageError:
                late = []  # the calls themselves are done; the next one writes this first, or fails
            with gate.lock:
                store.say(late)
        group.clear()
        for request, result in results:
            request.finish(result)

    async def off_loop(self, where: str, work: Callable[[], _Result]) -> _Result:
        return await outcome(lambda tell: Task(work, tell), lambda task: self._hand_over(where, task), None)

    def _still_writing(self, where: str) -> NotReady:
        return NotReady(f"{where}: other calls have written the journal until the timeout; give a larger one")

    def _undisturbed(self, where: str, work: Callable[[], _Result]) -> _Result:
        """The result of work that no signal's exception may cut in two."""
        task = Task(work)
        try:
            self._hand_over(where, task)
            task.wait()
        except BaseException:
            task.cancel()  # not begun: then it never is
            raise
        return task.result()

    @contextmanager
    def _journal(self) -> Iterator[Journal]:
        """The journal, for one thread at a time: the worker's, or the one that closes the buffer."""
        with self._writing:
            assert self._store.journal is not None
            yield self._store.journal

    def rewrite(self, where: str) -> None:
        """Rewrites the journal without the records that no restart needs. Gets go on meanwhile; writes wait."""
        _warn(where, self._undisturbed(where, lambda: self._leave_out(where)))

    async def rewrite_async(self, where: str) -> None:
        _warn(where, await self.off_loop(where, lambda: self._leave_out(where)))

    def _leave_out(self, where: str) -> StorageError | None:
        with self._journal() as journal:
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
        with self._journal() as journal:
            with self._gate.lock:
                self._gate.check_open(where)
                unsaid = self._store.unsaid()
            if unsaid:
                journal.append(unsaid)
                with self._gate.lock:
                    self._store.say(unsaid)
            journal.flush()

    def close(self) -> None:
        """Every waiting call is woken, and finds the buffer closed; the journal has everything, on the disk.

        Called again, it does what an interrupt kept it from.
        """
        with self._writing:
            with self._gate.lock:
                self._gate.is_closed = True
                self._turns.wake_all()
                unsaid = self._store.unsaid()
            if self._worker is not None:
                self._worker.stop()
            journal = self._store.journal
            if journal is not None and journal.is_open:
                try:
                    if unsaid:
                        journal.append(unsaid)
                        self._store.say(unsaid)
                finally:
                    journal.close()


def _warn(where: str, error: StorageError | None) -> None:
    if error is not None:
        warn_caller(f"{where}: the name is written, but the journal could not be made smaller: {error}")
