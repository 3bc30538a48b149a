"""The process of an engine: it steps, and nothing else waits for its interpreter. `ProcessGenerator` starts it."""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ...errors import NotReady, StorageError
from ..channel import Door, PlainChannel
from ..child import enter, leave
from .answer import Answer, Request
from .engine import Engine
from .engine_frames import pack_answers, unpack_ids

__all__ = ["ABORT", "ANSWERS", "GENERATE", "HEALTH", "SCORE", "UPDATE", "main"]

GENERATE, ABORT, UPDATE, SCORE, HEALTH, ANSWERS = range(2, 8)
_LOOK_S, _FLUSH_S = 0.25, 0.002
_MOST_FAILURES = 5  # steps in a row: an error of the device stays


class _Served:
    """One thread reads what is asked for and steps; updates and scores have threads of their own.

    A second reading thread would take the interpreter from the steps while requests arrive.

    Args:
        engine: Stepped by the caller of `run`.
        parent: The channel of the process that started this one.
        doors: Other processes' channels come through them.
        watch: Called now and then between two steps, for a log.
    """

    def __init__(
        self, engine: Engine, parent: PlainChannel, doors: Sequence[socket.socket], watch: Callable[[], None]
    ) -> None:
        self._engine, self._parent, self._watch = engine, parent, watch
        self._channels = [parent]
        self._calls: dict[Request, tuple[PlainChannel, int]] = {}
        self._requests: dict[tuple[PlainChannel, int], Request] = {}
        self._done: list[Request] = []  # not told yet
        self._has_unsent = False
        self._failures = 0  # steps in a row
        self._readable = selectors.DefaultSelector()
        self._readable.register(parent, selectors.EVENT_READ)
        for door in doors:
            self._readable.register(door, selectors.EVENT_READ)

    def run(self) -> None:
        looked = time.monotonic()
        while True:
            if time.monotonic() - looked > _LOOK_S:
                self._look()
                looked = time.monotonic()
            if self._engine.is_busy:
                self.step()
            else:
                self.tell()
                self.read(_FLUSH_S if self._has_unsent else _LOOK_S)
            # What a channel does not take waits here: a stopped process blocks no other.
            self._has_unsent = sum(not channel.flush() for channel in self._channels) > 0  # each is flushed

    def read(self, timeout: float) -> None:
        """Does what has been asked for."""
        for key, _ in self._readable.select(timeout):
            if not isinstance(key.fileobj, PlainChannel):
                self._meet(key.fileobj)  # type: ignore[arg-type]
                continue
            channel = key.fileobj
            arrived = channel.read()
            if arrived is not None:
                for kind, number, body in arrived:
                    self._do(channel, kind, number, body)
            elif channel is self._parent:
                leave()
            else:
                self._lose(channel)

    def step(self) -> None:
        """One step. While a GPU computes it, answers of the step before go out, and requests come in."""
        try:
            done = self._engine.step(self._meanwhile)
        except Exception as error:
            self.tell()
            self._failures += 1
            traceback.print_exc()
            failure = NotReady(f"generate(): a step of the engine failed: {error!r}")
            if self._failures == _MOST_FAILURES:
                self._parent.fail_all(NotReady(f"the engine failed {self._failures} times in a row: {error!r}"))
                raise
            for request in self._engine.drop():
                channel, number = self._forget(request)
                channel.fail(number, failure)
            return
        self._done += done  # empty before: `_meanwhile` has told the others
        self._failures = 0

    def _meanwhile(self) -> None:
        self.tell()
        self.read(0)

    def tell(self) -> None:
        """Sends the answers that are done."""
        done, self._done = self._done, []
        answers: dict[PlainChannel, list[tuple[int, Answer]]] = {}
        for request in done:
            channel, number = self._forget(request)
            if request.answer is not None:
                answers.setdefault(channel, []).append((number, request.answer))
        for channel, its in answers.items():
            channel.send(ANSWERS, 0, pack_answers(its))

    def _look(self) -> None:
        try:
            self._watch()
        except OSError as error:  # the log's disk is full: for the run, not for one answer
            self._parent.fail_all(StorageError(f"the process of the engine cannot write its log: {error}"))
            raise

    def _meet(self, door: socket.socket) -> None:
        try:
            end = Door.take(door)
        except NotReady as error:
            print(f"engine: {error}", file=sys.stderr)
            return
        if end is None:
            self._readable.unregister(door)
            return
        self._channels.append(PlainChannel(end))
        self._readable.register(self._channels[-1], selectors.EVENT_READ)

    def _forget(self, request: Request) -> tuple[PlainChannel, int]:
        call = self._calls.pop(request)
        del self._requests[call]
        return call

    def _lose(self, channel: PlainChannel) -> None:
        """Its process is gone, and its answers with it."""
        self._readable.unregister(channel)
        self._channels.remove(channel)
        channel.close()
        for call, request in list(self._requests.items()):
            if call[0] is channel:
                self._engine.abort(request)

    def _do(self, channel: PlainChannel, kind: int, number: int, body: bytes) -> None:
        if kind == GENERATE:
            self._reply(channel, number, lambda: self._generate(channel, number, body), is_answered=False)
        elif kind == ABORT:
            if (channel, number) in self._requests:
                self._engine.abort(self._requests[channel, number])
        elif kind == HEALTH:
            self._reply(channel, number, lambda: [self._engine.version, self._engine.running, self._engine.waiting])
        else:  # they take long: steps go on beside them
            work = self._update if kind == UPDATE else self._score
            threading.Thread(target=self._reply, args=(channel, number, lambda: work(body)), daemon=True).start()

    def _generate(self, channel: PlainChannel, number: int, body: bytes) -> None:
        (request,) = self._engine.prepare(*unpack_ids(body))
        self._calls[request], self._requests[channel, number] = (channel, number), request
        self._engine.enqueue([request])

    def _update(self, body: bytes) -> int:
        said = json.loads(body)
        self._engine.update(said["path"], said["version"], kv=said["kv"])
        return self._engine.version

    def _score(self, body: bytes) -> list[float]:
        return self._engine.score(unpack_ids(body)[0].tolist())

    def _reply(self, channel: PlainChannel, number: int, work: Callable[[], Any], is_answered: bool = True) -> None:
        try:
            made = work()
        except Exception as error:
            channel.fail(number, error, "NotReady")
            return
        if is_answered:
            channel.reply(number, made)


def main() -> None:
    """`python -c "...main()" FD,FD MODULE:FUNCTION JSON`. The function makes the engine, and what watches it."""
    end, *doors = enter(sys.argv[1])
    parent = PlainChannel(end)
    module, _, function = sys.argv[2].partition(":")
    try:
        engine, watch = getattr(import_module(module), function)(**json.loads(sys.argv[3]))
    except Exception as error:
        parent.fail_all(error)
        raise
    parent.is_ready()
    _Served(engine, parent, doors, watch).run()
