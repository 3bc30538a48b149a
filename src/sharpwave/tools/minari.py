"""Minari data sets as folders of trajectories, and back: one episode is one trajectory of one environment."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sharpwave import Trajectory, TrajectoryReplayBuffer
from sharpwave.errors import SchemaError, SharpwaveError, StorageError
from sharpwave.files import replace_file
from sharpwave.trajectories.checkpoint import each_trajectory
from sharpwave.trajectories.trajectory import aligned

__all__ = ["from_minari", "to_minari"]

_PLAIN = "observation"  # the name of an observation that is no dict
_SPACES = "minari.json"
_TOGETHER = 64


def from_minari(name: str, folder: str | os.PathLike[str], format: str = "pt", progress: Any = None) -> int:
    """Writes the episodes of a data set into a new folder; returns how many.

    Raises:
        StorageError: The folder is not empty.
        SchemaError: An observation or action is something that arrays cannot hold.
    """
    minari = _minari()
    from minari.serialization import serialize_space

    path = Path(folder)
    if path.exists() and os.listdir(path):
        raise StorageError(f"convert: {path}: expected a new or empty folder")
    with _told(name):
        data = minari.load_dataset(name)
    episodes = data.iterate_episodes()
    with TrajectoryReplayBuffer(path, format=format, cache=0) as buffer:
        waiting: list[Trajectory] = []
        for episode in progress(episodes, data.total_episodes) if progress else episodes:
            waiting.append(_to_trajectory(episode))
            if len(waiting) == _TOGETHER:
                buffer.add(waiting)
                waiting = []
        buffer.add(waiting)
        count = len(buffer)
        buffer.save(path)  # RLinf can read it
    spaces = {
        "dataset_id": name,
        "observation_space": serialize_space(data.observation_space),
        "action_space": serialize_space(data.action_space),
        "env_spec": data.env_spec.to_json() if data.env_spec is not None else None,
    }
    replace_file(path / _SPACES, [json.dumps(spaces, indent=2).encode()])
    return count


def to_minari(folder: str | os.PathLike[str], name: str, allow_pickle: bool = False, progress: Any = None) -> int:
    """Makes a data set of the episodes in a folder, every environment's cut at its ends; returns how many.

    A trajectory that does not end with an episode's end is truncated there. Spaces are those of the data set that the
    folder was made from, or told from the arrays.

    The environment is named in the data set, not made: its package need not be installed. A call that fails leaves no
    data set.

    Raises:
        SchemaError: Trajectories have no observations before and after every step, or no actions.
        StorageError: There is a data set of that name, or it cannot be written.
    """
    minari = _minari()
    from minari.data_collector import EpisodeBuffer
    from minari.storage.datasets_root_dir import get_dataset_path

    path, place = Path(folder), Path(get_dataset_path(name))
    if place.exists():
        raise StorageError(f"convert: minari:{name}: there is a data set of that name in {place}; give another one")
    buffers: list[Any] = []
    count, every = each_trajectory("convert", path, allow_pickle)
    if count == 0:
        raise SchemaError(f"convert: {path}: there are no trajectories")
    for trajectory in progress(every, count) if progress else every:
        for episode in _episodes(trajectory):
            buffers.append(EpisodeBuffer(id=len(buffers), **episode))
    spaces = _spaces(path, buffers)
    try:
        with _told(name):
            minari.create_dataset_from_buffers(name, buffers, jpeg_encoding=False, **spaces)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)  # it was not there before: an empty one would block the next try
        raise
    return len(buffers)


def _minari() -> Any:
    try:
        import minari
    except ModuleNotFoundError:
        raise SchemaError("convert: minari: needs the package minari: pip install 'minari[hdf5]'") from None
    return minari


@contextmanager
def _told(name: str) -> Iterator[None]:
    """What Minari raises, with the name of the data set."""
    try:
        yield
    except SharpwaveError:
        raise
    except (OSError, ValueError, TypeError, KeyError, ImportError, AssertionError) as error:
        raise StorageError(f"convert: minari:{name}: {type(error).__name__}: {error}") from error


def _to_trajectory(episode: Any) -> Trajectory:
    def one_env(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: one_env(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            raise SchemaError("convert: a Tuple space; arrays and dicts of them can be converted")
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"convert: expected numbers, got {array.dtype}")
        return array[:, None]

    def cut(value: Any, part: slice) -> Any:
        return {key: cut(inner, part) for key, inner in value.items()} if isinstance(value, dict) else value[part]

    obs = one_env(episode.observations)
    obs = obs if isinstance(obs, dict) else {_PLAIN: obs}
    ends, cuts = one_env(episode.terminations), one_env(episode.truncations)
    return Trajectory(
        max_episode_length=len(ends),
        actions=one_env(episode.actions),
        rewards=one_env(episode.rewards),
        terminations=ends.astype(bool),
        truncations=cuts.astype(bool),
        dones=ends.astype(bool) | cuts.astype(bool),
        curr_obs=cut(obs, slice(0, -1)),
        next_obs=cut(obs, slice(1, None)),
    )


def _episodes(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    if not trajectory.curr_obs or not trajectory.next_obs or trajectory.actions is None:
        raise SchemaError("convert: a data set needs actions, curr_obs and next_obs")
    steps, envs = trajectory.shape
    none = np.zeros((steps, envs), bool)

    def flags(name: str) -> Any:
        value = getattr(trajectory, name)
        return none if value is None else aligned(name, value, steps).reshape(steps, envs, -1).any(-1)

    terminated, truncated = flags("terminations"), flags("truncations")
    if trajectory.terminations is None and trajectory.truncations is None:
        terminated = flags("dones")
    rewards = aligned("rewards", trajectory.rewards, steps).reshape(steps, envs, -1).sum(-1)

    def take(value: Any, begin: int, end: int, env: int) -> Any:
        if isinstance(value, dict):
            return {key: take(part, begin, end, env) for key, part in value.items()}
        return np.ascontiguousarray(value[begin:end, env])

    def join(first: Any, last: Any) -> Any:
        if isinstance(first, dict):
            return {key: join(part, last[key]) for key, part in first.items()}
        return np.concatenate([first, last])

    for env in range(envs):
        begin = 0
        ends = np.flatnonzero(terminated[:, env] | truncated[:, env]) + 1
        for end in sorted({*ends.tolist(), steps}):
            obs = join(take(trajectory.curr_obs, begin, end, env), take(trajectory.next_obs, end - 1, end, env))
            cut = truncated[begin:end, env].copy()
            cut[-1] |= not terminated[end - 1, env]
            yield {
                "observations": obs[_PLAIN] if set(obs) == {_PLAIN} else obs,
                "actions": take(trajectory.actions, begin, end, env),
                "rewards": rewards[begin:end, env],
                "terminations": terminated[begin:end, env],
                "truncations": cut,
            }
            begin = end


def _spaces(path: Path, buffers: list[Any]) -> dict[str, Any]:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.envs.registration import EnvSpec
    from minari.serialization import deserialize_space

    if (path / _SPACES).exists():
        try:
            known = json.loads((path / _SPACES).read_bytes())
            both = {key: deserialize_space(known[key]) for key in ("observation_space", "action_space")}
            named = EnvSpec.from_json(known["env_spec"]) if known["env_spec"] else None
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise StorageError(
                f"convert: {path / _SPACES}: not the spaces of a data set: {type(error).__name__}: {error}; remove it, "
                "and spaces are told from the arrays"
            ) from None
        if named is None:
            return both

        class Described(gymnasium.Env):  # type: ignore[misc,type-arg,unused-ignore]
            """Stands for the environment: Minari makes one of a spec, and takes an environment as it is."""

            spec = named
            observation_space, action_space = both["observation_space"], both["action_space"]

        return both | {"env": Described()}

    def told(parts: list[Any], is_action: bool) -> Any:
        if isinstance(parts[0], dict):
            return spaces.Dict({key: told([part[key] for part in parts], is_action) for key in parts[0]})
        dtype, shape = parts[0].dtype, parts[0].shape[1:]
        if is_action and dtype.kind in "iu" and not shape:
            return spaces.Discrete(int(max(part.max() for part in parts)) + 1)
        if dtype.kind == "f":
            return spaces.Box(-np.inf, np.inf, shape, dtype)
        if dtype.kind == "b":
            return spaces.MultiBinary(shape or 1)
        return spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)

    obs, actions = ([getattr(buffer, name) for buffer in buffers] for name in ("observations", "actions"))
    return {"observation_space": told(obs, False), "action_space": told(actions, True)}
