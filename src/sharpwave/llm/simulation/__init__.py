"""Simulated time, and parts of a run that take it: a generator and a learner with costs. For tests of policies."""

from .device import Device
from .loop import VirtualClock, simulate
from .parts import Costs, SimulatedGenerator, SimulatedLearner, SimulatedWeights, log_normal_lengths

__all__ = [
    "Costs",
    "Device",
    "SimulatedGenerator",
    "SimulatedLearner",
    "SimulatedWeights",
    "VirtualClock",
    "log_normal_lengths",
    "simulate",
]
