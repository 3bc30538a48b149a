"""A table on a GPU: rows, flags, priorities and every counter are tensors there.

No call waits for the device, but for those whose answer is a number of Python's (``read_numbers``, ``serials``). What a
kernel finds out too late for an error of its own call it writes into memory of the host, and the next call raises it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from . import kernels
from .launch import launch, name_of, on_device_of

__all__ = ["DeviceTable", "Index", "Leaf"]

_ONE_PROGRAM = 1024  # rows that one program takes into the index; more are many programs' work
_ITEMS = 128
_WEIGH_ALONE = 4096  # draws up to which the weights are worked out by who draws last
_PART_BYTES = 16 << 10  # of a row: more is shared among programs
_TILE_BYTES = 8 << 10  # of a program's rows, where they are small


class Leaf(NamedTuple):
    """A field of the rows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_last: bool  # of the example's last row, not of its first

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Index(NamedTuple):
    """How rows are drawn by priority, as ``settings.engine_settings`` has it."""

    eps: float
    stratified: bool
    normalize: int
    mix: float
    new_rows: int
    new_priority: float


class Moves(NamedTuple):
    """Fields as the kernels copy them: one number a field, in each."""

    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    aligns: tuple[int, ...]
    wides: tuple[int, ...]


def plan_moves(offsets: Sequence[int], sizes: Sequence[int], stride: int) -> Moves:
    """The widest units that fit where each field stands."""
    widths = [math.gcd(8, offset, size, stride) for offset, size in zip(offsets, sizes, strict=True)]
    counts = [size // width for size, width in zip(sizes, widths, strict=True)]
    aligns = [math.gcd(16, offset, size, stride) for offset, size in zip(offsets, sizes, strict=True)]
    wides = [min(_power_above(count), 4096 // width) for count, width in zip(counts, widths, strict=True)]
    return Moves(*map(tuple, (offsets, counts, widths, aligns, wides)))


def _power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()


def tile(stride: int) -> tuple[int, int]:
    """Rows of a program, and programs of a row."""
    rows = max(1, min(32, _TILE_BYTES // stride))
    return 1 << (rows.bit_length() - 1), max(1, min(16, stride // _PART_BYTES))


class DeviceTable:
    """Rows in a ring. ``span`` is how many serials a round takes; see core/storage/format.h."""

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[Leaf],
        capacity: int,
        span: int,
        num_envs: int,
        seed: int,
        *,
        n_step: int = 1,
        gamma: float = 1.0,
        reward: int = 0,
        newest: int = 0,
        index: Index | None = None,
        exponents: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0),
    ) -> None:
        self.device, self.leaves, self.capacity, self.span = device, list(leaves), capacity, span
        self.num_envs, self.seed, self.index, self.newest, self.n_step = num_envs, seed, index, newest, n_step
        offsets, at = [], 0
        for leaf in leaves:
            align = math.gcd(16, leaf.bytes)
            at = -(-at // align) * align
            offsets.append(at)
            at += leaf.bytes
        self.stride = -(-at // 16) * 16
        self.moves = plan_moves(offsets, [leaf.bytes for leaf in leaves], self.stride)
        self.tile = tile(self.stride)
        self.dtypes = [torch.from_numpy(np.empty(0, leaf.dtype)).dtype for leaf in leaves]

        def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        with torch.inference_mode(False):  # whoever makes it there may use it elsewhere
            self.rows = torch.empty(capacity * self.stride, dtype=torch.uint8, device=device)
            self.flags = zeros(capacity, torch.uint8)
            self.numbers = zeros(len(kernels.NUMBERS), torch.int64)
            self.reals = torch.tensor(
                [*exponents, 1.0, *((index.eps, index.mix) if index else (0.0, 0.0)), 1.0, 0.0],
                dtype=torch.float64,
                device=device,
            )
            self.write_numbers(seed=seed, least=0x7FF0000000000000)
            powers = [gamma**k for k in range(n_step + 1)]
            self.powers = torch.tensor(powers, dtype=torch.float64, device=device)
            self.alarms = torch.zeros(len(kernels.ALARMS), dtype=torch.int64, pin_memory=device.type == "cuda")
            self.heard = self.alarms.numpy()
            self.alarm = memoryview(self.heard.data)  # the quickest to look at
            self._make_index(zeros)
        of_reward = self.leaves[reward]
        self.draw_shape = (
            *(capacity, span, self.stride, *self.moves, tuple(leaf.is_last for leaf in leaves)),
            *(reward, _power_above(max(1, math.prod(of_reward.shape))), of_reward.dtype.itemsize == 8),
            *(n_step, num_envs, newest, self.padded, self.total, self.levels),
            *((index.stratified, index.normalize, index.mix > 0) if index else (False, 2, False)),
            *(_WEIGH_ALONE, *self.tile, _ITEMS * 8),
        )
        self.draw_name = name_of(self.draw_shape)
        self.powers_at = self.powers.data_ptr()
        self.fixed = tuple(
            0 if tensor is None else tensor.data_ptr()
            for tensor in (self.rows, self.flags, self.numbers, self.reals, self.priorities, self.nodes, self.alarms)
        )

    def _make_index(self, zeros: Any) -> None:
        self.priorities = self.nodes = self.winners = None
        self.padded = self.total = 0
        self.levels: tuple[int, ...] = ()
        if self.index is None:
            return
        self.padded = -(-self.capacity // 32) * 32
        starts, count = [], self.padded
        while count > 1:
            count = -(-count // 32)
            starts.append(self.total)
            self.total += -(-count // 32) * 32
        self.levels = tuple(starts)
        self.level_sizes = [-(-self.capacity // 32 ** (k + 1)) for k in range(len(starts))]
        leaves = zeros(2 * self.padded, torch.float32)
        leaves[: self.padded] = -1
        nodes = zeros(self.total * 4, torch.float32)  # sums of 8 bytes, then the largest priority and the least mass
        nodes[self.total * 2 : self.total * 3] = -1
        nodes[self.total * 3 :] = math.inf
        self.priorities, self.nodes = leaves, nodes
        self.winners = zeros(self.capacity, torch.int32)

    # ---- writing ----------------------------------------------------------------------------------------------

    def add(self, sources: tuple[int, ...], count: int, flags: tuple[int, int, int], priorities: int) -> None:
        """Addresses on the device, at multiples of 16: of ``count`` values of each field; of bytes that say which rows
        end an episode, are cut off, and count; of priorities, float32. 0 where there are none."""
        rows, parts = self.tile
        has = tuple(address != 0 for address in flags)
        shape = (self.capacity, self.stride, *self.moves, rows, parts, *has)
        grid = (-(-count // rows), parts)
        launch(
            ("write", self.device, grid, shape), kernels.write, grid, (*self.fixed[:3], sources, *flags, count), shape
        )
        if self.index is not None:
            self._enter(count, priorities)

    def _enter(self, count: int, given: int) -> None:
        index = self.index
        assert index is not None

        def enter(phase: int, programs: int) -> None:
            shape = (
                *(self.capacity, self.padded, self.total, self.levels, index.mix > 0, index.new_rows),
                *(index.new_priority, given != 0, phase, _ITEMS),
            )
            numbers = (*self.fixed[4:6], *self.fixed[2:4], self.fixed[1], self.fixed[6], given, count)
            launch(("enter", self.device, programs, shape), kernels.enter, (programs, 1), numbers, shape)

        if count <= _ONE_PROGRAM:
            enter(0, 1)
            return
        for phase in (1, 2):
            enter(phase, -(-count // _ITEMS))
            for level in range(len(self.levels)):
                self._refresh(level, 0, 0, count)

    def _refresh(self, level: int, which: int, serials: int, count: int) -> None:
        assert self.index is not None
        below = self.levels[level - 1] if level else -1
        shape = (
            *(self.capacity, self.span, self.padded, self.total, self.levels[level], below, 32 ** (level + 1)),
            *(self.index.mix > 0, which, _ITEMS),
        )
        grid = -(-count // _ITEMS), 1
        numbers = (*self.fixed[4:6], self.fixed[2], self.fixed[1], serials, count)
        launch(("refresh", self.device, grid, shape), kernels.refresh, grid, numbers, shape)

    # ---- drawing ----------------------------------------------------------------------------------------------

    def draw_numbers(self, count: int, outs: tuple[int, ...], extras: tuple[int, int, int, int]) -> tuple[Any, ...]:
        """For ``draw``: the addresses of what it fills, a field each; of discounts, weights, probabilities and serials,
        or 0."""
        return (*self.fixed, outs, *extras, self.powers_at, count)

    def draw_key(self, count: int) -> tuple[Any, ...]:
        return "draw", self.device.index, self.draw_name, -(-count // self.tile[0])

    def draws_alone(self, count: int) -> bool:
        """Whether one launch makes the whole batch."""
        return self.index is None or count <= _WEIGH_ALONE

    def draw(self, count: int, numbers: Any, weights: tuple[int, int]) -> None:
        """Draws and gathers a batch. ``numbers``: of ``draw_numbers``, or packed."""
        rows, parts = self.tile
        launch(self.draw_key(count), kernels.draw, (-(-count // rows), parts), numbers, self.draw_shape)
        if not self.draws_alone(count):
            grid, shape = (-(-count // 1024), 1), (self.newest, 1024)
            launch(("weigh", self.device, grid, shape), kernels.weigh, grid, (self.fixed[3], *weights, count), shape)

    # ---- priorities -------------------------------------------------------------------------------------------

    def update(self, serials: torch.Tensor, priorities: torch.Tensor) -> torch.Tensor:
        """Contiguous int64 and float32 of one length, at multiples of 16 bytes. Returns how many were applied, and how
        many were stale."""
        index, count = self.index, serials.numel()
        assert index is not None
        assert self.winners is not None
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)  # each its own: it is handed out
        if count == 0:
            return counts
        names, values, winners = serials.data_ptr(), priorities.data_ptr(), self.winners.data_ptr()
        shape = (self.capacity, self.span)
        one = count <= _ONE_PROGRAM
        grid = 1 if one else -(-count // _ITEMS), 1
        if not one:
            numbers = (self.fixed[2], self.fixed[1], winners, names, values, self.fixed[6], count)
            launch(("mark", self.device, grid, shape), kernels.mark, grid, numbers, (*shape, _ITEMS))
        whole = (*shape, self.padded, self.total, self.levels, index.mix > 0, 0 if one else 1, _ITEMS)
        known = (*self.fixed[4:6], *self.fixed[2:4], self.fixed[1], winners, names, values, self.fixed[6])
        launch(("apply", self.device, grid, whole), kernels.apply, grid, (*known, counts.data_ptr(), count), whole)
        if not one:
            told = (self.fixed[2], self.fixed[1], winners, names, counts.data_ptr(), count)
            launch(("settle", self.device, grid, shape), kernels.settle, grid, told, (*shape, _ITEMS))
            for level in range(len(self.levels)):
                self._refresh(level, 1, names, count)
        return counts

    def remake(self) -> None:
        """The masses of all rows and everything above them, from priorities and alpha."""
        assert self.index is not None
        grid = -(-self.padded // 1024), 1
        shape = (self.padded, 1024)
        numbers = (self.fixed[4], self.fixed[3], self.padded)
        launch(("remass", self.device, grid, shape), kernels.remass, grid, numbers, shape)
        for level, size in enumerate(self.level_sizes):
            self._refresh(level, 2, 0, size)

    # ---- what waits -------------------------------------------------------------------------------------------

    def read_numbers(self) -> dict[str, int]:
        return dict(zip(kernels.NUMBERS, self.numbers.tolist(), strict=True))

    def read_reals(self) -> dict[str, float]:
        return dict(zip(kernels.REALS, self.reals.tolist(), strict=True))

    def write_numbers(self, **values: int) -> None:
        for name, value in values.items():
            self.numbers[kernels.NUMBERS.index(name)] = value

    def write_reals(self, **values: float) -> None:
        for name, value in values.items():
            self.reals[kernels.REALS.index(name)] = value

    def serials(self) -> torch.Tensor:
        """Of the live rows, oldest first."""
        numbers = self.read_numbers()
        head = numbers["head"]
        t = torch.arange(max(numbers["origin"], head - self.capacity), head, device=self.device)
        slots = t % self.capacity
        is_live = (self.flags[slots] & 1) != 0
        return ((t // self.capacity) * self.span + slots)[is_live]

    def slots_of(self, serials: torch.Tensor) -> torch.Tensor:
        """-1 where a row is gone."""
        numbers = self.read_numbers()
        slots = serials % self.span
        t = torch.div(serials, self.span, rounding_mode="floor") * self.capacity + slots
        there = (serials >= 0) & (slots < self.capacity) & (t < numbers["head"]) & (t >= numbers["origin"])
        there &= t >= numbers["head"] - self.capacity
        return torch.where(there & ((self.flags[slots.clamp(0, self.capacity - 1)] & 1) != 0), slots, -1)

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """The fields of rows, one tensor each."""
        taken = self.rows.view(self.capacity, self.stride).index_select(0, slots)
        fields = []
        for leaf, dtype, offset in zip(self.leaves, self.dtypes, self.moves.offsets, strict=True):
            part = taken[:, offset : offset + leaf.bytes].contiguous()
            fields.append(part.view(dtype).reshape(len(slots), *leaf.shape))
        return fields

    def clear(self) -> None:
        head = -(-self.read_numbers()["head"] // self.capacity) * self.capacity
        self.write_numbers(head=head, origin=head, live=0)
        self.flags.zero_()
        if self.priorities is not None:
            self.priorities[: self.padded] = -1
            self.remake()


DeviceTable.add = on_device_of(DeviceTable.add)  # type: ignore[method-assign]
DeviceTable.draw = on_device_of(DeviceTable.draw)  # type: ignore[method-assign]
DeviceTable.update = on_device_of(DeviceTable.update)  # type: ignore[method-assign]
DeviceTable.remake = on_device_of(DeviceTable.remake)  # type: ignore[method-assign]
