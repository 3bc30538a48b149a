"""Which way a buffer is hosted. It is told by what the buffer is made of, so that this room knows no face."""

from __future__ import annotations

from typing import Any

from ..checks import told
from ..errors import ClosedError, SchemaError
from ..rows.host import HostRows
from ..sequences.local import LocalSequences
from ..trajectories.store import TrajectoryStore
from .hosted import Hosted
from .hosted_rows import HostedRows
from .hosted_sequences import HostedSequences
from .hosted_trajectories import HostedTrajectories
from .inbox import HostedInbox, Inbox

__all__ = ["host"]


def host(where: str, name: str, buffer: Any, server: Any) -> Hosted:
    if isinstance(buffer, Hosted):  # of another room, which knows this one
        return buffer
    rows = getattr(buffer, "_rows", None)
    face = type(buffer).__name__
    if isinstance(rows, HostRows):
        if rows.closed:
            raise ClosedError(f"{where}: {name}: the {face} is closed")
        return HostedRows(face if face == rows.spec.face else rows.spec.face, rows, server)
    if isinstance(buffer, Inbox):
        return HostedInbox(buffer)
    sequences = getattr(buffer, "_sequences", None)
    if isinstance(sequences, LocalSequences):
        sequences.check(where)
        return HostedSequences(face, sequences, server)
    store = getattr(buffer, "_store", None)
    if isinstance(store, TrajectoryStore):
        if store.is_closed:
            raise ClosedError(f"{where}: {name}: the {face} is closed")
        return HostedTrajectories("TrajectoryReplayBuffer", store, buffer.recent, server)
    if face == "RolloutBuffer":
        raise SchemaError(
            f"{where}: {name}: a RolloutBuffer is filled and read by the process that computes on it; add() there, "
            "and serve a ReplayBuffer or a TrajectoryReplayBuffer"
        )
    if rows is None and hasattr(buffer, "_begin"):
        raise SchemaError(f"{where}: {name}: the fields of this {face} are not decided; give it action_shape=")
    if rows is not None and getattr(rows, "device", None) is not None:
        raise SchemaError(f"{where}: {name}: its rows are on {rows.where}; serve a buffer whose rows are on the host")
    raise SchemaError(
        f"{where}: {name}: expected a ReplayBuffer, DistillationBuffer, TrajectoryReplayBuffer or SequenceBuffer, got "
        f"{told(buffer)}"
    )
