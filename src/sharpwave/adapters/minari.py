"""Minari data sets into a ReplayBuffer, and its episodes into a data set. The environment's package is not needed."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

try:
    import minari
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: pip install "sharpwave[gym]"', name=error.name) from None

from sharpwave import Field, ReplayBuffer
from sharpwave.checks import told, whole
from sharpwave.errors import SchemaError, SharpwaveError, StorageError
from sharpwave.schema import Node, from_space

__all__ = ["load", "save"]

_TOGETHER = 64  # episodes that are written at a time
_ROWS = 4096  # rows that are added at a time
_SAVED = ("obs", "action", "reward", "next_obs", "done")


def load(dataset: Any, *, capacity: int | None = None, **options: Any) -> ReplayBuffer:
    """A buffer with the episodes of a Minari data set, one after the other.

    Fields have the shapes of the data set's spaces, and dtypes that hold its numbers exactly. Infos are not read.

    An episode ends where the data set says so. Its last step counts as truncated if the data set does not say that it
    ends there.

    Args:
        dataset: A ``MinariDataset``, the name of one on this machine, or its folder.
        capacity: Rows kept; None keeps all. With a smaller number the newest rows are kept.
        **options: Passed on to ``ReplayBuffer``. Fields in ``schema=`` replace those of the data set.

    Raises:
        StorageError: There is no such data set, or it cannot be read.
        SchemaError: An observation or action is something that fields cannot hold.
    """
    where = "load()"
    if options.setdefault("num_envs", 1) not in (None, 1):
        got = told(options["num_envs"])
        raise SchemaError(f"{where}: num_envs: episodes are added as those of one environment, got {got}; leave it out")
    data = open_dataset(where, dataset)
    steps = data.total_steps
    if steps == 0:
        raise SchemaError(f"{where}: minari:{data.id}: there are no steps in it")
    size = steps if capacity is None else whole(where, "capacity", capacity)
    fields, replaced = data.fields(where), dict(options.pop("schema", None) or {})
    buffer = ReplayBuffer(size, schema={**fields, **replaced}, **options)
    try:
        for episode in data.episodes(where):
            _add_episode(where, buffer, episode, {name: fields[name] for name in fields if name not in replaced})
    except BaseException:
        buffer.close(unlink=options.get("exist") != "attach")
        raise
    return buffer


def save(
    buffer: ReplayBuffer,
    name: str,
    *,
    observation_space: Any = None,
    action_space: Any = None,
    env_spec: Any = None,
    **about: Any,
) -> Any:
    """Makes a Minari data set of the finished episodes of a buffer that have lost no rows.

    Observations (with the last one of each episode), actions, rewards, terminations and truncations are saved. Other
    fields are not; a warning names them. Images are stored without loss.

    Args:
        buffer: A buffer whose rows have ``next_obs``.
        name: Of the new data set, ``"namespace/name-v0"``.
        observation_space, action_space: Gymnasium spaces. By default they are made from the fields: boxes without
            bounds, and ``Discrete`` for an action that is a whole number.
        env_spec: The ``EnvSpec`` of the environment. It is stored; the environment is not made.
        **about: Passed on to ``minari.create_dataset_from_buffers``: ``author``, ``description``, ...

    Returns:
        The ``MinariDataset``.

    Raises:
        SchemaError: There is no such episode, or a field cannot be saved.
        StorageError: There is a data set of that name, or it cannot be written. A failed call leaves no data set.
    """
    where = "save()"
    if not isinstance(buffer, ReplayBuffer):
        raise SchemaError(f"{where}: buffer: expected a ReplayBuffer, got {told(buffer)}")
    schema = buffer.schema
    missing = [field for field in ("obs", "action", "next_obs") if field not in schema]
    if missing:
        raise SchemaError(f"{where}: a data set needs {' and '.join(missing)}, which the buffer does not have")
    left_out = [field for field in schema if field not in _SAVED]
    if left_out:
        warnings.warn(f"save(): {', '.join(left_out)}: a Minari data set has no place for these fields", stacklevel=2)
    fields = {field: _saved_fields(where, field, schema[field]) for field in ("obs", "action")}
    ranges = (ranges_of(_to_host(one["action"])) for one in buffer.episodes())
    spaces = {
        "observation_space": space_of(fields["obs"]) if observation_space is None else observation_space,
        "action_space": space_of(fields["action"], ranges) if action_space is None else action_space,
    }
    return write_dataset(where, name, (_to_episode(where, one) for one in buffer.episodes()), spaces, env_spec, about)


# ---- rows and episodes -----------------------------------------------------------------------------------------------


def _add_episode(where: str, buffer: ReplayBuffer, episode: Any, exact: Mapping[str, Node]) -> None:
    """Adds an episode of a data set; numbers of the fields in ``exact`` may not change."""
    steps = len(episode.rewards)
    values = {"obs": episode.observations, "action": episode.actions, "reward": np.asarray(episode.rewards)}
    for name in (name for name in ("obs", "action", "reward") if name in exact):
        _fit(f"{where}: episode {episode.id}: {name}", exact[name], values[name])
    for _, array in _leaves_of(episode.observations):
        if len(array) != steps + 1:
            raise SchemaError(
                f"{where}: episode {episode.id}: expected {steps + 1} observations, as it has {steps} steps, "
                f"got {len(array)}"
            )
    terminated = np.asarray(episode.terminations).astype(bool)
    truncated = np.asarray(episode.truncations).astype(bool)
    if steps:
        truncated[-1] |= not terminated[-1]
    together = min(_ROWS, buffer.capacity)
    for begin in range(0, steps, together):
        rows = slice(begin, min(begin + together, steps))
        row: dict[str, Any] = {name: cut(value, rows) for name, value in values.items()}
        if "next_obs" in buffer.schema:
            row["next_obs"] = cut(values["obs"], slice(rows.start + 1, rows.stop + 1))
        buffer.add(**row, done=terminated[rows], truncated=truncated[rows])


def _to_episode(where: str, episode: dict[str, Any]) -> dict[str, Any]:
    """An episode of a buffer as ``EpisodeBuffer`` takes it."""
    obs, after = _to_host(episode["obs"]), _to_host(episode["next_obs"])
    for (path, one), (_, other) in zip(_leaves_of(obs, "obs"), _leaves_of(after), strict=True):
        if one[1:].tobytes() != other[:-1].tobytes():
            raise SchemaError(
                f"{where}: {path}: in the episode of row {episode['episode']} a next_obs is not the obs of the next "
                "row; a data set has each observation once; end episodes with terminated= or truncated="
            )
    return {
        "observations": join(obs, cut(after, slice(-1, None))),
        "actions": _to_host(episode["action"]),
        "rewards": _to_host(episode["reward"]),
        "terminations": _to_host(episode["done"]).astype(bool),
        "truncations": _to_host(episode["truncated"]),
    }


def _map(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """The function on each array of a value, nested as it is."""
    if isinstance(value, dict):
        return {key: _map(function, part, *(other[key] for other in others)) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(function, part, *(other[i] for other in others)) for i, part in enumerate(value))
    return function(value, *others)


def _to_host(value: Any) -> Any:
    return _map(lambda array: np.asarray(array.cpu() if hasattr(array, "cpu") else array), value)


def cut(value: Any, part: slice) -> Any:
    """A part of each array along time."""
    return _map(lambda array: array[part], value)


def join(first: Any, last: Any) -> Any:
    """One after the other along time."""
    return _map(lambda one, other: np.concatenate([one, other]), first, last)


def _leaves_of(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, (dict, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, part in parts for leaf in _leaves_of(part, f"{path}/{key}")]
    return [(path, value)]


# ---- fields and spaces -----------------------------------------------------------------------------------------------


def _fit(what: str, node: Node, value: Any, is_dtype_free: bool = False) -> Node:
    """The fields for values of a data set. With ``is_dtype_free`` a field that cannot hold its numbers exactly gets
    their dtype; otherwise that is an error."""
    if isinstance(node, Field):
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"{what}: expected numbers, got {array.dtype}")
        if np.can_cast(array.dtype, node.dtype, "safe"):
            return node
        if not is_dtype_free:
            raise SchemaError(
                f"{what}: expected {node.dtype} as in the first episode, got {array.dtype}; give the field in schema= "
                "with a dtype that fits all"
            )
        return Field(node.shape, array.dtype)
    keys = set(node) if isinstance(node, Mapping) else set(range(len(node)))
    given = set(value) if isinstance(value, dict) else set(range(len(value))) if isinstance(value, tuple) else None
    if keys != given:
        raise SchemaError(f"{what}: the data differ from the space of the data set: {sorted(map(str, keys))} expected")
    if isinstance(node, Mapping):
        return {key: _fit(f"{what}/{key}", part, value[key], is_dtype_free) for key, part in node.items()}
    return tuple(_fit(f"{what}/{i}", part, value[i], is_dtype_free) for i, part in enumerate(node))


def _saved_fields(where: str, path: str, node: Node) -> Node:
    """The fields of a buffer as its batches have them, where a data set can hold them."""
    if isinstance(node, Field):
        if node.ragged or node.dtype.kind not in "biuf":
            raise SchemaError(f"{where}: {path}: a data set holds numbers of one shape, got {node!r}")
        return Field((node.stack, *node.shape), node.dtype) if node.stack > 1 else node
    if isinstance(node, tuple):
        return tuple(_saved_fields(where, f"{path}/{i}", part) for i, part in enumerate(node))
    return {key: _saved_fields(where, f"{path}/{key}", part) for key, part in node.items()}


def ranges_of(value: Any) -> Any:
    """The smallest and the largest number of each array."""
    return _map(lambda array: (array.min(), array.max()) if array.dtype.kind in "iu" else None, value)


def space_of(node: Node, ranges: Iterable[Any] | None = None) -> Any:
    """The space of these fields. With ``ranges``, those of all values, whole numbers are choices."""
    from gymnasium import spaces

    known = None if ranges is None else list(ranges)
    if isinstance(node, tuple):
        parts = enumerate(node)
        return spaces.Tuple([space_of(part, None if known is None else [one[i] for one in known]) for i, part in parts])
    if not isinstance(node, Field):
        return spaces.Dict(
            {key: space_of(part, None if known is None else [one[key] for one in known]) for key, part in node.items()}
        )
    if known and node.shape == () and node.dtype.kind in "iu" and min(low for low, _ in known) >= 0:
        return spaces.Discrete(int(max(high for _, high in known)) + 1)
    return _box(node.shape, node.dtype)


def _box(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    from gymnasium import spaces

    if dtype.kind in "iu":
        return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype.type)
    low, high = (0.0, 1.0) if dtype.kind == "b" else (-np.inf, np.inf)
    return spaces.Box(low, high, shape, dtype.type)


# ---- data sets -------------------------------------------------------------------------------------------------------


class DataSet:
    """A Minari data set that is read without its environment."""

    def __init__(self, data: Any) -> None:
        self.data, self.id = data, str(data.spec.dataset_id)

    @property
    def total_steps(self) -> int:
        return int(self.data.total_steps)

    def episodes(self, where: str) -> Iterator[Any]:
        with told_by_minari(where, self.id):
            yield from self.data.iterate_episodes()

    def fields(self, where: str) -> dict[str, Node]:
        """Of the rows of a buffer."""
        first = next(self.episodes(where))
        made: dict[str, Node] = {}
        for name, space, values in (
            ("obs", self.data.observation_space, first.observations),
            ("action", self.data.action_space, first.actions),
        ):
            made[name] = _fit(f"{where}: {name}", from_space(space, f"{name} space", where), values, True)
        # The rewards of an episode may all be whole numbers by chance.
        reward = np.asarray(first.rewards).dtype
        return made | {"reward": Field((), reward if reward.kind == "f" else "float64")}


def open_dataset(where: str, dataset: Any) -> DataSet:
    """A data set by its name or its folder, or as it is."""
    if isinstance(dataset, minari.MinariDataset):
        return DataSet(dataset)
    if not isinstance(dataset, (str, os.PathLike)):
        raise SchemaError(f"{where}: dataset: expected a MinariDataset, its name or its folder, got {told(dataset)}")
    from minari.dataset.minari_storage import METADATA_FILE_NAME
    from minari.storage.datasets_root_dir import get_dataset_path

    name = os.fspath(dataset)
    for folder in (Path(name), Path(name) / "data", Path(get_dataset_path(name)) / "data"):
        if (folder / METADATA_FILE_NAME).is_file():
            with told_by_minari(where, name):
                return DataSet(minari.MinariDataset(_storage_of(folder)))
    raise StorageError(
        f"{where}: minari:{name}: there is no such data set on this machine; get it with 'minari download {name}'"
    )


def _storage_of(folder: Path) -> Any:
    """The data in a folder. Older data sets do not name their spaces; Minari would make the environment for them."""
    from minari.dataset._storages import get_minari_storage
    from minari.dataset.minari_storage import MinariStorage
    from minari.serialization import deserialize_space

    metadata = MinariStorage.read_raw_metadata(folder)
    spaces = []
    for name, key in (("observation_space", "observations"), ("action_space", "actions")):
        text = metadata.get(name)
        spaces.append(_space_in_file(folder, key) if text is None else deserialize_space(text))
    encoding = {"jpeg_encoding": bool(metadata["jpeg_encoding"])} if "jpeg_encoding" in metadata else {}
    return get_minari_storage(metadata["data_format"])(folder, *spaces, **encoding)


def _space_in_file(folder: Path, key: str) -> Any:
    """A space with the shapes and dtypes that the first episode has in an HDF5 file."""
    import h5py
    from gymnasium import spaces

    def read(node: Any) -> Any:
        if isinstance(node, h5py.Dataset):
            return _box(node.shape[1:], node.dtype)
        if "_index_0" in node:
            return spaces.Tuple([read(node[f"_index_{i}"]) for i in range(len(node))])
        return spaces.Dict({name: read(part) for name, part in node.items()})

    with h5py.File(folder / "main_data.hdf5", "r") as file:
        return read(file["episode_0"][key])


def write_dataset(
    where: str,
    name: str,
    episodes: Iterable[dict[str, Any]],
    spaces: dict[str, Any],
    env_spec: Any = None,
    about: Mapping[str, Any] | None = None,
) -> Any:
    """Makes a data set of these episodes, each with the arguments of ``EpisodeBuffer``. A failed call leaves none."""
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage.datasets_root_dir import get_dataset_path

    if not isinstance(name, str):
        raise SchemaError(f"{where}: name: expected the name of a new data set, got {told(name)}")
    try:
        parse_dataset_id(name)
    except (ValueError, TypeError):  # the latter where there is no version
        raise SchemaError(f"{where}: name: expected 'namespace/name-v0', got {name!r}") from None
    place = Path(get_dataset_path(name))
    if place.exists():
        raise StorageError(f"{where}: minari:{name}: there is a data set of that name in {place}; give another one")
    every = (EpisodeBuffer(id=i, **episode) for i, episode in enumerate(episodes))
    first = list(itertools.islice(every, _TOGETHER))
    if not first:
        raise SchemaError(f"{where}: there is no finished episode")
    env = {} if env_spec is None else {"env": _described(env_spec, **spaces)}
    options = {"jpeg_encoding": False, **(about or {})}
    try:
        with told_by_minari(where, name):
            data = minari.create_dataset_from_buffers(name, first, **spaces, **env, **options)
            while more := list(itertools.islice(every, _TOGETHER)):
                data.update_dataset_from_buffer(more)
            return data
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # it was not there before: an unfinished one would block the next try
        raise


def _described(env_spec: Any, observation_space: Any, action_space: Any) -> Any:
    """Stands for the environment: Minari makes one of a spec, and takes an environment as it is."""
    import gymnasium

    env: Any = gymnasium.Env()
    env.spec, env.observation_space, env.action_space = env_spec, observation_space, action_space
    return env


@contextmanager
def told_by_minari(where: str, name: str) -> Iterator[None]:
    """What Minari raises, with the name of the data set."""
    try:
        yield
    except SharpwaveError:
        raise
    except (OSError, ValueError, TypeError, KeyError, ImportError, AssertionError, NotImplementedError) as error:
        raise StorageError(f"{where}: minari:{name}: {type(error).__name__}: {error}") from error
