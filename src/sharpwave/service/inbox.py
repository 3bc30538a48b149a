"""Inbox: items of other processes that wait to be taken one by one. A server hosts it like a buffer.

A push is answered when its item was taken, and for ``Puller.pull_into`` when it is in the buffer: what was answered is
not lost. An item that is sent again is taken once.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import ClosedError, NotReady, SchemaError
from ..files.origin import Origin
from ..sequences.gate import to_deadline
from ..sequences.origins import Origins
from .guest import Guest, Request
from .hosted import Answer, HostedVerb, Later, origin_of
from .sample_frames import read_batch

__all__ = ["HostedInbox", "Inbox", "Parcel"]


class Parcel(NamedTuple):
    """An item, and the function that answers its push, from any thread: None, or why it is refused."""

    item: Any
    origin: Origin
    answer: Callable[[Any], None]


class Inbox:
    """For threads. Items come in the order of each sender, and are taken in the order in which they came."""

    def __init__(self) -> None:
        self._came = threading.Condition()
        self._parcels: deque[Parcel] = deque()
        self._taken = Origins()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, parcel: Parcel) -> None:
        with self._came:
            if self._is_closed:
                raise ClosedError("push(): the puller was closed")
            if self._taken.knows(parcel.origin):
                parcel.answer(None)
                return
            self._parcels.append(parcel)
            self._came.notify()

    def drop(self, parcel: Parcel) -> None:
        """Its sender is gone."""
        with self._came:
            for at, waiting in enumerate(self._parcels):
                if waiting is parcel:
                    del self._parcels[at]
                    return

    def take(self, where: str, timeout: Any) -> Parcel:
        """The next one, for ``settle`` or ``put_back``.

        Raises:
            NotReady: None came until the timeout.
        """
        deadline = to_deadline(where, timeout)
        with self._came:
            while True:
                if self._is_closed:
                    raise ClosedError(f"{where}: the puller was closed")
                while self._parcels:
                    parcel = self._parcels.popleft()
                    if not self._taken.knows(parcel.origin):
                        return parcel
                    parcel.answer(None)  # the same item came before, by a connection that broke
                if not self._came.wait_for(lambda: self._parcels or self._is_closed, _left(deadline)):
                    raise NotReady(f"{where}: nothing came in {timeout:g} s")

    def settle(self, parcel: Parcel, error: SchemaError | None = None) -> None:
        """The item was taken, or is refused for good: its sender is told so, and goes on with the next one."""
        with self._came:
            self._taken.keep(parcel.origin, None)
        parcel.answer(error)

    def put_back(self, parcel: Parcel) -> None:
        """It was not taken after all, and is the next one again."""
        with self._came:
            self._parcels.appendleft(parcel)
            self._came.notify()

    def close(self) -> None:
        with self._came:
            self._is_closed = True
            self._came.notify_all()


class HostedInbox:
    """Satisfies ``Hosted``."""

    face, kind = "Inbox", "inbox"

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.verbs = {"push": HostedVerb("write", "parked", self._push)}

    def _push(self, guest: Guest, args: dict[str, Any], done: Callable[[Any], None]) -> Callable[[], None]:
        parcel = Parcel(read_item(args), origin_of(guest, args), done)
        self._inbox.add(parcel)
        return lambda: self._inbox.drop(parcel)

    def describe(self) -> dict[str, Any]:
        return {}

    def summary(self) -> dict[str, Any]:
        return {"size": len(self._inbox), "capacity": None}

    def attach(self, desk: Any, number: int) -> None:
        """It has no rows."""

    def exchange(self, guest: Guest, request: Request) -> Answer | Later:
        raise SchemaError("an Inbox has no rows; its verb is push")

    def left(self, guest: Guest) -> None:
        """Its calls are cancelled by the server."""

    def flush(self) -> None:
        """It holds nothing that was answered."""


def read_item(args: dict[str, Any]) -> Any:
    if "json" not in args:
        return read_batch("push()", args["sample"])
    try:
        return json.loads(args["json"])
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"push(): expected JSON: {error}") from None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
