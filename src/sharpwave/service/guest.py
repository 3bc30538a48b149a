"""Guest: what a server knows of one client, and Line: of one channel of it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

__all__ = ["Guest", "Kept", "Line", "Request", "VerbTimes"]

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


class Kept:
    """A reply that was sent, until the client has it."""

    __slots__ = ("_free", "memory", "sending")

    def __init__(self, memory: Any, free: Any = None) -> None:
        self.memory, self._free = memory, free
        self.sending: Any = None  # tells whether ZeroMQ still reads the memory; None: it has a copy

    def send_again(self) -> None:
        self._free = None  # of several messages in the same memory, nobody knows when the last one is through

    def drop(self) -> None:
        """The client wants it no more. It may have given the call up, so the reply may still be on its way."""
        if self._free is not None and (self.sending is None or self.sending.done):
            self._free(self.memory)


class Line:
    """A channel: calls come in order, are executed one after the other, and replies are kept until they have
    arrived."""

    __slots__ = ("chore", "expected", "oldest", "replies", "running", "waiting", "who")

    def __init__(self) -> None:
        self.who: Any = None  # the connection of the last message: replies go there
        self.expected = 1  # the next call's number
        self.oldest = 1
        self.replies: dict[int, Kept] = {}  # by call
        self.chore: Any = None  # of the call that is running
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
