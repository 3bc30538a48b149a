"""A table on a GPU: rows, flags, priorities and every counter are tensors there.

Calls do not wait for the device, except those that return numbers to Python (``read_numbers``, ``serials``). A kernel
that finds an error after its call has returned writes it into host memory, and the next call raises it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .launch import Kernel, on_device_of
from .rows import draw, name_newest, weigh, write
from .state import ALARMS, NUMBERS, REALS
from .tree import apply, enter, mark, refresh, remass
from .write_back import mark_rows, put

__all__ = ["DeviceField", "DeviceTable", "Draws", "PrioritySettings"]

_ENTER_ALONE = 4096  # rows up to which one program updates the index; for more rows, many programs
_UPDATE_ALONE = 256
_ITEMS = 128
_MANY = 1024
# Nodes at a time and warps, of one program among many and of a single program: as many as fit into the registers.
_NODES, _WARPS = 32, 4
_NODES_ALONE, _WARPS_ALONE = 128, 16
_WEIGH_ALONE = 4096  # draws up to which the last program of the draw computes the weights
_PART_BYTES = 16 << 10  # bytes of a row per program: larger rows are divided among programs
_TILE_BYTES = 8 << 10  # bytes per program where rows are small


class DeviceField(NamedTuple):
    """A field of the rows on a device."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_last: bool  # examples take it from their last row, not from their first
    is_mutable: bool = False  # write_back() gives rows new values of it

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PrioritySettings(NamedTuple):
    """How rows are drawn by priority: the numbers of ``settings.engine_settings``."""

    eps: float
    stratified: bool
    normalize: int
    mix: float
    new_rows: int
    new_priority: float


class Draws(NamedTuple):
    """The memory of batches of one size, for ``DeviceTable.draw``: the kernel's numbers for the first batch, and the
    step of each number from one batch to the next."""

    numbers: tuple[Any, ...]
    steps: tuple[Any, ...] | None
    weigh: tuple[Any, ...] = ()
    weigh_steps: tuple[Any, ...] | None = None


class Moves(NamedTuple):
    """How the kernels copy fields: each tuple has one number per field."""

    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    widths: tuple[int, ...]
    aligns: tuple[int, ...]
    wides: tuple[int, ...]


def plan_moves(offsets: Sequence[int], sizes: Sequence[int], stride: int) -> Moves:
    """The widest units that the alignment of each field allows."""
    widths = [math.gcd(8, offset, size, stride) for offset, size in zip(offsets, sizes, strict=True)]
    counts = [size // width for size, width in zip(sizes, widths, strict=True)]
    aligns = [math.gcd(16, offset, size, stride) for offset, size in zip(offsets, sizes, strict=True)]
    wides = [min(power_above(count), 4096 // width) for count, width in zip(counts, widths, strict=True)]
    return Moves(*map(tuple, (offsets, counts, widths, aligns, wides)))


def power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()


def tile(stride: int, part: int = _PART_BYTES) -> tuple[int, int]:
    """Rows per program, and programs per row; each program of a row copies ``part`` bytes or more."""
    rows = max(1, min(32, _TILE_BYTES // stride))
    return 1 << (rows.bit_length() - 1), max(1, min(16, stride // part))


class DeviceTable:
    """Rows in a ring. ``span`` is the number of serials per lap; see core/storage/format.h."""

    def __init__(
        self,
        device: torch.device,
        leaves: Sequence[DeviceField],
        capacity: int,
        span: int,
        num_envs: int,
        seed: int,
        *,
        n_step: int = 1,
        gamma: float = 1.0,
        truncated: bool = False,
        reward: int = 0,
        newest: int = 0,
        index: PrioritySettings | None = None,
        exponents: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0),
    ) -> None:
        self.device, self.leaves, self.capacity, self.span = device, list(leaves), capacity, span
        self.num_envs, self.seed, self.index, self.newest, self.n_step = num_envs, seed, index, newest, n_step
        self.tells_truncated = truncated
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

        with torch.inference_mode(False):  # a table made in inference mode may be used outside of it
            self.rows = torch.empty(capacity * self.stride, dtype=torch.uint8, device=device)
            self.flags = zeros(capacity, torch.uint8)
            self.numbers = zeros(len(NUMBERS), torch.int64)
            self.reals = torch.tensor(
                [*exponents, 1.0, *((index.eps, index.mix) if index else (0.0, 0.0)), 1.0, 0.0],
                dtype=torch.float64,
                device=device,
            )
            self.write_numbers(seed=seed, least=0x7FF0000000000000)
            powers = [gamma**k for k in range(n_step + 1)]
            self.powers = torch.tensor(powers, dtype=torch.float64, device=device)
            self.alarms = torch.zeros(len(ALARMS), dtype=torch.int64, pin_memory=device.type == "cuda")
            self.heard = self.alarms.numpy()
            self.alarm = memoryview(self.heard.data)  # the quickest to read
            self._make_index(zeros)
        self.powers_at = self.powers.data_ptr()
        self.fixed = tuple(
            0 if tensor is None else tensor.data_ptr()
            for tensor in (self.rows, self.flags, self.numbers, self.reals, self.priorities, self.nodes, self.alarms)
        )
        self._make_kernels(reward)

    def _make_kernels(self, reward: int) -> None:
        """Makes all kernels with their constants; each is compiled at its first use."""
        rows, parts = self.tile
        truths = False, True
        self._write = {
            has: Kernel(write, (self.capacity, self.stride, *self.moves, rows, parts, *has))
            for has in itertools.product(truths, repeat=3)
        }
        self._mark_rows = Kernel(mark_rows, (self.capacity, self.span, _ITEMS))
        self._put: dict[tuple[int, ...], Kernel] = {}  # by the fields that a write names
        index, of_reward = self.index, self.leaves[reward]
        shape = (
            *(self.capacity, self.span, self.stride, *self.moves, tuple(leaf.is_last for leaf in self.leaves)),
            *(reward, power_above(max(1, math.prod(of_reward.shape))), of_reward.dtype.itemsize == 8),
            *(self.n_step, self.num_envs, self.tells_truncated),
            *(self.newest, self.padded, self.total, self.levels),
            *((index.stratified, index.normalize, index.mix > 0) if index else (False, 2, False)),
            *(_WEIGH_ALONE, rows, parts, _MANY),
        )
        self._draw = Kernel(draw, shape)
        self._name = Kernel(name_newest, (self.capacity, self.span, _MANY))
        if index is None:
            return
        self._weigh = Kernel(weigh, (self.newest, _MANY))
        tree, keeps_zero = (self.padded, self.total, self.levels), index.mix > 0
        self._enter = {
            (phase, given): Kernel(
                enter,
                (
                    *(self.capacity, *tree, keeps_zero, index.new_rows, index.new_priority),
                    *(given, phase, _NODES_ALONE // 2, _MANY),
                ),
                _WARPS_ALONE // 2,
            )
            for phase in range(3)
            for given in truths
        }
        ring = self.capacity, self.span
        # Levels from here on are small: the last program of the level below computes them.
        top = max(1, sum(size > _NODES for size in self.level_sizes))
        self.launched_levels = top
        top = top if top < len(self.levels) else 0
        self._refresh = {
            (level, which): Kernel(
                refresh,
                (
                    *(*ring, self.padded, self.total, first, self.levels[level - 1] if level else -1),
                    *(32 ** (level + 1), keeps_zero, which, top if level == top - 1 else 0, self.levels, _NODES),
                ),
                _WARPS,
            )
            for level, first in enumerate(self.levels)
            for which in range(3)
        }
        self._mark = Kernel(mark, (*ring, _ITEMS))
        self._apply = [
            Kernel(apply, (*ring, *tree, keeps_zero, 0, _NODES_ALONE, _UPDATE_ALONE), _WARPS_ALONE),
            Kernel(apply, (*ring, *tree, keeps_zero, 1, _NODES, _ITEMS)),
        ]
        self._remass = Kernel(remass, (self.padded, _MANY))

    def _make_index(self, zeros: Any) -> None:
        self.priorities = self.nodes = self.winners = None
        self.padded = self.total = 0
        self.levels: tuple[int, ...] = ()
        if self.index is not None or any(leaf.is_mutable for leaf in self.leaves):
            self.winners = zeros(self.capacity, torch.int64)
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
        # Per node: the sum (8 bytes), the largest priority, the least mass. Then, for each node and each leaf, the sum
        # of itself and the siblings before it (8 bytes).
        nodes = zeros(self.total * 6 + self.padded * 2, torch.float32)
        nodes[self.total * 2 : self.total * 3] = -1
        nodes[self.total * 3 : self.total * 4] = math.inf
        self.priorities, self.nodes = leaves, nodes

    # ---- writing ----------------------------------------------------------------------------------------------

    def add(self, sources: tuple[int, ...], count: int, flags: tuple[int, int, int], priorities: int) -> None:
        """Appends ``count`` rows. All arguments are addresses on the device, at multiples of 16, or 0 for none:
        ``sources`` of the values of each field; ``flags`` of bytes that tell which rows end an episode, are truncated,
        and are not masked; ``priorities`` of float32."""
        rows, parts = self.tile
        has = tuple(address != 0 for address in flags)
        self._write[has]((-(-count // rows), parts), (*self.fixed[:3], sources, *flags, count))
        if self.index is not None:
            self._enter_rows(count, priorities)

    def newest_serials(self, count: int) -> torch.Tensor:
        """The serials of the ``count`` newest rows, in the order in which they were added; -1 for masked rows."""
        serials = torch.empty(count, dtype=torch.int64, device=self.device)
        self._name((-(-count // _MANY), 1), (self.fixed[1], self.fixed[2], serials.data_ptr(), count))
        return serials

    def _enter_rows(self, count: int, given: int) -> None:
        def start(phase: int, programs: int) -> None:
            numbers = (*self.fixed[4:6], *self.fixed[2:4], self.fixed[1], self.fixed[6], given, count)
            self._enter[phase, given != 0]((programs, 1), numbers)

        if count <= _ENTER_ALONE:
            start(0, 1)
            return
        for phase in (1, 2):
            start(phase, -(-count // _MANY))
            self._refresh_levels(0, 0, count)

    def _refresh_levels(self, which: int, serials: int, count: int) -> None:
        for level, size in enumerate(self.level_sizes[: self.launched_levels]):
            # The newest rows are adjacent and share nodes (see _newest_nodes); other rows may each have their own.
            nodes = (count // 32 ** (level + 1) + 3, count, size)[which]
            if nodes >= size:
                here, nodes, rows = 2, size, size
            else:
                here, rows = which, count
            numbers = (*self.fixed[4:6], self.fixed[2], self.fixed[1], 0 if here == 2 else serials, rows)
            self._refresh[level, here]((-(-nodes // _NODES), 1), numbers)

    def write_back(self, serials: torch.Tensor, leaves: tuple[int, ...], sources: tuple[int, ...]) -> torch.Tensor:
        """Gives rows new values of the fields ``leaves``; ``sources``: addresses on the device, at multiples of 16.
        Serials are contiguous int64, at a multiple of 16 bytes. Returns the number of serials that named a row, and of
        those that named a row that is gone."""
        assert self.winners is not None
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)  # new at each call: it is returned
        count = serials.numel()
        if count == 0:
            return counts
        kernel = self._put.get(leaves)
        if kernel is None:
            offsets = [self.moves.offsets[leaf] for leaf in leaves]
            moves = plan_moves(offsets, [self.leaves[leaf].bytes for leaf in leaves], self.stride)
            constants = (self.capacity, self.span, self.stride, *moves, *self.tile)
            kernel = self._put[leaves] = Kernel(put, constants)
        rows, parts = self.tile
        names, winners = serials.data_ptr(), self.winners.data_ptr()
        self._mark_rows((-(-count // _ITEMS), 1), (self.fixed[2], self.fixed[1], winners, names, count))
        numbers = (*self.fixed[:3], winners, names, counts.data_ptr(), sources, count)
        kernel((-(-count // rows), parts), numbers)
        return counts

    # ---- drawing ----------------------------------------------------------------------------------------------

    def draws(self, count: int, first: Sequence[int], steps: Sequence[int] | None = None) -> Draws:
        """``first``: addresses that ``draw`` writes to: each field; truncated flags, where batches tell them;
        discounts, where examples have several steps; weights and probabilities, where there are priorities; serials.
        """

        def numbers(of: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
            fields = len(self.leaves) + self.tells_truncated
            rest = iter(of[fields:])
            discount = next(rest) if self.n_step > 1 else 0
            weights = (next(rest), next(rest)) if self.index is not None else (0, 0)
            return tuple(of[:fields]), (discount, *weights, next(rest))

        outs, extras = numbers(first)
        alone = self.index is None or count <= _WEIGH_ALONE
        weigh = () if alone else (self.fixed[3], *extras[1:3], count)
        whole = (*self.fixed, outs, *extras, self.powers_at, count)
        if steps is None:
            return Draws(whole, None, weigh)
        on, more = numbers(steps)
        return Draws(whole, (*[0] * len(self.fixed), on, *more, 0, 0), weigh, () if alone else (0, *more[1:3], 0))

    draw: Any

    def draw_here(self, count: int, draws: Draws, i: int = 0) -> None:
        """Draws a batch into the i-th batch memory of ``draws``, on the current device."""
        rows, parts = self.tile
        self._draw((-(-count // rows), parts), draws.numbers, draws.steps, i)
        if draws.weigh:
            self._weigh((-(-count // _MANY), 1), draws.weigh, draws.weigh_steps, i)

    def odds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last draw: the rows that could be drawn, and the weight before normalisation of the rows whose weight
        in the batch is 1. Computed in the current stream, so no later call changes them."""
        rows = self.numbers[NUMBERS.index("live")].double()
        if self.index is None:
            return rows, torch.ones_like(rows)
        reference, beta = self.reals[REALS.index("reference")], self.reals[REALS.index("beta")]
        return rows, (rows * reference) ** -beta

    # ---- priorities -------------------------------------------------------------------------------------------

    def update(self, serials: torch.Tensor, priorities: torch.Tensor) -> torch.Tensor:
        """Sets priorities: contiguous int64 and float32 of one length, at multiples of 16 bytes. Returns the number
        of applied rows and the number of stale rows."""
        count = serials.numel()
        assert self.winners is not None
        if count == 0:
            return torch.zeros(2, dtype=torch.int64, device=self.device)
        counts = torch.empty(2, dtype=torch.int64, device=self.device)  # new at each call: it is returned
        names, values, winners = serials.data_ptr(), priorities.data_ptr(), self.winners.data_ptr()
        one = count <= _UPDATE_ALONE
        grid = 1 if one else -(-count // _ITEMS), 1
        if not one:
            self._mark(grid, (self.fixed[2], self.fixed[1], winners, names, values, self.fixed[6], count))
        known = (*self.fixed[4:6], *self.fixed[2:4], self.fixed[1], winners, names, values, self.fixed[6])
        self._apply[0 if one else 1](grid, (*known, counts.data_ptr(), count))
        if not one:
            self._refresh_levels(1, names, count)
        return counts

    def remake(self) -> None:
        """Computes the masses of all rows and the whole tree, from priorities and alpha."""
        assert self.index is not None
        self._remass((-(-self.padded // _MANY), 1), (self.fixed[4], self.fixed[3], self.padded))
        self._refresh_levels(2, 0, 0)

    # ---- calls that wait --------------------------------------------------------------------------------------

    def read_numbers(self) -> dict[str, int]:
        return dict(zip(NUMBERS, self.numbers.tolist(), strict=True))

    def read_reals(self) -> dict[str, float]:
        return dict(zip(REALS, self.reals.tolist(), strict=True))

    def write_numbers(self, **values: int) -> None:
        for name, value in values.items():
            self.numbers[NUMBERS.index(name)] = value

    def write_reals(self, **values: float) -> None:
        for name, value in values.items():
            self.reals[REALS.index(name)] = value

    def serials(self) -> torch.Tensor:
        """The serials of the live rows, oldest first."""
        numbers = self.read_numbers()
        head = numbers["head"]
        t = torch.arange(max(numbers["origin"], head - self.capacity), head, device=self.device)
        slots = t % self.capacity
        is_live = (self.flags[slots] & 1) != 0
        return ((t // self.capacity) * self.span + slots)[is_live]

    def slots_of(self, serials: torch.Tensor) -> torch.Tensor:
        """The slots of rows; -1 where a row is no longer there."""
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
DeviceTable.newest_serials = on_device_of(DeviceTable.newest_serials)  # type: ignore[method-assign]
DeviceTable.draw = on_device_of(DeviceTable.draw_here)
DeviceTable.write_back = on_device_of(DeviceTable.write_back)  # type: ignore[method-assign]
DeviceTable.update = on_device_of(DeviceTable.update)  # type: ignore[method-assign]
DeviceTable.remake = on_device_of(DeviceTable.remake)  # type: ignore[method-assign]
