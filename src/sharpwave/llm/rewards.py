"""`Rewards`: a reward function in other processes, with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checks import number, told, whole
from ..errors import NotReady, SchemaError
from .items import Item

__all__ = ["Rewards"]

_SCRIPT = Path(__file__).with_name("reward_process.py")
_START_S = 60.0  # to import the function's module
_LINE_BYTES = 1 << 26


class Rewards:
    """Calls a reward function in processes of its own, so that one that hangs or crashes costs one answer and no run.

    It is a `Reward` itself: `single_turn(Rewards("my_rewards:exact"))`. Items go there as JSON. For one event loop.

    Args:
        function: "module:function", or a function that can be imported by its name. It takes the item and the text of
            the answer.
        processes: How many, which is how many calls run at once. They are started when they are needed.
        timeout_s: A call that takes longer is ended with its process.
        tries: How often a call may fail: by its time, by an error, by a reward that is not finite.

    Raises:
        SchemaError: The function has no name by which another process could import it.
    """

    def __init__(
        self, function: str | Callable[..., Any], *, processes: int = 2, timeout_s: float = 10.0, tries: int = 3
    ) -> None:
        where = "Rewards()"
        self.name = _name_of(function)
        self._timeout_s = number(where, "timeout_s", timeout_s, 1e-3, 1e6)
        self._tries = whole(where, "tries", tries)
        self._free = asyncio.Semaphore(whole(where, "processes", processes))
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._endings: set[asyncio.Future[None]] = set()  # an event loop itself keeps no task alive
        self._is_closed = False
        self._broken: str | None = None
        self.failures: Counter[str] = Counter()
        """How often calls failed, by "timeout", "error", "died" and "not finite"."""

    async def __call__(self, item: Item, text: str) -> float:
        """Raises:
        SchemaError: Every try failed, or the function cannot be imported. The message has the reason of the last one.
        NotReady: This object was closed.
        """
        question = json.dumps({"item": dict(item), "text": text}).encode() + b"\n"
        why = ""
        for _ in range(self._tries):
            async with self._free:
                kind, found = await self._ask(question)
            if kind == "reward":
                return float(found)
            self.failures[kind] += 1
            why = f"{kind}: {found}"
        raise SchemaError(f"reward {self.name}: {self._tries} tries failed, the last by {why}")

    async def _ask(self, question: bytes) -> tuple[str, Any]:
        process = await self._process()
        try:
            assert process.stdin is not None
            process.stdin.write(question)
            said = await asyncio.wait_for(_line(process), self._timeout_s)
        except asyncio.TimeoutError:
            await self._end(process)
            return "timeout", f"longer than timeout_s={self._timeout_s:g}"
        except BaseException:
            await self._end(process)
            raise
        if said is None:
            await self._end(process)
            return "died", "its process ended"
        self._idle.append(process)
        if "error" in said:
            return "error", said["error"]
        if not math.isfinite(said["reward"]):
            return "not finite", f"expected a finite number, got {said['reward']}"
        return "reward", said["reward"]

    async def _process(self) -> asyncio.subprocess.Process:
        if self._is_closed:
            raise NotReady(f"reward {self.name}: Rewards was closed")
        if self._broken is not None:
            raise SchemaError(self._broken)
        if self._idle:
            return self._idle.pop()
        pipe = asyncio.subprocess.PIPE
        paths = json.dumps([path for path in sys.path if path])
        # A session of its own: the programs that the function has started end with the process.
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(_SCRIPT), self.name, paths,
            stdin=pipe, stdout=pipe, limit=_LINE_BYTES, start_new_session=True,
        )  # fmt: skip
        self._all.add(process)
        ending = asyncio.ensure_future(_end_session_of(process))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        try:
            said = await asyncio.wait_for(_line(process), _START_S)
        except BaseException:
            await self._end(process)
            raise
        if self._is_closed:  # while it started
            await self._end(process)
            raise NotReady(f"reward {self.name}: Rewards was closed")
        if said is None or "broken" in said:
            await self._end(process)
            why = "its process ended" if said is None else said["broken"]
            said_so = f"reward {self.name} cannot be imported in a process of its own: {why}"
            if said is not None:  # trying again would take as long and end alike
                self._broken = said_so
            raise SchemaError(said_so)
        return process

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            _kill_session(process)
        await process.wait()

    async def close(self) -> None:
        """Ends the processes."""
        self._is_closed, self._idle = True, []
        for process in list(self._all):
            await self._end(process)


async def _end_session_of(process: asyncio.subprocess.Process) -> None:
    """Where a process ends by itself, as soon as it does: later its number may be that of another session."""
    try:
        await process.wait()
    finally:
        _kill_session(process)


def _kill_session(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _line(process: asyncio.subprocess.Process) -> Any:
    """The next answer; None where the process has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _name_of(function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        if not all(function.partition(":")):
            raise SchemaError(f"Rewards(): function: expected 'module:function', got {function!r}")
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name:
        raise SchemaError(
            f"Rewards(): function: {told(function)} cannot be imported by another process; define it in a module, at "
            "the top level, and give it or its name 'module:function'"
        )
    return f"{module}:{name}"
