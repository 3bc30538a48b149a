"""The index of a folder of trajectories: a journal (``files/journal.py``) of kind "trajectories".

Each record is a JSON object; its kind says which:

    1 ROWS    {"generation": 0, "leaves": [[path, dtype, shape], ...]}      leaves of a row; before the first trajectory
    2 LAYOUTS {"generation": 0, "layouts": [[number, format, ...], ...]}    where the leaves are in files
    3 ADD     {"add": [[id, uuid, steps, ...], ...]}                        trajectories whose files are whole
    4 DROP    {"drop": [id, ...]}                                           deleted; their files may still exist
    5 CLEAR   {"clear": true}                                               all are deleted; the leaves may change
    6 OPENED  {"opened": 3, "uuid"}                                         opened for the third time
    7 STATE   {"seed", "calls", "opens", "next_id", "id_step", "uuid"}      last record of a folder that was closed
    8 ASIDE   {"aside": [id, ...]}                                          kept, and no longer drawn from
    9 CLAIM   {"ids": [first, end]} or {"names": [...]}                     files that will be written
   10 ORIGINS {"origins": [[token, oldest, [number, ...]], ...]}            calls of clients that were executed

ADD and CLEAR of a client's call have "origins" too, one [token, number, oldest] for each call (``origins.py``). One
record has both the change and its origin, so after a kill the journal has both or none.

Every record is checked before it is used: formats are from a fixed list, a file's name consists of the trajectory's id,
weights and format and cannot lead out of the folder, layouts lie within their files. A file is deleted only if a record
names it, as dropped or as claimed and never added.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from .. import files
from ..errors import StorageError
from ..files import Record
from ..files.origin import Origin
from .executed_calls import ExecutedCalls
from .layout import FORMATS, Layout, fits, reordered
from .trajectory import DTYPES, FIELDS, Leaf

__all__ = [
    "INDEX",
    "KIND",
    "MOST_WEIGHTS_ID",
    "Missing",
    "TrajectoryEntry",
    "TrajectoryIndex",
    "is_weights_id",
    "read_index",
]

INDEX, KIND = "trajectories.journal", "trajectories"
ROWS, LAYOUTS, ADD, DROP, CLEAR, OPENED, STATE, ASIDE, CLAIM, ORIGINS = range(1, 11)
MOST_WEIGHTS_ID = 160  # bytes; a file's name has 255
_TOGETHER = 1_000  # trajectories a record, when an index is written whole
_MOST = 2**62
_WRONG = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, StorageError)
_STATE = {  # least and most
    "seed": (0, 2**64 - 1),
    "calls": (0, 2**64 - 1),
    "opens": (0, 2**23),
    "next_id": (0, _MOST),
    "id_step": (1, 2**32),
}


class Missing(StorageError, FileNotFoundError):
    """A file or folder is missing."""


@dataclass(slots=True)
class TrajectoryEntry:
    """One trajectory. ``start``, ``bytes`` and ``crc`` are known once its file is written; files of other programs have
    no ``crc``."""

    id: int
    uuid: str
    steps: int
    envs: int
    max_episode_length: int
    weights_id: str
    layout: int
    start: int = 0
    bytes: int = 0
    crc: int | None = None

    def row(self) -> list[Any]:
        facts = [self.id, self.uuid, self.steps, self.envs, self.max_episode_length, self.weights_id, self.layout]
        return [*facts, self.start, self.bytes, self.crc]

    def name(self, format: str) -> str:
        return f"trajectory_{self.id}_{self.weights_id}.{format}"


def is_weights_id(name: Any) -> bool:
    """Whether a string may be part of a file's name."""
    if not isinstance(name, str) or not set(name).isdisjoint("/\0"):
        return False
    try:
        return len(name.encode()) <= MOST_WEIGHTS_ID
    except UnicodeEncodeError:
        return False


@dataclass
class TrajectoryIndex:
    """The trajectories of a folder, as its journal lists them."""

    seed: int = 1234
    calls: int = 0  # of sample: the state of the random stream
    opens: int = 0
    next_id: int = 0
    id_step: int = 1
    leaves: tuple[Leaf, ...] | None = None
    layouts: list[Layout] = field(default_factory=list)
    entries: list[TrajectoryEntry] = field(default_factory=list)
    aside: list[TrajectoryEntry] = field(default_factory=list)  # kept, and not drawn from
    generation: int = 0  # of the leaves
    generations: list[int] = field(default_factory=list)  # of every layout
    former: dict[int, tuple[Leaf, ...]] = field(default_factory=dict)  # leaves of other generations, of what is aside
    is_new: bool = True  # the journal has no record
    was_closed: bool = False
    written: int = 0  # records that the journal has
    dead: int = 0  # trajectories in the journal that were deleted
    dropped: set[str] = field(default_factory=set)  # names of files that the journal drops
    claimed_ids: list[range] = field(default_factory=list)
    claimed_names: set[str] = field(default_factory=set)
    lost: int = 0  # trajectories that are unreadable because the journal is damaged
    origins: ExecutedCalls = field(default_factory=ExecutedCalls)
    uuid: str = field(default_factory=lambda: uuid4().hex)  # of the folder

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def name(self, entry: TrajectoryEntry) -> str:
        return entry.name(self.layouts[entry.layout].format)

    @property
    def total_samples(self) -> int:
        return sum(entry.steps * entry.envs for entry in self.entries)

    def raise_next_id(self, floor: int) -> None:
        """Raises the next id to at least ``floor``, in steps of ``id_step``: ranks keep their own ids."""
        if self.next_id < floor:
            self.next_id += -(-(floor - self.next_id) // self.id_step) * self.id_step

    # ---- writing ----------------------------------------------------------------------------------------------

    def records(self) -> Iterator[files.Entry]:
        """The records of the whole index, without layouts that no trajectory has."""
        aside: dict[int, list[TrajectoryEntry]] = {}
        for entry in self.aside:
            aside.setdefault(self.generations[entry.layout], []).append(entry)
        for generation in sorted(aside.keys() | {self.generation}, key=lambda number: number == self.generation):
            leaves = self.leaves if generation == self.generation else self.former[generation]
            if leaves is None:
                continue
            put = aside.get(generation, [])
            every = [*put, *(self.entries if generation == self.generation else ())]
            yield rows_record(generation, leaves)
            used = sorted({entry.layout for entry in every})
            if used:
                yield layouts_record(generation, [(number, self.layouts[number]) for number in used])
            for at in range(0, len(every), _TOGETHER):
                yield add_record(every[at : at + _TOGETHER])
            if put:
                yield files.Entry(ASIDE, {"aside": [entry.id for entry in put]})
        if self.origins:
            yield files.Entry(ORIGINS, {"origins": self.origins.rows()})
        yield self.state_record()

    def add_layout(self, layout: Layout) -> int:
        """Adds a layout to the present generation, and returns its number."""
        self.layouts.append(layout)
        self.generations.append(self.generation)
        return len(self.layouts) - 1

    def take(
        self, other: TrajectoryIndex, entries: Iterable[TrajectoryEntry], numbers: dict[Layout, int]
    ) -> list[TrajectoryEntry]:
        """Trajectories of another index, with their layouts as this one numbers them (``numbers``: those known).

        Raises:
            ValueError: Their rows are not of the same leaves.
        """
        if self.leaves is None:
            self.leaves = other.leaves
        if other.leaves is None:
            return []  # an index without trajectories
        order: list[int] | None = None
        if other.leaves != self.leaves:
            at = {leaf: number for number, leaf in enumerate(other.leaves or ())}
            if set(at) != set(self.leaves or ()):
                differing = sorted({str(leaf) for leaf in set(at) ^ set(self.leaves or ())})
                raise ValueError(f"its rows are not those of the others: {', '.join(differing)}")
            order = [at[leaf] for leaf in self.leaves or ()]
        renumbered: dict[int, int] = {}
        taken = []
        for entry in entries:
            if entry.layout not in renumbered:
                layout = other.layouts[entry.layout]
                layout = layout if order is None else reordered(layout, order)
                if layout not in numbers:
                    numbers[layout] = self.add_layout(layout)
                renumbered[entry.layout] = numbers[layout]
            taken.append(replace(entry, layout=renumbered[entry.layout]))
        return taken

    def state_record(self) -> files.Entry:
        return files.Entry(STATE, {**self.state(), "uuid": self.uuid})

    def opened_record(self) -> files.Entry:
        return files.Entry(OPENED, {"opened": self.opens, "uuid": self.uuid})


def rows_record(generation: int, leaves: tuple[Leaf, ...]) -> files.Entry:
    return files.Entry(ROWS, {"generation": generation, "leaves": leaves})


def layouts_record(generation: int, layouts: Iterable[tuple[int, Layout]]) -> files.Entry:
    return files.Entry(
        LAYOUTS, {"generation": generation, "layouts": [[number, *layout] for number, layout in layouts]}
    )


def add_record(entries: list[TrajectoryEntry], origin: Origin | None = None) -> files.Entry:
    return files.Entry(ADD, {"add": [entry.row() for entry in entries], **_said_origin(origin)})


def drop_record(entries: list[TrajectoryEntry]) -> files.Entry:
    return files.Entry(DROP, {"drop": [entry.id for entry in entries]})


def clear_record(origin: Origin | None = None) -> files.Entry:
    return files.Entry(CLEAR, {"clear": True, **_said_origin(origin)})


def _said_origin(origin: Origin | None) -> dict[str, Any]:
    return {} if origin is None else {"origins": [origin.to_json()]}


def joined(records: list[files.Entry]) -> list[files.Entry]:
    """Joins the records of consecutive trajectories: a tenth of the bytes to read when the folder is opened."""
    made: list[files.Entry] = []
    for record in records:
        if made and record.kind == made[-1].kind == ADD:
            first, second = made[-1].head, record.head
            both = {"add": first["add"] + second["add"]}
            if "origins" in first or "origins" in second:
                both["origins"] = first.get("origins", []) + second.get("origins", [])
            made[-1] = files.Entry(ADD, both)
        else:
            made.append(record)
    return made


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_index(folder: Path, where: str, recover: bool = False) -> TrajectoryIndex:
    """The index of a folder that another process may have open. Nothing is changed.

    Args:
        recover: Reads the whole records of a damaged index.

    Raises:
        Missing: There is none.
        StorageError: It is not one, or damaged.
    """
    path = folder / INDEX
    if not path.exists():
        raise Missing(f"{where}: {path}: there is no such file")
    return parse(files.read_journal(path, KIND, where=where, recover=recover), path, where, recover)


def parse(records: Iterable[Record], path: Path, where: str, recover: bool = False) -> TrajectoryIndex:
    """What the records of a journal say.

    Args:
        recover: Leaves out and counts trajectories whose layout is not known because its record is damaged.

    Raises:
        StorageError: The content of a record is impossible.
    """
    with _no_collection():
        every = list(records)
        try:
            # One call: a hundred thousand would take most of the time.
            said = json.loads(b"[%s]" % b",".join([record.head for record in every]))
            if len(said) != len(every):
                raise ValueError("a record is more than one object")
        except (ValueError, RecursionError) as error:
            raise StorageError(f"{where}: {path}: a record is not JSON: {error}") from None
        reader = _Reader(recover)
        at = 0
        try:
            for record, part in zip(every, said, strict=True):
                at = record.at
                reader.apply(record.kind, part)
            made = reader.finish()
        except _WRONG as error:
            raise _refused(where, path, at, error) from None
        made.written = len(every)
        return made


def _refused(where: str, path: Path, at: int, error: Exception) -> StorageError:
    return StorageError(
        f"{where}: {path}: the record at byte {at} is intact, but its content is wrong: {error}; the folder is "
        "refused, nothing of it was read"
    )


class _Reader:
    """Builds an index of records. Trajectories are collected first and then checked column by column, which is much
    faster for a hundred thousand of them than one after the other."""

    def __init__(self, recover: bool) -> None:
        self._recover = recover
        self._index = TrajectoryIndex()
        self._layouts: dict[int, tuple[int, Layout]] = {}  # with their generation
        self._good: set[int] = set()  # layouts that fit their leaves
        self._rows: dict[int, tuple[Leaf, ...]] = {}
        self._waiting: list[Any] = []
        self._entries: dict[int, TrajectoryEntry] = {}
        self._aside: dict[int, TrajectoryEntry] = {}
        self._orphans: set[int] = set()  # ids of trajectories whose layout is lost (recover)

    def apply(self, kind: int, said: Any) -> None:
        if type(said) is not dict:
            raise TypeError(f"expected an object, got {type(said).__name__}")
        index = self._index
        index.is_new = index.was_closed = False
        if kind == ADD:
            rows = said["add"]
            if type(rows) is not list:
                raise TypeError("expected a list of trajectories")
            self._waiting += rows
            self._read_origins(said)
            return
        if kind == LAYOUTS:
            for row in said["layouts"]:
                self._read_layout(_number(said["generation"], _MOST), row)
            return
        self._take_waiting()
        if kind == DROP:
            for number in said["drop"]:
                self._drop(number)
        elif kind == ROWS:
            self._read_rows(said)
        elif kind == CLEAR:
            for number in list(self._entries):
                self._drop(number)
            index.leaves = None
            self._read_origins(said)
        elif kind == OPENED:
            index.opens = _number(said["opened"], 2**23)
            self._read_uuid(said)
        elif kind == STATE:
            for name, (least, most) in _STATE.items():
                setattr(index, name, _number(said[name], most, least))
            index.was_closed = True
            self._read_uuid(said)
        elif kind == ASIDE:
            for number in said["aside"]:
                if number in self._entries:
                    self._aside[number] = self._entries.pop(number)
                elif number not in self._orphans:
                    self._missing(f"sets trajectory {number} aside, which is not there")
        elif kind == CLAIM:
            self._read_claim(said)
        elif kind == ORIGINS:
            for row in said["origins"]:
                index.origins.take_row(row)
        else:
            raise ValueError(f"unknown kind {kind}")

    def _missing(self, what: str) -> None:
        if not self._recover:
            raise ValueError(what)

    def _read_rows(self, said: dict[str, Any]) -> None:
        if self._entries and not self._recover:
            raise ValueError("changes the leaves of a row while there are trajectories")
        leaves = tuple(_leaf(*parts) for parts in said["leaves"])
        paths = {leaf.path for leaf in leaves}
        if not leaves or len(paths) != len(leaves):
            raise ValueError("no leaves, or one twice")
        if any(path[:size] in paths for path in paths for size in range(1, len(path))):
            raise ValueError("a leaf inside of a leaf")
        if self._recover and self._entries:  # the record of the clear between them is lost
            for number in list(self._entries):
                self._drop(number)
        generation = _number(said["generation"], _MOST)
        if self._rows.setdefault(generation, leaves) != leaves:
            raise ValueError(f"generation {generation} is there twice")
        self._index.leaves, self._index.generation = leaves, generation

    def _read_layout(self, generation: int, row: Any) -> None:
        number, format, steps, envs, epochs, offsets, size, strides, is_packed = row
        if format not in FORMATS:
            raise ValueError(f"expected a format of {', '.join(FORMATS)}, got {str(format)[:60]!r}")
        if type(is_packed) is not bool:
            raise TypeError("is_packed: expected true or false")
        pairs = None
        if strides is not None:
            pairs = tuple((_number(step, _MOST), _number(env, _MOST)) for step, env in strides)
        layout = Layout(
            format,
            _number(steps, _MOST, 1),
            _number(envs, _MOST, 1),
            tuple(_number(value, _MOST) for value in epochs),
            tuple(_number(value, _MOST) for value in offsets),
            _number(size, _MOST),
            pairs,
            is_packed,
        )
        if _number(number, 2**32) in self._layouts:
            raise ValueError(f"layout {number} is there twice")
        self._layouts[number] = generation, layout

    def _read_uuid(self, said: dict[str, Any]) -> None:
        uuid = said.get("uuid", self._index.uuid)  # folders of former versions have none
        if type(uuid) is not str or len(uuid) != 32:
            raise ValueError(f"expected a uuid of 32 letters, got {str(uuid)[:60]!r}")
        self._index.uuid = uuid

    def _read_origins(self, said: dict[str, Any]) -> None:
        for row in said.get("origins", ()):
            self._index.origins.add(Origin.read(row))

    def _read_claim(self, said: dict[str, Any]) -> None:
        if "ids" in said:
            first, end = said["ids"]
            self._index.claimed_ids.append(range(_number(first, _MOST), _number(end, _MOST)))
        for name in said.get("names", ()):
            if not isinstance(name, str) or "/" in name or not name.startswith("trajectory_"):
                raise ValueError(f"claims {str(name)[:60]!r}, which is no file of a trajectory")
            self._index.claimed_names.add(name)

    def _drop(self, number: Any) -> None:
        entry = self._entries.pop(number, None)
        entry = self._aside.pop(number, None) if entry is None else entry
        if entry is not None:
            self._index.dropped.add(entry.name(self._layouts[entry.layout][1].format))
            self._index.dead += 1
        elif number not in self._orphans:
            self._missing(f"drops trajectory {number}, which is not there")

    # ---- trajectories -----------------------------------------------------------------------------------------

    def _take_waiting(self) -> None:
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        if set(map(type, rows)) != {list} or set(map(len, rows)) != {10}:
            raise TypeError("expected lists of ten as trajectories")
        ids, uuids, steps, envs, lengths, weights, layouts, starts, sizes, crcs = zip(*rows, strict=True)
        for column, most in (
            (ids, _MOST), (steps, _MOST), (envs, _MOST), (lengths, 2**63 - 1), (layouts, 2**32), (starts, _MOST),
            (sizes, _MOST), ([crc for crc in crcs if crc is not None], 2**32 - 1),
        ):  # fmt: skip
            if column and (set(map(type, column)) != {int} or min(column) < 0 or max(column) > most):
                raise ValueError(f"a trajectory with a number that is not a whole number of 0 to {most}")
        if set(map(type, uuids)) != {str} or max(map(len, uuids)) > 64:
            raise ValueError("a trajectory with an impossible uuid")
        for name in set(weights):
            if not is_weights_id(name):
                raise ValueError(f"a trajectory with weights {str(name)[:60]!r}, which no file's name can have")
        unknown = {number for number in set(layouts) if not self._is_known(number)}
        for facts in set(zip(layouts, steps, envs, starts, sizes, strict=True)):
            if facts[0] not in unknown:
                self._check_facts(*facts)
        made = list(map(TrajectoryEntry, ids, uuids, steps, envs, lengths, weights, layouts, starts, sizes, crcs))
        if unknown:
            bad = [entry for entry in made if entry.layout in unknown]
            self._orphans.update(entry.id for entry in bad)
            self._index.lost += len(bad)
            made = [entry for entry in made if entry.layout not in unknown]
        before = len(self._entries)
        self._entries.update(zip(ids, made, strict=True) if not unknown else ((one.id, one) for one in made))
        if len(self._entries) != before + len(made) or not self._aside.keys().isdisjoint(ids):
            raise ValueError("two trajectories with one id")
        self._index.next_id = max(self._index.next_id, max(ids) + 1)

    def _is_known(self, number: int) -> bool:
        """Whether a layout is there and fits what a row is."""
        if number in self._good:
            return True
        generation, layout = self._layouts.get(number, (-1, None))
        leaves = self._rows.get(generation)
        if leaves is None or layout is None or generation != self._index.generation:
            if not self._recover:
                raise ValueError(f"a trajectory of layout {number}, which is not there")
            return False
        count = len(leaves)
        strides = layout.strides
        if len(layout.epochs) != count or len(layout.offsets) != count or (strides and len(strides) != count):
            raise ValueError(f"layout {number} has not as many places as there are leaves")
        if any(extra and layout.steps % extra for extra in layout.epochs):
            raise ValueError(f"layout {number} has rows that make no epochs")
        layout.to_core(leaves)  # the engine's own check
        self._good.add(number)
        return True

    def _check_facts(self, number: int, steps: int, envs: int, start: int, size: int) -> None:
        layout, leaves = self._layouts[number][1], self._index.leaves
        assert leaves is not None
        if (steps, envs) != (layout.steps, layout.envs):
            raise ValueError(f"a trajectory of {steps} steps and {envs} environments with a layout of others")
        if layout.is_mapped and start + layout.bytes > size:
            raise ValueError(f"a slab of {layout.bytes} bytes at byte {start} of a file of {size}")
        if not fits(layout.data_bytes(leaves), size):
            raise ValueError(f"rows of {layout.data_bytes(leaves)} bytes in a file of {size}")

    def finish(self) -> TrajectoryIndex:
        self._take_waiting()
        index = self._index
        index.entries, index.aside = list(self._entries.values()), list(self._aside.values())
        if sum(entry.steps * entry.envs for entry in index.entries) > _MOST:
            raise ValueError("more rows than can be counted")
        size = max(self._layouts, default=-1) + 1
        if size > len(self._layouts) + 1_000_000:
            raise ValueError("a layout with an impossible number")
        empty = Layout("pt", 1, 1, (), (), 0)
        known = [self._layouts.get(number, (-1, empty)) for number in range(size)]
        index.generations, index.layouts = [part for part, _ in known], [part for _, part in known]
        index.former = {number: leaves for number, leaves in self._rows.items() if number != index.generation}
        if index.was_closed:  # then no work was interrupted
            index.claimed_ids.clear()
            index.claimed_names.clear()
        # A name may be used again after its trajectory was dropped; then its file must stay.
        there = {index.name(entry) for entry in (*index.entries, *index.aside)} if index.dropped else set[str]()
        index.dropped -= there
        return index


def _number(value: Any, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"expected a whole number, {least} to {most}, got {str(value)[:60]}")
    return value


def _leaf(path: Any, dtype: Any, shape: Any) -> Leaf:
    if type(path) is not list or not path or set(map(type, path)) != {str} or path[0] not in FIELDS:
        raise ValueError(f"expected the name of a field, got {str(path)[:60]!r}")
    if dtype not in DTYPES:
        raise ValueError(f"expected a dtype of {', '.join(DTYPES)}, got {str(dtype)[:60]!r}")
    if type(shape) is not list or len(shape) > 28:
        raise ValueError("expected a shape of at most 28 axes")
    size = 1
    for extent in shape:
        size *= max(1, _number(extent, 2**50))
        _number(size, 2**50)
    return Leaf(tuple(path), dtype, tuple(shape))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Stops the garbage collector, which would take half of the time and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
