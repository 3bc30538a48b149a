"""Makes AReaL's modules give our classes. Also a pytest plugin: ``-p tests.originals.areal_swap``.

Modules whose names we have are replaced as a whole, which is what changing an import line does. ``data_api`` has more
names than we do (data sets, tokenizers): there only ours are set.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

# Packages that AReaL imports when its modules load, and that none of the code under test calls. Each is stood in for by
# an empty module, and only where it is not installed.
UNUSED = {
    "ray": "name_resolve declares a Ray actor; the tests resolve names through files",
    "wandb": "results are logged to it; nothing here reads them",
    "latex2sympy2": "math_parser checks answers of mathematics; it is imported with the data sets",
    "word2number": "as latex2sympy2",
    "pebble": "as latex2sympy2: its process pool runs those checks",
}

MODULES = {
    "realhf.api.core.dfg": "sharpwave.compat.areal.graph",
    "realhf.system.buffer": "sharpwave.compat.areal.buffer",
    "realhf.system.push_pull_stream": "sharpwave.compat.areal.stream",
    "realhf.system.stream_dataset": "sharpwave.compat.areal.stream",
}
DATA_API = ("MicroBatchSpec", "SequenceSample", "SequenceSplitSpec")


def _unused(target: Any = None, *_: Any, **__: Any) -> Any:
    """Any name of a module that is not there: it decorates, and does nothing else."""
    return target


def _name(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _unused


def stand_in() -> list[str]:
    """Puts empty modules where AReaL's unused imports would fail.

    Returns:
        Their names.
    """
    absent = [name for name in UNUSED if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in absent:
        module = types.ModuleType(name, UNUSED[name])
        module.__getattr__ = _name  # type: ignore[method-assign]
        sys.modules[name] = module
    return absent


def swap() -> None:
    """From here on ``realhf`` gives our classes. Before any module of it has been imported."""
    for name in MODULES:
        if name in sys.modules:
            raise RuntimeError(f"swap(): {name} is imported already")
    data_api = importlib.import_module("realhf.api.core.data_api")
    ours = importlib.import_module("sharpwave.compat.areal.data")
    for name in DATA_API:
        setattr(data_api, name, getattr(ours, name))
    for name, replacement in MODULES.items():
        package, _, last = name.rpartition(".")
        module = importlib.import_module(replacement)
        sys.modules[name] = module
        setattr(importlib.import_module(package), last, module)


def pytest_configure() -> None:
    stand_in()
    if os.environ.get("SHARPWAVE_ORIGINALS") != "upstream":
        swap()


def pytest_report_header() -> str:
    from realhf.api.core.data_api import SequenceSample

    return f"SequenceSample of {SequenceSample.__module__}"
