"""RLinf's trajectory buffer. Where RLinf is not installed, change the import:

    from sharpwave.compat.rlinf import Trajectory, TrajectoryReplayBuffer

Both names of every argument work: those of the first version (``storage_dir``, ``storage_format``,
``save_trajectories``) and today's (``auto_save_path``, ``trajectory_format``, ``auto_save``); so do both orders of
positional arguments. docs/how-to/train-from-disk.md lists what differs on purpose, and why; ``as_upstream=True`` brings
back what can be.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import sharpwave as sw
from sharpwave import Trajectory
from sharpwave.errors import NotReady, SchemaError

__all__ = ["Trajectory", "TrajectoryReplayBuffer"]

_STATS = ("num_trajectories", "total_samples", "cache_size")
_PLACE = ("trajectory_id", "step", "env")
# Behind seed, enable_cache and cache_size: of the first version, and of today's.
_FIRST = ("storage_dir", "storage_format", "sample_window_size", "save_trajectories")
_TODAY = ("sample_window_size", "auto_save", "auto_save_path", "trajectory_format")
_SAME = {"auto_save_path": "storage_dir", "trajectory_format": "storage_format", "auto_save": "save_trajectories"}


class _Empty(NotReady, RuntimeError):
    """Upstream's class of the same mistake."""


class TrajectoryReplayBuffer(sw.TrajectoryReplayBuffer):
    """RLinf's trajectory buffer over ``sharpwave.TrajectoryReplayBuffer``.

    Args:
        seed, enable_cache, cache_size: As there; a seed of None is 1234.
        positional: What follows: ``storage_dir, storage_format, sample_window_size, save_trajectories`` if the first
            of them is a path, else ``sample_window_size, auto_save, auto_save_path, trajectory_format``, and then
            ``auto_save`` is False unless given.
        as_upstream: A batch larger than the window is clamped; a trajectory without rewards and log-probabilities is
            skipped (``num_skipped`` counts them); lists, strings and arrays of one axis are left out; loading starts
            the random stream anew. All of these are errors otherwise, or continue.
        options: By either name; and those of ``sharpwave.TrajectoryReplayBuffer``.
    """

    def __init__(
        self,
        seed: int | None = 1234,
        enable_cache: bool = True,
        cache_size: int = 5,
        *positional: Any,
        as_upstream: bool = False,
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        self._as_upstream = self._drops_the_rest = as_upstream
        self.num_skipped = 0
        given = _named(positional, options)
        window = given.pop("sample_window_size", 100)
        is_whole = isinstance(window, int) and not isinstance(window, bool)
        super().__init__(
            seed=1234 if seed is None else seed,
            enable_cache=enable_cache,
            cache_size=cache_size,
            sample_window_size=max(0, window) if is_whole else window,
            device=device,
            **given,
        )

    def add_trajectories(self, trajectories: Iterable[Any] | None) -> None:
        """Adds trajectories: all of them, or after an error none. None and an empty list do nothing."""
        given = [] if trajectories is None else trajectories
        if self._as_upstream:
            given = list(given)
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

    def is_ready(self, min_size: int) -> bool:
        """Whether there are so many trajectories."""
        return super().is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """``num_trajectories``, ``total_samples``, ``cache_size`` (in the cache now)."""
        stats = super().get_stats()
        return {name: stats[name] for name in _STATS}

    def save_checkpoint(self, path: str | os.PathLike[str] = "", *, save_path: str | os.PathLike[str] = "") -> None:
        """As there; upstream calls the path ``save_path``."""
        super().save_checkpoint(_either("save_checkpoint()", "save_path", path, save_path))

    def load_checkpoint(
        self,
        path: str | os.PathLike[str] = "",
        is_distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
        *,
        split_by: str = "count",
        load_path: str | os.PathLike[str] = "",
    ) -> None:
        """As there; upstream calls the path ``load_path``."""
        path = _either("load_checkpoint()", "load_path", path, load_path)
        super().load_checkpoint(path, is_distributed, local_rank, world_size, split_by=split_by)
        if self._as_upstream:
            self._calls = 0

    def close(self, wait: bool = True) -> None:
        """Writes what is left, also with ``wait=False``, and lets go of the folder."""
        super().close()

    def clear(self, *, set_aside: bool = False) -> None:
        """Forgets every trajectory; of a closed buffer only in memory, its files stay."""
        if self._is_closed:
            self._entries.clear()
            self._rows.drop(len(self._rows))
        else:
            super().clear(set_aside=set_aside)

    def clear_cache(self) -> None:
        """Frees the cache; saving goes on."""
        if self._is_closed:
            return
        try:
            super().clear_cache()
        except SchemaError:
            self.clear()  # there is nothing but the cache


def _named(positional: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Options by today's names here, from either order and either name."""
    where = "TrajectoryReplayBuffer"
    given = dict(options)
    if positional:
        names = _FIRST if isinstance(positional[0], (str, os.PathLike)) else _TODAY
        if len(positional) > len(names):
            raise SchemaError(
                f"{where}: expected at most {3 + len(names)} positional arguments, got {3 + len(positional)}"
            )
        if names is _TODAY and "save_trajectories" not in given:
            given.setdefault("auto_save", False)
        for name, value in zip(names, positional, strict=False):
            if name in options:
                raise SchemaError(f"{where}: {name}: given twice, by place and by name")
            given[name] = value
    for other, name in _SAME.items():
        if other not in given:
            continue
        value = given.pop(other)
        if value is None or value == "":
            continue
        if given.get(name) not in (None, "", value):
            raise SchemaError(f"{where}: {name}={given[name]!r} and {other}={value!r} are one argument; give one")
        given[name] = value
    return given


def _either(where: str, name: str, path: Any, other: Any) -> Any:
    """A path by upstream's name of the argument or by ours."""
    if path != "" and other != "":
        raise SchemaError(f"{where}: {name} and path are one argument; give one")
    return other if path == "" else path
