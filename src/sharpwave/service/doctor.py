"""Doctor: why a server does not answer, as far as the sockets tell."""

from __future__ import annotations

import errno
from typing import Any

from .zeromq import load_zmq

__all__ = ["Doctor"]

_SAME_FAILURES = 3


class Doctor:
    """Watches the first connection of a session until the server has answered."""

    def __init__(self, has_key: bool) -> None:
        self._has_key = has_key
        self._handshakes_failed = 0
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
            self._handshakes_failed += event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if event["event"] in (zmq.EVENT_CLOSED, zmq.EVENT_CONNECT_DELAYED):
                self._errors.add(event["value"])

    def _has(self, *names: str) -> bool:
        zmq = load_zmq()
        return any(getattr(zmq, f"EVENT_{name}", None) in self._events for name in names)

    def is_hopeless(self) -> bool:
        """Nobody listens there, or the key is refused: waiting does not help."""
        self._look()
        return self._is_absent() or self._has("HANDSHAKE_FAILED_AUTH") or self._disagrees()

    def _disagrees(self) -> bool:
        """Whether one side has keys and the other none, or others. Either this side sees it, and ZeroMQ does not
        connect again; or the other side closes again and again. A cut looks like that once, but not so often."""
        return self._has("HANDSHAKE_FAILED_PROTOCOL") or self._handshakes_failed >= _SAME_FAILURES

    def _is_absent(self) -> bool:
        return self._has("CONNECT_RETRIED") and not self._has("CONNECTED")

    def tell(self) -> str:
        self._look()
        if self._has("HANDSHAKE_FAILED_AUTH"):
            return ": it does not know this client's key; give keys= a key file of this server that is not revoked"
        if self._disagrees() and self._has_key:
            return ": the key is of another server, or the server has no keys; give keys= a key file of this server"
        if self._disagrees():
            return ": it ends the connection of a client without a key; give keys= a key file that this server knows"
        if self._has("CONNECTED"):
            return (
                ": it accepts connections and is silent: another program, a server that needs keys=, or one that hangs"
            )
        if self._is_absent():
            return ": nothing listens there; start the server, or wait for it with open(wait=True)"
        if errno.ENOENT in self._errors:
            return ": there is no such socket"
        return ": there is no way to that machine; look at its name and the firewall"

    def close(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)  # its name is that of a descriptor, which the next socket may have
            self._monitor = None
