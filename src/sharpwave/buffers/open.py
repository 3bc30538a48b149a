"""Buffers that exist: in a file, in shared memory, in a snapshot."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

from .. import _core
from ..address import is_remote, to_address, to_path
from ..checks import number, told, truth
from ..errors import NotReady, SchemaError, StorageError
from ..files import has_magic
from ..rows.host import HostRows
from ..rows.rollout_file import is_rollout_file
from ..rows.tensors import read_device
from ..sequences.local import LocalSequences
from ..trajectories.checkpoint import holds_trajectories
from ..views import View
from .distillation import DistillationBuffer
from .replay import ReplayBuffer
from .rollout import RolloutBuffer
from .sequence import SequenceBuffer
from .trajectory import TrajectoryReplayBuffer, open_trajectories

__all__ = ["open"]

_FOREVER_S = 1e9


def open(
    address: str | os.PathLike[str],
    *,
    wait: bool = False,
    timeout: float | None = None,
    view: View | None = None,
    recover: bool = False,
    verify: bool = True,
    device: Any = None,
    keys: str | os.PathLike[str] | None = None,
    direct: bool = True,
) -> Any:
    """Opens a buffer that exists. The file says which face it is.

    Args:
        address: A path that ``save`` wrote is loaded into memory, as a copy. ``"file://path"`` and ``"shm://name"``
            continue in place: rows that one process adds can be drawn by all others. A folder of trajectories and the
            journal of a ``SequenceBuffer`` are continued by one process at a time. ``"tcp://host:port/name"`` and
            ``"ipc:///path/name"`` are buffers of a server (``sharpwave.serve``).
        wait: Whether to wait until the buffer is created. Without it, an absent buffer is an error at once.
        timeout: Seconds to wait, for the creator with ``wait``, and for processes that are opening or closing the same
            buffer. None waits, 0 tries once.
        view: The view that the buffer was made with, if it has functions in it (``Hindsight``): a file holds their
            names only.
        recover: Also opens a file that is cut or damaged, without the rows that the damage hit. A warning and
            ``stats()`` say how many are lost. A file without a complete header cannot be recovered. Only the first
            process that opens a shared buffer checks it.
        verify: Whether every row of a ``file://`` buffer is compared with its checksum if no other process has it
            open. This reads the file once, with several threads; docs/performance.md has the time. A snapshot is
            always checked.
        device: Where a saved buffer is loaded to: ``"cuda"`` puts its rows on the GPU, ``"cpu"`` gives batches as
            tensors.
        keys: Of a server's buffer: the key file of this client, where the server asks for one.
        direct: Of a server's buffer: whether a process of the same machine and user may use the buffer's own file
            instead of asking the server. ``stats()["server"]`` tells. With keys it never does.

    Raises:
        StorageError: It is absent, foreign, cut or damaged, or belongs to another user; the message says which.
        NotReady: It was not created in time, or another process was opening or closing it until the timeout.
    """
    if not isinstance(address, (str, os.PathLike)):
        raise StorageError(f"open(): address: expected 'shm://name', 'file://path' or a path, got {told(address)}")
    text = os.fspath(address)
    if is_remote(text):
        return _open_at_server(text, wait, timeout, view, recover, verify, device, keys, direct)
    for name, is_given in (("keys", keys is not None), ("direct", direct is not True)):
        if is_given:
            raise SchemaError(f"open(): {name}: {text!r} is not at a server; leave out {name}=")
    in_place = to_path(text, "open()")
    path = Path(text) if in_place is None else in_place
    seconds = _FOREVER_S if timeout is None else number("open()", "timeout", timeout, 0, _FOREVER_S)
    truth("open()", "wait", wait)
    truth("open()", "recover", recover)
    truth("open()", "verify", verify)
    deadline = time.monotonic() + seconds
    if wait and not path.exists():
        _core.wait_for_file(str(path), seconds)
        if not path.exists():
            raise NotReady(f"open(): {text!r} was not created within timeout={timeout}; give a longer timeout=")
    if holds_trajectories(path):
        return _open_trajectories(path, in_place is not None, view, verify, recover, device)
    if is_rollout_file(path):
        return _open_rollout(text, in_place, view, device)
    if has_magic(path):
        return _open_sequences(text, in_place, recover, view=view, device=device, verify=None if verify else False)
    if in_place is None:
        table = _core.Table.load(text, recover)
    else:
        table = _core.Table.attach(str(path), recover, verify, max(deadline - time.monotonic(), 0.0))
    face = _face_of(table)
    rows = HostRows(table, face.__name__, None if in_place is None else to_address(text, "open()"), view)
    buffer: Any = face._over(rows)
    lost = table.lost_at_open
    if lost:
        warnings.warn(f"open(): {text!r} was damaged: {lost} rows are lost, {len(buffer)} are whole", stacklevel=2)
    return buffer if device is None else _move(rows, face, text, device)


def _open_at_server(
    text: str, wait: Any, timeout: Any, view: Any, recover: Any, verify: Any, device: Any, keys: Any, direct: Any
) -> Any:
    truth("open()", "wait", wait)
    limit = None if timeout is None else number("open()", "timeout", timeout, 0, _FOREVER_S)
    for name, is_given in (("recover", recover is not False), ("verify", verify is not True)):
        if is_given:
            raise SchemaError(f"open(): {name}: {text!r} is open at a server already; leave out {name}=")
    from ..service.opening import open_at_server

    target = None if device is None else read_device("open(): device", device)[1]
    face, inner = open_at_server(text, keys=keys, direct=direct, view=view, wait=wait, timeout=limit)
    if face == SequenceBuffer.__name__:
        for name, value in (("view", view), ("device", device)):
            if value is not None:
                inner.close()
                raise SchemaError(f"open(): {name}: {text!r} is a {face}, which has no {name}; leave out {name}=")
        return SequenceBuffer._over(inner)
    if face == TrajectoryReplayBuffer.__name__:
        if view is not None:
            inner.close("close()")
            raise SchemaError(f"open(): view: {text!r} is a {face}, which has no view; leave out view=")
        inner.device = device
        return TrajectoryReplayBuffer._over(inner, inner.recent)
    if target is not None and target.type != "cpu":
        inner.close(False)
        raise SchemaError(
            f"open(): device: the rows of {text!r} stay at the server; leave out device=, and let sample(device=...) "
            "or stream(device=...) bring batches there"
        )
    faces: dict[str, Any] = {"ReplayBuffer": ReplayBuffer, "DistillationBuffer": DistillationBuffer}
    if face not in faces:
        raise StorageError(f"open(): {text!r} is a {face}, which this version does not know")
    return faces[face]._over(inner, device)


def _open_sequences(text: str, path: Path | None, recover: bool, **given: Any) -> SequenceBuffer:
    """A copy of what ``SequenceBuffer.save`` wrote, or its journal in place."""
    for name, value in given.items():
        if value is not None:
            raise SchemaError(f"open(): {name}: {text!r} is a SequenceBuffer, which has no {name}; leave out {name}=")
    return SequenceBuffer._over(LocalSequences.open(text if path is None else str(path), path is not None, recover))


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
    # A foreign description is refused by ReplayBuffer, with the reason.
    return DistillationBuffer if face == DistillationBuffer.__name__ else ReplayBuffer


def _open_rollout(text: str, path: Path | None, view: View | None, device: Any) -> RolloutBuffer:
    if path is not None:
        raise StorageError(f"open(): {text!r} is a saved rollout, which is loaded into memory; leave out the 'file://'")
    if view is not None:
        raise SchemaError(f"open(): view: {text!r} is a RolloutBuffer, which has no view; leave out view=")
    return RolloutBuffer._load(Path(text), device)
