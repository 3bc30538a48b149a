"""`Generator`: who answers prompts, in this process or behind a server of any kind, and takes new weights meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from .answer import Answer
from .sampling import Sampling

__all__ = ["Generator", "Health", "Responder"]


class Health(NamedTuple):
    """What a generator tells of itself. `version` is that of the weights which make the next token."""

    version: int
    running: int
    waiting: int


class Responder(Protocol):
    """The part of a generator that answers."""

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        """One answer. A task that is cancelled ends its answer at the generator, too.

        Raises:
            SchemaError: Ids or settings are wrong, or do not fit. Nothing was begun.
            NotReady: The generator is gone, and nobody else can go on with the answer.
        """
        ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each token but the first, given those before it, under the weights of now."""
        ...

    async def health(self) -> Health:
        """Raises:
        NotReady: It does not answer.
        """
        ...


class Generator(Responder, Protocol):
    """For one event loop. Calls of many tasks run side by side, and none waits for another's answer.

    A group of answers to one prompt is as many calls: a generator that can computes the prompt once for all of them.
    """

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        """Puts the weights of a Hugging Face folder in. Answers go on: later tokens are made by the new version.

        Raises:
            SchemaError: Version, names, shapes or values are wrong. The old weights stay.
            StorageError: The folder cannot be read. The old weights stay.
        """
        ...

    async def abort(self) -> int:
        """Ends every answer on its way with the tokens it has (`stop` is "abort"). Returns how many."""
        ...

    async def close(self) -> None:
        """Ends what this object started: its thread, its child process, its connections."""
        ...
