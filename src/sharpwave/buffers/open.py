"""Buffers that exist: in a file, in shared memory, in a snapshot."""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from pathlib import Path
from typing import Any

from .. import _core
from ..address import to_address, to_path
from ..checks import number, told, truth
from ..errors import SchemaError, StorageError
from ..files import has_magic
from ..rows.host import HostRows
from ..rows.rollout_file import is_rollout_file
from ..rows.tensors import read_device
from ..trajectories.checkpoint import holds_trajectories
from ..views import View
from .distillation import DistillationBuffer
from .replay import ReplayBuffer
from .rollout import RolloutBuffer
from .sequence import SequenceBuffer
from .trajectory import TrajectoryReplayBuffer, open_trajectories

__all__ = ["open"]

_FOREVER_S = 1e9
# The wait for a process that opens or closes the same buffer, where no timeout is given. It takes longest when every
# row of a large file is checked.
_HAND_OVER_S = 20.0


def open(
    address: str | os.PathLike[str],
    *,
    view: View | None = None,
    timeout: float | None = 0,
    recover: bool = False,
    verify: bool = True,
    device: Any = None,
) -> Any:
    """Opens a buffer that exists; which sort of buffer, the file says.

    Args:
        address: A path that ``save`` wrote is loaded into memory, as a copy. ``"file://path"`` and ``"shm://name"``
            are attached to in place: what one process adds, the others see.
            A folder of trajectories (or of one folder for every rank) is a ``TrajectoryReplayBuffer``: a path is copied
            into memory, ``"file://folder"`` is continued, by one process at a time.
        view: The view that the buffer was made with, where it has functions in it (``Hindsight``): a file names them
            and cannot hold them.
        timeout: Seconds to wait until it is created and other processes have finished opening or closing it, None for
            ever. With 0 it must exist; other openers are waited for, up to 20 seconds.
        recover: Opens a file that lost its end or is damaged as well, without the rows that the damage hit. A warning
            and ``stats()["rows_lost"]`` say how many. Without a whole header nothing can be saved. The first one in
            does it: where others have the buffer open it has been looked over.
        verify: Whether every row of a ``file://`` buffer is checked against its checksum when no other process has it
            open. Costs one pass over the file, by several threads; docs/performance.md has the time. A snapshot is
            always checked.
        device: Where a saved buffer is loaded to: ``"cuda"`` puts its rows on the GPU, ``"cpu"`` gives batches as
            tensors.

    Raises:
        StorageError: It is absent, foreign, truncated or damaged, or of another user; the message says which.
        NotReady: Another process began to open or close it and does not go on.
    """
    if not isinstance(address, (str, os.PathLike)):
        raise StorageError(f"open(): address: expected 'shm://name', 'file://path' or a path, got {told(address)}")
    text = os.fspath(address)
    path = to_path(text, "open()")
    seconds = math.inf if timeout is None else number("open()", "timeout", timeout, 0, 1e9)
    truth("open()", "recover", recover)
    truth("open()", "verify", verify)
    folder = Path(text) if path is None else path
    if holds_trajectories(folder):
        return _open_trajectories(folder, path is not None, view, verify, recover, device)
    begun = time.monotonic()
    if seconds > 0:
        _core.wait_for_file(text if path is None else str(path), min(seconds, _FOREVER_S))
    if is_rollout_file(Path(text) if path is None else path):
        return _open_rollout(text, path, view, device)
    if has_magic(text if path is None else path):
        return _open_sequences(text, path, recover, view=view, device=device, verify=None if verify else False)
    if path is None:
        table = _core.Table.load(text, recover)
    else:
        left = max(seconds - (time.monotonic() - begun), 0.0)
        table = _core.Table.attach(str(path), recover, verify, left if seconds > 0 else _HAND_OVER_S)
    face = _face_of(table)
    rows = HostRows(table, face.__name__, None if path is None else to_address(text, "open()"), view)
    buffer: Any = face._over(rows)
    lost = table.lost_at_open
    if lost:
        warnings.warn(f"open(): {text!r} was damaged: {lost} rows are lost, {len(buffer)} are whole", stacklevel=2)
    return buffer if device is None else _move(rows, face, text, device)


def _open_sequences(text: str, path: Path | None, recover: bool, **given: Any) -> SequenceBuffer:
    """A copy of what ``SequenceBuffer.save`` wrote, or its journal in place."""
    for name, value in given.items():
        if value is not None:
            raise SchemaError(f"open(): {name}: {text!r} is a SequenceBuffer, which has no {name}; leave out {name}=")
    return SequenceBuffer._open(text if path is None else str(path), path is not None, recover)


def _open_trajectories(
    folder: Path, in_place: bool, view: View | None, verify: bool, recover: bool, device: Any
) -> TrajectoryReplayBuffer:
    """A folder of trajectories. Those have no view, and each file is checked when it is first read."""
    for name, is_given in (("view", view is not None), ("verify", not verify)):
        if is_given:
            raise SchemaError(f"open(): {name}: {str(folder)!r} is a folder of trajectories; leave {name}= out")
    return open_trajectories("open()", folder, in_place=in_place, device=device, recover=recover)


def _move(rows: HostRows, face: Any, address: str, device: Any) -> Any:
    try:
        target = read_device("open(): device", device)[1]
        if target.type == "cpu":
            return face._over(rows, device)
        if rows.address is not None:
            raise SchemaError(
                f"open(): device: {address!r} is shared and stays on the host; leave out device=, and let "
                "sample(device=...) or stream(device=...) bring batches there"
            )
        from ..rows.transfer import to_device

        moved = to_device(rows, device)
    except BaseException:
        rows.close(False)
        raise
    rows.close(False)
    return face._over(moved)


def _face_of(table: _core.Table) -> type[ReplayBuffer] | type[DistillationBuffer]:
    try:
        face = json.loads(table.description)["face"]
    except (ValueError, KeyError, TypeError):
        face = None
    # Who refuses what is not its own.
    return DistillationBuffer if face == DistillationBuffer.__name__ else ReplayBuffer


def _open_rollout(text: str, path: Path | None, view: View | None, device: Any) -> RolloutBuffer:
    if path is not None:
        raise StorageError(f"open(): {text!r} is a saved rollout, which is loaded into memory; leave out the 'file://'")
    if view is not None:
        raise SchemaError(f"open(): view: {text!r} is a RolloutBuffer, which has no view; leave out view=")
    return RolloutBuffer._load(Path(text), device)
