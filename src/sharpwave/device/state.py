"""What a table on a GPU keeps beside its rows: where its numbers stand, and how the programs of a launch know who is
last.

Everything that changes is on the device: a launch waits for nothing, and a captured graph goes on from where the last
replay ended.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places in a table's whole numbers.
NUMBERS = (
    "head",  # rows ever written, with those that were masked out
    "origin",  # rows before it were cleared; a multiple of the capacity
    "live",
    "calls",
    "sampled",
    "redraws",
    "added",
    "voided",
    "episodes",
    "applied",
    "stale",
    "programs",  # of the launch that is under way, those that are done
    "least",  # and the smallest probability they met: the bits of a double
    "seed",
    "refused",  # whether the update that is under way has a number that is none
    "applying",  # what its programs have applied so far
    "updates",
)
HEAD = tl.constexpr(0)
ORIGIN = tl.constexpr(1)
LIVE = tl.constexpr(2)
CALLS = tl.constexpr(3)
SAMPLED = tl.constexpr(4)
REDRAWS = tl.constexpr(5)
ADDED = tl.constexpr(6)
VOIDED = tl.constexpr(7)
EPISODES = tl.constexpr(8)
APPLIED = tl.constexpr(9)
STALE = tl.constexpr(10)
PROGRAMS = tl.constexpr(11)
LEAST = tl.constexpr(12)
SEED = tl.constexpr(13)
REFUSED = tl.constexpr(14)
APPLYING = tl.constexpr(15)
UPDATES = tl.constexpr(16)

REALS = ("alpha", "beta_start", "beta_end", "beta_steps", "running_max", "eps", "mix", "reference", "beta")
ALPHA = tl.constexpr(0)
BETA_START = tl.constexpr(1)
BETA_END = tl.constexpr(2)
BETA_STEPS = tl.constexpr(3)
RUNNING_MAX = tl.constexpr(4)
EPS = tl.constexpr(5)
MIX = tl.constexpr(6)
REFERENCE = tl.constexpr(7)  # of the last draw: the probability whose weight is 1 ...
BETA = tl.constexpr(8)  # ... and the exponent

# What a kernel tells the host without being waited for: words of the host's memory.
ALARMS = ("empty", "not_finite")
EMPTY = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)

# Bits of a row's flag byte.
IS_LIVE = tl.constexpr(1)
ENDS = tl.constexpr(2)
TRUNCATED = tl.constexpr(4)
STOPS = tl.constexpr(8)  # the row after it is another stream's


@triton.jit
def is_last(state):
    """Whether all other programs of the launch are done: what they wrote can be read, and what they read can be
    changed. The barrier makes it true of every thread: one alone does the counting."""
    tl.debug_barrier()
    last = tl.atomic_add(state + PROGRAMS, 1) == tl.num_programs(0) * tl.num_programs(1) - 1
    if last:
        tl.store(state + PROGRAMS, 0)
    return last
