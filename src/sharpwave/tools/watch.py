"""`sharpwave info --watch`: a live buffer's numbers at intervals, read without opening it."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..errors import StorageError
from . import segments

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["format_pids", "watch_segment"]


@dataclass(frozen=True)
class Look:
    """A buffer at one moment, and its rates since the previous look; None at the first look."""

    segment: segments.Segment
    added_per_s: float | None = None
    sampled_per_s: float | None = None


def watch_segment(address: str, interval_s: float, count: int | None, as_json: bool) -> None:
    """Shows a live buffer every `interval_s` seconds, `count` times or until Ctrl-C.

    On a terminal it redraws a table; elsewhere it prints one line per look, with `as_json` one JSON object per line.
    """
    looks = _look(address, interval_s, count)
    try:
        if as_json or not sys.stdout.isatty():
            next(looks)  # the first look has no rates
            for look in looks:
                print(_json(look) if as_json else _line(look), flush=True)
            return

        from rich.live import Live

        with Live(_table(next(looks)), auto_refresh=False) as live:
            for look in looks:
                live.update(_table(look), refresh=True)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a watch ends


def _look(address: str, interval_s: float, count: int | None) -> Iterator[Look]:
    """One look immediately, then `count` more, each with the rates since the previous one."""
    before, then = _read(address), time.monotonic()
    yield Look(before)
    for _ in itertools.count() if count is None else range(count):
        time.sleep(interval_s)
        segment, now = _read(address), time.monotonic()
        # The counters of a new buffer under the same name began at 0.
        added, sampled = (before.rows_added, before.rows_sampled) if segment.uuid == before.uuid else (0, 0)
        yield Look(
            segment, (segment.rows_added - added) / (now - then), (segment.rows_sampled - sampled) / (now - then)
        )
        before, then = segment, now


def _read(address: str) -> segments.Segment:
    try:
        return segments.read(address)
    except FileNotFoundError:
        raise StorageError(f"info: there is no {address!r}") from None


def _line(look: Look) -> str:
    now = look.segment
    return (
        f"{time.strftime('%H:%M:%S')}  {now.size:,} of {now.capacity:,} rows  added {look.added_per_s:,.0f}/s  "
        f"sampled {look.sampled_per_s:,.0f}/s  {now.writers} of {now.max_writers} writers  {now.waiting} waiting  "
        f"open in {format_pids(now.pids) or 'no process'}"
    )


def _json(look: Look) -> str:
    return json.dumps({**asdict(look.segment), "added_per_s": look.added_per_s, "sampled_per_s": look.sampled_per_s})


def _table(look: Look) -> Table:
    from rich.table import Table

    now = look.segment
    table = Table("field")
    table.add_column("value", justify="right")
    table.add_column("per second", justify="right")

    def rate(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}"

    table.add_row("address", now.address)
    table.add_row("rows", f"{now.size:,} of {now.capacity:,}")
    table.add_row("added", f"{now.rows_added:,}", rate(look.added_per_s))
    table.add_row("sampled", f"{now.rows_sampled:,}", rate(look.sampled_per_s))
    table.add_row("writers", f"{now.writers} of {now.max_writers}")
    table.add_row("waiting for their turn", f"{now.waiting}")
    table.add_row("recoveries, rows lost", f"{now.recoveries}, {now.rows_lost}")
    table.add_row("open in", format_pids(now.pids) or "no process")
    return table


def format_pids(pids: list[int]) -> str:
    """Process ids as text; a process of another PID namespace has no number here and is shown as '?'."""
    return ", ".join(str(pid) if pid else "?" for pid in pids)
