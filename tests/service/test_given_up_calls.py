"""Calls that a client gives up: they keep nothing waiting, and their replies harm no other."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from patience import HANG_S, until
from service.wire import BUSY, CALL, FOREVER, OK, SAMPLE, Message, Wire, document, pack

import sharpwave as sw
from sharpwave.errors import SchemaError


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq.Context() as context:
        yield context


def row(number: int) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], False


def answered(server: Any, client: Wire) -> int:
    """Calls of SAMPLE."""
    count: int = server.stats()["clients"][client.token.hex()]["verbs"].get("SAMPLE", {"count": 0})["count"]
    return count


def interrupt_when(holds: Any) -> threading.Thread:
    def kill() -> None:
        until(holds)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_the_next_call_of_a_thread_goes_on_after_an_interrupted_wait() -> None:
    paced = sw.ReplayBuffer(100, obs_shape=(2,), seed=0, pace=sw.Pace(min_size=3))
    with sw.serve({"it": paced}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as buffer:
        kill = interrupt_when(lambda: server.stats()["waiting"] == 1)
        with pytest.raises(KeyboardInterrupt):
            buffer.sample(2)
        kill.join()
        for number in range(3):
            buffer.add(*row(number), timeout=HANG_S)
        assert len(buffer.sample(2)["action"]) == 2


def test_a_reply_that_nobody_waits_for_keeps_its_memory_until_it_is_sent(context: Any) -> None:
    """Else the memory of the next batch would be sent in its place, under the next call's number."""
    buffer = sw.ReplayBuffer(100, obs_shape=(256,), seed=0)
    buffer.add(np.zeros((50, 256)), np.zeros(50), np.zeros(50), np.zeros((50, 256)), np.zeros(50, bool))
    with sw.serve({"it": buffer}, "tcp://127.0.0.1:0") as server:
        client = Wire(context, server.address)
        client.hello()
        client.open("it")
        slow = context.socket(zmq.DEALER)
        slow.linger, slow.rcvhwm, slow.rcvbuf, slow.rcvtimeo = 0, 1, 4096, int(1000 * HANG_S)
        slow.connect(server.address)
        calls = range(1, 9)
        head: dict[str, Any] = {"verb": SAMPLE, "session": client.session, "table": client.table, "channel": 7}
        for call in calls:  # each gives up the one before
            slow.send(pack(**head, call=call, oldest=call, argument=4000, timeout=FOREVER))
            until(lambda call=call: answered(server, client) == call)
        numbers = [Message({}, slow.recv()).body[32:40] for _ in calls]
        assert [int.from_bytes(number, "little") for number in numbers] == list(calls)
        slow.close()
        client.close()


def test_a_client_that_takes_no_replies_is_refused_at_its_limit(context: Any) -> None:
    buffer = sw.ReplayBuffer(10_000, obs_shape=(2,), seed=0)
    for number in range(10):
        buffer.add(*row(number))
    with sw.serve({"it": buffer}, "tcp://127.0.0.1:0", limits={"kept_bytes": 100_000}) as server:
        client = Wire(context, server.address)
        client.hello()
        client.open("it")
        refused = [client.ask(SAMPLE, table=client.table, argument=500, oldest=1).status for _ in range(20)]
        assert refused[0] == OK
        assert refused[-1] == BUSY
        assert server.stats()["clients"][client.token.hex()]["kept_bytes"] < 150_000
        assert client.ask(SAMPLE, table=client.table, argument=500).status == OK  # tells that it has the others
        client.close()


def test_a_name_that_is_no_unicode_is_refused_and_the_server_goes_on(context: Any) -> None:
    with sw.serve({"it": sw.ReplayBuffer(10, obs_shape=(2,))}, "tcp://127.0.0.1:0") as server:
        client = Wire(context, server.address)
        client.hello()
        client.open("it")
        body = document({"verb": "\ud800", "args": {}})
        assert client.ask(CALL, body, table=client.table).status != OK
        assert client.call("len").status == OK
        client.close()


def test_calls_for_more_than_a_message_holds_are_refused_before_memory_is_taken() -> None:
    plain = sw.ReplayBuffer(100, obs_shape=(2,), seed=0)
    for number in range(10):
        plain.add(*row(number))
    limits = {"message_bytes": 8192}
    with (
        sw.serve({"plain": plain}, "tcp://127.0.0.1:0", limits=limits) as server,
        sw.open(server.address + "/plain") as buffer,
    ):
        handles = buffer.sample(5)["indices"]
        with pytest.raises(SchemaError, match=r"get\(\).*message_bytes"):
            buffer.get(np.repeat(handles, 200))
        assert len(buffer.get(handles)["action"]) == 5


@pytest.mark.parametrize("handles", [[2**62, 1], [-1], [[1]], [0.5]])
def test_positions_of_what_is_no_handle_are_refused(handles: list[Any]) -> None:
    with (
        sw.ReplayBuffer(100, obs_shape=(2,)) as buffer,
        sw.serve({"it": buffer}, "tcp://127.0.0.1:0") as server,
        sw.open(f"{server.address}/it", direct=False) as remote,
    ):
        session, table = remote._rows.session, remote._rows.table
        assert session.call(table, "positions", {"handles": np.array([3, 4])}).tolist() == [3, 4]
        with pytest.raises(SchemaError, match="positions"):
            session.call(table, "positions", {"handles": np.array(handles)})
