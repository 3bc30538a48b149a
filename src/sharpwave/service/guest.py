"""Guest: what a server knows of one client, and Line: of one channel of it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

__all__ = ["Guest", "Line", "Request", "VerbTimes"]

_TIMES = 512  # the newest of a verb that its percentiles are made of


class Request(NamedTuple):
    """A call as it came. ``body`` is a view of the received frame."""

    verb: int
    flags: int
    table: int
    stream: int
    call: int
    timeout: float | None
    argument: int
    body: memoryview
    came: float


class VerbTimes:
    """How often a verb was called, with how many bytes, and how long it took."""

    __slots__ = ("_newest", "bytes_in", "bytes_out", "count")

    def __init__(self) -> None:
        self.count = self.bytes_in = self.bytes_out = 0
        self._newest: list[float] = []

    def note(self, seconds: float, bytes_in: int, bytes_out: int) -> None:
        if len(self._newest) < _TIMES:
            self._newest.append(seconds)
        else:
            self._newest[self.count % _TIMES] = seconds
        self.count += 1
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out

    def stats(self) -> dict[str, Any]:
        times = sorted(self._newest)
        return {
            "count": self.count,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "p50_us": 1e6 * times[len(times) // 2] if times else 0.0,
            "p99_us": 1e6 * times[len(times) * 99 // 100] if times else 0.0,
        }


class Line:
    """A channel: calls come in order, are executed one after the other, and replies are kept until they have
    arrived."""

    __slots__ = ("expected", "oldest", "replies", "running", "waiting", "who")

    def __init__(self) -> None:
        self.who: Any = None  # the connection of the last message: replies go there
        self.expected = 1  # the next call's number
        self.oldest = 1
        self.replies: dict[int, Any] = {}  # by call, in order
        self.running: int | None = None  # the call that waits in another thread; those behind it wait in `waiting`
        self.waiting: deque[Request] = deque()


class Guest:
    """A client. Everything that it holds ends with it."""

    def __init__(
        self, session: int, token: bytes, about: str, user: str, user_name: str, roles: frozenset[str], version: int
    ) -> None:
        self.session, self.token, self.about, self.roles = session, token, about, roles
        self.user, self.user_name = user, user_name  # the client's public key and its name; empty without keys
        self.version = version
        self.seen = time.monotonic()
        self.lines: dict[int, Line] = {}
        self.open_calls = 0  # without a reply
        self.kept_bytes = 0  # of replies
        self.belongings: dict[Any, Any] = {}  # leases, iterators, streams: for the hosted buffers
        self.tasks: set[Any] = set()  # calls that wait
        self.verbs: dict[str, VerbTimes] = {}
        self.is_gone = False

    def times(self, verb: str) -> VerbTimes:
        found = self.verbs.get(verb)
        if found is None:
            found = self.verbs[verb] = VerbTimes()
        return found

    def stats(self) -> dict[str, Any]:
        return {
            "client": self.about,
            "user": self.user_name,
            "roles": sorted(self.roles),
            "silent_s": time.monotonic() - self.seen,
            "open_calls": self.open_calls,
            "kept_bytes": self.kept_bytes,
            "verbs": {name: times.stats() for name, times in self.verbs.items()},
        }
