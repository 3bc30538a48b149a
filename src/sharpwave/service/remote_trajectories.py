"""RemoteTrajectories: trajectories of a server, behind the same face as those of this process."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import SharpwaveError, StorageError
from ..trajectories.incoming import read_incoming
from ..trajectories.index import Missing
from ..trajectories.trajectory import Trajectory
from .document import encode
from .session import OpenTable, Session
from .trajectory_document import drawn_of, from_incoming, trajectory_of

__all__ = ["RemoteTrajectories"]

_SUMMARY_S = 1.0  # how long a repr waits for the server
_MOST_UNSAVED = 256  # adds that the server could not save and that are known when they are made again


class RemoteTrajectories:
    """Satisfies ``Trajectories``. A call waits for a server that is down, and goes on after its restart.

    Calls that change something have a number, so the server executes each once, however often it is sent.

    Args:
        address: With the name of the table.
        keys: The key file that the session was made with, or None.

    Attributes:
        device: Where batches and trajectories go, as tensors of this process; None: NumPy arrays. May be set.
    """

    def __init__(self, session: Session, table: OpenTable, address: str, keys: Any = None) -> None:
        self._session, self._table, self._keys = session, table, keys
        self.address: str | None = address
        self.device: Any = None
        self._iterators = itertools.count(1)
        self._unsaved: dict[bytes, int] = {}  # numbers of adds that the server could not save, by what they add

    # ---- facts --------------------------------------------------------------------------------------------------

    @property
    def folder(self) -> str | None:
        """The server's path."""
        folder: str | None = self._table.facts["folder"]
        return folder

    @property
    def capacity(self) -> int | None:
        capacity: int | None = self._table.facts["capacity"]
        return capacity

    @property
    def recent(self) -> int | None:
        """Of the buffer that is served."""
        recent: int | None = self._table.facts["recent"]
        return recent

    @property
    def place(self) -> str:
        return str(self.address)

    @property
    def open_options(self) -> dict[str, Any]:
        return {"device": self.device, "keys": self._keys}

    def summary(self) -> str:
        if self._session.closed:
            return "closed"
        try:
            said = self._session.call(self._table, "stats", {}, timeout=_SUMMARY_S)
        except SharpwaveError:
            return "the server does not answer"
        return f"{said['size']} trajectories, {said['transitions']} transitions"

    def count(self, where: str) -> int:
        count: int = self._session.call(self._table, "len", {})
        return count

    def stats(self, where: str) -> dict[str, Any]:
        found: dict[str, Any] = self._session.call(self._table, "stats", {})
        return found

    # ---- in and out ---------------------------------------------------------------------------------------------

    def add(self, where: str, trajectories: Any) -> None:
        """A server whose disk is full may have the trajectories in memory, and says that they are not saved. A caller
        that adds the same ones again makes the same call again: they are stored once."""
        self._session.check_open(where)
        args = {"trajectories": [from_incoming(one) for one in read_incoming(where, trajectories)]}
        again = self._unsaved.pop(_digest(args), None) if self._unsaved else None
        number, oldest = self._session.next_origin(again)
        is_over = True
        try:
            self._session.call(self._table, "add", {**args, "origin": [number, oldest]})
        except StorageError:
            is_over = len(self._unsaved) >= _MOST_UNSAVED
            if not is_over:
                self._unsaved[_digest(args)] = number
            raise
        finally:
            if is_over:
                self._session.done(number)

    def _once(self, verb: str, args: dict[str, Any]) -> Any:
        """A call that the server executes once. It is acknowledged when it would survive the server's death."""
        number, oldest = self._session.next_origin()
        try:
            return self._session.call(self._table, verb, {**args, "origin": [number, oldest]})
        finally:
            self._session.done(number)

    def sample(self, where: str, batch_size: int, recent: int | None, device: Any) -> dict[str, Any]:
        said = self._session.call(self._table, "sample", {"batch_size": batch_size, "recent": recent})
        return drawn_of(where, said, self.device if device is None else device)

    def get(self, where: str, trajectory_id: int) -> Trajectory:
        return trajectory_of(where, self._session.call(self._table, "get", {"id": trajectory_id}), self.device)

    def trajectories(self, where: str) -> Iterator[tuple[int, Trajectory]]:
        number = next(self._iterators)
        first = self._piece(number, None)  # at once: which trajectories there are is decided by this call

        def each(piece: dict[str, Any]) -> Iterator[tuple[int, Trajectory]]:
            last = None
            while True:
                for last, said in piece["trajectories"]:
                    yield last, trajectory_of(where, said, self.device)
                if piece["is_last"]:
                    return
                piece = self._piece(number, last)

        return each(first)

    def _piece(self, number: int, after: int | None) -> dict[str, Any]:
        piece: dict[str, Any] = self._session.call(self._table, "trajectories", {"iterator": number, "after": after})
        return piece

    # ---- checkpoints and life -----------------------------------------------------------------------------------

    def save(self, where: str, path: Path) -> None:
        self._session.call(self._table, "save", {"path": str(path)})

    def load(self, where: str, path: Path, part: tuple[int, int, str] | None) -> None:
        said = self._once("load", {"path": str(path), "part": None if part is None else list(part)})
        if "missing" in said:
            raise Missing(said["missing"])

    def clear(self, where: str, *, set_aside: bool) -> None:
        self._once("clear", {"set_aside": set_aside})

    def flush(self, where: str) -> None:
        unsaved = dict(self._unsaved)
        self._session.call(self._table, "flush", {})
        for digest, number in unsaved.items():  # what the server had taken is saved
            if self._unsaved.pop(digest, None) is not None:
                self._session.done(number)

    def close(self, where: str) -> None:
        """Says goodbye to the server. The trajectories stay there."""
        self._session.close()


def _digest(args: dict[str, Any]) -> bytes:
    return hashlib.blake2b(encode(args, 0), digest_size=16).digest()
