"""Checkpoints of trajectories: folders that appear complete or not at all, and that may be moved."""

from __future__ import annotations

import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import _core
from ..checks import one_of, told, whole
from ..errors import SchemaError, StorageError
from ..files import Journal
from .folder import open_index
from .formats import write
from .index import INDEX, KIND, Missing, TrajectoryEntry, TrajectoryIndex, read_index
from .layout import FORMATS, Layout, capture, plan, views
from .links import link, remove_folder
from .mapped import read_slab
from .ranks import merged, rank_folders
from .records import Records
from .trajectory import Parts, Trajectory, to_device, to_trajectory
from .upstream import METADATA, NAMES, listed_names, write_upstream

__all__ = [
    "check_part",
    "each_trajectory",
    "has_index",
    "holds_trajectories",
    "link_from",
    "new_folder",
    "open_checkpoint",
    "shard",
    "write_checkpoint",
    "write_held",
]

_NAMED = (INDEX, METADATA, *NAMES, "minari.json")
# Those that end in .next are of a process that was killed in replace_file().
_OURS = {*_NAMED, *(f"{name}.next" for name in _NAMED)}
_TRAJECTORY = re.compile(rf"trajectory_\d+_.*\.(?:{'|'.join(FORMATS)})", re.DOTALL)


def write_checkpoint(
    where: str,
    index: TrajectoryIndex,
    put: Callable[[TrajectoryEntry, Path], None],
    path: Path,
    format: str,
    taken_of: Path | None = None,
) -> None:
    """Makes a folder of the files that the index lists, the index, and RLinf's two index files. A former checkpoint of
    that name is replaced if the folder holds nothing else.

    Args:
        put: Makes the file of a trajectory: a link, or a new one.
        format: Of files to come, for RLinf's metadata.
        taken_of: The live folder that the files belong to.

    Raises:
        StorageError: There is a folder of that name, and it holds something that no index lists.
    """
    target = path.resolve()
    held, names = _hold_former(where, path)
    try:
        with new_folder(where, path, names) as (made, journal):
            for entry in index.entries:
                put(entry, made / index.name(entry))
            write_upstream(made, index, target, format, sync=True, taken_of=taken_of)
            journal.replace(index.records())
    finally:
        if held is not None:
            held.close()


def _hold_former(where: str, path: Path) -> tuple[_core.FileLock | None, set[str]]:
    """Locks the folder that has the name now, so that no buffer opens it meanwhile, and returns the names of the files
    in it, all of which its index lists."""
    if not os.path.lexists(path):
        return None, set()
    if not path.is_dir():
        raise StorageError(f"{where}: {path}: expected a folder or no such name, and it is a file")
    there = set(os.listdir(path))
    names = there & _OURS
    held = None
    if INDEX in there:
        held = _core.own_file(str(path / INDEX), create=False)
        if held is None:
            raise StorageError(f"{where}: {path}: another buffer has it open; give the checkpoint a folder of its own")
    try:
        if INDEX in there:
            known = read_index(path, where)
            if known.aside:
                raise StorageError(
                    f"{where}: {path}: it holds {len(known.aside)} trajectories that a load set aside, which a "
                    "checkpoint would delete; give it a folder of its own"
                )
            names |= {known.name(entry) for entry in known.entries} | known.dropped
        if METADATA in there and there & set(NAMES):
            names |= listed_names(path, where)
    except StorageError as error:
        if held is not None:
            held.close()
        raise StorageError(f"{error}; remove it yourself, or give the checkpoint a folder of its own") from None
    foreign = sorted(there - names)
    if foreign:
        if held is not None:
            held.close()
        raise StorageError(
            f"{where}: {path}: expected a new folder or a former checkpoint, and it holds {foreign[0]!r}, which no "
            "index lists; give it a folder of its own"
        )
    return held, names & there


@contextmanager
def new_folder(where: str, path: Path, replaced: set[str] | None = None) -> Iterator[tuple[Path, Journal]]:
    """Makes a folder under a temporary name beside its place and renames it, in one step, when it is complete.

    Yields:
        Where it is made, and its locked journal. A temporary folder whose journal is not locked was left by a killed
        process; the next process that makes a folder of that name removes it.

    Args:
        replaced: The files of the folder that has the name now, which is deleted.
    """
    path = Path(os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    made = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    made.mkdir()
    journal = None
    try:
        journal = Journal(made / INDEX, KIND, where=where)
        yield made, journal
        _sync(made)
        try:
            os.rename(made, path)  # nothing there, or an empty folder
        except OSError:
            if replaced is None or not path.is_dir():
                raise
            _core.exchange_paths(str(made), str(path))
            if not remove_folder(made, replaced):
                warnings.warn(
                    f"{where}: {path}: something was put into the former checkpoint meanwhile; it is in {made}",
                    stacklevel=5,
                )
        _sync(path.parent)
    except BaseException:
        if made.exists():
            remove_folder(made, _files_of(made))
        raise
    finally:
        if journal is not None:
            journal.close()


def _files_of(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if name in _OURS or _TRAJECTORY.fullmatch(name)}


def _remove_leftovers(path: Path) -> None:
    """Removes temporary folders of killed processes: their journal is not locked, and they hold no other files."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.tmp")
    for name in os.listdir(path.parent):
        left = path.parent / name
        if not ours.fullmatch(name) or left.is_symlink() or not left.is_dir():
            continue
        there = set(os.listdir(left))
        held = _core.own_file(str(left / INDEX), create=False) if INDEX in there else None
        if there and (held is None or there - _files_of(left)):
            continue  # another process is making it, or it holds other files
        remove_folder(left, there)
        if held is not None:
            held.close()


def link_from(index: TrajectoryIndex, source: Path) -> Callable[[TrajectoryEntry, Path], None]:
    """For write_checkpoint(): links to the files of a live folder."""
    return lambda entry, target: link(source / index.name(entry), target)


def write_held(
    where: str,
    index: TrajectoryIndex,
    held: list[tuple[TrajectoryEntry, Records, Any, tuple[int, ...]]],
    path: Path,
    format: str,
) -> None:
    """A checkpoint of trajectories that are in memory only: writes their files.

    Args:
        index: Without trajectories.
        held: Each trajectory with the form of its records, the records, and how many rows more than steps each leaf
            has.
    """
    leaves = index.leaves or ()
    index.layouts, index.generations = [], []
    numbers: dict[Layout, int] = {}
    parts: dict[int, tuple[Records, Any, tuple[int, ...]]] = {}
    for entry, records, rows, epochs in held:
        layout = plan(where, format, leaves, entry.steps, entry.envs, epochs)
        if layout not in numbers:
            numbers[layout] = index.add_layout(layout)
        index.entries.append(replace(entry, layout=numbers[layout]))
        parts[entry.id] = records, rows, epochs

    def put(entry: TrajectoryEntry, file: Path) -> None:
        records, rows, epochs = parts.pop(entry.id)
        layout = index.layouts[entry.layout]
        slab = capture(Parts(entry.steps, entry.envs, leaves, epochs, records.views(rows)), layout)
        facts = write(file, slab, leaves, layout, entry.max_episode_length, entry.weights_id)
        entry.start, entry.bytes, entry.crc = facts

    write_checkpoint(where, index, put, path, format)


def has_index(folder: Path) -> bool:
    """Whether a folder has an index of trajectories, ours or RLinf's."""
    return any((folder / name).exists() for name in (INDEX, *NAMES))


def holds_trajectories(path: Path) -> bool:
    """Whether a path is a folder of trajectories, ours or RLinf's, or a folder with one for every rank."""
    try:
        return has_index(path) or any(map(has_index, rank_folders(path)))
    except (OSError, ValueError):  # it may not be read, or the name is no path
        return False


def open_checkpoint(
    where: str, path: Path, allow_pickle: bool, recover: bool = False
) -> tuple[TrajectoryIndex, dict[int, Path]]:
    """The index and the files of a checkpoint: ours, RLinf's, or a folder with one for every rank.

    Args:
        recover: Reads a damaged checkpoint of ours with what is whole in it, and warns of what is left out. Folders
            of ranks have to be whole.
    """
    if not path.is_dir():
        raise Missing(f"{where}: {path}: there is no such folder")
    ranks = rank_folders(path)
    if ranks and not any((path / name).exists() for name in (INDEX, METADATA, *NAMES)):
        return merged(where, ranks, allow_pickle)
    return open_index(path, where, allow_pickle, recover=recover)


def each_trajectory(where: str, path: Path, allow_pickle: bool, device: Any = None) -> tuple[int, Iterator[Trajectory]]:
    """How many trajectories a folder holds, and an iterator that reads one at a time. The folder is not changed."""
    index, files = open_checkpoint(where, path, allow_pickle)
    leaves = index.leaves or ()

    def read() -> Iterator[Trajectory]:
        for entry in index.entries:
            slab = read_slab(where, index, entry, files[entry.id], allow_pickle)
            arrays = views(slab, leaves, index.layouts[entry.layout])
            values = [to_device(leaf.dtype, array, device) for leaf, array in zip(leaves, arrays, strict=True)]
            yield to_trajectory(leaves, values, entry.max_episode_length, entry.weights_id)

    return len(index.entries), read()


def check_part(where: str, rank: Any, world: Any, split_by: Any, name: str = "rank") -> None:
    """The arguments of ``shard``.

    Args:
        name: What the caller's argument for the rank is called.
    """
    one_of(where, "split_by", split_by, ("count", "samples", "stride"))
    whole(where, "world_size", world, 1, 2**32)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
        raise SchemaError(f"{where}: {name}: expected 0 to {world - 1} (world_size={world}), got {told(rank)}")


def shard(where: str, index: TrajectoryIndex, rank: int, world: int, split_by: str = "count") -> TrajectoryIndex:
    """The part of one rank. The ids of trajectories that it adds later are different from those of all other ranks.

    Args:
        split_by: "count": consecutive trajectories, the same number for every rank or one more. "samples": consecutive
            trajectories with about the same number of transitions. "stride": every ``world``-th trajectory, so that
            each rank has old and new ones.
    """
    check_part(where, rank, world, split_by)
    entries = index.entries
    if split_by == "stride":
        part = entries[rank::world]
    elif split_by == "samples":
        # A trajectory goes to the rank whose range of transitions holds its middle one.
        sizes = np.array([entry.steps * entry.envs for entry in entries], np.int64)
        owner = (2 * np.cumsum(sizes) - sizes) * world // (2 * max(1, int(sizes.sum())))
        part = [entry for entry, own in zip(entries, owner, strict=True) if own == rank]
    else:
        share, rest = divmod(len(entries), world)
        begin = rank * share + min(rank, rest)
        part = entries[begin : begin + share + (rank < rest)]
    return replace(index, entries=part, next_id=index.next_id + rank, id_step=world)


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
