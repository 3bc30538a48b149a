"""A live folder of trajectories: this process' own while it is open."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..errors import StorageError
from .files import Layout, capture, checksum, unpickle, write
from .index import INDEX, Entry, Index, Journal, Missing, line
from .records import Records
from .trajectory import DTYPES, Leaf, read
from .upstream import METADATA, NAMES, is_upstream, read_upstream

__all__ = ["LOCK", "Folder", "Kinds", "link", "lock", "open_index", "read_slab", "replace_folder", "unlock"]

LOCK = ".lock"


class Kinds:
    """What a row of the trajectories is, and the numbered layouts of their slabs."""

    def __init__(self, index: Index) -> None:
        self._take(index)

    def _take(self, index: Index) -> None:
        self.index = index
        self._numbers = {layout: number for number, layout in enumerate(index.layouts)}
        self._cores: dict[int, _core.SlabLayout] = {}
        self._records: dict[int, Records] = {}
        self._row_kinds: _core.RowKinds | None = None

    def set_leaves(self, leaves: tuple[Leaf, ...] | None) -> None:
        """What a row is, from now on."""
        self.index.leaves = leaves
        self._cores.clear()
        self._records.clear()
        self._row_kinds = None

    def row_kinds(self) -> _core.RowKinds:
        """Dtypes and shapes of rows, for the engine."""
        if self._row_kinds is None:
            leaves = self.index.leaves or ()
            self._row_kinds = _core.RowKinds([(np.dtype(DTYPES[leaf.dtype][0]), leaf.shape) for leaf in leaves])
        return self._row_kinds

    def number_of(self, layout: Layout) -> tuple[int, bool]:
        """A layout's number, and whether it is new."""
        known = self._numbers.get(layout)
        if known is not None:
            return known, False
        self._numbers[layout] = number = len(self.index.layouts)
        self.index.layouts.append(layout)
        return number, True

    def core_layout(self, number: int) -> _core.SlabLayout:
        made = self._cores.get(number)
        if made is None:
            assert self.index.leaves is not None
            made = self._cores[number] = self.index.layouts[number].to_core(self.index.leaves)
        return made

    def records(self, number: int) -> Records:
        """How trajectories of a layout are kept in the cache."""
        made = self._records.get(number)
        if made is None:
            assert self.index.leaves is not None
            made = self._records[number] = Records(self.index.leaves, self.index.layouts[number])
        return made

    def to_records(self, number: int, slab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A slab of that layout, row by row."""
        return self.records(number).make(slab, self.core_layout(number), self.row_kinds())


class Folder(Kinds):
    """Files and journal of a folder. One thread writes; opening it again elsewhere is refused while it is open.

    Args:
        seed: Of the random stream, where the folder is new.

    Raises:
        StorageError: Another buffer has it open, or what is there cannot be read.
    """

    def __init__(self, path: Path, where: str, seed: int, allow_pickle: bool = False) -> None:
        self.path, self._where, self._allow_pickle = path, where, allow_pickle
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{where}: storage_dir: cannot make {path}: {error.strerror}") from None
        self._lock = lock(path, where)
        self._pinned, self._condemned, self._removing = 0, list[str](), threading.Lock()
        try:
            index, size = self._open(seed)
            self._journal = Journal(path, size)
            self._journal.append([line({"opened": index.opens})])
        except OSError as error:
            unlock(self._lock)
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{where}: storage_dir: {path}: {error}") from None
        super().__init__(index)

    def _open(self, seed: int) -> tuple[Index, int]:
        if not (self.path / INDEX).exists() or is_upstream(self.path):
            if (self.path / METADATA).exists() or any((self.path / name).exists() for name in NAMES):
                index, found = read_upstream(self.path, self._where, self._allow_pickle)
                for entry in index.entries:
                    if found[entry.id].parent.resolve() != self.path.resolve():
                        link(found[entry.id], self.path / index.name(entry))
            else:
                index = Index(seed=seed)
            index.opens = 1
            return index, index.write(self.path)
        index, size = Index.read(self.path, self._where)
        if not index.was_closed:  # a process died here: which draws were made is not known, so take none of them again
            for name in os.listdir(self.path):
                if name.startswith(".") and name.endswith(".tmp"):
                    (self.path / name).unlink(missing_ok=True)
            self.remove([index.name(entry) for entry in index.dropped])
        index.opens += 1
        if not index.was_closed:
            index.calls = max(index.calls, index.opens << 40)
        if index.dead > len(index.entries) + 1_000:
            size = index.write(self.path)
        return index, size

    # ---- files ------------------------------------------------------------------------------------------------

    def save(self, entry: Entry, slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...]) -> None:
        """Writes the file; the journal learns of it later."""
        layout = self.index.layouts[entry.layout]
        path = self.path / entry.name(layout.format)
        facts = write(path, slab, leaves, layout, entry.max_episode_length, entry.weights_id)
        entry.start, entry.bytes, entry.crc = facts

    def append(self, lines: list[bytes]) -> None:
        self._journal.append(lines)

    def file(self, entry: Entry) -> Path:
        return self.path / self.index.name(entry)

    def remove(self, names: list[str]) -> None:
        """Unlinks files that the journal knows no more; later, while a checkpoint needs them."""
        with self._removing:
            self._condemned += names
            while self._condemned and not self._pinned:
                (self.path / self._condemned[-1]).unlink(missing_ok=True)
                self._condemned.pop()

    def pin(self, by: int) -> None:
        """Files stay (1) or may go again (-1)."""
        with self._removing:
            self._pinned += by

    # ---- life -------------------------------------------------------------------------------------------------

    def replace(self, held: list[Entry], index: Index, sources: dict[int, Path]) -> None:
        """Makes this folder, which holds some, hold exactly the trajectories of an index, by links to their files.

        Killed half-way it is as before, or whole; or empty, where a file had to give its name to another one.
        """
        old = {self.index.name(entry): entry for entry in held}
        new = {index.name(entry): entry for entry in index.entries}
        same = {
            name for name in new if name in old and old[name].uuid == new[name].uuid and old[name].crc == new[name].crc
        }
        if any((self.path / name).exists() for name in set(new) - same):
            self._rewrite(Index(seed=self.index.seed, opens=self.index.opens, next_id=self.index.next_id))
        for name, entry in new.items():
            if name not in same or not (self.path / name).exists():
                link(sources[entry.id], self.path / name)
        index.opens = max(index.opens, self.index.opens)
        self._rewrite(index)
        self.remove([name for name in old if name not in new])

    def _rewrite(self, index: Index) -> None:
        self._journal.close()
        size = index.write(self.path)
        self._journal = Journal(self.path, size)
        self._journal.append([line({"opened": index.opens})])
        self._take(index)

    def close(self) -> None:
        self._journal.close()
        unlock(self._lock)


def read_slab(
    where: str, index: Index, entry: Entry, path: Path, allow_pickle: bool, whole: bool = True
) -> np.ndarray[Any, Any]:
    """The bytes of a trajectory: mapped, or ``whole`` in memory and checked against their checksum. A pickle is always
    read whole."""
    layout, leaves = index.layouts[entry.layout], index.leaves
    assert leaves is not None
    if layout.format == "pkl":
        parts = read(where, unpickle(where, path, allow_pickle), drops=True)
        order = [parts.leaves.index(leaf) if leaf in parts.leaves else -1 for leaf in leaves]
        epochs = tuple(parts.epochs[number] for number in order)
        if -1 in order or epochs != layout.epochs or (parts.steps, parts.envs) != (layout.steps, layout.envs):
            raise StorageError(f"{where}: {path}: its arrays are not what the index says")
        arrays = [parts.arrays[number] for number in order]
        return capture(parts._replace(leaves=leaves, epochs=epochs, arrays=arrays), layout)
    size = path.stat().st_size if path.exists() else -1
    if size != entry.bytes:
        raise StorageError(f"{where}: {path}: expected {entry.bytes} bytes, got {size if size >= 0 else 'no file'}")
    image: Any = _core.map_file(str(path), entry.start + layout.bytes)
    mapped: np.ndarray[Any, Any] = image[entry.start :]
    if not whole:
        return mapped
    slab = np.array(mapped)
    if entry.crc is not None and checksum(slab, leaves, layout)[0] != entry.crc:
        raise StorageError(f"{where}: {path}: damaged: its checksum is not the index's")
    return slab


def open_index(path: Path, where: str, allow_pickle: bool) -> tuple[Index, dict[int, Path]]:
    """The index of any folder of trajectories, ours or RLinf's, and the file of each; nothing is changed.

    Raises:
        Missing: The folder or a file is not there.
        StorageError: A file has another size than the index says.
    """
    if not path.is_dir():
        raise Missing(f"{where}: {path}: there is no such folder")
    if not (path / INDEX).exists() or is_upstream(path):
        return read_upstream(path, where, allow_pickle)
    index, _ = Index.read(path, where)
    found = {}
    for entry in index.entries:
        file = path / index.name(entry)
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise Missing(f"{where}: {file}: there is no such file, and the index lists it") from None
        if size != entry.bytes:
            raise StorageError(f"{where}: {file}: expected {entry.bytes} bytes, got {size}")
        found[entry.id] = file
    return index, found


def lock(path: Path, where: str) -> int:
    """Takes a folder for this buffer alone, until unlock() or the process' end."""
    try:
        file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"{where}: cannot write into {path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 20, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise StorageError(
            f"{where}: {path} is open in process {holder}; give every rank a folder of its own, as "
            f"storage_dir={str(path / 'rank_0')!r}"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


def unlock(file: int) -> None:
    os.close(file)


def link(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where the file system has no such thing. Written files never change."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        try:
            os.link(source, temporary)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                raise
            shutil.copyfile(source, temporary)
        if target.exists() and target.samefile(temporary):
            temporary.unlink()  # rename() of two names of one file does nothing, and leaves both
        else:
            os.rename(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_folder(made: Path, path: Path) -> None:
    """Gives a finished folder its name, in one step; what had it before is removed."""
    try:
        os.rename(made, path)  # nothing there, or an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _core.exchange_paths(str(made), str(path))
        shutil.rmtree(made)
