"""Dropped: writers that were collected without ``close()``, and whose streams are open at a server."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from typing import Protocol

from ..errors import SharpwaveError

__all__ = ["Dropped"]


class Closable(Protocol):
    def close(self) -> None: ...


class Dropped:
    """Of one session. The keeper looks here and lets a thread close them: their rows arrive, their episodes end."""

    def __init__(self) -> None:
        self._writers: deque[Closable] = deque()
        self._closing = threading.Lock()

    def put(self, writer: Closable) -> None:
        """Called while a writer is collected, which may be in the middle of anything: takes no lock."""
        self._writers.append(writer)

    def close_aside(self) -> None:
        """In a thread of its own, which may wait for the server; the keeper's heartbeats go on meanwhile."""
        if self._writers and not self._closing.locked():
            threading.Thread(target=self.close, name="sharpwave-dropped", daemon=True).start()

    def close(self) -> None:
        with self._closing:
            while self._writers:
                try:
                    self._writers.popleft().close()
                except SharpwaveError as error:
                    warnings.warn(f"a writer was dropped without close(): {error}", RuntimeWarning, stacklevel=2)
