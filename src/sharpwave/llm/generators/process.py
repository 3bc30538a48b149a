"""`ProcessGenerator`: our engine in a child process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ... import errors
from ...errors import ClosedError, NotReady
from .answer import Answer
from .engine_frames import Frames, frame, pack_ids, unpack_answers
from .engine_process import ABORT, ANSWERS, ERROR, GENERATE, HEALTH, REPLY, SCORE, UPDATE
from .protocol import Health
from .sampling import Sampling

__all__ = ["ProcessGenerator"]

_MAIN = "from sharpwave.llm.generators.engine_process import main; main()"
_END_S = 10.0


class ProcessGenerator:
    """An engine whose steps do not wait for this process's interpreter, which agents and a learner keep busy.

    For one event loop and for runs on one machine: frames over a socket between parent and child, which nothing else
    can reach. The child ends with its parent, however that ends.

    Example:
        `await ProcessGenerator.start("sharpwave.llm.parts:run_engine", run="runs/sort", slots=64, who="generator-0")`
    """

    def __init__(self, child: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._child, self._channel = child, channel
        self._loop = asyncio.get_running_loop()
        self._frames, self._unsent = Frames(), bytearray()
        self._ready: asyncio.Future[Any] = self._loop.create_future()
        self._calls: dict[int, asyncio.Future[Any]] = {0: self._ready}
        self._answers: set[int] = set()  # of the calls, those that wait for an answer of the model
        self._number = 0
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_closed = False
        self._loop.add_reader(channel, self._read)

    @classmethod
    async def start(cls, maker: str, **arguments: Any) -> ProcessGenerator:
        """Starts the child.

        Args:
            maker: "module:function" that returns an `Engine` and a function that is called now and then, in the child.
            arguments: Its arguments, as JSON has them.

        Raises:
            SchemaError, StorageError, NotReady: What the function raised.
        """
        ours, its = socket.socketpair()
        with its:
            child = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(its.fileno()), maker, json.dumps(arguments)],
                pass_fds=[its.fileno()], stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
        made = cls(child, ours)
        try:
            await made._ready
        except BaseException:
            await made.close()
            raise
        return made

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        """One answer; see `Generator.generate`."""
        number, call = self._call(GENERATE, pack_ids(ids, Sampling() if sampling is None else sampling))
        self._answers.add(number)
        try:
            answer: Answer = await call
            return answer
        except asyncio.CancelledError:
            self._send(ABORT, number)
            raise
        finally:
            self._answers.discard(number)
            self._calls.pop(number, None)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """See `Generator.score`."""
        made: list[float] = await self._call(SCORE, pack_ids(ids, Sampling()))[1]
        return made

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        """New weights from a folder; see `Generator.update`."""
        said = {"path": str(path), "version": version, "kv": kv}
        await self._call(UPDATE, json.dumps(said).encode())[1]

    async def abort(self) -> int:
        """Ends every answer on its way with the tokens it has. Returns how many."""
        numbers = list(self._answers)
        for number in numbers:
            self._send(ABORT, number)
        return len(numbers)

    async def health(self) -> Health:
        """See `Generator.health`."""
        return Health(*await self._call(HEALTH, b"")[1])

    async def join(self) -> None:
        """Waits until the child has ended.

        Raises:
            NotReady: It ended by itself.
        """
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Ends the child. Answers on their way fail with ClosedError. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._end(ClosedError("generate(): the generator was closed before the answer ended"))
            self._channel.close()
            try:
                await asyncio.to_thread(self._child.wait, _END_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                await asyncio.to_thread(self._child.wait)

    def _call(self, kind: int, body: bytes) -> tuple[int, asyncio.Future[Any]]:
        if self._is_closed:
            raise ClosedError("the generator was closed")
        if self._ended.done():
            raise NotReady("the process of the engine has ended")
        self._number += 1
        number, call = self._number, self._loop.create_future()
        self._calls[number] = call
        self._send(kind, number, body)
        return number, call

    def _send(self, kind: int, number: int, body: bytes = b"") -> None:
        if not self._is_closed:
            self._unsent += frame(kind, number, body)
            self._write()

    def _write(self) -> None:
        """Sends what the child takes at once, and the rest when it can: one that stands still stops nobody else."""
        try:
            while self._unsent:
                del self._unsent[: self._channel.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            self._loop.add_writer(self._channel, self._write)
            return
        except OSError:  # it has ended: the reader says so to every call
            self._unsent.clear()
        self._loop.remove_writer(self._channel)

    def _read(self) -> None:
        try:
            arrived = self._channel.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            arrived = b""
        if not arrived:
            self._end(NotReady("the process of the engine has ended; its output says why"))
            return
        for kind, number, body in self._frames.push(arrived):
            if kind == ANSWERS:
                for its, answer in unpack_answers(body):
                    self._tell(its, answer)
            elif kind == REPLY:
                self._tell(number, json.loads(body))
            elif kind == ERROR:
                name, text = json.loads(body)
                error = getattr(errors, name)(text)
                if number == 0 and self._ready.done():  # of the child itself, which ends
                    self._end(error)
                    return
                self._fail(number, error)

    def _tell(self, number: int, made: Any) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            call.set_result(made)

    def _fail(self, number: int, error: Exception) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            call.set_exception(error)

    def _end(self, error: Exception) -> None:
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        for number in list(self._calls):
            self._fail(number, error)
        if not self._ended.done():
            self._ended.set_result(None) if self._is_closed else self._ended.set_exception(error)
            self._ended.exception()  # seen, where nobody joins
