"""The proxy of the other tests does what it says: each of its faults, seen by plain sockets."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from patience import HANG_S, until
from service.proxy import FAULTS, Plan, Proxy

DATA = bytes(range(256)) * 400


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what it gets, and remembers it."""

    allow_reuse_address = daemon_threads = True

    def __init__(self) -> None:
        self.got: list[bytearray] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Echo)
        got = bytearray()
        self.server.got.append(got)
        try:
            while data := self.request.recv(65_536):
                got += data
                self.request.sendall(data)
        except OSError:
            pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo() as server:
        yield server
        server.shutdown()


def through(echo: Echo, fault: str, **plan: object) -> Proxy:
    return Proxy(f"tcp://127.0.0.1:{echo.server_address[1]}", Plan(faults=(fault,), **plan))  # type: ignore[arg-type]


def connect(proxy: Proxy) -> socket.socket:
    host, port = proxy.address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), HANG_S)


def send(sock: socket.socket, data: bytes) -> threading.Thread:
    def work() -> None:
        with suppress(OSError):
            sock.sendall(data)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def receive(sock: socket.socket, count: int) -> tuple[bytes, str]:
    """Up to `count` bytes, and how it ended: "all", "closed" or "reset"."""
    got = b""
    try:
        while len(got) < count:
            if not (piece := sock.recv(65_536)):
                return got, "closed"
            got += piece
    except ConnectionResetError:
        return got, "reset"
    return got, "all"


@pytest.mark.parametrize("fault", ["forward", "delay", "trickle", "replay"])
def test_these_lose_nothing(echo: Echo, fault: str) -> None:
    with through(echo, fault, after=(500, 500)) as proxy:
        for _ in range(2):  # a replay needs an older connection
            with closing(connect(proxy)) as sock:
                sender = send(sock, DATA)
                assert receive(sock, len(DATA)) == (DATA, "all")
                sender.join()
            until(lambda: proxy.open_connections == 0)
        until(lambda: sum(map(len, echo.got)) == 2 * len(DATA) + (4_096 if fault == "replay" else 0))
        assert proxy.single_bytes == (1_000 if fault == "trickle" else 0)
        assert proxy.counts == {fault: 2}


@pytest.mark.parametrize(("fault", "end"), [("drop", "closed"), ("cut", "reset")])
def test_a_connection_ends_within_a_message(echo: Echo, fault: str, end: str) -> None:
    with through(echo, fault, after=(1_000, 1_000)) as proxy, closing(connect(proxy)) as sock:
        send(sock, DATA).join()
        got, how = receive(sock, len(DATA))
        assert len(got) < 1_000
        assert how in (end, "reset")
        until(lambda: proxy.open_connections == 0)
        assert sum(map(len, echo.got)) <= 1_000


def test_one_direction_stalls_and_the_connection_stays(echo: Echo) -> None:
    with through(echo, "stall", after=(100, 100), seed=3) as proxy, closing(connect(proxy)) as sock:
        sender = send(sock, DATA)
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            receive(sock, len(DATA))
        assert proxy.open_connections == 1
        proxy.cut_all()
        sender.join()


def test_a_hole_accepts_and_says_nothing(echo: Echo) -> None:
    with through(echo, "hole") as proxy, closing(connect(proxy)) as sock:
        sock.sendall(b"hello")
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert echo.got == []


def test_a_test_can_stop_cut_and_refuse(echo: Echo) -> None:
    with through(echo, "forward") as proxy:
        with closing(connect(proxy)) as sock:
            proxy.stop()
            sock.sendall(b"hello")
            sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                sock.recv(5)
            proxy.go_on()
            sock.settimeout(HANG_S)
            assert receive(sock, 5) == (b"hello", "all")
            assert proxy.cut_all() == 1
            assert receive(sock, 1) == (b"", "reset")
        proxy.refuse()
        with closing(connect(proxy)) as sock:
            assert receive(sock, 1)[1] in ("closed", "reset")


def test_one_seed_draws_one_plan() -> None:
    first, second, other = ([plan.draw() for _ in range(100)] for plan in (Plan(7), Plan(7), Plan(8)))
    assert first == second != other
    assert {fault for fault, _, _ in first} == set(FAULTS)
