"""Contents: the trajectories that a store holds, where their data is, and the draws from them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from .folder import Folder
from .index import TrajectoryEntry, layouts_record
from .kinds import Kinds
from .layout import Layout, views
from .mapped import map_slab, read_slab
from .memory import Memory
from .saver import Note, Save
from .trajectory import Leaf, Parts, Trajectory, nest, to_device, to_trajectory

__all__ = ["Contents"]


class Contents:
    """Trajectories numbered from the oldest to the newest, and the state of the random stream.

    A store replaces its contents as a whole when it loads a checkpoint. Calls are made under the store's lock; only
    the function that ``draw`` returns is called without it.

    Args:
        kinds: Layouts and leaves, with the entries of the trajectories in its index. Those are moved from there to
            ``entries``, which is from then on the one list of them.
        folder: Where the files are; None: the data is in memory only.
        cache: Trajectories in memory at most; None: all.
        cache_bytes: Bytes in memory at most; None: no bound.
        newest: The slabs of the last trajectories, for the cache.
    """

    def __init__(
        self,
        kinds: Kinds,
        folder: Folder | None,
        cache: int | None,
        cache_bytes: int | None,
        allow_pickle: bool,
        newest: list[np.ndarray[Any, Any]],
    ) -> None:
        self.kinds, self._folder, self._cache, self._allow_pickle = kinds, folder, cache, allow_pickle
        index = kinds.index
        self.seed, self.calls = index.seed, index.calls
        self.rows = _core.Trajectories()
        self.memory = Memory(self.rows, cache, cache_bytes)
        self.entries: dict[int, TrajectoryEntry] = dict(enumerate(index.entries))
        self.bytes = sum(self._size_of(entry) for entry in index.entries)
        self.added = self.hits = self.misses = 0
        facts = [[getattr(entry, name) for entry in index.entries] for name in ("id", "steps", "envs")]
        self.rows.extend(*(np.array(column, np.int64) for column in facts))
        index.entries = []
        for number, slab in enumerate(newest, len(self.entries) - len(newest)):
            self._cache_records(number, slab)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def transitions(self) -> int:
        """Transitions in all trajectories."""
        return int(self.rows.rows(0))

    def _size_of(self, entry: TrajectoryEntry) -> int:
        """Bytes of a trajectory in its file, or in memory where it has none."""
        if self._folder is None:
            return int(self.kinds.records(entry.layout).bytes)
        return self.kinds.index.layouts[entry.layout].bytes

    def _cache_records(self, number: int, slab: np.ndarray[Any, Any]) -> None:
        kind = self.entries[number].layout
        self.memory.cache(number, (self.kinds.to_records(kind, slab), self.kinds.records(kind).core))

    # ---- in ---------------------------------------------------------------------------------------------------

    def append(
        self,
        part: Parts,
        layout: Layout,
        slab: np.ndarray[Any, Any],
        leaves: tuple[Leaf, ...],
        length: int,
        weights_id: str,
    ) -> list[Save | Note]:
        """Adds a trajectory, and returns the work of the saving thread. It cannot fail."""
        index, work = self.kinds.index, list[Save | Note]()
        kind, is_new = self.kinds.number_of(layout)
        if is_new:
            work.append(Note(layouts_record(index.generation, [(kind, layout)])))
        entry = TrajectoryEntry(index.next_id, uuid.uuid4().hex, part.steps, part.envs, length, weights_id, kind)
        index.next_id += index.id_step
        number = self.rows.first + len(self.rows)
        self.entries[number] = entry
        self.added += 1
        self.bytes += self._size_of(entry)
        self.rows.append(entry.id, part.steps, part.envs)
        if self._folder is None:
            self._cache_records(number, slab)
        else:  # the saving thread makes the records, so that the caller need not wait
            held = slab, self.kinds.core_layout(kind)
            self.memory.wait(number, held)
            if self._cache:
                self.memory.cache(number, held)
        return [*work, Save(number, entry, slab, leaves)]

    def drop_oldest(self, capacity: int | None, max_bytes: int | None) -> list[TrajectoryEntry]:
        """Forgets the oldest trajectories until both bounds hold, and returns them."""
        gone = []
        while self.entries and (
            (capacity is not None and len(self.entries) > capacity)
            or (max_bytes is not None and self.bytes > max_bytes)
        ):
            number = self.rows.first
            entry = self.entries.pop(number)
            self.bytes -= self._size_of(entry)
            self.memory.forget(number)
            self.rows.drop(1)
            gone.append(entry)
        return gone

    def forget_all(self) -> None:
        """Forgets every trajectory."""
        self.entries.clear()
        self.bytes = 0
        first = self.rows.first
        for number in range(first, first + len(self.rows)):
            self.memory.forget(number)
        self.rows.drop(len(self.rows))

    # ---- out --------------------------------------------------------------------------------------------------

    def draw(self, where: str, recent: int, size: int) -> Callable[[Any], dict[str, Any]]:
        """Draws transitions of the newest ``recent`` trajectories (0: of all), uniformly, with replacement.

        Returns:
            A function that copies the rows and makes a batch of them on a device. It needs no lock: the draw keeps the
            slabs alive, and slabs are never written again.
        """
        draw = self.rows.draw(size, recent, self.seed, self.calls)
        for number in draw.missing:
            slab, layout = self._slab(number, where)
            draw.fill(number, slab, layout)
        leaves = self.kinds.index.leaves
        assert leaves is not None
        self.calls += 1
        self.hits += draw.hits
        self.misses += size - draw.hits
        kinds = self.kinds.row_kinds()

        def gather(device: Any) -> dict[str, Any]:
            arrays: list[Any] = draw.gather(kinds)
            values = [to_device(leaf.dtype, array, device) for leaf, array in zip(leaves, arrays, strict=True)]
            batch = nest(leaves, values)
            for name, column in (("trajectory_id", draw.ids), ("step", draw.steps), ("env", draw.envs)):
                batch[name] = to_device("I64", column, device)
            return batch

        return gather

    def _slab(self, number: int, where: str) -> tuple[np.ndarray[Any, Any], _core.SlabLayout]:
        """The file of a trajectory that is not in memory, mapped. The checksum is compared when a file is first used
        and again after it was written to; its size before each use."""
        entry, index = self.entries[number], self.kinds.index
        slab = self.memory.mapped(number)
        if slab is None:
            assert self._folder is not None
            path = self._folder.file(entry)
            if index.layouts[entry.layout].is_mapped:
                file = map_slab(where, index, entry, path, self.memory.checked(number))
                self.memory.keep_mapped(number, file)
                slab = file.slab
            else:  # read whole each time: keeping it would be a second cache
                slab = read_slab(where, index, entry, path, self._allow_pickle)
        return slab, self.kinds.core_layout(entry.layout)

    def copy(self, where: str, number: int, device: Any) -> Trajectory:
        """A trajectory as it was added."""
        entry, leaves = self.entries[number], self.kinds.index.leaves
        assert leaves is not None
        if self._folder is not None:
            slab = self.memory.unsaved(number)
            slab = self._slab(number, where)[0] if slab is None else slab
            arrays = [np.array(view) for view in views(slab, leaves, self.kinds.index.layouts[entry.layout])]
        else:
            records: Any = self.rows.slab(number)
            arrays = self.kinds.records(entry.layout).views(records)
        values = [to_device(leaf.dtype, array, device) for leaf, array in zip(leaves, arrays, strict=True)]
        return to_trajectory(leaves, values, entry.max_episode_length, entry.weights_id)
