"""Saver: the thread that writes trajectories to the disk, in the order in which they were added."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from .. import files
from ..errors import StorageError
from ..files.origin import Origin
from .folder import UNLISTED, Folder
from .index import TrajectoryEntry, TrajectoryIndex, add_record, clear_record, drop_record, joined
from .kinds import Kinds
from .memory import Memory
from .trajectory import Leaf

__all__ = ["Drop", "Note", "Save", "SaveTogether", "SavedCallback", "Saver", "Work", "together"]

# How much may wait for the disk. Beyond it add() waits: a slow disk must not fill the memory.
_MOST_PENDING_BYTES, _MOST_PENDING = 256 * 2**20, 1_024
_TELLING_SHARE = 0.02  # the largest share of the thread's time that goes into writing RLinf's index files


class Save:
    """A trajectory that has no file yet."""

    def __init__(
        self, number: int, entry: TrajectoryEntry, slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...]
    ) -> None:
        self.number, self.entry, self.slab, self.leaves = number, entry, slab, leaves
        self.is_written = False


class SaveTogether:
    """Trajectories that one record lists when all their files are written, with the call that added them: after a kill
    the folder has all of them or none."""

    def __init__(self, saves: list[Save], origin: Origin) -> None:
        self.saves, self.origin = saves, origin
        self.is_claimed = False


class Note:
    """A record for the journal."""

    def __init__(self, record: files.Entry) -> None:
        self.record = record


class Drop:
    """Trajectories to delete, or all of them: first from the journal, then their files.

    Args:
        origin: The call of a client that deletes all of them.
    """

    def __init__(
        self, entries: list[TrajectoryEntry], names: list[str], is_all: bool = False, origin: Origin | None = None
    ) -> None:
        self.entries, self.names, self.is_all, self.origin = entries, names, is_all, origin


Work = Save | SaveTogether | Note | Drop


def _saves(part: Work) -> list[Save]:
    """The trajectories of a part that have no file yet."""
    if isinstance(part, SaveTogether):
        return part.saves
    return [part] if isinstance(part, Save) else []


class Saver:
    """One thread that does the work it is given, in that order, so that the disk holds the first k trajectories.

    A failed write stops the thread. Trajectories that are not written stay in memory and can be drawn. ``admit`` and
    ``wait`` make the thread try the failed write again.

    Args:
        saved: Called for every trajectory whose file and journal record are written.
        tell: Writes RLinf's index files of the folder; called at most every ``tell_every_s``, after changes.
        tell_every_s: None: never, which leaves it to ``close()`` of the buffer.
    """

    def __init__(
        self,
        folder: Folder,
        saved: Callable[[Save], None],
        tell: Callable[[], None] | None = None,
        tell_every_s: float | None = None,
    ) -> None:
        self._folder, self._saved = folder, saved
        self._tell, self._tell_every_s, self._told_until = tell, tell_every_s, 0.0
        self._work: deque[Work] = deque()
        self._pending = 0  # bytes
        self._given = self._done = 0  # parts, ever
        self._change = threading.Condition()
        self._is_ending = False
        self._failure: Exception | None = None
        self._is_told = True
        self._thread: threading.Thread | None = None

    # ---- for callers ------------------------------------------------------------------------------------------

    def start(self, where: str) -> None:
        """Starts the thread, where it does not run yet. After this put() cannot fail.

        Raises:
            StorageError: The system gives no thread.
        """
        with self._change:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="sharpwave-trajectories", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:
                raise StorageError(
                    f"{where}: cannot start the thread that saves trajectories: {error}; nothing was changed: allow "
                    "this process more threads (ulimit -u) or memory"
                ) from None
            self._thread = thread

    def put(self, work: list[Work]) -> None:
        """Gives the thread work; start() comes first."""
        with self._change:
            self._work += work
            self._given += len(work)
            self._pending += _slab_bytes(work)
            self._change.notify_all()

    def tell(self, where: str) -> None:
        """Raises a failure of the thread that no call has raised yet."""
        with self._change:
            if self._failure is not None and not self._is_told:
                self._raise(where)

    def admit(self, where: str, size: int) -> None:
        """Waits until there is room for ``size`` more bytes of unsaved data. Tries a failed write again first."""
        self.start(where)
        with self._change:
            if self._failure is not None:
                self._retry(where)
            while self._is_full(size) and self._failure is None:
                self._change.wait()
            if self._failure is not None:
                self._raise(where)

    def _is_full(self, size: int) -> bool:
        return len(self._work) > _MOST_PENDING or (self._pending > 0 and self._pending + size > _MOST_PENDING_BYTES)

    def wait(self, where: str) -> None:
        """Waits until all work that was given before this call is done; tries a failed write again."""
        with self._change:
            if self._failure is not None:
                self._retry(where)
            given = self._given  # other threads may give more meanwhile
            while self._done < given:
                if self._failure is not None or self._is_ending:
                    self._raise(where)
                self._change.wait()

    def end(self, where: str) -> None:
        """Writes what is left and ends the thread, also after a failed write."""
        try:
            self.wait(where)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the thread without writing what is left."""
        with self._change:
            self._is_ending = True
            self._change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def pending(self) -> int:
        """Trajectories that have no file yet."""
        with self._change:
            return sum(len(_saves(part)) for part in self._work)

    def _retry(self, where: str) -> None:
        """Makes the thread try the failed write again, and waits for the result."""
        done, self._failure = self._done, None
        self._change.notify_all()
        while self._work and self._done == done and self._failure is None and not self._is_ending:
            self._change.wait()
        if self._failure is not None:
            self._raise(where)

    def _raise(self, where: str) -> None:
        self._is_told = True
        left = sum(len(_saves(part)) for part in self._work)
        reason = self._failure or "the buffer was closed meanwhile"
        raise StorageError(
            f"{where}: {left} trajectories are not saved: {reason}; they are kept in memory, the next "
            "add, flush() or close() tries again"
        ) from self._failure

    # ---- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._is_ending and (not self._work or self._failure is not None):
                    left = self._until_telling()
                    if left is not None and left <= 0:
                        break
                    self._change.wait(left)
                if self._is_ending:
                    return
                batch = self._next() if self._failure is None else []
            self._tell_others()
            done, failure = self._write(batch) if batch else (0, None)
            with self._change:
                self._done += done
                for _ in range(done):
                    self._pending -= _slab_bytes([self._work.popleft()])
                if failure is not None:
                    self._failure, self._is_told = failure, False
                self._change.notify_all()

    def _next(self) -> list[Work]:
        """The parts that are done together: at most as many files as the folder recognises after a kill, or one part
        with more of them, which claims their names."""
        batch, count = list[Work](), 0
        for part in islice(self._work, UNLISTED):
            count += len(_saves(part))
            if batch and count > UNLISTED:
                break
            batch.append(part)
        return batch

    def _until_telling(self) -> float | None:
        """Seconds until RLinf's index files are due; None: they are up to date, or not asked for."""
        if self._tell_every_s is None or not self._folder.is_changed:
            return None
        return self._told_until - time.monotonic()

    def _tell_others(self) -> None:
        left = self._until_telling()
        if left is None or left > 0 or self._tell is None or self._tell_every_s is None:
            return
        begin = time.monotonic()
        with suppress(OSError):  # the folder stays marked as changed: close() tries again, and raises
            self._tell()
        end = time.monotonic()
        self._told_until = end + max(self._tell_every_s, (end - begin) / _TELLING_SHARE)

    def _write(self, batch: list[Work]) -> tuple[int, Exception | None]:
        """Does as much of the work as it can. Returns how many parts are done, and the failure that stopped it."""
        records: list[files.Entry] = []
        gone: list[str] = []
        saved: list[Save] = []
        done = 0
        failure: Exception | None = None
        for part in batch:
            try:
                if isinstance(part, Note):
                    records.append(part.record)
                elif isinstance(part, Drop):
                    records.append(clear_record(part.origin) if part.is_all else drop_record(part.entries))
                    gone += part.names
                elif isinstance(part, Save):
                    self._save(part)
                    records.append(add_record([part.entry]))
                    saved.append(part)
                else:
                    self._claim(part)
                    for one in part.saves:
                        self._save(one)
                    records.append(add_record([one.entry for one in part.saves], part.origin))
                    saved += part.saves
            except Exception as error:
                failure = error
                break
            done += 1
        try:
            self._folder.append(joined(records))
        except Exception as error:
            return 0, error
        try:
            self._folder.remove(gone)  # files that cannot be removed are tried again at the next call
        except OSError as error:
            failure = failure or error
        for part in saved:
            self._saved(part)
        return done, failure

    def _save(self, part: Save) -> None:
        if not part.is_written:
            self._folder.save(part.entry, part.slab, part.leaves)
            part.is_written = True

    def _claim(self, part: SaveTogether) -> None:
        if len(part.saves) > UNLISTED and not part.is_claimed:
            self._folder.claim(self._folder.index.name(one.entry) for one in part.saves)
            part.is_claimed = True


def together(work: list[Work], origin: Origin) -> list[Work]:
    """The work of one call of a client: its trajectories are listed together, and only then are others deleted."""
    saves = SaveTogether([part for part in work if isinstance(part, Save)], origin)
    notes: list[Work] = [part for part in work if isinstance(part, Note)]
    return [*notes, saves, *(part for part in work if isinstance(part, Drop))]


def _slab_bytes(work: Iterable[Work]) -> int:
    return sum(one.slab.nbytes for part in work for one in _saves(part))


class SavedCallback:
    """What the saving thread calls after a trajectory was written: the cache then keeps it as records.

    It refers to the parts of a store and not to the store itself. Otherwise the thread would keep a store alive that
    the program has dropped, or would run its finalizer, which waits for the end of this same thread.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def index_of(self, folder: Folder, patience_s: float = -1) -> Callable[[], TrajectoryIndex]:
        """Returns a function that makes the index of the trajectories that have files now.

        Args:
            patience_s: How long that function waits for the store's lock; -1: until it has it. The saving thread needs
                a limit: a load that changes to another folder holds the lock while it waits for the thread's end.
        """

        def index() -> TrajectoryIndex:
            if not self._lock.acquire(timeout=patience_s):
                raise BlockingIOError("the buffer is busy")
            try:
                entries = [entry for entry in self._entries.values() if entry.bytes]
            finally:
                self._lock.release()
            return replace(folder.index, entries=entries)

        return index

    def look_at(self, entries: dict[int, TrajectoryEntry], memory: Memory, kinds: Kinds) -> None:
        """Which trajectories there are, from now on."""
        self._entries, self._memory, self._kinds = entries, memory, kinds

    def __call__(self, part: Save) -> None:
        number, kind = part.number, part.entry.layout
        with self._lock:
            if self._entries.get(number) is not part.entry:
                return  # it was deleted meanwhile
            self._memory.saved(number)
            if not self._memory.is_cached(number):
                return
            core, layout = self._kinds.records(kind), self._kinds.core_layout(kind)
        records = core.make(part.slab, layout)
        with self._lock:
            if self._entries.get(number) is part.entry:
                self._memory.change(number, (records, core.core))
