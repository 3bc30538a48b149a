"""Settings by key: checks of names and kinds, with the key that was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Union

from ..checks import told
from ..errors import SchemaError

__all__ = ["nearest", "read_dataclass"]

_Settings = TypeVar("_Settings")
_SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table"}


def nearest(key: object, known: Iterable[str]) -> str:
    """The known key that was probably meant, for a message."""
    found = difflib.get_close_matches(str(key), list(known), 1, 0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def read_dataclass(kind: type[_Settings], given: Mapping[str, Any], where: str) -> _Settings:
    """The dataclass of these settings. A field that is a dataclass itself takes a table.

    Raises:
        SchemaError: A key is unknown, or has a value of another kind. The message names it, and the nearest known key.
    """
    if not isinstance(given, Mapping):
        raise SchemaError(f"{where}: expected a table of settings, got {told(given)}")
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise SchemaError(f"{where}: unknown key {key!r}{nearest(key, known)}; known are {', '.join(known)}")
    return kind(**{key: _read(hints[key], value, where, key) for key, value in given.items()})


def _read(hint: Any, value: Any, where: str, key: str) -> Any:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for choice in choices:
        plain = typing.get_origin(choice) or choice
        if dataclasses.is_dataclass(plain) and isinstance(plain, type):
            return value if isinstance(value, plain) else read_dataclass(plain, value, f"{where}, {key}")
        if plain is tuple and isinstance(value, (list, tuple)):
            return tuple(value)
        if plain in (dict, Mapping) and isinstance(value, Mapping):
            return dict(value)
        if plain is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(plain, type) and type(value) is plain:
            return value
    expected = " or ".join(_SAID.get(typing.get_origin(one) or one, "nothing") for one in choices)
    raise SchemaError(f"{where}: {key}: expected {expected}, got {told(value)}")
