"""Where each contender's Python is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent
PEERS_VARIABLE = "SHARPWAVE_PEERS"


class NotInstalledError(RuntimeError):
    """An environment has not been made."""


def environment(name: str) -> Path:
    return Path(os.environ.get(PEERS_VARIABLE) or BENCHMARKS / ".venvs") / name


def interpreter(name: str | None) -> Path:
    """The Python of an environment; None is the one that runs the benchmark."""
    if name is None:
        return Path(sys.executable)
    python = environment(name) / "bin" / "python"
    if not python.exists():
        raise NotInstalledError(f"no environment '{name}': run benchmarks/setup_peers.py {name}")
    return python
