"""`sharpwave convert` with Minari data sets: folders of trajectories (one episode is one trajectory of one environment)
and snapshots of a ReplayBuffer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave import Trajectory, TrajectoryReplayBuffer
from sharpwave.adapters import minari as adapter
from sharpwave.errors import SchemaError, StorageError
from sharpwave.files import replace_file
from sharpwave.trajectories.checkpoint import each_trajectory
from sharpwave.trajectories.trajectory import aligned

__all__ = ["folder_from_minari", "folder_to_minari", "snapshot_from_minari", "snapshot_to_minari"]

_PLAIN = "observation"  # the name of an observation that is no dict
_SPACES = "minari.json"
_TOGETHER = 64


def snapshot_from_minari(name: str, path: Path) -> int:
    """Writes the episodes of a data set into a new snapshot of a ReplayBuffer; returns how many."""
    if path.exists():
        raise StorageError(f"convert: {path}: there is such a file; give another name")
    with adapter.load(name) as buffer:
        buffer.save(path)
        return int(buffer.stats()["episodes"])


def snapshot_to_minari(source: str, name: str) -> int:
    """Makes a data set of the episodes in a snapshot or a live buffer; returns how many."""
    buffer = sw.open(source)
    try:
        if not isinstance(buffer, sw.ReplayBuffer):
            raise SchemaError(
                f"convert: {source}: expected a folder of trajectories or a ReplayBuffer, got {type(buffer).__name__}"
            )
        return int(adapter.save(buffer, name).total_episodes)
    finally:
        buffer.close()


def folder_from_minari(name: str, folder: str | os.PathLike[str], format: str = "pt", progress: Any = None) -> int:
    """Writes the episodes of a data set into a new folder; returns how many. A failed call leaves nothing there.

    Raises:
        StorageError: The folder is not empty.
        SchemaError: An observation or action is something that arrays cannot hold.
    """
    path = Path(folder)
    was_there = path.exists()
    if was_there and os.listdir(path):
        raise StorageError(f"convert: {path}: expected a new or empty folder")
    data = adapter.open_dataset("convert", name)
    try:
        return _fill_folder(data, path, format, progress)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        if was_there:
            path.mkdir(exist_ok=True)
        raise


def _fill_folder(data: adapter.DataSet, path: Path, format: str, progress: Any) -> int:
    from minari.serialization import serialize_space

    episodes = data.episodes("convert")
    with TrajectoryReplayBuffer(path, format=format, cache=0) as buffer:
        waiting: list[Trajectory] = []
        for episode in progress(episodes, data.data.total_episodes) if progress else episodes:
            waiting.append(_to_trajectory(episode))
            if len(waiting) == _TOGETHER:
                buffer.add(waiting)
                waiting = []
        buffer.add(waiting)
        count = len(buffer)
        buffer.save(path)  # RLinf can read it
    spec = data.data.env_spec
    spaces = {
        "dataset_id": data.id,
        "observation_space": serialize_space(data.data.observation_space),
        "action_space": serialize_space(data.data.action_space),
        "env_spec": None if spec is None else spec.to_json(),
    }
    replace_file(path / _SPACES, [json.dumps(spaces, indent=2).encode()])
    return count


def folder_to_minari(
    folder: str | os.PathLike[str], name: str, allow_pickle: bool = False, progress: Any = None
) -> int:
    """Makes a data set of the episodes in a folder, every environment's cut at its ends; returns how many.

    A trajectory that does not end with an episode's end is truncated there. Spaces are those of the data set that the
    folder was made from, or told from the arrays.

    The environment is named in the data set, not made: its package need not be installed. A call that fails leaves no
    data set.

    Raises:
        SchemaError: Trajectories have no observations before and after every step, or no actions.
        StorageError: There is a data set of that name, or it cannot be written.
    """
    path = Path(folder)
    count, every = each_trajectory("convert", path, allow_pickle)
    if count == 0:
        raise SchemaError(f"convert: {path}: there are no trajectories")
    shown = progress(every, count) if progress else every
    episodes = [episode for trajectory in shown for episode in _episodes(trajectory)]
    spaces, env_spec = _spaces(path, episodes)
    return int(adapter.write_dataset("convert", name, episodes, spaces, env_spec).total_episodes)


def _to_trajectory(episode: Any) -> Trajectory:
    def one_env(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: one_env(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            raise SchemaError(
                "convert: a Tuple space; a folder holds arrays and dicts of them; give a file FILE.sw instead"
            )
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"convert: expected numbers, got {array.dtype}")
        return array[:, None]

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
        curr_obs=adapter.cut(obs, slice(0, -1)),
        next_obs=adapter.cut(obs, slice(1, None)),
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

    for env in range(envs):
        begin = 0
        ends = np.flatnonzero(terminated[:, env] | truncated[:, env]) + 1
        for end in sorted({*ends.tolist(), steps}):
            obs = take(trajectory.curr_obs, begin, end, env)
            obs = adapter.join(obs, take(trajectory.next_obs, end - 1, end, env))
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


def _spaces(path: Path, episodes: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    """Those that the folder was made from, with the environment's spec; else those of the arrays."""
    from gymnasium.envs.registration import EnvSpec
    from minari.serialization import deserialize_space

    if (path / _SPACES).exists():
        try:
            known = json.loads((path / _SPACES).read_bytes())
            both = {key: deserialize_space(known[key]) for key in ("observation_space", "action_space")}
            return both, EnvSpec.from_json(known["env_spec"]) if known["env_spec"] else None
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise StorageError(
                f"convert: {path / _SPACES}: not the spaces of a data set: {type(error).__name__}: {error}; remove it, "
                "and spaces are told from the arrays"
            ) from None

    def fields(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fields(part) for key, part in value.items()}
        return sw.Field(value.shape[1:], value.dtype)

    obs, actions = fields(episodes[0]["observations"]), fields(episodes[0]["actions"])
    ranges = (adapter.ranges_of(episode["actions"]) for episode in episodes)
    return {"observation_space": adapter.space_of(obs), "action_space": adapter.space_of(actions, ranges)}, None
