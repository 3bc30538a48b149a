"""RLinf's algorithm for trajectories on disk, written again in plain torch, step for step at its cost.

A slab a key with one slot a trajectory for the cache, flattened copies into it; uniform rows of a window by randint and
bucketize; a Python loop that takes every row's numbers out of tensors and groups them (for nobody, upstream too); hits
by isin over all that is cached, gathered with one index a key; for misses whole files loaded and concatenated; a thread
pool that saves clones with torch.save and rewrites the index, deep-copied, after every add.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

FLAGS = ("terminations", "truncations", "dones")
NESTED = ("curr_obs", "next_obs", "forward_inputs")


def nested(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for name, tensor in flat.items():
        outer, _, inner = name.partition("/")
        if inner:
            batch.setdefault(outer, {})[inner] = tensor
        else:
            batch[name] = tensor
    return batch


class PlainTrajectories:
    def __init__(self, folder: Path, cache_size: int, window: int) -> None:
        self.folder, self.cache_size, self.window = folder, cache_size, window
        folder.mkdir(parents=True, exist_ok=True)
        self.generator = torch.Generator().manual_seed(1234)
        self.index: dict[int, dict[str, Any]] = {}
        self.order: list[int] = []
        self.slots: OrderedDict[int, int] = OrderedDict()
        self.slabs: dict[str, torch.Tensor] = {}
        self.slot_rows = 0
        self.lock = Lock()
        self.pool = ThreadPoolExecutor(20)
        self.ends: tuple[tuple[int, int], torch.Tensor, list[int]] | None = None
        self.pending: list[Any] = []
        self.saves_index = True

    # ---- in ---------------------------------------------------------------------------------------------------

    def add(self, trajectory: dict[str, Any]) -> None:
        steps, envs = trajectory["prev_logprobs"].shape[:2]
        with self.lock:
            number = len(self.order)
            self.index[number] = {
                "num_samples": steps * envs,
                "trajectory_id": number,
                "shape": tuple(trajectory["prev_logprobs"].shape),
                "model_weights_id": "w_0",
            }
            self.order.append(number)
        if self.cache_size:
            self.put(number, self.flatten(trajectory))
        saving = self.pool.submit(self.save, number, trajectory)
        self.pending = [task for task in self.pending if not task.done()]
        self.pending.append(self.pool.submit(self.save_index, saving) if self.saves_index else saving)

    def save(self, number: int, trajectory: dict[str, Any]) -> None:
        def clone(value: Any) -> Any:
            return {key: clone(part) for key, part in value.items()} if isinstance(value, dict) else value.clone()

        torch.save(clone(trajectory), self.folder / f"trajectory_{number}_w_0.pt")

    def save_index(self, saving: Any) -> None:
        saving.result()
        with self.lock:
            listed = {"trajectory_index": copy.deepcopy(self.index), "trajectory_id_list": list(self.order)}
            (self.folder / "trajectory_index.json").write_text(json.dumps(listed))
            (self.folder / "metadata.json").write_text(json.dumps({"size": len(self.order)}))

    def flush(self) -> None:
        for task in self.pending:
            task.result()

    def flatten(self, trajectory: dict[str, Any]) -> dict[str, torch.Tensor]:
        steps = trajectory["rewards"].shape[0]
        flat = {}
        for key, value in trajectory.items():
            for name, tensor in (
                ((f"{key}/{inner}", part) for inner, part in value.items()) if key in NESTED else ((key, value),)
            ):
                extra = tensor.shape[0] - steps
                if key in FLAGS and extra > 0:
                    epochs = tensor.reshape(extra, steps // extra + 1, *tensor.shape[1:])
                    tensor = epochs[:, 1:].reshape(steps, *tensor.shape[1:])
                flat[name] = tensor.reshape(-1, *tensor.shape[2:])
        return flat

    def put(self, number: int, flat: dict[str, torch.Tensor]) -> None:
        rows = max(len(tensor) for tensor in flat.values())
        if rows > self.slot_rows:
            for key, tensor in flat.items():
                grown = torch.zeros(self.cache_size * rows, *tensor.shape[1:], dtype=tensor.dtype)
                for slot in self.slots.values():
                    old = self.slabs[key][slot * self.slot_rows : (slot + 1) * self.slot_rows]
                    grown[slot * rows : slot * rows + self.slot_rows] = old
                self.slabs[key] = grown
            self.slot_rows = rows
        slot = len(self.slots) if len(self.slots) < self.cache_size else self.slots.popitem(last=False)[1]
        self.slots[number] = slot
        for key, tensor in flat.items():
            self.slabs[key][slot * self.slot_rows : slot * self.slot_rows + len(tensor)] = tensor

    # ---- out --------------------------------------------------------------------------------------------------

    def sample(self, count: int) -> dict[str, Any]:
        key = (self.window, len(self.order))
        if self.ends is None or self.ends[0] != key:
            ids = self.order[-self.window :] if self.window > 0 else self.order
            sizes = torch.tensor([self.index[number]["num_samples"] for number in ids])
            self.ends = key, torch.cumsum(sizes, 0), ids
        _, ends, ids = self.ends
        drawn = torch.randint(0, int(ends[-1]), (count,), generator=self.generator)
        which = torch.bucketize(drawn, ends, right=True)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        local = drawn - starts[which]
        groups: dict[int, list[tuple[int, int]]] = {}
        for position in range(drawn.numel()):
            place = int(which[position])
            groups.setdefault(ids[place], []).append((position, int(local[position])))
        numbers = torch.as_tensor([ids[int(place)] for place in which])
        positions = torch.arange(count)
        is_hit = torch.isin(numbers, torch.as_tensor(list(self.slots))) if self.slots else numbers < 0
        flat: dict[str, torch.Tensor] = {}
        if torch.any(is_hit):
            slots = torch.as_tensor([self.slots[number] for number in numbers[is_hit].tolist()])
            rows = slots * self.slot_rows + local[is_hit]
            for name, slab in self.slabs.items():
                flat[name] = slab.new_empty((count, *slab.shape[1:]))
                flat[name][positions[is_hit]] = slab[rows]
        if torch.any(~is_hit):
            missing, offsets, cursor = [], {}, 0
            for number in torch.unique(numbers[~is_hit]).tolist():
                path = self.folder / f"trajectory_{number}_w_0.pt"
                missing.append(self.flatten(torch.load(path, weights_only=True)))
                offsets[number] = cursor
                cursor += self.index[number]["num_samples"]
            rows = torch.as_tensor([offsets[number] for number in numbers[~is_hit].tolist()]) + local[~is_hit]
            for name in missing[0]:
                whole = torch.cat([part[name] for part in missing])
                if name not in flat:
                    flat[name] = whole.new_empty((count, *whole.shape[1:]))
                flat[name][positions[~is_hit]] = whole[rows]
        return nested(flat)


class LeanTrajectories(PlainTrajectories):
    """The same store as one would write it with speed in mind: where a trajectory's rows begin is kept in a tensor, one
    `index_select` a key where everything is cached; files stay mapped once they were read, and rows are grouped by file
    with `tolist()`; the index grows by a line an add."""

    def __init__(self, folder: Path, cache_size: int, window: int) -> None:
        super().__init__(folder, cache_size, window)
        self.bases = torch.zeros(0, dtype=torch.int64)  # row of the storage, less the row among all
        self.opened: dict[int, dict[str, torch.Tensor]] = {}

    def save(self, number: int, trajectory: dict[str, Any]) -> None:
        torch.save(trajectory, self.folder / f"trajectory_{number}_w_0.pt")

    def save_index(self, saving: Any) -> None:
        saving.result()
        with self.lock, (self.folder / "trajectory_index.jsonl").open("a") as file:
            file.write(json.dumps(self.index[len(self.order) - 1]) + "\n")

    def prepare(self) -> None:
        ids = self.order[-self.window :] if self.window > 0 else self.order
        ends = torch.cumsum(torch.tensor([self.index[number]["num_samples"] for number in ids]), 0)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        is_cached = all(number in self.slots for number in ids)
        slots = torch.tensor([self.slots[number] for number in ids]) * self.slot_rows if is_cached else 0
        self.bases = slots - starts
        self.ends = (self.window, len(self.order)), ends, ids

    def sample(self, count: int) -> dict[str, Any]:
        if self.ends is None or self.ends[0] != (self.window, len(self.order)):
            self.prepare()
        assert self.ends is not None
        _, ends, ids = self.ends
        drawn = torch.randint(0, int(ends[-1]), (count,), generator=self.generator)
        which = torch.bucketize(drawn, ends, right=True)
        rows = drawn + self.bases[which]
        if self.slabs:
            return nested({name: slab.index_select(0, rows) for name, slab in self.slabs.items()})
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for position, (place, row) in enumerate(zip(which.tolist(), rows.tolist(), strict=True)):
            positions, rows_of_it = groups.setdefault(ids[place], ([], []))
            positions.append(position)
            rows_of_it.append(row)
        flat: dict[str, torch.Tensor] = {}
        for number, (positions, rows_of_it) in groups.items():
            where, taken = torch.tensor(positions), torch.tensor(rows_of_it)
            for name, tensor in self.mapped(number).items():
                if name not in flat:
                    flat[name] = tensor.new_empty((count, *tensor.shape[1:]))
                flat[name][where] = tensor[taken]
        return nested(flat)

    def mapped(self, number: int) -> dict[str, torch.Tensor]:
        if number not in self.opened:
            path = self.folder / f"trajectory_{number}_w_0.pt"
            self.opened[number] = self.flatten(torch.load(path, weights_only=True, mmap=True))
        return self.opened[number]
