"""Ctrl-C at every place of a client's call: the next calls go on, and every row is there once or not at all."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from interrupts import interrupted_at
from patience import HANG_S, until
from service.wire import BYE, Wire

import sharpwave as sw
from sharpwave.errors import StorageError
from sharpwave.service import channel, document, keeper, pipeline, remote_rows, remote_writer, session

# Of finalizers, which Python interrupts as well.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

_MODULES = (channel, document, keeper, pipeline, remote_rows, remote_writer, session)


def row(number: int) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], False


@pytest.fixture
def table() -> Iterator[sw.ReplayBuffer]:
    with sw.ReplayBuffer(100_000, obs_shape=(2,), seed=0) as table:
        yield table


@pytest.fixture
def server(table: Any) -> Iterator[Any]:
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server:
        yield server


def numbers_of(buffer: Any) -> list[int]:
    return [int(one) for part in buffer.rows() for one in part["action"]]


def at_every_place(call: Callable[[int], Any], check: Callable[[int], None]) -> None:
    for place in itertools.count(1):
        if interrupted_at(place, lambda place=place: call(place), _MODULES) is None:
            return
        check(place)
    raise AssertionError


def test_an_interrupted_add_is_there_once_or_not_at_all(table: Any, server: Any) -> None:
    with sw.open(server.address + "/it") as buffer:
        done: list[int] = []

        def check(place: int) -> None:
            buffer.add(*row(place + 1000), timeout=HANG_S)
            done.append(place + 1000)

        at_every_place(lambda place: buffer.add(*row(place)), check)
        assert len(done) > 10
        found = numbers_of(table)
        assert len(set(found)) == len(found)
        assert [number for number in found if number > 1000] == done


def test_a_session_that_is_made_again_survives_an_interrupt_anywhere(table: Any, server: Any) -> None:
    with zmq.Context() as context, sw.open(server.address + "/it") as buffer:
        wire = Wire(context, server.address)
        done: list[int] = []

        def end_session() -> None:
            wire.ask(BYE, session=buffer._rows.session.number)

        def check(place: int) -> None:
            buffer.add(*row(place + 1000), timeout=HANG_S)
            done.append(place + 1000)
            end_session()

        end_session()
        at_every_place(lambda place: buffer.add(*row(place)), check)
        assert len(done) > 30
        found = numbers_of(table)
        assert len(set(found)) == len(found)
        assert [number for number in found if number > 1000] == done
        wire.close()


def test_a_writer_with_a_window_survives_an_interrupt_anywhere(table: Any, server: Any) -> None:
    with sw.open(server.address + "/it") as buffer, buffer.writer(window=4) as writer:
        done: list[int] = []
        told: list[str] = []

        def check(place: int) -> None:
            try:
                writer.flush(timeout=HANG_S)
            except StorageError as error:  # of the row whose sending was interrupted, and it says so
                told.append(str(error))
            writer.add(*row(place + 1000))
            writer.flush(timeout=HANG_S)
            done.append(place + 1000)

        def call(place: int) -> None:
            writer.add(*row(place))
            writer.flush()

        at_every_place(call, check)
        assert len(done) > 10
        assert all("1 rows that were on their way were not added" in text for text in told)
        found = numbers_of(table)
        assert len(set(found)) == len(found)
        assert [number for number in found if number > 1000] == done


def test_an_interrupted_iterator_gives_back_what_it_reserved() -> None:
    table = sw.ReplayBuffer(1000, obs_shape=(2,), sampler=sw.Fifo(), seed=0)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as buffer:
        taken: list[int] = []

        def call(place: int) -> None:
            batches = buffer.batches(1, prefetch=2)
            try:
                taken.append(int(next(batches)["action"][0]))
            finally:
                batches.close()

        for number in range(500):
            table.add(*row(number))
        at_every_place(call, lambda place: None)
        left = 500 - len(taken) - 40  # an interrupt may come before anything is noted
        drawn = [int(one) for one in table.sample(left)["action"]]
        assert not set(drawn) & set(taken)


def test_the_handler_of_a_signal_may_call_in_the_middle_of_a_call() -> None:
    """So may an iterator that is collected there."""
    table = sw.ReplayBuffer(100, obs_shape=(2,), seed=0, pace=sw.Pace(min_size=3))
    sizes: list[int] = []
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as buffer:

        def help_on() -> None:
            until(lambda: server.stats()["waiting"] == 1)
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: bool(sizes))
            for number in range(3):
                table.add(*row(number))

        helper = threading.Thread(target=help_on)
        before = signal.signal(signal.SIGUSR1, lambda *_: sizes.append(len(buffer)))
        try:
            helper.start()
            assert len(buffer.sample(3, timeout=HANG_S)["action"]) == 3
        finally:
            signal.signal(signal.SIGUSR1, before)
            helper.join()
        assert sizes == [0]
