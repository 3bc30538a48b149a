"""`Cut`: the controller's part of a checkpoint. `LastCut`: the newest one of a journal."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ClosedError, SchemaError, StorageError
from .manifest import sync_to_disk

__all__ = ["Cut", "LastCut"]


@dataclass(frozen=True)
class Cut:
    """One moment of a run, between two steps of the learner. It goes into the learner's checkpoint.

    Attributes:
        mark: The name of this moment in the buffer's journal.
        step: Steps that the learner has made.
        version: The newest version of the weights. It only grows, also where the step goes back.
        position: Of the data, as `Position.to_json` gives it.
    """

    mark: str
    step: int
    version: int
    position: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Cut:
        if not isinstance(said, dict) or set(said) != set(cls.__dataclass_fields__):
            names = ", ".join(cls.__dataclass_fields__)
            raise SchemaError(f"Cut: expected an object with {names}, got {str(said)[:100]}")
        return cls(**said)


class LastCut:
    """The newest cut of a controller, in a file beside its journal.

    A controller that is started again alone goes on from there, and not from the newest checkpoint. The learner may
    still be writing a checkpoint with the cut of the former controller: from an earlier cut, items that were settled
    without training would be handed out again, and the learner's next checkpoint would count them twice.

    For threads: a write may still run in one when the controller that asked for it has been replaced.

    Args:
        journal: Where the controller's samples are.
    """

    def __init__(self, journal: str | Path) -> None:
        self._journal = Path(journal)
        self._path = self._journal.with_name(f"{self._journal.name}.cut")
        self._lock, self._is_closed = threading.Lock(), False

    def read(self) -> Cut | None:
        """None where no checkpoint was asked for yet, or the journal is gone.

        Raises:
            StorageError: The file cannot be read.
        """
        try:
            return Cut.from_json(json.loads(self._path.read_text())) if self._journal.exists() else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, SchemaError) as error:
            raise StorageError(f"{self._path} cannot be read: {error}") from error

    def write(self, cut: Cut | None) -> None:
        """A controller that is started again goes on from this cut; None is the beginning.

        Raises:
            StorageError: The file cannot be written. The one before stays.
            ClosedError: Another controller goes on from the journal.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("checkpoint(): the controller was closed")
            try:
                self._replace(cut)
            except OSError as error:
                raise StorageError(f"{self._path} cannot be written: {error.strerror}") from error

    def _replace(self, cut: Cut | None) -> None:
        if cut is None:
            self._path.unlink(missing_ok=True)
            return
        aside = self._path.with_name(f".{self._path.name}.new")
        aside.write_text(json.dumps(cut.to_json()))
        sync_to_disk(aside)
        aside.rename(self._path)

    def close(self) -> None:
        """Waits for a write that has begun. Later ones are refused."""
        with self._lock:
            self._is_closed = True
