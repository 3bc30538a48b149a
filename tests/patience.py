"""Waiting for what happens instead of for a while: a test that follows events runs alike beside any load.

Every bound here only ends a test that hangs. None is a claim about speed.
"""

from __future__ import annotations

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
        asleep = asleep + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.01)
        return asleep >= 10

    until(waits, f"the wait of process {pid}")


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
