"""`ServerProcess`: a generation server as a child process, which ends with its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ...errors import NotReady, StorageError

__all__ = ["ServerProcess"]

_GUARD = Path(__file__).with_name("guard.py")
_TAIL_BYTES = 16 << 10  # of a log, for error messages


class ServerProcess:
    """A command that serves at 127.0.0.1. A client that gets it starts it, starts it again when it dies, and stops it.

    Args:
        command: Program and arguments. "{port}" becomes the port, which is chosen at each start.
        env: Added to the environment of this process.
        log: A file that the output of the server is appended to; None discards it.
        ready_s: A start that takes longer has failed.
        grace_s: The time between SIGTERM and SIGKILL when it is stopped.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: str | Path | None = None,
        ready_s: float = 600.0,
        grace_s: float = 10.0,
    ) -> None:
        self.command, self.env, self.ready_s, self.grace_s = list(command), dict(env or {}), ready_s, grace_s
        self.log = None if log is None else Path(log)
        self.port = 0
        self.pid: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def start(self) -> None:
        """Starts it. It may not answer yet when this returns.

        Raises:
            NotReady: The program cannot be started.
            StorageError: The log cannot be written, or no process or file number is left.
        """
        if self.is_alive:
            return
        self._release()
        try:
            self._begin()
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self.command[0]} cannot be started: {error}") from error
        assert self._guard is not None
        assert self._guard.stdout is not None
        line = self._guard.stdout.readline()
        if not line:
            self._guard.wait()
            raise NotReady(f"{self.command[0]} cannot be started{self.tail()}")
        self.pid = int(line)

    def _begin(self) -> None:
        self.port = _free_port()
        command = [part.replace("{port}", str(self.port)) for part in self.command]
        with self._open_log() as log:
            # In a session of its own: Ctrl-C at a terminal reaches this process only, which then stops the server.
            self._guard = subprocess.Popen(
                [sys.executable, str(_GUARD), str(self.grace_s), *command],
                env={**os.environ, **self.env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when it has ended."""
        if self._guard is not None:
            if self._guard.poll() is None:
                self._guard.send_signal(signal.SIGTERM)
            self._guard.wait()
        self._release()

    def tail(self, count: int = 12) -> str:
        """The end of the log, for error messages."""
        if self.log is None:
            return "; give ServerProcess(log=) to see its output"
        try:
            with self.log.open("rb") as file:  # a log of weeks does not fit into memory
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                lines = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
        except OSError:
            lines = []
        return f"; {self.log} ends with:\n" + "\n".join(lines)

    def _release(self) -> None:
        if self._guard is not None:
            for pipe in (self._guard.stdin, self._guard.stdout):
                if pipe is not None:
                    pipe.close()
        self._guard, self.pid = None, None

    def _open_log(self) -> IO[bytes]:
        try:
            return open(os.devnull if self.log is None else self.log, "ab")
        except OSError as error:
            raise StorageError(f"ServerProcess(log={str(self.log)!r}) cannot be written: {error.strerror}") from error


def _free_port() -> int:
    # Servers of others take a number, not a socket: between here and their start another program could take the port.
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
