"""`EventLog`: what happened in a run and when, as JSON lines. Equal runs have equal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from .clock import Clock

__all__ = ["EventLog", "no_log"]


class EventLog:
    """A line for each event, in memory or in a file that is appended to.

    Args:
        clock: The time of each event.
        path: The file; None keeps lines in `lines`.
    """

    def __init__(self, clock: Clock, path: str | Path | None = None) -> None:
        self._clock = clock
        self.lines: list[str] = []
        self._file: IO[str] | None = None
        if path is not None:
            self._file = Path(path).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 (closed by close)

    def __call__(self, event: str, **about: Any) -> None:
        line = json.dumps({"s": round(self._clock.now(), 9), "event": event, **about})
        if self._file is None:
            self.lines.append(line)
        else:
            self._file.write(line + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def no_log(event: str, **about: Any) -> None:
    """Keeps nothing."""
