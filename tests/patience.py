"""Waiting for what happens instead of for a while: a test that follows events runs alike beside any load.

Every bound here only ends a test that hangs. None is a claim about speed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 100.0  # no step of any test takes so long on a loaded machine, unless it waits for ever


def until(holds: Callable[[], bool], what: str = "what the test waits for") -> None:
    deadline = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.002)


def until_asleep(pid: int | str, thread: int | None = None) -> None:
    """Until a process (or one of its threads, by its native id) waits for something, and goes on waiting.

    Several looks in a row: on its way into a wait it may sleep for an instant, for a lock or for another thread.
    """
    stat, asleep = Path(f"/proc/{pid}/task/{thread or pid}/stat"), 0

    def waits() -> bool:
        nonlocal asleep
        asleep = asleep + 1 if _state(stat) == "S" else 0
        time.sleep(0.01)
        return asleep >= 10

    until(waits, f"the wait of process {pid}")


def pause(pid: int) -> None:
    """Stops a process. ``kill`` returns before its threads stand still: beside a load they may still answer."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(task / "stat") in "TZX" for task in tasks.iterdir()), f"the stop of process {pid}")


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
        return "X"


def until_thread_waits(thread: threading.Thread) -> None:
    """The same for a thread of this process."""
    until(lambda: thread.native_id is not None)
    until_asleep("self", thread.native_id)


def seconds_of_other_threads(own_s: float) -> float:
    """Takes so many seconds of processor time, and tells how many the other threads of this process took meanwhile.

    A thread that tries again and again takes about as many, however loaded the machine is; one that waits, next to
    none.
    """
    others = time.process_time() - time.thread_time()
    end = time.thread_time() + own_s
    while time.thread_time() < end:
        pass
    return time.process_time() - time.thread_time() - others
