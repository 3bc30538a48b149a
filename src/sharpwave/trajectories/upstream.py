"""Folders in RLinf's form: ``metadata.json``, ``trajectory_index.json``, and one file for each trajectory."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import StorageError
from ..files import replace_file
from .formats import Located, locate
from .index import Missing, TrajectoryEntry, TrajectoryIndex, is_weights_id
from .layout import FORMATS, Layout, reordered

__all__ = [
    "METADATA",
    "NAMES",
    "facts_by_id",
    "is_upstream",
    "listed_names",
    "read_metadata",
    "read_upstream",
    "storage_dir_of",
    "write_upstream",
]

METADATA, NAMES = "metadata.json", ("trajectory_index.json", "trajector_index.json")  # the second as its tool spells it
_OURS = "sharpwave"  # key of a metadata.json that was written here


def is_upstream(folder: Path) -> bool:
    """Whether RLinf wrote here last."""
    try:
        return _OURS not in json.loads((folder / METADATA).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def storage_dir_of(folder: Path, where: str) -> Path | None:
    """The folder that a checkpoint was taken of, if it is still there."""
    if not (folder / METADATA).exists():
        return None
    metadata = read_metadata(folder, where)
    ours = metadata.get(_OURS)
    named = ours.get("storage_dir") if isinstance(ours, dict) else metadata.get("storage_dir")
    return Path(named) if isinstance(named, str) and named and Path(named).is_dir() else None


def listed_names(folder: Path, where: str) -> set[str]:
    """The names of the files that RLinf's index lists in a folder, whether they exist or not."""
    metadata, listed = read_metadata(folder, where), _read_listed(folder, where)
    format = _format(metadata)
    every = listed.get("trajectory_index")
    if not isinstance(every, dict):
        return set()
    return {
        f"trajectory_{number}_{facts.get('model_weights_id', '')}.{format}"
        for number, facts in every.items()
        if isinstance(facts, dict)
    }


def read_metadata(folder: Path, where: str) -> dict[str, Any]:
    return _read_json(folder / METADATA, where)


def read_upstream(folder: Path, where: str, allow_pickle: bool) -> tuple[TrajectoryIndex, dict[int, Path]]:
    """The index of a folder of RLinf's, either layout of its metadata, and the file of every trajectory.

    Its checkpoints may list trajectories that have no file: those are left out, with a warning.
    """
    metadata, listed = read_metadata(folder, where), _read_listed(folder, where)
    named = folder / NAMES[0]
    format, elsewhere = _format(metadata), metadata.get("storage_dir")
    places = [folder, *([Path(elsewhere)] if isinstance(elsewhere, str) and elsewhere else [])]
    seed = metadata.get("seed")
    index = TrajectoryIndex(seed=seed if type(seed) is int and 0 <= seed < 2**64 else 1234)
    found: dict[int, Path] = {}
    numbers: dict[Layout, int] = {}
    lost = []
    try:
        facts = {int(key): value for key, value in listed["trajectory_index"].items()}
        order = [int(number) for number in listed.get("trajectory_id_list", facts)]
        for number in order:
            if not 0 <= number < 2**62 or number in found:
                raise ValueError(f"trajectory {number} twice, or with an impossible id")
            path = _find(places, number, str(facts[number].get("model_weights_id", "")), format)
            if path is None:
                lost.append(number)
                continue
            located = locate(where, path, allow_pickle, index.leaves or ())
            if index.leaves is None:
                index.leaves = located.leaves
            layout = _in_order(where, path, index, located)
            if layout not in numbers:
                numbers[layout] = index.add_layout(layout)
            weights_id = path.name.removeprefix(f"trajectory_{number}_").removesuffix(path.suffix)
            if not is_weights_id(weights_id):
                raise ValueError(f"{path.name[:80]!r}: a name that is too long")
            length = int(facts[number].get("max_episode_length", located.max_episode_length) or 0)
            if not 0 <= length < 2**63:
                raise ValueError(f"trajectory {number}: max_episode_length {length}")
            shape = layout.steps, layout.envs
            known = str(facts[number].get("uuid") or uuid.uuid4().hex)[:64]
            facts_of_file = numbers[layout], located.start, path.stat().st_size
            index.entries.append(TrajectoryEntry(number, known, *shape, length, weights_id, *facts_of_file))
            found[number] = path
        counter = metadata.get("trajectory_counter", 0)
        index.next_id = max(counter if type(counter) is int and counter < 2**62 else 0, max(order, default=-1) + 1)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{where}: {named}: {type(error).__name__}: {error}") from None
    if lost:
        warnings.warn(
            f"{where}: {folder}: {len(lost)} of {len(order)} trajectories of its index have no file and are left out "
            f"(the first: {lost[0]})",
            stacklevel=4,
        )
    return index, found


def write_upstream(
    folder: Path,
    index: TrajectoryIndex,
    storage_dir: Path | str,
    format: str,
    sync: bool = False,
    taken_of: Path | None = None,
) -> None:
    """Writes RLinf's two index files, each in one step. RLinf reads "pt" and "pkl".

    Args:
        storage_dir: Where the folder is going to be: the first versions of RLinf look for the data there.
        format: The format of files to come. RLinf looks for files of one format: if all files have another format, that
            one is written instead.
        taken_of: The live folder that a checkpoint was taken of.
    """
    formats = {index.layouts[entry.layout].format for entry in index.entries}
    if len(formats) == 1:
        format = formats.pop()
    entries = facts_by_id(index, index.entries)
    uuids = {entry.id: entry.uuid for entry in index.entries}
    listed = {
        "trajectory_index": {str(number): facts | {"uuid": uuids[number]} for number, facts in entries.items()},
        "trajectory_id_list": list(entries),
    }
    replace_file(folder / NAMES[0], [json.dumps(listed).encode()], sync)
    metadata = {
        "storage_dir": str(storage_dir),
        "storage_format": format,
        "trajectory_format": format,
        "size": len(index.entries),
        "total_samples": index.total_samples,
        "trajectory_counter": index.next_id,
        "seed": index.seed,
        _OURS: {"storage_dir": str(taken_of or storage_dir)},
    }
    replace_file(folder / METADATA, [json.dumps(metadata, indent=2).encode()], sync)


def facts_by_id(index: TrajectoryIndex, entries: Iterable[TrajectoryEntry]) -> dict[int, dict[str, Any]]:
    """What RLinf's index says of every trajectory."""
    shapes = {leaf.path[0]: leaf.shape for leaf in index.leaves or () if len(leaf.path) == 1}
    trailing = shapes.get(
        "prev_logprobs", shapes.get("rewards", ())
    )  # RLinf counts steps and environments by the same field
    return {
        entry.id: {
            "num_samples": entry.steps * entry.envs,
            "trajectory_id": entry.id,
            "max_episode_length": entry.max_episode_length,
            "shape": (entry.steps, entry.envs, *trailing),
            "model_weights_id": entry.weights_id,
        }
        for entry in entries
    }


def _format(metadata: dict[str, Any]) -> str:
    format = metadata.get("storage_format", metadata.get("trajectory_format", "pt"))
    return format if format in FORMATS else "pkl"  # as in RLinf, any other format is a pickle


def _read_listed(folder: Path, where: str) -> dict[str, Any]:
    named = next((folder / name for name in NAMES if (folder / name).exists()), folder / NAMES[0])
    return _read_json(named, where)


def _read_json(path: Path, where: str) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Missing(f"{where}: {path}: there is no such file") from None
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{where}: {path}: not JSON: {error}") from None
    except OSError as error:
        raise StorageError(f"{where}: {path}: {error.strerror}") from None
    if not isinstance(read, dict):
        raise StorageError(f"{where}: {path}: expected an object, got {type(read).__name__}")
    return read


def _find(places: list[Path], number: int, weights_id: str, format: str) -> Path | None:
    if "/" in weights_id or "\0" in weights_id:
        raise ValueError(f"{weights_id!r} cannot be part of a file name")
    for place in places:
        path = place / f"trajectory_{number}_{weights_id}.{format}"
        if path.is_file():
            return path
    for place in places:
        for path in sorted(place.glob(f"trajectory_{number}_*.{format}")) if place.is_dir() else ():
            return path
    return None


def _in_order(where: str, path: Path, index: TrajectoryIndex, located: Located) -> Layout:
    """The layout with its leaves in the order of the index. Files may have them in any order."""
    assert index.leaves is not None
    if located.leaves == index.leaves:
        return located.layout
    at = {leaf: number for number, leaf in enumerate(located.leaves)}
    if all(entry.envs == 1 for entry in index.entries):
        # Values of one environment may be saved with one axis less (see locate()); this file shows that they were.
        rows = {leaf.path: leaf for leaf in located.leaves}
        index.leaves = tuple(
            rows[leaf.path]
            if leaf.path == ("prev_values",) and rows.get(leaf.path) == leaf._replace(shape=(1, *leaf.shape))
            else leaf
            for leaf in index.leaves
        )
    if set(at) != set(index.leaves):
        differing = sorted({str(leaf) for leaf in set(at) ^ set(index.leaves)})
        raise StorageError(f"{where}: {path}: its rows are not those of the other files: {', '.join(differing)}")
    return reordered(located.layout, [at[leaf] for leaf in index.leaves])
