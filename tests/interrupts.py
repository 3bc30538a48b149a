"""Interrupts at chosen places of a call: where a function begins, and behind a call of a function in C. There Python
raises the exception of a signal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["interrupted_at"]


def interrupted_at(number: int, call: Callable[[], object], modules: tuple[ModuleType, ...]) -> str | None:
    """Calls, and raises KeyboardInterrupt at the ``number``-th place that the call comes to in these modules.

    Returns:
        The place; None where the call ended before it.
    """
    files = {module.__file__ for module in modules}
    left, place = number, None

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal left, place
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left -= 1
            if left == 0:
                sys.setprofile(None)
                place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return place
