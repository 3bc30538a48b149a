"""Many clients of one server: its memory over time, and whether they are served alike.

    python tests/service/crowd.py --connections 500 --minutes 10

The connections come from at most 8 processes; each has a session of its own and adds, samples and updates as fast as it
is answered. The program prints the server's memory over time, and the rate of the slowest connection over that of the
median. It fails if a call fails, a connection gets less than a fifth of the median, or the memory keeps growing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import resource
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw

PROCESSES = 8
TIMEOUT_S = 60.0
LEAST_SHARE = 0.2
GROWTH = 0.1  # of the memory after the first third of the run, at most
spawn = mp.get_context("spawn")


def allow_many_files() -> None:
    """Each connection has descriptors: the soft limit of most systems is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(pipe: Any, connections: int) -> None:
    allow_many_files()
    replay = sw.ReplayBuffer(
        20_000, obs_shape=(16,), action_shape=(2,), sampler=sw.Prioritized(), writers=connections + 8, seed=0
    )
    limits = {"clients": connections + 8}
    with sw.serve({"replay": replay}, "tcp://127.0.0.1:0", client_timeout=20.0, limits=limits) as server:
        pipe.send(server.address)
        while pipe.recv() == "stats":
            pipe.send((server.stats(), replay.stats()["rows_added"]))


def visit(pipe: Any, address: str, threads: int) -> None:
    """One process of clients: tells when all are connected, begins at a word, ends at another, tells its counts."""
    allow_many_files()
    counts, errors = [0] * threads, []
    opened, begins, ends = threading.Barrier(threads + 1), threading.Event(), threading.Event()

    def client(place: int) -> None:
        obs = np.full(16, place, np.float32)
        try:
            with sw.open(f"{address}/replay", timeout=TIMEOUT_S, direct=False) as buffer:
                opened.wait(4 * TIMEOUT_S)
                begins.wait()
                while not ends.is_set():
                    buffer.add(obs, [0, 0], 0.0, obs, False, timeout=TIMEOUT_S)
                    counts[place] += 1
                    if counts[place] % 4 == 0:
                        batch = buffer.sample(8, timeout=TIMEOUT_S)
                        buffer.update_priorities(batch["indices"], np.ones(8), timeout=TIMEOUT_S)
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")
            opened.abort()

    workers = [threading.Thread(target=client, args=(place,), daemon=True) for place in range(threads)]
    for worker in workers:
        worker.start()
    try:
        opened.wait(4 * TIMEOUT_S)
    except threading.BrokenBarrierError:
        errors.append("not all clients could connect")
    pipe.send(errors)
    while (word := pipe.recv()) != "end":
        if word == "begin":
            begins.set()
        else:
            pipe.send(list(counts))
    ends.set()
    begins.set()
    for worker in workers:
        worker.join(2 * TIMEOUT_S)
    pipe.send((counts, errors))


def rss_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(text.partition("VmRSS:")[2].split()[0])


def start(target: Any, *arguments: Any) -> tuple[Any, Any]:
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def hear(pipe: Any, what: str) -> Any:
    assert pipe.poll(5 * TIMEOUT_S), f"{what}: no word"
    return pipe.recv()


def run(connections: int, seconds: float) -> dict[str, Any]:
    """Runs the crowd; returns what was measured, or raises AssertionError."""
    server, to_server = start(serve, connections)
    visitors = []
    try:
        address = hear(to_server, "the server")
        shares = [len(part) for part in np.array_split(np.arange(connections), min(PROCESSES, connections))]
        visitors = [start(visit, address, share) for share in shares]
        for _, pipe in visitors:
            assert not (errors := hear(pipe, "a process of clients")), errors[:3]
        to_server.send("stats")
        sessions = len(hear(to_server, "the server")[0]["clients"])
        assert sessions == connections, f"{sessions} sessions, expected {connections}"
        for _, pipe in visitors:
            pipe.send("begin")
        begun = time.monotonic()
        memory = []
        while (passed := time.monotonic() - begun) < seconds:
            memory.append((round(passed, 1), round(rss_bytes(server.pid) / 2**20, 1)))
            assert server.is_alive(), "the server died"
            time.sleep(max(0.5, seconds / 40))
        for _, pipe in visitors:
            pipe.send("end")
        told = [hear(pipe, "a process of clients") for _, pipe in visitors]
        took = time.monotonic() - begun
        to_server.send("stats")
        stats, added = hear(to_server, "the server")
        to_server.send("end")
        server.join(30)
    finally:
        for process, _ in [*visitors, (server, None)]:
            process.kill()
            process.join(30)
    counts = [count for own, _ in told for count in own]
    errors = [error for _, own in told for error in own]
    median = statistics.median(counts)
    found = {
        "connections": connections,
        "seconds": round(took, 1),
        "adds_per_s": round(sum(counts) / took),
        "slowest_over_median": round(min(counts) / max(median, 1), 3),
        "median_adds": median,
        "rss_mib": memory,
        "refused": stats["refused"],
        "lost": stats["lost"],
    }
    assert not errors, (errors[:3], found)
    assert added == sum(counts), (added, found)
    assert min(counts) >= LEAST_SHARE * median, found
    warm = [size for at, size in memory if at >= seconds / 3]
    assert warm[-1] <= (1 + GROWTH) * warm[0] + 16, f"the server's memory grows: {found}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=10)
    chosen = parser.parse_args()
    print(json.dumps(run(chosen.connections, 60 * chosen.minutes)))


if __name__ == "__main__":
    sys.exit(main())
