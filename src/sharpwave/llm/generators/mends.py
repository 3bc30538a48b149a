"""`Mends`: what messages of an engine tell users to change."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mends"]


@dataclass(frozen=True)
class Mends:
    """The places where an engine's limits are set. The sender of a request may not have made the engine.

    Args:
        context: For a prompt that does not fit with its answer.
        vocabulary: For a token that the model does not have.
    """

    context: str = "raise Engine(context=)"
    vocabulary: str = "give ids of the model's tokenizer"
