"""An add without an answer: the next one finds out, in whatever thread it is made."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from patience import until, until_asleep
from service.server_child import ServerChild
from service.wire import ADD, OK, Wire

import sharpwave as sw
from sharpwave.errors import NotReady


def empty() -> sw.ReplayBuffer:
    return sw.ReplayBuffer(1000, obs_shape=(2,), seed=0)


def row(number: int) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], False


@pytest.mark.parametrize("trial", range(4))  # which of two connections a server hears first is left to chance
def test_a_late_add_of_one_thread_is_not_taken_for_that_of_another(trial: int) -> None:
    with ServerChild(empty) as server, sw.open(server.address, direct=False) as buffer:
        ready, go = threading.Event(), threading.Event()

        def add() -> None:
            len(buffer)  # connects
            ready.set()
            go.wait()
            buffer.add(*row(200))

        other = threading.Thread(target=add, daemon=True)
        other.start()
        ready.wait()
        buffer.add(*row(0))
        server.pause()
        with pytest.raises(NotReady, match="not known"):
            buffer.add(*row(100), timeout=0)
        go.set()
        until_asleep("self", other.native_id)
        server.go_on()
        other.join()
        until(lambda: len(buffer) >= 2)
        found = [int(one) for part in buffer.rows() for one in part["action"]]
        assert found in ([0, 200], [0, 100, 200])


def test_an_add_under_the_former_number_of_its_stream_is_refused() -> None:
    import zmq

    with zmq.Context() as context, ServerChild(empty) as server:
        client = Wire(context, server.server)
        client.hello()
        client.open("it")
        token = {"token": "ab" * 16}
        first = client.call("open_stream", **token).document
        second = client.call("open_stream", **token).document
        assert (first["accepted"], second["accepted"]) == (0, 0)
        assert first["stream"] != second["stream"]
        assert client.ask(ADD, b"", table=client.table, stream=first["stream"]).status != OK
        assert client.call("len").document == 0
        client.close()
