"""TrajectoryStore: the trajectories of one buffer, in memory or in a folder, and what is drawn from them."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import told
from ..errors import ClosedError, SchemaError, SharpwaveError, StaleHandle, StorageError
from ..files.origin import Origin
from ..files.save_path import make_parents
from .checkpoint import link_from, open_checkpoint, shard, write_checkpoint, write_held
from .contents import Contents
from .folder import Folder
from .host_arrays import DrawnArrays, TrajectoryArrays
from .incoming import Incoming, read_incoming
from .index import TrajectoryEntry, TrajectoryIndex, rows_record
from .kinds import Kinds
from .layout import Layout, capture, plan
from .mapped import read_slab
from .saver import Drop, Note, SavedCallback, Saver, Work, together
from .trajectory import BITS, DTYPES, Leaf, Parts, Trajectory, arrange
from .upstream import storage_dir_of

__all__ = ["DEFAULT_FORMAT", "TrajectoryStore", "to_folder"]

DEFAULT_FORMAT = "safetensors"
_PATIENCE_S = 0.1  # how long the saving thread waits for the store's lock before it tries again later


class TrajectoryStore:
    """What a buffer of trajectories does: its contents, the folder, the saving thread and the locks.

    ``sharpwave.TrajectoryReplayBuffer`` and RLinf's buffer in ``sharpwave.compat.rlinf`` are two sets of names for it.
    They check the arguments; ``where`` is the name of their call, for messages.

    Threads may call it at the same time. ``_adding`` is held by calls that change which trajectories there are.
    ``_lock`` guards the state; it is taken after ``_adding``, and only a load holds it while it waits for the disk.

    Args:
        folder: Where the files are; None keeps trajectories in memory only.
        format: The format of files to come; None: that of the newest file in the folder or the loaded checkpoint.
        capacity: Trajectories kept at most; None: no bound. May be set; the next add deletes the oldest.
        max_bytes: The same in bytes.
        cache: Trajectories in memory at most. None: all; without a folder it must be None.
        cache_bytes: Bytes in memory at most, with a folder.
        device: Where batches and trajectories go, as tensors; None: NumPy arrays.
        recover: Opens a damaged folder, and loads a damaged checkpoint, with what is whole in it.
        drops_non_arrays: Leaves out lists, strings and arrays of one axis, as RLinf does; else they are an error.
        follows_checkpoints: A load continues in the folder that the checkpoint was taken of, if that exists, else in
            the checkpoint; else it links the files into ``folder``.
        tell_rlinf_every_s: How often RLinf's index files are written while the folder is open; None: on close only.
    """

    def __init__(
        self,
        where: str,
        folder: Path | None,
        *,
        format: str | None,
        seed: int,
        capacity: int | None = None,
        max_bytes: int | None = None,
        cache: int | None = None,
        cache_bytes: int | None = None,
        allow_pickle: bool = False,
        device: Any = None,
        recover: bool = False,
        drops_non_arrays: bool = False,
        follows_checkpoints: bool = False,
        tell_rlinf_every_s: float | None = None,
    ) -> None:
        self.format, self.capacity, self.device = format or DEFAULT_FORMAT, capacity, device
        self._keeps_format = format is None
        self._max_bytes, self._cache, self._cache_bytes = max_bytes, cache, cache_bytes
        self._allow_pickle, self._recover, self._drops_non_arrays = allow_pickle, recover, drops_non_arrays
        self._follows_checkpoints, self._tell_rlinf_every_s = follows_checkpoints, tell_rlinf_every_s
        self._lock, self._adding = threading.Lock(), threading.Lock()
        self._pid, self.is_closed = os.getpid(), False
        self.address, self.open_options = None, dict[str, Any]()
        self._folder: Folder | None = None
        self._saver: Saver | None = None
        self._kinds = Kinds(TrajectoryIndex(seed=seed))
        slabs: list[np.ndarray[Any, Any]] = []
        if folder is not None:
            opened = Folder(folder, where, seed, allow_pickle, recover)
            try:
                slabs = self._read_newest(where, opened.index, opened.file)
            except BaseException:
                opened.close()
                raise
            self._keep_format(opened.index)
            self._attach(opened)
        self._take_over(slabs)

    def _keep_format(self, index: TrajectoryIndex) -> None:
        if self._keeps_format and index.entries:
            self.format = index.layouts[index.entries[-1].layout].format

    def _attach(self, folder: Folder) -> None:
        """Makes a folder this store's."""
        self._folder = self._kinds = folder
        self._on_saved = SavedCallback(self._lock)
        tell = functools.partial(folder.tell_rlinf, self._on_saved.index_of(folder, _PATIENCE_S), self.format)
        self._saver = Saver(folder, self._on_saved, tell, self._tell_rlinf_every_s)
        self._finish = weakref.finalize(self, _finish, self._saver, folder, self._on_saved, self.format, self._pid)

    def _read_newest(
        self, where: str, index: TrajectoryIndex, file: Callable[[TrajectoryEntry], Path]
    ) -> list[np.ndarray[Any, Any]]:
        """Reads and checks the files of the trajectories that go into memory."""
        newest = len(index.entries) if self._cache is None else min(self._cache, len(index.entries))
        entries = index.entries[len(index.entries) - newest :]
        return [read_slab(where, index, entry, file(entry), self._allow_pickle) for entry in entries]

    def _take_over(self, newest: list[np.ndarray[Any, Any]]) -> None:
        """Takes over the trajectories and the random stream of the index; ``newest``: slabs of the last of them."""
        self._contents = Contents(self._kinds, self._folder, self._cache, self._cache_bytes, self._allow_pickle, newest)
        if self._folder is not None:
            self._on_saved.look_at(self._contents.entries, self._contents.memory, self._kinds)
        self._plans: dict[tuple[Any, ...], Layout] = {}

    # ---- what it holds ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._contents)

    def count(self, where: str) -> int:
        """Trajectories, of a store that is open."""
        self.check_open(where, tells_failures=False)
        return len(self._contents)

    @property
    def place(self) -> str:
        """The folder as text, or that there is none."""
        return "in memory" if self._folder is None else str(self._folder.path)

    def summary(self) -> str:
        """How much it holds, or that it is closed."""
        return "closed" if self.is_closed else f"{len(self)} trajectories, {self.transitions} transitions"

    @property
    def transitions(self) -> int:
        """Transitions in all trajectories."""
        return self._contents.transitions

    @property
    def folder(self) -> Path | None:
        """Where the files are; None without any."""
        return None if self._folder is None else self._folder.path

    @property
    def uuid(self) -> str:
        """Identifies these trajectories; a folder that is opened again has the same."""
        return self._kinds.index.uuid

    @property
    def seed(self) -> int:
        """Of the draws; after a load, that of the checkpoint."""
        return self._contents.seed

    @property
    def most_transitions(self) -> int | None:
        """How many transitions there can ever be, as far as ``max_bytes`` says; None: not known."""
        if self._max_bytes is None:
            return None
        row_bytes = sum(leaf.row_bytes for leaf in self._kinds.index.leaves or ())
        return self._max_bytes // row_bytes if row_bytes else None

    def entries(self) -> list[TrajectoryEntry]:
        """What is known of every trajectory, oldest first."""
        with self._lock:
            return list(self._contents.entries.values())

    @property
    def index(self) -> TrajectoryIndex:
        """Layouts and leaves of the trajectories; its own list of entries is empty."""
        return self._kinds.index

    def stats(self, where: str) -> dict[str, Any]:
        """Counts and sizes; ``TrajectoryReplayBuffer.stats`` explains them."""
        self.check_open(where, tells_failures=False)
        with self._lock:
            held = self._contents
            return {
                "size": len(held),
                "capacity": self.capacity,
                "added": held.added,
                "transitions": held.transitions,
                "cached": len(held.memory),
                "cache_bytes": held.memory.cached_bytes,
                "cache_hits": held.hits,
                "cache_misses": held.misses,
                "stored_bytes": held.bytes,
                "unsaved": 0 if self._saver is None else self._saver.pending,
                "set_aside": 0 if self._folder is None else len(self._folder.index.aside),
                "seed": held.seed,
                "format": self.format,
            }

    # ---- in ---------------------------------------------------------------------------------------------------

    def add(self, where: str, trajectories: Any, origin: Origin | None = None) -> None:
        """Adds all trajectories of an iterable, or after an error none.

        Args:
            origin: The call of a client that adds them. It is executed once, however often it is sent: the origin is
                remembered, in a folder by the record that lists the trajectories. This call then returns when their
                files are written and listed.

        Raises:
            StorageError: With an origin also where the files cannot be written. The trajectories are kept in memory,
                and the next add, flush or close tries again.
        """
        self._check_process(where)
        incoming = read_incoming(where, trajectories, self._drops_non_arrays)
        if not self._add(where, incoming, origin) or origin is None:
            return
        saver = self._saver
        if saver is not None:
            saver.wait(where)  # without a lock: others may add, and one pass of the thread writes the files of all

    def _add(self, where: str, incoming: list[Incoming], origin: Origin | None) -> bool:
        """Returns whether there is something to be saved, from this call or from an earlier one of the same origin."""
        with self._adding:
            self.check_open(where)
            if not incoming:
                return False
            if origin is not None and origin in self._kinds.index.origins:
                return True
            leaves = self._kinds.index.leaves
            if leaves is None:
                leaves = incoming[0].parts.leaves
                self._check_leaves(where, leaves)
            parts = [arrange(where, one.parts, leaves, number) for number, one in enumerate(incoming)]
            layouts = [self._plan(where, leaves, part) for part in parts]
            for layout in layouts:
                if self._max_bytes is not None and layout.bytes > self._max_bytes:
                    raise SchemaError(
                        f"{where}: a trajectory takes {layout.bytes} bytes, max_bytes={self._max_bytes}; give a larger "
                        "max_bytes"
                    )
            if self._saver is not None:
                self._saver.admit(where, sum(layout.bytes for layout in layouts))
            slabs = [capture(part, layout) for part, layout in zip(parts, layouts, strict=True)]
            with self._lock:
                self._append(leaves, parts, layouts, slabs, incoming, origin)
            return True

    def _append(
        self,
        leaves: tuple[Leaf, ...],
        parts: list[Parts],
        layouts: list[Layout],
        slabs: list[np.ndarray[Any, Any]],
        incoming: list[Incoming],
        origin: Origin | None,
    ) -> None:
        """Every check is done before: nothing in here raises."""
        index, work = self._kinds.index, list[Work]()
        if index.leaves is None:
            self._kinds.set_leaves(leaves)
            work.append(Note(rows_record(index.generation, leaves)))
        for part, layout, slab, one in zip(parts, layouts, slabs, incoming, strict=True):
            facts = one.max_episode_length, one.weights_id
            note, save = self._contents.append(part, layout, slab, leaves, *facts)
            work += [save] if note is None else [note, save]
            gone = self._contents.drop_oldest(self.capacity, self._max_bytes)
            if gone:
                work.append(Drop(gone, [index.name(dropped) for dropped in gone]))
        if origin is not None:
            index.origins.add(origin)
            work = together(work, origin)
        if self._saver is not None:
            self._saver.put(work)

    def _check_leaves(self, where: str, leaves: tuple[Leaf, ...]) -> None:
        for leaf in leaves:
            if leaf.dtype in BITS and self.device is None:
                name = DTYPES[leaf.dtype][1]
                raise SchemaError(f"{where}: {leaf}: NumPy has no {name}; give the buffer device='cpu'")

    def _plan(self, where: str, leaves: tuple[Leaf, ...], part: Parts) -> Layout:
        key = part.steps, part.envs, part.epochs, leaves
        made = self._plans.get(key)
        if made is None:
            rest = leaves, part.steps, part.envs, part.epochs
            made = self._plans[key] = plan(where, self.format, *rest, in_memory=self._folder is None)
        return made

    # ---- out --------------------------------------------------------------------------------------------------

    def draw(self, where: str, recent: int, count: Callable[[int], int]) -> DrawnArrays:
        """Transitions of the newest ``recent`` trajectories (0: of all), uniformly, with replacement.

        Args:
            count: How many to draw, given how many transitions there are; it raises where there are too few.
        """
        self._check_process(where)
        with self._lock:
            self.check_open(where)
            gather = self._contents.draw(where, recent, count(int(self._contents.rows.rows(recent))))
        return gather()

    def draw_exactly(self, where: str, batch_size: int, recent: int | None) -> DrawnArrays:
        """Draws ``batch_size`` transitions. Raises NotReady where there are fewer."""

        def count(there: int) -> int:
            self._contents.check_batch_size(where, batch_size, recent or 0, self.most_transitions)
            return batch_size

        return self.draw(where, recent or 0, count)

    def sample(self, where: str, batch_size: int, recent: int | None, device: Any) -> dict[str, Any]:
        """``draw_exactly``, as a batch on a device; None: the store's."""
        return self.draw_exactly(where, batch_size, recent).to_batch(self.device if device is None else device)

    def get(self, where: str, trajectory_id: int) -> Trajectory:
        """A copy of a trajectory as it was added."""
        return self.get_arrays(where, trajectory_id).to_trajectory(self.device)

    def get_arrays(self, where: str, trajectory_id: int) -> TrajectoryArrays:
        """The arrays of a trajectory as it was added."""
        self._check_process(where)
        with self._lock:
            self.check_open(where)
            entries = self._contents.entries
            number = next((number for number, entry in entries.items() if entry.id == trajectory_id), None)
            if number is None:
                raise StaleHandle(f"{where}: there is no trajectory {trajectory_id!r}")
            return self._contents.copy(where, number)

    def trajectories(self, where: str) -> Iterator[tuple[int, Trajectory]]:
        """Every trajectory with its id, oldest first. Those that are deleted meanwhile are left out."""
        each = self.each_arrays(where)
        return ((number, arrays.to_trajectory(self.device)) for number, arrays in each)

    def each_arrays(self, where: str, after: int | None = None) -> Iterator[tuple[int, TrajectoryArrays]]:
        """The arrays of every trajectory with its id, oldest first.

        Args:
            after: Begins behind the trajectory of this id. Where there is none, it was deleted, and with it all older
                ones: then it begins with the oldest.
        """
        self._check_process(where)
        with self._lock:
            self.check_open(where)
            held = self._contents
            numbers = list(held.entries)
            if after is not None:
                at = next((at for at, number in enumerate(numbers) if held.entries[number].id == after), -1)
                numbers = numbers[at + 1 :]

        def each() -> Iterator[tuple[int, TrajectoryArrays]]:
            for number in numbers:
                with self._lock:
                    self.check_open(where)
                    if number not in held.entries or held is not self._contents:
                        continue
                    made = held.entries[number].id, held.copy(where, number)
                yield made

        return each()

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save(self, where: str, target: Path) -> None:
        """Writes a checkpoint of this instant; trajectories may be added meanwhile."""
        self.check_open(where)
        make_parents(where, target)
        if self._folder is None or self._saver is None:
            self._save_memory(where, target)
            return
        with self._lock:
            self.check_open(where)
            folder, saver = self._folder, self._saver
            saver.start(where)
            folder.pin(1)
            index = replace(
                folder.index,
                entries=list(self._contents.entries.values()),
                aside=[],
                layouts=list(folder.index.layouts),
                generations=list(folder.index.generations),
                calls=self._contents.calls,
                origins=folder.index.origins.joined(),
            )
        try:
            saver.wait(where)
            with _as_storage_error(where):
                if target.exists() and target.samefile(folder.path):
                    saver.put([Note(index.state_record())])
                    saver.wait(where)
                    folder.tell_rlinf(lambda: index, self.format, is_asked=True)
                else:
                    put, live = link_from(index, folder.path), folder.path.resolve()
                    write_checkpoint(where, index, put, target, self.format, live)
        finally:
            folder.pin(-1)
            folder.remove([])

    def _save_memory(self, where: str, target: Path) -> None:
        with self._adding, self._lock:
            self.check_open(where)
            known = self._kinds.index
            index = replace(known, entries=[], aside=[], calls=self._contents.calls, origins=known.origins.joined())
            held = [
                (
                    entry,
                    self._kinds.records(entry.layout),
                    self._contents.rows.slab(number),
                    known.layouts[entry.layout].epochs,
                )
                for number, entry in self._contents.entries.items()
            ]
        with _as_storage_error(where):
            write_held(where, index, held, target, self.format)

    def load(
        self,
        where: str,
        source: Path,
        part: tuple[int, int, str] | None,
        *,
        restarts: bool = False,
        origin: Origin | None = None,
    ) -> None:
        """Replaces all trajectories and the random stream by a checkpoint's.

        Args:
            part: Rank, number of ranks and ``split_by`` (see ``shard``); None: the whole checkpoint.
            restarts: Starts the random stream of the checkpoint's seed again; else it continues.
            origin: The call of a client that loads it, which is executed once.
        """
        self._check_process(where)
        with self._adding:
            self.check_open(where)
            known = self._kinds.index.origins
            if origin is not None and origin in known:
                return
            if self._saver is not None:
                self._saver.wait(where)  # the source may be this store's own folder
            index, files = open_checkpoint(where, source, self._allow_pickle, self._recover)
            formats = {index.layouts[entry.layout].format for entry in index.entries}
            if "pkl" in formats and not self._allow_pickle:
                raise StorageError(
                    f"{where}: {source} holds pickles, which run code when they are loaded; if you trust them, give "
                    "the buffer allow_pickle=True"
                )
            if index.leaves is not None:
                self._check_leaves(where, index.leaves)
            if part is not None:
                index = shard(where, index, *part)
            if self._folder is None and self.capacity is not None:
                index.entries = index.entries[-self.capacity :]
            slabs = self._read_newest(where, index, lambda entry: files[entry.id])
            with self._lock, _as_storage_error(where):
                self._keep_format(index)
                if self._folder is None:
                    origins = known.joined(index.origins)
                    self._kinds = Kinds(replace(index, aside=[], origins=origins, uuid=self.uuid))
                    if origin is not None:
                        self._kinds.index.origins.add(origin)
                else:
                    self._load_into_folder(where, index, files, source, None if part is None else part[0], origin)
                self._take_over(slabs)
                if self._folder is None:
                    self._contents.drop_oldest(None, self._max_bytes)  # files of a folder are deleted by the next add
                if restarts:
                    self._contents.calls = 0

    def _load_into_folder(
        self,
        where: str,
        index: TrajectoryIndex,
        files: dict[int, Path],
        source: Path,
        rank: int | None,
        origin: Origin | None,
    ) -> None:
        target = self._folder
        assert target is not None
        if self._follows_checkpoints:
            place = storage_dir_of(source, where) or source
            place = place if rank is None else place / f"rank_{rank}"
            if not (place.exists() and place.samefile(target.path)):
                target = Folder(place, where, index.seed, self._allow_pickle)
        held = list(self._contents.entries.values()) if target is self._folder else target.index.entries
        try:
            target.load(where, held, index, files, origin)
        except BaseException:
            if target is not self._folder:
                target.close()
            raise
        if target is not self._folder:
            self._let_go_of_folder()
            self._attach(target)

    # ---- life -------------------------------------------------------------------------------------------------

    def flush(self, where: str) -> None:
        """Waits until every trajectory has its file. Failed writes are tried again."""
        self._check_process(where)
        self.check_open(where)
        if self._saver is not None:
            self._saver.wait(where)

    def clear(self, where: str, *, set_aside: bool = False, origin: Origin | None = None) -> None:
        """Deletes every trajectory, and with ``set_aside`` those that loads set aside.

        Args:
            origin: The call of a client, which is executed once. This call then returns when the journal has it.
        """
        self._check_process(where)
        self._clear(where, set_aside, origin)
        saver = self._saver
        if origin is not None and saver is not None:
            saver.wait(where)

    def _clear(self, where: str, set_aside: bool, origin: Origin | None) -> None:
        with self._adding, self._lock:
            self.check_open(where)
            index, work = self._kinds.index, list[Work]()
            if origin is not None and origin in index.origins:
                return
            if self._saver is not None:
                self._saver.start(where)
            if origin is not None:
                index.origins.add(origin)
            gone = list(self._contents.entries.values())
            work.append(Drop(gone, [index.name(entry) for entry in gone], is_all=True, origin=origin))
            if set_aside and index.aside:
                work.append(Drop(index.aside, [index.name(entry) for entry in index.aside]))
                index.aside = []
            self._contents.forget_all()
            self._kinds.set_leaves(None)
            self._plans.clear()
            if self._saver is not None:
                self._saver.put(work)

    def forget(self, where: str) -> None:
        """Lets a closed store forget its trajectories. Their files stay."""
        self._check_process(where)
        with self._lock:
            self._contents.forget_all()

    def empty_cache(self, where: str) -> None:
        """Frees the memory of the cache; trajectories are read from their files from then on."""
        self._check_process(where)
        with self._lock:
            assert self._folder is not None
            self._contents.memory.empty_cache()

    def close(self, where: str) -> None:
        """Writes what is left and lets go of the folder. A second call does nothing."""
        if self._pid != os.getpid():
            return  # a forked child: the folder and the thread are the parent's
        with self._adding:
            if self.is_closed:
                return
            self.is_closed = True
            if self._saver is None:
                return
            try:
                self._saver.end(where)
            except BaseException:
                with suppress(SharpwaveError):  # the first failure is the one that is raised
                    self._let_go_of_folder()
                raise
            self._let_go_of_folder()

    def _let_go_of_folder(self) -> None:
        """Writes the state of the random stream into the journal, so that it continues there, and closes the folder."""
        assert self._folder is not None
        assert self._saver is not None
        self._finish.detach()
        self._saver.stop()
        is_saved = self._saver.pending == 0
        entries = [entry for entry in self._contents.entries.values() if entry.bytes]  # those that have a file
        index = replace(self._folder.index, entries=entries, calls=self._contents.calls)
        try:
            with _as_storage_error("close()"):
                changed = self._folder.is_changed
                self._folder.append([index.state_record()])
                self._folder.is_changed = changed
                self._folder.tell_rlinf(lambda: index, self.format)
            if is_saved:  # else the journal is the one that knows what is listed
                self._folder.close(index)
        finally:
            self._folder.close()

    def check_open(self, where: str, *, tells_failures: bool = True) -> None:
        """Raises where the store is closed or of another process, and a failed write that was not yet raised.

        Args:
            tells_failures: False for calls that only count: a failed write stays for the next call to raise.
        """
        self._check_process(where)
        if self.is_closed:
            raise ClosedError(f"{where}: the buffer is closed")
        if self._saver is not None and tells_failures:
            self._saver.tell(where)

    def _check_process(self, where: str) -> None:
        """To be called before a lock is taken: a thread of the parent may have held it at the fork."""
        if self._pid != os.getpid():
            raise ClosedError(f"{where}: the buffer belongs to process {self._pid}; build one in this process")


def _finish(saver: Saver, folder: Folder, saved: SavedCallback, format: str, pid: int) -> None:
    """Runs when a store that was not closed is garbage-collected, or when the interpreter ends."""
    if pid != os.getpid():
        return  # a forked child: the folder is the parent's
    try:
        saver.end("close()")
        folder.tell_rlinf(saved.index_of(folder), format)
    finally:
        folder.close()


def to_folder(where: str, name: str, value: Any) -> Path:
    """A path that was given as an argument."""
    if not isinstance(value, (str, os.PathLike)) or value == "" or "\0" in os.fspath(value):
        raise SchemaError(f"{where}: {name}: expected a path, got {told(value)}")
    return Path(value)


@contextmanager
def _as_storage_error(where: str) -> Iterator[None]:
    """Turns errors of the file system into StorageErrors."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{where}: {error}") from error
