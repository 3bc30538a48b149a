"""The timeline of a run: who was busy when, as a trace that Perfetto and chrome://tracing show; idle shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .log import EVENTS, SPANS, read_lines

__all__ = ["idle_shares", "write_timeline"]

_ENDS = ("kept", "no_signal", "stale", "rejected", "unwanted")


def write_timeline(logs: str | Path, path: str | Path) -> int:
    """Makes the trace of a run from its logs. Returns how many events it has.

    Rows are the learner, each generator and the evaluation, with what each of them did; the items at agents; and
    counters of items that run and that wait in the buffer.
    """
    spans, events = read_lines(Path(logs) / SPANS), read_lines(Path(logs) / EVENTS)
    began = min((line["s"] for line in [*spans, *events]), default=0.0)
    trace = [*_span_events(spans, began), *_item_events(events, began)]
    aside = Path(path).with_name(f".{Path(path).name}")
    try:
        aside.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
        aside.rename(path)
    except OSError:  # the trace of before stays
        aside.unlink(missing_ok=True)
        raise
    return len(trace)


def _span_events(spans: list[dict[str, Any]], began: float) -> list[dict[str, Any]]:
    rows = {who: number for number, who in enumerate(dict.fromkeys(span["who"] for span in spans), 1)}
    made: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": who}} for who, row in rows.items()
    ]
    for span in spans:
        about = {key: value for key, value in span.items() if key not in ("who", "what", "s", "took_s")}
        made.append(
            {"ph": "X", "name": span["what"], "pid": 1, "tid": rows[span["who"]], "ts": _us(span["s"] - began),
             "dur": _us(span["took_s"]), "args": about}
        )  # fmt: skip
    return made


def _item_events(events: list[dict[str, Any]], began: float) -> list[dict[str, Any]]:
    """Each item from its start to its end, and two counters."""
    made: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "items"}}]
    running: dict[Any, str] = {}
    held = 0
    for line in events:
        at, event, key = _us(line["s"] - began), line["event"], str(line.get("key"))
        if event == "start":
            running[key] = line["owner"]
            made.append({"ph": "b", "cat": "item", "id": key, "name": line["owner"], "pid": 2, "tid": 1, "ts": at})
        elif event in _ENDS and key in running:
            made.append({"ph": "e", "cat": "item", "id": key, "name": running.pop(key), "pid": 2, "tid": 1, "ts": at})
            held += event == "kept"
        elif event == "trained":
            held -= len(line["keys"])
        else:
            if event not in ("take", "lose", "why"):
                about = {name: value for name, value in line.items() if name not in ("s", "event")}
                made.append({"ph": "i", "s": "g", "name": event, "pid": 2, "tid": 1, "ts": at, "args": about})
            continue
        made.append({"ph": "C", "name": "items", "pid": 2, "ts": at, "args": {"run": len(running), "wait": held}})
    return made


def idle_shares(logs: str | Path, since_s: float = 0.0) -> dict[str, float]:
    """For each part of the run, the share of the time between its first and last work in which it did nothing.

    Args:
        since_s: Unix time. Work that began earlier is not counted: that of a run before it was resumed.
    """
    by_part: dict[str, list[tuple[float, float]]] = {}
    for span in read_lines(Path(logs) / SPANS):
        if span["s"] < since_s:
            continue
        by_part.setdefault(span["who"], []).append((span["s"], span["s"] + span["took_s"]))
    return {who: _idle(sorted(found)) for who, found in by_part.items()}


def _idle(spans: list[tuple[float, float]]) -> float:
    busy, end = 0.0, spans[0][0]
    for began, ended in spans:
        busy += max(0.0, ended - max(began, end))
        end = max(end, ended)
    whole = end - spans[0][0]
    return 1 - busy / whole if whole > 0 else 0.0


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
