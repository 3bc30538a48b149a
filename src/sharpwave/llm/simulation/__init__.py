"""Simulated time, and parts of a run that take it: a generator and a learner with costs. For tests of policies."""

from .loop import VirtualClock, simulate

__all__ = ["VirtualClock", "simulate"]
