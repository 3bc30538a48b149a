"""Who has a buffer open is known from the kernel's locks alone: across PID namespaces, forks, copies, other users."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until, until_asleep

import sharpwave as sw
from sharpwave import _core
from sharpwave.errors import NotReady, StorageError


def row(number: float) -> dict[str, Any]:
    return {
        "obs": np.full(4, number, np.float32),
        "action": float(number),
        "reward": float(number),
        "next_obs": np.full(4, number, np.float32),
        "done": False,
    }


def numbers_in(buffer: sw.ReplayBuffer) -> list[float]:
    return sorted(float(number) for batch in buffer.rows() for number in batch["reward"])


def file_of(address: str) -> Path:
    if address.startswith("file://"):
        return Path(address.removeprefix("file://"))
    return Path(_core.shared_memory_folder) / f"sharpwave-{address.removeprefix('shm://')}.sw"


@pytest.fixture(params=["shm", "file"])
def address(request: Any, tmp_path: Path) -> str:
    (tmp_path / "run").mkdir()
    return request.getfixturevalue("shm_address") if request.param == "shm" else f"file://{tmp_path}/run/live.sw"


def make(address: str, capacity: int = 1_000, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(capacity, obs_shape=(4,), storage=address, seed=0, **options)


CHILD = """
import os, sys, numpy as np, sharpwave as sw
def row(number):
    obs = np.full(4, number)
    return dict(obs=obs, action=float(number), reward=float(number), next_obs=obs, done=False)
def say(*words): print(*words, flush=True)
def wait(): sys.stdin.readline()
buf = sw.open(sys.argv[1])
"""


class Child:
    """A process that does something with the buffer, step by step."""

    def __init__(self, code: str, address: str, *wrapper: str) -> None:
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-c", CHILD + code, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()  # first: at the end of its input, the child of `unshare` would end in order
        self.process.communicate()

    def end_in_its_namespace(self, address: str) -> None:
        """Ends `unshare`, whose child the kernel then kills: waits until that one is out of the buffer."""
        before = len(_core.Table.holders(str(file_of(address))))
        self.end()
        until(lambda: len(_core.Table.holders(str(file_of(address)))) < before, "the end of the process")


def can_unshare(*flags: str) -> bool:
    return shutil.which("unshare") is not None and (
        subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode == 0
    )


PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
needs_pid_namespaces = pytest.mark.skipif(
    not can_unshare(*PID_NAMESPACE[1:]), reason="this machine lets no test make a PID namespace"
)


@needs_pid_namespaces
def test_writer_in_another_pid_namespace_is_alive(address: str) -> None:
    with make(address) as buf:
        child = Child("buf.add(**row(0)); say('added'); wait(); buf.add(**row(1)); say('again'); wait()",
                      address, *PID_NAMESPACE)  # fmt: skip
        try:
            assert child.hear() == "added"
            stats = buf.stats()
            assert (stats["writers"], stats["writers_reclaimed"]) == (1, 0)
            for number in (5, 6, 7):
                buf.add(**row(number))
            child.go_on()
            assert child.hear() == "again"
            assert numbers_in(buf) == [0, 1, 5, 6, 7]
        finally:
            child.end()


@needs_pid_namespaces
def test_dead_process_is_not_taken_for_its_successor_with_the_same_id(address: str) -> None:
    """In a container every program has the same small process id."""
    with make(address, writers=3) as buf:
        for number in range(6):  # more than there are writers
            child = Child(f"buf.add(**row({number})); say(os.getpid()); wait()", address, *PID_NAMESPACE)
            assert child.hear() == "1"
            child.end_in_its_namespace(address)
        assert buf.stats()["writers"] == 0
        assert buf.stats()["writers_reclaimed"] == 6
        assert numbers_in(buf) == list(range(6))


@needs_pid_namespaces
def test_reservations_of_a_dead_process_in_another_namespace_end(address: str) -> None:
    pace = sw.Pace.samples_per_insert(1, 10, 100)
    with make(address, pace=pace) as buf:
        for number in range(100):
            buf.add(**row(number), timeout=0)
        code = (
            "import time\n"
            "before = buf.stats()['sample_calls']\n"
            f"it = buf.batches(20, prefetch=2, timeout={HANG_S})\n"
            "next(it)\n"
            "while buf.stats()['sample_calls'] < before + 2: time.sleep(0.001)\n"  # until one is drawn ahead
            "say('got one'); os._exit(1)"  # as if killed: to the signals that it sends itself, process 1 is deaf
        )
        for _ in range(4):
            child = Child(code, address, *PID_NAMESPACE)
            assert child.hear() == "got one"
            child.process.wait()
            child.end()
        assert len(buf.sample(5, timeout=HANG_S)["reward"]) == 5


def test_copying_and_reading_the_files_leaves_the_owner_inside(address: str, tmp_path: Path) -> None:
    with make(address) as buf:
        for number in range(10):
            buf.add(**row(number))
        shutil.copytree(file_of(address).parent if address.startswith("file") else tmp_path, tmp_path / "backup")
        shutil.copy(file_of(address), tmp_path / "copy.sw")
        file_of(address).read_bytes()
        child = Child("[buf.add(**row(n)) for n in range(100, 110)]; say(buf.stats()['recoveries']); wait()", address)
        try:
            assert child.hear() == "0"
            for number in range(10, 20):
                buf.add(**row(number))
            assert numbers_in(buf) == [*range(20), *range(100, 110)]
        finally:
            child.end()


def test_seat_is_held_while_threads_open_and_close(address: str) -> None:
    make(address).close()
    stop, lost = time.monotonic() + 1.0, []

    def work() -> None:
        while time.monotonic() < stop:
            with sw.open(address):
                if not _core.Table.holders(str(file_of(address))):
                    lost.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert _core.Table.holders(str(file_of(address))) == []


def test_killed_owner_is_gone_though_its_forked_worker_lives(address: str) -> None:
    code = """
buf.add(**row(1))
if os.fork() == 0:
    say(os.getpid()); import time; time.sleep(60); os._exit(0)
import time; time.sleep(60)
"""
    with make(address) as buf:
        child = Child(code, address)
        worker = int(child.hear())
        try:
            assert buf.stats()["writers"] == 1
            child.process.kill()
            child.process.wait()
            stats = buf.stats()
            assert (stats["writers"], stats["writers_reclaimed"]) == (0, 1)
        finally:
            os.kill(worker, signal.SIGKILL)
            child.end()


def test_program_that_the_owner_starts_keeps_nothing(address: str) -> None:
    buf = make(address)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as program:
        buf.close()
        assert _core.Table.holders(str(file_of(address))) == []
        program.kill()


def test_removed_or_replaced_buffer_is_not_joined_by_its_old_owners(address: str) -> None:
    with make(address) as old:
        old.add(**row(1))
        with make(address, exist="replace") as new:
            new.add(**row(2))
            with sw.open(address) as third:
                assert numbers_in(third) == [2]
            assert (numbers_in(old), numbers_in(new)) == ([1], [2])


def test_symbolic_link_is_refused(address: str, tmp_path: Path) -> None:
    with make(address):
        (tmp_path / "link.sw").symlink_to(file_of(address))
        with pytest.raises(StorageError, match="is a symbolic link; give the path of the file itself"):
            sw.open(f"file://{tmp_path}/link.sw")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")


@needs_root
@pytest.mark.parametrize("exist", ["attach", None])
def test_buffer_of_another_user_is_not_joined(address: str, exist: str | None) -> None:
    make(address).close()
    os.chown(file_of(address), 12345, 12345)
    file_of(address).chmod(0o666)
    with pytest.raises(StorageError, match="belongs to user 12345, this process runs as user 0"):
        make(address, exist=exist) if exist else sw.open(address)


# ---- the door --------------------------------------------------------------------------------------------------------

HOLD_DOOR = """
import fcntl, struct
file = open(sys.argv[1].replace('shm://', '/dev/shm/sharpwave-').replace('file://', '') +
            ('.sw' if sys.argv[1].startswith('shm') else ''), 'r+b')
fcntl.fcntl(file, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 1 << 62, 1, 0))  # F_OFD_SETLK
say('held'); wait()
"""


@pytest.fixture
def door_is_held(address: str) -> Iterator[Callable[[], Child]]:
    """Stands for a process that was stopped while it opened the buffer."""
    holders = []

    def hold() -> Child:
        holders.append(Child(HOLD_DOOR, address))
        assert holders[-1].hear() == "held"
        return holders[-1]

    yield hold
    for holder in holders:
        holder.end()


def test_opening_waits_at_the_door_no_longer_than_its_timeout(address: str, door_is_held: Any) -> None:
    with make(address):
        door_is_held()
        start = time.monotonic()
        with pytest.raises(NotReady, match=r"is being opened or closed by process \d+; .* give a longer timeout="):
            sw.open(address, timeout=0.3)
        assert 0.3 <= time.monotonic() - start < HANG_S, "the door stays held: longer waits have no end"


def test_interrupt_ends_the_wait_at_the_door(address: str, door_is_held: Any) -> None:
    with make(address):
        door_is_held()
        code = "import sys, sharpwave as sw; print('opens', flush=True); sw.open(sys.argv[1], timeout=600)"
        with subprocess.Popen(
            [sys.executable, "-c", code, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as opener:
            assert opener.stdout is not None
            opener.stdout.readline()
            until_asleep(opener.pid)
            opener.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in opener.communicate(timeout=HANG_S)[1]


@pytest.mark.timing
def test_closing_does_not_wait_for_a_stopped_opener(address: str, door_is_held: Any) -> None:
    buf = make(address)
    buf.add(**row(1))
    holder = door_is_held()
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before, start = ticks, time.monotonic()
    buf.close()
    during, took = ticks - before, time.monotonic() - start
    stop.set()
    thread.join()
    assert took < HANG_S, "the door stays held: longer waits have no end"
    assert during >= 3, "other threads went on meanwhile"
    holder.end()
    with sw.open(address) as again:
        assert numbers_in(again) == [1]


def test_interrupt_while_closing_waits_is_no_system_error(address: str, door_is_held: Any) -> None:
    buf = make(address)
    door_is_held()
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    main = threading.get_ident(), threading.get_native_id()

    def interrupt() -> None:
        until_asleep("self", main[1])
        signal.pthread_kill(main[0], signal.SIGUSR1)

    interrupter = threading.Thread(target=interrupt)

    def close_then_wait() -> None:
        interrupter.start()
        buf.close()
        time.sleep(HANG_S)  # the handler runs at the latest here

    try:
        with pytest.raises(KeyboardInterrupt):
            close_then_wait()
        interrupter.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
