"""HostedTrajectories: trajectories for the clients of a server."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import truth, whole
from ..errors import SchemaError
from ..trajectories.host_arrays import TrajectoryArrays
from ..trajectories.index import Missing
from ..trajectories.store import TrajectoryStore
from .document import encode
from .guest import Guest, Request
from .hosted import Answer, HostedVerb, Later, origin_of
from .message import HEAD_BYTES
from .trajectory_document import from_drawn, from_trajectory, given_of

if TYPE_CHECKING:
    from .server import Server

__all__ = ["HostedTrajectories"]

_MOST_ITERATORS = 64  # of one client; one that is put aside is begun again where its client stands
_PIECE_BYTES = 4 << 20
_MOST_TOGETHER = 256  # trajectories


class Pieces:
    """All trajectories, in pieces of some megabytes, or of one trajectory that is larger."""

    def __init__(self, each: Iterator[tuple[int, TrajectoryArrays]], most_bytes: int) -> None:
        self._each, self._most_bytes = each, most_bytes
        self._next: tuple[int, TrajectoryArrays] | None = None

    def take(self) -> dict[str, Any]:
        """The next piece, and whether it is the last."""
        piece: list[list[Any]] = []
        size = 0
        while len(piece) < _MOST_TOGETHER:
            one = self._next or next(self._each, None)
            self._next = None
            if one is None:
                return {"trajectories": piece, "is_last": True}
            size += sum(array.nbytes for array in one[1].arrays)
            if piece and size > self._most_bytes:
                self._next = one
                break
            piece.append([one[0], from_trajectory(one[1])])
        return {"trajectories": piece, "is_last": False}


class HostedTrajectories:
    """Satisfies ``Hosted``. Calls may wait for the disk or for the store's lock: they run in threads of the server's.

    Args:
        recent: Of the buffer that is served: what its clients begin with.
    """

    kind = "trajectories"

    def __init__(self, face: str, store: TrajectoryStore, recent: int | None, server: Server) -> None:
        self.face, self._store, self._recent, self._server = face, store, recent, server
        self._iterating = threading.Lock()
        self.verbs = {
            "add": HostedVerb("write", "thread", self._add),
            "sample": HostedVerb("read", "thread", self._sample),
            "get": HostedVerb("read", "thread", self._get),
            "trajectories": HostedVerb("read", "thread", self._next_piece),
            "len": HostedVerb("read", "inline", lambda guest, args: self._store.count("len()")),
            "stats": HostedVerb("read", "thread", lambda guest, args: self._store.stats("stats()")),
            "save": HostedVerb("admin", "thread", self._save),
            "load": HostedVerb("admin", "thread", self._load),
            "clear": HostedVerb("admin", "thread", self._clear),
            "flush": HostedVerb("write", "thread", lambda guest, args: self._store.flush("flush()")),
        }

    def describe(self) -> dict[str, Any]:
        folder = self._store.folder
        return {
            "capacity": self._store.capacity,
            "folder": None if folder is None else str(folder.absolute()),
            "recent": self._recent,
            "uuid": self._store.uuid,
            "incarnation": 0,
        }

    def summary(self) -> dict[str, Any]:
        return {"size": len(self._store), "capacity": self._store.capacity}

    def attach(self, desk: Any, number: int) -> None:
        """It has no rows."""

    def exchange(self, guest: Guest, request: Request) -> Answer | Later:
        raise SchemaError(f"a {self.face} has no rows to add or draw by themselves; CALL its verbs")

    def left(self, guest: Guest) -> None:
        guest.belongings.pop(self, None)

    def flush(self) -> None:
        if not self._store.is_closed:
            self._store.flush("flush()")

    # ---- calls by name ----------------------------------------------------------------------------------------------

    def _add(self, guest: Guest, args: dict[str, Any]) -> None:
        where = "add()"
        given = [given_of(where, said) for said in args["trajectories"]]
        self._store.add(where, given, origin_of(guest, args))

    def _sample(self, guest: Guest, args: dict[str, Any]) -> Answer:
        where = "sample()"
        count, recent = whole(where, "batch_size", args["batch_size"]), args["recent"]
        if recent is not None:
            whole(where, "recent", recent)
        return _answer(from_drawn(self._store.draw_exactly(where, count, recent)))

    def _get(self, guest: Guest, args: dict[str, Any]) -> Answer:
        return _answer(from_trajectory(self._store.get_arrays("get()", args["id"])))

    def _next_piece(self, guest: Guest, args: dict[str, Any]) -> Answer:
        """``iterator`` is a number of the client's choice. One that is not known here was begun before the server was
        started again: it goes on behind ``after``, the last id that the client has."""
        number, after = args["iterator"], args["after"]
        with self._iterating:
            held: OrderedDict[int, Pieces] = guest.belongings.setdefault(self, OrderedDict())
            pieces = held.pop(number, None)
        if pieces is None:
            most_bytes = min(_PIECE_BYTES, self._server.message_bytes // 2)
            pieces = Pieces(self._store.each_arrays("trajectories()", after), most_bytes)
        piece = pieces.take()
        if not piece["is_last"]:
            with self._iterating:
                held[number] = pieces
                if len(held) > _MOST_ITERATORS:
                    held.popitem(last=False)
        return _answer(piece)

    def _save(self, guest: Guest, args: dict[str, Any]) -> None:
        self._store.save("save()", self._server.save_place(args["path"]))

    def _load(self, guest: Guest, args: dict[str, Any]) -> dict[str, str]:
        """Empty, or why a file is missing, which is an error class of its own to the client."""
        where = "load()"
        source: Path = self._server.save_place(args["path"], where)
        part: Any = None if args["part"] is None else tuple(args["part"])
        try:
            self._store.load(where, source, part, origin=origin_of(guest, args))
        except Missing as error:
            return {"missing": str(error)}
        return {}

    def _clear(self, guest: Guest, args: dict[str, Any]) -> None:
        where = "clear()"
        set_aside = truth(where, "set_aside", args["set_aside"])
        self._store.clear(where, set_aside=set_aside, origin=origin_of(guest, args))


def _answer(document: dict[str, Any]) -> Answer:
    """Encoded here, in the thread of the call: copying megabytes would hold up the thread that serves everybody."""
    return Answer(encode(document, HEAD_BYTES))
