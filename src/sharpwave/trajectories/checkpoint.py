"""Checkpoints of a folder of trajectories: whole or not there, and good wherever they are moved to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import one_of, whole
from ..errors import SchemaError, StorageError
from .files import views
from .folder import LOCK, link, lock, open_index, read_slab, replace_folder, unlock
from .folders import merged, rank_folders
from .index import INDEX, Index, Missing
from .trajectory import Trajectory, to_device, to_trajectory
from .upstream import METADATA, NAMES, read_metadata, write_upstream

__all__ = ["each_trajectory", "open_checkpoint", "shard", "storage_dir_of", "write_checkpoint"]

_OURS = {INDEX, METADATA, *NAMES, LOCK, "minari.json"}


def write_checkpoint(where: str, index: Index, source: Path, path: Path, format: str) -> None:
    """A folder with links to the files of ``source`` that the index lists, the index, and RLinf's two files.

    Args:
        format: Of files to come, for RLinf's metadata.

    Raises:
        StorageError: There is a folder of that name, and it is not a checkpoint.
    """
    if path.exists():
        foreign = [name for name in os.listdir(path) if name not in _OURS and not name.startswith("trajectory_")]
        if foreign:
            raise StorageError(
                f"{where}: {path}: expected a new folder or a former checkpoint, and it holds {foreign[0]!r}; give it "
                "a folder of its own"
            )
        if (path / LOCK).exists():
            unlock(lock(path, where))  # nobody lives in it
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    made.mkdir()
    try:
        for entry in index.entries:
            name = index.name(entry)
            link(source / name, made / name)
        write_upstream(made, index, source.resolve(), format, sync=True)
        index.write(made, sync=True)
        _sync(made)
        replace_folder(made, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def open_checkpoint(where: str, path: Path, allow_pickle: bool) -> tuple[Index, dict[int, Path]]:
    """What a checkpoint holds: ours, RLinf's, or a folder with one for every rank in it."""
    if not path.is_dir():
        raise Missing(f"{where}: {path}: there is no such folder")
    ranks = rank_folders(path)
    if ranks and not any((path / name).exists() for name in (INDEX, METADATA, *NAMES)):
        return merged(where, ranks, allow_pickle)
    return open_index(path, where, allow_pickle)


def each_trajectory(where: str, path: Path, allow_pickle: bool, device: Any = None) -> tuple[int, Iterator[Trajectory]]:
    """How many trajectories a folder holds, and one after the other; nothing is changed, one is in memory at a time."""
    index, files = open_checkpoint(where, path, allow_pickle)
    leaves = index.leaves or ()

    def read() -> Iterator[Trajectory]:
        for entry in index.entries:
            slab = read_slab(where, index, entry, files[entry.id], allow_pickle)
            arrays = views(slab, leaves, index.layouts[entry.layout])
            values = [to_device(leaf.dtype, array, device) for leaf, array in zip(leaves, arrays, strict=True)]
            yield to_trajectory(leaves, values, entry.max_episode_length, entry.weights_id)

    return len(index.entries), read()


def storage_dir_of(path: Path, where: str) -> Path | None:
    """The folder that a checkpoint was taken of, if it is still there."""
    if not (path / METADATA).exists():
        return None
    named = read_metadata(path, where).get("storage_dir")
    return Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None


def shard(where: str, index: Index, rank: int, world: int, split_by: str = "count") -> Index:
    """The part of one rank. Ids that it hands out later are no other rank's.

    Args:
        split_by: "count" gives consecutive trajectories, as many as the others have or one more; "samples" consecutive
            ones with about as many transitions; "stride" every ``world``-th, so that each has old and new ones.
    """
    one_of(where, "split_by", split_by, ("count", "samples", "stride"))
    whole(where, "world_size", world)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
        raise SchemaError(f"{where}: local_rank: expected 0 to {world - 1} (world_size={world}), got {rank!r}")
    entries = index.entries
    if split_by == "stride":
        part = entries[rank::world]
    elif split_by == "samples":
        # A trajectory is the rank's that holds its middle transition.
        sizes = np.array([entry.steps * entry.envs for entry in entries], np.int64)
        owner = (2 * np.cumsum(sizes) - sizes) * world // (2 * max(1, int(sizes.sum())))
        part = [entry for entry, own in zip(entries, owner, strict=True) if own == rank]
    else:
        share, rest = divmod(len(entries), world)
        begin = rank * share + min(rank, rest)
        part = entries[begin : begin + share + (rank < rest)]
    return replace(index, entries=part, next_id=index.next_id + rank, id_step=world)


def _remove_leftovers(path: Path) -> None:
    """What killed processes left of a checkpoint of that name."""
    for name in os.listdir(path.parent):
        if not (name.startswith(f".{path.name}.") and name.endswith(".tmp")):
            continue
        pid = name.removeprefix(f".{path.name}.").removesuffix(".tmp")
        if pid.isdigit() and (int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")):
            shutil.rmtree(path.parent / name, ignore_errors=True)


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
