"""The process of an engine: it steps, and nothing else waits for its interpreter. `ProcessGenerator` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ...errors import SharpwaveError
from .answer import Request
from .engine import Engine
from .engine_frames import Frames, frame, pack_answers, unpack_ids

__all__ = ["ABORT", "ANSWERS", "ERROR", "GENERATE", "HEALTH", "REPLY", "SCORE", "UPDATE", "main"]

GENERATE, ABORT, UPDATE, SCORE, HEALTH, ANSWERS, REPLY, ERROR = range(8)
_LOOK_S = 0.25


class _Served:
    """Args:
    engine: Stepped by the caller of `run`; a second thread reads what is asked for.
    watch: Called now and then between two steps, for a log.
    """

    def __init__(self, engine: Engine, channel: socket.socket, watch: Callable[[], None]) -> None:
        self._engine, self._channel, self._watch = engine, channel, watch
        self._numbers: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        self._sending = threading.Lock()
        self._news = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        looked = time.monotonic()
        while True:
            if time.monotonic() - looked > _LOOK_S:
                self._look()
                looked = time.monotonic()
            if not self._engine.is_busy:
                self._news.wait(_LOOK_S)
                self._news.clear()
                continue
            try:
                done = self._engine.step()
            except Exception as error:
                for request in self._engine.drop():
                    self._fail(self._forget(request), "NotReady", f"generate(): a step of the engine failed: {error!r}")
                continue
            if done:
                self._send(ANSWERS, 0, pack_answers([(self._forget(one), one.answer) for one in done if one.answer]))

    def _look(self) -> None:
        try:
            self._watch()
        except OSError as error:  # the log's disk is full: for the run, not for one answer
            self._fail(0, "StorageError", f"the process of the engine cannot write its log: {error}")
            raise

    def _forget(self, request: Request) -> int:
        number = self._numbers.pop(request)
        del self._requests[number]
        return number

    def _read(self) -> None:
        frames = Frames()
        with contextlib.suppress(ConnectionError):
            while arrived := self._channel.recv(1 << 20):
                for kind, number, body in frames.push(arrived):
                    self._do(kind, number, body)
        os._exit(0)  # the parent is gone, or has closed its end

    def _do(self, kind: int, number: int, body: bytes) -> None:
        if kind == GENERATE:
            self._reply(number, lambda: self._generate(number, body), is_answered=False)
        elif kind == ABORT:
            if number in self._requests:
                self._engine.abort(self._requests[number])
                self._news.set()
        elif kind == HEALTH:
            self._reply(number, lambda: [self._engine.version, self._engine.running, self._engine.waiting])
        else:  # they take long: reading goes on beside them
            work = self._update if kind == UPDATE else self._score
            threading.Thread(target=self._reply, args=(number, lambda: work(body)), daemon=True).start()

    def _generate(self, number: int, body: bytes) -> None:
        (request,) = self._engine.prepare(*unpack_ids(body))
        self._numbers[request], self._requests[number] = number, request
        self._engine.enqueue([request])
        self._news.set()

    def _update(self, body: bytes) -> int:
        said = json.loads(body)
        self._engine.update(said["path"], said["version"], kv=said["kv"])
        return self._engine.version

    def _score(self, body: bytes) -> list[float]:
        return self._engine.score(unpack_ids(body)[0].tolist())

    def _reply(self, number: int, work: Callable[[], Any], is_answered: bool = True) -> None:
        try:
            made = work()
        except Exception as error:
            is_ours = isinstance(error, SharpwaveError)
            self._fail(number, type(error).__name__ if is_ours else "NotReady", str(error) if is_ours else repr(error))
            return
        if is_answered:
            self._send(REPLY, number, json.dumps(made).encode())

    def _fail(self, number: int, name: str, text: str) -> None:
        self._send(ERROR, number, json.dumps([name, text]).encode())

    def _send(self, kind: int, number: int, body: bytes) -> None:
        with self._sending, contextlib.suppress(ConnectionError):
            self._channel.sendall(frame(kind, number, body))


def main() -> None:
    """`python -c "...main()" FD MODULE:FUNCTION JSON`. The function makes the engine, and what watches it."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    module, _, function = sys.argv[2].partition(":")
    try:
        engine, watch = getattr(import_module(module), function)(**json.loads(sys.argv[3]))
    except Exception as error:
        name = type(error).__name__ if isinstance(error, SharpwaveError) else "NotReady"
        channel.sendall(frame(ERROR, 0, json.dumps([name, str(error) or repr(error)]).encode()))
        raise
    channel.sendall(frame(REPLY, 0, b"null"))
    _Served(engine, channel, watch).run()
