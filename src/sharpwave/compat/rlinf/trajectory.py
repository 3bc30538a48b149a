"""RLinf's trajectory: ours, and the one method that RLinf's has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import sharpwave as sw
from sharpwave.checks import one_of
from sharpwave.errors import SchemaError
from sharpwave.trajectories.trajectory import nest, place, read, to_device

__all__ = ["Trajectory"]

_FLAGS = frozenset({"terminations", "truncations", "dones"})


@dataclass
class Trajectory(sw.Trajectory):
    """``sharpwave.Trajectory``, with upstream's ``extract_intervene_traj``."""

    def extract_intervene_traj(self, mode: str = "any") -> list[Trajectory] | None:
        """The steps in which a human acted: a trajectory of one environment for each in which there are any.

        As upstream: the flags of a rollout of one epoch keep their first row (the flag at the reset), and ``versions``
        are left out. Elsewhere flags and ``prev_values`` have a row for each step that is taken: upstream raises there
        or shifts them.

        Args:
            mode: A step counts if "any" of its ``intervene_flags`` is set, or "all".

        Returns:
            None where there is no such step.

        Raises:
            SchemaError: ``intervene_flags`` are not bool, or an array does not fit the others.
        """
        where = "extract_intervene_traj()"
        one_of(where, "mode", mode, ("any", "all"))
        if self.intervene_flags is None:
            return None
        parts = read(where, self)
        number = next(at for at, leaf in enumerate(parts.leaves) if leaf.path == ("intervene_flags",))
        flags = parts.arrays[number]
        if flags.dtype != np.bool_:
            raise SchemaError(f"{where}: intervene_flags: expected bool, got {flags.dtype}")
        flat = flags.reshape(parts.steps, parts.envs, -1)
        taken = np.asarray(flat.any(2) if mode == "any" else flat.all(2) & flat.any(2))
        device = "cpu" if hasattr(self.intervene_flags, "detach") else None
        made = []
        for env in range(parts.envs):
            steps = np.flatnonzero(taken[:, env])
            if not len(steps):
                continue
            leaves, values = [], []
            for leaf, extra, array in zip(parts.leaves, parts.epochs, parts.arrays, strict=True):
                if leaf.path == ("versions",):
                    continue
                rows = steps
                if extra:
                    period, shift = place(leaf, parts.steps, extra)
                    rows = steps + steps // period + shift
                    if extra == 1 and leaf.path[0] in _FLAGS:
                        rows = np.concatenate([[0], rows])
                leaves.append(leaf)
                values.append(to_device(leaf.dtype, array[rows, env : env + 1], device))
            made.append(Trajectory(self.max_episode_length, self.model_weights_id, **nest(tuple(leaves), values)))
        return made or None
