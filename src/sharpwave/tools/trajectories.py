"""Folders of trajectories on the command line: info, merge, split, convert."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sharpwave as sw
from sharpwave.address import to_path
from sharpwave.errors import SchemaError
from sharpwave.trajectories.checkpoint import each_trajectory, open_checkpoint
from sharpwave.trajectories.ranks import FolderPlan, merge, plan_merge, plan_split, split
from sharpwave.trajectories.trajectory import DTYPES

MINARI, SNAPSHOT = "minari:", ".sw"


def describe(path: Path) -> dict[str, Any]:
    """Facts about a folder of trajectories, read from its index; for a folder of ranks, of all ranks together."""
    index, _ = open_checkpoint("info", path, allow_pickle=False)
    steps, envs = ([getattr(entry, name) for entry in index.entries] for name in ("steps", "envs"))
    formats = sorted({index.layouts[entry.layout].format for entry in index.entries})
    return {
        "trajectories": len(index.entries),
        "transitions": index.total_samples,
        "set aside": len(index.aside),
        "bytes": sum(entry.bytes for entry in index.entries),
        "format": ", ".join(formats),
        "steps": _range(steps),
        "envs": _range(envs),
        "ids": _range([entry.id for entry in index.entries]),
        "weights": len({entry.weights_id for entry in index.entries}),
        "seed": index.seed,
        "keys": {str(leaf): f"{DTYPES[leaf.dtype][1]} {list(leaf.shape)}" for leaf in index.leaves or ()},
    }


def print_info(path: Path, as_json: bool) -> None:
    facts = describe(path)
    if as_json:
        print(json.dumps(facts, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table("field")
    table.add_column("value", justify="right")
    keys = facts.pop("keys")
    for name, value in facts.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    rows = Table("key", "one row")
    for name, kind in keys.items():
        rows.add_row(name, kind.replace("[", r"\["))
    console = Console()
    console.print(str(path), highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    console.print(rows)


def run_merge(source: Path, save: Path, copy: bool, order: str, dry_run: bool, allow_pickle: bool) -> None:
    if dry_run:
        _print_plan(plan_merge("merge", source, order, allow_pickle), save, copy)
        return
    plan = merge(source, save, copy=copy, order=order, allow_pickle=allow_pickle, progress=progress("merging"))
    print(f"{'copied' if copy else 'moved'} {len(plan.index.entries):,} trajectories into {save}")


def run_split(source: Path, save: Path, count: int, copy: bool, dry_run: bool, allow_pickle: bool) -> None:
    if dry_run:
        _print_plan(plan_split("split", source, count, allow_pickle), save, copy)
        return
    plan = split(source, save, count, copy=copy, allow_pickle=allow_pickle, progress=progress("splitting"))
    print(f"{'copied' if copy else 'moved'} {len(plan.index.entries):,} trajectories into {save}")


def run_convert(source: str, target: str, storage_format: str | None, allow_pickle: bool) -> None:
    """Between Minari data sets, folders of trajectories and snapshots of a ReplayBuffer."""
    is_file = Path(source).is_file() or (source.endswith(SNAPSHOT) and not Path(source).is_dir())
    is_snapshot = is_file or to_path(source, "convert") is not None
    if source.startswith(MINARI) and target.startswith(MINARI):
        raise SchemaError("convert: expected a folder or a file on one side, got two Minari data sets")
    if storage_format is not None and (target.startswith(MINARI) or target.endswith(SNAPSHOT)):
        raise SchemaError(
            f"convert: --format applies to folders; a Minari data set and a {SNAPSHOT} file have their own"
        )
    if source.startswith(MINARI) or target.startswith(MINARI):
        from sharpwave.tools import minari

        name = (source if source.startswith(MINARI) else target).removeprefix(MINARI)
        if source.startswith(MINARI) and target.endswith(SNAPSHOT):
            count = minari.snapshot_from_minari(name, Path(target))
        elif source.startswith(MINARI):
            count = minari.folder_from_minari(name, target, storage_format or "pt", progress("converting"))
        elif is_snapshot:
            count = minari.snapshot_to_minari(source, name)
        else:
            count = minari.folder_to_minari(source, name, allow_pickle, progress("converting"))
        print(f"{count:,} episodes in {target}")
    elif is_snapshot:
        raise SchemaError(
            f"convert: {source}: expected a folder of trajectories, got a file; a saved ReplayBuffer is converted to "
            "minari:NAME"
        )
    else:
        _reformat(Path(source), Path(target), storage_format or "pt", allow_pickle)


def _reformat(source: Path, target: Path, storage_format: str, allow_pickle: bool) -> None:
    if target.exists() and any(target.iterdir()):
        raise sw.errors.StorageError(f"convert: {target}: expected a new or empty folder")
    device = _device()
    count, every = each_trajectory("convert", source, allow_pickle, device)
    with sw.TrajectoryReplayBuffer(
        target, format=storage_format, cache=0, allow_pickle=allow_pickle, device=device
    ) as buffer:
        for trajectory in progress("converting")(every, count):
            buffer.add(trajectory)
        buffer.save(target)
    print(f"{count:,} trajectories in {target}")


def _device() -> str | None:
    """The device for tensors where torch is installed; only bfloat16 needs it."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return None
    return "cpu"


def progress(what: str) -> Any:
    """A progress bar on standard error, if that is a terminal."""

    def show(things: Iterable[Any], total: int) -> Iterable[Any]:
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        return track(things, what, total, console=console, transient=True, disable=not console.is_terminal)

    return show


def _print_plan(plan: FolderPlan, save: Path, copy: bool) -> None:
    for entry in plan.index.entries:
        print(f"{plan.sources[entry.id]} -> {save / plan.index.name(entry)}")
    verb = "copied" if copy else "moved"
    print(f"{len(plan.index.entries):,} trajectories would be {verb}; nothing was changed")


def _range(values: list[int]) -> str:
    if not values:
        return "-"
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"
