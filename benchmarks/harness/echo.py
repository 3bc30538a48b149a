"""Echo: what ZeroMQ alone takes for the same bytes. A bare ROUTER in a process of its own, which reads nothing in a
message but how many bytes to send back.

The yardstick of a server: no session, no numbers, no rows. `fresh` replies are copied first, by one thread, from memory
that is larger than the caches into a buffer that is free again, since a server has to take the rows that it sends from
somewhere.
"""

from __future__ import annotations

import multiprocessing as mp
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq

HEAD_BYTES = 64
_ASKED = struct.Struct("<QQ")  # bytes of the reply, whether it is fresh
_COPIED_BYTES = 64 << 10  # larger messages go out without a copy: below it the copy is what costs less
_SOURCE_BYTES = 512 << 20
LIMIT_MS = 60_000
Keys = tuple[bytes, bytes]  # public, secret


class Fresh:
    """A buffer, and whether ZeroMQ has sent what it holds."""

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.sent: Any = zmq.MessageTracker()


class Source:
    """Replies of each size."""

    def __init__(self) -> None:
        self._memory = np.ones(_SOURCE_BYTES, np.uint8)
        self._at = 0
        self._buffers: dict[int, list[Fresh]] = {}
        self._constants: dict[int, bytes] = {}

    def constant(self, size: int) -> bytes:
        found = self._constants.get(size)
        if found is None:
            found = self._constants[size] = bytes(size)
        return found

    def fresh(self, size: int) -> Fresh:
        buffers = self._buffers.setdefault(size, [])
        buffer = next((one for one in buffers if one.sent.done), None)  # the first one, which the caches may still hold
        if buffer is None:
            buffer = Fresh(size)
            buffers.append(buffer)
        np.copyto(buffer.memory, self.cold(size))
        return buffer

    def cold(self, size: int) -> Any:
        """Bytes that no cache holds."""
        if self._at + size > _SOURCE_BYTES:
            self._at = 0
        self._at += size
        return self._memory[self._at - size : self._at]


def _answer(socket: Any, source: Source) -> None:
    receive, send = socket.recv, socket.send
    while True:
        who = receive()
        size, is_fresh = _ASKED.unpack_from(receive())
        is_copied = size < _COPIED_BYTES
        if is_fresh and not is_copied:
            buffer = source.fresh(size)
            send(who, zmq.SNDMORE)
            buffer.sent = send(buffer.memory.data, copy=False, track=True)
        else:
            reply = source.cold(size).data if is_fresh else source.constant(size)
            send(who, zmq.SNDMORE)
            send(reply, copy=is_copied)


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

    def ahead(self, depth: int, received: int, *, fresh: bool = False) -> Iterator[Any]:
        """Replies without end, with so many calls under way at once; closing it takes in those that are left."""
        message = self._message(HEAD_BYTES, received, fresh)
        send, receive = self._socket.send, self._socket.recv
        for _ in range(depth):
            send(message)
        try:
            while True:
                reply = receive(copy=False)
                send(message)
                yield reply
        finally:
            for _ in range(depth):
                receive(copy=False)

    def _message(self, sent: int, received: int, fresh: bool) -> bytes:
        return _ASKED.pack(received, fresh) + bytes(sent - _ASKED.size)

    def close(self) -> None:
        self._socket.close()
