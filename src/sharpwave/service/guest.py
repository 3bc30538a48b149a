"""Guest: what a server knows of one client beside what its desk counts, and Line: of one channel of it."""

from __future__ import annotations

from collections import deque
from typing import Any

from .. import _core

__all__ = ["Guest", "Line", "Request"]

Request = _core.Event  # a call as it came; its ``body`` is a view of the received frame


class Line:
    """A channel with a call that waits; those behind it wait here."""

    __slots__ = ("chore", "running", "waiting")

    def __init__(self) -> None:
        self.chore: Any = None  # of the call that is running
        self.running: Request | None = None
        self.waiting: deque[Request] = deque()


class Guest:
    """A client. Everything that it holds ends with it."""

    def __init__(
        self, session: int, token: bytes, about: str, user: str, user_name: str, roles: frozenset[str], version: int
    ) -> None:
        self.session, self.token, self.about, self.roles = session, token, about, roles
        self.user, self.user_name = user, user_name  # the client's public key and its name; empty without keys
        self.version = version
        self.lines: dict[int, Line] = {}
        self.belongings: dict[Any, Any] = {}  # leases, iterators, streams: for the hosted buffers
        self.tasks: set[Any] = set()  # calls that wait
        self.is_gone = False

    def stats(self) -> dict[str, Any]:
        return {"client": self.about, "user": self.user_name, "roles": sorted(self.roles)}
