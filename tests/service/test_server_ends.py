"""A server that is closed while calls of its clients wait: they wait on, for the next server, until their deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import NotReady

HASTY_S = 0.3


def paced() -> sw.ReplayBuffer:
    return sw.ReplayBuffer(100, obs_shape=(2,), seed=0, pace=sw.Pace(samples_per_insert=1, min_size=2))


def sequences() -> sw.SequenceBuffer:
    flow = sw.Dataflow([sw.Consumer("train", inputs={"x"}, batch_size=1)])
    return sw.SequenceBuffer(1, flow=flow)


def full() -> sw.SequenceBuffer:
    buffer = sequences()
    put(buffer)
    return buffer


def sample(name: str) -> sw.SequenceSample:
    return sw.SequenceSample([name], {"x": [2]}, {"x": np.arange(2)})


def add(buffer: Any) -> None:
    for number in range(4):
        buffer.add([number, number], number, number, [number, number], False)


def put(buffer: Any) -> None:
    buffer.put(sample("first"))


def take(buffer: Any) -> None:
    with buffer.get("train"):
        pass


# What is served, the call that waits there, and what ends its wait.
WAITS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], None]]] = {
    "sample": (paced, lambda buffer, timeout: buffer.sample(2, timeout=timeout), add),
    "sample_async": (paced, lambda buffer, timeout: asyncio.run(buffer.sample_async(2, timeout=timeout)), add),
    "stream": (paced, lambda buffer, timeout: next(buffer.stream(2, prefetch=2, timeout=timeout)), add),
    "get": (sequences, lambda buffer, timeout: buffer.get("train", timeout=timeout), put),
    "get_async": (sequences, lambda buffer, timeout: asyncio.run(buffer.get_async("train", timeout=timeout)), put),
    "put": (full, lambda buffer, timeout: buffer.put(sample("second"), timeout=timeout), take),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_call_that_waits_outlives_the_server(name: str) -> None:
    make, call, feed = WAITS[name]
    found: dict[float, Any] = {}

    def wait(timeout: float) -> None:
        try:
            found[timeout] = call(client, timeout)
        except BaseException as error:
            found[timeout] = error

    with make() as buffer:
        first = sw.serve({"it": buffer}, "tcp://127.0.0.1:0")
        with sw.open(f"{first.address}/it", direct=False) as client:
            waiters = [threading.Thread(target=wait, args=(timeout,), daemon=True) for timeout in (HASTY_S, HANG_S)]
            for waiter in waiters:
                waiter.start()
            until(lambda: first.stats()["waiting"] > 0 or HASTY_S in found, "the wait at the server")
            first.close()
            waiters[0].join(HANG_S)
            assert isinstance(found[HASTY_S], NotReady), found
            assert HANG_S not in found
            with sw.serve({"it": buffer}, first.address):
                feed(buffer)
                waiters[1].join(HANG_S)
                assert HANG_S in found
                assert not isinstance(found[HANG_S], BaseException), found
