"""Waits: to the caller's deadline, by a steady clock, without the interpreter's lock, ended by Ctrl-C; and at exit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import make, row, rows
from patience import HANG_S, seconds_of_other_threads, until, until_asleep, until_thread_waits

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError, StorageError

SOAK = int(os.environ.get("SHARPWAVE_SOAK", "0"))
HELD_ROWS = 200_000  # so many priorities at once keep the index lock for some milliseconds


def python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


@contextmanager
def stopped_in_the_index(address: str) -> Iterator[int]:
    """A process that was stopped while it held the index lock; its id."""
    child = python(
        f"""
        import sys
        import numpy as np, sharpwave as sw
        buffer = sw.open(sys.argv[1])
        serials, values = np.arange({HELD_ROWS}), np.ones({HELD_ROWS}, np.float32)
        print("in", flush=True)
        while True:
            buffer._rows.table.update_priorities(serials, values)
        """,
        address,
    )
    probe = sw.open(address)
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    try:
        deadline = time.monotonic() + HANG_S
        while True:
            os.kill(child.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # it may run on for an instant
            try:
                probe.sample(1, timeout=0)
            except NotReady:
                break
            assert time.monotonic() < deadline, "the other process was never stopped inside the lock"
            os.kill(child.pid, signal.SIGCONT)
            time.sleep(0.001)
        yield child.pid
    finally:
        end(child)
        probe.close()


def shared(address: str, **options: Any) -> sw.ReplayBuffer:
    buffer = make(HELD_ROWS, sampler=sw.Prioritized(), storage=address, num_envs=1, **options)
    buffer.add(**rows(range(1000)))
    return buffer


# ---- the index lock --------------------------------------------------------------------------------------------------


def calls(buffer: sw.ReplayBuffer, timeout: float) -> dict[str, Callable[[], Any]]:
    few, many, out = np.arange(8), np.arange(20_000), buffer.sample(8)
    known = {
        "sample": lambda: buffer.sample(8, timeout=timeout),
        "sample many": lambda: buffer.sample(30_000, timeout=timeout),
        "sample into out": lambda: buffer.sample(8, out=out, timeout=timeout),
        "update few": lambda: buffer.update_priorities(few, np.ones(8), timeout=timeout),
        "update a list": lambda: buffer.update_priorities(few.tolist(), [1.0] * 8, timeout=timeout),
        "update many": lambda: buffer.update_priorities(many, np.ones(len(many)), timeout=timeout),
    }
    if buffer.pace is not None:
        known["add"] = lambda: buffer.add(**rows([0]), timeout=timeout)
    return known


@pytest.mark.parametrize("pace", [None, sw.Pace.min_size(1)], ids=["no pace", "pace"])
def test_calls_obey_their_timeout_while_a_stopped_process_holds_the_index(shm_address: str, pace: Any) -> None:
    buffer = shared(shm_address, pace=pace)
    known = calls(buffer, 0.4)
    before = buffer.stats()["updates_applied"]
    with stopped_in_the_index(shm_address) as holder:
        for name, call in known.items():
            began = time.monotonic()
            with pytest.raises(NotReady, match=f"held by process {holder}, which did not let go"):
                call()
            assert 0.3 < time.monotonic() - began < HANG_S, f"{name}: the lock stays held, longer waits have no end"
    assert buffer.stats()["updates_applied"] >= before
    buffer.sample(8, timeout=HANG_S)  # its holder is dead: the index is made anew
    buffer.close(unlink=True)


@pytest.mark.parametrize("pace", [None, sw.Pace.min_size(1)], ids=["no pace", "pace"])
def test_other_threads_go_on_while_calls_wait_for_the_index(shm_address: str, pace: Any) -> None:
    """It is this thread that ends their waits: a call that kept the interpreter would first wait its whole time."""
    buffer = shared(shm_address, pace=pace)
    known = calls(buffer, HANG_S / 2)
    with stopped_in_the_index(shm_address) as holder, ThreadPoolExecutor(8) as pool:
        waiting = {name: pool.submit(call) for name, call in known.items()}
        for thread in pool._threads:
            until_thread_waits(thread)
        assert not [name for name, call in waiting.items() if call.done()]
        os.kill(holder, signal.SIGKILL)
        for call in waiting.values():
            call.result(HANG_S)
    assert buffer.stats()["index_takeovers"] == 1
    buffer.close(unlink=True)


def test_timeout_zero_does_not_wait_for_a_stopped_process(shm_address: str) -> None:
    buffer = shared(shm_address)
    with stopped_in_the_index(shm_address):
        began = time.monotonic()
        with pytest.raises(NotReady, match="held by process"):
            buffer.sample(8, timeout=0)
        assert time.monotonic() - began < HANG_S, "the lock stays held: a wait has no end"
    buffer.close(unlink=True)


def test_calls_without_a_timeout_go_on_when_the_holder_dies(shm_address: str) -> None:
    buffer = shared(shm_address)
    with stopped_in_the_index(shm_address) as holder:
        threading.Timer(0.3, os.kill, (holder, signal.SIGKILL)).start()
        assert len(buffer.sample(8)["indices"]) == 8
    assert buffer.stats()["index_takeovers"] == 1
    buffer.close(unlink=True)


@pytest.mark.parametrize(
    "call",
    [
        "buffer.sample(8)",
        "buffer.save(sys.argv[2])",
        "next(buffer.batches(8))",
    ],
)
def test_ctrl_c_ends_a_wait_for_the_index(shm_address: str, tmp_path: Path, call: str) -> None:
    buffer = shared(shm_address)
    with stopped_in_the_index(shm_address):
        child = python(
            f"""
            import sys
            import numpy as np, sharpwave as sw
            buffer = sw.open(sys.argv[1])
            print("in", flush=True)
            {call}
            """,
            shm_address,
            str(tmp_path / "snapshot"),
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "in\n"
        until_asleep(child.pid)
        child.send_signal(signal.SIGINT)
        try:
            _, errors = child.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            end(child)
            pytest.fail("Ctrl-C did not end it")
        assert "KeyboardInterrupt" in errors
        assert list(tmp_path.iterdir()) == []
    buffer.close(unlink=True)


# ---- the clock and signals -------------------------------------------------------------------------------------------


def shim(folder: Path, code: str) -> dict[str, str]:
    """An environment in which a C function stands before the system's own."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text("#define _GNU_SOURCE\n#include <dlfcn.h>\n" + textwrap.dedent(code))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(library)}


SET_BACK = """
    #include <time.h>
    #include <unistd.h>
    // CLOCK_REALTIME is an hour behind once the file is there.
    int clock_gettime(clockid_t id, struct timespec* now) {
        static int (*real)(clockid_t, struct timespec*);
        if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
        int code = real(id, now);
        if (id == CLOCK_REALTIME && access("STEP", F_OK) == 0) now->tv_sec -= 3600;
        return code;
    }
"""


@pytest.mark.parametrize(
    "call",
    [
        "buffer.sample(4, timeout=1)",
        "sw.open(f'file://{folder}/absent.sw', wait=True, timeout=1)",
    ],
)
def test_a_clock_that_is_set_back_moves_no_deadline(tmp_path: Path, call: str) -> None:
    step = tmp_path / "step"
    child = python(
        f"""
        import sys, threading, time, pathlib
        import sharpwave as sw
        folder = pathlib.Path(sys.argv[1])
        buffer = sw.ReplayBuffer(100, obs_shape=(2,), pace=sw.Pace.min_size(10))
        threading.Timer(0.3, (folder / "step").touch).start()
        began = time.monotonic()
        try:
            {call}
        except sw.errors.SharpwaveError as error:
            print(time.monotonic() - began)
        """,
        str(tmp_path),
        env=shim(tmp_path, SET_BACK.replace("STEP", str(step))),
    )
    try:
        text, errors = child.communicate(timeout=2 * HANG_S)
    except subprocess.TimeoutExpired:
        end(child)
        pytest.fail("it waits for the clock to come back")
    assert errors == ""
    assert 0.9 < float(text) < HANG_S, "the clock comes back after an hour"


INTERRUPTED = """
    #include <errno.h>
    #include <fcntl.h>
    #include <unistd.h>
    // As kernels do whose shared memory gives back what it got when a signal comes: here with every call that is large.
    int posix_fallocate(int fd, off_t offset, off_t bytes) {
        static int (*real)(int, off_t, off_t);
        if (!real) real = dlsym(RTLD_NEXT, "posix_fallocate");
        if (bytes <= LARGE) return real(fd, offset, bytes);
        close(creat("SEEN", 0600));
        return EINTR;
    }
    int posix_fallocate64(int fd, off_t offset, off_t bytes) { return posix_fallocate(fd, offset, bytes); }
"""
LARGE_BUFFER = """
    import sys
    import sharpwave as sw
    print("in", flush=True)
    sw.ReplayBuffer(200_000, obs_shape=(17,), storage=sys.argv[1]).close(unlink=True)
"""


def interrupted(folder: Path, most_bytes: int) -> dict[str, str]:
    """Larger calls are interrupted, and the file "interrupted" tells of it."""
    seen = str(folder / "interrupted")
    return shim(folder, INTERRUPTED.replace("LARGE", str(most_bytes)).replace("SEEN", seen))


def test_signals_do_not_fail_the_making_of_a_large_buffer(shm_address: str, tmp_path: Path) -> None:
    child = python(LARGE_BUFFER, shm_address, env=interrupted(tmp_path, 1 << 20))
    assert child.communicate(timeout=2 * HANG_S) == ("in\n", "")
    assert (tmp_path / "interrupted").exists()


def test_ctrl_c_ends_the_making_of_a_large_buffer(shm_address: str, tmp_path: Path) -> None:
    child = python(LARGE_BUFFER, shm_address, env=interrupted(tmp_path, 0))
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    until((tmp_path / "interrupted").exists)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    try:
        assert "KeyboardInterrupt" in child.communicate(timeout=HANG_S)[1]
    finally:
        end(child)


# ---- loops -----------------------------------------------------------------------------------------------------------


def test_batches_of_an_empty_buffer_burn_no_core() -> None:
    buffer = make(100)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(next(buffer.batches(4))))
    thread.start()
    until_thread_waits(thread)
    assert seconds_of_other_threads(0.5) < 0.15
    buffer.add(**row(1))
    thread.join(HANG_S)
    assert len(got) == 1
    buffer.close()


def test_batches_of_an_empty_buffer_obey_their_timeout() -> None:
    buffer = make(100)
    began = time.monotonic()
    with pytest.raises(NotReady):
        next(buffer.batches(4, timeout=0.3))
    assert 0.25 < time.monotonic() - began < HANG_S
    buffer.close()


def test_a_paced_sample_waits_until_a_window_fits() -> None:
    buffer = make(100, view=sw.Windows(20, end="stop"), pace=sw.Pace.min_size(5), num_envs=1)
    buffer.add(**rows(range(10)))
    with pytest.raises(NotReady, match="0 of 10 rows can start an example of the view, 1 must"):
        buffer.sample(2, timeout=0.05)
    threading.Timer(0.1, lambda: buffer.add(**rows(range(10, 30)))).start()
    assert buffer.sample(2, timeout=HANG_S)["obs"].shape[:2] == (2, 20)
    buffer.close()


def test_adding_goes_on_while_no_window_fits() -> None:
    pace = sw.Pace(samples_per_insert=1.0, min_size=1, min_diff=-8, max_diff=8)
    buffer = make(100, view=sw.Windows(20, end="stop"), pace=pace, num_envs=1)
    for i in range(20):
        buffer.add(**rows([i]), timeout=0)  # nothing could be sampled meanwhile
    with pytest.raises(NotReady, match="adding waits"):
        buffer.add(**rows([20]), timeout=0)
    assert buffer.sample(2, timeout=0)["obs"].shape[:2] == (2, 20)
    buffer.close()


def test_stats_asks_the_kernel_for_huge_pages_only_when_told_to() -> None:
    def read_bytes() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    buffer = make(200_000)  # large enough for huge pages
    once = read_bytes()
    Path("/proc/self/smaps").read_bytes()
    once = read_bytes() - once
    before = read_bytes()
    plain = buffer.stats()
    for _ in range(50):
        buffer.stats()
    assert read_bytes() - before < once / 2, "the first call does not read it either"
    assert plain["storage_bytes"] > 4 << 20
    assert "huge_page_bytes" not in plain
    before = read_bytes()
    told = buffer.stats(huge_pages=True)
    assert read_bytes() - before > once / 2
    assert 0 <= told["huge_page_bytes"] <= told["storage_bytes"]
    assert plain.keys() == told.keys() - {"huge_page_bytes"}
    with pytest.raises(SchemaError, match=r"stats\(\): huge_pages: expected True or False, got 1"):
        buffer.stats(huge_pages=1)  # type: ignore[arg-type]
    buffer.close()


# ---- saving ----------------------------------------------------------------------------------------------------------

SLOW_WRITES = """
    #include <fcntl.h>
    #include <time.h>
    #include <unistd.h>
    // Part of an index is not written until somebody says so.
    ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
        static ssize_t (*real)(int, const void*, size_t, off_t);
        if (!real) real = dlsym(RTLD_NEXT, "pwrite");
        if (bytes == 65536 * 8) {
            close(creat("FOLDER/writes", 0600));
            while (access("FOLDER/go on", F_OK) != 0) nanosleep(&(struct timespec){0, 1000000}, 0);
        }
        return real(fd, data, bytes, offset);
    }
    ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t offset) { return pwrite(fd, data, bytes, offset); }
"""


def test_a_slow_disk_keeps_the_index_from_nobody(tmp_path: Path) -> None:
    child = python(
        """
        import pathlib, sys, threading, time
        import numpy as np, sharpwave as sw
        folder = pathlib.Path(sys.argv[1])
        buffer = sw.ReplayBuffer(70_000, schema={"obs": sw.Field((), "float32")}, next_obs=None,
                                 sampler=sw.Prioritized())
        zeros = np.zeros(70_000, np.float32)
        buffer.add(obs=zeros, reward=zeros, done=zeros)
        saver = threading.Thread(target=buffer.save, args=(folder / "snapshot",))
        saver.start()
        while not (folder / "writes").exists():
            assert saver.is_alive(), "the shim was not used"
            time.sleep(0.001)
        try:
            for _ in range(100):
                buffer.sample(32, timeout=20)
            assert saver.is_alive(), "the write was over before"
        finally:
            (folder / "go on").touch()
        saver.join()
        """,
        str(tmp_path),
        env=shim(tmp_path, SLOW_WRITES.replace("FOLDER", str(tmp_path))),
    )
    assert child.communicate(timeout=2 * HANG_S) == ("", "")
    assert len(sw.open(tmp_path / "snapshot")) == 70_000


# ---- at exit ---------------------------------------------------------------------------------------------------------

AT_EXIT = """
    import os, sys, threading, time
    import numpy as np, sharpwave as sw
    what, seconds, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    values = np.zeros((20000, 50), np.float32)
    many = dict(obs=values, action=values[:, 0], reward=values[:, 0], next_obs=values, done=np.zeros(20000, bool))
    buffer = sw.ReplayBuffer(20000, obs_shape=(50,), seed=0)
    buffer.add(**many)
    if what == "load":
        buffer.save(folder + "/snapshot")
    weighted = sw.ReplayBuffer(20000, obs_shape=(50,), seed=0, sampler=sw.Prioritized())
    weighted.add(**many)
    trajectories = sw.TrajectoryReplayBuffer(folder + "/trajectories") if what == "trajectories" else None
    one = sw.Trajectory(actions=np.zeros((600, 8, 3), np.float32), rewards=np.zeros((600, 8), np.float32))
    flat = np.zeros((2000, 100), np.float32)
    paced = sw.ReplayBuffer(100, obs_shape=(2,), pace=sw.Pace.min_size(10))
    doubles = {name: value.astype(np.float64)[:500] for name, value in many.items()}

    def update():
        batch = weighted.sample(4096)
        weighted.update_priorities(batch["indices"], np.ones(4096))

    def store():
        trajectories.add(one)
        trajectories.sample(64)

    jobs = {
        "save": lambda: buffer.save(folder + "/snapshot"),
        "load": lambda: sw.open(folder + "/snapshot"),
        "sample": lambda: buffer.sample(20000),
        "add": lambda: buffer.add(**many),
        "add with care": lambda: buffer.add(**doubles),
        "rows": lambda: list(buffer.rows()),
        "stats": lambda: buffer.stats(),
        "update": update,
        "trajectories": store,
        "gae": lambda: sw.returns.gae(flat, flat, flat, flat[0]),
        "wait": lambda: paced.sample(4),
        "file": lambda: sw._core.wait_for_file(folder + "/absent", 60),
    }

    def work():
        while True:
            jobs[what]()

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(seconds)
    sys.exit(0)
"""
JOBS = [
    "save",
    "load",
    "sample",
    "add",
    "add with care",
    "rows",
    "stats",
    "update",
    "trajectories",
    "gae",
    "wait",
    "file",
]


@pytest.mark.parametrize("what", JOBS)
def test_threads_inside_the_engine_at_exit_harm_nothing(tmp_path: Path, what: str) -> None:
    for i in range(max(1, SOAK)):
        folder = tmp_path / str(i)
        folder.mkdir()
        child = python(AT_EXIT, what, str(0.05 + 0.03 * (i % 8)), str(folder))
        try:
            _, errors = child.communicate(timeout=2 * HANG_S)
        except subprocess.TimeoutExpired:
            end(child)
            pytest.fail("it hangs at its end")
        assert (child.returncode, errors) == (0, "")


def test_a_program_that_ends_its_threads_leaks_no_object(tmp_path: Path) -> None:
    child = python(
        """
        import sys
        import numpy as np, sharpwave as sw
        sw._core.set_leak_warnings(True)
        buffer = sw.ReplayBuffer(100, obs_shape=(2,), sampler=sw.Prioritized(), pace=sw.Pace.min_size(1))
        buffer.add(np.zeros(2), 0.0, 0.0, np.zeros(2), False)
        for batch in buffer.batches(4):
            buffer.update_priorities(batch["indices"], np.ones(4))
            break
        buffer.save(sys.argv[1])
        sw.open(sys.argv[1]).close()
        list(buffer.rows())
        """,
        str(tmp_path / "snapshot"),
    )
    assert child.communicate(timeout=2 * HANG_S) == ("", "")
    assert child.returncode == 0


def test_leak_warnings_tell_of_objects_when_they_are_turned_on() -> None:
    child = python(
        """
        import threading, time
        import sharpwave as sw
        sw._core.set_leak_warnings(True)
        sleeps = threading.Event()
        def sleep(buffer):
            sleeps.set()
            time.sleep(1000)
        threading.Thread(target=sleep, args=(sw.ReplayBuffer(10, obs_shape=(2,)),), daemon=True).start()
        sleeps.wait()
        """
    )
    assert "nanobind: leaked" in child.communicate(timeout=2 * HANG_S)[1]


def test_no_binding_lets_go_of_the_interpreter_by_another_guard() -> None:
    folder = Path(__file__).parents[2] / "bindings"
    for path in folder.iterdir():
        if path.stem == "interpreter":
            continue
        for word in ("gil_scoped_release", "PyEval_SaveThread", "Py_BEGIN_ALLOW_THREADS", "PyGILState_Ensure"):
            assert word not in path.read_text(), f"{path.name}: use PatientRelease instead of {word}"


def test_open_waits_for_a_creator(shm_address: str) -> None:
    creator = """
    import sys, time
    import sharpwave as sw
    print("ready", flush=True)
    time.sleep(0.3)  # mostly the other process waits by then; where it does not yet, it finds the buffer
    buf = sw.ReplayBuffer(7, obs_shape=(1,), storage=sys.argv[1])
    time.sleep(600)
    """
    with pytest.raises(StorageError, match="No such file"):
        sw.open(shm_address)
    for seconds in (0, 0.05):
        with pytest.raises(NotReady, match=f"was not created within timeout={seconds}; give a longer timeout="):
            sw.open(shm_address, wait=True, timeout=seconds)
    child = python(creator, shm_address)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        buffer = sw.open(shm_address, wait=True, timeout=60)
        assert buffer.capacity == 7
    finally:
        end(child)
    buffer.close(unlink=True)
