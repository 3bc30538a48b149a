"""A server in a process of its own, for tests that kill it: what it serves is told by a function of this module."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from typing import Any

from patience import pause

import sharpwave as sw

__all__ = ["ServerChild"]

processes = mp.get_context("forkserver")
processes.set_forkserver_preload(["numpy", "zmq", "sharpwave", "sharpwave.service.server", "sharpwave.buffers.open"])


def _run(
    make: Callable[..., Any], arguments: tuple[Any, ...], address: str, options: dict[str, Any], pipe: Any
) -> None:
    buffer = make(*arguments)
    server = sw.serve({"it": buffer}, address, **options)
    pipe.send(server.address)
    pipe.recv()  # until the test ends it
    server.close()
    buffer.close()


class ServerChild:
    """Serves what ``make(*arguments)`` returns, under the name ``it``.

    ``start`` after ``kill`` listens on the same address again, as a server that a supervisor restarts.
    """

    def __init__(
        self, make: Callable[..., Any], *arguments: Any, address: str = "tcp://127.0.0.1:0", **options: Any
    ) -> None:
        self._make, self._arguments, self._options = make, arguments, options
        self.server = address
        self.start()

    @property
    def address(self) -> str:
        return f"{self.server}/it"

    def start(self) -> None:
        self._pipe, theirs = processes.Pipe()
        self.process = processes.Process(
            target=_run, args=(self._make, self._arguments, self.server, self._options, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.server = self._pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def pause(self) -> None:
        assert self.process.pid is not None
        pause(self.process.pid)

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.is_alive():
            self.go_on()  # a test that failed may have left it stopped
            self._pipe.send(None)
            self.process.join()

    def __enter__(self) -> ServerChild:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
