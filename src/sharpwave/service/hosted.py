"""Hosted: what a server does for one of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from .guest import Guest, Request

__all__ = ["Answer", "Hosted", "HostedVerb", "Later"]

Role = Literal["read", "write", "admin"]


class HostedVerb(NamedTuple):
    """A verb that clients may call by name.

    ``mode``: "inline" is fast and never waits, and runs in the thread that serves everybody; "thread" may wait for a
    disk; "async" is a coroutine function, which is cancelled when its client is gone.
    """

    role: Role
    mode: Literal["inline", "thread", "async"]
    call: Callable[[Guest, dict[str, Any]], Any]


class Answer(NamedTuple):
    """A reply whose body stands in ``memory`` behind the space of a head."""

    memory: Any
    argument: int = 0
    free: Callable[[Any], None] | None = None  # takes the memory back when the client has the reply


class Later(NamedTuple):
    """A call that has to wait: a coroutine function, which gives an Answer.

    ``is_working``: it does something in a thread, and its end is waited for. Else it only waits for other clients, and
    is cancelled when the client gives it up.
    """

    wait: Callable[[], Any]
    is_working: bool = False


class Hosted(Protocol):
    @property
    def face(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def verbs(self) -> Mapping[str, HostedVerb]: ...

    def describe(self) -> dict[str, Any]: ...

    # ADD, SAMPLE, UPDATE and SETTLE; only tables of rows have them.
    def exchange(self, guest: Guest, request: Request) -> Answer | Later: ...

    def summary(self) -> dict[str, Any]: ...  # size and capacity
    def left(self, guest: Guest) -> None: ...
    def flush(self) -> None: ...  # when the server ends
