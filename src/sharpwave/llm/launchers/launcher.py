"""`Launcher`: starts processes of a run, says whether they live, stops them. `LocalLauncher`: on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any, Protocol

from ...errors import NotReady
from ..interpreter import python
from ..run_folder import RunFolder, write_whole
from .alive import describe_process, is_alive

__all__ = ["Launcher", "LocalLauncher"]

_FORK_S = 120.0  # for an answer of the process that forks others, which first imports torch; a stopped one gives none


class Launcher(Protocol):
    """Processes by the name of their role."""

    def start(self, role: str) -> None: ...

    def alive(self, role: str) -> bool: ...

    def stop(self, role: str, *, kill: bool = False) -> None:
        """Asks a process to end; with `kill` it ends at once."""
        ...


class LocalLauncher:
    """Processes of this machine. Their ids are in the run's folder, so another process can go on with them."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._places = folder, folder.path / "processes"
        self._places.mkdir(exist_ok=True)
        self._nursery: subprocess.Popen[str] | None = None

    def start(self, role: str) -> None:
        self._folder.forget(role)
        output = str(self._folder.logs / f"{role}.txt")
        pid = self._ask({"folder": str(self._folder.path.resolve()), "role": role, "output": output})["pid"]
        if self.alive(role):  # it has entered already; or one has whose number was lost with the process that forked it
            return
        try:
            write_whole(self._place(role), describe_process(pid))
        except OSError:  # a process whose id is written nowhere would be ended by nobody
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise

    def enter(self, role: str) -> bool:
        """For a process of a role, before it does anything. Returns False where another one lives: it has to end.

        `start` writes the same. A keeper that is killed before that would leave a process that the next one does not
        know, and starts again.
        """
        found = self.process(role)
        if found is not None and found["pid"] != os.getpid() and is_alive(found):
            return False
        write_whole(self._place(role), describe_process(os.getpid()))
        return True

    def alive(self, role: str) -> bool:
        return is_alive(self.process(role))

    def process(self, role: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._place(role).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found

    def stop(self, role: str, *, kill: bool = False) -> None:
        found = self.process(role)
        if found is not None and is_alive(found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(found["pid"], signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        """Ends the process that forks others; these go on."""
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.kill()  # it has nothing to put in order; a stopped one would not read the end of its input
        nursery.wait()
        with contextlib.suppress(OSError):  # of a request that it did not read
            nursery.stdin.close()
        nursery.stdout.close()

    def _place(self, role: str) -> Path:
        return self._places / f"{role}.json"

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        for _ in range(2):  # one that was killed or stopped is started again
            if self._nursery is None or self._nursery.poll() is not None:
                self.close()
                self._nursery = _start_nursery(self._folder.logs / "nursery.txt")
            assert self._nursery.stdin is not None
            assert self._nursery.stdout is not None
            try:
                self._nursery.stdin.write(json.dumps(message) + "\n")
                self._nursery.stdin.flush()
                answered = select.poll()
                answered.register(self._nursery.stdout, select.POLLIN)
                if not answered.poll(1e3 * _FORK_S):
                    raise TimeoutError
                found: dict[str, Any] = json.loads(self._nursery.stdout.readline())
                return found
            except (OSError, ValueError):
                self.close()
        raise NotReady(f"no process can be started; see {self._folder.logs / 'nursery.txt'}")


def _start_nursery(output: Path) -> subprocess.Popen[str]:
    with output.open("a") as file:
        return subprocess.Popen(
            python("sharpwave.llm.launchers.nursery:main"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
