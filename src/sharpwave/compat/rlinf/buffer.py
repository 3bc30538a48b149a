"""RLinf's trajectory buffer, with the argument names of all its versions."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.checks import one_of, truth, whole
from sharpwave.errors import NotReady, SchemaError
from sharpwave.rows.tensors import read_device
from sharpwave.trajectories.checkpoint import check_part
from sharpwave.trajectories.layout import FORMATS
from sharpwave.trajectories.store import TrajectoryStore, to_folder
from sharpwave.trajectories.trajectory import nest, place, read, to_device
from sharpwave.trajectories.upstream import facts_by_id

from .trajectory import Trajectory

__all__ = ["TrajectoryReplayBuffer"]

_WHERE = "TrajectoryReplayBuffer"
_STATS = {"num_trajectories": "size", "total_samples": "transitions", "cache_size": "cached"}
_PLACE = ("trajectory_id", "step", "env")
# Behind seed, enable_cache and cache_size: of the first version, and of today's.
_FIRST = ("storage_dir", "storage_format", "sample_window_size", "save_trajectories")
_TODAY = ("sample_window_size", "auto_save", "auto_save_path", "trajectory_format")
_SAME = {"auto_save_path": "storage_dir", "trajectory_format": "storage_format", "auto_save": "save_trajectories"}


class _Empty(NotReady, RuntimeError):
    """Upstream's class of the same mistake."""


class TrajectoryReplayBuffer:
    """RLinf's trajectory buffer, over the same store as ``sharpwave.TrajectoryReplayBuffer``.

    Args:
        seed: Of the draws; None is 1234.
        enable_cache: Keeps the newest trajectories in memory.
        cache_size: How many of them.
        positional: What follows: ``storage_dir, storage_format, sample_window_size, save_trajectories`` if the first
            of them is a path, else ``sample_window_size, auto_save, auto_save_path, trajectory_format``.
        as_upstream: A batch larger than the window is clamped; a trajectory without rewards and log-probabilities is
            skipped (``num_skipped`` counts them); lists, strings and arrays of one axis are left out; loading starts
            the random stream anew. Otherwise the first three are errors and the stream continues.
        device: Where batches go, as tensors; None gives NumPy arrays.
        options: By either name, ``storage_dir`` (None: ``replay_buffer`` in ``log_dir``), ``storage_format``,
            ``sample_window_size`` (0: all) and ``save_trajectories`` (False: in memory, the newest
            ``sample_window_size``); and ``log_dir``, ``cache_bytes``, ``max_trajectories``, ``max_bytes``,
            ``allow_pickle`` and ``recover``. Where one of today's names is given and none of the first version's,
            ``auto_save`` is False unless given, as today's version has it.

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
        self._as_upstream = as_upstream
        self.num_skipped = 0
        self._build(
            seed=1234 if seed is None else seed,
            enable_cache=enable_cache,
            cache_size=cache_size,
            device=device,
            **_named(positional, options),
        )

    def _build(
        self,
        *,
        seed: int,
        enable_cache: bool,
        cache_size: int,
        device: Any,
        storage_dir: str | os.PathLike[str] | None = None,
        storage_format: str = "pt",
        sample_window_size: int = 100,
        save_trajectories: bool = True,
        cache_bytes: int | None = None,
        max_trajectories: int | None = None,
        max_bytes: int | None = None,
        allow_pickle: bool = False,
        log_dir: str | os.PathLike[str] = "logs",
        recover: bool = False,
    ) -> None:
        whole(_WHERE, "seed", seed, 0, 2**64 - 1)
        whole(_WHERE, "cache_size", cache_size, 0)
        self._window = _window(_WHERE, sample_window_size)
        for name, bound in (
            ("cache_bytes", cache_bytes),
            ("max_trajectories", max_trajectories),
            ("max_bytes", max_bytes),
        ):
            if bound is not None:
                whole(_WHERE, name, bound)
        for name, value in (
            ("enable_cache", enable_cache),
            ("save_trajectories", save_trajectories),
            ("allow_pickle", allow_pickle),
            ("recover", recover),
        ):
            truth(_WHERE, name, value)
        one_of(_WHERE, "storage_format", storage_format, FORMATS)
        if device is not None:
            read_device(f"{_WHERE}: device", device)
        logs = to_folder(_WHERE, "log_dir", log_dir)
        given = None if storage_dir is None or storage_dir == "" else to_folder(_WHERE, "storage_dir", storage_dir)
        if storage_format == "pkl" and not allow_pickle:
            raise SchemaError(
                f"{_WHERE}: storage_format: 'pkl' files run code when they are loaded; give allow_pickle=True if you "
                "trust them, or storage_format='pt'"
            )
        if not save_trajectories and not enable_cache:
            raise SchemaError(
                f"{_WHERE}: save_trajectories=False keeps trajectories in the cache: give enable_cache=True"
            )
        self._enable_cache, self._saves, self._max_trajectories = enable_cache, save_trajectories, max_trajectories
        sizes = [size for size in (max_bytes, None if save_trajectories else cache_bytes) if size is not None]
        self._store = TrajectoryStore(
            _WHERE,
            (given or logs / "replay_buffer") if save_trajectories else None,
            format=storage_format,
            seed=seed,
            capacity=self._capacity(),
            max_bytes=min(sizes, default=None),
            cache=(cache_size if enable_cache else 0) if save_trajectories else None,
            cache_bytes=cache_bytes if save_trajectories else None,
            allow_pickle=allow_pickle,
            device=device,
            recover=recover,
            drops_non_arrays=self._as_upstream,
            follows_checkpoints=given is None,
            tell_rlinf_every_s=self._tell_rlinf_every_s,
        )

    def _capacity(self) -> int | None:
        """Trajectories kept at most: in memory, those that can be drawn."""
        bounds = self._max_trajectories, None if self._saves else self._window
        return min((bound for bound in bounds if bound), default=None)

    # ---- in and out -------------------------------------------------------------------------------------------

    def add_trajectories(self, trajectories: Iterable[Any] | None) -> None:
        """Adds trajectories: all of them, or after an error none. None and an empty list do nothing."""
        given = [] if trajectories is None else trajectories
        if self._as_upstream:
            given = list(given)
            kept = [one for one in given if one.prev_logprobs is not None or one.rewards is not None]
            self._store.add("add_trajectories()", kept)
            self.num_skipped += len(given) - len(kept)
        else:
            self._store.add("add_trajectories()", given)

    async def add_trajectories_async(self, trajectories: Iterable[Any]) -> None:
        """``add_trajectories`` in a thread."""
        await asyncio.to_thread(self.add_trajectories, list(trajectories))

    def sample(self, num_chunks: int = 0, *, device: Any = None) -> dict[str, Any]:
        """Transitions of the window, as tensors: upstream's keys and no others.

        Raises:
            RuntimeError: The buffer is empty.
        """
        where = "sample()"
        count = whole(where, "num_chunks", num_chunks)
        if device is not None:
            read_device(f"{where}: device", device)
        drawn = self._store.draw(where, self._window, functools.partial(self._check_count, where, count))
        batch = drawn.to_batch(self._store.device if device is None else device)
        for name in _PLACE:
            del batch[name]
        return batch

    def _check_count(self, where: str, count: int, there: int) -> int:
        if there == 0:
            raise _Empty("Cannot sample from an empty buffer.")
        if count > there and not self._as_upstream:
            raise SchemaError(
                f"{where}: num_chunks: expected at most the {there} transitions of the newest "
                f"{min(self._window or len(self), len(self))} trajectories, got {count}; add more, or give a larger "
                "sample_window_size"
            )
        return min(count, there)

    async def sample_async(self, num_chunks: int, *, device: Any = None) -> dict[str, Any]:
        """``sample`` in a thread."""
        return await asyncio.to_thread(self.sample, num_chunks, device=device)

    def sample_chunks(self, num_chunks: int) -> dict[str, Any]:
        """The same as ``sample``."""
        return self.sample(num_chunks)

    def get_trajectory(self, trajectory_id: int) -> Trajectory:
        """A copy of a trajectory as it was added.

        Raises:
            StaleHandle: There is none of that id.
        """
        return _to_upstream(self._store.get("get_trajectory()", trajectory_id))

    def trajectories(self) -> Iterator[tuple[int, Trajectory]]:
        """Every trajectory with its id, oldest first. Those that are deleted meanwhile are left out."""
        for number, trajectory in self._store.trajectories("trajectories()"):
            yield number, _to_upstream(trajectory)

    # ---- facts ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._store)

    @property
    def size(self) -> int:
        """Trajectories."""
        return len(self._store)

    @property
    def total_samples(self) -> int:
        """Transitions in all trajectories."""
        return self._store.transitions

    @property
    def seed(self) -> int:
        """Of the draws; after a load, that of the checkpoint."""
        return self._store.seed

    @property
    def storage_dir(self) -> Path | None:
        """The folder of the files; None without any."""
        return self._store.folder

    @property
    def auto_save_path(self) -> str | None:
        """The folder of the files, as a string; None without any."""
        return None if self.storage_dir is None else str(self.storage_dir)

    @property
    def storage_format(self) -> str:
        """Of files to come."""
        return self._store.format

    trajectory_format = storage_format

    @property
    def enable_cache(self) -> bool:
        return self._enable_cache

    @property
    def save_trajectories(self) -> bool:
        return self._saves

    auto_save = save_trajectories

    @property
    def sample_window_size(self) -> int:
        """From how many of the newest trajectories ``sample`` draws; 0 or less: from all. May be set."""
        return self._window

    @sample_window_size.setter
    def sample_window_size(self, value: int) -> None:
        self._window = _window("sample_window_size", value)
        self._store.capacity = self._capacity()

    @property
    def logger(self) -> logging.Logger:
        return logging.getLogger("sharpwave.compat.rlinf")

    def is_ready(self, min_size: int) -> bool:
        """Whether there are so many trajectories."""
        return len(self) >= whole("is_ready()", "min_trajectories", min_size, 0)

    async def is_ready_async(self, min_size: int) -> bool:
        return self.is_ready(min_size)

    def get_stats(self) -> dict[str, int]:
        """``num_trajectories``, ``total_samples``, ``cache_size`` (in the cache now)."""
        stats = self._store.stats("get_stats()")
        return {name: stats[ours] for name, ours in _STATS.items()}

    def __repr__(self) -> str:
        where = "memory" if self.storage_dir is None else repr(str(self.storage_dir))
        return f"TrajectoryReplayBuffer({len(self)} trajectories, {self.total_samples} transitions, {where})"

    # Names that upstream calls private and its own tools and workers use.

    @property
    def _trajectory_id_list(self) -> list[int]:
        return [entry.id for entry in self._store.entries()]

    @property
    def _trajectory_index(self) -> dict[int, dict[str, Any]]:
        return facts_by_id(self._store.index, self._store.entries())

    def _load_trajectory(self, trajectory_id: int, model_weights_id: str) -> Trajectory:
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

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: str | os.PathLike[str] = "", *, save_path: str | os.PathLike[str] = "") -> None:
        """Writes a checkpoint, as ``sharpwave.TrajectoryReplayBuffer.save``; upstream calls the path ``save_path``."""
        where = "save_checkpoint()"
        self._store.save(where, to_folder(where, "path", _either(where, "save_path", path, save_path)))

    async def save_checkpoint_async(self, path: str | os.PathLike[str]) -> None:
        """``save_checkpoint`` in a thread."""
        await asyncio.to_thread(self.save_checkpoint, path)

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
        """Loads a checkpoint, as ``sharpwave.TrajectoryReplayBuffer.load``; upstream calls the path ``load_path``.

        A buffer that was built without ``storage_dir`` continues in the folder that the checkpoint was taken of if that
        exists, else in the checkpoint itself (``rank_k`` in it, if distributed).

        Args:
            is_distributed: Takes one part of ``world_size``; otherwise rank and size do not count.
        """
        where = "load_checkpoint()"
        source = to_folder(where, "path", _either(where, "load_path", path, load_path))
        if truth(where, "is_distributed", is_distributed):
            check_part(where, local_rank, world_size, split_by, "local_rank")
        part = (local_rank, world_size, split_by) if is_distributed else None
        self._store.load(where, source, part, restarts=self._as_upstream)

    # ---- life -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Waits until every trajectory has its file. Failed writes are tried again."""
        self._store.flush("flush()")

    def clear(self, *, set_aside: bool = False) -> None:
        """Deletes every trajectory. A closed buffer only forgets them: its files stay."""
        if self._store.is_closed:
            self._store.forget("clear()")
        else:
            self._store.clear("clear()", set_aside=truth("clear()", "set_aside", set_aside))

    def clear_cache(self) -> None:
        """Frees the cache; saving goes on. Without files this deletes the trajectories."""
        if self._store.is_closed:
            return
        if self._saves:
            self._store.empty_cache("clear_cache()")
        else:
            self.clear()

    def close(self, wait: bool = True) -> None:
        """Writes what is left, also with ``wait=False``, and lets go of the folder."""
        self._store.close("close()")

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("pickle: a TrajectoryReplayBuffer belongs to one process; save_checkpoint() it")


def _to_upstream(trajectory: sw.Trajectory) -> Trajectory:
    return Trajectory(**vars(trajectory))


def _named(positional: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Options by the names of the first version, from either order of arguments and either version's names."""
    where = _WHERE
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


def _window(where: str, value: Any) -> int:
    """Upstream takes a negative number for 0."""
    value = max(0, value) if isinstance(value, int) and not isinstance(value, bool) else value
    return whole(where, "sample_window_size", value, 0)


def _either(where: str, name: str, path: Any, other: Any) -> Any:
    """The path, given by upstream's name of the argument or by the first version's."""
    if path != "" and other != "":
        raise SchemaError(f"{where}: {name} and path are one argument; give one")
    return other if path == "" else path
