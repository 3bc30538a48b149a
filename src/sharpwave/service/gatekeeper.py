"""Admits known clients to a server's socket: ZeroMQ asks it once for each connection (ZAP, RFC 27).

pyzmq's own ThreadAuthenticator runs an event loop of asyncio in a thread of its own and logs keys; this is the one
answer that is needed. It decides about connections only: the server asks ``Keys.roles_of`` for every message, because a
client may be revoked while it is connected.
"""

from __future__ import annotations

import threading
from typing import Any

import zmq
from zmq.utils import z85

from ..errors import StorageError
from .keys import Keys

__all__ = ["Gatekeeper"]

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Gatekeeper:
    """A thread that answers for the sockets of one ``zmq.Context``; make it before such a socket is bound.

    The sockets are those that ``Keys.protect`` set up. A message that came over such a socket names its sender:
    ``frame.get("User-Id")`` is the client's public key, as authenticated by CURVE (40 characters, as in
    ``Keys.clients``).
    """

    def __init__(self, context: Any, keys: Keys) -> None:
        self._keys = keys
        self.admitted = self.refused = 0  # connections; written by the thread alone
        self._questions = context.socket(zmq.REP)
        self._questions.linger = 0
        self._end, self._told = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        try:
            self._questions.bind(_ZAP)
            self._told.bind(f"inproc://gatekeeper-{id(self):x}")
            self._end.connect(f"inproc://gatekeeper-{id(self):x}")
        except zmq.ZMQError as error:
            self._close_sockets()
            raise StorageError(f"serve(): keys: this zmq.Context has an authenticator already: {error}") from None
        self._thread = threading.Thread(target=self._run, name="sharpwave-gatekeeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. The sockets admit nobody afterwards: close them first."""
        if self._thread.is_alive():
            self._end.send(b"")
            self._thread.join()
            self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in (self._questions, self._end, self._told):
            socket.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._told, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._questions in ready:
                self._questions.send_multipart(self._answer(self._questions.recv_multipart()))
            if self._told in ready:
                return

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request, _domain, _address, _identity, mechanism, *credentials = question
        # A socket with curve_server takes no other mechanism; the comparison keeps that true if a socket lacks it.
        public = z85.encode(credentials[0]).decode() if mechanism == b"CURVE" else ""
        if version != _VERSION or self._keys.roles_of(public) is None:
            self.refused += 1
            # After 400 a client's socket never tries again. After 300 it does, when its handshake has taken too long
            # (see Keys.protect): a list that cannot be read may be mended.
            if self._keys.problem is not None:
                return [_VERSION, request, b"300", b"the list of clients cannot be read", b"", b""]
            return [_VERSION, request, b"400", b"unknown key", b"", b""]
        self.admitted += 1
        return [_VERSION, request, b"200", b"OK", public.encode(), b""]
