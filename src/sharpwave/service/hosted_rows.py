"""HostedRows: a table of rows for the clients of a server.

A batch is gathered straight into the memory of its reply, and rows that came packed are copied as they are into the
ring: no loop over rows in Python.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..checks import whole
from ..errors import ClosedError, NotReady, SchemaError, StorageError
from ..rows.handles import as_handles
from ..rows.host import HostRows
from ..rows.protocol import Batch
from ..rows.ragged import spread
from ..sampling import Linear, sampler_to_plain
from .batch_layout import BatchLayout
from .document import encode
from .guest import Guest, Request
from .hosted import Answer, HostedVerb, Later
from .machine import boot_id
from .message import ADD_TELLS_INDICES, HEAD_BYTES, SAMPLE_HOLDS, SAMPLE_TELLS_ODDS, Verb

if TYPE_CHECKING:
    from .server import Server

__all__ = ["HostedRows"]

_MOST_STREAMS = 1 << 16  # whose numbers of rows are remembered after their writers are closed
_MOST_ITERATORS = 64  # of one client


class Stream:
    """The rows of one writer of a client."""

    def __init__(self, token: bytes, writer: _core.Writer) -> None:
        self.token, self.writer = token, writer
        self.adding = threading.Lock()  # a call that waited adds in another thread


class Held:
    """Iterators, streams and reserved batches of one client."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.iterators: dict[int, Iterator[Batch]] = {}
        self.reserved: dict[int, Any] = {}  # by the client's numbers


class HostedRows:
    """Satisfies ``Hosted``. Everything runs in the server's thread, unless a call has to wait."""

    kind = "rows"

    def __init__(self, face: str, rows: HostRows, server: Server) -> None:
        self.face, self._rows, self._server = face, rows, server
        spec = rows.spec
        # Lengths that differ from example to example, and goals for functions of the client, go as documents.
        self._layout: BatchLayout | None = None
        if spec.hindsight is None and not spec.schema.ragged:
            blank = spec.batch_tree(weights=spec.is_prioritized, relabelled=False).new_batch(1)
            self._layout = BatchLayout(blank)
        # At least: ragged fields come on top.
        fixed = (field for _, field in spec.schema.leaves if not field.ragged)
        self._row_bytes = 8 + sum(field.stack * field.dtype.itemsize * math.prod(field.shape) for field in fixed)
        self._desk: _core.Desk | None = None
        self._number = 0  # of the table, at the desk
        self._reserving = threading.Lock()  # a client may go while its call waits in another thread
        self._numbers = itertools.count(1)
        # Rows accepted of streams whose writers are closed: a client that was taken for dead may return.
        self._accepted: OrderedDict[bytes, int] = OrderedDict(rows.table.clients())
        self.verbs = {
            "open_stream": HostedVerb("write", "inline", self._open_stream),
            "close_stream": HostedVerb("write", "inline", self._close_stream),
            "len": HostedVerb("read", "inline", lambda guest, args: len(self._rows)),
            "stats": HostedVerb("read", "inline", lambda guest, args: self._rows.stats()),
            "huge_page_bytes": HostedVerb("read", "thread", lambda guest, args: self._rows.huge_page_bytes()),
            "get": HostedVerb("read", "inline", self._get),
            "handles": HostedVerb("read", "inline", lambda guest, args: self._rows.handles()),
            "positions": HostedVerb("read", "inline", self._positions),
            "iterate": HostedVerb("read", "inline", self._iterate),
            "next": HostedVerb("read", "inline", self._next),
            "write": HostedVerb("write", "thread", self._write),
            "tune": HostedVerb("write", "thread", self._tune),
            "sampler": HostedVerb("read", "inline", lambda guest, args: sampler_to_plain(self._rows.sampler())),
            "clear": HostedVerb("admin", "thread", lambda guest, args: self._rows.clear()),
            "save": HostedVerb("admin", "thread", self._save),
            "flush": HostedVerb("write", "thread", lambda guest, args: self._rows.flush()),
            "remove": HostedVerb("admin", "inline", self._remove),
        }

    def attach(self, desk: _core.Desk, number: int) -> None:
        self._desk, self._number = desk, number
        if self._layout is not None:
            desk.host(number, _core.hosted_table(self._rows.table, self._layout.blank, self._layout.blank_arrays))

    def describe(self) -> dict[str, Any]:
        rows, spec = self._rows, self._rows.spec
        stats = rows.table.stats()
        fields = [
            {
                "name": name,
                "dtype": field.dtype.str,
                "shape": list(field.shape),
                "stack": field.stack,
                "ragged": bool(field.ragged),
                "mutable": field.mutable,
            }
            for name, field in spec.schema.leaves
        ]
        return {
            "description": rows.table.description,
            "capacity": spec.capacity,
            "writers": spec.writers,
            "seed": spec.seed,
            "width": rows.table.width,
            "uuid": rows.table.uuid.hex(),
            "incarnation": int(stats["incarnation"]),
            "fields": fields,
            "batch": None if self._layout is None else self._layout.describe(),
            "direct": self._direct(),
        }

    def _direct(self) -> dict[str, Any] | None:
        """Where a process of this machine and user may attach instead."""
        if self._rows.address is None or self._server.has_keys:
            return None
        try:
            info = os.stat(self._rows.table.path)
        except FileNotFoundError:  # it was removed while it is served
            return None
        return {
            "address": self._rows.address,
            "boot": boot_id(),
            "inode": [info.st_dev, info.st_ino],
            "user": os.getuid(),
        }

    def summary(self) -> dict[str, Any]:
        return {"size": len(self._rows), "capacity": self._rows.spec.capacity}

    def _held(self, guest: Guest) -> Held:
        held = guest.belongings.get(self)
        if held is None:
            held = guest.belongings[self] = Held()
        return held

    def left(self, guest: Guest) -> None:
        with self._reserving:
            held = guest.belongings.pop(self, None)
        if held is None or self._rows.closed:
            return
        for handles in held.reserved.values():
            self._rows.settle(handles, False)
        for stream in held.streams.values():
            self._end_stream(stream)

    def flush(self) -> None:
        if not self._rows.closed:
            self._rows.flush()

    # ---- ADD, SAMPLE, UPDATE, SETTLE --------------------------------------------------------------------------------

    def exchange(self, guest: Guest, request: Request) -> Answer | Later:
        if request.verb == Verb.SAMPLE:
            return self._sample(guest, request)
        if request.verb == Verb.ADD:
            return self._add(guest, request)
        if request.verb == Verb.UPDATE:
            return self._update(request)
        self._settle(guest, request.body)
        return Answer(bytearray(HEAD_BYTES))

    def _or_later(self, attempt: Callable[[float | None], Answer], timeout: float | None) -> Answer | Later:
        """Without a wait if possible; else beside the thread that serves everybody, until the deadline."""
        begun = time.monotonic()
        try:
            return attempt(0)
        except NotReady:
            if timeout is not None and timeout <= 0:
                raise
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        if self._rows.spec.pace is not None:
            return Later(lambda: self._rows.in_turn(lambda: attempt(0), left))
        return Later(lambda: self._rows.in_thread(lambda: attempt(left)), is_work=True)

    def _stream(self, guest: Guest, number: int) -> Stream:
        stream = self._held(guest).streams.get(number)
        if stream is None:
            raise SchemaError(f"ADD: stream {number} is not open; call open_stream")
        return stream

    def _add(self, guest: Guest, request: Request) -> Answer | Later:
        stream = self._stream(guest, request.stream)
        wants = bool(request.flags & ADD_TELLS_INDICES)

        def attempt(timeout: float | None) -> Answer:
            with stream.adding:
                self._stream(guest, request.stream)  # open_stream may have ended it meanwhile
                told = stream.writer.append_packed(request.body, request.argument, wants, timeout)
            if not wants:
                return Answer(bytearray(HEAD_BYTES), told)
            accepted, serials = told
            return Answer(bytearray(HEAD_BYTES) + serials.tobytes(), accepted)

        return self._or_later(attempt, request.timeout)

    def _sample(self, guest: Guest, request: Request) -> Answer | Later:
        if len(request.body):
            self._settle(guest, request.body)
        count, holds = request.argument, bool(request.flags & SAMPLE_HOLDS)
        if not 0 < count < 2**31:
            raise SchemaError(f"sample(): batch_size: expected a whole number from 1 to {2**31 - 1}, got {count}")
        tells = bool(request.flags & SAMPLE_TELLS_ODDS)
        size = count * self._row_bytes if self._layout is None else self._layout.bytes(count)
        self._check_size("sample(): batch_size", count, size)
        draw = self._draw_document if self._layout is None else self._draw
        reserves = holds and self._rows.spec.settles

        def attempt(timeout: float | None) -> Answer:
            answer, handles = draw(count, holds, tells, timeout)
            if reserves:
                self._reserve(guest, request.stream, handles.copy())
            return answer

        return self._or_later(attempt, request.timeout)

    def _check_size(self, what: str, count: int, size: int) -> None:
        """Before memory is taken for so many rows."""
        if size > self._server.message_bytes:
            raise SchemaError(
                f"{what}: a batch of {count} has {size} bytes, above limits['message_bytes']="
                f"{self._server.message_bytes}; ask for fewer, or give serve() a larger limit"
            )

    def _reserve(self, guest: Guest, name: int, handles: Any) -> None:
        with self._reserving:
            former = handles if guest.is_gone else self._held(guest).reserved.pop(name, None)
            if not guest.is_gone:
                self._held(guest).reserved[name] = handles
        if former is not None:  # of a client that died while this call waited, or that gives a number twice
            self._rows.settle(former, False)
        if former is handles:
            raise ClosedError("the client is gone")

    def _draw(self, count: int, holds: bool, tells: bool, timeout: float | None) -> tuple[Answer, Any]:
        """A batch in the memory of its reply, with its handles."""
        layout = self._layout
        assert layout is not None
        memory: Any = layout.memory(HEAD_BYTES, count, 16 if tells else 0)
        batch = layout.over(memory, HEAD_BYTES, count)
        odds = np.frombuffer(memory, np.float64, 2, len(memory) - 16) if tells else None
        self._rows.table.sample_in_turn(count, batch, timeout, not holds, odds)
        return Answer(memory, count), batch["indices"]

    def _draw_document(self, count: int, holds: bool, tells: bool, timeout: float | None) -> tuple[Answer, Any]:
        """The same for ragged fields, and for goals that functions of the client make new."""
        rows = self._rows
        odds = np.empty(2) if tells else None
        if rows.spec.hindsight is None:
            found: dict[str, Any] = {
                "batch": spread(rows.spec, rows.table.sample_in_turn(count, None, timeout, not holds, odds))
            }
        else:
            found = rows.draw_goals(count, None, timeout, odds)
            if not holds:
                rows.settle(found["batch"]["indices"], True)
        if odds is not None:
            found["odds"] = odds
        return Answer(encode(found, HEAD_BYTES), count), found["batch"]["indices"]

    def _settle(self, guest: Guest, body: Any) -> None:
        if len(body) % 8:
            raise SchemaError(f"SETTLE: expected numbers of 8 bytes, got {len(body)} bytes")
        reserved = self._held(guest).reserved
        for number in np.frombuffer(body, np.uint64).tolist():
            handles = reserved.pop(number >> 1, None)
            if handles is not None:
                self._rows.settle(handles, bool(number & 1))

    def _update(self, request: Request) -> Answer | Later:
        count, body = request.argument, request.body
        if count * 12 != len(body):
            raise SchemaError(f"UPDATE: expected {count} indices of 8 bytes and priorities of 4, got {len(body)} bytes")
        handles = np.frombuffer(body, np.int64, count).copy()
        priorities = np.frombuffer(body, np.float32, count, 8 * count).copy()

        def attempt(timeout: float | None) -> Answer:
            done = self._rows.update_priorities(handles, priorities, None, timeout)
            memory = bytearray(HEAD_BYTES + 16)
            memory[HEAD_BYTES:] = np.array([done["applied"], done["stale"]], np.uint64).tobytes()
            return Answer(memory)

        return self._or_later(attempt, request.timeout)

    # ---- calls by name ----------------------------------------------------------------------------------------------

    def _open_stream(self, guest: Guest, args: dict[str, Any]) -> dict[str, int]:
        token = bytes.fromhex(args["token"])
        if len(token) != 16:
            raise SchemaError("open_stream: token: expected 16 bytes in hexadecimal")
        held = self._held(guest)
        for number, stream in held.streams.items():
            if stream.token == token:  # the client gave up an ADD: what comes late under the former number is refused
                return self._rename_stream(guest, held, number)
        known = self._accepted.pop(token, None)
        writer = self._rows.new_writer(token)
        if known is not None and writer.accepted < known:
            writer.close()
            raise StorageError(
                f"open_stream: the table no longer knows which of the {known} rows of this stream it has; open the "
                "buffer again"
            )
        return {"stream": self._keep_stream(guest, held, token, writer), "accepted": writer.accepted}

    def _rename_stream(self, guest: Guest, held: Held, number: int) -> dict[str, int]:
        stream = held.streams[number]
        if not stream.adding.acquire(blocking=False):
            raise NotReady("add(): rows that were added before wait for another process, which holds the index")
        try:
            self._forget_stream(guest, number)
            return {
                "stream": self._keep_stream(guest, held, stream.token, stream.writer),
                "accepted": stream.writer.accepted,
            }
        finally:
            stream.adding.release()

    def _keep_stream(self, guest: Guest, held: Held, token: bytes, writer: _core.Writer) -> int:
        number = next(self._numbers) % 2**32
        held.streams[number] = Stream(token, writer)
        if self._desk is not None:
            self._desk.open_stream(guest.session, self._number, number, writer)
        return number

    def _forget_stream(self, guest: Guest, number: int) -> Stream | None:
        if self._desk is not None:
            self._desk.close_stream(guest.session, self._number, number)
        return self._held(guest).streams.pop(number, None)

    def _close_stream(self, guest: Guest, args: dict[str, Any]) -> None:
        stream = self._forget_stream(guest, args["stream"])
        if stream is not None:
            self._end_stream(stream)

    def _end_stream(self, stream: Stream) -> None:
        self._accepted[stream.token] = stream.writer.accepted
        while len(self._accepted) > _MOST_STREAMS:
            self._accepted.popitem(last=False)
        stream.writer.close()

    def _get(self, guest: Guest, args: dict[str, Any]) -> Batch:
        handles = as_handles("get()", args["handles"])
        self._check_size("get(): indices", len(handles), len(handles) * self._row_bytes)
        return self._rows.get(handles)

    def _positions(self, guest: Guest, args: dict[str, Any]) -> Any:
        handles = as_handles("positions()", args["handles"])
        if len(handles) and not 0 <= handles.min() <= handles.max() < 2**50:
            raise SchemaError("positions(): handles: expected those of rows")
        return self._rows.positions(handles)

    def _iterate(self, guest: Guest, args: dict[str, Any]) -> dict[str, int]:
        held = self._held(guest)
        if len(held.iterators) >= _MOST_ITERATORS:
            raise StorageError(
                f"a client has at most {_MOST_ITERATORS} iterators of rows() and episodes() at once; end some"
            )
        number = next(self._numbers)
        if args["what"] == "rows":
            count = whole("rows()", "batch_size", args["batch_size"])
            most = min(count, len(self._rows))
            self._check_size("rows(): batch_size", most, most * self._row_bytes)
            held.iterators[number] = self._rows.rows(count, bool(args["ids"]))
        else:
            held.iterators[number] = self._rows.episodes(bool(args["partial"]), bool(args["unfinished"]))
        return {"iterator": number}

    def _next(self, guest: Guest, args: dict[str, Any]) -> Batch | None:
        iterators = self._held(guest).iterators
        iterator = iterators.get(args["iterator"])
        if iterator is None:
            raise StorageError("rows(): the server was started again; call rows() or episodes() again")
        batch = None if args.get("ends") else next(iterator, None)
        if batch is None:
            del iterators[args["iterator"]]
        return batch

    def _write(self, guest: Guest, args: dict[str, Any]) -> dict[str, Any]:
        schema = self._rows.spec.schema
        serials = as_handles("write()", args["handles"])
        for leaf, value in zip(args["leaves"], args["values"], strict=True):
            name, field = schema.leaves[leaf]
            if name not in schema.mutable or value.dtype != field.dtype or value.shape != (len(serials), *field.shape):
                raise SchemaError(f"write(): field {name!r}: expected {field.dtype} of {(len(serials), *field.shape)}")
        done = self._rows.table.write(
            serials, args["leaves"], args["values"], bool(args["skips_stale"]), args["timeout"]
        )
        assert done is not None
        return done

    def _tune(self, guest: Guest, args: dict[str, Any]) -> None:
        new: float | Linear | None = None
        if args["beta"] is not None:
            start, end, steps = args["beta"]
            new = Linear(start, end, int(steps)) if steps else end
        self._rows.tune(args["alpha"], new)

    def _save(self, guest: Guest, args: dict[str, Any]) -> None:
        self._rows.save(str(self._server.save_place(args["path"])), bool(args["incremental"]))

    def _remove(self, guest: Guest, args: dict[str, Any]) -> None:
        if self._rows.address is None:
            raise StorageError("rm: the table is in the server's memory; end the server, or clear() it")
        self._rows.close(True)
