"""Contents: the trajectories that a store holds, where their data is, and the draws from them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import _core
from ..errors import NotReady, SchemaError
from .folder import Folder
from .host_arrays import DrawnArrays, TrajectoryArrays
from .index import TrajectoryEntry, layouts_record
from .kinds import Kinds
from .layout import Layout, views
from .mapped import map_slab, read_slab
from .memory import Memory
from .saver import Note, Save
from .trajectory import Leaf, Parts

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
    ) -> tuple[Note | None, Save]:
        """Adds a trajectory, and returns the work of the saving thread: to write its layout, if that is new, and the
        trajectory. It cannot fail."""
        index = self.kinds.index
        kind, is_new = self.kinds.number_of(layout)
        note = Note(layouts_record(index.generation, [(kind, layout)])) if is_new else None
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
        return note, Save(number, entry, slab, leaves)

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

    def check_batch_size(self, where: str, batch_size: int, recent: int, most: int | None) -> None:
        """Raises where the newest ``recent`` trajectories (0: all) hold fewer transitions.

        Args:
            most: How many transitions there can ever be; None: not known.
        """
        there, held = int(self.rows.rows(recent)), len(self)
        if there == 0:
            raise NotReady(f"{where}: the buffer is empty; add() first")
        if batch_size <= there:
            return
        if most is not None and batch_size > most:
            raise SchemaError(
                f"{where}: batch_size: expected at most {most}, which is all that max_bytes= allows, got {batch_size}; "
                "give the buffer a larger max_bytes"
            )
        raise NotReady(
            f"{where}: batch_size: the newest {min(recent or held, held)} trajectories hold {there} transitions, got "
            f"{batch_size}; add more, or set a larger recent"
        )

    def draw(self, where: str, recent: int, size: int) -> Callable[[], DrawnArrays]:
        """Draws transitions of the newest ``recent`` trajectories (0: of all), uniformly, with replacement.

        Returns:
            A function that copies the rows. It needs no lock: the draw keeps the slabs alive, and slabs are never
            written again.
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

        def gather() -> DrawnArrays:
            arrays: list[Any] = draw.gather(kinds)
            places: Any = draw.ids, draw.steps, draw.envs
            return DrawnArrays(leaves, arrays, *places)

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

    def copy(self, where: str, number: int) -> TrajectoryArrays:
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
        return TrajectoryArrays(leaves, arrays, entry.max_episode_length, entry.weights_id)
