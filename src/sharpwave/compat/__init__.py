"""The names of other projects' buffers over Sharpwave's own: a snippet runs with only its import line changed.

``sw.compat.areal`` and its siblings are imported when they are first asked for.
"""

from importlib import import_module
from typing import Any

_PROJECTS = ("apexrl", "areal", "replay_buffer", "rlinf")


def __getattr__(name: str) -> Any:
    if name in _PROJECTS:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_PROJECTS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PROJECTS})
