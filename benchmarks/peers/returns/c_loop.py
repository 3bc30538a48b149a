"""What a loop in C takes: `gae.c`, compiled here with the system's compiler and called through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation

from peers.c_limit import address, compiled


class CLoop(Estimator):
    note = "-O3, and -O3 -march=native; arrays that exist; the loop over calls is in C, too"

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        source = Path(__file__).with_name("gae.c")
        return {
            "": calling(compiled(source), rollout),
            "native": calling(compiled(source, "-march=native"), rollout),
        }


def calling(native: ctypes.CDLL, rollout: Rollout) -> Operation:
    # Ones, so that every page is there.
    advantages, returns = np.ones_like(rollout.rewards), np.ones_like(rollout.rewards)

    def run(calls: int) -> tuple[np.ndarray, np.ndarray]:
        sizes = map(ctypes.c_int64, (calls, *rollout.rewards.shape))
        factors = map(ctypes.c_float, (GAMMA, GAE_LAMBDA))
        native.gae(*sizes, *factors, *map(address, (*rollout, advantages, returns)))
        return advantages, returns

    return Operation(run)


ESTIMATOR = CLoop
