"""How a server's process begins and ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["BadStart", "stop_signals"]


class BadStart(Exception):
    """The server could not begin: a wrong configuration or address, a port in use. The command exits with code 2."""


@contextlib.contextmanager
def stop_signals() -> Iterator[int]:
    """A descriptor that can be read after the first SIGTERM or SIGINT. The next one has its default effect."""
    read, write = os.pipe()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def tell(number: int, frame: FrameType | None) -> None:
        os.write(write, b".")
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    for number in before:
        signal.signal(number, tell)
    try:
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)
