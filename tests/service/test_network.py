"""A network that fails between a client and a server: nothing is lost, nothing is there twice, and no call hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import until

pytest.importorskip("zmq")

from service.proxy import Plan, Proxy
from service.server_child import ServerChild

import sharpwave as sw
from sharpwave.errors import NotReady, StorageError


def in_file(path: str) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(50_000, obs_shape=(2,), seed=0, storage=f"file://{path}", exist="attach")


def row(number: int) -> tuple[Any, ...]:
    return [number, -number], number, number, [number + 1, -number], number % 10 == 9


def numbers_of(buffer: Any) -> list[int]:
    return [int(one) for part in buffer.rows() for one in part["action"]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerChild]:
    with ServerChild(in_file, str(tmp_path / "live.sw"), client_timeout=1.0) as server:
        yield server


@pytest.fixture
def proxy(server: ServerChild) -> Iterator[Proxy]:
    with Proxy(server.server) as proxy:
        yield proxy


def test_rows_whose_answer_was_lost_are_there_once_and_the_next_ones_too(
    server: ServerChild, proxy: Proxy, tmp_path: Path
) -> None:
    with sw.open(f"file://{tmp_path}/live.sw") as table, sw.open(f"{proxy.address}/it", direct=False) as buffer:
        buffer.add(*row(0))
        proxy.stop("down")
        with pytest.raises(NotReady, match="not known until the next add"):
            buffer.add(*row(1), timeout=0.2)
        assert numbers_of(table) == [0, 1], "the server has them"
        proxy.go_on()
        buffer.add(*row(2))
        proxy.stop("up")
        with pytest.raises(NotReady):
            buffer.add(*row(3), timeout=0.2)
        proxy.cut_all()  # what was on its way is lost
        proxy.go_on()
        buffer.add(*row(4))
        assert numbers_of(table) == [0, 1, 2, 4]


def test_an_answer_that_is_lost_with_the_server_leaves_the_row_there_once(
    server: ServerChild, proxy: Proxy, tmp_path: Path
) -> None:
    def restart() -> None:
        with sw.open(f"file://{tmp_path}/live.sw") as table:
            until(lambda: len(table) == 2)
        server.kill()
        server.start()

    with sw.open(f"{proxy.address}/it", direct=False) as buffer:
        buffer.add(*row(0))
        proxy.stop("down")
        restarting = threading.Thread(target=restart)
        restarting.start()
        with pytest.raises(NotReady):  # no answer of the new server comes through, either
            buffer.add(*row(1), timeout=4)
        restarting.join()
        proxy.go_on()
        for number in range(2, 6):
            buffer.add(*row(number))
        assert numbers_of(buffer) == list(range(6))


def test_a_session_that_is_not_made_in_time_leaves_no_row_in_the_place_of_another(
    server: ServerChild, proxy: Proxy, tmp_path: Path
) -> None:
    """The new server says that it does not know the session, and then nothing: the row that the old one took is there,
    and the next row does not get its number."""

    def says_unknown_session(piece: bytes) -> bool:
        at = piece.find(b"SHPW")
        verb, status = (int.from_bytes(piece[at + place : at + place + 2], "little") for place in (6, 8))
        return at >= 0 and status == 16 and verb != 3  # not the answer to a heartbeat, which has its own connection

    def restart() -> None:
        with sw.open(f"file://{tmp_path}/live.sw") as table:
            until(lambda: len(table) == 2)
        server.kill()
        server.start()
        proxy.cut_all()  # the answer of the old server is lost
        proxy.last_down = says_unknown_session
        proxy.go_on()

    with sw.open(f"{proxy.address}/it", direct=False) as buffer:
        buffer.add(*row(0))
        proxy.stop("down")
        restarting = threading.Thread(target=restart)
        restarting.start()
        with pytest.raises(NotReady):
            buffer.add(*row(1), timeout=5)
        restarting.join()
        proxy.last_down = lambda piece: False
        proxy.go_on()
        for number in range(2, 6):
            buffer.add(*row(number))
        assert numbers_of(buffer) == list(range(6))


@pytest.mark.parametrize("window", [None, 64])
def test_connections_that_are_cut_again_and_again_lose_nothing(proxy: Proxy, window: int | None) -> None:
    ends = threading.Event()

    def cut() -> None:
        while not ends.wait(0.05):
            proxy.cut_all()

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        with sw.open(f"{proxy.address}/it", direct=False, wait=True) as buffer:
            with buffer.writer(window=window) as writer:
                for number in range(300 if window is None else 2_000):
                    writer.add(*row(number))
            ends.set()
            assert numbers_of(buffer) == list(range(300 if window is None else 2_000))
    finally:
        ends.set()
        cutting.join()


def test_a_client_that_was_silent_for_long_goes_on_by_itself(server: ServerChild, proxy: Proxy) -> None:
    with sw.open(f"{proxy.address}/it", direct=False) as buffer, sw.open(server.address, direct=False) as other:
        writer = buffer.writer(window=100)
        for number in range(5):
            writer.add(*row(number))
        writer.flush()
        proxy.stop()
        for number in range(5, 20):
            writer.add(*row(number))
        begun = time.monotonic()
        with pytest.raises(NotReady):
            writer.flush(timeout=0.3)
        assert time.monotonic() - begun < 1.3
        until(lambda: [bool(end) for part in other.rows() for end in part["truncated"]][-1])  # it counts as dead
        proxy.go_on()
        writer.flush()
        assert numbers_of(other) == list(range(20))
        writer.close()


@pytest.mark.parametrize("fault", ["delay", "trickle", "replay"])
def test_a_slow_or_repeating_network_changes_nothing(server: ServerChild, fault: str) -> None:
    with Proxy(server.server, Plan(seed=1, faults=(fault,), after=(2_000, 2_000), delay_s=0.01)) as proxy:
        for start in (0, 20, 40):  # old connections are repeated while new ones work
            with sw.open(f"{proxy.address}/it", direct=False) as buffer:
                for number in range(start, start + 20):
                    buffer.add(*row(number))
                assert (buffer.sample(16)["obs"].sum(axis=1) == 0).all()
                assert numbers_of(buffer) == list(range(start + 20))


def test_an_address_that_accepts_and_is_silent_is_told_within_five_seconds(server: ServerChild) -> None:
    with Proxy(server.server, Plan(faults=("hole",))) as proxy:
        begun = time.monotonic()
        with pytest.raises(StorageError, match="is silent"):
            sw.open(f"{proxy.address}/it")
        assert time.monotonic() - begun < 6.0
