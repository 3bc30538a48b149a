"""A second process, started once for all cases: it attaches to what it is told to, and learns and adds there."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from contract.cases import Answer, Call, Case, Learner

PATIENCE_S = 60.0  # for one call, on a loaded machine


def serve(pipe: Connection) -> None:
    """Until the pipe's other end closes: ("open", case, address), ("close",), or a learner's call."""
    learner: Learner | None = None
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        answer: Any = None
        try:
            if call[0] == "open":
                learner = Learner(call[1].open(call[2]))
            else:
                assert learner is not None
                if call[0] == "close":
                    learner.buffer.close()
                else:
                    answer = learner.do(call)
        except Exception as error:  # told to the test, which raises it
            answer = error
        pipe.send(answer)


class Attached:
    """The other end: a learner in another process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def do(self, call: tuple[Any, ...] | Call) -> Answer | None:
        self.pipe.send(call)
        if not self.pipe.poll(PATIENCE_S):
            self.process.kill()
            raise TimeoutError(f"the attached process did not answer {call[0]} in {PATIENCE_S} s")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    def open(self, case: Case, address: str) -> None:
        self.do(("open", case, address))

    def close(self) -> None:
        self.do(("close",))

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(PATIENCE_S)
