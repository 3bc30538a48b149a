"""Runs a server and ends it with its parent: `python guard.py GRACE_S COMMAND...`. Uses only the standard library.

`ServerProcess` starts this. The parent keeps the other end of our standard input open. When the parent ends, however it
ends, we read the end of the file and end the server. The first line of our standard output is the server's process id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _die_with_parent(guard: int) -> None:
    # The kernel sends the signal when this guard's main thread ends: a killed guard leaves no server behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:  # it was killed before
        os._exit(1)


def _end_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main() -> int:
    grace_s, command, guard = float(sys.argv[1]), sys.argv[2:], os.getpid()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())  # first: there is no moment at which it leaves a server
    # Its own session: the server's helper processes are in its process group, and can be ended with it.
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        start_new_session=True,
        preexec_fn=lambda: _die_with_parent(guard),
    )
    print(server.pid, flush=True)

    def watch_parent() -> None:
        while os.read(0, 4096):
            pass
        stopping.set()

    def stop() -> None:
        stopping.wait()
        _end_group(server.pid, signal.SIGTERM)
        try:
            server.wait(grace_s)
        except subprocess.TimeoutExpired:
            _end_group(server.pid, signal.SIGKILL)

    for work in (watch_parent, stop):
        threading.Thread(target=work, daemon=True).start()
    code = server.wait()
    _end_group(server.pid, signal.SIGKILL)  # helper processes that outlive a killed server would keep its memory
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
