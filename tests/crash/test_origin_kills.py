"""SIGKILL at any instant of a journal whose calls have origins: every call that is sent again is made once."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import NotReady
from sharpwave.sequences import store
from sharpwave.sequences.origins import Origin

KILLS = 200 if os.environ.get("SHARPWAVE_SOAK") == "1" else 10
CLIENTS = 3
FLOW = sw.Dataflow([sw.Consumer("train", {"x"}, batch_size=2)])


def reopen(path: Path, sync: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a torn last record
        return sw.SequenceBuffer(100_000, flow=FLOW, journal=path, duplicate_ids=True, sync=sync)


def token(client: int) -> bytes:
    return bytes([client]) * 16


def samples(client: int, number: int) -> list[sw.SequenceSample]:
    size = 1 + number % 3
    names = [f"{client}.{number}.{at}" for at in range(size)]
    return [sw.SequenceSample([name], {"x": [number % 50]}, {"x": np.arange(number % 50)}) for name in names]


def serve(path: Path, sync: bool, begin: list[int], say: int) -> None:
    """Clients that put from their oldest call without an answer on, and a trainer that acknowledges."""
    seq = reopen(path, sync)

    def put(client: int) -> None:
        number = oldest = begin[client]
        while True:
            handles = seq._sequences.put(
                "put()", samples(client, number), None, None, None, origin=Origin(token(client), number, oldest)
            )
            os.write(say, f"{client} {number} {handles[0]}\n".encode())
            number += 1
            oldest = number if number % 4 == 0 else oldest  # its caller has seen the answers so far

    def train() -> None:
        count = 0
        while True:
            try:
                seq.get("train", timeout=0.01).ack()
            except NotReady:
                continue
            count += 1
            if count % 10 == 0:
                seq.checkpoint(f"{count}")

    def tell(work: Any, *args: int) -> None:
        try:
            work(*args)
        except BaseException:
            os.write(say, f"failed {traceback.format_exc()!r}\n".encode())

    threads = [threading.Thread(target=tell, args=(put, client), daemon=True) for client in range(CLIENTS)]
    threads.append(threading.Thread(target=tell, args=(train,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("sync", [False, True])
def test_puts_that_are_sent_again_after_a_kill_are_made_once(tmp_path: Path, monkeypatch: Any, sync: bool) -> None:
    monkeypatch.setattr(store, "_SLACK", 2000)  # rewrites come often
    stream = random.Random(3 + sync)
    path = tmp_path / "journal"
    begin = [0] * CLIENTS  # of each client, the oldest call that it asks for again
    answers: dict[tuple[int, int], int] = {}  # the first handle
    repeated = 0
    for _ in range(KILLS):
        read, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                serve(path, sync, begin, say)
            except BaseException:
                os.write(say, f"failed {traceback.format_exc()!r}\n".encode())
            os._exit(1)
        os.close(say)
        assert select.select([read], [], [], 60)[0]
        time.sleep(stream.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(read, "rb") as pipe:
            lines = pipe.read().decode().split("\n")[:-1]
        seen = list(begin)
        for line in lines:
            assert not line.startswith("failed"), line
            client, number, handle = map(int, line.split())
            repeated += (client, number) in answers
            assert answers.setdefault((client, number), handle) == handle, "the same call has the same handles"
            seen[client] = max(seen[client], number + 1)
        # Their oldest, as the last call said it: the answers since then may be lost on their way.
        begin = [max(first, last - last % 4) for first, last in zip(begin, seen, strict=True)]
    seq = reopen(path, sync)
    found = [*seq.ids(), *seq.used_ids]
    assert len(set(found)) == len(found), "nothing was put twice"
    for client, number in answers:
        assert {one.ids[0] for one in samples(client, number)} <= set(found), "nothing that was answered is lost"
    handles = sorted((first, len(samples(*call))) for call, first in answers.items())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(handles))
    assert repeated > 0
    print({"kills": KILLS, "answered": len(answers), "asked again": repeated, "used": len(seq.used_ids)})
