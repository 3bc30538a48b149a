"""Samples from many processes to one: push and pull over ZeroMQ, in safetensors frames.

A pusher keeps what it sent until the puller has acknowledged it, sends it again if the puller was restarted, and makes
its caller wait while ``window`` items are not yet acknowledged: this is the back-pressure, and it bounds the memory of
both sides. Items of one pusher arrive in order, each once. There is no authentication: a puller listens on the loopback
or on a local socket only. Other machines connect through a tunnel.

Needs pyzmq: ``pip install sharpwave[serve]``.
"""

from __future__ import annotations

import ipaddress
import json
import os
import struct
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Protocol

from ..checks import seconds, whole
from ..errors import ClosedError, NotReady, SchemaError, StorageError
from .safetensors import decode, encode
from .sample import SequenceSample

__all__ = ["Puller", "Pusher", "grouping"]

_HEAD = struct.Struct("<QQB")  # number of the item, of the oldest that is not acknowledged, kind
_ACK = struct.Struct("<Q")
_SAMPLE, _JSON = 0, 1
_AGAIN_S = 2.0  # without an acknowledgement for so long, everything is sent again
_MOST_BYTES = 1 << 32  # of one frame


def grouping(senders: int, receivers: int) -> dict[int, list[int]]:
    """Which senders each receiver serves: contiguous blocks of equal size, and one more each for the first ones."""
    senders, receivers = whole("grouping()", "senders", senders), whole("grouping()", "receivers", receivers)
    if senders < receivers:
        raise SchemaError(f"grouping(): expected at least as many senders as receivers={receivers}, got {senders}")
    block = senders // receivers
    groups = {one: list(range(one * block, (one + 1) * block)) for one in range(receivers)}
    for rest in range(senders % receivers):
        groups[rest].append(receivers * block + rest)
    return groups


def _zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise StorageError("stream: needs pyzmq; pip install sharpwave[serve]") from None
    return zmq


class Pusher:
    """The sending end. Use it from one thread at a time.

    Args:
        address: Of a puller: ``tcp://127.0.0.1:5555`` or ``ipc:///path``.
        window: Most items that are sent and not acknowledged; a further push waits.
        name: Its name for the puller; None makes a random one.
    """

    def __init__(self, address: str, *, window: int = 16, name: str | None = None) -> None:
        zmq = _zmq()
        self.address = address
        self.window = whole("Pusher()", "window", window)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, (name or f"{os.getpid()}-{uuid.uuid4().hex}").encode())
        self._socket.setsockopt(zmq.LINGER, 0)  # the pusher itself keeps what is not acknowledged
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StorageError(f"Pusher(): {address}: {error}") from None
        self._next = 0
        self._sent: OrderedDict[int, list[Any]] = OrderedDict()
        self._heard_at = time.monotonic()
        self._is_open = True

    @property
    def unacknowledged(self) -> int:
        return len(self._sent)

    def push(self, item: Any, timeout: float | None = None) -> None:
        """Sends a SequenceSample, or anything that JSON holds.

        Args:
            timeout: Seconds to wait while the window is full; None waits for ever, 0 tries once.

        Raises:
            NotReady: The puller did not take earlier items until the timeout; this one was not sent.
        """
        self._check_open("push()")
        frames = _frames(item)
        self._wait(self.window - 1, timeout, "push()")
        if not self._sent:
            self._heard_at = time.monotonic()  # no acknowledgement was due until now
        self._sent[self._next] = frames
        self._next += 1
        self._send(self._next - 1, frames)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every item is acknowledged: the puller has it, or its buffer.

        Raises:
            NotReady: Some were not until the timeout.
        """
        self._check_open("flush()")
        self._wait(0, timeout, "flush()")

    def close(self, timeout: float | None = 10.0) -> None:
        """Flushes, then closes.

        Raises:
            NotReady: Items were not acknowledged until the timeout; the message says how many.
        """
        if not self._is_open:
            return
        try:
            self.flush(timeout)
        finally:
            self._is_open = False
            self._context.destroy(linger=0)

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(10.0 if kind is None else 0)

    def _wait(self, most: int, timeout: float | None, where: str) -> None:
        """Until at most so many are not acknowledged."""
        zmq = _zmq()
        wait = seconds(where, timeout)
        deadline = None if wait is None else time.monotonic() + wait
        self._hear(zmq)
        while len(self._sent) > most:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise NotReady(
                    f"{where}: {len(self._sent)} items wait at {self.address} to be taken; pull faster, or give a "
                    "larger window or timeout"
                )
            if now - self._heard_at > _AGAIN_S:
                for count, frames in self._sent.items():  # the puller leaves out what it had
                    self._send(count, frames)
                self._heard_at = now
            left = _AGAIN_S if deadline is None else min(_AGAIN_S, deadline - now)
            if self._socket.poll(max(1, int(left * 1e3)), zmq.POLLIN):
                self._hear(zmq)

    def _send(self, count: int, frames: list[Any]) -> None:
        zmq = _zmq()
        # A restarted puller begins with the oldest item that is not acknowledged.
        head = _HEAD.pack(count, next(iter(self._sent)), frames[0])
        try:
            self._socket.send_multipart([head, *frames[1:]], zmq.NOBLOCK, copy=False)
        except zmq.Again:  # no puller has listened for long and the queue is full: it is sent again later
            return

    def _hear(self, zmq: Any) -> None:
        while True:
            try:
                (taken,) = _ACK.unpack(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            while self._sent and next(iter(self._sent)) <= taken:  # in order: this one and all before it
                self._sent.popitem(last=False)

    def _check_open(self, where: str) -> None:
        if not self._is_open:
            raise ClosedError(f"{where}: the pusher was closed")


def _is_local(address: str) -> bool:
    kind, _, rest = str(address).partition("://")
    if kind in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if kind != "tcp" or host == "localhost":
        return kind == "tcp"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or a star
        return False


class Sink(Protocol):
    """What ``pull_into`` fills: a SequenceBuffer."""

    def wanted(self, ids: Iterable[Any]) -> list[str]: ...

    def put(self, samples: Any, *, timeout: float | None = None) -> Any: ...


class Puller:
    """The receiving end; pushers connect to it, from any process. Use it from one thread at a time.

    Args:
        address: Where to listen: ``tcp://`` on the loopback, ``ipc://`` or ``inproc://``; a port of 0 takes a free one,
            which ``address`` tells then.

    Raises:
        StorageError: It cannot listen there, or others than this machine could connect.
    """

    def __init__(self, address: str = "tcp://127.0.0.1:0") -> None:
        zmq = _zmq()
        if not _is_local(address):
            raise StorageError(
                f"Puller(): address: expected ipc://, inproc:// or tcp:// on the loopback, got {address!r}: there "
                "is no authentication; listen on tcp://127.0.0.1 and let other machines connect through a tunnel"
            )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)  # the last acknowledgements go out
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a pusher that connects again keeps its name
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise StorageError(f"Puller(): {address}: {error}") from None
        self.address: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        self._next: dict[bytes, int] = {}  # of each pusher, the number to come
        self.refused = 0  # frames that were no items
        self._is_open = True

    def pull(self, timeout: float | None = None) -> Any:
        """Takes the next item and acknowledges it.

        Args:
            timeout: Seconds to wait for an item; None waits for ever, 0 tries once.

        Raises:
            NotReady: No item came until the timeout.
        """
        who, count, item = self._receive(timeout, "pull()")
        self._acknowledge(who, count)
        return item

    def pull_into(self, buffer: Sink, timeout: float | None = None, **put: Any) -> int:
        """Takes the next sample and puts it; it is acknowledged only when it is in the buffer, and in its journal.

        While the buffer is full this waits for room, and the pushers stop when their windows are full. Ids that are
        held or were used already are left out: a pusher that got no acknowledgement sends again.

        Args:
            timeout: Seconds to wait for an item; None waits for ever. The wait for room has no bound.
            put: Arguments of ``SequenceBuffer.put``. A sample's metadata ``version`` is its version where none is
                given.

        Returns:
            How many data were put.
        """
        who, count, item = self._receive(timeout, "pull_into()")
        if not isinstance(item, SequenceSample):
            self._acknowledge(who, count)
            raise SchemaError(
                f"pull_into(): expected a SequenceSample, got {type(item).__name__}; pull() takes anything"
            )
        if put.get("version") is None and "version" in item._metadata:
            put["version"] = item._metadata["version"]
        wanted = set(buffer.wanted(item._ids))
        if len(wanted) == len(item):
            handles = buffer.put(item, **put)
        else:
            rest = [(at, part) for at, part in enumerate(item.unpack()) if part._ids[0] in wanted]
            if isinstance(put.get("version"), list):
                put["version"] = [put["version"][at] for at, _ in rest]
            handles = buffer.put([part for _, part in rest], **put)
        self._acknowledge(who, count)
        return len(handles)

    def close(self) -> None:
        """Closes. The pushers keep what was not acknowledged."""
        if self._is_open:
            self._is_open = False
            self._context.destroy(linger=1000)

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _receive(self, timeout: Any, where: str) -> tuple[bytes, int, Any]:
        if not self._is_open:
            raise ClosedError(f"{where}: the puller was closed")
        wait = seconds(where, timeout)
        deadline = None if wait is None else time.monotonic() + wait
        while True:
            left = None if deadline is None else max(0, int(1e3 * (deadline - time.monotonic()) + 0.999))
            if not self._socket.poll(left):
                raise NotReady(f"{where}: nothing came to {self.address} in {wait:g} s")
            who, *frames = self._socket.recv_multipart(copy=False)
            name = who.bytes
            try:
                count, oldest, item = _item(frames)
            except (StorageError, ValueError, IndexError, RecursionError, struct.error):
                self.refused += 1  # not the bytes of a pusher: no answer is due
                continue
            expected = self._next.get(name, oldest)
            if count == expected:
                return name, count, item
            if count < expected:
                self._acknowledge(name, expected - 1)  # sent again: we had it
            # Else one before it was lost with a former connection: it comes again, and this one behind it.

    def _acknowledge(self, who: bytes, count: int) -> None:
        self._next[who] = count + 1
        self._socket.send_multipart([who, _ACK.pack(count)])


def _frames(item: Any) -> list[Any]:
    if isinstance(item, SequenceSample):
        return [_SAMPLE, *encode(item)]
    try:
        return [_JSON, json.dumps(item).encode()]
    except (TypeError, ValueError) as error:
        raise SchemaError(f"push(): expected a SequenceSample or what JSON holds: {error}") from None


def _item(frames: list[Any]) -> tuple[int, int, Any]:
    number, oldest, kind = _HEAD.unpack(frames[0].bytes)
    if kind == _JSON:
        return number, oldest, json.loads(frames[1].bytes)
    if len(frames) == 2:
        return number, oldest, decode(frames[1].buffer)
    # One copy, into one piece: arrays must not keep the socket's memory.
    joined = bytearray(sum(len(frame.buffer) for frame in frames[1:]))
    at = 0
    for frame in frames[1:]:
        joined[at : at + len(frame.buffer)] = frame.buffer
        at += len(frame.buffer)
    return number, oldest, decode(joined)
