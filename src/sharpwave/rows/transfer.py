"""Copies the whole state of rows between the host and a GPU: values, handles, priorities, counters, random stream."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from .. import _core
from ..arrays import prepare, read_leaf
from ..errors import StorageError
from ..schema import Field, Node
from .device import DeviceRows, check_on_device
from .host import HostRows

__all__ = ["to_device", "to_host"]

_CHUNK_BYTES = 64 << 20
_COUNTERS = ("calls", "sampled", "redraws", "added", "voided", "episodes", "applied", "stale")
_LIVE, _ENDS, _TRUNCATED, _STOPS, _GOES_ON = 1, 2, 4, 8, 16  # flags of device/state.py


def _chunk(row_bytes: int, width: int) -> int:
    """Rows at a time: whole steps."""
    return max(1, _CHUNK_BYTES // max(row_bytes, 1) // width) * width


def to_host(rows: DeviceRows) -> HostRows:
    """A copy in memory of the host."""
    table, numbers, spec = rows.table, rows.table.read_numbers(), dataclasses.replace(rows.spec, sampler=rows.sampler())
    width, capacity, span = spec.num_envs or 1, spec.capacity, table.span
    host, _ = HostRows.make("save()", spec, None, "error")
    try:
        head, origin = numbers["head"], numbers["origin"]
        oldest = max(origin, head - capacity)
        block_rows = host.stats()["block_rows"]
        # Blocks are written from their start: rows of the first one that were overwritten are masked out.
        slot = oldest % capacity // block_rows * block_rows
        first = oldest - oldest % capacity + slot
        host.table.begin_at(origin // capacity * span, oldest // capacity * span + slot)
        careful = functools.partial(prepare, spec.schema, capacity, spec.num_envs, None, spec.is_prioritized)
        read = functools.partial(read_leaf, spec.schema)
        # These rows are in time order. An add by a user would need num_envs= to have several.
        writer = host.write_with(_core.Writer(host.table, careful, read, spec.num_envs is not None, False))
        for env in _open_envs(table, width):
            writer.go_on(env)
        torch, step = rows.place.torch, _chunk(table.stride, width)
        for begin in range(first, head, step):
            t = torch.arange(begin, min(begin + step, head), device=rows.device)
            slots = t % capacity
            flags = np.where(t.cpu().numpy() >= oldest, table.flags[slots].cpu().numpy(), 0)
            values = rows.memory.tree([field.cpu().numpy() for field in table.read(slots)], [])
            writer.add(**values, truncated=(flags & (_TRUNCATED | _STOPS)) != 0, mask=(flags & _LIVE) != 0)
        if spec.is_prioritized:
            serials = table.serials()
            priorities = table.priorities[table.slots_of(serials)].cpu().numpy()
            host.update_priorities(serials.cpu().numpy(), priorities, None, None)
        history: dict[str, Any] = {name: numbers[name] for name in _COUNTERS}
        host.table.take_counters(history | {"running_max": table.read_reals()["running_max"]})
    except BaseException:
        host.close(False)
        raise
    return host


def _open_envs(table: Any, width: int) -> list[int]:
    """Environments whose oldest row may be in the middle of an episode."""
    from ..device.episodes import list_episodes

    found = list_episodes(table)
    oldest: dict[int, bool] = {}
    for first, is_whole in zip(found.firsts, found.are_whole, strict=True):
        oldest.setdefault(first % width, is_whole)
    return [env for env, is_whole in oldest.items() if not is_whole]


def to_device(host: HostRows, device: Any) -> DeviceRows:
    """A copy on a GPU."""
    check_on_device("open()", host.spec)
    stats, history = host.stats(), host.table.history()
    spec = dataclasses.replace(host.spec, sampler=host.sampler())
    rows = DeviceRows("open()", spec, device)
    table, width, capacity = rows.table, spec.num_envs or 1, spec.capacity
    torch, place = rows.place.torch, rows.device
    span = stats["blocks"] * stats["block_rows"]
    if span != table.span:
        raise StorageError(
            f"open(): device: the file was written by another version, with {span} serials in a lap and not "
            f"{table.span}; open it without device="
        )

    head = int(rows.positions(history["next"]))
    serials = host.table.live_serials()
    serials = serials[
        rows.positions(serials) >= head - capacity
    ]  # other writers' blocks may hold rows of an older round
    flags = np.zeros(capacity, np.uint8)
    step = _chunk(table.stride, width)
    memory = table.rows.view(capacity, table.stride)
    for begin in range(0, len(serials), step):
        part = serials[begin : begin + step]
        batch = host.table.read(part, False)
        packed = np.zeros((len(part), table.stride), np.uint8)
        for value, offset in zip(_leaves(spec.schema.fields, batch), table.moves.offsets, strict=True):
            flat = np.ascontiguousarray(value).reshape(len(part), -1).view(np.uint8)
            packed[:, offset : offset + flat.shape[1]] = flat
        leaves = _leaves(spec.schema.fields, batch)
        dones = [leaves[leaf].reshape(len(part), -1).astype(bool).all(axis=1) for leaf in spec.schema.dones]
        ends = np.logical_and.reduce(dones) | batch["truncated"]
        flags[part % span] = _LIVE | _ENDS * ends | _TRUNCATED * batch["truncated"]
        memory.index_copy_(0, torch.from_numpy(part % span).to(place), torch.from_numpy(packed).to(place))
    starts = np.zeros(capacity, bool)
    starts[_core.Episodes(host.table).starts() % span] = True
    flags[(flags & _LIVE != 0) & ~starts] |= _GOES_ON
    _stop(flags, serials % span, head, width, stats, history["writers"])
    table.flags.copy_(torch.from_numpy(flags))
    counters = {name: history[name] for name in _COUNTERS}
    table.write_numbers(head=head, origin=int(rows.positions(history["origin"])), live=len(serials), **counters)
    if spec.is_prioritized:
        priorities = np.empty(len(serials), np.float32)
        host.table.priorities_of(np.ascontiguousarray(serials), priorities)
        table.priorities[torch.from_numpy(serials % span).to(place)] = torch.from_numpy(priorities).to(place)
        table.write_reals(running_max=history["running_max"])
        table.remake()
    rows.note_rows(len(serials) > 0)
    return rows


def _stop(flags: Any, slots: Any, head: int, width: int, stats: dict[str, Any], writers: int) -> None:
    """Marks the rows that have no next step: the newest row of each environment, because its episode does not continue
    here; and, if several writers shared the ring or rows were lost, rows whose next row may be of another episode."""
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


def _leaves(node: Node, value: Any) -> list[Any]:
    """The arrays of a batch, in the order of the schema's leaves."""
    if isinstance(node, Field):
        return [value]
    parts = enumerate(node) if isinstance(node, tuple) else node.items()
    return [leaf for key, part in parts for leaf in _leaves(part, value[key])]
