"""`Child`: a child process at the other end of a channel. It ends with its parent, and its parent learns of its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import NotReady
from .channel import START, Channel
from .interpreter import python

__all__ = ["Child", "enter", "leave"]

_END_S = 10.0  # for a child to end by itself
_ORPHAN_S = 5.0  # the same where its parent is gone
_PASSED_BY = (signal.SIGINT, signal.SIGTERM)
_STATUS_S = 0.5  # from the end of its socket to the end of the process, at most, for its exit status


class Child(Channel):
    """A child process, as its parent sees it.

    The child ends with its parent, however that ends. It has a session of its own: Ctrl-C in a terminal does not reach
    it, and the programs that it has started end with it.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        end: socket.socket,
        what: str,
        on_frame: Callable[[int, int, bytes], None] | None = None,
    ) -> None:
        super().__init__(end, what, on_frame)
        self._process = process
        self._ready = self._calls[START] = self._loop.create_future()
        # The end of a child whose socket lives on in another process, which its code has started, is seen here only.
        # Other systems have no such files, and a sandbox may refuse them.
        self._file: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._file = os.pidfd_open(process.pid)
            self._loop.add_reader(self._file, self._note_death)

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        what: str,
        on_frame: Callable[[int, int, bytes], None] | None = None,
        *,
        ends: Sequence[socket.socket] = (),
    ) -> Child:
        """Starts a child that runs the function `main` of a module, and waits until it is ready.

        Args:
            ends: Of other socket pairs, which become the child's.

        Raises:
            SharpwaveError: What the child said before it was ready.
            NotReady: It ended and said nothing.
        """
        ours, its = socket.socketpair()
        with contextlib.ExitStack() as given:
            files = [given.enter_context(end).fileno() for end in (its, *ends)]
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_BY)  # the child's, until it has entered
            try:
                process = subprocess.Popen(
                    python(f"{module}:main", ",".join(map(str, files)), *arguments),
                    pass_fds=files, stdin=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        made = cls(process, ours, what, on_frame)
        try:
            await made._ready
        except BaseException:
            await made.close()
            raise
        return made

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> Any:
        """What the child said when it was ready."""
        return self._ready.result()

    def kill(self, why: str) -> None:
        """Ends the child at once. Calls without a reply raise NotReady with this text, and so does `join`."""
        self._kill()
        self._end(NotReady(why))

    async def close(self) -> None:
        """Ends the child. Calls without a reply fail with ClosedError. A second call does nothing."""
        if self._is_closed:
            return
        await super().close()
        try:
            await asyncio.to_thread(self._wait, _END_S)
        finally:
            self._kill()
            self._process.wait()

    def _wait(self, limit_s: float) -> None:
        """Until the child has ended, `limit_s` at most. It is not reaped: its number stays that of its session."""
        deadline, pause_s = time.monotonic() + limit_s, 0.001
        while self._process.returncode is None and not self._has_exited() and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(0.05, 2 * pause_s)

    def _has_exited(self) -> bool:
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        try:
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # this process ignores SIGCHLD: the system keeps nothing of a child that has ended
            return True

    def _kill(self) -> None:
        """The child, and what it has started: a run that goes on has no use for it."""
        if self._process.returncode is None:  # not reaped, so no other process has its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _lost(self) -> NotReady:
        self._wait(_STATUS_S)
        self._kill()
        code = self._process.poll()
        if code is None:
            return super()._lost()
        how = f"exit status {code}"
        if code < 0:
            how = f"by {_name_of(-code)}" + ("; out of memory?" if code == -signal.SIGKILL else "")
        return NotReady(f"the process of {self._what} has ended ({how}); its output says why")

    def _end(self, error: Exception) -> None:
        super()._end(error)
        if self._file is not None:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = None

    def _note_death(self) -> None:
        arrived = select.poll()
        arrived.register(self._socket, select.POLLIN)
        while not self._ended.done() and arrived.poll(0):
            self._read()  # what it said before, and the end where no other process has its socket
        if not self._ended.done():
            self._end(self._lost())


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def enter(files: str) -> list[socket.socket]:
    """The sockets that a child was given: of its parent, then of `Child.start(ends=)`.

    From then on this process ends with its parent: by itself, because its socket ends, or some seconds later, where its
    own code stands still. Programs that it has started end with it. Signals to all processes of a run, as a cluster's
    scheduler sends them, are the parent's to answer; those that came before have waited.
    """
    for number in _PASSED_BY:
        signal.signal(number, _pass_by)  # programs that this one starts would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_BY)
    os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals, after_in_child=_answer_signals)
    parent, *others = [socket.socket(fileno=int(file)) for file in files.split(",")]
    for end in (parent, *others):
        end.set_inheritable(False)  # a copy in another program would keep the connection open after this process's end
    atexit.register(_end_session, os.getpid(), parent)
    threading.Thread(target=_end_with, args=(os.getpid(), parent), daemon=True).start()
    return [parent, *others]


def _pass_by(number: int, frame: object) -> None:
    """Nothing ends by this signal."""


_masks = threading.local()  # `before`: that of the thread that forks


def _hold_signals() -> None:
    """Before a fork: a signal that meets the new process before it has handlers of its own waits for them."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_BY)


def _let_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _answer_signals() -> None:
    """In a forked process, which inherits handlers: `multiprocessing` ends its processes by SIGTERM."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        _let_signals()


def leave() -> NoReturn:
    """Ends a child whose parent is gone, or has closed its end, without what Python does at an exit."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if os.getpid() == os.getpgid(0):  # its session is its own
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _end_with(process: int, parent: socket.socket) -> None:
    hang_up = select.poll()
    hang_up.register(parent, 0)  # nothing is waited for but the end
    hang_up.poll()
    time.sleep(_ORPHAN_S)
    _end_session(process, parent)
    os._exit(1)


def _end_session(process: int, parent: socket.socket) -> None:
    """At the exit of a child: a parent that is dead cannot end the programs that the child has started.

    Args:
        process: The child. A process that was forked from it inherits this hook, and its exit ends nothing.
        parent: The connection. A parent that still has its end ends the session itself.
    """
    if os.getpid() != process or parent.fileno() < 0:
        return
    hung_up = select.poll()
    hung_up.register(parent, 0)
    if hung_up.poll(0):
        leave()
