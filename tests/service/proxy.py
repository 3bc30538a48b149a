"""A TCP proxy that does to connections what networks do, by a seeded plan or at a test's word.

    with Proxy(server.address, Plan(seed=1)) as proxy:
        buffer = sw.open(f"{proxy.address}/replay")

Each connection gets one fault of the plan, drawn by its number and the seed: two runs with one seed draw the same.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FAULTS = ("forward", "delay", "drop", "cut", "stall", "hole", "trickle", "replay")
"""What may happen to a connection:

forward: nothing.
delay:   every piece waits for up to `delay_s`.
drop:    after `after` bytes both sides are closed in order (FIN).
cut:     after `after` bytes both sides are reset (RST), in the middle of a message; what was under way is lost.
stall:   after `after` bytes one direction stops for ever; the connection stays open.
hole:    it is accepted and leads nowhere: nothing is read or answered.
trickle: its first `after` bytes arrive one by one.
replay:  before it, the first bytes of an older connection are sent to the server on a connection of their own.
"""
_REMEMBERED = 4_096  # bytes of an old connection that are sent again


@dataclass
class Plan:
    """Which fault the next connection gets.

    Args:
        seed: Of all choices.
        faults: The faults to choose from, each as likely as it is often in the list; ("forward",) is a plain proxy.
        after: Range of the number of bytes after which a fault happens, counted over both directions.
        delay_s: The longest delay of a piece.
    """

    seed: int = 0
    faults: Sequence[str] = FAULTS
    after: tuple[int, int] = (1, 20_000)
    delay_s: float = 0.02
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        assert set(self.faults) <= set(FAULTS), self.faults
        self.random = random.Random(self.seed)

    def draw(self) -> tuple[str, int, str]:
        """The fault, after how many bytes, and in which direction (a stall has one)."""
        return (
            self.random.choice(list(self.faults)),
            self.random.randint(*self.after),
            self.random.choice(("up", "down")),
        )


class Proxy:
    """Listens on a free port of 127.0.0.1 and forwards to `target` ("tcp://host:port"); runs in a thread of its own."""

    def __init__(self, target: str, plan: Plan | None = None) -> None:
        host, _, port = target.removeprefix("tcp://").partition("/")[0].rpartition(":")
        self.target = (host, int(port))
        self.plan = plan or Plan(faults=("forward",))
        self.counts: Counter[str] = Counter()
        self.single_bytes = 0
        self.last_down: Callable[[bytes], bool] = lambda piece: False
        """Asked for each piece from the server: whether nothing may follow it, until `go_on`."""
        self._connections: set[_Connection] = set()
        self._old: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._flows = {direction: asyncio.Event() for direction in ("up", "down")}
        for flow in self._flows.values():
            flow.set()
        self._refuses = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Resets every connection and ends."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def point_to(self, target: str) -> None:
        """New connections go there."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self.target = (host, int(port))

    def cut_all(self) -> int:
        """Resets every connection that there is; returns how many. New ones are taken as before."""
        return self._ask(lambda: [connection.reset() for connection in list(self._connections)].__len__())

    def stop(self, *directions: str) -> None:
        """Nothing passes any more, to the server ("up"), from it ("down") or both, until `go_on`."""
        for direction in directions or ("up", "down"):
            self._ask(self._flows[direction].clear)

    def go_on(self) -> None:
        for flow in self._flows.values():
            self._ask(flow.set)

    def refuse(self, wanted: bool = True) -> None:
        """Whether new connections are reset at once."""
        self._refuses = wanted

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def _ask(self, work):  # type: ignore[no-untyped-def]
        async def call():  # type: ignore[no-untyped-def]
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=self._listener))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for connection in list(self._connections):
                connection.reset()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault, after, direction = self.plan.draw()
        self.counts[fault] += 1
        connection = _Connection(self, fault, after, direction, writer)
        self._connections.add(connection)
        try:
            if self._refuses:
                return
            if fault == "hole":
                await asyncio.Event().wait()
            if fault == "replay" and self._old:
                await self._replay(self.plan.random.choice(self._old))
            await connection.run(reader)
        except (OSError, asyncio.CancelledError):
            pass  # the server is not there, one side is gone, or the proxy ends
        finally:
            connection.end()
            self._connections.discard(connection)

    async def _replay(self, first: bytes) -> None:
        _, writer = await asyncio.open_connection(*self.target)
        writer.write(first)
        await writer.drain()
        writer.close()  # the bytes arrive before its end

    def remember(self, first: bytes) -> None:
        self._old = [*self._old[-7:], first]


class _Connection:
    def __init__(self, proxy: Proxy, fault: str, after: int, direction: str, client: asyncio.StreamWriter) -> None:
        self.proxy, self.fault, self.after, self.direction = proxy, fault, after, direction
        self.client, self.server = client, None
        self.passed = 0
        self.first = b""

    server: asyncio.StreamWriter | None

    async def run(self, from_client: asyncio.StreamReader) -> None:
        await self.proxy._flows["up"].wait()
        from_server, self.server = await asyncio.open_connection(*self.proxy.target)
        both = [
            asyncio.ensure_future(self.pump("up", from_client, self.server)),
            asyncio.ensure_future(self.pump("down", from_server, self.client)),
        ]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in both:
                pump.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Returns when the connection ends, however it does."""
        while data := await reader.read(65_536):
            if direction == "up" and len(self.first) < _REMEMBERED:
                self.first += data[: _REMEMBERED - len(self.first)]
            await self.proxy._flows[direction].wait()
            if self.fault == "delay":
                await asyncio.sleep(self.proxy.plan.random.uniform(0, self.proxy.plan.delay_s))
            left = self.after - self.passed
            if self.fault == "trickle" and left > 0:
                self.passed += len(data[:left])  # at once: the other direction counts too
                await self.trickle(data[:left], writer)
                data = data[left:]
            elif self.fault in ("drop", "cut") and len(data) >= left:
                writer.write(data[: max(left, 0)])
                await writer.drain()
                if self.fault == "cut":
                    self.reset()
                return
            elif self.fault == "stall" and direction == self.direction and len(data) >= left:
                writer.write(data[: max(left, 0)])
                await asyncio.Event().wait()
            self.passed += len(data)
            writer.write(data)
            await writer.drain()
            if direction == "down" and self.proxy.last_down(data):
                self.proxy._flows["down"].clear()

    async def trickle(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)  # the other side may read it before the next one
            self.proxy.single_bytes += 1

    def reset(self) -> None:
        """Both sides get RST: what the kernel has not sent yet is thrown away."""
        for writer in (self.client, self.server):
            if writer is not None and not writer.transport.is_closing():
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    def end(self) -> None:
        self.proxy.remember(self.first)
        for writer in (self.client, self.server):
            if writer is not None:
                writer.close()
