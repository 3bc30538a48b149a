"""Threads and forks: no torn row, no lost error, never a crash."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numbered import filled, make, numbers_in, row
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady


def run_all(
    jobs: list[Callable[[], None]], stop: threading.Event, seconds: float, enough: Callable[[], bool] = lambda: True
) -> None:
    """Runs the jobs side by side, for a while and until it is enough; the first error of any of them is raised here."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    stop.wait(seconds)
    until(lambda: enough() or stop.is_set())
    stop.set()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def checked_schema(items: int) -> dict[str, Any]:
    """Every field follows from one number, so a row of two halves betrays itself."""
    return {
        "obs": sw.Field((items,), "uint32"),
        "action": sw.Field((), "int64"),
        "extra": {"a": sw.Field((5,), "float64")},
    }


def checked_row(number: int, items: int, count: int | None = None) -> dict[str, Any]:
    if count is None:
        numbers, lead = np.int64(number), ()
    else:
        numbers, lead = np.arange(number, number + count), (count,)
    obs = np.broadcast_to((np.asarray(numbers) % 2**31).astype(np.uint32)[..., None], (*lead, items)).copy()
    obs[..., -1] ^= 0x5A5A5A5A
    extra = {"a": np.repeat(np.asarray(numbers, np.float64)[..., None], 5, axis=-1)}
    reward = np.asarray(np.asarray(numbers) % 1000, np.float32)
    return {
        "obs": obs,
        "action": np.asarray(numbers),
        "reward": reward,
        "done": np.asarray(numbers) % 7 == 0,
        "extra": extra,
    }


def check_rows(batch: dict[str, Any]) -> None:
    numbers = batch["action"]
    assert (batch["obs"][:, :-1] == (numbers % 2**31).astype(np.uint32)[:, None]).all()
    assert (batch["obs"][:, -1] == ((numbers % 2**31).astype(np.uint32) ^ 0x5A5A5A5A)).all()
    assert (batch["extra"]["a"] == numbers[:, None]).all()
    assert (batch["reward"] == (numbers % 1000).astype(np.float32)).all()
    assert (batch["done"] == (numbers % 7 == 0)).all()


@pytest.mark.parametrize(
    ("items", "capacity", "batch", "count"),
    [(2, 64, 256, None), (60, 200, 256, 7), (16_384, 40, 16, None), (16_384, 40, 64, 5)],
    ids=["tiny rows", "several rows an add", "64 KB rows", "several 64 KB rows an add"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["own writers", "one shared writer"])
def test_reader_never_sees_a_torn_row(items: int, capacity: int, batch: int, count: int | None, shared: bool) -> None:
    buffer = sw.ReplayBuffer(capacity, schema=checked_schema(items), next_obs=None, seed=0)
    stop = threading.Event()
    added = [0, 0, 0]
    sampled = [0, 0]

    def write(which: int) -> Callable[[], None]:
        def job() -> None:
            writer: Any = buffer if shared else buffer.writer()
            number = which * 10**9
            while not stop.is_set():
                writer.add(**checked_row(number, items, count))
                number += count or 1
                added[which] += count or 1

        return job

    def read(which: int) -> Callable[[], None]:
        def job() -> None:
            out = None
            while not stop.is_set():
                try:
                    out = buffer.sample(batch, out=out if which else None)
                except NotReady:
                    if any(added):
                        raise
                    continue
                check_rows(out)
                sampled[which] += batch
                if sampled[which] % (batch * 16) == 0:
                    for rows in buffer.rows(64):
                        check_rows(rows)

        return job

    run_all([*(write(i) for i in range(3)), *(read(i) for i in range(2))], stop, 1.0, lambda: min(*added, *sampled) > 0)
    assert buffer.stats()["rows_added"] == sum(added)
    assert len(buffer) <= capacity
    for rows in buffer.rows():
        check_rows(rows)


def test_clear_and_save_run_beside_writers_and_readers(tmp_path: Any) -> None:
    buffer = sw.ReplayBuffer(500, schema=checked_schema(50), next_obs=None, seed=0)
    stop, turns = threading.Event(), 0

    def write() -> None:
        number = 0
        with buffer.writer() as writer:
            while not stop.is_set():
                writer.add(**checked_row(number, 50, 3))
                number += 3

    def read() -> None:
        while not stop.is_set():
            try:
                check_rows(buffer.sample(64))
            except NotReady:
                continue

    def clear_and_save() -> None:
        nonlocal turns
        while not stop.is_set():
            buffer.clear()
            buffer.save(tmp_path / "snapshot")
            with sw.open(tmp_path / "snapshot") as copy:
                assert len(copy) == sum(len(rows["action"]) for rows in copy.rows())
                for rows in copy.rows():
                    check_rows(rows)
            turns += 1

    run_all([write, write, read, clear_and_save], stop, 1.5, lambda: turns > 3)


@pytest.mark.parametrize("kind", ["small", "large"])
def test_close_during_use_is_a_closed_error_and_never_a_crash(kind: str) -> None:
    items = 2 if kind == "small" else 100_000
    for _ in range(20 if kind == "small" else 5):
        buffer = sw.ReplayBuffer(20, schema=checked_schema(items), next_obs=None, seed=0)
        buffer.add(**checked_row(0, items))
        started = threading.Barrier(5)
        ended: list[str] = []

        def until_closed(call: Callable[[], Any], started: Any = started, ended: list[str] = ended) -> None:
            started.wait()
            try:
                while True:
                    call()
            except ClosedError as error:
                ended.append(str(error))

        values = checked_row(1, items)
        calls = [
            lambda buffer=buffer, values=values: buffer.add(**values),
            lambda buffer=buffer, values=values: buffer.add(**values),
            lambda buffer=buffer: buffer.sample(16),
            lambda buffer=buffer: list(buffer.rows()),
        ]
        threads = [threading.Thread(target=until_closed, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.01)
        buffer.close()
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive()
        assert len(ended) == 4
        assert all("closed" in message for message in ended)


def run_python(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False)


PREAMBLE = """
import os, sys
import numpy as np
import sharpwave as sw
"""


def test_close_while_add_converts_its_values_is_a_closed_error() -> None:
    """What happens when one thread closes while another adds lists, without the luck of timing."""
    code = PREAMBLE + (
        "buffer = sw.ReplayBuffer(4, obs_shape=(2,))\n"
        "class Closing:\n"
        "    def __array__(self, dtype=None, copy=None):\n"
        "        buffer.close()\n"
        "        return np.zeros(2, np.float32)\n"
        "try:\n"
        "    buffer.add(Closing(), 0.0, 0.0, np.zeros(2, np.float32), False)\n"
        "except sw.errors.ClosedError as error:\n"
        "    print('refused')\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "refused\n")


def test_writers_of_threads_keep_their_own_order() -> None:
    buffer = make(3000)
    counts = [700, 800, 900]

    def job(first: int, count: int) -> Callable[[], None]:
        def write() -> None:
            with buffer.writer() as writer:
                for number in range(first, first + count):
                    writer.add(**row(number))

        return write

    stop = threading.Event()
    run_all([job(i * 10_000, count) for i, count in enumerate(counts)], stop, 0.01)
    numbers = numbers_in(buffer)
    assert len(numbers) == sum(counts)
    for i, count in enumerate(counts):
        assert [n for n in numbers if n // 10_000 == i] == list(range(i * 10_000, i * 10_000 + count))


# ---- fork ------------------------------------------------------------------------------------------------------------

FORK = """
def in_child(job):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            job()
        except sw.errors.ClosedError as error:
            print("ClosedError", error, flush=True)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
zeros = np.zeros(2, np.float32)
verbs = [lambda: b.add(zeros, 0., 0., zeros, False), lambda: b.sample(1), lambda: b.get([0]), lambda: len(b),
         lambda: list(b.rows()), lambda: b.clear(), lambda: b.stats(), lambda: b.writer(),
         lambda: w.add(zeros, 0., 0., zeros, False)]
b.add(zeros, 0., 0., zeros, False)
w = b.writer()
w.add(zeros, 0., 0., zeros, False)
b.sample(100_000)
for verb in verbs:
    in_child(verb)
in_child(lambda: (w.close(), b.close(), print("closed in the child")))
b.add(zeros, 0., 0., zeros, False)
w.add(zeros, 0., 0., zeros, False)
print("parent has", len(b), b.stats()["writers"])
"""


def test_forked_child_of_a_buffer_in_memory_is_told_to_use_shared_memory() -> None:
    done = run_python(PREAMBLE + "b = sw.ReplayBuffer(10, obs_shape=(2,))" + FORK)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 11
    assert all(line.startswith("ClosedError") and 'storage="shm://name"' in line for line in lines[:9])
    assert lines[9:] == ["closed in the child", "parent has 4 2"]


@pytest.mark.parametrize("place", ["shm", "file"])
def test_forked_child_of_a_shared_buffer_opens_it_by_itself(place: str, shm_address: str, tmp_path: Any) -> None:
    address = shm_address if place == "shm" else f"file://{tmp_path}/live.sw"
    work = """
b.add(zeros, 0., 0., zeros, False)
w = b.writer()
batches = b.batches(2)
next(batches)
kept = b.sample
def live():
    b.add(zeros, 1., 1., zeros, False)
    print("child sees", len(b), len(kept(3)["reward"]), len(b.sample(3)["reward"]), b.stats()["writers"])
    b.close()
    in_child(lambda: len(b))  # closed before that fork
in_child(live)
in_child(lambda: w.add(zeros, 0., 0., zeros, False))
in_child(lambda: next(batches))
in_child(lambda: b.writer().add(zeros, 2., 2., zeros, False))
batches.close()
b.add(zeros, 3., 3., zeros, False)
(rows,) = b.rows()
print("parent has", rows["reward"].tolist(), b.stats()["writers"], b.stats()["recoveries"])
b.close(unlink=True)
"""
    verbs = FORK[: FORK.index("verbs = [")]
    done = run_python(PREAMBLE + f"b = sw.ReplayBuffer(10, obs_shape=(2,), storage={address!r})" + verbs + work)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0] == "child sees 2 3 3 3"
    assert lines[1].startswith("ClosedError the buffer is closed")
    assert lines[2].startswith("ClosedError the buffer was opened by the parent process")
    assert lines[3].startswith("ClosedError batches(): begun by the parent process")
    assert lines[4:] == ["parent has [0.0, 1.0, 2.0, 3.0] 2 0"]


def test_a_large_batch_can_be_drawn_in_a_forked_child() -> None:
    """The threads that helped the parent copy are not in the child."""
    code = PREAMBLE + (
        "def fill(b):\n"
        "    for i in range(50): b.add(np.full(4096, i), 0., float(i), np.full(4096, i), False)\n"
        "    batch = b.sample(500)\n"
        "    assert (batch['obs'] == batch['reward'][:, None]).all()\n"
        "fill(sw.ReplayBuffer(50, obs_shape=(4096,)))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    fill(sw.ReplayBuffer(50, obs_shape=(4096,)))\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = run_python(code)
    assert done.stdout == "7\n", done.stderr


def test_buffers_are_independent() -> None:
    first, second = filled(3), filled(5)
    first.clear()
    assert (len(first), len(second)) == (0, 5)


TUNE_AND_CLOSE = """
import threading, time, numpy as np, sharpwave as sw
for turn in range(3):
    buffer = sw.ReplayBuffer(1_000_000, obs_shape=(1,), sampler=sw.Prioritized(), writers=1, seed=0)
    zeros = np.zeros(1_000_000, np.float32)
    buffer.add(zeros[:, None], zeros, zeros, zeros[:, None], zeros.astype(bool))
    def tune():
        try:
            while True:
                buffer.tune(alpha=0.3)
        except sw.errors.ClosedError:
            pass
    thread = threading.Thread(target=tune)
    thread.start()
    time.sleep(0.03 + 0.005 * turn)
    buffer.close()
    thread.join()
print("fine")
"""


def test_close_in_another_thread_waits_for_tune_to_be_over() -> None:
    command = [sys.executable, "-c", TUNE_AND_CLOSE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-500:]
