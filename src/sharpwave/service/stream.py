"""Items from many processes to one: pushers with a window, over the service's protocol.

A pusher is a client whose puts do not wait for each other: up to ``window`` items are not yet acknowledged, then its
caller waits. This is the back-pressure, and it bounds the memory of both sides. Items of one pusher arrive in order,
each once, also if the other side is restarted. It pushes to a ``Puller``, which is a server with an inbox, or into a
SequenceBuffer that a server has. Each pusher is a client of its own with a random token: one that is started again is
never taken for the one before.
"""

from __future__ import annotations

import ipaddress
import json
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from ..checks import seconds, whole
from ..errors import ClosedError, NotReady, SchemaError, SharpwaveError, StorageError
from ..sequences.local import LocalSequences
from ..sequences.sample import SequenceSample
from .channel import Channel, OpenCall
from .document import encode
from .endpoint import read_endpoint
from .inbox import Inbox
from .message import HEAD_BYTES, Verb
from .sample_frames import pack_batch
from .server import Server
from .session import OpenTable, Session

__all__ = ["Puller", "Pusher", "grouping"]

_MOST_CALLS = 64  # under way; the rest of the window waits here
_MOST_BYTES = 8 << 20  # likewise: small items gain by being many, large ones do not
_AGAIN_S = 0.2  # between attempts, where a server or its buffer is closed
_INBOX = "inbox"


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


class Pusher:
    """The sending end. A thread of its own sends and waits for answers, so that ``push`` returns while there is room in
    the window, also while no server listens.

    Args:
        address: Of a puller, or of a server: ``tcp://127.0.0.1:5555`` or ``ipc:///path``.
        window: Most items that are not acknowledged; a further push waits.
        table: The name of a SequenceBuffer that the server has; items are samples then. None for a puller.
        name: What the server's ``stats()`` call this client; two may have the same.
        keys: A client's key file, where the server has keys.

    Raises:
        StorageError: It is no address.
    """

    def __init__(
        self,
        address: str,
        *,
        window: int = 16,
        table: str | None = None,
        name: str | None = None,
        keys: Any = None,
    ) -> None:
        self.address = address
        self.window = whole("Pusher()", "window", window)
        self._table = _INBOX if table is None else table
        self._session = Session(read_endpoint("Pusher()", address, named=False).server, keys, name)
        self._moved = threading.Condition()
        self._waiting: deque[tuple[int, Any]] = deque()  # numbers and messages that are not yet sent
        self._open = 0  # sent, and not answered
        self._errors: deque[SharpwaveError] = deque()  # answers that are errors, not yet told
        self._failure: BaseException | None = None  # of the thread
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="sharpwave-pusher", daemon=True)
        self._thread.start()

    @property
    def unacknowledged(self) -> int:
        return len(self._waiting) + self._open

    def push(self, item: Any, timeout: float | None = None, *, version: Any = None, births: Any = None) -> None:
        """Sends a SequenceSample, or to a puller anything that JSON holds.

        Args:
            timeout: Seconds to wait while the window is full; None waits for ever, 0 tries once.
            version: As of ``SequenceBuffer.put``, where the item goes into a buffer.
            births: Likewise.

        Raises:
            NotReady: Earlier items were not taken until the timeout; this one was not sent.
            SchemaError: An earlier item was refused, and is lost; this one was not sent. The next push goes on.
        """
        if not self._is_open:
            raise ClosedError("push(): the pusher was closed")
        args = self._args(item, version, births)
        self._wait("push()", self.window - 1, timeout)
        number, oldest = self._session.next_origin()
        verb = "push" if self._table == _INBOX else "put"
        message = encode({"verb": verb, "args": {**args, "origin": (number, oldest), "key": f"{number}"}}, HEAD_BYTES)
        with self._moved:
            self._waiting.append((number, message))
            self._moved.notify_all()

    def _args(self, item: Any, version: Any, births: Any) -> dict[str, Any]:
        if self._table != _INBOX:
            if not isinstance(item, SequenceSample):
                raise SchemaError(f"push(): expected a SequenceSample, got {type(item).__name__}")
            return {"samples": pack_batch(item), "version": version, "births": births}
        if isinstance(item, SequenceSample):
            return {"sample": pack_batch(item)}
        try:
            return {"json": json.dumps(item)}
        except (TypeError, ValueError) as error:
            raise SchemaError(f"push(): expected a SequenceSample or what JSON holds: {error}") from None

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every item is acknowledged: the puller has it, or its buffer.

        Raises:
            NotReady: Some were not until the timeout.
            SchemaError: One was refused, and is lost; the others are acknowledged.
        """
        if not self._is_open:
            raise ClosedError("flush(): the pusher was closed")
        self._wait("flush()", 0, timeout)

    def close(self, timeout: float | None = 10.0) -> None:
        """Flushes, then closes.

        Raises:
            NotReady: Items were not acknowledged until the timeout; the message says how many.
            SchemaError: One was refused, and is lost.
        """
        if not self._is_open:
            return
        try:
            self.flush(timeout)
        finally:
            self._is_open = False
            self._session.close()
            with self._moved:
                self._moved.notify_all()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close(10.0 if kind is None else 0)

    def _wait(self, where: str, most: int, timeout: float | None) -> None:
        """Until at most so many are not acknowledged. Then tells of one that was refused."""
        wait = seconds(where, timeout)

        def is_over() -> bool:
            return self._failure is not None or self.unacknowledged <= most

        with self._moved:
            in_time = self._moved.wait_for(is_over, wait)
            if self._failure is not None:
                raise StorageError(f"{where}: {self.address}: {self._failure}")
            if self._errors and in_time:
                raise self._errors.popleft()
            if not in_time:
                raise NotReady(
                    f"{where}: {self.unacknowledged} items wait at {self.address} to be taken; pull faster, or give a "
                    "larger window or timeout"
                )

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            table = self._session.open_table(self._table, None, waits=True)
            self._exchange(self._session.new_channel(), table)
        except BaseException as error:
            with self._moved:
                self._failure = error if self._is_open else None
                self._moved.notify_all()

    def _exchange(self, channel: Channel, table: OpenTable) -> None:
        sent: deque[tuple[int, Any]] = deque()
        under_way = 0  # bytes of those
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._waiting or sent or not self._is_open)
                if not self._is_open:
                    return
                begun = []
                while self._waiting and len(sent) < _MOST_CALLS and (not sent or under_way < _MOST_BYTES):
                    item = self._waiting.popleft()
                    self._open += 1
                    under_way += len(item[1])
                    sent.append(item)
                    begun.append(item[1])
            for message in begun:
                channel.begin("push()", OpenCall(Verb.CALL, message, table, None, 0, 0, None))
            error = self._hear(channel)
            with self._moved:
                if isinstance(error, ClosedError):  # nothing was taken: all are sent again, to the next server there
                    channel.abandon()
                    self._waiting.extendleft(reversed(sent))
                    self._open -= len(sent)
                    sent.clear()
                    under_way = 0
                    self._moved.wait_for(lambda: not self._is_open, _AGAIN_S)
                    continue
                self._open -= 1
                if error is not None:
                    self._errors.append(type(error)(f"an item that was pushed before is refused, and lost: {error}"))
                number, message = sent.popleft()
                under_way -= len(message)
                self._session.done(number)
                self._moved.notify_all()

    def _hear(self, channel: Channel) -> SharpwaveError | None:
        """The answer to the first call, if it is an error."""
        before = channel.open_calls
        try:
            channel.finish("push()")
        except SharpwaveError as error:
            if channel.open_calls == before:
                raise  # no answer: the server cannot be met again
            return error
        return None


def _is_local(address: str) -> bool:
    kind, _, rest = str(address).partition("://")
    if kind == "ipc":
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
    """The receiving end: a server with an inbox. Pushers connect to it, from any process.

    Args:
        address: Where to listen: ``tcp://`` on the loopback, or ``ipc://``; a port of 0 takes a free one, which
            ``address`` tells then.
        keys: A folder of keys (``sharpwave keys new``): then it may listen anywhere, and pushers need one of them.

    Raises:
        StorageError: It cannot listen there, or others than this machine could connect without keys.
    """

    def __init__(self, address: str = "tcp://127.0.0.1:0", *, keys: Any = None) -> None:
        if keys is None and not _is_local(address):
            raise StorageError(
                f"Puller(): address: expected ipc:// or tcp:// on the loopback, got {address!r}: without keys= there "
                "is no authentication; give keys=, or let other machines connect through a tunnel"
            )
        self._inbox = Inbox()
        self._server = Server({_INBOX: self._inbox}, address, keys=keys)
        self.address: str = self._server.address

    @property
    def refused(self) -> int:
        """Messages that were not of the protocol."""
        return sum(self._server.stats()["refused"].values())

    def pull(self, timeout: float | None = None) -> Any:
        """Takes the next item and acknowledges it.

        Args:
            timeout: Seconds to wait for an item; None waits for ever, 0 tries once.

        Raises:
            NotReady: No item came until the timeout.
        """
        parcel = self._inbox.take("pull()", timeout)
        self._inbox.settle(parcel)
        return parcel.item

    def pull_into(self, buffer: Sink, timeout: float | None = None, **put: Any) -> int:
        """Takes the next sample and puts it; it is acknowledged only when it is in the buffer, and in its journal.

        While the buffer is full this waits for room, and the pushers stop when their windows are full. A sample that is
        sent again is put once, also after a restart with the same journal. Ids that are held or were used already are
        left out: a generator that is started again may make them a second time.

        Args:
            timeout: Seconds to wait for an item; None waits for ever. The wait for room has no bound.
            put: Arguments of ``SequenceBuffer.put``. A sample's metadata ``version`` is its version where none is
                given.

        Returns:
            How many data were put.

        Raises:
            SchemaError: The buffer refuses the sample. Its pusher gets the same error; the next call takes the next
                item.
        """
        parcel = self._inbox.take("pull_into()", timeout)
        try:
            count = self._put(buffer, parcel, put)
        except SchemaError as error:
            self._inbox.settle(parcel, error)
            raise
        except BaseException:
            self._inbox.put_back(parcel)
            raise
        self._inbox.settle(parcel)
        return count

    def _put(self, buffer: Any, parcel: Any, put: dict[str, Any]) -> int:
        item = parcel.item
        if not isinstance(item, SequenceSample):
            raise SchemaError(
                f"pull_into(): expected a SequenceSample, got {type(item).__name__}; pull() takes anything"
            )
        inside: Any = getattr(buffer, "_sequences", None)
        once: dict[str, Any] = {}
        if isinstance(inside, LocalSequences):
            if inside.has_made(parcel.origin):
                return 0
            once = {"origin": parcel.origin}
        if put.get("version") is None and "version" in item._metadata:
            put = {**put, "version": item._metadata["version"]}
        samples: Any = item
        wanted = set(buffer.wanted(item._ids))
        if len(wanted) < len(item):
            rest = [(at, part) for at, part in enumerate(item.unpack()) if part._ids[0] in wanted]
            if isinstance(put.get("version"), list):
                put = {**put, "version": [put["version"][at] for at, _ in rest]}
            samples = [part for _, part in rest]
        if not once:
            return len(buffer.put(samples, **put))
        told = put.get("version"), put.get("births"), put.get("timeout")
        return len(inside.put("put()", samples, *told, **once))

    def close(self) -> None:
        """Closes. The pushers keep what was not acknowledged."""
        self._inbox.close()
        self._server.close()

    def __enter__(self) -> Puller:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
