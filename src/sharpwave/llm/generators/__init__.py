"""Generation: the engine that decodes in slots, how it samples, and what it answers."""

from .answer import Answer, Request
from .engine import Engine, Step
from .local import LocalGenerator
from .ongoing import Ongoing, Piece
from .protocol import Generator, Health
from .sampling import Sampling

__all__ = [
    "Answer",
    "Engine",
    "Generator",
    "Health",
    "LocalGenerator",
    "Ongoing",
    "Piece",
    "Request",
    "Sampling",
    "Step",
]
