"""TrajectoryReplayBuffer: trajectories on disk, transitions out of the newest of them."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..checks import check_settable, one_of, truth, whole
from ..errors import ClosedError, NotReady, SchemaError, SharpwaveError, StaleHandle, StorageError
from ..trajectories.checkpoint import link_from, open_checkpoint, shard, write_checkpoint
from ..trajectories.files import FORMATS, Layout, capture, plan, views, write
from ..trajectories.folder import Folder, Kinds, map_slab, read_slab
from ..trajectories.index import MOST_WEIGHTS_ID, Entry, Index, is_weights_id, layouts_record, rows_record
from ..trajectories.memory import Memory
from ..trajectories.trajectory import (
    BITS,
    DTYPES,
    Leaf,
    Parts,
    Trajectory,
    arrange,
    nest,
    read,
    to_device,
    to_trajectory,
)
from ..trajectories.upstream import storage_dir_of
from ..trajectories.writing import Drop, Note, Save, Saver

__all__ = ["TrajectoryReplayBuffer"]

_PATIENCE_S = 0.1  # of the saving thread for the buffer's lock, where it can try again later


class TrajectoryReplayBuffer:
    """Keeps trajectories as files, the newest also in memory, and draws transitions of the last N uniformly.

    Adding copies the data and returns; a thread writes it. ``sample`` sees a trajectory as soon as it is added. A write
    that fails is an error of the next call and of ``close()``. A folder that exists is taken up where it was left.
    Threads may add and sample at the same time.

    Args:
        seed: Of the draws.
        storage_dir: Folder of the files, of this buffer alone; None is ``replay_buffer`` in ``log_dir``.
        enable_cache: Keeps the newest trajectories in memory.
        cache_size: How many.
        storage_format: "pt", "safetensors", or "pkl" (with ``allow_pickle``).
        sample_window_size: Draws from so many of the newest trajectories; 0 from all. May be set later.
        save_trajectories: False keeps them in memory only: the newest ``sample_window_size``, 0 all. There has to be a
            cache then; a checkpoint writes their files.
        cache_bytes: Bytes in the cache at most, whatever ``cache_size`` says.
        max_trajectories: Trajectories kept; the oldest are deleted. Those that a load set aside do not count.
        max_bytes: The same in bytes.
        allow_pickle: Trusts "pkl" files: loading one runs what it says.
        device: Where batches go, as tensors; None gives NumPy arrays. ``sample`` may say otherwise.
        log_dir: Where the default ``storage_dir`` is.
        recover: Opens a folder whose index is damaged, with what is whole in it. A warning counts what is lost.

    Raises:
        SchemaError: A setting is impossible, or two do not go together.
        StorageError: The folder cannot be made or read, is damaged, or another buffer has it.

    Example:
        >>> import numpy as np
        >>> import sharpwave as sw
        >>> buf = sw.TrajectoryReplayBuffer(storage_dir="run/buffer", storage_format="safetensors")
        >>> obs = np.zeros((51, 8, 64), np.float32)
        >>> buf.add_trajectories([sw.Trajectory(actions=np.zeros((50, 8, 7), np.float32), curr_obs={"state": obs[:-1]},
        ...                                     next_obs={"state": obs[1:]}, rewards=np.ones((50, 8), np.float32))])
        >>> batch = buf.sample(num_chunks=256)
        >>> batch["curr_obs"]["state"].shape
        (256, 64)
        >>> buf.close()
    """

    _drops_the_rest = False  # True leaves out what is no array of rows, as RLinf does
    # How often RLinf's files are written while the folder is open; None: by close() only.
    _tell_rlinf_every_s: float | None = None

    if not TYPE_CHECKING:  # to a type checker every name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_settable(self, name)
            object.__setattr__(self, name, value)

    def __init__(
        self,
        seed: int = 1234,
        storage_dir: str | os.PathLike[str] | None = None,
        enable_cache: bool = True,
        cache_size: int = 5,
        storage_format: str = "pt",
        sample_window_size: int = 100,
        save_trajectories: bool = True,
        *,
        cache_bytes: int | None = None,
        max_trajectories: int | None = None,
        max_bytes: int | None = None,
        allow_pickle: bool = False,
        device: Any = None,
        log_dir: str | os.PathLike[str] = "logs",
        recover: bool = False,
    ) -> None:
        where = "TrajectoryReplayBuffer"
        whole(where, "seed", seed, 0, 2**64 - 1)
        whole(where, "cache_size", cache_size, 0)
        whole(where, "sample_window_size", sample_window_size, 0)
        for name, bound in (
            ("cache_bytes", cache_bytes),
            ("max_trajectories", max_trajectories),
            ("max_bytes", max_bytes),
        ):
            if bound is not None:
                whole(where, name, bound)
        for name, value in (
            ("enable_cache", enable_cache),
            ("save_trajectories", save_trajectories),
            ("allow_pickle", allow_pickle),
            ("recover", recover),
        ):
            truth(where, name, value)
        one_of(where, "storage_format", storage_format, FORMATS)
        _check_device(where, device)
        logs = _path(where, "log_dir", log_dir)
        given = _path(where, "storage_dir", storage_dir) if storage_dir is not None and storage_dir != "" else None
        if storage_format == "pkl" and not allow_pickle:
            raise SchemaError(
                f"{where}: storage_format: 'pkl' files run code when they are loaded; give allow_pickle=True if you "
                "trust them, or storage_format='pt'"
            )
        if not save_trajectories and not enable_cache:
            raise SchemaError(
                f"{where}: save_trajectories=False keeps trajectories in the cache: give enable_cache=True"
            )
        self._device, self._format, self._allow_pickle = device, storage_format, allow_pickle
        self._window, self._saves = sample_window_size, save_trajectories
        self._max_trajectories, self._max_bytes = max_trajectories, max_bytes
        self._cache_size = (cache_size if enable_cache else 0) if save_trajectories else None
        self._cache_bytes = cache_bytes
        self._lock, self._adding = threading.Lock(), threading.Lock()
        self._pid, self._is_closed = os.getpid(), False
        self._is_given = given is not None
        self._folder: Folder | None = None
        self._saver: Saver | None = None
        self._kinds = Kinds(Index(seed=seed))
        if save_trajectories:
            folder = Folder(given or logs / "replay_buffer", where, seed, allow_pickle, recover)
            try:
                slabs = self._newest(where, folder.index, folder.file)
            except BaseException:
                folder.close()
                raise
            self._attach(folder)
        self._adopt(slabs if save_trajectories else [])

    # ---- what it holds ----------------------------------------------------------------------------------------

    def _attach(self, folder: Folder) -> None:
        """Makes a folder this buffer's."""
        self._folder = self._kinds = folder
        self._on_saved = _Saved(self._lock)
        tell = functools.partial(folder.tell_rlinf, self._on_saved.index_of(folder, _PATIENCE_S), self._format)
        self._saver = Saver(folder, self._on_saved, tell, self._tell_rlinf_every_s)
        self._finish = weakref.finalize(self, _finish, self._saver, folder, self._on_saved, self._format, self._pid)

    def _newest(self, where: str, index: Index, file: Callable[[Entry], Path]) -> list[np.ndarray[Any, Any]]:
        """Reads what belongs into the cache, and checks it."""
        newest = len(index.entries) if self._cache_size is None else min(self._cache_size, len(index.entries))
        entries = index.entries[len(index.entries) - newest :]
        return [read_slab(where, index, entry, file(entry), self._allow_pickle) for entry in entries]

    def _adopt(self, newest: list[np.ndarray[Any, Any]]) -> None:
        """Takes up what the index says, with the slabs of the newest trajectories."""
        index = self._kinds.index
        self._seed, self._calls = index.seed, index.calls
        self._rows = _core.Trajectories()
        # Without files nothing leaves the cache but with its trajectory.
        self._memory = Memory(self._rows, self._cache_size, self._cache_bytes if self._saves else None)
        self._entries: dict[int, Entry] = dict(enumerate(index.entries))
        self._bytes = sum(self._size_of(entry) for entry in index.entries)
        if self._folder is not None:
            self._on_saved.look_at(self._entries, self._memory, self._kinds)
        self._hits = self._misses = 0
        self._plans: dict[tuple[Any, ...], Layout] = {}
        facts = [[getattr(entry, name) for entry in index.entries] for name in ("id", "steps", "envs")]
        self._rows.extend(*(np.array(column, np.int64) for column in facts))
        index.entries = []
        for number, slab in enumerate(newest, len(self._entries) - len(newest)):
            kind = self._entries[number].layout
            self._memory.cache(number, (self._kinds.to_records(kind, slab), self._kinds.records(kind).core))

    def _size_of(self, entry: Entry) -> int:
        """Bytes of a trajectory where it is kept."""
        return self._kinds.index.layouts[entry.layout].bytes if self._saves else self._kinds.records(entry.layout).bytes

    def __len__(self) -> int:
        """Trajectories."""
        return len(self._entries)

    @property
    def size(self) -> int:
        """Trajectories."""
        return len(self._entries)

    @property
    def total_samples(self) -> int:
        """Transitions in all trajectories."""
        return int(self._rows.rows(0))

    @property
    def storage_dir(self) -> Path | None:
        """The folder of the files; None without any."""
        return None if self._folder is None else self._folder.path

    @property
    def sample_window_size(self) -> int:
        """Of how many of the newest trajectories ``sample`` draws; 0: of all. May be set."""
        return self._window

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        self._window = whole("sample_window_size", "sample_window_size", value, 0)

    def is_ready(self, min_trajectories: int) -> bool:
        """Whether there are so many trajectories."""
        return len(self) >= whole("is_ready()", "min_trajectories", min_trajectories, 0)

    def get_stats(self) -> dict[str, int]:
        """``num_trajectories``, ``total_samples``; ``cache_size``, ``cache_bytes``: in memory now; ``cache_hits``,
        ``cache_misses``: transitions drawn from memory and from files; ``stored_bytes``: of all trajectories;
        ``unsaved``: trajectories that have no file yet; ``set_aside``: kept in the folder and not drawn from, because
        ``load_checkpoint`` put others in their place."""
        self._check_process("get_stats()")
        with self._lock:
            return {
                "num_trajectories": len(self._entries),
                "total_samples": int(self._rows.rows(0)),
                "cache_size": len(self._memory),
                "cache_bytes": self._memory.cached_bytes,
                "cache_hits": self._hits,
                "cache_misses": self._misses,
                "stored_bytes": self._bytes,
                "unsaved": 0 if self._saver is None else self._saver.pending,
                "set_aside": 0 if self._folder is None else len(self._folder.index.aside),
            }

    # ---- in ---------------------------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[Any]) -> None:
        """Adds trajectories: all of them, or after an error none. An empty list does nothing.

        The first one says what every later one must bring: the same names, dtypes and shapes behind (steps, envs).

        Raises:
            SchemaError: One has no rewards and no log-probabilities, or a missing, extra or mis-shaped array.
            StorageError: An earlier trajectory could not be written, and still cannot.
            ClosedError: The buffer is closed.
        """
        where = "add_trajectories()"
        self._check_process(where)
        parts, facts = [], []
        for trajectory in _each(where, trajectories):
            parts.append(read(where, trajectory, self._drops_the_rest))
            facts.append(self._check_facts(where, trajectory))
        with self._adding:
            self._check_open(where)
            if not parts:
                return
            leaves = self._kinds.index.leaves
            if leaves is None:
                leaves = parts[0].leaves
                self._check_leaves(where, leaves)
            parts = [arrange(where, part, leaves, number) for number, part in enumerate(parts)]
            layouts = [self._plan(leaves, part) for part in parts]
            self._check_sizes(where, layouts)
            if self._saver is not None:
                self._saver.admit(where, sum(layout.bytes for layout in layouts))
            slabs = [capture(part, layout) for part, layout in zip(parts, layouts, strict=True)]
            with self._lock:
                self._append(leaves, parts, layouts, slabs, facts)

    def _append(
        self,
        leaves: tuple[Leaf, ...],
        parts: list[Parts],
        layouts: list[Layout],
        slabs: list[np.ndarray[Any, Any]],
        facts: list[tuple[int, str]],
    ) -> None:
        """From here on nothing fails."""
        index, work = self._kinds.index, list[Save | Note | Drop]()
        if index.leaves is None:
            self._kinds.set_leaves(leaves)
            work.append(Note(rows_record(index.generation, leaves)))
        for part, layout, slab, (length, weights_id) in zip(parts, layouts, slabs, facts, strict=True):
            kind, is_new = self._kinds.number_of(layout)
            if is_new:
                work.append(Note(layouts_record(index.generation, [(kind, layout)])))
            entry = Entry(index.next_id, uuid.uuid4().hex, part.steps, part.envs, length, weights_id, kind)
            index.next_id += index.id_step
            number = self._rows.first + len(self._rows)
            self._entries[number] = entry
            self._bytes += self._size_of(entry)
            self._rows.append(entry.id, part.steps, part.envs)
            if self._saves:  # the thread that saves it makes records of it, so that the caller need not wait
                held = slab, self._kinds.core_layout(kind)
                self._memory.wait(number, held)
                if self._cache_size:
                    self._memory.cache(number, held)
            else:
                self._memory.cache(number, (self._kinds.to_records(kind, slab), self._kinds.records(kind).core))
            work.append(Save(number, entry, slab, leaves))
            gone = self._drop_over_budget()
            if gone:
                work.append(Drop(gone, [index.name(dropped) for dropped in gone]))
        if self._saver is not None:
            self._saver.put(work)

    def _drop_over_budget(self) -> list[Entry]:
        bounds = [bound for bound in (self._max_trajectories, None if self._saves else self._window) if bound]
        sizes = [bound for bound in (self._max_bytes, None if self._saves else self._cache_bytes) if bound]
        gone = []
        while (bounds and len(self._entries) > min(bounds)) or (sizes and self._bytes > min(sizes)):
            number = self._rows.first
            entry = self._entries.pop(number)
            self._bytes -= self._size_of(entry)
            self._memory.forget(number)
            self._rows.drop(1)
            gone.append(entry)
        return gone

    def _check_facts(self, where: str, trajectory: Any) -> tuple[int, str]:
        name = getattr(trajectory, "model_weights_id", None)
        if not is_weights_id(name):
            raise SchemaError(
                f"{where}: model_weights_id: expected a string of at most {MOST_WEIGHTS_ID} bytes without '/', as it "
                f"is part of a file's name, got {name!r}"
            )
        return whole(where, "max_episode_length", getattr(trajectory, "max_episode_length", 0), 0), str(name)

    def _check_leaves(self, where: str, leaves: tuple[Leaf, ...]) -> None:
        for leaf in leaves:
            if leaf.dtype in BITS and self._device is None:
                name = DTYPES[leaf.dtype][1]
                raise SchemaError(f"{where}: {leaf}: NumPy has no {name}; give the buffer device='cpu'")

    def _check_sizes(self, where: str, layouts: list[Layout]) -> None:
        for layout in layouts:
            for name in ("max_bytes",) if self._saves else ("max_bytes", "cache_bytes"):
                bound = getattr(self, f"_{name}")
                if bound is not None and layout.bytes > bound:
                    raise SchemaError(
                        f"{where}: a trajectory of {layout.bytes} bytes, {name}={bound}; give a larger one"
                    )

    def _plan(self, leaves: tuple[Leaf, ...], part: Parts) -> Layout:
        key = part.steps, part.envs, part.epochs, leaves
        made = self._plans.get(key)
        if made is None:
            rest = leaves, part.steps, part.envs, part.epochs
            made = self._plans[key] = plan(self._format, *rest, in_memory=not self._saves)
        return made

    # ---- out --------------------------------------------------------------------------------------------------

    def sample(self, num_chunks: int, *, device: Any = None) -> dict[str, Any]:
        """Transitions of the newest ``sample_window_size`` trajectories, each as likely as any other, with replacement.

        Args:
            num_chunks: How many; at most as many as the window holds.
            device: Where to, as tensors; None takes the buffer's.

        Returns:
            The fields of the trajectories, ``(num_chunks, ...)`` each, nested as they were; and where every row comes
            from: ``trajectory_id``, ``step``, ``env``.

        Raises:
            NotReady: The buffer is empty.
            SchemaError: There are fewer transitions in the window.
            StorageError: A trajectory could not be written (once for every failure), or a file cannot be read.
        """
        where = "sample()"
        self._check_process(where)
        count = whole(where, "num_chunks", num_chunks)
        if device is not None:
            _check_device(where, device)
        with self._lock:
            self._check_open(where)
            count = self._check_count(where, count, int(self._rows.rows(self._window)))
            draw = self._rows.draw(count, self._window, self._seed, self._calls)
            for number in draw.missing:
                slab, layout = self._slab(number, where)
                draw.fill(number, slab, layout)
            leaves = self._kinds.index.leaves
            assert leaves is not None
            self._calls += 1
            self._hits += draw.hits
            self._misses += count - draw.hits
            kinds = self._kinds.row_kinds()
        arrays: list[Any] = draw.gather(kinds)
        place = self._device if device is None else device
        batch = nest(leaves, [to_device(leaf.dtype, array, place) for leaf, array in zip(leaves, arrays, strict=True)])
        for name, values in (("trajectory_id", draw.ids), ("step", draw.steps), ("env", draw.envs)):
            batch[name] = to_device("I64", values, place)
        return batch

    def _check_count(self, where: str, count: int, there: int) -> int:
        if there == 0:
            raise NotReady(f"{where}: the buffer is empty; add_trajectories() first")
        if count > there:
            raise SchemaError(
                f"{where}: num_chunks: expected at most the {there} transitions of the newest "
                f"{min(self._window or len(self), len(self))} trajectories, got {count}; add more, or give a larger "
                "sample_window_size"
            )
        return count

    def _slab(self, number: int, where: str) -> tuple[np.ndarray[Any, Any], _core.SlabLayout]:
        """Of a trajectory that is not in memory: its file, mapped. The checksum is compared when a file is first used
        and again after it was written to; its size before each use."""
        entry, index = self._entries[number], self._kinds.index
        slab = self._memory.mapped(number)
        if slab is None:
            assert self._folder is not None
            path = self._folder.file(entry)
            if index.layouts[entry.layout].is_mapped:
                file = map_slab(where, index, entry, path, self._memory.checked(number))
                self._memory.keep_mapped(number, file)
                slab = file.slab
            else:  # read whole each time: keeping it would be a cache
                slab = read_slab(where, index, entry, path, self._allow_pickle)
        return slab, self._kinds.core_layout(entry.layout)

    def get_trajectory(self, trajectory_id: int) -> Trajectory:
        """A trajectory as it was added, copied.

        Raises:
            StaleHandle: There is none of that id.
        """
        where = "get_trajectory()"
        self._check_process(where)
        with self._lock:
            self._check_open(where)
            number = next((number for number, entry in self._entries.items() if entry.id == trajectory_id), None)
            if number is None:
                raise StaleHandle(f"{where}: there is no trajectory {trajectory_id!r}")
            return self._copy(number, where)

    def trajectories(self) -> Iterator[tuple[int, Trajectory]]:
        """Every trajectory with its id, oldest first; those that go meanwhile are left out."""
        self._check_process("trajectories()")
        with self._lock:
            numbers = list(self._entries)
        for number in numbers:
            with self._lock:
                self._check_open("trajectories()")
                if number not in self._entries:
                    continue
                made = self._entries[number].id, self._copy(number, "trajectories()")
            yield made

    def _copy(self, number: int, where: str) -> Trajectory:
        entry, leaves = self._entries[number], self._kinds.index.leaves
        assert leaves is not None
        if self._saves:
            slab = self._memory.unsaved(number)
            slab = self._slab(number, where)[0] if slab is None else slab
            arrays = [np.array(view) for view in views(slab, leaves, self._kinds.index.layouts[entry.layout])]
        else:
            records: Any = self._rows.slab(number)
            arrays = self._kinds.records(entry.layout).views(records)
        values = [to_device(leaf.dtype, array, self._device) for leaf, array in zip(leaves, arrays, strict=True)]
        return to_trajectory(leaves, values, entry.max_episode_length, entry.weights_id)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Writes data, index, counters and random stream of this instant into a folder: whole or not at all, replacing
        a former checkpoint. Files are hard links where the file system has them. Others may go on adding.

        RLinf loads it too, if the format is "pt" or "pkl". Taken into the buffer's own folder, that folder is the
        checkpoint.

        Raises:
            StorageError: A trajectory or the checkpoint cannot be written, or the folder holds something that the index
                of a checkpoint does not list.
        """
        where = "save_checkpoint()"
        self._check_process(where)
        target = _path(where, "path", path)
        if self._folder is None or self._saver is None:
            self._save_memory(where, target)
            return
        with self._lock:
            self._check_open(where)
            folder, saver = self._folder, self._saver
            saver.start(where)
            folder.pin(1)
            index = replace(
                folder.index,
                entries=list(self._entries.values()),
                aside=[],
                layouts=list(folder.index.layouts),
                generations=list(folder.index.generations),
                calls=self._calls,
            )
        try:
            saver.wait(where)
            with _told(where):
                if target.exists() and target.samefile(folder.path):
                    saver.put([Note(index.state_record())])
                    saver.wait(where)
                    folder.tell_rlinf(lambda: index, self._format, is_asked=True)
                else:
                    put, live = link_from(index, folder.path), folder.path.resolve()
                    write_checkpoint(where, index, put, target, self._format, live)
        finally:
            folder.pin(-1)
            folder.remove([])

    def _save_memory(self, where: str, target: Path) -> None:
        """A checkpoint of a buffer that has no files: writes them."""
        with self._adding, self._lock:
            self._check_open(where)
            known = self._kinds.index
            leaves = known.leaves or ()
            index = replace(known, entries=[], aside=[], layouts=[], generations=[], calls=self._calls)
            numbers: dict[Layout, int] = {}
            held: dict[int, tuple[Any, Parts, Layout]] = {}
            for number, entry in self._entries.items():
                epochs = known.layouts[entry.layout].epochs
                layout = plan(self._format, leaves, entry.steps, entry.envs, epochs)
                if layout not in numbers:
                    numbers[layout] = index.add_layout(layout)
                index.entries.append(replace(entry, layout=numbers[layout]))
                parts = Parts(entry.steps, entry.envs, leaves, epochs, [])
                records = self._kinds.records(entry.layout)
                held[entry.id] = (records, self._rows.slab(number)), parts, layout

        def put(entry: Entry, path: Path) -> None:
            (records, rows), parts, layout = held.pop(entry.id)
            slab = capture(parts._replace(arrays=records.views(rows)), layout)
            facts = write(path, slab, leaves, layout, entry.max_episode_length, entry.weights_id)
            entry.start, entry.bytes, entry.crc = facts

        with _told(where):
            write_checkpoint(where, index, put, target, self._format)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        split_by: str = "count",
    ) -> None:
        """Replaces everything by what a checkpoint holds; the random stream goes on where it was taken.

        The files are linked into this buffer's folder. One that was built without ``storage_dir`` goes on in the folder
        that the checkpoint was taken of if that exists, else in the checkpoint itself (``rank_k`` in it, if
        distributed). No file is deleted: trajectories that the folder held and the checkpoint does not are set aside.
        They stay in the folder and its index, ``get_stats()["set_aside"]`` counts them, ``sharpwave split`` takes them
        out, and ``clear(set_aside=True)`` deletes them.

        Args:
            path: A checkpoint of ours or of RLinf's, or a folder with one for every rank (``rank_0``, ...) in it.
            is_distributed: Takes one part of ``world_size``. Ids of trajectories to come are different in every rank.
            split_by: "count" gives every rank consecutive trajectories, as many as the others or one more; "samples"
                consecutive ones with about as many transitions; "stride" every ``world_size``-th trajectory.

        Raises:
            FileNotFoundError: The checkpoint or a file of it is not there (a StorageError).
            SchemaError: ``local_rank`` is none.
        """
        where = "load_checkpoint()"
        self._check_process(where)
        source = _path(where, "path", path)
        truth(where, "is_distributed", is_distributed)
        with self._adding:
            self._check_open(where)
            if self._saver is not None:
                self._saver.wait(where)  # the source may be this buffer's own folder
            index, files = open_checkpoint(where, source, self._allow_pickle)
            formats = {index.layouts[entry.layout].format for entry in index.entries}
            if "pkl" in formats and not self._allow_pickle:
                raise StorageError(f"{where}: {source} holds pickles; give allow_pickle=True if you trust them")
            if index.leaves is not None:
                self._check_leaves(where, index.leaves)
            if is_distributed:
                index = shard(where, index, local_rank, world_size, split_by)
            if self._folder is None and self._window:
                index.entries = index.entries[-self._window :]
            slabs = self._newest(where, index, lambda entry: files[entry.id])
            with self._lock, _told(where):
                if self._folder is None:
                    self._kinds = Kinds(replace(index, aside=[]))
                else:
                    self._load_into_folder(where, index, files, source, local_rank if is_distributed else None)
                self._adopt(slabs)

    def _load_into_folder(
        self, where: str, index: Index, files: dict[int, Path], source: Path, rank: int | None
    ) -> None:
        target = self._folder
        assert target is not None
        if not self._is_given:
            place = storage_dir_of(source, where) or source
            place = place if rank is None else place / f"rank_{rank}"
            if not (place.exists() and place.samefile(target.path)):
                target = Folder(place, where, index.seed, self._allow_pickle)
        held = list(self._entries.values()) if target is self._folder else target.index.entries
        try:
            target.load(held, index, files)
        except BaseException:
            if target is not self._folder:
                target.close()
            raise
        if target is not self._folder:
            self._let_go_of_folder()
            self._attach(target)

    # ---- for event loops: the loop goes on while the disk is waited for ----------------------------------------

    async def add_trajectories_async(self, trajectories: Iterable[Any]) -> None:
        """``add_trajectories`` in a thread."""
        await asyncio.to_thread(self.add_trajectories, list(trajectories))

    async def sample_async(self, num_chunks: int, *, device: Any = None) -> dict[str, Any]:
        """``sample`` in a thread."""
        return await asyncio.to_thread(self.sample, num_chunks, device=device)

    async def save_checkpoint_async(self, path: str | os.PathLike[str]) -> None:
        """``save_checkpoint`` in a thread."""
        await asyncio.to_thread(self.save_checkpoint, path)

    # ---- life -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Waits until everything that was added has its file. Tries again what failed."""
        self._check_process("flush()")
        self._check_open("flush()")
        if self._saver is not None:
            self._saver.wait("flush()")

    def clear(self, *, set_aside: bool = False) -> None:
        """Deletes every trajectory, in memory and on disk. Ids go on: none is ever given twice.

        Args:
            set_aside: Also those that ``load_checkpoint`` set aside.
        """
        where = "clear()"
        self._check_process(where)
        truth(where, "set_aside", set_aside)
        with self._adding, self._lock:
            self._check_open(where)
            if self._saver is not None:
                self._saver.start(where)
            index, work = self._kinds.index, list[Save | Note | Drop]()
            gone = list(self._entries.values())
            work.append(Drop(gone, [index.name(entry) for entry in gone], is_all=True))
            if set_aside and index.aside:
                work.append(Drop(index.aside, [index.name(entry) for entry in index.aside]))
                index.aside = []
            self._entries.clear()
            self._bytes = 0
            first = self._rows.first
            for number in range(first, first + len(self._rows)):
                self._memory.forget(number)
            self._rows.drop(len(self._rows))
            self._kinds.set_leaves(None)
            self._plans.clear()
            if self._saver is not None:
                self._saver.put(work)

    def clear_cache(self) -> None:
        """Frees the memory of the cache; trajectories are read from their files from then on.

        Raises:
            SchemaError: The cache is all there is (``save_trajectories=False``).
        """
        self._check_process("clear_cache()")
        with self._lock:
            if self._folder is None:
                raise SchemaError(
                    "clear_cache(): with save_trajectories=False the cache is the buffer; clear() empties it"
                )
            self._memory.empty_cache()

    def close(self) -> None:
        """Writes what is left and lets go of the folder. A second call does nothing.

        Raises:
            StorageError: Trajectories could not be written: they are lost. The buffer is closed all the same.
        """
        if self._pid != os.getpid():
            return  # the parent's: nothing of it is open here
        with self._adding:
            if self._is_closed:
                return
            self._is_closed = True
            if self._saver is None:
                return
            try:
                self._saver.end("close()")
            except BaseException:
                with suppress(SharpwaveError):  # the first failure is the one to tell
                    self._let_go_of_folder()
                raise
            self._let_go_of_folder()

    def _let_go_of_folder(self) -> None:
        """Says in the journal where the random stream stands, so that it goes on there."""
        assert self._folder is not None
        assert self._saver is not None
        self._finish.detach()
        self._saver.stop()
        entries = [entry for entry in self._entries.values() if entry.bytes]  # those that have a file
        index = replace(self._folder.index, entries=entries, calls=self._calls)
        try:
            with _told("close()"):
                changed = self._folder.is_changed
                self._folder.append([index.state_record()])
                self._folder.is_changed = changed
                self._folder.tell_rlinf(lambda: index, self._format)
            self._folder.close(index)
        finally:
            self._folder.close()

    def _check_process(self, where: str) -> None:
        """Before any lock: a thread of the parent's may have held it when this process was forked."""
        if self._pid != os.getpid():
            raise ClosedError(f"{where}: the buffer belongs to process {self._pid}; build one in this process")

    def _check_open(self, where: str) -> None:
        if self._is_closed:
            raise ClosedError(f"{where}: the buffer is closed")
        if self._saver is not None:
            self._saver.tell(where)

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("pickle: a TrajectoryReplayBuffer belongs to one process; save_checkpoint() it")

    def __repr__(self) -> str:
        where = "memory" if self._folder is None else repr(str(self._folder.path))
        return f"TrajectoryReplayBuffer({len(self)} trajectories, {self.total_samples} transitions, {where})"


class _Saved:
    """What the thread calls back. It knows what the buffer holds, not the buffer: that one may die at any time, and not
    in the thread that its end waits for."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def index_of(self, folder: Folder, patience_s: float = -1) -> Callable[[], Index]:
        """Makes the index of the trajectories that have files now.

        Args:
            patience_s: How long it waits for the buffer's lock; -1: until it has it. The saving thread must not wait
                for ever: a load that changes the folder holds the lock and waits for the thread's end.
        """

        def index() -> Index:
            if not self._lock.acquire(timeout=patience_s):
                raise BlockingIOError("the buffer is busy")
            try:
                entries = [entry for entry in self._entries.values() if entry.bytes]
            finally:
                self._lock.release()
            return replace(folder.index, entries=entries)

        return index

    def look_at(self, entries: dict[int, Entry], memory: Memory, kinds: Kinds) -> None:
        self._entries, self._memory, self._kinds = entries, memory, kinds

    def __call__(self, part: Save) -> None:
        number, kind = part.number, part.entry.layout
        with self._lock:
            if self._entries.get(number) is not part.entry:
                return  # it is gone already
            self._memory.saved(number)
            if not self._memory.is_cached(number):
                return
            core, layout = self._kinds.records(kind), self._kinds.core_layout(kind)
        records = core.make(part.slab, layout)
        with self._lock:
            if self._entries.get(number) is part.entry:
                self._memory.change(number, (records, core.core))


def _finish(saver: Saver, folder: Folder, saved: _Saved, format: str, pid: int) -> None:
    """Of a buffer that nobody closed, or at the interpreter's end; in a forked child it is the parent's."""
    if pid != os.getpid():
        return
    try:
        saver.end("close()")
        folder.tell_rlinf(saved.index_of(folder), format)
    finally:
        folder.close()


def _path(where: str, name: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)) or value == "" or "\0" in os.fspath(value):
        raise SchemaError(f"{where}: {name}: expected a path, got {value!r}")
    return Path(value)


def _each(where: str, trajectories: Any) -> Iterator[Any]:
    try:
        every = iter(trajectories)
    except TypeError:
        kind = type(trajectories).__name__
        raise SchemaError(f"{where}: trajectories: expected a list of Trajectory, got {kind}") from None
    yield from every


def _check_device(where: str, device: Any) -> None:
    if device is None:
        return
    try:
        import torch

        torch.device(device)
    except ModuleNotFoundError:
        raise SchemaError(f"{where}: device: {device!r} needs torch; give None for NumPy arrays") from None
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"{where}: device: {str(error).splitlines()[0]}") from None


@contextmanager
def _told(where: str) -> Iterator[None]:
    """What the file system says is a StorageError."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{where}: {error}") from error
