"""A client that speaks the protocol of docs/protocol.md by hand: it can say what the real client never says."""

from __future__ import annotations

import itertools
import json
import os
import struct
from typing import Any, NamedTuple

import numpy as np
import zmq

HEAD = struct.Struct("<4sHHHHIQIIQQQQ")
NAMES = ["magic", "version", "verb", "status", "flags", "table", "session", "channel", "stream", "call", "oldest"]
NAMES += ["timeout", "argument"]
HELLO, OPEN, BEAT, PROBE, BYE, CALL, ADD, SAMPLE, UPDATE, SETTLE, TABLES = range(1, 12)
OK, UNKNOWN_SESSION, UNKNOWN_CALL, WORKING, BAD_MESSAGE, VERSION, FORBIDDEN, BUSY = 0, *range(16, 23)
FOREVER = 2**64 - 1


class Message(NamedTuple):
    head: dict[str, Any]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.head["status"])

    @property
    def document(self) -> Any:
        return json.loads(self.body[8 : 8 + struct.unpack_from("<I", self.body)[0]])


def document(value: Any) -> bytes:
    """A document without arrays."""
    text = json.dumps(value).encode()
    return struct.pack("<II", len(text), 0) + text


def pack(body: bytes = b"", **head: Any) -> bytes:
    values = {"magic": b"SHPW", "version": 1, **dict.fromkeys(NAMES[2:], 0), **head}
    return HEAD.pack(*(values[name] for name in NAMES)) + body


def unpack(data: bytes) -> Message:
    return Message(dict(zip(NAMES, HEAD.unpack_from(data), strict=True)), data[HEAD.size :])


def packed_rows(fields: list[dict[str, Any]], values: dict[str, np.ndarray]) -> bytes:
    """The body of an ADD: fields of a fixed size, without flags and priorities."""
    rows = len(next(iter(values.values())))
    body = struct.pack("<II", rows, 0)
    for field in fields:
        column = np.ascontiguousarray(values[field["name"]], field["dtype"]).tobytes()
        body += struct.pack("<II", 1, 0) + column + bytes(-len(column) % 8)
    return body


class Wire:
    """One session with one channel. `sent` has every message that it sent, to be sent again."""

    def __init__(self, context: zmq.Context[Any], address: str, timeout_ms: int = 20_000) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = timeout_ms
        self.socket.sndtimeo = timeout_ms
        self.socket.connect(address)
        self.token = os.urandom(16)
        self.session = 0
        self.calls = itertools.count(1)
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent = [*self.sent[-50:], data]
        self.socket.send(data)

    def receive(self) -> Message:
        return unpack(self.socket.recv())

    def ask(self, verb: int, body: bytes = b"", **head: Any) -> Message:
        """One call and its reply."""
        call = 0 if verb in (HELLO, BEAT, PROBE, BYE) else next(self.calls)
        self.send(pack(body, **{"verb": verb, "session": self.session, "call": call, "oldest": call, **head}))
        while True:
            reply = self.receive()
            if reply.head["verb"] == verb and reply.head["call"] == head.get("call", call):
                return reply

    def hello(self) -> Message:
        reply = self.ask(HELLO, document({"versions": [1, 1], "token": self.token.hex(), "client": "by hand"}))
        self.session = reply.head["session"]
        return reply

    def open(self, name: str) -> dict[str, Any]:
        reply = self.ask(OPEN, document({"name": name}))
        assert reply.status == OK, reply.body
        found: dict[str, Any] = reply.document
        self.table = found["table"]
        return found

    def call(self, verb: str, **args: Any) -> Message:
        return self.ask(CALL, document({"verb": verb, "args": args}), table=self.table)

    def close(self) -> None:
        self.socket.close(0)
