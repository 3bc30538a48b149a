"""A buffer's whole state between the host and a GPU: rows, serials, priorities, counters, the random stream."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import _core
from ..arrays import prepare
from ..errors import StorageError
from ..sampling import Prioritized
from ..schema import Field, Node
from .device_replay import DeviceReplayBuffer, refuse_on_device
from .replay import ReplayBuffer

__all__ = ["to_device", "to_host"]

_CHUNK_BYTES = 64 << 20
_COUNTERS = ("calls", "sampled", "redraws", "added", "voided", "episodes", "applied", "stale")
_LIVE, _ENDS, _TRUNCATED, _STOPS = 1, 2, 4, 8  # flags of device/state.py


def _chunk(row_bytes: int, width: int) -> int:
    """Rows at a time: whole steps."""
    return max(1, _CHUNK_BYTES // max(row_bytes, 1) // width) * width


def to_host(buffer: DeviceReplayBuffer) -> ReplayBuffer:
    """A copy in memory of the host."""
    table, numbers = buffer._rows, buffer._rows.read_numbers()
    width, capacity, span = buffer._num_envs or 1, buffer._capacity, table.span
    host = ReplayBuffer(
        capacity,
        schema=buffer._schema.fields,
        next_obs="stored" if "next_obs" in buffer._schema.fields else None,
        sampler=buffer.sampler,
        view=buffer._view,
        num_envs=buffer._num_envs,
        writers=buffer._writers,
        seed=buffer._seed,
    )
    try:
        head, origin = numbers["head"], numbers["origin"]
        oldest = max(origin, head - capacity)
        block_rows = host.stats()["block_rows"]
        # The block of the oldest row is written from its start: what was written over there is masked out.
        slot = oldest % capacity // block_rows * block_rows
        first = oldest - oldest % capacity + slot
        host._table.begin_at(origin // capacity * span, oldest // capacity * span + slot)
        careful = functools.partial(
            prepare, host._schema, capacity, buffer._num_envs, None, isinstance(host._sampler, Prioritized)
        )
        # Rows come in their order, however many: not as a user's add would bring them.
        host._writer = _core.Writer(host._table, careful, buffer._num_envs is not None, False)
        torch, step = buffer._place.torch, _chunk(table.stride, width)
        for begin in range(first, head, step):
            t = torch.arange(begin, min(begin + step, head), device=buffer._place.device)
            slots = t % capacity
            flags = np.where(t.cpu().numpy() >= oldest, table.flags[slots].cpu().numpy(), 0)
            values = buffer._tree([field.cpu().numpy() for field in table.read(slots)], [])
            host._writer.add(**values, truncated=(flags & (_TRUNCATED | _STOPS)) != 0, mask=(flags & _LIVE) != 0)
        if buffer._has_index:
            serials = table.serials()
            priorities = table.priorities[table.slots_of(serials)].cpu().numpy()
            host.update_priorities(serials.cpu().numpy(), priorities)
        history: dict[str, Any] = {name: numbers[name] for name in _COUNTERS}
        host._table.take_counters(history | {"running_max": table.read_reals()["running_max"]})
    except BaseException:
        host.close()
        raise
    return host


def to_device(host: ReplayBuffer, device: Any) -> DeviceReplayBuffer:
    """A copy on a GPU."""
    refuse_on_device("open()", host._sampler, host._view, host._schema, host._pace, None)
    stats, history = host.stats(), host._table.history()
    buffer = DeviceReplayBuffer(
        host._capacity,
        device=device,
        schema=host._schema.fields,
        next_obs="stored" if "next_obs" in host._schema.fields else None,
        sampler=host.sampler,
        view=host._view,
        num_envs=host._num_envs,
        writers=stats["max_writers"],
        seed=stats["seed"],
    )
    table, width, capacity = buffer._rows, host._num_envs or 1, host._capacity
    torch, place = buffer._place.torch, buffer._place.device
    span = stats["blocks"] * stats["block_rows"]
    if span != table.span:
        raise StorageError(
            f"open(): device: rounds of {span} serials, where this version's have {table.span}: the file is of another "
            "version; open it without device="
        )

    def position(serial: Any) -> Any:
        return serial // span * capacity + np.minimum(serial % span, capacity)

    head = int(position(history["next"]))
    serials = host._table.live_serials()
    serials = serials[position(serials) >= head - capacity]  # other writers' blocks may hold rows of an older round
    flags = np.zeros(capacity, np.uint8)
    step = _chunk(table.stride, width)
    rows = table.rows.view(capacity, table.stride)
    for begin in range(0, len(serials), step):
        part = serials[begin : begin + step]
        batch = host._table.read(part, False)
        packed = np.zeros((len(part), table.stride), np.uint8)
        for (_, value), offset in zip(_leaves(batch, host._schema.fields), table.moves.offsets, strict=True):
            flat = np.ascontiguousarray(value).reshape(len(part), -1).view(np.uint8)
            packed[:, offset : offset + flat.shape[1]] = flat
        ends = batch["done"].astype(bool) | batch["truncated"]
        flags[part % span] = _LIVE | _ENDS * ends | _TRUNCATED * batch["truncated"]
        rows.index_copy_(0, torch.from_numpy(part % span).to(place), torch.from_numpy(packed).to(place))
    _stop(flags, serials % span, head, width, stats, history["writers"])
    table.flags.copy_(torch.from_numpy(flags))
    counters = {name: history[name] for name in _COUNTERS}
    table.write_numbers(head=head, origin=int(position(history["origin"])), live=len(serials), **counters)
    if buffer._has_index:
        priorities = np.empty(len(serials), np.float32)
        host._table.priorities_of(np.ascontiguousarray(serials), priorities)
        table.priorities[torch.from_numpy(serials % span).to(place)] = torch.from_numpy(priorities).to(place)
        table.write_reals(running_max=history["running_max"])
        table.remake()
    buffer._may_have_rows = len(serials) > 0
    return buffer


def _stop(flags: Any, slots: Any, head: int, width: int, stats: dict[str, Any], writers: int) -> None:
    """Marks rows behind which another stream begins: the newest of each env, for nobody goes on with its episode; and
    where writers shared the ring or rows were lost, those without a neighbour that surely is the next."""
    capacity = len(flags)
    seen: set[int] = set()
    for slot in slots[::-1].tolist():
        if len(seen) == width:
            break
        if slot % width not in seen:
            seen.add(slot % width)
            flags[slot] |= _STOPS
    if writers > 1 or stats["rows_lost"]:
        flags[slots[(flags[(slots + width) % capacity] & _LIVE) == 0]] |= _STOPS
        ends = slots % stats["block_rows"] >= stats["block_rows"] - width
        flags[slots[ends | (slots >= capacity - width)]] |= _STOPS


def _leaves(batch: dict[str, Any], fields: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def walk(name: str, node: Node, value: Any) -> None:
        if isinstance(node, Field):
            found.append((name, value))
        elif isinstance(node, tuple):
            for i, part in enumerate(node):
                walk(f"{name}/{i}", part, value[i])
        else:
            for key, part in node.items():
                walk(f"{name}/{key}", part, value[key])

    for name, node in fields.items():
        walk(name, node, batch[name])
    return found
