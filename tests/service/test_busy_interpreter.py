"""A server in a process whose interpreter is busy answers ADD and SAMPLE all the same."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from patience import HANG_S, until_asleep

import sharpwave as sw

# The second read has the interpreter's lock until a byte comes: no other thread of the process runs Python code.
SERVER = """
import ctypes, os
import sharpwave as sw
buffer = sw.ReplayBuffer(100, obs_shape=(2,), seed=0)
with sw.serve({"it": buffer}, "tcp://127.0.0.1:0") as server:
    print(server.address, flush=True)
    os.read(0, 1)
    print("holds it", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
    print(len(buffer), flush=True)
    os.read(0, 1)
"""


def row(number: int) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], False


def test_rows_come_and_go_while_another_thread_has_the_interpreter() -> None:
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        address = child.stdout.readline().decode().strip()
        with sw.open(f"{address}/it") as buffer:
            buffer.add(*row(0))  # opens the stream, for which the server needs the interpreter
            child.stdin.write(b".")
            assert child.stdout.readline() == b"holds it\n"
            until_asleep(child.pid)
            number, end = 0, time.monotonic() + 1.2  # so long that the server looks after its clients meanwhile
            while time.monotonic() < end:
                number += 1
                buffer.add(*row(number), timeout=HANG_S)
                assert max(buffer.sample(8, timeout=HANG_S)["action"].tolist()) <= number
            assert len(next(iter(buffer.batches(8, prefetch=2)))["action"]) == 8
            child.stdin.write(b".")
            assert child.stdout.readline() == b"%d\n" % min(number + 1, 100)
            child.stdin.write(b".")
    finally:
        child.kill()
        child.communicate()
