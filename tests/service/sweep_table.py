"""SweepTable: a server and its clients as processes that are killed at random instants, whatever the table holds."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import random
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from proxy import Plan, Proxy

import sharpwave as sw
from sharpwave.errors import NotReady
from sharpwave.service.keys import make_key

__all__ = ["ACKNOWLEDGED", "FAILED", "LATEST", "QUOTA", "TIMEOUTS_S", "TRIED", "Notes", "SweepTable", "kills_of"]

processes = mp.get_context("forkserver")
processes.set_forkserver_preload(["numpy", "zmq", "sharpwave", "sharpwave.service.server", "sharpwave.buffers.open"])

QUOTA = 8_000  # items of one client: a table has room for all of 25 rounds
CLIENTS = 4
TIMEOUTS_S = (0.3, 1.0, 5.0)
LATE_S = 1.0
LATEST = "latest_ms", "latest_with_load_ms"  # of all calls: how much longer than its timeout the latest one took
FAULTS = ("forward", "delay", "drop", "cut", "cut", "stall", "trickle", "replay", "hole")
TRIED, ACKNOWLEDGED, FAILED = 1, 2, 3  # of an item, in a client's notes; a failed one may be in the table or not


def seconds_without_processor() -> float:
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


class Notes:
    """What a client tells about itself in a mapped file, which outlives it."""

    def __init__(self, folder: Path, stream: int, make: bool = False) -> None:
        self.path, self.stream, self.about = folder / f"notes-{stream}", stream, ""
        if make:
            self.path.write_bytes(bytes(QUOTA + 64))
        whole = np.memmap(self.path, np.uint8, "r+")
        self.rows = whole[:QUOTA]
        self.numbers = whole[QUOTA:].view(np.float64)  # calls, latest excess, verb of it, not ready, raw excess

    @contextlib.contextmanager
    def call(self, verb: int, timeout_s: float) -> Any:
        """Around a call that ends until its timeout, or raises NotReady then."""
        begun, waited = time.monotonic(), seconds_without_processor()
        try:
            yield
        except NotReady:  # the server is away until the timeout, or there is nothing yet
            self.numbers[3] += 1
        finally:
            self.numbers[0] += 1
            # Without the time that this thread was ready to run and had no processor: that is the machine's load.
            raw = time.monotonic() - begun - timeout_s
            excess = raw - (seconds_without_processor() - waited)
            self.numbers[4] = max(self.numbers[4], raw)
            if excess > self.numbers[1] or self.numbers[0] == 1:
                self.numbers[1], self.numbers[2] = excess, verb


def serve(make: Callable[[str], Any], path: str, address: str, keys: str | None, ready: Any) -> None:
    """A server's process: what stands on the disk, until it is killed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # another thread could get it, and this one sleep on
    with make(path) as buffer, sw.serve({"it": buffer}, address, keys=keys, client_timeout=1.0):
        ready.send(len(buffer))
        signal.sigwait({signal.SIGTERM})


def until_killed(kind: type[SweepTable], folder: str, address: str, key: str | None, stream: int, seed: int) -> None:
    """A client's process. Any other end than a kill is an error, and told."""
    try:
        buffer = sw.open(f"{address}/it", keys=key, wait=True, timeout=60, **kind.open_options)
        kind.work(buffer, Notes(Path(folder), stream), random.Random(seed), seed % 2 == 1)
    except BaseException:
        (Path(folder) / f"error-{stream}").write_text(traceback.format_exc())


class SweepTable:
    """One file or folder with its server and its clients, for some rounds. Subclasses say what it is."""

    kind: ClassVar[str]
    open_options: ClassVar[dict[str, Any]] = {}
    keys: str | None
    key: str | None

    @staticmethod
    def make(path: str) -> Any:
        """The buffer, in the server's process: a new one, or what is on the disk."""
        raise NotImplementedError

    @staticmethod
    def work(buffer: Any, notes: Notes, rng: random.Random, is_odd: bool) -> None:
        """What a client does for ever."""
        raise NotImplementedError

    def check_items(self) -> None:
        """Compares what is on the disk with the notes of all clients."""
        raise NotImplementedError

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.path = folder / "it.sw"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.keys = self.key = None
        if self.random.random() < 0.5:  # half of the tables are behind keys, and everything is encrypted
            self.keys, self.key = str(folder / "keys"), str(make_key(folder / "keys", "client"))
        self.counts: Counter[str] = Counter({"tables with keys": int(self.keys is not None), f"{self.kind} tables": 1})
        self.streams: list[Notes] = []
        self.ends = contextlib.ExitStack()
        self.proxies = [self.ends.enter_context(Proxy(self.address, Plan(seed + n, FAULTS))) for n in range(2)]
        self.server = self.start_server()
        self.clients = [self.start_client(place) for place in range(CLIENTS)]

    def start_server(self) -> Any:
        mine, theirs = processes.Pipe()
        arguments = type(self).make, str(self.path), self.address, self.keys, theirs
        server = processes.Process(target=serve, args=arguments, daemon=True)
        server.start()
        theirs.close()
        try:
            assert mine.poll(60), "the server did not begin within 60 s"
            mine.recv()
        except EOFError:
            server.join(5)
            raise AssertionError(f"the server did not begin: exit code {server.exitcode}") from None
        finally:
            mine.close()
        return server

    def start_client(self, place: int) -> Any:
        notes = Notes(self.folder, len(self.streams) + 1, make=True)
        self.streams.append(notes)
        # Places 0 and 1 reach the server directly, 2 and 3 through a proxy; odd places have odd seeds.
        address = self.address if place < 2 else self.proxies[place - 2].address
        seed = 2 * self.random.getrandbits(30) + place % 2
        notes.about = f"{'odd' if place % 2 else 'even'}, {'direct' if place < 2 else 'proxy'}"
        arguments = type(self), str(self.folder), address, self.key, notes.stream, seed
        client = processes.Process(target=until_killed, args=arguments, daemon=True)
        client.start()
        return client

    def answered(self) -> float:
        return sum(float(notes.numbers[0] - notes.numbers[3]) for notes in self.streams)

    def wait_for_answers(self) -> None:
        """On a loaded machine kills may else come faster than clients find the next server."""
        deadline, before = time.monotonic() + 20, self.answered()
        while self.answered() < before + 20 and time.monotonic() < deadline:
            time.sleep(0.005)

    def round(self) -> None:
        if self.random.random() < 0.5:
            self.wait_for_answers()
        time.sleep(self.random.uniform(0.02, 0.5))
        self.check_clients()
        victims = self.random.choices(("server", "client", "both", "nobody"), (5, 3, 2, 1))[0]
        if victims == "nobody":  # a server that is told to end, as at an update
            self.counts["ended server"] += 1
            self.server.terminate()
            self.server.join(60)
            assert self.server.exitcode == 0, f"the server ended with {self.server.exitcode}"
            self.server = self.start_server()
            return
        self.counts[f"killed {victims}"] += 1
        place = self.random.randrange(CLIENTS)
        if victims != "client":
            self.server.kill()
        if victims != "server":
            self.clients[place].kill()
            self.clients[place].join()
            self.clients[place] = self.start_client(place)
        if victims != "client":
            self.server.join()
            time.sleep(self.random.choice((0, 0, 0.05, 0.4)))
            self.server = self.start_server()

    @property
    def kills(self) -> int:
        return kills_of(self.counts)

    def check_clients(self) -> None:
        for error in self.folder.glob("error-*"):
            raise AssertionError(f"a client failed: {error.name}: {error.read_text()}")
        assert all(client.is_alive() for client in self.clients), "a client ended"
        assert self.server.is_alive(), f"the server ended: exit code {self.server.exitcode}"

    def end(self) -> None:
        for process in [*getattr(self, "clients", []), self.server]:
            process.kill()
            process.join()
        self.ends.close()

    def check(self) -> None:
        """After the end: what is on the disk, and how late calls were."""
        for notes in self.streams:
            late = f"a call of verb {int(notes.numbers[2])} took {notes.numbers[1]:.2f} s longer than its timeout"
            assert notes.numbers[1] <= LATE_S, f"stream {notes.stream}: {late}"
            self.counts["calls"] += int(notes.numbers[0])
            self.counts["not ready"] += int(notes.numbers[3])
            for name, number in zip(LATEST, (1, 4), strict=True):
                self.counts[name] = max(self.counts[name], int(1e3 * notes.numbers[number]))
        self.check_items()
        for proxy in self.proxies:
            self.counts.update({f"proxy {fault}": count for fault, count in proxy.counts.items()})

    def check_once(self, notes: Notes, numbers: np.ndarray) -> None:
        """Of the items of a client, in the order in which they stand on the disk."""
        about = f"stream {notes.stream}"
        there, times = np.unique(numbers, return_counts=True)
        assert (times == 1).all(), f"{about}: {there[times > 1][:5]} are there more than once"
        assert (np.diff(numbers) > 0).all(), f"{about}: its items are not in order"
        acknowledged = np.flatnonzero(notes.rows == ACKNOWLEDGED)
        lost = np.setdiff1d(acknowledged, there)
        if len(lost):
            around = slice(max(0, lost[0] - 12), lost[-1] + 12)
            about += f" ({notes.about}; notes from {around.start} on: {notes.rows[around].tolist()})"
        assert not len(lost), f"{about}: {len(lost)} acknowledged items are not there: {lost[:5]} of {len(there)}"
        assert (notes.rows[there] != 0).all(), f"{about}: items are there that were never added"
        self.counts[f"{self.kind} acknowledged"] += len(acknowledged)


def kills_of(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name.startswith("killed"))
