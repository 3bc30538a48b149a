"""Hosted: what a server does for one of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from .. import _core
from ..errors import SchemaError
from ..files.origin import Origin
from .guest import Guest, Request

__all__ = ["Answer", "Hosted", "HostedVerb", "Later", "Parked", "origin_of"]

Role = Literal["read", "write", "admin"]


class HostedVerb(NamedTuple):
    """A verb that clients may call by name.

    ``mode``: "inline" is fast and never waits, and runs in the thread that serves everybody; "thread" may wait for a
    disk; "async" is a coroutine function, which is cancelled when its client is gone; "parked" gets a third argument
    and returns as ``Parked.begin`` does.
    """

    role: Role
    mode: Literal["inline", "thread", "async", "parked"]
    call: Callable[..., Any]


class Answer(NamedTuple):
    """A reply whose body stands in ``memory`` behind the space of a head."""

    memory: Any
    argument: int = 0


class Later(NamedTuple):
    """A call that has to wait: a coroutine function, which gives an Answer.

    ``is_work``: it does something in a thread, and its end is waited for. Else it only waits for other clients, and
    is cancelled when the client gives it up.
    """

    wait: Callable[[], Any]
    is_work: bool = False


class Parked(NamedTuple):
    """A call that waits for another thread. ``begin`` takes the function that this thread calls with the result or the
    error, and returns the one that ends the wait, for a client that is gone."""

    begin: Callable[[Callable[[Any], None]], Callable[[], None]]


@runtime_checkable
class Hosted(Protocol):
    @property
    def face(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def verbs(self) -> Mapping[str, HostedVerb]: ...

    def describe(self) -> dict[str, Any]: ...

    # The desk may answer calls for the table of this number by itself; only tables of rows have such calls.
    def attach(self, desk: _core.Desk, number: int) -> None: ...

    # ADD, SAMPLE, UPDATE and SETTLE; only tables of rows have them.
    def exchange(self, guest: Guest, request: Request) -> Answer | Later: ...

    def summary(self) -> dict[str, Any]: ...  # size and capacity
    def left(self, guest: Guest) -> None: ...
    def flush(self) -> None: ...  # when the server ends


def origin_of(guest: Guest, args: dict[str, Any]) -> Origin:
    """Of a call that is made once, however often it is sent."""
    said = args.get("origin")
    try:
        number, oldest = said  # type: ignore[misc]
        return Origin.read([guest.token.hex(), number, oldest])
    except (TypeError, ValueError):
        raise SchemaError(
            f"origin: expected the call's number and the oldest that may come again, got {said!r:.100}"
        ) from None
