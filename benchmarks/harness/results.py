"""Results on disk, and figures as people read them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

# As read from JSON: nested, with text for every key.
Document = dict[str, Any]

# What is published: `report.py` makes the documents of it.
RESULTS = Path(__file__).resolve().parent.parent / "results"


def save(name: str, document: Document, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


def load(name: str, folder: Path = RESULTS) -> Any:
    """The stored document, or None when that benchmark has not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def figure(value: float) -> str:
    """Three significant digits, never an exponent: 0.912, 8.41, 75.3, 1,240."""
    rounded = float(f"{value:.3g}")
    magnitude = math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(0, 2 - magnitude)}f}"


def duration(ns: float) -> str:
    for unit, scale in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if float(f"{ns / scale:.3g}") < 1000:
            return f"{figure(ns / scale)} {unit}"
    return f"{figure(ns / 1e9)} s"


def amount(value: float) -> str:
    for unit, scale in (("", 1.0), ("k", 1e3)):
        if float(f"{value / scale:.3g}") < 1000:
            return f"{figure(value / scale)}{unit}"
    return f"{figure(value / 1e6)}M"


def ratio(value: float) -> str:
    return f"{figure(value)}x"


def size(count: float) -> str:
    for unit, scale in (("B", 1.0), ("kB", 1e3), ("MB", 1e6)):
        if float(f"{count / scale:.3g}") < 1000:
            return f"{figure(count / scale)} {unit}"
    return f"{figure(count / 1e9)} GB"
