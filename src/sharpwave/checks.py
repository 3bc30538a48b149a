"""Reading the numbers that users give: right, or an error that says what was expected."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

from .errors import SchemaError

__all__ = ["number", "one_of", "truth", "whole"]


def number(where: str, name: str, value: Any, least: float, most: float) -> float:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most:
        bounds = "a finite number" if math.isinf(least) else f"a number, {least:g} to {most:g}"
        raise SchemaError(f"{where}: {name}: expected {bounds}, got {value!r}")
    return float(value)


def whole(where: str, name: str, value: Any, least: int = 1, most: int = 2**63 - 1) -> int:
    try:
        read = operator.index(value)
    except TypeError:
        read = least - 1
    if isinstance(value, bool) or not least <= read <= most:
        bounds = f"at least {least}" if most >= 2**53 - 1 else f"{least} to {most}"
        raise SchemaError(f"{where}: {name}: expected a whole number, {bounds}, got {value!r}")
    return read


def truth(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SchemaError(f"{where}: {name}: expected True or False, got {value!r}")
    return value


def one_of(where: str, name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise SchemaError(f"{where}: {name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
    return value
