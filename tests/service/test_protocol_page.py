"""The protocol as docs/protocol.md has it: a client of plain sockets and `struct`, without the package's own."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

import sharpwave as sw
from sharpwave.service import message as own_message

HEAD = struct.Struct("<4sHHHHIQIIQQQQ")
NAMES = (
    "magic", "version", "verb", "status", "flags", "table", "session", "channel", "stream", "call", "oldest", "timeout",
    "argument",
)  # fmt: skip
HELLO, OPEN, BEAT, PROBE, BYE, CALL, ADD, SAMPLE, UPDATE, SETTLE, TABLES = range(1, 12)
OK, UNKNOWN_SESSION, UNKNOWN_CALL, WORKING, BAD_MESSAGE, VERSION = 0, 16, 17, 18, 19, 20
FOREVER = 2**64 - 1


def document(value: Any) -> bytes:
    raw = json.dumps(value).encode()
    return struct.pack("<II", len(raw), 0) + raw


def read_document(body: bytes) -> Any:
    """Without arrays; those are tested by their place."""
    length, zero = struct.unpack_from("<II", body)
    assert zero == 0
    return json.loads(body[8 : 8 + length])


def array(body: bytes, plain: dict[str, Any]) -> np.ndarray:
    dtype, shape, offset = plain["$"]
    assert offset % 64 == 0
    return np.frombuffer(body, dtype, int(np.prod(shape)), offset).reshape(shape)


class Client:
    def __init__(self, address: str, versions: tuple[int, int] = (1, 1)) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.token, self.session, self.calls, self.table = os.urandom(16), 0, 0, 0
        self.versions = versions

    def send(self, verb: int, body: bytes = b"", **head: int) -> None:
        values = {"version": 1, "channel": 7, "session": self.session, "table": self.table, "timeout": FOREVER} | head
        numbers = [values.get(name, 0) for name in NAMES[1:]]
        numbers[1] = verb
        self.socket.send(HEAD.pack(b"SHPW", *numbers) + body)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        frame = self.socket.recv()
        return dict(zip(NAMES, HEAD.unpack_from(frame), strict=True)), frame[64:]

    def hello(self) -> tuple[dict[str, Any], bytes]:
        said = {"versions": list(self.versions), "token": self.token.hex(), "client": "a test"}
        self.send(HELLO, document(said), session=0, table=0, version=self.versions[1])
        head, body = self.receive()
        self.session = head["session"]
        return head, body

    def call(self, verb: int, body: bytes = b"", **head: int) -> tuple[dict[str, Any], bytes]:
        self.calls += 1
        self.send(verb, body, call=self.calls, oldest=self.calls, **head)
        head, body = self.receive()
        assert (head["magic"], head["verb"], head["call"], head["channel"]) == (b"SHPW", verb, self.calls, 7)
        return head, body

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def table() -> Iterator[sw.ReplayBuffer]:
    schema = {"obs": sw.Field((3,)), "action": sw.Field((), "int64"), "note": sw.Field((5,), "uint8", ragged="padded")}
    with sw.ReplayBuffer(100, schema=schema, next_obs=None, sampler=sw.Prioritized(), seed=0) as made:
        yield made


@pytest.fixture
def plain() -> Iterator[sw.ReplayBuffer]:
    schema = {"obs": sw.Field((3,)), "action": sw.Field((), "int64")}
    with sw.ReplayBuffer(100, schema=schema, next_obs=None, sampler=sw.Prioritized(), seed=0) as made:
        yield made


@pytest.fixture
def server(table: sw.ReplayBuffer, plain: sw.ReplayBuffer) -> Iterator[Any]:
    with sw.serve({"ragged": table, "plain": plain}, "tcp://127.0.0.1:0") as made:
        yield made


@pytest.fixture
def client(server: Any) -> Iterator[Client]:
    made = Client(server.address)
    head, body = made.hello()
    assert (head["status"], head["version"]) == (OK, 1)
    said = read_document(body)
    assert said["version"] == 1
    assert said["client_timeout"] == 5.0
    assert said["limits"]["message_bytes"] > 0
    yield made
    made.close()


def opened(client: Client, name: str) -> dict[str, Any]:
    head, body = client.call(OPEN, document({"name": name}), table=0)
    assert head["status"] == OK
    facts = read_document(body)
    client.table = facts["table"]
    return facts


def open_stream(client: Client, token: bytes) -> tuple[int, int]:
    said = {"verb": "open_stream", "args": {"token": token.hex()}}
    told = read_document(client.call(CALL, document(said))[1])
    return told["stream"], told["accepted"]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 8)


def packed(first: int, count: int, facts: dict[str, Any], priorities: bool = False) -> bytes:
    """Rows whose every value follows from their number."""
    numbers = np.arange(first, first + count)
    body = struct.pack("<II", count, 1 | (2 if priorities else 0)) + padded(bytes(2 * (n % 4 == 3) for n in numbers))
    if priorities:
        body += padded(numbers.astype("<f4").tobytes())
    for field in facts["fields"]:
        if field["ragged"]:
            ends = np.cumsum(numbers % 4)
            body += struct.pack(f"<{count + 1}Q", 0, *ends) + padded(bytes(ends[-1]))
            continue
        shape = (count, *field["shape"])
        values = np.broadcast_to(numbers.reshape(-1, *[1] * (len(shape) - 1)), shape)
        if field["name"] == "done":
            values = np.zeros(shape)
        body += struct.pack("<II", 1, 0) + padded(np.ascontiguousarray(values, field["dtype"]).tobytes())
    return body


@pytest.mark.parametrize("name", ["plain", "ragged"])
def test_rows_are_added_drawn_and_weighed_by_the_page_alone(client: Client, server: Any, name: str) -> None:
    facts = opened(client, name)
    assert (facts["face"], facts["kind"], facts["capacity"], facts["width"]) == ("ReplayBuffer", "rows", 100, 1)
    token = os.urandom(16)
    stream, accepted = open_stream(client, token)
    assert accepted == 0
    head, body = client.call(ADD, packed(0, 8, facts, priorities=True), stream=stream, argument=0, flags=1)
    assert (head["status"], head["argument"]) == (OK, 8)
    assert np.frombuffer(body, "<i8").tolist() == list(range(8))
    # Sent again with two new rows: the first eight are there.
    head, body = client.call(ADD, packed(0, 10, facts), stream=stream, argument=0, flags=1)
    assert head["argument"] == 10
    assert np.frombuffer(body, "<i8").tolist() == [-1] * 8 + [8, 9]
    head, _ = client.call(ADD, packed(20, 1, facts), stream=stream, argument=20)
    assert head["status"] == 1, "a gap"

    head, body = client.call(SAMPLE, argument=4, flags=2)
    assert (head["status"], head["argument"]) == (OK, 4)
    if facts["batch"] is None:
        found = read_document(body)
        batch = {key: array(body, value) for key, value in found["batch"].items() if "$" in value}
        note = found["batch"]["note"]
        lengths = array(body, note["mask"]).sum(axis=1)
        assert lengths.tolist() == (batch["action"] % 4).tolist()
        assert array(body, found["odds"])[0] == 10
    else:
        batch, at = {}, 0
        for path, dtype, shape in facts["batch"]:
            count = 4 * int(np.prod(shape))
            batch["/".join(path)] = np.frombuffer(body, dtype, count, at).reshape(4, *shape)
            at += -(-count * np.dtype(dtype).itemsize // 64) * 64
        rows, _ = np.frombuffer(body, "<f8", 2, len(body) - 16)
        assert rows == 10
    assert (batch["obs"] == batch["action"][:, None]).all()
    assert (batch["indices"] == batch["action"]).all()

    update = np.array([0, 1, 99], "<i8").tobytes() + np.array([1, 2, 3], "<f4").tobytes()
    head, body = client.call(UPDATE, update, argument=3)
    assert struct.unpack("<QQ", body) == (2, 1)
    _, body = client.call(CALL, document({"verb": "len", "args": {}}))
    assert read_document(body) == 10
    _, body = client.call(TABLES)
    assert read_document(body)[name] == {"face": "ReplayBuffer", "size": 10, "capacity": 100}
    client.send(BYE)
    assert client.receive()[0]["verb"] == BYE
    assert server.stats()["clients"] == {}


def test_a_lost_reply_is_asked_for_and_is_the_same(client: Client, plain: sw.ReplayBuffer) -> None:
    plain.add(np.zeros((5, 3)), np.arange(5), np.zeros(5), np.zeros(5, bool))
    opened(client, "plain")
    _, first = client.call(SAMPLE, argument=32)
    client.send(PROBE, call=client.calls, oldest=client.calls)
    head, again = client.receive()
    assert (head["verb"], head["status"], again == first) == (SAMPLE, OK, True)
    client.send(SAMPLE, argument=32, call=client.calls, oldest=client.calls)  # the request itself, twice
    assert client.receive()[1] == first
    client.send(PROBE, call=client.calls + 1, oldest=client.calls + 1)
    assert client.receive()[0]["status"] == UNKNOWN_CALL
    assert plain.stats()["rows_sampled"] == 32
    client.send(PROBE, session=12345, call=1)
    assert client.receive()[0]["status"] == UNKNOWN_SESSION


def test_a_call_that_skips_one_is_not_executed(client: Client, server: Any) -> None:
    client.send(TABLES, call=5, oldest=1)
    client.send(PROBE, call=5, oldest=1)
    assert client.receive()[0]["status"] == UNKNOWN_CALL
    assert server.stats()["refused"] == {"out of order": 1}
    head, _ = client.call(TABLES)
    assert head["status"] == OK


def test_an_unknown_verb_ends_the_session(client: Client, server: Any) -> None:
    head, body = client.call(77)
    assert head["status"] == BAD_MESSAGE
    assert b"77" in body
    assert client.call(TABLES)[0]["status"] == UNKNOWN_SESSION
    assert server.stats()["clients"] == {}


@pytest.mark.parametrize(("theirs", "common"), [((1, 1), 1), ((1, 2), 1), ((0, 1), 1), ((2, 3), None), ((0, 0), None)])
def test_versions_that_overlap_talk_and_others_are_told(
    server: Any, theirs: tuple[int, int], common: int | None
) -> None:
    client = Client(server.address, theirs)
    head, body = client.hello()
    if common is None:
        assert head["status"] == VERSION
        assert b"the server speaks version 1 of the protocol, the client" in body
    else:
        assert (head["status"], read_document(body)["version"]) == (OK, common)
    client.close()


def test_adjacent_versions_upgrade_one_side_at_a_time(table: sw.ReplayBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer server, which also speaks the version before: clients of both talk to it."""
    from sharpwave.service import guests as server_module

    monkeypatch.setattr(server_module, "VERSIONS", (1, 2))
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server:
        assert own_message.VERSIONS == (1, 1)
        with sw.open(f"{server.address}/it") as buffer:
            assert len(buffer) == 0
        newer = Client(server.address, (1, 2))
        assert newer.hello()[0]["version"] == 2
        newer.close()
    monkeypatch.setattr(server_module, "VERSIONS", (2, 3))
    with (
        sw.serve({"it": table}, "tcp://127.0.0.1:0") as server,
        pytest.raises(sw.errors.StorageError, match="versions 2 to 3"),
    ):
        sw.open(f"{server.address}/it")


def test_the_page_names_every_verb_and_status() -> None:
    page = (os.path.dirname(__file__)) + "/../../docs/protocol.md"
    with open(page) as file:
        text = file.read()
    for number, name in own_message.VERB_NAMES.items():
        assert f"| {number} | {name} |" in text
    for name, number in vars(own_message.Status).items():
        if name.isupper() and number >= 16:
            assert f"| {number} | {name}" in text
