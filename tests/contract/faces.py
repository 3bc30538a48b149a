"""Every face in every storage, by the same few words: made, filled, read, and what its verbs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from contract.served import TRANSPORTS, served

import sharpwave as sw

__all__ = ["CELLS", "ON_GPU", "SIZE", "Cell"]

SIZE = 12  # what `capacity` counts, of every cell


@dataclass(frozen=True)
class Cell:
    """A face in a storage. `add` brings `count` of what `len` counts, numbered from `first`."""

    face: type[Any]
    place: str
    make: Callable[[Path, str], Any]
    add: Callable[[Any, int, int], None]
    out: Callable[[Any], list[dict[str, Any]]]  # some batches
    held: Callable[[Any], list[Any]]  # the numbers of all that is held, in order
    device: str | None = None  # of batches

    def __str__(self) -> str:
        return f"{self.face.__name__}-{self.place}"


def numbers(first: int, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(first, first + count, dtype=np.float32)


# ---- rows ------------------------------------------------------------------------------------------------------------


def add_rows(buffer: Any, first: int, count: int) -> None:
    values = numbers(first, count)
    buffer.add(values[:, None], values, values, values[:, None], np.zeros(count, bool))


def add_pairs(buffer: Any, first: int, count: int) -> None:
    buffer.add(numbers(first, count)[:, None], numbers(first, count))


def sample(buffer: Any) -> list[dict[str, Any]]:
    return [buffer.sample(4)]


def rows_held(buffer: Any) -> list[Any]:
    return [int(value) for part in buffer.rows() for value in part["action"]]


def pairs_held(buffer: Any) -> list[Any]:
    return sorted(int(value) for part in buffer.batches(SIZE) for value in part["action"])


def replay(**options: Any) -> Callable[[Path, str], Any]:
    def make(folder: Path, name: str) -> Any:
        storage = {"file": f"file://{folder}/replay.sw", "shm": name}.get(options.get("storage", ""))
        return sw.ReplayBuffer(SIZE, obs_shape=(1,), seed=0, **{**options, "storage": storage})

    return make


def distillation(**options: Any) -> Callable[[Path, str], Any]:
    def make(folder: Path, name: str) -> Any:
        storage = {"file": f"file://{folder}/teacher.sw", "shm": name}.get(options.get("storage", ""))
        settings = {**options, "storage": storage}
        return sw.DistillationBuffer(SIZE, obs_shape=(1,), action_shape=(), seed=0, **settings)

    return make


# ---- rollouts: four steps of three environments ----------------------------------------------------------------------


def rollout(**options: Any) -> Callable[[Path, str], Any]:
    return lambda folder, name: sw.RolloutBuffer(3, SIZE // 3, obs_shape=(1,), action_shape=(), seed=0, **options)


def there(buffer: Any, values: Any) -> Any:
    """A rollout on a GPU takes tensors that are there: each step would wait for a copy otherwise."""
    if buffer.device is None:
        return values
    import torch

    return torch.as_tensor(values, device=buffer.device)


def add_steps(buffer: Any, first: int, count: int) -> None:
    for at in range(first, first + count, 3):
        values = there(buffer, numbers(at, 3))
        buffer.add(values[:, None], actions=values, rewards=values, dones=values < 0, values=values, log_probs=values)


def minibatches(buffer: Any) -> list[dict[str, Any]]:
    if not buffer.is_full:
        add_steps(buffer, len(buffer), buffer.capacity - len(buffer))
    buffer.compute_returns_and_advantages(there(buffer, np.zeros(3, np.float32)))
    return [*buffer.minibatches(2), buffer.all()]


def steps_held(buffer: Any) -> list[Any]:
    return [int(value) for value in buffer.actions[: buffer.step].reshape(-1)]


# ---- trajectories of one step ----------------------------------------------------------------------------------------


def trajectories(**options: Any) -> Callable[[Path, str], Any]:
    on_disk = options.pop("on_disk", False)
    return lambda folder, name: sw.TrajectoryReplayBuffer(
        folder / "trajectories" if on_disk else None, capacity=SIZE, seed=0, **options
    )


def add_trajectories(buffer: Any, first: int, count: int) -> None:
    buffer.add(
        [
            sw.Trajectory(actions=np.full((5, 1, 1), number), rewards=np.zeros((5, 1), np.float32))
            for number in numbers(first, count)
        ]
    )


def trajectories_held(buffer: Any) -> list[Any]:
    return [int(one.actions.reshape(-1)[0]) for _, one in buffer.trajectories()]


# ---- sequences -------------------------------------------------------------------------------------------------------


def sequences(**options: Any) -> Callable[[Path, str], Any]:
    on_disk = options.pop("on_disk", False)

    def make(folder: Path, name: str) -> Any:
        flow = sw.Dataflow([sw.Consumer("train", inputs={"tokens"}, batch_size=4)])
        more = {"journal": folder / "sequences.journal"} if on_disk else {}
        return sw.SequenceBuffer(SIZE, flow=flow, **more, **options)

    return make


def put(buffer: Any, first: int, count: int) -> None:
    ids = [str(number) for number in range(first, first + count)]
    buffer.put(sw.SequenceSample(ids, {"tokens": [1] * count}, {"tokens": np.arange(first, first + count)}))


def sequences_held(buffer: Any) -> list[Any]:
    return [int(one) for one in buffer.ids()]


def lease(buffer: Any) -> list[dict[str, Any]]:
    with buffer.get("train", timeout=0) as batch:
        return [dict(batch.batch.data)]


CELLS = [
    Cell(sw.ReplayBuffer, "memory", replay(), add_rows, sample, rows_held),
    Cell(sw.ReplayBuffer, "tensors", replay(device="cpu"), add_rows, sample, rows_held, device="cpu"),
    Cell(sw.ReplayBuffer, "shm", replay(storage="shm"), add_rows, sample, rows_held),
    Cell(sw.ReplayBuffer, "file", replay(storage="file"), add_rows, sample, rows_held),
    Cell(sw.DistillationBuffer, "memory", distillation(), add_pairs, sample, pairs_held),
    Cell(sw.DistillationBuffer, "tensors", distillation(device="cpu"), add_pairs, sample, pairs_held, device="cpu"),
    Cell(sw.DistillationBuffer, "shm", distillation(storage="shm"), add_pairs, sample, pairs_held),
    Cell(sw.DistillationBuffer, "file", distillation(storage="file"), add_pairs, sample, pairs_held),
    *(Cell(sw.ReplayBuffer, one, served(replay(), one), add_rows, sample, rows_held) for one in TRANSPORTS),
    *(
        Cell(sw.DistillationBuffer, one, served(distillation(), one), add_pairs, sample, pairs_held)
        for one in TRANSPORTS
    ),
    Cell(sw.RolloutBuffer, "memory", rollout(), add_steps, minibatches, steps_held),
    Cell(sw.RolloutBuffer, "tensors", rollout(device="cpu"), add_steps, minibatches, steps_held, device="cpu"),
    Cell(sw.TrajectoryReplayBuffer, "memory", trajectories(), add_trajectories, sample, trajectories_held),
    Cell(
        sw.TrajectoryReplayBuffer,
        "tensors",
        trajectories(device="cpu"),
        add_trajectories,
        sample,
        trajectories_held,
        device="cpu",
    ),
    Cell(sw.TrajectoryReplayBuffer, "folder", trajectories(on_disk=True), add_trajectories, sample, trajectories_held),
    *(
        Cell(
            sw.TrajectoryReplayBuffer,
            f"{one}{' folder' if on_disk else ''}",
            served(trajectories(on_disk=on_disk), one),
            add_trajectories,
            sample,
            trajectories_held,
        )
        for one in TRANSPORTS
        for on_disk in (False, True)
    ),
    Cell(sw.SequenceBuffer, "memory", sequences(), put, lease, sequences_held),
    Cell(sw.SequenceBuffer, "journal", sequences(on_disk=True), put, lease, sequences_held),
    *(Cell(sw.SequenceBuffer, one, served(sequences(), one), put, lease, sequences_held) for one in TRANSPORTS),
    *(
        Cell(sw.SequenceBuffer, f"{one} journal", served(sequences(on_disk=True), one), put, lease, sequences_held)
        for one in TRANSPORTS
    ),
]
# A SequenceBuffer holds what is put by reference: it has no device of its own.
ON_GPU = [
    Cell(sw.ReplayBuffer, "cuda", replay(device="cuda"), add_rows, sample, rows_held, device="cuda"),
    Cell(sw.DistillationBuffer, "cuda", distillation(device="cuda"), add_pairs, sample, pairs_held, device="cuda"),
    Cell(sw.RolloutBuffer, "cuda", rollout(device="cuda"), add_steps, minibatches, steps_held, device="cuda"),
]
