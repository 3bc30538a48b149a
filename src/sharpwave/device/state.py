"""The counters of a table on a GPU, and how the programs of a launch find out which one is the last.

All state is on the device: a launch does not wait for the host, and a captured CUDA graph continues from the state that
its last replay left.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Positions in a table's whole numbers.
NUMBERS = (
    "head",  # rows ever written, including masked rows
    "origin",  # rows before this position were cleared; a multiple of the capacity
    "live",
    "calls",
    "sampled",
    "redraws",
    "added",
    "voided",
    "episodes",
    "applied",
    "stale",
    "programs",  # finished programs of the running launch
    "least",  # smallest probability in the running launch: the bits of a double
    "seed",
    "refused",  # whether the running update has a priority that is not finite
    "applying",  # rows that the running update has applied so far
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
REFERENCE = tl.constexpr(7)  # of the last draw: the probability whose weight is 1
BETA = tl.constexpr(8)  # of the last draw

# Words in host memory that kernels set: the host reads them without waiting for the device.
ALARMS = ("empty", "not_finite")
EMPTY = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)

# Bits of a row's flag byte.
IS_LIVE = tl.constexpr(1)
ENDS = tl.constexpr(2)
TRUNCATED = tl.constexpr(4)
STOPS = tl.constexpr(8)  # the next row belongs to another writer's stream
GOES_ON = tl.constexpr(16)  # a row of a file that was opened here: an earlier row started its episode


@triton.jit
def is_last(state):
    """Whether all other programs of the launch are finished: their writes can be read, and their inputs can be changed.
    The barrier is needed because a single thread of the program does the counting."""
    tl.debug_barrier()
    last = tl.atomic_add(state + PROGRAMS, 1) == tl.num_programs(0) * tl.num_programs(1) - 1
    if last:
        tl.store(state + PROGRAMS, 0)
    return last
