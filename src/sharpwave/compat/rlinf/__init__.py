"""The names of RLinf's trajectory buffer: torch tensors in, torch tensors out.

    from sharpwave.compat.rlinf import Trajectory, TrajectoryReplayBuffer

Both names of every argument work: those of the first version (``storage_dir``, ``storage_format``,
``save_trajectories``) and today's (``auto_save_path``, ``trajectory_format``, ``auto_save``).
docs/how-to/train-from-disk.md lists what differs on purpose, and why; ``as_upstream=True`` brings back what can be.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

import sharpwave as sw
from sharpwave import Trajectory
from sharpwave.errors import NotReady, SchemaError

__all__ = ["Trajectory", "TrajectoryReplayBuffer"]

_STATS = ("num_trajectories", "total_samples", "cache_size")
_PLACE = ("trajectory_id", "step", "env")


class _Empty(NotReady, RuntimeError):
    """Upstream's class of the same mistake."""


class TrajectoryReplayBuffer(sw.TrajectoryReplayBuffer):
    """RLinf's trajectory buffer over ``sharpwave.TrajectoryReplayBuffer``.

    Args:
        as_upstream: A batch larger than the window is clamped; a trajectory without rewards and log-probabilities is
            skipped (``num_skipped`` counts them); lists, strings and arrays of one axis are left out; loading starts
            the random stream anew; a checkpoint with ``save_trajectories=False`` warns and writes nothing. All of these
            are errors otherwise, or continue.
        options: Those of ``sharpwave.TrajectoryReplayBuffer``.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        storage_dir: str | os.PathLike[str] | None = None,
        storage_format: str = "pt",
        enable_cache: bool = True,
        cache_size: int = 5,
        sample_window_size: int = 100,
        save_trajectories: bool = True,
        *,
        auto_save_path: str | os.PathLike[str] | None = None,
        trajectory_format: str | None = None,
        auto_save: bool | None = None,
        as_upstream: bool = False,
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        self._as_upstream = self._drops_the_rest = as_upstream
        self.num_skipped = 0
        super().__init__(
            seed=1234 if seed is None else seed,
            storage_dir=storage_dir or auto_save_path,
            enable_cache=enable_cache,
            cache_size=cache_size,
            storage_format=trajectory_format or storage_format,
            sample_window_size=max(0, sample_window_size),
            save_trajectories=save_trajectories if auto_save is None else auto_save,
            device=device,
            **options,
        )

    def add_trajectories(self, trajectories: Iterable[Any]) -> None:
        """Adds trajectories: all of them, or after an error none."""
        given = list(trajectories)
        if self._as_upstream:
            kept = [one for one in given if one.prev_logprobs is not None or one.rewards is not None]
            super().add_trajectories(kept)
            self.num_skipped += len(given) - len(kept)
        else:
            super().add_trajectories(given)

    def sample(self, num_chunks: int = 0, *, device: Any = None) -> dict[str, Any]:
        """Transitions of the window, as tensors: upstream's keys and no others.

        Raises:
            RuntimeError: The buffer is empty.
        """
        batch = super().sample(num_chunks, device=device)
        for name in _PLACE:
            del batch[name]
        return batch

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """The same."""
        return self.sample(num_chunks)

    def _check_count(self, where: str, count: int, there: int) -> int:
        if there == 0:
            raise _Empty("Cannot sample from an empty buffer.")
        return super()._check_count(where, min(count, there) if self._as_upstream else count, there)

    async def is_ready_async(self, min_size: int) -> bool:
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """``num_trajectories``, ``total_samples``, ``cache_size`` (in the cache now)."""
        stats = super().get_stats()
        return {name: stats[name] for name in _STATS}

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if self._as_upstream and not self._saves:
            warnings.warn("save_checkpoint(): save_trajectories=False: nothing is written", stacklevel=2)
            return
        super().save_checkpoint(path)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        split_by: str = "count",
    ) -> None:
        super().load_checkpoint(path, is_distributed, local_rank, world_size, split_by=split_by)
        if self._as_upstream:
            self._calls = 0

    def close(self, wait: bool = True) -> None:
        """Writes what is left, also with ``wait=False``, and lets go of the folder."""
        super().close()

    def clear(self) -> None:
        """Forgets every trajectory; of a closed buffer only in memory, its files stay."""
        if self._is_closed:
            self._entries.clear()
            self._rows.drop(len(self._rows))
        else:
            super().clear()

    def clear_cache(self) -> None:
        """Frees the cache; saving goes on."""
        if self._is_closed:
            return
        try:
            super().clear_cache()
        except SchemaError:
            self.clear()  # there is nothing but the cache
