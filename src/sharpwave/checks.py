"""Checks of users' arguments: each returns the value, or raises an error that says what was expected."""

from __future__ import annotations

import math
import numbers
import operator
import os
import sys
import warnings
from typing import Any

from .errors import SchemaError

__all__ = [
    "check_settable",
    "number",
    "one_of",
    "random_seed",
    "seconds",
    "set_once",
    "told",
    "truth",
    "whole",
    "whole_steps",
]


def check_settable(face: Any, name: str, *, first: tuple[str, ...] = ()) -> None:
    """Refuses to set an attribute that a buffer class does not have: a mistyped name, or a setting that only the
    constructor takes, would otherwise have no effect and raise no error. Subclasses may have attributes of their own:
    only instances of the class that defines ``__setattr__`` with this check are checked.

    Args:
        first: Names that the constructor sets, once.
    """
    if name[0] == "_" or "__setattr__" not in vars(type(face)):
        return
    there = getattr(type(face), name, None)
    if callable(there) or getattr(there, "fset", None) or (name in first and name not in vars(face)):
        return
    raise AttributeError(
        f"{type(face).__name__}: {name!r} cannot be set: settings are given to the constructor, rows are "
        "added by its methods; a subclass may have further attributes"
    )


def set_once(settings: Any, name: str, value: Any) -> None:
    """``__setattr__`` of settings. A buffer reads its settings when it is made; a later change would have no effect."""
    if name[0] != "_" and hasattr(settings, name):
        kind = type(settings).__name__
        raise AttributeError(
            f"{kind}: {name!r} cannot be changed; make another {kind}({name}=...) for another buffer; a buffer's "
            "tune() changes its alpha and beta"
        )
    object.__setattr__(settings, name, value)


def number(where: str, name: str, value: Any, least: float, most: float) -> float:
    try:
        read = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        read = math.inf
    if not math.isfinite(read) or not least <= read <= most:
        bounds = "a finite number" if math.isinf(least) else f"a number, {least:g} to {most:g}"
        raise SchemaError(f"{where}: {name}: expected {bounds}, got {told(value)}")
    return read


def whole(where: str, name: str, value: Any, least: int = 1, most: int = 2**63 - 1) -> int:
    try:
        read = operator.index(value)
    except TypeError:
        read = least - 1
    if isinstance(value, bool) or not least <= read <= most:
        bounds = f"at least {least}" if most >= 2**53 - 1 else f"{least} to {most}"
        raise SchemaError(f"{where}: {name}: expected a whole number, {bounds}, got {told(value)}")
    return read


def whole_steps(where: str, capacity: int, num_envs: int | None) -> int:
    """The capacity as whole steps of all environments: rounded up to a multiple of ``num_envs``, with a warning."""
    rounded = -(-capacity // (num_envs or 1)) * (num_envs or 1)
    if rounded != capacity:
        depth, frame = 1, sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("sharpwave."):
            depth, frame = depth + 1, frame.f_back
        message = (
            f"{where}: capacity={capacity} is not a multiple of num_envs={num_envs}: the buffer keeps {rounded} rows"
        )
        warnings.warn(message, UserWarning, stacklevel=depth)
    return rounded


def random_seed() -> int:
    """A seed of 63 bits from the operating system."""
    return int.from_bytes(os.urandom(8), "little") >> 1


def truth(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SchemaError(f"{where}: {name}: expected True or False, got {told(value)}")
    return value


def one_of(where: str, name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if not isinstance(value, str) or value not in choices:
        *most, last = map(repr, choices)
        raise SchemaError(f"{where}: {name}: expected {', '.join(most)} or {last}, got {told(value)}")
    return value


def seconds(where: str, value: Any) -> float | None:
    """A timeout in seconds; None waits without a limit."""
    return None if value is None else number(where, "timeout", value, 0, 1e9)


def told(value: Any) -> str:
    """A value as text for a message: one line, at most 200 characters."""
    try:
        text = repr(value)
    except Exception:  # repr() of an int with thousands of digits raises, and a user's class may have a broken one
        text = ""
    text = " ".join(text.split())
    return text if 0 < len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})".lstrip(". ")
