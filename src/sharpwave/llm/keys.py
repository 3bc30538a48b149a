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

__all__ = ["check_keys", "nearest", "read_dataclass"]

_Settings = TypeVar("_Settings")
_SAID = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a table",
    type(None): '"none"',
}
_SYNONYMS = {"lr": "learning_rate"}
_NEAR, _NEAR_ELSEWHERE = 0.5, 0.7  # how alike a key has to be to one of its own table, and to one of another table


def nearest(key: object, known: Iterable[str]) -> str:
    """The known key that was probably meant, for a message."""
    found = difflib.get_close_matches(str(key), list(known), 1, 0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_keys(given: Mapping[str, Any], tables: Mapping[str, Iterable[str]], where: str) -> None:
    """Refuses a key that its table does not have.

    Args:
        given: Settings; a value may be a table of settings.
        tables: The keys of each table that is checked. The table "" is the top.

    Raises:
        SchemaError: The message says to which table the key belongs, or which known key of all tables is nearest.
    """
    listed = {table: list(keys) for table, keys in tables.items()}
    inner = {table: given[table] for table in listed if isinstance(given.get(table), Mapping)}
    for table, keys in {"": given, **inner}.items():
        place = f"{where}, {table}" if table else where
        for key in keys:
            if key in listed[table]:
                continue
            if key in listed[""]:
                raise SchemaError(
                    f"{place}: {key!r} belongs to the top of the file, before the first [table]; on the command line "
                    f"write {key}=, without {table!r}"
                )
            raise SchemaError(
                f"{place}: unknown key {key!r}{_meant(key, table, listed)}; known are {', '.join(listed[table])}"
            )


def _meant(key: object, table: str, tables: Mapping[str, Iterable[str]]) -> str:
    """The key of any table that was probably meant, with its table, for a message."""
    asked = _SYNONYMS.get(str(key), str(key))
    alike: dict[str, float] = {}
    for other, names in tables.items():
        for name in names:
            ratio = difflib.SequenceMatcher(None, asked, name).ratio()
            if ratio >= (_NEAR if other == table else _NEAR_ELSEWHERE):
                alike[f"{other}.{name}" if other else name] = ratio + (1e-6 if other == table else 0)
    best = max(alike.values(), default=0)
    found = [repr(name) for name, ratio in alike.items() if ratio == best]
    return f"; did you mean {' or '.join(found)}?" if found else ""


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
    if type(None) in choices and isinstance(value, str) and value in ("none", "None"):  # TOML has no null
        return None
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
    expected = " or ".join(_SAID.get(typing.get_origin(one) or one, "a table") for one in choices)
    raise SchemaError(f"{where}: {key}: expected {expected}, got {told(value)}")
