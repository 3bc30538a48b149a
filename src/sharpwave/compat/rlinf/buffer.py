"""RLinf's trajectory buffer, by the names of all its versions."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError
from sharpwave.trajectories.trajectory import nest, place, read, to_device
from sharpwave.trajectories.upstream import facts_by_id

from .trajectory import Trajectory

__all__ = ["TrajectoryReplayBuffer"]

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
            of them is a path, else ``sample_window_size, auto_save, auto_save_path, trajectory_format``.
        as_upstream: A batch larger than the window is clamped; a trajectory without rewards and log-probabilities is
            skipped (``num_skipped`` counts them); lists, strings and arrays of one axis are left out; loading starts
            the random stream anew. All of these are errors otherwise, or continue.
        options: By either name; and those of ``sharpwave.TrajectoryReplayBuffer``. Where one of today's names is given
            and none of the first version's, ``auto_save`` is False unless given, as today's version has it.

    While the buffer is open, the files by which RLinf and its tools know its folder are written at most a second after
    a change.
    """

    _tell_rlinf_every_s = 1.0

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
        self._enable_cache = enable_cache
        given = _named(positional, options)
        super().__init__(
            seed=1234 if seed is None else seed,
            enable_cache=enable_cache,
            cache_size=cache_size,
            sample_window_size=_window(given.pop("sample_window_size", 100)),
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

    # ---- upstream's attributes --------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """Of the draws; after a load, that of the checkpoint."""
        return self._seed

    @property
    def storage_format(self) -> str:
        """Of files to come."""
        return self._format

    trajectory_format = storage_format

    @property
    def enable_cache(self) -> bool:
        return self._enable_cache

    @property
    def save_trajectories(self) -> bool:
        return self._saves

    auto_save = save_trajectories

    @property
    def auto_save_path(self) -> str | None:
        """The folder of the files, as a string; None without any."""
        return None if self.storage_dir is None else str(self.storage_dir)

    @property
    def logger(self) -> logging.Logger:
        return logging.getLogger("sharpwave.compat.rlinf")

    @property
    def sample_window_size(self) -> int:
        """Of how many of the newest trajectories ``sample`` draws; 0 or less: of all. May be set."""
        return self._window

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        setter: Any = sw.TrajectoryReplayBuffer.sample_window_size
        setter.fset(self, _window(value))

    # Names that upstream calls private and its own tools and workers use.

    @property
    def _trajectory_id_list(self) -> list[int]:
        with self._lock:
            return [entry.id for entry in self._entries.values()]

    @property
    def _trajectory_index(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            return facts_by_id(self._kinds.index, self._entries.values())

    def _load_trajectory(self, trajectory_id: int, model_weights_id: str) -> sw.Trajectory:
        return self.get_trajectory(trajectory_id)

    def _flatten_trajectory(self, trajectory: Any) -> dict[str, Any]:
        """Rows as ``sample`` would draw them, steps first: flags and values are aligned to the steps."""
        parts = read("_flatten_trajectory()", trajectory, drops=True)
        steps, flat = np.arange(parts.steps), []
        for leaf, extra, array in zip(parts.leaves, parts.epochs, parts.arrays, strict=True):
            if extra:
                period, shift = place(leaf, parts.steps, extra)
                array = array[steps + steps // period + shift]
            flat.append(to_device(leaf.dtype, array.reshape(-1, *leaf.shape), "cpu"))
        return nest(parts.leaves, flat)

    def _copy(self, number: int, where: str) -> sw.Trajectory:
        return Trajectory(**vars(super()._copy(number, where)))

    # ---- upstream's methods -----------------------------------------------------------------------------------

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
    names: tuple[str, ...] = ()
    if positional:
        names = _FIRST if isinstance(positional[0], (str, os.PathLike)) else _TODAY
        if len(positional) > len(names):
            raise SchemaError(
                f"{where}: expected at most {3 + len(names)} positional arguments, got {3 + len(positional)}"
            )
        for name, value in zip(names, positional, strict=False):
            if name in options:
                raise SchemaError(f"{where}: {name}: given twice, by place and by name")
            given[name] = value
    is_today = bool(given.keys() & _SAME.keys()) or names is _TODAY
    if is_today and not given.keys() & {"auto_save", *_SAME.values()}:
        given["auto_save"] = False
        if given.get("auto_save_path"):
            warnings.warn(
                f"{where}: auto_save_path={given['auto_save_path']!r}: nothing is saved there without auto_save=True",
                stacklevel=3,
            )
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


def _window(value: Any) -> Any:
    """Upstream takes what is below 0 for 0."""
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else value


def _either(where: str, name: str, path: Any, other: Any) -> Any:
    """A path by upstream's name of the argument or by ours."""
    if path != "" and other != "":
        raise SchemaError(f"{where}: {name} and path are one argument; give one")
    return other if path == "" else path
