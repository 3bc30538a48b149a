"""Doctor: why a server does not answer, as far as the sockets tell."""

from __future__ import annotations

import errno
from typing import Any

from .zeromq import load_zmq

__all__ = ["Doctor"]


class Doctor:
    """Watches the first connection of a session until the server has answered."""

    def __init__(self) -> None:
        self._monitor: Any = None
        self._socket: Any = None
        self._events: set[int] = set()
        self._errors: set[int] = set()

    def watch(self, socket: Any) -> None:
        """Before the socket connects."""
        if self._monitor is None:
            self._socket, self._monitor = socket, socket.get_monitor_socket()

    def _look(self) -> None:
        zmq = load_zmq()
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._events.add(event["event"])
            if event["event"] in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_DELAYED):
                self._errors.add(event["value"])

    def _has(self, *names: str) -> bool:
        zmq = load_zmq()
        return any(getattr(zmq, f"EVENT_{name}", None) in self._events for name in names)

    def is_hopeless(self) -> bool:
        """Nobody listens there, or the key is refused: waiting does not help."""
        self._look()
        return self._is_absent() or self._has("HANDSHAKE_FAILED_AUTH")

    def _is_absent(self) -> bool:
        return self._has("CONNECT_RETRIED") and not self._has("CONNECTED")

    def tell(self) -> str:
        self._look()
        if self._has("HANDSHAKE_FAILED_AUTH"):
            return ": it does not know this client's key; give keys= a key file of this server that is not revoked"
        if self._has("HANDSHAKE_FAILED_PROTOCOL", "HANDSHAKE_FAILED_NO_DETAIL"):
            return ": it and this client do not agree about keys; give keys= a key file of this server, or none if it has none"
        if self._has("CONNECTED"):
            return ": it accepts connections and is silent: another program, a server that needs keys=, or one that hangs"
        if self._is_absent():
            return ": nothing listens there; start the server, or wait for it with open(wait=True)"
        if errno.ENOENT in self._errors:
            return ": there is no such socket"
        return ": there is no way to that machine; look at its name and the firewall"

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor = None
