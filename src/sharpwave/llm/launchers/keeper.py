"""`Keeper`: starts the processes of a run, starts those again that die, and ends all of them with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import NotReady, StorageError
from ...service.zeromq import load_zmq
from ..controller import STOPPED
from ..full_disk import is_full, tell_full_disk
from ..interpreter import python
from ..log import EVENTS, STEPS, RunLog, read_lines
from ..run import Result
from ..run_folder import STOP, RunFolder
from ..timeline import idle_shares, write_timeline
from .alive import describe_process, is_alive
from .controller_server import remove_address
from .launcher import LocalLauncher
from .roles import role_names

__all__ = ["Keeper", "keep", "start_keeper"]

_LOOK_S = 0.02
_END_S = 30.0  # for the processes of a run that is over
_TRIES = 5  # starts in a row after which a process was never ready
_ERRORS = 3  # of one role without a training step in between: starting it again does not mend them


class Keeper:
    """Runs until the learner has written its outcome.

    Args:
        folder: Of the run. Processes of an earlier keeper that live are kept.
        show: Called with every line of a step and every score.
        launcher: Who starts processes; None for forks on this machine.
    """

    def __init__(
        self,
        folder: RunFolder,
        show: Callable[[str, dict[str, Any]], None] | None = None,
        launcher: LocalLauncher | None = None,
    ) -> None:
        load_zmq()  # here, where its absence can be told to the user
        self.folder, self._show = folder, show
        self.experiment = folder.experiment()
        self.roles = role_names(self.experiment)
        self.launcher = LocalLauncher(folder) if launcher is None else launcher
        self.log = RunLog(folder.logs)
        self._tries = dict.fromkeys(self.roles, 0)
        self._errors = dict.fromkeys(self.roles, 0)
        self._trained_bytes = -1  # of the log of steps at the last error
        self._seen = {STEPS: 0, EVENTS: 0}
        self._is_stopping = False
        self.restarts = 0

    def stop(self) -> None:
        """Ends the run in order: the learner makes its step, and saves. May be called from a signal's handler."""
        self._is_stopping = True

    def run(self) -> Result:
        """Raises:
        NotReady: The controller says that the run cannot go on. Or a process died again and again before it was ready,
            or by errors of its own, without a training step in between.
        StorageError: The disk is full. The last checkpoint stays.
        """
        try:
            with tell_full_disk(self.folder.path):
                return self._run()
        except Exception as error:
            self.log.fail(error)
            raise
        finally:
            self.log.close()

    def _run(self) -> Result:
        began = time.monotonic()
        if not is_alive(self.folder.find("controller")):
            self.folder.forget(STOP)  # of an earlier run in this folder
        self.folder.register("keeper", describe_process(os.getpid()))
        has_ended = False
        try:
            told = False
            while (outcome := self.folder.find("outcome")) is None:
                self._check_failure()
                self._look()
                self._tell()
                if self._is_stopping and not told:
                    # First: a controller that dies of the signal, or later, reads it.
                    self.folder.register(STOP, {"why": STOPPED})
                    self.launcher.stop("controller")
                    told = True
                time.sleep(_LOOK_S)
            has_ended = True
        finally:
            self.folder.forget("keeper")  # before the others end: none of them is to be started again
            self._end(kill=not has_ended)
        # What the controller, which is ended now, wrote last may be of the time before the end.
        counts = {name: value for name, value in outcome.items() if name not in ("pid", "why")}
        self.folder.write_status(counts)
        self._tell()
        write_timeline(self.folder.logs, self.folder.timeline)
        return self._result(outcome, time.monotonic() - began)

    def _check_failure(self) -> None:
        found = self.folder.find("failure")
        if found is not None:
            raise NotReady(found["why"])

    def _look(self) -> None:
        for role in self.roles:
            if self.launcher.alive(role):
                if self._tries[role] and self.folder.find(role) is not None:
                    self._tries[role] = 0
                continue
            is_first = self.launcher.process(role) is None
            if not is_first and self.folder.find("outcome") is not None:
                return  # the learner wrote it and ended after `run` had looked for it: the run is over
            if not is_first:
                self._note_death(role)
            self._tries[role] += 1
            if self._tries[role] > _TRIES:
                raise NotReady(f"{role} ended {_TRIES} times before it was ready; see {self._output(role)}")
            self.launcher.start(role)
            if not is_first:
                self.restarts += 1

    def _note_death(self, role: str) -> None:
        """Raises:
        NotReady: The role ended by an error again and again, and nothing was trained in between.
        StorageError: It ended because the disk is full.
        """
        error = (self.folder.find(f"{role}-error") or {}).get("said")
        self.folder.forget(f"{role}-error")
        self._check_failure()
        if error is not None and is_full(StorageError(error)):
            raise StorageError(error)
        if error is not None:  # not killed
            steps = self.folder.logs / STEPS
            trained_bytes = steps.stat().st_size if steps.exists() else 0
            if trained_bytes != self._trained_bytes:
                self._trained_bytes, self._errors = trained_bytes, dict.fromkeys(self.roles, 0)
            self._errors[role] += 1
        fails = error is not None and self._errors[role] == _ERRORS
        again = not fails and self._tries[role] < _TRIES
        self.log("died", who=role, again=again, **({} if error is None else {"why": error}))
        if fails:
            raise NotReady(
                f"{role} failed {_ERRORS} times in a row, the last time by {error}; see {self._output(role)}"
            )

    def _output(self, role: str) -> Path:
        return self.folder.logs / f"{role}.txt"

    def _tell(self) -> None:
        if self._show is None:
            return
        for name in (EVENTS, STEPS):
            path = self.folder.logs / name
            size = path.stat().st_size if path.exists() else 0
            if size == self._seen[name]:
                continue
            with path.open(encoding="utf-8") as file:
                file.seek(self._seen[name])
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._seen[name] += len(whole.encode())
            for line in _lines(whole):
                self._show(line.get("event", "step"), line)

    def _end(self, kill: bool) -> None:
        """Ends every process: the learner by itself, unless `kill` is true, the others now."""
        for role in self.roles:
            if kill or role != "learner":
                self.launcher.stop(role, kill=True)
        deadline = time.monotonic() + _END_S
        while any(self.launcher.alive(role) for role in self.roles):
            if time.monotonic() > deadline:
                for role in self.roles:
                    self.launcher.stop(role, kill=True)
            time.sleep(_LOOK_S)
        found = self.folder.find("controller-address")
        if found is not None:
            remove_address(found["address"])
        for name in [*self.roles, *(f"{role}-error" for role in self.roles), "controller-address", "failure", STOP]:
            self.folder.forget(name)
        for left in (self.folder.path / "processes").iterdir():  # also what killed processes had not written to its end
            left.unlink(missing_ok=True)
        self.launcher.close()

    def _result(self, outcome: dict[str, Any], took_s: float) -> Result:
        self.folder.forget("outcome")
        goal = self.experiment.evaluation.goal
        scores = [line for line in read_lines(self.folder.logs / EVENTS) if line["event"] == "score"]
        rewards = [line["reward"] for line in scores]
        made = Result(
            step=outcome["step"],
            version=outcome["version"],
            why=outcome["why"],
            scored=scores[-1]["version"] if scores else None,
            reward=rewards[-1] if rewards else None,
            best=max(rewards, default=None),
            reached=goal is None or (bool(rewards) and rewards[-1] >= goal),
            took_s=took_s,
            trained=outcome["trained"],
            no_signal=outcome["no_signal"],
            rejected=outcome["rejected"],
            idle=idle_shares(self.folder.logs, time.time() - took_s),
        )
        self.log("end", **asdict(made))
        return made


def _lines(text: str) -> list[dict[str, Any]]:
    import json

    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def start_keeper(folder: RunFolder) -> None:
    """Starts a keeper that goes on with the processes that live. It outlives this process."""
    with (folder.logs / "keeper.txt").open("a") as file:
        started = subprocess.Popen(
            python(f"{__name__}:keep", str(folder.path)),
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    folder.register("keeper", describe_process(started.pid))  # at once: only one is started


def keep() -> None:
    """A keeper without a console, as a process of its own; its argument is the folder of the run."""
    import signal

    folder = RunFolder(sys.argv[1])
    told: list[int] = []
    # Before it drives the run: from then on it may be told to stop, and must not die of it.
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    folder.take()
    try:
        keeper = Keeper(folder)
        signal.signal(signal.SIGTERM, lambda *_: keeper.stop())
        if told:
            keeper.stop()
        keeper.run()
    finally:
        folder.give_back()
