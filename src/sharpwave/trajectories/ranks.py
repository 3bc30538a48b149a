"""The folders of ranks: merged into one, or the first trajectories of one split off.

The target folder appears complete; then the trajectories are removed from the sources.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks import one_of, whole
from ..errors import SchemaError, StorageError
from ..files import Journal
from .folder import open_index
from .index import INDEX, KIND, Missing, TrajectoryEntry, TrajectoryIndex, drop_record
from .layout import Layout
from .links import link
from .upstream import NAMES, write_upstream

__all__ = ["FolderPlan", "merge", "merged", "plan_merge", "plan_split", "rank_folders", "split"]

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


class FolderPlan:
    """What a merge or a split will do: the new index, and where each of its files is now."""

    def __init__(
        self, index: TrajectoryIndex, sources: dict[int, Path], taken: dict[Path, set[int]], format: str
    ) -> None:
        self.index, self.sources, self.taken, self.format = index, sources, taken, format

    def run(
        self, where: str, target: Path, copy: bool, allow_pickle: bool, progress: Progress | None, legacy: bool
    ) -> None:
        """Makes the target, then, unless it is a copy, removes the trajectories from their folders.

        If the process is killed before the target has its name, nothing has changed. If it is killed later, the target
        is complete, and each source either is unchanged or no longer lists the trajectories that were moved.
        """
        from .checkpoint import new_folder

        if target.exists() and (not target.is_dir() or os.listdir(target)):
            raise StorageError(f"{where}: {target}: expected a new or empty folder")
        journals: dict[Path, Journal] = {}
        new: list[Path] = []
        try:
            for folder in () if copy else self.taken:
                if not (folder / INDEX).exists():
                    new.append(folder / INDEX)
                journals[folder] = Journal(folder / INDEX, KIND, where=where)  # locks the folder
            with new_folder(where, target) as (made, journal):
                entries: Iterable[TrajectoryEntry] = self.index.entries
                for entry in progress(entries, len(self.index.entries)) if progress else entries:
                    link(self.sources[entry.id], made / self.index.name(entry))
                write_upstream(made, self.index, target.resolve(), self.format, sync=True)
                if legacy:
                    link(made / NAMES[0], made / NAMES[1])
                journal.replace(self.index.records())
            for folder, journal in journals.items():
                _let_go(where, folder, self.taken[folder], allow_pickle, journal)
        except BaseException:
            for path in new:
                if not target.exists():  # nothing was moved yet: the journals are empty
                    path.unlink(missing_ok=True)
            raise
        finally:
            for journal in journals.values():
                journal.close()


def rank_folders(source: Path, order: str = "numeric") -> list[Path]:
    """The ``rank_*`` folders in the order of their numbers, or of their names as in RLinf (rank_10 before rank_2)."""
    found = [path for path in source.glob("rank_*") if path.is_dir()] if source.is_dir() else []

    def number(path: Path) -> tuple[int, str]:
        digits = re.fullmatch(r"rank_(\d+)", path.name)
        return (int(digits[1]) if digits else 2**62), path.name

    return sorted(found, key=number if order == "numeric" else lambda path: path.name)


def merged(where: str, folders: list[Path], allow_pickle: bool) -> tuple[TrajectoryIndex, dict[int, Path]]:
    """One index over several folders: by ascending id, equal ids in the order of the folders, with new ids from 0."""
    made = plan_merged(where, folders, allow_pickle)
    return made.index, made.sources


def plan_merged(where: str, folders: list[Path], allow_pickle: bool) -> FolderPlan:
    opened = [(folder, *open_index(folder, where, allow_pickle)) for folder in folders]
    index = TrajectoryIndex()
    numbers: dict[Layout, int] = {}
    sources: dict[int, Path] = {}
    taken: dict[Path, set[int]] = {folder: set() for folder in folders}
    every = [(entry.id, rank, entry) for rank, (_, part, _) in enumerate(opened) for entry in part.entries]
    formats = {layout.format for _, part, _ in opened for layout in part.layouts}
    if len(formats) > 1:
        raise SchemaError(f"{where}: expected one storage format, got {', '.join(sorted(formats))}; convert the others")
    for old, rank, entry in sorted(every, key=lambda item: item[:2]):
        folder, part, files = opened[rank]
        new = len(index.entries)
        try:
            index.entries += index.take(part, [replace(entry, id=new)], numbers)
        except ValueError as error:
            raise SchemaError(f"{where}: {folder}: {error}") from None
        sources[new] = files[old]
        taken[folder].add(old)
    index.next_id = len(index.entries)
    index.seed = next((part.seed for _, part, _ in opened), index.seed)
    return FolderPlan(index, sources, taken, next(iter(formats), "pt"))


def plan_merge(where: str, source: Path, order: str, allow_pickle: bool) -> FolderPlan:
    """Raises:
    Missing: There is no ``rank_*`` folder.
    """
    one_of(where, "order", order, ("numeric", "string"))
    folders = rank_folders(source, order)
    if not folders:
        raise Missing(f"{where}: {source}: expected folders named rank_0, rank_1, ..., got none")
    return plan_merged(where, folders, allow_pickle)


def plan_split(where: str, source: Path, count: int, allow_pickle: bool) -> FolderPlan:
    """The first ``count`` trajectories, with new ids from 0: those that are drawn from, then those set aside.

    Raises:
        SchemaError: There are fewer, or ``count`` is not positive.
    """
    whole(where, "split_count", count)
    index, files = open_index(source, where, allow_pickle, with_aside=True)
    if count > len(index.entries):
        raise SchemaError(
            f"{where}: split_count: expected at most the {len(index.entries)} trajectories there, got {count}"
        )
    first = index.entries[:count]
    entries = [replace(entry, id=new) for new, entry in enumerate(first)]
    part = replace(index, calls=0, entries=entries, aside=[], next_id=count, id_step=1, opens=0)
    sources = {new: files[entry.id] for new, entry in enumerate(first)}
    formats = {index.layouts[entry.layout].format for entry in first}
    return FolderPlan(part, sources, {source: {entry.id for entry in first}}, sorted(formats)[0])


def merge(
    source: str | os.PathLike[str],
    save: str | os.PathLike[str],
    *,
    copy: bool = False,
    order: str = "numeric",
    allow_pickle: bool = False,
    progress: Progress | None = None,
    legacy: bool = False,
) -> FolderPlan:
    """Merges the ``rank_*`` folders in ``source`` into one folder. Without ``copy`` they are empty afterwards."""
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
) -> FolderPlan:
    """Makes a folder of the first ``count`` trajectories of ``source``. Without ``copy`` they are removed there."""
    plan = plan_split("split", Path(source), count, allow_pickle)
    plan.run("split", Path(save), copy, allow_pickle, progress, legacy)
    return plan


def _let_go(where: str, folder: Path, ids: set[int], allow_pickle: bool, journal: Journal) -> None:
    """Removes trajectories from a folder: first from its index, then their files."""
    index, files = open_index(folder, where, allow_pickle, with_aside=True)
    gone = [files[entry.id] for entry in index.entries if entry.id in ids]
    aside = {entry.id for entry in index.aside}
    index.entries = [entry for entry in index.entries if entry.id not in aside]
    formats = {layout.format for layout in index.layouts}
    # The index lists them first and then drops them: by that record the next opening knows which files to remove.
    dropped = [entry for entry in (*index.entries, *index.aside) if entry.id in ids]
    journal.replace([*index.records(), drop_record(dropped), index.state_record()])
    index.entries = [entry for entry in index.entries if entry.id not in ids]
    if any((folder / name).exists() for name in NAMES):
        write_upstream(folder, index, folder.resolve(), sorted(formats)[0] if formats else "pt", sync=True)
        (folder / NAMES[1]).unlink(missing_ok=True)
    for path in gone:
        path.unlink(missing_ok=True)
