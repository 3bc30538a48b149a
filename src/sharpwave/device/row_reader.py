"""Batches for a GPU that reads the rows of a table in host memory itself.

The engine draws the rows and lists their places; the GPU copies them; then the engine checks whether a row was
overwritten during the copy. Such a batch is drawn again and copied by the engine into pinned memory: there every row is
checked while it is copied.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from .._core import Role
from ..schema import Field, Schema
from .launch import Kernel
from .pinned_memory import PinnedMemory, views_of
from .pull import pull
from .registered_memory import RegisteredMemory
from .table import Moves, plan_moves, power_above, tile

__all__ = ["RowReader", "Ticket"]

_SHIFT_FROM = 64  # bytes: larger unaligned values are read as shifted words
# Outstanding loads keep the bus busy, so a few programs with many loads each are enough. Each program takes registers
# from the training: with rows of 56 KB, 16 programs reach 87 % of the link and slow a DQN by 3 %, 24 programs 90 % and
# 4 %, 64 programs 89 % and 8 %. With this many bytes in flight there are 20 programs.
_BYTES_IN_FLIGHT = 640 << 10
_FEWEST, _MOST = 16, 64
_LARGE = 1024  # bytes: only values of this size or more count for the number of programs
_PIECE = 32 << 10
_PART = 64 << 10
_EXTRAS = ("discount", "weights", "probabilities", "truncated", "valid", "mask", "first", "place_indices", "indices")
_DTYPES = (np.float32, np.float32, np.float64, bool, bool, bool, bool, np.int64, np.int64)
_PER_EXAMPLE = ("weights", "probabilities", "indices")  # the others have the axis of places, where there is one


def _narrow(moves: Moves, sizes: list[int], shifts: list[int], together: list[int]) -> Moves:
    """The moves with words of 4 bytes for unaligned fields (``shifts``), and with ``wides`` so small that the registers
    of a program hold ``together`` values at a time."""
    rows = []
    for (offset, count, width, align, _), size, shift, values in zip(
        zip(*moves, strict=True), sizes, shifts, together, strict=True
    ):
        if shift:
            count, width, align = size // 4, 4, min(align, 4)
        rows.append((offset, count, width, align, min(power_above(count), max(1, _PIECE // values // width))))
    return Moves(*map(tuple, zip(*rows, strict=True)))


class _DirectField(NamedTuple):
    """A field that the kernel copies."""

    offset: int
    before: int  # offset of the frames before the last
    size: int  # bytes of a frame
    depth: int
    kind: str
    spills: bool
    marks: bool  # its frames may be padding
    pads_zero: bool


class ReadPlan:
    """Which fields the kernel copies and which the host copies: the same for all batches of a buffer."""

    def __init__(self, schema: Schema, offsets: list[int], stride: int, n_step: int, window: int) -> None:
        self.schema, self.stride, self.window = schema, stride, window
        self.discount_shape = schema.discount_shape(n_step) or ()
        self.stack = max(field.stack for _, field in schema.leaves)
        self.direct: list[int] = []
        self.by_host: list[int] = []
        of_direct: list[_DirectField] = []
        pads_zero = any(field.padding == "zero" for _, field in schema.leaves)
        for leaf, ((_, field), (number, role, older)) in enumerate(zip(schema.leaves, schema._places, strict=True)):
            is_summed = role == Role.reward or (schema.by_agent and leaf in schema.dones)
            # What does not stand in the row as it is.
            if field.compression or field.ragged or field.mutable or (is_summed and n_step > 1):
                self.by_host.append(leaf)
                continue
            size = math.prod(field.shape) * field.dtype.itemsize
            kind = {Role.own: "own", Role.reward: "own", Role.last: "last", Role.next: "next"}[role]
            if field.stack > 1:
                kind = "own_frames" if role == Role.own else "next_frames"
            before = offsets[older] if role == Role.last and field.stack > 1 else offsets[number]
            # Without zeros, padding is told only of a stored next observation that starts an episode.
            marks = field.stack > 1 and (pads_zero or role == Role.last)
            self.direct.append(leaf)
            of_direct.append(
                _DirectField(
                    offsets[number],
                    before,
                    size,
                    field.stack,
                    kind,
                    role == Role.next,
                    marks,
                    field.padding == "zero",
                )
            )
        sizes = [one.size for one in of_direct]
        # Large unaligned values, such as an image after a flag byte, are read as shifted words.
        self.shifts = [
            one.offset % 4 if one.size % 4 == 0 and one.size >= _SHIFT_FROM and one.offset % 4 == one.before % 4 else 0
            for one in of_direct
        ]
        at = [
            math.gcd(one.offset - shift, one.before - shift) for one, shift in zip(of_direct, self.shifts, strict=True)
        ]
        rows, parts = tile(max(sum(one.size * one.depth for one in of_direct), 16), _PART)
        powers = [power_above(one.depth) for one in of_direct]
        moves = _narrow(plan_moves(at, sizes, stride), sizes, self.shifts, [rows * power for power in powers])
        self.kinds = [one.kind for one in of_direct]
        self.spilled = [leaf for leaf, one in zip(self.direct, of_direct, strict=True) if one.spills]
        shape = (
            stride,
            tuple(one.offset for one in of_direct),
            tuple(one.before for one in of_direct),
            *moves[1:4],
            tuple(self.shifts),
            moves.wides,
            tuple(one.depth for one in of_direct),
            tuple(powers),
            tuple(self.stack if kind.endswith("frames") else 1 for kind in self.kinds),
            tuple(one.spills for one in of_direct),
            tuple(one.marks for one in of_direct),
            tuple(one.pads_zero for one in of_direct),
            rows,
            parts,
        )
        self.tile = rows, parts
        # A frame of zeros; a shifted read goes a word beyond it.
        self.zero_bytes = max([one.size for one in of_direct if one.pads_zero], default=-64) + 64
        # Of the stack of a next observation, all frames but one are in the GPU's cache: fewer bytes are in flight.
        holds = [
            rows * (1 if one.kind == "next_frames" else power) * wide * width
            for one, power, wide, width in zip(of_direct, powers, moves.wides, moves.widths, strict=True)
        ]
        large = [held for held, one in zip(holds, of_direct, strict=True) if one.size >= _LARGE] or holds
        self.programs = max(_FEWEST, min(_MOST, _BYTES_IN_FLIGHT * len(large) // max(sum(large), 1)))
        self.pull = Kernel(pull, shape)

    def batch_shape(self, leaf: int, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
        field: Field = self.schema.leaves[leaf][1]
        lead = (size, self.window) if self.window else (size,)
        return (*lead, *((field.stack,) if field.stack > 1 else ()), *field.shape), field.dtype


class Ticket:
    """One batch in transfer: its memory, and the engine's record of the rows that it reads."""

    def __init__(self, plan: ReadPlan, size: int, device: torch.device, extras: set[str]) -> None:
        rows = size * max(plan.window, 1)
        lead = (size, plan.window) if plan.window else (size,)
        names: dict[Any, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for name in ("own", "last", "next"):
            names[name] = (rows,), np.dtype(np.int64)
        if plan.stack > 1:
            for name in ("own_frames", "next_frames"):
                names[name] = (rows * plan.stack,), np.dtype(np.int64)
        self.named = PinnedMemory(names, device)
        specs: dict[Any, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for leaf in plan.by_host:
            specs[leaf] = plan.batch_shape(leaf, size)
        for name, kind in zip(_EXTRAS, _DTYPES, strict=True):
            if name in extras:
                axes = plan.discount_shape if name == "discount" else ()
                specs[name] = (*((size,) if name in _PER_EXAMPLE else lead), *axes), np.dtype(kind)
        self.sent = PinnedMemory(specs, device)
        # With the same alignment as in the rows.
        shifts = dict(zip(plan.direct, plan.shifts, strict=True))
        self.spills = PinnedMemory({leaf: plan.batch_shape(leaf, size) for leaf in plan.spilled}, device, shifts)
        places = self.named.arrays
        self.places = [places.get(name) for name in ("own", "last", "next", "own_frames", "next_frames")]
        self.leaves = [
            self.sent.arrays.get(leaf, self.spills.arrays.get(leaf)) for leaf in range(len(plan.schema.leaves))
        ]
        self.extras = [self.sent.arrays.get(name) for name in _EXTRAS]
        self.spill_addresses = tuple(self.spills.address(leaf) if leaf in plan.spilled else 0 for leaf in plan.direct)
        self.place_addresses = tuple(self.named.address(kind) for kind in plan.kinds)
        # One block of memory for all fields: to make a tensor takes longer than to launch the kernel.
        self.outs, self.out_starts, self.out_bytes = [], [], 0
        for leaf in plan.direct:
            shape, dtype = plan.batch_shape(leaf, size)
            strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
            there = torch.from_numpy(np.empty(0, dtype)).dtype
            self.outs.append((leaf, there, shape, strides, self.out_bytes // dtype.itemsize))
            self.out_starts.append(self.out_bytes)
            self.out_bytes += -(-math.prod(shape) * dtype.itemsize // 256) * 256
        self.sent_start = self.out_bytes
        self.words = self.sent.block.numel() // 8
        for name, there, shape, strides, offset in self.sent.views:
            self.outs.append((name, there, shape, strides, self.sent_start // there.itemsize + offset))
        self.out_bytes += -(-self.sent.block.numel() // 256) * 256
        self.sent_address = self.sent.block.data_ptr()
        self.size, self.rows = size, rows
        self.reading: Any = None
        self.feed: Any = None
        self.odds: Any = None
        self.event = torch.cuda.Event() if device.type == "cuda" else None
        self.tensors: dict[Any, torch.Tensor] = {}
        self.blocks: tuple[torch.Tensor, ...] = ()  # the memory of the tensors


class RowReader:
    """Reads a table's rows on a device. ``memory``: the memory of the rows, registered for the device.

    Raises:
        Unregistered: The memory cannot be registered.
    """

    def __init__(
        self,
        table: Any,
        schema: Schema,
        device: torch.device,
        n_step: int,
        window: int,
        extras: set[str],
        memory: RegisteredMemory | None,
    ) -> None:
        rows = table.row_memory()
        self.table, self.device, self.extras = table, device, extras
        self.plan = ReadPlan(schema, table.field_offsets, rows.row_bytes, n_step, window)
        self.free: dict[int, list[Ticket]] = {}
        self.memory = memory
        self.zeros = PinnedMemory({"frame": ((self.plan.zero_bytes,), np.dtype(np.uint8))}, device)
        self.zeros.arrays["frame"][:] = 0
        self.zero_address = self.zeros.address("frame") if self.plan.zero_bytes else 0
        self.base = rows.address if memory is None else memory.base
        self.reached = 0
        self._reach()

    @property
    def registered_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.bytes

    def _reach(self) -> None:
        slots = self.table.row_memory().used_slots
        if self.memory is not None and slots * self.plan.stride > self.reached:
            self.memory.reach(slots * self.plan.stride)
            self.reached = slots * self.plan.stride

    def begin(self, size: int, timeout: float | None, deliver: bool, stream: Any = None, odds: Any = None) -> Ticket:
        """Draws a batch and starts its copy in ``stream``, which is the current stream. ``odds``: an array for those of
        the draw, see ``Table.name_rows``."""
        free = self.free.get(size)
        ticket = free.pop() if free else Ticket(self.plan, size, self.device, self.extras)
        ticket.feed, ticket.odds = self, odds
        try:
            ticket.reading = self.table.name_rows(
                size, ticket.places, ticket.leaves, ticket.extras, timeout, deliver, odds
            )
        except BaseException:
            self.free.setdefault(size, []).append(ticket)
            raise
        try:
            self._reach()
            self.fetch(ticket, stream)
        except BaseException:  # the batch is not delivered; the ticket is not reused, a kernel may still write to it
            if not deliver:
                self.table.settle(ticket.extras[-1], False)
            raise
        return ticket

    def fetch(self, ticket: Ticket, stream: Any = None) -> None:
        """Starts the copy of a ticket's rows in ``stream``, which is the current stream."""
        if torch.is_inference_mode_enabled():  # the batch may be used for training outside of inference mode
            with torch.inference_mode(False):
                return self.fetch(ticket, stream)
        plan = self.plan
        rows, parts = plan.tile
        grid = (min(-(-ticket.rows // rows) * parts, plan.programs), 1)
        out = torch.empty(ticket.out_bytes, dtype=torch.uint8, device=self.device)
        base = out.data_ptr()
        addresses = tuple([base + start for start in ticket.out_starts])
        made = (ticket.sent_address, base + ticket.sent_start, ticket.words, self.zero_address)
        plan.pull(grid, (self.base, ticket.place_addresses, ticket.spill_addresses, addresses, *made, ticket.rows))
        if ticket.event is not None:
            ticket.event.record(stream)
        # After the launch: the device copies meanwhile.
        ticket.blocks = (out,)
        ticket.tensors = views_of(out, ticket.outs)

    def end(self, ticket: Ticket) -> dict[Any, torch.Tensor] | None:
        """Waits for a batch and returns its tensors, by leaf and by name; None if a row changed during the copy."""
        if ticket.event is not None:
            ticket.event.synchronize()
        held = ticket.reading.holds()
        tensors, ticket.tensors, ticket.reading, ticket.blocks, ticket.feed = ticket.tensors, {}, None, (), None
        free = self.free.setdefault(ticket.size, [])
        if len(free) < 8:
            free.append(ticket)
        return tensors if held else None
