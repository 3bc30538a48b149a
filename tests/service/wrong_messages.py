"""Wrong messages to a live server: it must answer or drop them, keep its memory, and serve the others as before.

    python tests/service/wrong_messages.py --seconds 60 --seed 1

The server is a process of its own. A good client adds and samples all the time; every wrong message comes from other
connections. At the end the program prints what the server counted, and fails if the server died, its memory grew, a
call of the good client failed or took long, or its rows are not as they were added.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import socket
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import wire
import zmq
from mutator import BAD_DOCUMENTS, VERBS, Mutator
from wire import Wire, document, pack, packed_rows

import sharpwave as sw
from sharpwave.errors import NotReady

GROWTH_BYTES = 48 << 20  # of the server, after the first part of the run; a leak of 1 kB a message has more
DEADLINE_S = 20.0
MESSAGE_BYTES = 1 << 20


def serve(pipe: Any) -> None:
    """The server's process: answers "stats" on the pipe until it is told to end."""
    replay = sw.ReplayBuffer(20_000, obs_shape=(4,), action_shape=(2,), sampler=sw.Prioritized(), writers=1024, seed=0)
    flow = sw.Dataflow([sw.Consumer("train", inputs={"input_ids"}, batch_size=2)])
    samples = sw.SequenceBuffer(1_000, flow=flow)
    episodes = sw.TrajectoryReplayBuffer(None, capacity=100, seed=0)
    tables = {"replay": replay, "samples": samples, "episodes": episodes}
    limits = {"message_bytes": MESSAGE_BYTES, "clients": 256, "calls": 32, "channels": 16}
    with sw.serve(tables, "tcp://127.0.0.1:0", client_timeout=1.0, limits=limits) as server:
        pipe.send(server.address)
        while pipe.recv() == "stats":
            pipe.send(server.stats())
    pipe.send("closed")


class Attacker:
    """One thread of wrong messages; `counts` says how many of which kind."""

    def __init__(self, address: str, seed: int) -> None:
        self.address, self.mutate = address, Mutator(seed)
        self.random = self.mutate.random
        self.context: zmq.Context[Any] = zmq.Context()
        self.counts: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def attack(self, end: float) -> None:
        kinds = [
            self.random_bytes, self.mutated, self.mutated, self.mutated, self.replayed, self.documents, self.frames,
            self.huge, self.versions, self.verbs, self.verbs, self.plain_tcp, self.vanished, self.out_of_order,
            self.many_calls,
        ]  # fmt: skip
        while time.monotonic() < end:
            # A flood of sessions keeps others out until it is taken for dead: mostly there is none.
            kind = self.greetings if self.random.random() < 0.002 else self.random.choice(kinds)
            try:
                kind()
                self.counts[kind.__name__] += 1
            except (zmq.Again, OSError, AssertionError):  # it is refused, or gets no answer any more
                self.counts[f"{kind.__name__}, refused"] += 1
            except BaseException as error:
                self.failure = error
                break
        self.context.destroy(0)

    def begun(self) -> tuple[Wire, list[bytes]]:
        """A session with a table and a stream, and one right message of each kind for it."""
        peer = Wire(self.context, self.address, timeout_ms=1_000)
        peer.hello()
        fields = peer.open("replay")["fields"]
        opened = peer.call("open_stream", token=self.random.randbytes(16).hex())
        assert opened.status == wire.OK, opened.body
        stream = opened.document["stream"]
        widths = {field["name"]: field["shape"] for field in fields}
        values = {name: np.full([2, *shape], -1.0) for name, shape in widths.items()}
        rows = packed_rows(fields, {**values, "done": np.zeros(2, bool)})
        about = {"session": peer.session, "table": peer.table}
        numbered = [
            (wire.ADD, rows, {"stream": stream, "argument": 0}),
            (wire.SAMPLE, b"", {"argument": 4, "timeout": 0}),
            (wire.UPDATE, struct.pack("<qd", 0, 1.0), {"argument": 1}),
            (wire.SETTLE, struct.pack("<Q", 3), {}),
            (wire.TABLES, b"", {}),
            (wire.OPEN, document({"name": "replay"}), {}),
            (wire.CALL, document({"verb": "stats", "args": {}}), {}),
            (wire.CALL, document({"verb": "iterate", "args": {"what": "rows", "batch_size": 8, "ids": True}}), {}),
        ]
        self.random.shuffle(numbered)
        right = [pack(body, verb=verb, call=next(peer.calls), **about, **head) for verb, body, head in numbered]
        right.append(pack(struct.pack("<QQ", 0, 2), verb=wire.BEAT, **about))
        right.append(pack(verb=wire.PROBE, call=1, **about))
        self.counts["sessions"] += 1
        return peer, right

    def drain(self, peer: Wire) -> None:
        if peer.session and self.random.random() < 0.9:
            peer.send(pack(verb=wire.BYE, session=peer.session))
            time.sleep(0.001)
        with suppress(zmq.Again):
            while True:
                peer.socket.recv(zmq.NOBLOCK)
        peer.close()

    def random_bytes(self) -> None:
        peer = Wire(self.context, self.address, 200)
        for _ in range(20):
            start = self.random.choice((b"", b"SHPW", b"SHPW\1\0"))
            peer.send(start + self.random.randbytes(self.random.choice((0, 1, 58, 60, 64, 200, 4_096))))
        self.drain(peer)

    def mutated(self) -> None:
        peer, right = self.begun()
        for message in right:
            if self.random.random() < 0.3:
                peer.send(message)
            peer.send(self.mutate.any(message))
        with suppress(zmq.Again):
            peer.socket.recv()
        self.drain(peer)

    def replayed(self) -> None:
        """Messages of this session and of others, again and again."""
        peer, right = self.begun()
        for message in right:
            peer.send(message)
        for message in self.random.choices(peer.sent, k=30):
            peer.send(message)
        other = Wire(self.context, self.address, 200)
        for message in self.random.choices(peer.sent, k=10):
            other.send(message)  # another connection in the name of this session
        self.drain(other)
        self.drain(peer)

    def out_of_order(self) -> None:
        peer, right = self.begun()
        self.random.shuffle(right)
        for message in right:
            peer.send(message)
        self.drain(peer)

    def many_calls(self) -> None:
        """More calls at once than the limits allow, that wait for ever and whose replies are never taken."""
        peer, _ = self.begun()
        about = {"session": peer.session, "table": peer.table, "oldest": 1, "timeout": wire.FOREVER}
        for number in range(100):
            count = self.random.choice((1, 64, 10**9))
            peer.send(pack(verb=wire.SAMPLE, call=next(peer.calls), channel=number % 20, argument=count, **about))
        self.drain(peer)

    def documents(self) -> None:
        peer, _ = self.begun()
        for value in self.random.choices(BAD_DOCUMENTS, k=8):
            body = document(value) + bytes(self.random.choice((0, 8, 64, 512)))
            verb = self.random.choice((wire.CALL, wire.CALL, wire.CALL, wire.OPEN))
            peer.ask(verb, body, table=peer.table, timeout=0)
        for text in (b"[" * 100_000, b"{" * 1_000, b'"' + b"x" * 10_000, b"1" * 5_000, b"\xff\xfe", b"NaN", b""):
            length = self.random.choice((len(text), len(text) + 1, 2**32 - 1, 0))
            peer.ask(wire.CALL, struct.pack("<II", length, 0) + text, table=peer.table, timeout=0)
        self.drain(peer)

    def verbs(self) -> None:
        """Calls by name to every table, with arguments that make no sense."""
        table = self.random.choice(list(VERBS))
        peer = Wire(self.context, self.address, timeout_ms=1_000)
        peer.hello()
        peer.open(table)
        for _ in range(30):
            body = document(self.mutate.call(table))
            body += bytes(-len(body) % 64) + self.random.randbytes(64)
            peer.ask(wire.CALL, body, table=peer.table, timeout=self.random.choice((0, 1_000)))
        self.drain(peer)

    def frames(self) -> None:
        peer, right = self.begun()
        for message in right:
            parts = [self.random.choice((b"", message, b"x")) for _ in range(self.random.choice((2, 3, 100)))]
            peer.socket.send_multipart(parts)
        self.drain(peer)

    def huge(self) -> None:
        peer, right = self.begun()
        peer.send(right[0] + bytes(self.random.choice((MESSAGE_BYTES - 2_000, MESSAGE_BYTES + 1, 4 * MESSAGE_BYTES))))
        self.drain(peer)

    def versions(self) -> None:
        peer = Wire(self.context, self.address, 1_000)
        first, last = self.random.choice(((2, 9), (0, 0), (9, 2), (-5, 2**70), ("1", "1"), (None, None), (1.5, 2)))
        said = {
            "versions": [first, last],
            "token": peer.token.hex(),
            "client": "x" * self.random.choice((0, 10, 10**5)),
        }
        peer.ask(wire.HELLO, document(said), version=self.random.choice((0, 1, 2, 65_535)))
        for wrong in ({}, {"versions": 1}, {"versions": [1]}, {**said, "token": "x"}, {**said, "token": 5}, [], None):
            peer.ask(wire.HELLO, document(wrong))
        self.drain(peer)

    def greetings(self) -> None:
        """More sessions than the limits allow; none says goodbye."""
        peer = Wire(self.context, self.address, 1_000)
        for _ in range(300):
            peer.token = self.random.randbytes(16)
            peer.session = 0
            peer.hello()
        self.drain(peer)

    def vanished(self) -> None:
        peer, right = self.begun()
        peer.send(right[0])
        self.drain(peer)

    def plain_tcp(self) -> None:
        """Bytes that are no ZeroMQ, or end in the middle of it."""
        host, port = self.address.removeprefix("tcp://").split(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31)
        with closing(socket.create_connection((host, int(port)), 5)) as raw:
            raw.sendall(
                self.random.choice(
                    (
                        b"GET / HTTP/1.1\r\n\r\n",
                        self.random.randbytes(300),
                        greeting[: self.random.randrange(65)],
                        greeting + self.random.randbytes(100),
                        self.mutate.bits(greeting),
                        greeting + b"\x04\x19\x05READY" + b"\x0bSocket-Type\0\0\0\6DEALER" + b"\2" + b"\xff" * 8,
                    )
                )
            )


def seconds_without_processor(pid: int | str) -> float:
    """Of all threads of a process: ready to run, and the machine's load left them none."""
    waited = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            waited += int(path.read_text().split()[1])
    return waited / 1e9


class GoodClient(threading.Thread):
    """Adds and samples as if nobody else were there; its rows have an `action` of 7.

    A call without an answer is a failure, unless the server or this process had no processor for most of that time.
    """

    def __init__(self, address: str, server_pid: int) -> None:
        super().__init__(daemon=True)
        self.address, self._pids = address, (server_pid, "self")
        self.starved: list[tuple[float, float]] = []  # seconds since the begin, seconds without a processor
        self.ends = threading.Event()
        self.added = 0
        self.slowest_s = self.failed_s = 0.0
        self.failure: BaseException | None = None

    def run(self) -> None:
        first = time.monotonic()
        try:
            with sw.open(f"{self.address}/replay") as buffer:
                while not self.ends.is_set():
                    begun, waited = time.monotonic(), sum(map(seconds_without_processor, self._pids))
                    try:
                        self._exchange(buffer)
                    except NotReady:
                        missing = sum(map(seconds_without_processor, self._pids)) - waited
                        if missing < DEADLINE_S / 2:
                            raise
                        self.starved.append((round(begun - first, 1), round(missing, 1)))
                        continue
                    self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
        except BaseException as error:
            self.failed_s = time.monotonic() - first
            self.failure = error

    def _exchange(self, buffer: Any) -> None:
        obs = np.full(4, self.added, np.float32)
        self.added += 1
        buffer.add(obs, [7, 7], self.added - 1, obs + 1, False, timeout=DEADLINE_S)
        batch = buffer.sample(16, timeout=DEADLINE_S)
        own = batch["action"][:, 0] == 7
        assert (batch["obs"][own] == batch["reward"][own][:, None]).all(), "a row of mine is torn"
        assert (batch["next_obs"][own] == batch["obs"][own] + 1).all(), "a row of mine is torn"
        buffer.update_priorities(batch["indices"], np.ones(16), timeout=DEADLINE_S)


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])


def run(seconds: float, seed: int, attackers: int = 2) -> dict[str, Any]:
    """Fuzzes; returns what was counted, or raises AssertionError."""
    spawn = mp.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def ask(what: str) -> Any:
        assert process.is_alive(), f"the server died: exit code {process.exitcode}"
        pipe.send(what)
        assert pipe.poll(60), "the server does not answer"
        return pipe.recv()

    try:
        assert pipe.poll(60), "the server did not begin"
        address = pipe.recv()
        assert process.pid is not None
        good = GoodClient(address, process.pid)
        good.start()
        peers = [Attacker(address, seed * 1_000 + number) for number in range(attackers)]
        memory: list[tuple[float, int]] = []
        # The first part warms up: allocators and pools grow to what the limits allow.
        begun = time.monotonic()
        end = begun + seconds
        threads = [threading.Thread(target=peer.attack, args=(end,)) for peer in peers]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert process.is_alive(), f"the server died: exit code {process.exitcode}"
            memory.append((round(time.monotonic() - begun, 1), rss_bytes(process.pid)))
            time.sleep(min(1.0, seconds / 20))
        good.ends.set()
        good.join(4 * DEADLINE_S)
        assert not good.is_alive(), "a call of the good client did not return"
        for table in VERBS:  # each still answers
            with sw.open(f"{address}/{table}", timeout=DEADLINE_S) as buffer:
                len(buffer)
        stats = ask("stats")
        pipe.send("end")
        assert pipe.poll(60), "the server did not close"
        assert pipe.recv() == "closed"
        process.join(30)
    finally:
        process.kill()
        process.join(30)
    counts = sum((peer.counts for peer in peers), Counter())
    quarter = [size for at, size in memory if at >= seconds / 4] or [memory[-1][1]]
    found = {
        "seed": seed,
        "attacks": dict(counts),
        "refused": stats["refused"],
        "lost": stats["lost"],
        "rows": good.added,
        "slowest_s": round(good.slowest_s, 2),
        "starved": good.starved,
        "rss_mib": [round(size / 2**20, 1) for _, size in memory[:: max(1, len(memory) // 12)]],
    }
    assert process.exitcode == 0, f"the server ended with {process.exitcode}"
    assert not (failures := [peer.failure for peer in peers if peer.failure]), f"the fuzzer failed: {failures!r}"
    assert good.failure is None, f"the good client failed after {good.failed_s:.0f} s: {good.failure!r}; {found}"
    assert good.added > 0, found
    assert counts["sessions"] > 10, f"hardly any session began: {found}"
    assert good.slowest_s < DEADLINE_S, found
    assert sum(stats["refused"].values()) > 0, f"nothing was refused: {found}"
    assert quarter[-1] - quarter[0] < GROWTH_BYTES, f"the server's memory grew: {found}; {memory}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--attackers", type=int, default=2)
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    print(json.dumps(run(chosen.seconds, chosen.seed, chosen.attackers), indent=2))


if __name__ == "__main__":
    sys.exit(main())
