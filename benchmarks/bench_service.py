"""Times a server's buffers: calls, rows and batches ahead, images, keys, and the way past the server.

    python benchmarks/bench_service.py              # all, under three minutes
    python benchmarks/bench_service.py --quick

Client and server are two processes of this machine. Beside each call stands a bare echo of the same bytes by ZeroMQ
(`harness/echo.py`), and Reverb, whose server is a process of its own, too. All take turns within a round: ours and the
echo's call by call, Reverb by a burst. Writes `results/service.json`.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import zmq
from harness.contest import ContenderError, LeftOut, Player, print_case
from harness.contest import start as start_peer
from harness.echo import HEAD_BYTES, EchoClient, EchoServer
from harness.program import Run, parse, parser
from harness.results import Document
from harness.served import Served
from harness.workloads import ATARI, W1
from tables import service

import sharpwave as sw
from sharpwave.service.keys import make_key

BATCH = 256
WAYS = ("tcp", "ipc", "keys")
WINDOW, ADDS = 16_384, 65_536  # rows on their way, rows of a burst
AHEAD, BATCHES = 8, 128  # batches asked for ahead, batches of a burst
IMAGES_AHEAD, IMAGES = 4, 12
CALLS = 50  # of each in a round, in turn
DIRECT_CALLS = {"sample_256": 8, "add_1": 64}  # a burst: these are too short to be timed one by one
QUICK_ROWS = 100_000

Timed = Callable[[], float]  # nanoseconds of one call


def timed(call: Callable[[], object], calls: int = 1) -> Timed:
    """Of something that makes so many calls."""

    def run() -> float:
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / calls

    return run


class Turns:
    """Times everybody in turn, in an order drawn anew."""

    def __init__(self, rounds: int, left_out: LeftOut) -> None:
        self._rounds, self._left_out = rounds, left_out
        self._order = random.Random(0)

    def run(
        self, case: str, entries: dict[str, Timed], calls: int = 1, rounds: int = 0, peer: Timed | None = None
    ) -> Document:
        """In every round `calls` of each entry, and one burst of Reverb."""
        taken: dict[str, list[float]] = {label: [] for label in entries}
        for run in entries.values():  # warms up
            run()
        gc.collect()
        gc.disable()
        for _ in range(rounds or self._rounds):
            for _ in range(calls):
                for label in self._order.sample(list(entries), len(entries)):
                    taken[label].append(entries[label]())
            if peer is not None:
                try:
                    taken.setdefault("reverb", []).append(peer())
                except ContenderError as reason:
                    self._left_out.say(f"reverb {case}", reason)
                    peer = None
        gc.enable()
        measured = {
            label: {"min_ns": min(times), "median_ns": statistics.median(times), "bursts": len(times)}
            for label, times in taken.items()
            if times
        }
        print_case(case, measured)
        return measured


class Peer:
    """Reverb, or nobody where it is not installed."""

    def __init__(self, rows: int, left_out: LeftOut, stack: ExitStack) -> None:
        self._left_out, self.about = left_out, {}
        self._player: Player | None = None
        if started := start_peer("reverb", "served", W1, rows, left_out):
            self._player, self.about = started
            stack.callback(self._player.close)

    def prepare(self, case: str, burst_s: float) -> tuple[Timed | None, Timed | None]:
        """Its call with an answer, and its calls ahead."""
        if self._player is None:
            return None, None
        player = self._player
        try:
            prepared = player.ask("prepare", case=case, burst_s=burst_s)
        except ContenderError as reason:
            self._left_out.say(f"reverb {case}", reason)
            return None, None
        runs: list[Timed | None] = []
        for variant in ("", "ahead"):
            calls = prepared[variant]
            if isinstance(calls, str):
                self._left_out.say(f"reverb {case} {variant}", calls)
                runs.append(None)
            else:
                runs.append(lambda v=variant, c=calls: player.ask("time", variant=v, calls=c))
        return runs[0], runs[1]


class Clients:
    """Every buffer of the server by each way, and the echo by the same way."""

    def __init__(self, rows: int, image_rows: int, folder: Path, stack: ExitStack) -> None:
        key = make_key(folder / "keys", "bench")
        self.shared = f"shm://sharpwave-bench-service-{os.getpid()}"
        places = [("tcp://127.0.0.1:0", None), (f"ipc://{folder}/rows", None), ("tcp://127.0.0.1:0", f"{folder}/keys")]
        served = Served(places, rows, image_rows, self.shared)
        stack.callback(served.close)
        pair = zmq.curve_keypair()
        echo = EchoServer(["tcp://127.0.0.1:0", f"ipc://{folder}/echo", "tcp://127.0.0.1:0"], [None, None, pair])
        stack.callback(echo.close)
        self.small, self.images, self.echo = {}, {}, {}
        for way, address, echoed in zip(WAYS, served.addresses, echo.addresses, strict=True):
            keys = key if way == "keys" else None
            for table, found in (("small", self.small), ("images", self.images)):
                found[way] = stack.enter_context(sw.open(f"{address}/{table}", keys=keys, direct=False))
            self.echo[way] = EchoClient(echoed, pair[0] if way == "keys" else None)
            stack.callback(self.echo[way].close)
        self.direct = stack.enter_context(sw.open(f"{served.addresses[0]}/shared"))
        self.attached = stack.enter_context(sw.open(self.shared))
        self.server_pid, self.address = served.pid, served.addresses[0]


def reply_bytes(batch: dict[str, Any]) -> int:
    return HEAD_BYTES + sum(array.nbytes for array in batch.values())


def adding(add: Callable[..., Any], rows: list[Any], calls: int = 1) -> Timed:
    endless = cycle(rows)

    def run() -> None:
        for row in islice(endless, calls):
            add(*row)

    return timed(run, calls)


def adding_ahead(writer: Any, rows: list[Any]) -> Timed:
    """Until the server has all rows."""
    endless = cycle(rows)

    def run() -> None:
        for row in islice(endless, ADDS):
            writer.add(*row)
        writer.flush()

    return timed(run, ADDS)


def taking_ahead(batches: Iterator[Any], ahead: int, count: int) -> Timed:
    """Of what is under way; what came while others had their turn is used up untimed."""

    def take(many: int) -> None:
        for _ in islice(batches, many):
            pass

    burst = timed(lambda: take(count), count)

    def run() -> float:
        take(2 * ahead)
        return burst()

    return run


def begun_anew(flow: Callable[[], Any]) -> Timed:
    """Of image batches ahead, begun and ended in every turn."""

    def run() -> float:
        with closing(flow()) as batches:
            return taking_ahead(batches, IMAGES_AHEAD, IMAGES)()

    return run


def small_rows(clients: Clients, peer: Peer, turns: Turns, burst_s: float) -> Document:
    cases = {}
    batch = reply_bytes(clients.small["tcp"].sample(BATCH))
    alone, ahead = peer.prepare(f"sample_{BATCH}", burst_s)
    entries: dict[str, Timed] = {}
    for way in WAYS:
        entries[f"sharpwave@{way}"] = timed(lambda b=clients.small[way]: b.sample(BATCH))
        entries[f"echo@{way}"] = timed(clients.echo[way].call(HEAD_BYTES, batch))
        entries[f"echo@{way}_fresh"] = timed(clients.echo[way].call(HEAD_BYTES, batch, fresh=True))
    cases["sample_256"] = turns.run("sample_256", entries, CALLS, peer=alone)

    flows: dict[str, Any] = {}
    for way in WAYS:
        flows[f"sharpwave@{way}"] = clients.small[way].batches(BATCH, prefetch=AHEAD)
        flows[f"echo@{way}"] = clients.echo[way].ahead(AHEAD, batch)
    entries = {label: taking_ahead(flow, AHEAD, BATCHES) for label, flow in flows.items()}
    cases["batches_256"] = turns.run("batches_256", entries, rounds=16, peer=ahead)
    for flow in flows.values():
        flow.close()

    rows = W1.rows()
    alone, ahead = peer.prepare("add_1", burst_s)
    entries = {}
    for way in WAYS:
        entries[f"sharpwave@{way}"] = adding(clients.small[way].add, rows)
        entries[f"echo@{way}"] = timed(clients.echo[way].call(HEAD_BYTES + W1.row_bytes, HEAD_BYTES))
    cases["add_1"] = turns.run("add_1", entries, CALLS, peer=alone)

    writers = {way: clients.small[way].writer(window=WINDOW) for way in WAYS}
    entries = {f"sharpwave@{way}": adding_ahead(writer, rows) for way, writer in writers.items()}
    cases["adds"] = turns.run("adds", entries, rounds=16, peer=ahead)
    for writer in writers.values():
        writer.close()
    return cases


def image_rows(clients: Clients, turns: Turns) -> Document:
    """With a constant as the echo's reply, and with one that is copied first."""
    cases = {}
    batch = reply_bytes(clients.images["tcp"].sample(BATCH))
    forms = {f"echo@{way}{form}": (way, bool(form)) for way in WAYS for form in ("", "_fresh")}
    entries = {f"sharpwave@{way}": timed(lambda b=clients.images[way]: b.sample(BATCH)) for way in WAYS}
    for label, (way, is_fresh) in forms.items():
        entries[label] = timed(clients.echo[way].call(HEAD_BYTES, batch, fresh=is_fresh))
    cases["images"] = turns.run("images", entries, rounds=40)

    # One after the other: all of them at once would hold a gigabyte of batches.
    flows: dict[str, Callable[[], Any]] = {
        f"sharpwave@{way}": lambda b=clients.images[way]: b.batches(BATCH, prefetch=IMAGES_AHEAD) for way in WAYS
    }
    for label, (way, is_fresh) in forms.items():
        echo = clients.echo[way]
        flows[label] = lambda e=echo, f=is_fresh: e.ahead(IMAGES_AHEAD, batch, fresh=f)
    bursts = {label: begun_anew(flow) for label, flow in flows.items()}
    cases["image_batches"] = turns.run("image_batches", bursts, rounds=8)
    for times in (*cases["images"].values(), *cases["image_batches"].values()):
        times["bytes"] = batch
    return cases


def past_the_server(clients: Clients, turns: Turns) -> Document:
    """The same file, found by way of the server and by its name."""
    rows, calls = W1.rows(), DIRECT_CALLS
    both = {"sharpwave@direct": clients.direct, "sharpwave@shm": clients.attached}

    def drawing(buffer: Any) -> Timed:
        count = calls["sample_256"]
        return timed(lambda: [buffer.sample(BATCH) for _ in range(count)], count)

    return {
        "direct_sample_256": turns.run("direct sample_256", {k: drawing(b) for k, b in both.items()}, CALLS),
        "direct_add_1": turns.run(
            "direct add_1", {k: adding(b.add, rows, calls["add_1"]) for k, b in both.items()}, CALLS
        ),
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=40, help=f"of {CALLS} calls each")
    made.add_argument("--rows", type=int, help=f"capacity; {W1.capacity:,} unless given")
    options = parse(made)
    rows = options.rows or (QUICK_ROWS if options.quick else W1.capacity)
    image_count = 2_000 if options.quick else ATARI.capacity
    run = Run(options)
    turns = Turns(options.rounds, run.left_out)
    with tempfile.TemporaryDirectory(prefix="sw-") as folder, ExitStack() as stack:
        clients = Clients(rows, image_count, Path(folder), stack)
        peer = Peer(rows, run.left_out, stack)
        cases = small_rows(clients, peer, turns, 0.02)
        cases |= image_rows(clients, turns)
        cases |= past_the_server(clients, turns)
        contenders = {"reverb": peer.about} if peer.about else {}
    facts = {"title": W1.title, "row_bytes": W1.row_bytes, "capacity": rows, "contenders": contenders}
    settings = {"window": WINDOW, "ahead": AHEAD, "images_ahead": IMAGES_AHEAD, "batch": BATCH}
    measured = {"workloads": {"service": facts | {"cases": cases}}, "service": settings}
    print(service(measured))
    run.save("service", **measured)


if __name__ == "__main__":
    main()
