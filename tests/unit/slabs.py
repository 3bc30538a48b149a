"""Trajectories whose every number tells which row it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sharpwave as sw


def make(
    number: int, steps: int = 3, envs: int = 2, epochs: int = 0, weights: str = "w_0", obs: int = 5
) -> sw.Trajectory:
    """Row t * envs + b of trajectory n has the number n * 1000 + t * envs + b everywhere; extra rows have -1."""
    row = torch.arange(steps * envs, dtype=torch.float32).reshape(steps, envs) + number * 1000

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value[..., None].expand(*value.shape, obs).contiguous()

    values, flags = row, (row.long() % 2).bool()
    if epochs:
        none = -torch.ones(epochs, 1, envs)
        cut = row.reshape(epochs, -1, envs)
        values = torch.cat([cut, none], 1).reshape(-1, envs)
        flags = torch.cat([~(none > 0), (cut.long() % 2).bool()], 1).reshape(-1, envs)
    return sw.Trajectory(
        20,
        weights,
        actions=row[..., None].to(torch.int64),
        rewards=row.clone(),
        dones=flags.clone(),
        prev_values=values.clone(),
        curr_obs={"state": wide(row), "more": {"image": (row[..., None] % 250).to(torch.uint8)}},
        next_obs={"state": wide(row + 0.5), "more": {"image": (row[..., None] % 250).to(torch.uint8)}},
    )


def check(batch: dict[str, Any], count: int) -> set[int]:
    """That every field of every row is of one row; the trajectories that there are."""
    row = np.asarray(batch["rewards"])
    assert row.shape == (count,)
    assert row.dtype == np.float32
    assert np.array_equal(np.asarray(batch["actions"]), row[:, None].astype(np.int64))
    assert np.array_equal(np.asarray(batch["prev_values"]), row)
    assert np.array_equal(np.asarray(batch["dones"]), row.astype(np.int64) % 2 == 1)
    for name, shift in (("curr_obs", 0.0), ("next_obs", 0.5)):
        state = np.asarray(batch[name]["state"])
        assert state.shape == (count, 5)
        assert np.array_equal(state, np.repeat(row[:, None] + np.float32(shift), 5, 1))
        image = np.asarray(batch[name]["more"]["image"])
        assert image.dtype == np.uint8
        assert np.array_equal(image[:, 0], (row % 250).astype(np.uint8))
    return {int(value) // 1000 for value in row}


def as_dict(trajectory: sw.Trajectory) -> dict[str, Any]:
    return {name: value for name, value in vars(trajectory).items() if value is not None}


def write_rlinf(folder: Path, trajectories: dict[int, sw.Trajectory], era: int, counter: int | None = None) -> None:
    """A folder as RLinf writes it: torch.save of a dict a trajectory, and its two JSON files."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    for number, trajectory in trajectories.items():
        torch.save(as_dict(trajectory), folder / f"trajectory_{number}_{trajectory.model_weights_id}.pt")
        steps, envs = trajectory.shape
        index[number] = {
            "num_samples": steps * envs,
            "trajectory_id": number,
            "max_episode_length": trajectory.max_episode_length,
            "shape": tuple(trajectory.rewards.shape),
            "model_weights_id": trajectory.model_weights_id,
        }
    facts = {"storage_dir": str(folder), "storage_format": "pt"} if era == 1 else {"trajectory_format": "pt"}
    facts |= {
        "size": len(index),
        "total_samples": sum(entry["num_samples"] for entry in index.values()),
        "trajectory_counter": len(index) if counter is None else counter,
        "seed": 77,
    }
    (folder / "metadata.json").write_text(json.dumps(facts))
    listed = {"trajectory_index": index, "trajectory_id_list": list(index)}
    (folder / "trajectory_index.json").write_text(json.dumps(listed))


def read_rlinf(folder: Path) -> dict[int, dict[str, Any]]:
    """What RLinf finds in a folder: by its own two files and torch.load."""
    metadata = json.loads((folder / "metadata.json").read_text())
    listed = json.loads((folder / "trajectory_index.json").read_text())
    assert metadata["size"] == len(listed["trajectory_id_list"])
    found = {}
    for number in listed["trajectory_id_list"]:
        entry = listed["trajectory_index"][str(number)]
        name = f"trajectory_{number}_{entry['model_weights_id']}.{metadata['storage_format']}"
        found[number] = torch.load(folder / name, weights_only=True)
        assert list(found[number]["rewards"].shape) == entry["shape"]
        assert entry["num_samples"] == entry["shape"][0] * entry["shape"][1]
    return found
