"""Simulated time, and parts of a run that take it: a generator and a learner with costs. For tests of policies."""

from .device import Device
from .loop import VirtualClock, simulate
from .parts import Costs, SimulatedGenerator, SimulatedLearner, SimulatedWeights, log_normal_lengths
from .steps import StepTimes, simulate_steps

__all__ = [
    "Costs",
    "Device",
    "SimulatedGenerator",
    "SimulatedLearner",
    "SimulatedWeights",
    "StepTimes",
    "VirtualClock",
    "log_normal_lengths",
    "simulate",
    "simulate_steps",
]
