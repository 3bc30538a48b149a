"""Folder: the files and the index of an open buffer, which one process owns."""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..errors import StorageError
from ..files import Journal
from ..files.origin import Origin
from .formats import write
from .index import CLAIM, INDEX, KIND, Missing, TrajectoryEntry, TrajectoryIndex, parse, read_index
from .kinds import Kinds
from .layout import FORMATS
from .links import is_link, link, size_of
from .trajectory import Leaf
from .upstream import METADATA, NAMES, is_upstream, read_upstream, write_upstream

__all__ = ["Folder", "open_index"]

_OLD_INDEX = "index.jsonl"
_CLAIMED_AT_ONCE = 1_024  # ids
UNLISTED = 16  # files at most that are written before the journal learns of them
# The name of a trajectory's file; the six letters are those of a temporary file that a killed process left.
_NAME = re.compile(rf"trajectory_(\d{{1,18}})_.*\.(?:{'|'.join(FORMATS)})(\.[A-Za-z0-9]{{6}})?", re.DOTALL)


class Folder(Kinds):
    """Files and index of a folder. One thread writes. The lock on the journal is the lock of the folder: it cannot be
    opened a second time while it is open, and a forked child cannot write through its parent's.

    Args:
        seed: Of the random stream of a new folder.
        recover: Opens a damaged index with what is whole in it, and leaves out trajectories without a whole file.

    Raises:
        StorageError: Another buffer has it open, or its index cannot be read.
    """

    def __init__(self, path: Path, where: str, seed: int, allow_pickle: bool = False, recover: bool = False) -> None:
        self.path, self._where, self._allow_pickle, self._recover = path, where, allow_pickle, recover
        self._pinned, self._condemned, self._removing = 0, list[str](), threading.Lock()
        self._claimed = 0
        self._telling = threading.Lock()
        self.is_changed = False  # since RLinf's files were written
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise StorageError(f"{where}: folder: cannot make {path}: {reason}") from None
        is_new = not os.path.lexists(path / INDEX)
        if is_new and (path / _OLD_INDEX).exists():
            raise StorageError(
                f"{where}: {path}: its index is {_OLD_INDEX}, of a Sharpwave before {INDEX}; open and convert it with "
                "the version that wrote it"
            )
        self._journal = Journal(path / INDEX, KIND, where=where, recover=recover)
        try:
            super().__init__(self._open(seed, not is_new))
            self._written = self.index.written
            self._journal.append([self.index.opened_record()])
        except BaseException as error:
            if is_new:  # the journal is still empty, and ours: leave the folder as it was
                (path / INDEX).unlink(missing_ok=True)
            self._journal.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"{where}: folder: {path}: {error}") from None
            raise

    def _check_lost(self, had_journal: bool) -> None:
        """Refuses a journal without records beside files of trajectories: it was cut, unless RLinf wrote here last."""
        if not had_journal or is_upstream(self.path):
            return
        count = sum(1 for name in os.listdir(self.path) if _NAME.fullmatch(name))
        if count == 0:
            return
        if not self._recover:
            raise StorageError(
                f"{self._where}: {self.path / INDEX}: damaged: it has no record, and {count} files of trajectories are "
                "beside it; restore it from a copy, or give recover=True"
            )
        listed = "those that RLinf's index lists are kept" if (self.path / METADATA).exists() else "none is listed"
        warnings.warn(
            f"{self._where}: {self.path}: was damaged: its index is lost, with {count} files beside it: {listed}",
            stacklevel=5,
        )

    def _open(self, seed: int, had_journal: bool) -> TrajectoryIndex:
        index = parse(self._journal.records(), self.path / INDEX, self._where, self._recover)
        is_new = index.is_new
        if is_new:
            self._check_lost(had_journal)
            index = TrajectoryIndex(seed=seed)
        if is_upstream(self.path) or (is_new and any((self.path / name).exists() for name in (METADATA, *NAMES))):
            index = self._adopt(index, is_new)
        else:
            self._tidy(index)
            if self._recover:
                self._leave_out_missing(index)
            if index.lost:
                self._journal.replace(index.records())
            if not is_new and not index.was_closed:
                # A process died here. How many draws it made is not known: start beyond all that it can have made.
                index.calls = max(index.calls, (index.opens + 1) << 40)
                self.is_changed = True  # RLinf's index files may be older than the journal
        index.opens += 1
        return index

    def _adopt(self, ours: TrajectoryIndex, is_new: bool) -> TrajectoryIndex:
        """Takes over a folder that RLinf wrote to last: writes our index, then marks RLinf's metadata as ours. If the
        process is killed in between, the next opening does it again; nothing was added yet."""
        index, found = _read_theirs(self.path, self._where, self._allow_pickle, None if is_new else ours)
        index.opens, index.origins, index.uuid = ours.opens, ours.origins, ours.uuid
        elsewhere = [entry for entry in index.entries if found[entry.id].parent.resolve() != self.path.resolve()]
        if elsewhere:
            self.claim([index.name(entry) for entry in elsewhere])
            for entry in elsewhere:
                link(found[entry.id], self.path / index.name(entry))
        self._tidy(index)
        self._journal.replace([*index.records(), index.opened_record()])
        formats = {index.layouts[entry.layout].format for entry in index.entries}
        write_upstream(self.path, index, self.path.resolve(), min(formats, default="pt"), sync=True)
        return index

    def _tidy(self, index: TrajectoryIndex) -> None:
        """Removes files that the journal names as dropped, or as claimed and never added. The ids of all other files in
        the folder are not given again."""
        listed = {entry.id: entry for entry in (*index.entries, *index.aside)}
        # Of the claimed ids only those that a killed process can have written: it writes in order, and when it opened
        # the folder no file had an id that high.
        unlisted = range(index.next_id, index.next_id + UNLISTED * index.id_step)
        for name in os.listdir(self.path):
            matched = _NAME.fullmatch(name) if name.startswith("trajectory_") else None
            if matched is None:
                continue
            number = int(matched[1])
            known = listed.get(number)
            if known is not None and index.name(known) == name:
                continue
            was_named = name.removesuffix(matched[2] or "")
            if (
                name in index.dropped
                or was_named in index.claimed_names
                or (number in unlisted and any(number in ids for ids in index.claimed_ids))
            ):
                (self.path / name).unlink(missing_ok=True)
            else:
                index.raise_next_id(number + 1)
        index.dropped.clear()
        index.claimed_names.clear()
        index.claimed_ids.clear()

    def _leave_out_missing(self, index: TrajectoryIndex) -> None:
        lost = index.lost + self._journal.lost_records
        for part in ("entries", "aside"):
            every = getattr(index, part)
            whole = [entry for entry in every if size_of(self.path / index.name(entry)) == entry.bytes]
            setattr(index, part, whole)
            index.lost += len(every) - len(whole)
        if lost or index.lost:
            warnings.warn(
                f"{self._where}: {self.path}: was damaged: {index.lost} trajectories of the index have no whole file "
                f"or no layout and are left out, {self._journal.lost_records} records of the index are lost; files "
                "that the index does not list stay where they are",
                stacklevel=4,
            )

    # ---- files ------------------------------------------------------------------------------------------------

    def claim(self, names: Iterable[str]) -> None:
        """Writes into the journal which files will be written, so that those of a killed process are recognised."""
        self._journal.append([files.Entry(CLAIM, {"names": list(names)})])

    def save(self, entry: TrajectoryEntry, slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...]) -> None:
        """Writes the file of a trajectory. Its record in the journal is written later."""
        if entry.id >= self._claimed:
            end = entry.id + _CLAIMED_AT_ONCE * self.index.id_step
            self._journal.append([files.Entry(CLAIM, {"ids": [entry.id, end]})])
            self._claimed = end
        layout = self.index.layouts[entry.layout]
        path = self.path / entry.name(layout.format)
        self.is_changed = True
        entry.start, entry.bytes, entry.crc = write(
            path, slab, leaves, layout, entry.max_episode_length, entry.weights_id
        )

    def append(self, records: list[files.Entry]) -> None:
        if records:
            self.is_changed = True
            self._written += len(records)
            self._journal.append(records)

    def file(self, entry: TrajectoryEntry) -> Path:
        return self.path / self.index.name(entry)

    def remove(self, names: list[str]) -> None:
        """Deletes files whose trajectories the journal drops; while a checkpoint is made, this waits."""
        with self._removing:
            self._condemned += names
            while self._condemned and not self._pinned:
                (self.path / self._condemned[-1]).unlink(missing_ok=True)
                self._condemned.pop()

    def pin(self, by: int) -> None:
        """Keeps files from being deleted (1), or allows it again (-1)."""
        with self._removing:
            self._pinned += by

    # ---- life -------------------------------------------------------------------------------------------------

    def load(
        self,
        where: str,
        held: list[TrajectoryEntry],
        index: TrajectoryIndex,
        sources: dict[int, Path],
        origin: Origin | None = None,
    ) -> None:
        """Replaces the trajectories that are drawn from by those of an index, by links to their files. Those that the
        folder held are set aside: their files and records stay. Where the index has the same id, they get another.
        Calls of clients that the folder or the index remembers are remembered, and ``origin``, the call that loads.

        If the process is killed, the folder is either as before, except for those ids, or as after.
        """
        old = self.index
        mine = {old.name(entry): entry for entry in (*held, *old.aside)}
        coming = {index.name(entry): entry for entry in index.entries}
        same = {
            name
            for name, entry in coming.items()
            if name in mine
            and (_is_same(mine[name], entry, self.path / name) or is_link(sources[entry.id], self.path / name))
        }
        taken = {entry.id for entry in index.entries}
        floor = max([old.next_id, index.next_id, *(entry.id + 1 for entry in (*mine.values(), *coming.values()))])
        moved: dict[str, TrajectoryEntry] = {}  # trajectories that get another id, by their former file name
        for name, entry in mine.items():
            if name not in same and entry.id in taken:
                moved[name] = replace(entry, id=floor)
                floor += 1
        new = [name for name in coming if name not in same]
        for name in new:
            path, source = self.path / name, sources[coming[name].id]
            if name not in mine and os.path.lexists(path) and not is_link(source, path):
                raise StorageError(f"{where}: {path}: a file of that name exists and is not in the index; move it away")

        def after(entries: Iterable[TrajectoryEntry]) -> list[TrajectoryEntry]:
            return [moved.get(old.name(entry), entry) for entry in entries]

        made: list[Path] = []
        is_renamed = False
        try:
            self.claim([*new, *(old.name(entry) for entry in moved.values())])
            for name, entry in moved.items():
                link(self.path / name, self.path / old.name(entry))
                made.append(self.path / old.name(entry))
            if moved:
                before = replace(old, entries=after(held), aside=after(old.aside), next_id=floor)
                self._journal.replace([*before.records(), files.Entry(CLAIM, {"names": new})])
                is_renamed = True
                for name in moved:
                    (self.path / name).unlink()
            here = self.path.resolve()
            for name in new:
                source = sources[coming[name].id]
                if source.name in moved and source.parent.resolve() == here:
                    source = self.path / old.name(moved[source.name])  # that file has another name now
                link(source, self.path / name)
                made.append(self.path / name)
            combined = replace(
                old,
                **index.state(),
                entries=[],
                aside=after(entry for name, entry in mine.items() if name not in same),
                layouts=list(old.layouts),
                generations=list(old.generations),
                former=dict(old.former),
                origins=old.origins.joined(index.origins),
            )
            if origin is not None:
                combined.origins.add(origin)
            if old.leaves is not None and set(old.leaves) != set(index.leaves or ()):
                combined.former[old.generation] = old.leaves
                combined.generation = max([old.generation, *old.former]) + 1
                combined.leaves = None  # rows have other leaves from now on
            numbers = {
                layout: number
                for number, layout in enumerate(old.layouts)
                if old.generations[number] == combined.generation
            }
            combined.entries = combined.take(index, index.entries, numbers)
            combined.opens = max(index.opens, old.opens)
            combined.raise_next_id(floor)
            self._journal.replace([*combined.records(), combined.opened_record()])
        except BaseException:
            self._undo_load(old, held, moved, made, is_renamed)
            raise
        self.is_changed = True
        self._claimed = 0
        self._take(combined)

    def _undo_load(
        self,
        old: TrajectoryIndex,
        held: list[TrajectoryEntry],
        moved: dict[str, TrajectoryEntry],
        made: list[Path],
        is_renamed: bool,
    ) -> None:
        back = {old.name(entry): name for name, entry in moved.items()}
        for path in made:
            if path.name not in back:
                path.unlink(missing_ok=True)
        for path in made:
            if path.name in back and not os.path.lexists(self.path / back[path.name]):
                link(path, self.path / back[path.name])
        if is_renamed:
            whole = replace(old, entries=held)
            self._journal.replace([*whole.records(), old.opened_record()])
        for path in made:
            if path.name in back:
                path.unlink(missing_ok=True)

    def tell_rlinf(self, index: Callable[[], TrajectoryIndex], format: str, *, is_asked: bool = False) -> None:
        """Writes RLinf's two index files, if the folder changed since they were written. RLinf looks for files of one
        format: for a folder with several formats, or one that RLinf does not know, they are not written.

        Args:
            index: Makes the index of the trajectories that have files. It is called after ``is_changed`` was reset, so
                that later changes are written the next time.
            is_asked: Writes them in any case, and syncs them.
        """
        with self._telling:  # the saving thread, and a checkpoint into the folder itself
            if is_asked:
                write_upstream(self.path, index(), self.path.resolve(), format, sync=True)
            elif self.is_changed:
                self.is_changed = False
                try:
                    known = index()
                    if {known.layouts[entry.layout].format for entry in known.entries} in ({"pt"}, {"pkl"}, set[str]()):
                        write_upstream(self.path, known, self.path.resolve(), format)
                except BaseException:
                    self.is_changed = True
                    raise

    def close(self, index: TrajectoryIndex | None = None) -> None:
        """Closes the folder. A journal that has become much longer than the index in it is first replaced by the
        records of ``index``: a short journal is opened faster."""
        try:
            if index is not None and not self._condemned and self._written > 1_000 + len(index.entries) // 8:
                self._journal.replace(index.records())
        finally:
            self._journal.close()


def _is_same(one: TrajectoryEntry, other: TrajectoryEntry, path: Path) -> bool:
    facts = ("uuid", "crc", "bytes", "steps", "envs", "start")
    return all(getattr(one, name) == getattr(other, name) for name in facts) and size_of(path) == one.bytes


# ---- reading ---------------------------------------------------------------------------------------------------------


def open_index(
    path: Path, where: str, allow_pickle: bool, with_aside: bool = False, recover: bool = False
) -> tuple[TrajectoryIndex, dict[int, Path]]:
    """The index of any folder of trajectories, ours or RLinf's, and the file of each. Nothing is changed.

    Args:
        with_aside: Also the trajectories that a load set aside, behind the others.
        recover: Reads a damaged index of ours, leaves out trajectories without a whole file, and warns.

    Raises:
        Missing: The folder or a file is not there.
        StorageError: A file has another size than the index says.
    """
    if not path.is_dir():
        raise Missing(f"{where}: {path}: there is no such folder")
    ours = _read_ours(path, where, recover) if (path / INDEX).exists() else None
    if ours is None or is_upstream(path):
        return _read_theirs(path, where, allow_pickle, ours)
    if recover:
        whole = [entry for entry in ours.entries if size_of(path / ours.name(entry)) == entry.bytes]
        lost = ours.lost + len(ours.entries) - len(whole)
        ours.entries = whole
        if lost:
            warnings.warn(
                f"{where}: {path}: is damaged: {lost} trajectories of its index have no whole file or no layout and "
                "are left out",
                stacklevel=5,
            )
    if with_aside:
        ours.entries += [entry for entry in ours.aside if ours.generations[entry.layout] == ours.generation]
    found = {}
    for entry in ours.entries:
        file = path / ours.name(entry)
        size = size_of(file)
        if size < 0:
            raise Missing(f"{where}: {file}: there is no such file, and the index lists it")
        if size != entry.bytes:
            raise StorageError(f"{where}: {file}: expected {entry.bytes} bytes, got {size}")
        found[entry.id] = file
    return ours, found


def _read_ours(path: Path, where: str, recover: bool) -> TrajectoryIndex:
    try:
        return read_index(path, where)
    except StorageError as error:
        if not recover:
            raise
        index = read_index(path, where, recover=True)
        warnings.warn(f"{error}; its whole records are read, they list {len(index.entries)} trajectories", stacklevel=6)
        return index


def _read_theirs(
    path: Path, where: str, allow_pickle: bool, ours: TrajectoryIndex | None
) -> tuple[TrajectoryIndex, dict[int, Path]]:
    """RLinf's index, and those trajectories of our index that it does not list and whose files are whole. RLinf never
    deletes a trajectory, so it did not know them."""
    index, found = read_upstream(path, where, allow_pickle)
    if ours is None:
        return index, found
    index.calls, index.generation = ours.calls, ours.generation
    unknown = [
        entry
        for entry in (*ours.entries, *ours.aside)
        if entry.id not in found and size_of(path / ours.name(entry)) == entry.bytes
    ]
    if not unknown:
        return index, found
    try:
        taken = index.take(ours, [entry for entry in unknown if ours.generations[entry.layout] == ours.generation],
                           {layout: number for number, layout in enumerate(index.layouts)})  # fmt: skip
    except ValueError:
        taken = []
    index.entries = sorted([*index.entries, *taken], key=lambda entry: entry.id)
    found |= {entry.id: path / index.name(entry) for entry in taken}
    index.raise_next_id(max(entry.id for entry in unknown) + 1)
    warnings.warn(
        f"{where}: {path}: RLinf wrote here last and does not list {len(unknown)} trajectories of our index whose "
        f"files are whole; {len(taken)} of them are kept",
        stacklevel=4,
    )
    return index, found
