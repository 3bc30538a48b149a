"""Keeper: one thread that tells the servers of this process's sessions that it lives."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Session

__all__ = ["keep", "keep_writer"]

_LOOK_S = 0.1


class _Keeper:
    def __init__(self) -> None:
        self._sessions: weakref.WeakKeyDictionary[Session, Any] = weakref.WeakKeyDictionary()  # with their sockets
        self._writers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()

    def add(self, session: Session) -> None:
        with self._lock:
            self._sessions[session] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sharpwave-keeper", daemon=True)
                self._thread.start()

    def add_writer(self, writer: Any) -> None:
        with self._lock:
            self._writers.add(writer)

    def leave_to_parent(self) -> None:
        """In a forked process. Without the lock, which a thread of the parent may have held."""
        for writer in list(self._writers):
            writer.leave_to_parent()

    def _run(self) -> None:
        while (pause := self._look()) is not None:  # no reference to a session stays while this thread sleeps
            time.sleep(pause)

    def _look(self) -> float | None:
        """Seconds until the next look; None: there is nothing to look after."""
        with self._lock:
            sessions, writers = list(self._sessions), list(self._writers)
            if not sessions:
                self._thread = None
                return None
        pause = 1.0
        for session in sessions:
            if session.closed:
                with self._lock:
                    socket = self._sessions.pop(session, None)
                if socket is not None:
                    socket.close(0)
                continue
            session.dropped.close_aside()
            pause = min(pause, session.client_timeout / 10)
            if session.number and time.monotonic() - session.sent_at > session.client_timeout / 5:
                with contextlib.suppress(Exception):  # no socket is free: the next look tries again
                    self._beat(session)
        for writer in writers:
            with contextlib.suppress(Exception):  # the caller's next add meets the same error
                writer.send_old()
            pause = min(pause, _LOOK_S)
        return pause

    def _beat(self, session: Session) -> None:
        with self._lock:
            socket = self._sessions.get(session)
        if socket is None:
            socket = session.connect()
            with self._lock:
                self._sessions[session] = socket
        session.sent_at = time.monotonic()
        session.beat(socket)


_keeper = _Keeper()


def keep(session: Session) -> None:
    """Sends heartbeats for a session until it is closed or collected."""
    _keeper.add(session)


def keep_writer(writer: Any) -> None:
    """Lets a writer send the rows that have waited for long, until it is collected."""
    _keeper.add_writer(writer)


def _after_fork() -> None:
    global _keeper
    _keeper.leave_to_parent()
    _keeper = _Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
