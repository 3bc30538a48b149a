"""Folders as RLinf writes and reads them: ``metadata.json``, ``trajectory_index.json``, one file a trajectory."""

from __future__ import annotations

import json
import uuid
import warnings
from pathlib import Path
from typing import Any

from ..errors import StorageError
from .files import Layout, Located, locate, write_whole
from .index import Entry, Index, Missing

__all__ = ["METADATA", "NAMES", "is_upstream", "read_upstream", "write_upstream"]

METADATA, NAMES = "metadata.json", ("trajectory_index.json", "trajector_index.json")  # the second as its tool spells it
_OURS = "sharpwave"  # key of a metadata.json that was written here


def is_upstream(folder: Path) -> bool:
    """Whether RLinf wrote here last."""
    try:
        return _OURS not in json.loads((folder / METADATA).read_bytes())
    except (OSError, ValueError):
        return False


def read_metadata(folder: Path, where: str) -> dict[str, Any]:
    return _read_json(folder / METADATA, where)


def read_upstream(folder: Path, where: str, allow_pickle: bool) -> tuple[Index, dict[int, Path]]:
    """The index of a folder of RLinf's, either layout of its metadata, and the file of every trajectory.

    Its checkpoints may list trajectories that have no file: those are left out, with a warning.
    """
    metadata = read_metadata(folder, where)
    named = next((folder / name for name in NAMES if (folder / name).exists()), folder / NAMES[0])
    listed = _read_json(named, where)
    format = metadata.get("storage_format", metadata.get("trajectory_format", "pt"))
    places = [folder, *([Path(metadata["storage_dir"])] if metadata.get("storage_dir") else [])]
    index = Index(seed=int(metadata.get("seed") or 1234))
    found: dict[int, Path] = {}
    numbers: dict[Layout, int] = {}
    lost = []
    try:
        facts = {int(key): value for key, value in listed["trajectory_index"].items()}
        order = [int(number) for number in listed.get("trajectory_id_list", facts)]
        for number in order:
            path = _find(places, number, str(facts[number].get("model_weights_id", "")), format)
            if path is None:
                lost.append(number)
                continue
            located = locate(where, path, allow_pickle)
            if index.leaves is None:
                index.leaves = located.leaves
            layout = _in_order(where, path, index, located)
            if layout not in numbers:
                numbers[layout] = len(index.layouts)
                index.layouts.append(layout)
            weights_id = path.name.removeprefix(f"trajectory_{number}_").removesuffix(path.suffix)
            length = int(facts[number].get("max_episode_length", located.max_episode_length) or 0)
            shape = layout.steps, layout.envs
            known = str(facts[number].get("uuid") or uuid.uuid4().hex)
            facts_of_file = numbers[layout], located.start, path.stat().st_size
            index.entries.append(Entry(number, known, *shape, length, weights_id, *facts_of_file))
            found[number] = path
        index.next_id = max(int(metadata.get("trajectory_counter", 0)), max(order, default=-1) + 1)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
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


def write_upstream(folder: Path, index: Index, storage_dir: Path | str, format: str, sync: bool = False) -> None:
    """Writes RLinf's two files beside ours, each in one step. RLinf reads "pt" and "pkl"."""
    trailing: tuple[int, ...] = ()
    for leaf in reversed(index.leaves or ()):
        if leaf.path in (("rewards",), ("prev_logprobs",)):
            trailing = leaf.shape
    entries = {
        str(entry.id): {
            "num_samples": entry.steps * entry.envs,
            "trajectory_id": entry.id,
            "max_episode_length": entry.max_episode_length,
            "shape": [entry.steps, entry.envs, *trailing],
            "model_weights_id": entry.weights_id,
            "uuid": entry.uuid,
        }
        for entry in index.entries
    }
    listed = {"trajectory_index": entries, "trajectory_id_list": [entry.id for entry in index.entries]}
    write_whole(folder / NAMES[0], [json.dumps(listed).encode()], sync)
    metadata = {
        "storage_dir": str(storage_dir),
        "storage_format": format,
        "trajectory_format": format,
        "size": len(index.entries),
        "total_samples": index.total_samples,
        "trajectory_counter": index.next_id,
        "seed": index.seed,
        _OURS: 1,
    }
    write_whole(folder / METADATA, [json.dumps(metadata, indent=2).encode()], sync)


def _read_json(path: Path, where: str) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Missing(f"{where}: {path}: there is no such file") from None
    except ValueError as error:
        raise StorageError(f"{where}: {path}: not JSON: {error}") from None
    if not isinstance(read, dict):
        raise StorageError(f"{where}: {path}: expected an object, got {type(read).__name__}")
    return read


def _find(places: list[Path], number: int, weights_id: str, format: str) -> Path | None:
    if "/" in weights_id or "\0" in weights_id or "/" in format:
        raise ValueError(f"a name that is none: {weights_id!r}")
    for place in places:
        path = place / f"trajectory_{number}_{weights_id}.{format}"
        if path.exists():
            return path
    for place in places:
        for path in sorted(place.glob(f"trajectory_{number}_*.{format}")) if place.is_dir() else ():
            return path
    return None


def _in_order(where: str, path: Path, index: Index, located: Located) -> Layout:
    """The layout with its leaves in the index's order: dicts come in any."""
    assert index.leaves is not None
    if located.leaves == index.leaves:
        return located.layout
    at = {leaf: number for number, leaf in enumerate(located.leaves)}
    if set(at) != set(index.leaves):
        differing = sorted({str(leaf) for leaf in set(at) ^ set(index.leaves)})
        raise StorageError(f"{where}: {path}: its rows are not those of the other files: {', '.join(differing)}")
    layout = located.layout
    epochs = tuple(layout.epochs[at[leaf]] for leaf in index.leaves)
    return layout._replace(epochs=epochs, offsets=tuple(layout.offsets[at[leaf]] for leaf in index.leaves))
