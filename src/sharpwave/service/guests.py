"""Guests: the clients of a server: who is admitted, who is still there, and what ends with one that is gone."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import SharpwaveError
from .document import decode
from .guest import Guest
from .hosted import Hosted
from .limits import Limits
from .message import VERSIONS, Status
from .zeromq import load_zmq

__all__ = ["Guests", "Refusal"]

_ROLES = frozenset({"read", "write", "admin"})


class Refusal(Exception):
    """A client is not admitted. ``reason`` is what the server counts."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status, self.reason = status, reason


class Guests:
    """Only the server's thread changes it.

    Args:
        keys: The server's ``Keys``, or None: every client has all roles.
        timeout: Seconds of silence after which a client is dead.
        tables: The hosted buffers, which are told when a client is gone.
    """

    def __init__(self, keys: Any, limits: Limits, timeout: float, tables: Sequence[tuple[str, Hosted]]) -> None:
        self._keys, self._limits, self._timeout, self._tables = keys, limits, timeout, tables
        self._by_session: dict[int, Guest] = {}
        self._by_token: dict[bytes, Guest] = {}
        self.lost = 0  # that died

    def __len__(self) -> int:
        return len(self._by_session)

    def __iter__(self) -> Iterator[Guest]:
        return iter(list(self._by_session.values()))

    def find(self, session: int, frame: Any) -> Guest | None:
        """The sender of a message, if the session is its own.

        Raises:
            Refusal: Its key was revoked meanwhile, or its session is of another key.
        """
        guest = self._by_session.get(session)
        if guest is None or self._keys is None:
            return guest
        if guest.user != _user(frame):
            raise Refusal(Status.UNKNOWN_SESSION, "session of another key", "")
        roles = self._keys.roles_of(guest.user)  # which may have changed since the last message
        if roles is None:
            self._refuse_key(guest)
        guest.roles = roles
        return guest

    def _refuse_key(self, guest: Guest) -> None:
        why = "is not known at present: the list of clients cannot be read"
        if self._keys.problem is None:
            why = "was revoked"
            self.part(guest)
        raise Refusal(Status.FORBIDDEN, "key", f"the key of {guest.user_name!r} {why}")

    def admit(self, body: Any, frame: Any) -> Guest:
        """The client that says HELLO; a new one, or the one that has said it before.

        Raises:
            Refusal: Its message, version, key or token is wrong, or there are too many clients.
        """
        try:
            said = decode(body)
            least, most = said["versions"]
            token = bytes.fromhex(said["token"])
            about = str(said.get("client", ""))[:200]
            if type(least) is not int or type(most) is not int or len(token) != 16:
                raise ValueError
        except (SharpwaveError, ValueError, TypeError, KeyError, AttributeError):
            text = "HELLO: expected versions and a token of 16 bytes"
            raise Refusal(Status.BAD_MESSAGE, "hello", text) from None
        version = _common_version(least, most)
        user, user_name, roles = self._who(frame)
        guest = self._by_token.get(token)
        if guest is not None and guest.user != user:
            raise Refusal(Status.FORBIDDEN, "token of another key", "HELLO: the token belongs to another client")
        if guest is None:
            if len(self) >= self._limits.clients:
                text = f"the server has {len(self)} clients, its limit; close some, or give it another limit"
                raise Refusal(Status.BUSY, "clients", text)
            guest = Guest(secrets.randbits(63) | 1, token, about, user, user_name, roles, version)
            self._by_session[guest.session] = self._by_token[token] = guest
        guest.seen = time.monotonic()
        return guest

    def _who(self, frame: Any) -> tuple[str, str, frozenset[str]]:
        if self._keys is None:
            return "", "", _ROLES
        user = _user(frame)
        roles = self._keys.roles_of(user)
        if roles is None:
            raise Refusal(Status.FORBIDDEN, "key", "HELLO: the key was revoked")
        return user, self._keys.name_of(user) or "", roles

    def bury(self, now: float) -> None:
        """Parts from those that were silent for too long, or whose keys were revoked."""
        for guest in self:
            keys = self._keys
            is_revoked = keys is not None and keys.roles_of(guest.user) is None and keys.problem is None
            if now - guest.seen > self._timeout or is_revoked:
                self.lost += 1
                self.part(guest)

    def part(self, guest: Guest) -> None:
        """The client is gone: everything that it holds returns."""
        if guest.is_gone:
            return
        guest.is_gone = True
        del self._by_session[guest.session], self._by_token[guest.token]
        for task in list(guest.tasks):
            task.cancel()  # its end drops the calls behind it
        for _, hosted in self._tables:
            with contextlib.suppress(SharpwaveError):
                hosted.left(guest)


def _user(frame: Any) -> str:
    """The public key that CURVE has authenticated."""
    try:
        return str(frame.get("User-Id"))
    except load_zmq().ZMQError:
        return ""


def _common_version(least: int, most: int) -> int:
    common = min(most, VERSIONS[1])
    if common < max(least, VERSIONS[0]):
        first, last = VERSIONS
        spoken = f"versions {first} to {last}" if first != last else f"version {last}"
        text = f"the server speaks {spoken} of the protocol, the client {least} to {most}; install a newer sharpwave"
        raise Refusal(Status.VERSION, "version", text)
    return common
