"""Servers and clients that are killed at random instants: every acknowledged row is there once, and no call is late.

    python tests/service/sweep.py --rounds 1000 --seed 1

Each round kills (SIGKILL) the server, a client or both, and starts them again; the server goes on with its file.
Between the kills servers are told to end (SIGTERM). Some clients reach the server through a proxy that cuts and delays
their connections. Clients add rows with known contents, by `add` and by `writer(window=)`, sample and update
priorities, and note in a file of their own what was acknowledged.
Every 25 rounds the table's file is read: each acknowledged row is there exactly once, no row is torn, the rows of a
stream are in its order, and no call took longer than its timeout plus one second, not counting the time for which the
machine's load left the client without a processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from proxy import Plan, Proxy

import sharpwave as sw
from sharpwave.errors import NotReady
from sharpwave.service.keys import make_key

processes = mp.get_context("forkserver")
processes.set_forkserver_preload(["numpy", "zmq", "sharpwave", "sharpwave.service.server", "sharpwave.buffers.open"])

CAPACITY = 300_000
QUOTA = 8_000  # rows of one client: a table has room for all rows of 25 rounds
CLIENTS = 4
ROUNDS_OF_A_TABLE = 25
WIDTH = 16
TIMEOUTS_S = (0.3, 1.0, 5.0)
LATE_S = 1.0
LATEST = "latest_ms", "latest_with_load_ms"  # of all calls: how much longer than its timeout the latest one took
FAULTS = ("forward", "delay", "drop", "cut", "cut", "stall", "trickle", "replay", "hole")
TRIED, ACKNOWLEDGED, FAILED = 1, 2, 3  # of a row, in a client's notes; a failed one may be in the table or not


def rows_of(stream: Any, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """The known contents of rows: every value depends on the stream and on the number."""
    numbers = np.asarray(numbers)
    streams = np.broadcast_to(stream, numbers.shape)
    obs = ((streams[:, None] * 31 + numbers[:, None] * 17 + np.arange(WIDTH)) % 65_536).astype(np.float32)
    obs[:, 0], obs[:, 1] = streams, numbers
    return {
        "obs": obs,
        "action": obs[:, :2] + 1,
        "reward": numbers.astype(np.float32),
        "next_obs": obs + 0.5,
        "done": numbers % 50 == 49,
    }


def check_contents(rows: dict[str, np.ndarray], where: str) -> tuple[np.ndarray, np.ndarray]:
    """The streams and the numbers of rows, which must be as they were added."""
    streams, numbers = rows["obs"][:, 0].astype(np.int64), rows["obs"][:, 1].astype(np.int64)
    for name, expected in rows_of(streams, numbers).items():
        wrong = np.flatnonzero((rows[name] != expected).reshape(len(numbers), -1).any(axis=1))
        assert not len(wrong), f"{where}: {name} of row {numbers[wrong[0]]} of stream {streams[wrong[0]]} is torn"
    return streams, numbers


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

    def note(self, verb: int, timeout_s: float, begun: float, waited: float) -> None:
        self.numbers[0] += 1
        # Without the time that this thread was ready to run and had no processor: that is the machine's load.
        raw = time.monotonic() - begun - timeout_s
        excess = raw - (seconds_without_processor() - waited)
        self.numbers[4] = max(self.numbers[4], raw)
        if excess > self.numbers[1] or self.numbers[0] == 1:
            self.numbers[1], self.numbers[2] = excess, verb


def serve(path: str, address: str, keys: str | None, ready: Any) -> None:
    """A server's process: the table of a file, until it is killed."""
    replay = sw.ReplayBuffer(
        CAPACITY,
        obs_shape=(WIDTH,),
        action_shape=(2,),
        sampler=sw.Prioritized(),
        storage=f"file://{path}",
        exist="attach",
        writers=512,
        seed=0,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with replay, sw.serve({"replay": replay}, address, keys=keys, client_timeout=1.0):
        ready.send(len(replay))
        time.sleep(1e6)


def act(folder: str, address: str, key: str | None, stream: int, seed: int) -> None:
    """A client's process: adds, samples and updates until it is killed. Any other end is an error, and told."""
    try:
        _act(Notes(Path(folder), stream), address, key, random.Random(seed), windowed=seed % 2 == 1)
    except BaseException:
        (Path(folder) / f"error-{stream}").write_text(traceback.format_exc())


def _act(notes: Notes, address: str, key: str | None, rng: random.Random, windowed: bool) -> None:
    stream = notes.stream
    buffer: Any = sw.open(f"{address}/replay", keys=key, wait=True, timeout=60, direct=False)
    writer = buffer.writer(window=rng.choice((8, 64, 256))) if windowed else buffer
    number, indices = 0, np.zeros(0, np.int64)
    while True:
        timeout_s = rng.choice(TIMEOUTS_S)
        verb = rng.choices((0, 1, 2, 3), (8, 2, 1, 1))[0]
        begun, waited = time.monotonic(), seconds_without_processor()
        try:
            if verb == 0 and number < QUOTA - 8:
                count = rng.choice((1, 1, 1, 5))
                span = slice(number, number + count)
                number += count
                notes.rows[span] = TRIED
                try:
                    rows = rows_of(stream, np.arange(span.start, span.stop))
                    writer.add(**({n: v[0] for n, v in rows.items()} if count == 1 else rows), timeout=timeout_s)
                except NotReady:
                    notes.rows[span] = FAILED
                    raise
                if not windowed:
                    notes.rows[span] = ACKNOWLEDGED
            elif verb == 1:
                batch = buffer.sample(32, timeout=timeout_s)
                check_contents(batch, f"sample() of stream {stream}")
                indices = batch["indices"]
            elif verb == 2 and len(indices):
                buffer.update_priorities(indices, rng.random() * np.ones(len(indices)), timeout=timeout_s)
            elif verb == 3 and windowed:
                writer.flush(timeout=timeout_s)
                notes.rows[:number][notes.rows[:number] == TRIED] = ACKNOWLEDGED
            else:
                continue
        except NotReady:  # the server is away until the timeout, or a sampler finds no row yet
            notes.numbers[3] += 1
        finally:
            notes.note(verb, timeout_s, begun, waited)


class Table:
    """One file with its server and its clients, for some rounds."""

    keys: str | None
    key: str | None

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.path = folder / "replay.sw"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.keys = self.key = None
        if self.random.random() < 0.5:  # half of the tables are behind keys, and everything is encrypted
            self.keys, self.key = str(folder / "keys"), str(make_key(folder / "keys", "client"))
        self.counts: Counter[str] = Counter({"tables with keys": int(self.keys is not None), "tables": 1})
        self.streams: list[Notes] = []
        self.ends = contextlib.ExitStack()
        self.proxies = [self.ends.enter_context(Proxy(self.address, Plan(seed + n, FAULTS))) for n in range(2)]
        self.server = self.start_server()
        self.clients = [self.start_client(place) for place in range(CLIENTS)]

    def start_server(self) -> Any:
        mine, theirs = processes.Pipe()
        server = processes.Process(target=serve, args=(str(self.path), self.address, self.keys, theirs), daemon=True)
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
        # Places 0 and 1 reach the server directly, 2 and 3 through a proxy; odd places have windows.
        address = self.address if place < 2 else self.proxies[place - 2].address
        seed = 2 * self.random.getrandbits(30) + place % 2
        notes.about = f"{'window' if place % 2 else 'add'}, {'direct' if place < 2 else 'proxy'}"
        client = processes.Process(
            target=act, args=(str(self.folder), address, self.key, notes.stream, seed), daemon=True
        )
        client.start()
        return client

    def round(self) -> None:
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
        """Reads the file and compares it with the notes of all clients."""
        found: dict[int, list[np.ndarray]] = {notes.stream: [] for notes in self.streams}
        with sw.open(f"file://{self.path}") as buffer:
            self.counts["rows"] += len(buffer)
            for rows in buffer.rows(batch_size=10_000):
                streams, numbers = check_contents(rows, "the table")
                for stream in np.unique(streams):
                    assert stream in found, f"the table has a row of stream {stream}, which there never was"
                    found[stream].append(numbers[streams == stream])
        for notes in self.streams:
            numbers = np.concatenate([np.zeros(0, np.int64), *found[notes.stream]])
            about = f"stream {notes.stream}"
            late = f"a call of verb {int(notes.numbers[2])} took {notes.numbers[1]:.2f} s longer than its timeout"
            assert notes.numbers[1] <= LATE_S, f"{about}: {late}"
            there, times = np.unique(numbers, return_counts=True)
            assert (times == 1).all(), f"{about}: rows {there[times > 1][:5]} are there more than once"
            assert (np.diff(numbers) > 0).all(), f"{about}: its rows are not in order"
            acknowledged = np.flatnonzero(notes.rows == ACKNOWLEDGED)
            lost = np.setdiff1d(acknowledged, there)
            if len(lost):
                around = slice(max(0, lost[0] - 12), lost[-1] + 12)
                about += f" ({notes.about}; notes from row {around.start} on: {notes.rows[around].tolist()})"
            assert not len(lost), f"{about}: {len(lost)} acknowledged rows are not there: {lost[:5]} of {len(there)}"
            assert (notes.rows[there] != 0).all(), f"{about}: rows are there that were never added"
            self.counts["acknowledged"] += len(acknowledged)
            self.counts["calls"] += int(notes.numbers[0])
            self.counts["not ready"] += int(notes.numbers[3])
            for name, number in zip(LATEST, (1, 4), strict=True):
                self.counts[name] = max(self.counts[name], int(1e3 * notes.numbers[number]))
        for proxy in self.proxies:
            self.counts.update({f"proxy {fault}": count for fault, count in proxy.counts.items()})


def kills_of(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if name.startswith("killed"))


def run(rounds: int, seed: int, tell: Any = lambda counts: None) -> Counter[str]:
    """Runs so many kills; returns what was counted, or raises AssertionError with the seed."""
    total: Counter[str] = Counter()
    base = os.environ.get("SHARPWAVE_SWEEP_FOLDER")
    while (done := kills_of(total)) < rounds:
        with tempfile.TemporaryDirectory(prefix="sharpwave-sweep-", dir=base) as folder:
            table = Table(Path(folder), seed + done)
            try:
                while table.kills < min(ROUNDS_OF_A_TABLE, rounds - done):
                    table.round()
                time.sleep(0.5)  # so that what came after the last kill is looked at as well
                table.check_clients()
                table.end()
                table.check()
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed + done} after {sum(table.counts.values())} events: {error}"
                ) from error
            finally:
                table.end()
            latest = {name: max(total[name], table.counts.pop(name, 0)) for name in LATEST}
            total.update(table.counts)
            total.update({name: latest[name] - total[name] for name in LATEST})
            tell(total)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1_000, help="how many kills")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    begun = time.monotonic()
    counts = run(chosen.rounds, chosen.seed, lambda total: print(json.dumps(total), flush=True))
    print(f"{chosen.rounds} kills in {time.monotonic() - begun:.0f} s: {json.dumps(counts, indent=2)}")


if __name__ == "__main__":
    sys.exit(main())
