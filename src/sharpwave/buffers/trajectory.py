"""TrajectoryReplayBuffer: trajectories in files or in memory, and transitions drawn from the newest of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..address import to_path
from ..checks import check_settable, one_of, random_seed, truth, whole
from ..errors import SchemaError, StorageError
from ..files.save_path import read_save_path
from ..rows.tensors import read_device
from ..trajectories.checkpoint import check_part, has_index
from ..trajectories.layout import FORMATS
from ..trajectories.protocol import Trajectories
from ..trajectories.store import DEFAULT_FORMAT, TrajectoryStore, to_folder
from ..trajectories.trajectory import Trajectory

__all__ = ["TrajectoryReplayBuffer", "open_trajectories"]

_Result = TypeVar("_Result")
_CACHE = 5  # trajectories


class TrajectoryReplayBuffer:
    """Keeps trajectories as files, the newest also in memory, and draws transitions uniformly.

    ``add`` copies the data and returns; a thread writes the files. ``sample`` can draw from a trajectory as soon as it
    is added. A write that fails is raised by the next call and by ``close()``. A folder that exists is opened and
    continued. Several threads may add and sample at the same time.

    Args:
        folder: The folder of the files, for this buffer alone. None keeps trajectories in memory only; ``save`` writes
            their files.
        capacity: Trajectories kept at most; the oldest are deleted. None: no bound. Trajectories that a load set aside
            do not count.
        max_bytes: The same bound in bytes.
        recent: ``sample`` draws from this many of the newest trajectories; None: from all. May be set later.
        cache: How many of the newest trajectories are also in memory; 0: none. Only with a folder.
        cache_bytes: Bytes of the cache at most, whatever ``cache`` says.
        format: The format of files to come: "safetensors", "pt" (``torch.load`` and RLinf read it) or "pkl" (needs
            ``allow_pickle``).
        allow_pickle: Reads "pkl" files. Reading a pickle runs the code in it: only for files that you trust.
        device: Where batches go, as tensors; None: NumPy arrays. ``sample(device=)`` overrides it.
        seed: Of the draws; None: a random one. A folder or checkpoint that exists has its own.
        recover: Opens a folder whose index is damaged, and loads such a checkpoint, with what is whole in it. A
            warning counts what is lost.

    Raises:
        SchemaError: A setting is impossible, or two do not go together.
        StorageError: The folder cannot be made or read, is damaged, or another buffer has it open.

    Example:
        >>> import numpy as np
        >>> import sharpwave as sw
        >>> buf = sw.TrajectoryReplayBuffer("run/buffer", recent=100)
        >>> obs = np.zeros((51, 8, 64), np.float32)
        >>> buf.add(sw.Trajectory(actions=np.zeros((50, 8, 7), np.float32), curr_obs={"state": obs[:-1]},
        ...                       next_obs={"state": obs[1:]}, rewards=np.ones((50, 8), np.float32)))
        >>> batch = buf.sample(256)
        >>> batch["curr_obs"]["state"].shape
        (256, 64)
        >>> buf.close()
    """

    if not TYPE_CHECKING:  # to a type checker every name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_settable(self, name)
            object.__setattr__(self, name, value)

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        *,
        capacity: int | None = None,
        max_bytes: int | None = None,
        recent: int | None = None,
        cache: int = _CACHE,
        cache_bytes: int | None = None,
        format: str = DEFAULT_FORMAT,
        allow_pickle: bool = False,
        device: Any = None,
        seed: int | None = None,
        recover: bool = False,
    ) -> None:
        where = "TrajectoryReplayBuffer()"
        for name, bound in (
            ("capacity", capacity),
            ("max_bytes", max_bytes),
            ("recent", recent),
            ("cache_bytes", cache_bytes),
        ):
            if bound is not None:
                whole(where, name, bound)
        whole(where, "cache", cache, 0)
        one_of(where, "format", format, FORMATS)
        truth(where, "allow_pickle", allow_pickle)
        truth(where, "recover", recover)
        if seed is not None:
            whole(where, "seed", seed, 0, 2**64 - 1)
        if device is not None:
            read_device(f"{where}: device", device)
        if format == "pkl" and not allow_pickle:
            raise SchemaError(
                f"{where}: format: 'pkl' files run code when they are read; give allow_pickle=True if you trust them, "
                f"or format={DEFAULT_FORMAT!r}"
            )
        path = None if folder is None else _path(where, "folder", folder)
        if path is None and (cache_bytes is not None or cache != _CACHE):
            name = "cache" if cache_bytes is None else "cache_bytes"
            raise SchemaError(
                f"{where}: {name}: with folder=None every trajectory is in memory and there is no cache; leave it out; "
                "capacity= and max_bytes= bound what is kept"
            )
        if cache == 0 and cache_bytes is not None:
            raise SchemaError(f"{where}: cache_bytes: with cache=0 there is no cache; leave one of them out")
        store = TrajectoryStore(
            where,
            path,
            format=format,
            seed=random_seed() if seed is None else seed,
            capacity=capacity,
            max_bytes=max_bytes,
            cache=None if path is None else cache,
            cache_bytes=cache_bytes,
            allow_pickle=allow_pickle,
            device=device,
            recover=recover,
        )
        self._take(store, recent)

    def _take(self, store: Trajectories, recent: int | None = None) -> None:
        self._store, self._recent = store, recent

    @classmethod
    def _over(cls, store: Trajectories, recent: int | None = None) -> TrajectoryReplayBuffer:
        """A buffer over a store that exists."""
        buffer = cls.__new__(cls)
        buffer._take(store, recent)
        return buffer

    # ---- writing ------------------------------------------------------------------------------------------------

    def add(self, trajectories: Iterable[Any] | Trajectory) -> None:
        """Adds trajectories, a list of them or one: all of them, or after an error none.

        The first trajectory decides what all later ones must have: the same names, dtypes and shapes of a row. For a
        buffer on a server this returns when the server has written the files: they survive its death.

        Raises:
            SchemaError: A trajectory has neither rewards nor log-probabilities, or an array is missing, unknown or of
                another dtype or shape.
            StorageError: An earlier trajectory could not be written, and still cannot.
        """
        is_one = hasattr(trajectories, "model_weights_id")  # also a Trajectory of RLinf's own class
        self._store.add("add()", [trajectories] if is_one else trajectories)

    async def add_async(self, trajectories: Iterable[Any] | Trajectory) -> None:
        """``add`` for an event loop, in a thread."""
        await _in_thread(functools.partial(self.add, trajectories))

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, *, device: Any = None) -> dict[str, Any]:
        """Draws transitions of the newest ``recent`` trajectories uniformly, with replacement.

        Args:
            batch_size: How many transitions; at most as many as these trajectories hold.
            device: Where the batch goes, as tensors; None: the buffer's ``device``.

        Returns:
            The fields of the trajectories, ``(batch_size, ...)`` each, nested as they were added, and where every row
            comes from: ``trajectory_id``, ``step``, ``env``.

        Raises:
            NotReady: The buffer is empty, or its newest trajectories hold fewer transitions.
            SchemaError: ``max_bytes`` never allows so many transitions.
            StorageError: A trajectory could not be written (raised once), or a file cannot be read.
        """
        where = "sample()"
        count = whole(where, "batch_size", batch_size)
        if device is not None:
            read_device(f"{where}: device", device)
        return self._store.sample(where, count, self._recent, device)

    async def sample_async(self, batch_size: int, *, device: Any = None) -> dict[str, Any]:
        """``sample`` for an event loop, in a thread."""
        return await _in_thread(functools.partial(self.sample, batch_size, device=device))

    def get(self, trajectory_id: int) -> Trajectory:
        """A copy of a trajectory as it was added.

        Raises:
            StaleHandle: There is no trajectory of that id.
        """
        return self._store.get("get()", whole("get()", "trajectory_id", trajectory_id, 0))

    def trajectories(self) -> Iterator[tuple[int, Trajectory]]:
        """Every trajectory with its id, oldest first. Those that are deleted meanwhile are left out."""
        return self._store.trajectories("trajectories()")

    # ---- facts --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Trajectories."""
        return self._store.count("len()")

    @property
    def capacity(self) -> int | None:
        """Trajectories kept at most; None: no bound."""
        return self._store.capacity

    @property
    def recent(self) -> int | None:
        """From how many of the newest trajectories ``sample`` draws; None: from all. May be set."""
        return self._recent

    @recent.setter
    def recent(self, value: int | None) -> None:
        self._recent = None if value is None else whole("recent", "recent", value)

    @property
    def folder(self) -> Path | str | None:
        """The folder of the files; None in memory. Of a buffer on a server, the server's path as text."""
        return self._store.folder

    @property
    def device(self) -> Any:
        """Where batches go; None: NumPy arrays."""
        return self._store.device

    def stats(self) -> dict[str, Any]:
        """Counts and sizes.

        ``size``, ``transitions``: trajectories and their transitions; ``capacity``; ``added``: trajectories added since
        the buffer was opened or loaded; ``cached``, ``cache_bytes``: trajectories in memory; ``cache_hits``,
        ``cache_misses``: transitions drawn from memory and from files; ``stored_bytes``: of all trajectories, on disk
        or, with ``folder=None``, in memory; ``unsaved``: trajectories that have no file yet; ``set_aside``: kept in the
        folder and not drawn from, because a load replaced them; ``seed``; ``format``: of files to come.
        """
        return self._store.stats("stats()")

    def __repr__(self) -> str:
        return f"<TrajectoryReplayBuffer {self._store.place}: {self._store.summary()}>"

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a checkpoint (trajectories, counters, random stream) of this instant to a folder, completely or not at
        all. A former checkpoint of that name is replaced.

        ``sharpwave.open(path)`` and ``load`` read it, and RLinf does if the format is "pt" or "pkl". Files are hard
        links where the file system has them. Other threads may go on adding. Saved into the buffer's own folder, that
        folder is the checkpoint. A server writes the checkpoint on its own machine.

        Raises:
            StorageError: A trajectory or the checkpoint cannot be written, or the folder holds a file that the index of
                a checkpoint does not list.
        """
        self._store.save("save()", Path(read_save_path(path)))

    async def save_async(self, path: str | os.PathLike[str]) -> None:
        """``save`` for an event loop, in a thread."""
        await _in_thread(functools.partial(self.save, path))

    def load(
        self, path: str | os.PathLike[str], *, rank: int = 0, world_size: int = 1, split_by: str = "count"
    ) -> None:
        """Replaces the trajectories and the random stream by those of a checkpoint.

        The files are linked into this buffer's folder. No file is deleted: trajectories that the folder held and the
        checkpoint does not are set aside. They stay in the folder and its index, ``stats()["set_aside"]`` counts them,
        ``sharpwave split`` takes them out, and ``clear(set_aside=True)`` deletes them. In memory only the newest
        trajectories within ``capacity`` and ``max_bytes`` are kept.

        Args:
            path: A checkpoint of ours or of RLinf's, or a folder with one for every rank (``rank_0``, ...). A server
                reads it on its own machine.
            rank: Which part to take. Trajectories that are added later have different ids in every rank.
            world_size: How many parts there are.
            split_by: "count": consecutive trajectories, the same number for every rank or one more. "samples":
                consecutive trajectories with about the same number of transitions. "stride": every ``world_size``-th
                trajectory.

        Raises:
            FileNotFoundError: The checkpoint or a file of it is missing (a StorageError).
            SchemaError: ``rank`` is not below ``world_size``.
        """
        where = "load()"
        source = _path(where, "path", path)
        check_part(where, rank, world_size, split_by)
        self._store.load(where, source, None if world_size == 1 else (rank, world_size, split_by))

    # ---- life ---------------------------------------------------------------------------------------------------

    def clear(self, *, set_aside: bool = False) -> None:
        """Deletes every trajectory, in memory and on disk. Later trajectories get new ids.

        Args:
            set_aside: Also deletes those that ``load`` set aside.
        """
        self._store.clear("clear()", set_aside=truth("clear()", "set_aside", set_aside))

    def flush(self) -> None:
        """Returns when every trajectory that was added has its file. Failed writes are tried again."""
        self._store.flush("flush()")

    async def flush_async(self) -> None:
        """``flush`` for an event loop, in a thread."""
        await _in_thread(self.flush)

    def close(self) -> None:
        """Writes what is left and lets go of the folder. A second call does nothing.

        Raises:
            StorageError: Trajectories could not be written and are lost. The buffer is closed all the same.
        """
        self._store.close("close()")

    def __enter__(self) -> TrajectoryReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        store = self._store
        if store.address is None:
            raise TypeError("pickle: a TrajectoryReplayBuffer belongs to one process; save() it")
        return _open_again, (store.address, store.open_options, self._recent)


def _open_again(address: str, options: dict[str, Any], recent: int | None) -> TrajectoryReplayBuffer:
    """A pickled buffer of a server, in another process."""
    from .open import open

    buffer: TrajectoryReplayBuffer = open(address, **options)
    buffer.recent = recent
    return buffer


async def _in_thread(call: Callable[[], _Result]) -> _Result:
    import asyncio  # by the first coroutine: importing it takes longer than importing this package

    return await asyncio.to_thread(call)


def open_trajectories(
    where: str, path: Path, *, in_place: bool, device: Any = None, recover: bool = False
) -> TrajectoryReplayBuffer:
    """A buffer over a folder that exists, or with a copy of it in memory; the format is that of its newest file."""
    if device is not None:
        read_device(f"{where}: device", device)
    if in_place and not has_index(path):
        raise StorageError(
            f"{where}: {path} holds a folder for every rank (rank_0, ...), and only one of those can be continued; "
            "open the path without 'file://' for a copy of all, or merge them"
        )
    store = TrajectoryStore(
        where,
        path if in_place else None,
        format=None,
        seed=random_seed(),
        cache=_CACHE if in_place else None,
        device=device,
        recover=recover,
    )
    if not in_place:
        store.load(where, path, None)
    return TrajectoryReplayBuffer._over(store)


def _path(where: str, name: str, value: Any) -> Path:
    path = to_folder(where, name, value)
    try:
        is_address = to_path(str(value), where) is not None
    except StorageError:
        is_address = True
    if is_address:
        raise SchemaError(f"{where}: {name}: expected a path, got {str(value)!r}; leave out what ends in '://'")
    return path
