"""Opening a table of a server: what stands behind the face."""

from __future__ import annotations

import os
from typing import Any

from .. import _core
from ..address import to_path
from ..checks import told, truth
from ..errors import SharpwaveError, StorageError
from ..rows.host import HostRows
from ..views import View
from .endpoint import read_endpoint
from .machine import boot_id
from .remote_rows import RemoteRows
from .remote_sequences import RemoteSequences
from .remote_trajectories import RemoteTrajectories
from .session import OPEN_S, OpenTable, Session

__all__ = ["open_at_server"]


def open_at_server(
    address: str, *, keys: Any, direct: bool, view: View | None, wait: bool, timeout: float | None
) -> tuple[str, Any]:
    """The name of the face, and the object that it stands over.

    Args:
        wait: Whether to wait for a server that is not there.
        timeout: Seconds to wait; without ``wait`` at most 5.
    """
    endpoint = read_endpoint("open()", address, named=True)
    truth("open()", "direct", direct)
    if keys is not None and not isinstance(keys, (str, os.PathLike)):
        raise StorageError(f"open(): keys: expected the path of a key file, got {told(keys)}")
    session = Session(endpoint.server, keys)
    if not wait:
        timeout = OPEN_S if timeout is None else min(timeout, OPEN_S)
    try:
        table = session.open_table(str(endpoint.name), timeout, wait)
        kind = table.facts["kind"]
        if kind == "sequences":
            return table.facts["face"], RemoteSequences(session, table, {"keys": keys})
        if kind == "trajectories":
            return table.facts["face"], RemoteTrajectories(session, table, address, keys)
        if kind != "rows":
            raise StorageError(f"open(): {address!r} is of a kind that this version does not know: {kind!r}")
        if direct and keys is None and (rows := _attach(table, address, view)) is not None:
            session.close()
            return table.facts["face"], rows
        return table.facts["face"], RemoteRows(session, table, view, {"keys": keys, "direct": direct})
    except BaseException:
        session.close()
        raise


def _attach(table: OpenTable, address: str, view: View | None) -> HostRows | None:
    """The table's own file, where this process may open it: the same machine and user. None: it may not."""
    told_place = table.facts["direct"]
    if told_place is None or told_place["boot"] is None or told_place["boot"] != boot_id():
        return None
    path = to_path(told_place["address"], "open()")
    try:
        info = os.stat(str(path))
        if [info.st_dev, info.st_ino] != told_place["inode"] or info.st_uid != os.getuid():
            return None
        opened = _core.Table.attach(str(path), timeout=OPEN_S)
    except (OSError, SharpwaveError):  # another container's file system, or no right to it: the server gives the rows
        return None
    rows = HostRows(opened, table.facts["face"], told_place["address"], view)
    rows.served_at = address
    return rows
