"""Processes that are killed while they work: functions of a module, or some lines of Python."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from patience import HANG_S

processes = mp.get_context("forkserver")
processes.set_forkserver_preload(["numpy", "sharpwave"])


@contextmanager
def process(work: Any, *arguments: Any) -> Iterator[Any]:
    child = processes.Process(target=work, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join(HANG_S)


def kill_after(child: Any, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(child.pid, signal.SIGKILL)
    child.join(HANG_S)


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready" when it has begun; killed at the end, wherever it is."""
    head = "import sys, numpy as np, sharpwave as sw\n"
    process = subprocess.Popen([sys.executable, "-c", head + code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
