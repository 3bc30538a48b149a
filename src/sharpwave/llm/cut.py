"""`Cut`: the controller's part of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import SchemaError

__all__ = ["Cut"]


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
