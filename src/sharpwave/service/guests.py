"""Guests: the clients of a server: who is admitted, who is still there, and what ends with one that is gone."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _core
from ..errors import SharpwaveError
from .document import decode
from .guest import Guest
from .hosted import Hosted
from .limits import Limits
from .message import VERSIONS, Status

__all__ = ["Guests", "Refusal"]

_ROLES = {"read": 1, "write": 2, "admin": 4}  # as the desk has them


class Refusal(Exception):
    """A client is not admitted. ``reason`` is what the server counts."""

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status, self.reason = status, reason


class Guests:
    """Only the server's thread changes it.

    Args:
        desk: It takes the messages, and knows sessions and roles by number.
        keys: The server's ``Keys``, or None: every client has all roles.
        timeout: Seconds of silence after which a client is dead.
        tables: The hosted buffers, which are told when a client is gone.
    """

    def __init__(
        self, desk: _core.Desk, keys: Any, limits: Limits, timeout: float, tables: Sequence[tuple[str, Hosted]]
    ) -> None:
        self._desk, self._keys, self._limits, self._timeout, self._tables = desk, keys, limits, timeout, tables
        self._by_session: dict[int, Guest] = {}
        self._by_token: dict[bytes, Guest] = {}
        self.lost = 0  # that died
        self.read_keys()

    def __len__(self) -> int:
        return len(self._by_session)

    def __iter__(self) -> Iterator[Guest]:
        return iter(list(self._by_session.values()))

    def find(self, session: int) -> Guest | None:
        return self._by_session.get(session)

    def read_keys(self) -> None:
        """Tells the desk the roles of everybody, and by what it knows that the list of keys has changed since."""
        if self._keys is None:
            return
        state = self._keys.list_state()  # first: what changes now is read again
        self._desk.watch(os.fsencode(self._keys.list_path), *(number % 2**64 for number in state))
        for guest in self:
            roles = self._keys.roles_of(guest.user)
            guest.roles = frozenset() if roles is None else roles
            self._desk.set_roles(guest.session, _number(guest.roles), roles is None)

    def refusal_of(self, guest: Guest) -> Refusal:
        """For a client whose key is not known (any more)."""
        why = "is not known at present: the list of clients cannot be read"
        if self._keys.problem is None:
            why = "was revoked"
            self.part(guest)
        return Refusal(Status.FORBIDDEN, "key", f"the key of {guest.user_name!r} {why}")

    def is_barred(self, guest: Guest) -> bool:
        return self._keys is not None and self._keys.roles_of(guest.user) is None

    def admit(self, body: Any, user: str) -> Guest:
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
        user_name, roles = self._who(user)
        guest = self._by_token.get(token)
        if guest is not None and guest.user != user:
            raise Refusal(Status.FORBIDDEN, "token of another key", "HELLO: the token belongs to another client")
        if guest is None:
            if len(self) >= self._limits.clients:
                text = f"the server has {len(self)} clients, its limit; close some, or give it another limit"
                raise Refusal(Status.BUSY, "clients", text)
            guest = Guest(secrets.randbits(63) | 1, token, about, user, user_name, roles, version)
            self._desk.admit(guest.session, user, version, _number(roles))
            self._by_session[guest.session] = self._by_token[token] = guest
        self._desk.touch(guest.session)
        return guest

    def _who(self, user: str) -> tuple[str, frozenset[str]]:
        if self._keys is None:
            return "", frozenset(_ROLES)
        roles = self._keys.roles_of(user)
        if roles is None:
            raise Refusal(Status.FORBIDDEN, "key", "HELLO: the key was revoked")
        return self._keys.name_of(user) or "", roles

    def bury(self, now: float) -> None:
        """Parts from those that were silent for too long, or whose keys were revoked."""
        self.read_keys()
        for guest in self:
            is_revoked = self.is_barred(guest) and self._keys.problem is None
            if now - self._desk.seen(guest.session) > self._timeout or is_revoked:
                self.lost += 1
                self.part(guest)

    def part(self, guest: Guest) -> None:
        """The client is gone: everything that it holds returns."""
        if guest.is_gone:
            return
        guest.is_gone = True
        del self._by_session[guest.session], self._by_token[guest.token]
        self._desk.part(guest.session)
        for task in list(guest.tasks):
            task.cancel()  # its end drops the calls behind it
        for _, hosted in self._tables:
            with contextlib.suppress(SharpwaveError):
                hosted.left(guest)


def _number(roles: frozenset[str]) -> int:
    return sum(_ROLES[role] for role in roles)


def _common_version(least: int, most: int) -> int:
    common = min(most, VERSIONS[1])
    if common < max(least, VERSIONS[0]):
        first, last = VERSIONS
        spoken = f"versions {first} to {last}" if first != last else f"version {last}"
        text = f"the server speaks {spoken} of the protocol, the client {least} to {most}; install a newer sharpwave"
        raise Refusal(Status.VERSION, "version", text)
    return common
