"""Echo: what ZeroMQ alone takes for the same bytes. A bare ROUTER in a process of its own, which reads nothing in a
message but how many bytes to send back.

The yardstick of a server: no session, no numbers, no rows. `fresh` replies are copied first, from memory that is larger
than the caches into one of a few buffers, since a server has to take the rows that it sends from somewhere.
"""

from __future__ import annotations

import multiprocessing as mp
import struct
import threading
from collections import deque
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import zmq

HEAD_BYTES = 64
_ASKED = struct.Struct("<QQ")  # bytes of the reply, whether it is fresh
_COPIED_BYTES = 64 << 10  # larger messages go out without a copy: below it the copy is what costs less
_SOURCE_BYTES = 512 << 20
_BUFFERS = 8
LIMIT_MS = 60_000
Keys = tuple[bytes, bytes]  # public, secret


class Source:
    """Replies of each size."""

    def __init__(self) -> None:
        self._memory = np.ones(_SOURCE_BYTES, np.uint8)
        self._at = 0
        self._buffers: dict[int, Any] = {}
        self._constants: dict[int, bytes] = {}

    def constant(self, size: int) -> bytes:
        found = self._constants.get(size)
        if found is None:
            found = self._constants[size] = bytes(size)
        return found

    def fresh(self, size: int) -> Any:
        buffers = self._buffers.get(size)
        if buffers is None:
            buffers = self._buffers[size] = cycle([np.zeros(size, np.uint8) for _ in range(_BUFFERS)])
        if self._at + size > _SOURCE_BYTES:
            self._at = 0
        buffer = next(buffers)
        np.copyto(buffer, self._memory[self._at : self._at + size])
        self._at += size
        return buffer.data


def _answer(socket: Any, source: Source) -> None:
    receive, send = socket.recv, socket.send
    while True:
        who = receive()
        size, is_fresh = _ASKED.unpack_from(receive())
        reply = source.fresh(size) if is_fresh else source.constant(size)
        send(who, zmq.SNDMORE)
        send(reply, copy=size < _COPIED_BYTES)


def _serve(addresses: list[str], keys: list[Keys | None], pipe: Any) -> None:
    context, source, bound = zmq.Context(), Source(), []
    for address, pair in zip(addresses, keys, strict=True):
        socket = context.socket(zmq.ROUTER)
        if pair is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = pair
        socket.bind(address)
        bound.append(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))
        threading.Thread(target=_answer, args=(socket, source), daemon=True).start()
    pipe.send(bound)
    pipe.recv()  # until the benchmark is over


class EchoServer:
    """One process, a thread for each address; those that are not asked sleep."""

    def __init__(self, addresses: list[str], keys: list[Keys | None]) -> None:
        processes = mp.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(addresses, keys, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.addresses: list[str] = self._pipe.recv()

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


class EchoClient:
    def __init__(self, address: str, server_key: bytes | None = None) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger, self._socket.rcvtimeo = 0, LIMIT_MS
        if server_key is not None:
            self._socket.curve_serverkey = server_key
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(address)

    def call(self, sent: int, received: int, *, fresh: bool = False) -> Callable[[], None]:
        """Sends so many bytes and waits for so many."""
        message, send, receive = self._message(sent, received, fresh), self._socket.send, self._socket.recv

        def call() -> None:
            send(message)
            receive(copy=False)

        return call

    def burst(self, calls: int, depth: int, received: int, *, fresh: bool = False) -> Callable[[], None]:
        """So many calls, with so many under way at once."""
        message = self._message(HEAD_BYTES, received, fresh)
        send, receive = self._socket.send, self._socket.recv
        kept: deque[Any] = deque(maxlen=1)  # as a learner holds one batch while it takes the next

        def burst() -> None:
            for _ in range(depth):
                send(message)
            for _ in range(calls - depth):
                kept.append(receive(copy=False))
                send(message)
            for _ in range(depth):
                kept.append(receive(copy=False))

        return burst

    def _message(self, sent: int, received: int, fresh: bool) -> bytes:
        return _ASKED.pack(received, fresh) + bytes(sent - _ASKED.size)

    def close(self) -> None:
        self._socket.close()
