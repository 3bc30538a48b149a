"""`RunFolder`: where a run keeps its settings, addresses, logs, weights and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from ..errors import NotReady, SchemaError, StorageError
from .checkpoints import Checkpoints
from .cut import Cut
from .experiment import Experiment
from .weights import Weights

__all__ = ["STOP", "RunFolder"]

_EXPERIMENT = "experiment.json"
STOP = "stop"
"""Registered with the reason when the run is to end: a controller that is started again reads it."""


class RunFolder:
    """One run.

    | path | content |
    |---|---|
    | `experiment.json` | settings |
    | `addresses/` | where each process of the run listens, and its process id |
    | `logs/` | `steps.jsonl`, `events.jsonl`, `spans.jsonl`, and what each process printed |
    | `status.json` | the last known state, for `sharpwave status` |
    | `journal` | samples that are made and not trained |
    | `journal.cut` | where the controller goes on when it alone is started again |
    | `weights/` | the last versions |
    | `checkpoints/` | the last checkpoints |
    | `evaluation/best/` | the best version, as a Hugging Face folder |
    | `timeline.json`, `reward.png` | written at the end |
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    # ---- places ------------------------------------------------------------------------------------------------------

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.json"

    @property
    def curve(self) -> Path:
        return self.path / "reward.png"

    def weights(self, companions: str | Path | None = None) -> Weights:
        """The versions of the run.

        Args:
            companions: For the learner: the folder of the model at the beginning, whose tokenizer goes into each
                version.
        """
        # Four: a generator that is behind still finds the version that it was about to read.
        return Weights(self.path / "weights", keep=4, companions=companions)

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def cut(self) -> Cut | None:
        """The controller's part of the newest checkpoint."""
        found = self.checkpoints().latest()
        return None if found is None else Cut.from_json(found.position)

    # ---- settings ----------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | Path, experiment: Experiment) -> RunFolder:
        """A new run.

        Raises:
            SchemaError: There is a run already, or something else.
            StorageError: The folder cannot be written.
        """
        made = cls(path)
        if (made.path / _EXPERIMENT).exists():
            raise SchemaError(f"{path} has a run already; give another --out, or go on with: sharpwave resume {path}")
        try:
            if made.path.is_dir() and any(made.path.iterdir()):
                raise SchemaError(f"{path} has files and no run; give another --out, or empty the folder")
            for folder in (made.path, made.logs, made.path / "addresses"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(made.path / _EXPERIMENT, experiment.to_json())
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error
        return made

    def experiment(self) -> Experiment:
        """Raises:
        StorageError: There is no run.
        """
        return Experiment.read(self._read(self.path / _EXPERIMENT, "there is no run; start one with: sharpwave train"))

    def _read(self, path: Path, hint: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise StorageError(f"{path} cannot be read: {hint}") from error
        return found

    # ---- one process at a time ---------------------------------------------------------------------------------------

    def take(self) -> None:
        """Makes this process the one that drives the run. The kernel gives it back when the process dies.

        Raises:
            NotReady: Another process drives it.
        """
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise NotReady(f"{self.path}: a process drives this run; end it with: sharpwave stop {self.path}") from None
        self._lock = lock
        self.register("run", {})

    def give_back(self) -> None:
        if self._lock is not None:
            self.forget("run")
            os.close(self._lock)
            self._lock = None

    @property
    def is_driven(self) -> bool:
        """Whether a process drives the run now."""
        try:
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except OSError:
            return True
        finally:
            os.close(lock)

    # ---- addresses ---------------------------------------------------------------------------------------------------

    def register(self, name: str, about: dict[str, Any]) -> None:
        """Says where this process is found."""
        write_whole(self.path / "addresses" / f"{name}.json", {"pid": os.getpid(), **about})

    def find(self, name: str) -> dict[str, Any] | None:
        """What the process of a name said; None where it has said nothing yet."""
        try:
            found: dict[str, Any] = json.loads((self.path / "addresses" / f"{name}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found

    def forget(self, name: str) -> None:
        (self.path / "addresses" / f"{name}.json").unlink(missing_ok=True)

    # ---- state -------------------------------------------------------------------------------------------------------

    def write_status(self, status: dict[str, Any]) -> None:
        write_whole(self.path / "status.json", status)

    def status(self) -> dict[str, Any]:
        """The last known state; empty where nothing was said yet."""
        try:
            found: dict[str, Any] = json.loads((self.path / "status.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found


def write_whole(path: Path, value: Any) -> None:
    """Readers see the old content or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(value, indent=2) + "\n")
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
