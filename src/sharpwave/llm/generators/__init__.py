"""Generation: the engine that decodes in slots, how it samples, and what it answers."""

from .answer import Answer, Request
from .engine import Engine, Step
from .protocol import Generator, Health
from .sampling import Sampling

__all__ = ["Answer", "Engine", "Generator", "Health", "Request", "Sampling", "Step"]
