"""n-step returns: how many steps and which discount, given or read from the algorithm."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from sharpwave.errors import SchemaError

from . import samples

__all__ = ["read_returns"]


def read_returns(n_steps: int | None, gamma: float | None) -> tuple[int, float]:
    """The steps and the discount of examples: those given, or those of the algorithm that makes the buffer."""
    algorithm = _calling_algorithm()
    if algorithm is not None:
        steps, name = getattr(algorithm, "n_steps", 1), type(algorithm).__name__
        if gamma not in (None, algorithm.gamma):
            raise SchemaError(
                f"ReplayBuffer(): gamma: expected {algorithm.gamma}, the gamma of {name}, got {gamma}; leave it out of "
                "replay_buffer_kwargs"
            )
        if n_steps is not None and steps not in (1, n_steps):  # 1 is its default
            raise SchemaError(
                f"ReplayBuffer(): n_steps: expected {steps}, the n_steps of {name}, got {n_steps}; leave it out of "
                "replay_buffer_kwargs"
            )
        n_steps, gamma = steps if n_steps is None else n_steps, algorithm.gamma
    n_steps = 1 if n_steps is None else n_steps
    if n_steps != 1 and gamma is None:
        raise SchemaError(
            f"ReplayBuffer(): gamma: n_steps={n_steps} needs a discount; give gamma= the discount of your targets"
        )
    if n_steps != 1 and "discounts" not in samples.ReplayBufferSamples._fields:
        raise SchemaError(
            f"ReplayBuffer(): n_steps: expected 1 with Stable-Baselines3 {samples.SB3_VERSION}, whose losses take no "
            f"discounts, got {n_steps}; pip install -U stable-baselines3"
        )
    return n_steps, 0.99 if gamma is None else gamma


def _calling_algorithm() -> Any:
    """The algorithm of Stable-Baselines3 that makes the buffer, or None.

    It passes neither ``n_steps`` nor ``gamma`` to a ``replay_buffer_class``, and with another discount it would learn
    wrong values without a sign. So they are read from the only function that makes its replay buffers.
    """
    if not samples.HAS_SB3:
        return None
    from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name in ("read_returns", "__init__"):
        frame = frame.f_back
    if frame is None or frame.f_code is not OffPolicyAlgorithm._setup_model.__code__:
        return None
    return frame.f_locals["self"]
