"""Merging the folders of ranks into one, and splitting one: the target appears whole, then the source lets go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks import one_of, whole
from ..errors import SchemaError, StorageError
from .files import Layout
from .folder import link, lock, open_index, replace_folder, unlock
from .index import Entry, Index, Missing
from .upstream import NAMES, write_upstream

__all__ = ["Plan", "merge", "merged", "plan_merge", "plan_split", "rank_folders", "split"]

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


class Plan:
    """What a merge or a split is going to do: the new index, and where every file of it is now."""

    def __init__(self, index: Index, sources: dict[int, Path], taken: dict[Path, set[int]], format: str) -> None:
        self.index, self.sources, self.taken, self.format = index, sources, taken, format

    def run(
        self, where: str, target: Path, copy: bool, allow_pickle: bool, progress: Progress | None, legacy: bool
    ) -> None:
        """Makes the target, then, unless it is a copy, takes the trajectories out of their folders.

        Killed before the target has its name, nothing has changed; killed later, the target is whole and every source
        is as before or without what went.
        """
        if target.exists() and os.listdir(target):
            raise StorageError(f"{where}: {target}: expected a new or empty folder")
        locks = [] if copy else [lock(folder, where) for folder in self.taken]
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            try:
                entries: Iterable[Entry] = self.index.entries
                for entry in progress(entries, len(self.index.entries)) if progress else entries:
                    link(self.sources[entry.id], made / self.index.name(entry))
                write_upstream(made, self.index, target, self.format, sync=True)
                if legacy:
                    shutil.copyfile(made / NAMES[0], made / NAMES[1])
                self.index.write(made, sync=True)
                replace_folder(made, target)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
            if not copy:
                for folder, ids in self.taken.items():
                    _let_go(where, folder, ids, allow_pickle)
        finally:
            for file in locks:
                unlock(file)


def rank_folders(source: Path, order: str = "numeric") -> list[Path]:
    """The ``rank_*`` folders, by number; or by name, as RLinf has them (rank_10 before rank_2)."""
    found = [path for path in source.glob("rank_*") if path.is_dir()] if source.is_dir() else []

    def number(path: Path) -> tuple[int, str]:
        digits = re.fullmatch(r"rank_(\d+)", path.name)
        return (int(digits[1]) if digits else 2**62), path.name

    return sorted(found, key=number if order == "numeric" else lambda path: path.name)


def merged(where: str, folders: list[Path], allow_pickle: bool) -> tuple[Index, dict[int, Path]]:
    """One index over several folders: by ascending id, within an id in the folders' order, numbered anew from 0."""
    made = plan_merged(where, folders, allow_pickle)
    return made.index, made.sources


def plan_merged(where: str, folders: list[Path], allow_pickle: bool) -> Plan:
    opened = [(folder, *open_index(folder, where, allow_pickle)) for folder in folders]
    index = Index()
    numbers: dict[Layout, int] = {}
    sources: dict[int, Path] = {}
    taken: dict[Path, set[int]] = {folder: set() for folder in folders}
    every = [(entry.id, rank, entry) for rank, (_, part, _) in enumerate(opened) for entry in part.entries]
    formats = {layout.format for _, part, _ in opened for layout in part.layouts}
    if len(formats) > 1:
        raise SchemaError(f"{where}: expected one storage format, got {', '.join(sorted(formats))}; convert the others")
    for old, rank, entry in sorted(every, key=lambda item: item[:2]):
        folder, part, files = opened[rank]
        if index.leaves is None:
            index.leaves = part.leaves
        layout = _reordered(where, folder, index, part, part.layouts[entry.layout])
        if layout not in numbers:
            numbers[layout] = len(index.layouts)
            index.layouts.append(layout)
        new = len(index.entries)
        index.entries.append(replace(entry, id=new, layout=numbers[layout]))
        sources[new] = files[old]
        taken[folder].add(old)
    index.next_id = len(index.entries)
    index.seed = next((part.seed for _, part, _ in opened), index.seed)
    return Plan(index, sources, taken, next(iter(formats), "pt"))


def plan_merge(where: str, source: Path, order: str, allow_pickle: bool) -> Plan:
    """Raises:
    Missing: There is no ``rank_*`` folder.
    """
    one_of(where, "order", order, ("numeric", "string"))
    folders = rank_folders(source, order)
    if not folders:
        raise Missing(f"{where}: {source}: expected folders named rank_0, rank_1, ..., got none")
    return plan_merged(where, folders, allow_pickle)


def plan_split(where: str, source: Path, count: int, allow_pickle: bool) -> Plan:
    """The first ``count`` trajectories, numbered anew from 0.

    Raises:
        SchemaError: There are fewer, or ``count`` is not positive.
    """
    whole(where, "split_count", count)
    index, files = open_index(source, where, allow_pickle)
    if count > len(index.entries):
        raise SchemaError(
            f"{where}: split_count: expected at most the {len(index.entries)} trajectories there, got {count}"
        )
    first = index.entries[:count]
    entries = [replace(entry, id=new) for new, entry in enumerate(first)]
    part = Index(seed=index.seed, leaves=index.leaves, layouts=index.layouts, entries=entries, next_id=count)
    sources = {new: files[entry.id] for new, entry in enumerate(first)}
    formats = {index.layouts[entry.layout].format for entry in first}
    return Plan(part, sources, {source: {entry.id for entry in first}}, sorted(formats)[0])


def merge(
    source: str | os.PathLike[str],
    save: str | os.PathLike[str],
    *,
    copy: bool = False,
    order: str = "numeric",
    allow_pickle: bool = False,
    progress: Progress | None = None,
    legacy: bool = False,
) -> Plan:
    """Makes one folder of the ``rank_*`` folders in ``source``. Without ``copy`` those are empty afterwards."""
    plan = plan_merge("merge", Path(source), order, allow_pickle)
    plan.run("merge", Path(save), copy, allow_pickle, progress, legacy)
    return plan


def split(
    source: str | os.PathLike[str],
    save: str | os.PathLike[str],
    count: int,
    *,
    copy: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
    legacy: bool = False,
) -> Plan:
    """Makes a folder of the first ``count`` trajectories of ``source``. Without ``copy`` it keeps the others only."""
    plan = plan_split("split", Path(source), count, allow_pickle)
    plan.run("split", Path(save), copy, allow_pickle, progress, legacy)
    return plan


def _reordered(where: str, folder: Path, index: Index, part: Index, layout: Layout) -> Layout:
    assert index.leaves is not None
    assert part.leaves is not None
    if part.leaves == index.leaves:
        return layout
    at = {leaf: number for number, leaf in enumerate(part.leaves)}
    if set(at) != set(index.leaves):
        differing = sorted({str(leaf) for leaf in set(at) ^ set(index.leaves)})
        raise SchemaError(f"{where}: {folder}: its rows are not those of the other folders: {', '.join(differing)}")
    epochs = tuple(layout.epochs[at[leaf]] for leaf in index.leaves)
    return layout._replace(epochs=epochs, offsets=tuple(layout.offsets[at[leaf]] for leaf in index.leaves))


def _let_go(where: str, folder: Path, ids: set[int], allow_pickle: bool) -> None:
    """Takes trajectories out of a folder: first of its index, then their files."""
    index, files = open_index(folder, where, allow_pickle)
    gone = [files[entry.id] for entry in index.entries if entry.id in ids]
    index.entries = [entry for entry in index.entries if entry.id not in ids]
    formats = {layout.format for layout in index.layouts}
    had_upstream = any((folder / name).exists() for name in NAMES)
    index.write(folder, sync=True)
    if had_upstream:
        write_upstream(folder, index, folder, sorted(formats)[0] if formats else "pt", sync=True)
        (folder / NAMES[1]).unlink(missing_ok=True)
    for path in gone:
        path.unlink(missing_ok=True)
