"""The arguments of an add: the rules by which values are converted to a field, and the errors where they do not fit.

``bindings/input_values.cpp`` follows the same rules in C++. Single values that it does not know are converted by
``read_leaf``; a call with a value that does not fit is repeated by ``prepare``, for its error. A failed call changes
nothing: rows are written only after all arguments have been accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import _core
from .checks import truth
from .errors import SchemaError
from .schema import Field, Node, Schema

__all__ = [
    "as_array",
    "cast_value",
    "count_rows",
    "fit",
    "flatten",
    "match",
    "narrow",
    "prepare",
    "priorities",
    "read_leaf",
    "refuse_masked",
    "truths",
]

_TERMINATED = int(_core.RowFlag.terminated)
_TRUNCATED = int(_core.RowFlag.truncated)
_VOID = int(_core.RowFlag.void)
_CUT = int(_core.RowFlag.cut)  # an agent is truncated and others go on


def prepare(
    schema: Schema,
    capacity: int,
    num_envs: int | None,
    one_row: str | None,
    by_priority: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[list[Any], int, np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Turns the arguments of an add into arrays for the engine.

    Args:
        one_row: Why only one row may be added at a time, or None.
        by_priority: Whether rows may have priorities.

    Returns:
        One contiguous array per leaf (ragged: all values one after the other, and the byte at which each starts), the
        number of rows, one flag byte per row, and the rows' priorities or None.
    """
    named = dict(kwargs)
    truth("add()", "return_indices", named.pop("return_indices", False))
    priority = named.pop("priority", None)
    if priority is not None and not by_priority:
        raise SchemaError("add(): priority: rows are drawn uniformly; give the buffer sampler=Prioritized()")
    values, truncated, mask = match(schema, args, named)
    raw: list[tuple[str, Field, Any]] = []
    for name, node in schema.fields.items():
        flatten(name, node, values[name], raw)
    lead, rows = count_rows(schema, capacity, num_envs, raw)
    if one_row is not None and rows > 1:
        raise SchemaError(
            f"add(): got {rows} rows, and {one_row} needs their order; give the buffer num_envs= (1 if they are "
            "successive steps of one environment), or add one row at a time"
        )
    counted = raw[schema.rows_from][0]
    arrays: list[Any] = [
        _fit_ragged(name, field, array, lead, rows) if field.ragged else fit(name, field, array, lead, rows, counted)
        for name, field, array in raw
    ]
    flags = np.zeros(rows, np.uint8)
    done = np.ones((rows, 0), bool)
    for leaf in schema.dones:
        ends = arrays[leaf].reshape(rows, -1)
        if ends.dtype.kind in "fc" and np.isnan(ends).any():
            raise SchemaError(f"add(): field {schema.leaves[leaf][0]!r}: expected 0 or 1, or truth values, got NaN")
        done = np.concatenate([done, ends.astype(bool)], axis=1)
    if schema.dones:
        flags[done.all(axis=1)] |= _TERMINATED
    told = None if truncated is None or not schema.by_agent else agents_truncated(schema, truncated, lead, rows)
    if told is not None:
        is_over = (done | told).all(axis=1)
        flags[told.any(axis=1)] |= np.where(is_over, _TRUNCATED, _CUT)[told.any(axis=1)].astype(np.uint8)
    elif truncated is not None:
        flags[truths("truncated", truncated, lead)] |= _TRUNCATED
    if mask is not None:
        flags[~truths("mask", mask, lead)] |= _VOID
    return arrays, rows, flags, None if priority is None else priorities("add()", "priority", priority, lead)


def read_leaf(schema: Schema, leaf: int, value: Any, lead: tuple[int, ...] | None) -> Any:
    """One value of an add, as ``prepare`` converts it: in the field's shape and dtype, or without ``lead`` as the array
    that it is."""
    name, field = schema.leaves[leaf]
    if lead is None:
        return as_array(f"field {name!r}", value)
    rows = math.prod(lead)
    if field.ragged:
        return _fit_ragged(name, field, value, lead, rows)
    return fit(name, field, as_array(f"field {name!r}", value), lead, rows, name)


def priorities(where: str, name: str, value: Any, lead: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Absolute values as float32, one per row; refuses the whole array if one of them is not finite."""
    array = as_array(name, value, where)
    if array.shape != lead:
        raise SchemaError(f"{where}: {name}: expected shape {lead}, one number per row, got {array.shape}")
    if array.dtype.kind not in "biuf":
        raise SchemaError(f"{where}: {name}: expected numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        magnitudes = np.abs(array.astype(np.float64)).astype(np.float32).reshape(-1)
    bad = np.flatnonzero(~np.isfinite(magnitudes))
    if len(bad):
        got = array.reshape(-1)[bad[0]]
        raise SchemaError(
            f"{where}: {name}: expected finite numbers, got {got} at position {bad[0]}; nothing was changed"
        )
    return np.ascontiguousarray(magnitudes)


def match(schema: Schema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Assigns arguments to fields, by position and by name."""
    names = schema.names
    listed = ", ".join(names)
    if len(args) > len(names):
        raise SchemaError(f"add(): expected at most {len(names)} positional values ({listed}), got {len(args)}")
    values = dict(zip(names, args, strict=False))
    named = dict(kwargs)
    truncated, mask = named.pop("truncated", None), named.pop("mask", None)
    if "terminated" in named and schema.dones:
        if "done" in named or "done" in values:
            raise SchemaError("add(): expected terminated= or done=, got both; they mean the same, leave one out")
        named["done"] = named.pop("terminated")
    for name, value in named.items():
        if name not in names:
            raise SchemaError(f"add(): unknown field {name!r}; the schema has {listed}")
        if name in values:
            raise SchemaError(f"add(): field {name!r}: given by position and by name; leave one out")
        values[name] = value
    missing = [name for name in names if name not in values]
    if missing:
        if len(args) == 1 and not kwargs:
            _refuse_row(schema, args[0])
        also = " (or terminated=)" if "done" in missing else ""
        raise SchemaError(f"add(): missing {', '.join(repr(name) for name in missing)}{also}; the schema has {listed}")
    return values, truncated, mask


def _refuse_row(schema: Schema, value: Any) -> None:
    """Refuses a whole row that was given as one value: a dict, a TensorDict, a Batch of Tianshou."""
    keys = getattr(value, "keys", None)
    if not callable(keys):
        return
    given = [str(key) for key in keys()]
    first = schema.fields[schema.names[0]]
    is_first_field = isinstance(first, Mapping) and set(given) == set(first)
    if not is_first_field:
        raise SchemaError(
            f"add(): got one {type(value).__name__} with the keys {', '.join(given)}; give the fields of a row by "
            f"name, add(**row) with the names {', '.join(schema.names)}"
        )


def flatten(
    path: str, node: Node, value: Any, raw: list[tuple[str, Field, Any]], read: Callable[[str, Any], Any] | None = None
) -> None:
    """Appends one array per leaf of a nested value, in the schema's order. Ragged values are appended as they are: they
    are read when the number of rows is known. ``read`` makes the arrays; the default makes NumPy arrays."""
    if isinstance(node, Field):
        raw.append((path, node, value if node.ragged else (read or as_array)(f"field {path!r}", value)))
        return
    if isinstance(node, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(node):
            got = f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
            raise SchemaError(f"add(): field {path!r}: expected a tuple of {len(node)} values, got {got}")
        for i, part in enumerate(node):
            flatten(f"{path}/{i}", part, value[i], raw, read)
        return
    if not isinstance(value, Mapping):
        raise SchemaError(f"add(): field {path!r}: expected a dict with {', '.join(node)}, got {type(value).__name__}")
    unknown = [key for key in value if key not in node]
    missing = [key for key in node if key not in value]
    if unknown or missing:
        problem = f"unknown {unknown}" if unknown else f"missing {missing}"
        raise SchemaError(f"add(): field {path!r}: expected the keys {', '.join(node)}, got {problem}")
    for key, part in node.items():
        flatten(f"{path}/{key}", part, value[key], raw, read)


def as_array(what: str, value: Any, where: str = "add()") -> np.ndarray[Any, Any]:
    if hasattr(value, "detach") and hasattr(value, "device"):  # a torch tensor
        if value.device.type != "cpu":
            raise SchemaError(f"{where}: {what}: expected a tensor on the CPU, got one on {value.device}; pass .cpu()")
        try:
            return value.detach().numpy()  # type: ignore[no-any-return]
        except TypeError as error:
            raise SchemaError(f"{where}: {what}: {error}; pass .float()") from None
    refuse_masked(f"{where}: {what}", value)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise SchemaError(f"{where}: {what}: expected an array, got {type(value).__name__} ({error})") from None
    if array.dtype.hasobject:
        raise SchemaError(f"{where}: {what}: expected numbers, got Python objects ({type(value).__name__})")
    return array


def refuse_masked(what: str, value: Any) -> None:
    """Refuses a masked array: its masked entries have no value, but would be stored as if they had one."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        hidden = int(np.ma.getmaskarray(value).sum())
        raise SchemaError(
            f"{what}: expected an array without a mask, got one with {hidden} of {value.size} entries masked; fill "
            "them with .filled(value)"
        )


def narrow(what: str, array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The array as a float dtype. Refuses finite numbers that would become infinite; inf and NaN are kept."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f":
        lost = np.isinf(cast)
        if lost.any() and not np.isinf(array[lost]).all():
            beyond = array[lost & ~np.isinf(array)].reshape(-1)[0]
            raise SchemaError(f"{what}: expected numbers that {dtype} can hold, got {beyond}")
    return cast


def count_rows(
    schema: Schema, capacity: int, num_envs: int | None, raw: list[tuple[str, Field, Any]]
) -> tuple[tuple[int, ...], int]:
    name, field, array = raw[schema.rows_from]
    axes = array.ndim - len(field.shape)
    if axes < 0 or axes > 2 or array.shape[axes:] != field.shape:
        raise SchemaError(
            f"add(): field {name!r}: expected shape {_row_shape(field)}, got {array.shape}; "
            "its shape tells how many rows an add brings"
        )
    lead = array.shape[:axes]
    rows = int(np.prod(lead, dtype=np.int64))
    if lead and rows == 1:
        _refuse_lonely_axis(name, field, array, lead, raw)
    if axes == 2 and num_envs is None:
        raise SchemaError(
            f"add(): field {name!r}: got two leading axes {lead}; give the buffer num_envs={lead[1]} to add "
            "(steps, num_envs), or flatten them"
        )
    width = num_envs or 1
    if axes == 2 and lead[1] != width:
        raise SchemaError(f"add(): field {name!r}: expected (steps, num_envs={width}), got {lead}")
    if rows == 0:
        raise SchemaError(f"add(): field {name!r}: expected at least one row, got shape {array.shape}")
    if rows > capacity:
        raise SchemaError(
            f"add(): got {rows} rows, the capacity is {capacity}; add fewer at once or give a larger capacity"
        )
    if rows % width:
        raise SchemaError(f"add(): expected a multiple of num_envs={width} rows, got {rows}")
    return lead, rows


def _refuse_lonely_axis(
    name: str, field: Field, array: Any, lead: tuple[int, ...], raw: list[tuple[str, Field, Any]]
) -> None:
    """Refuses one row with a leading axis if another field has none: the value that tells the number of rows is wrong,
    not that field."""
    for other, of, value in raw:
        one_row = (of.shape, (of.stack, *of.shape)) if of.stack > 1 else (of.shape,)
        if not of.ragged and tuple(value.shape) in one_row:
            raise SchemaError(
                f"add(): field {name!r}: got shape {tuple(array.shape)}, a leading axis of one row, and field "
                f"{other!r} has shape {tuple(value.shape)}, without that axis; give {name!r} shape {field.shape} for "
                f"one row, or every field the leading axis {lead}"
            )


def _row_shape(field: Field) -> str:
    if not field.shape:
        return "() or (rows,)"
    return f"{field.shape} or (rows, {', '.join(map(str, field.shape))})"


def fit(
    name: str, field: Field, array: np.ndarray[Any, Any], lead: tuple[int, ...], rows: int, counted: str
) -> np.ndarray[Any, Any]:
    """The array in the field's shape and dtype, contiguous; raises where it does not fit."""
    whole = field.stack > 1 and array.shape == (*lead, field.stack, *field.shape)
    if array.shape != (*lead, *field.shape) and not whole:
        axes = array.ndim - len(field.shape)
        extra = array.shape[len(lead) :] if array.shape[: len(lead)] == lead else ()
        if len(extra) == len(field.shape) + 1 and len(field.shape) > 1 and field.shape in (extra[1:], extra[:-1]):
            _refuse_stack(name, field, extra)
        if axes >= 0 and array.shape[axes:] == field.shape:
            raise SchemaError(
                f"add(): field {name!r}: expected leading shape {lead} as {counted!r} has, got "
                f"{array.shape[:axes]}; every field needs the same number of rows"
            )
        got = array.shape[len(lead) :] if array.ndim >= len(lead) else array.shape
        place = f" in row 0 of {rows}" if lead else ""
        mend = f"; give the field shape {got}" if all(n > 0 for n in got) else ""
        raise SchemaError(f"add(): field {name!r}: expected shape {field.shape}, got {got}{place}{mend}")
    return np.require(cast_value(f"field {name!r}", field, array), requirements=["C_CONTIGUOUS", "ALIGNED"])


def _refuse_stack(name: str, field: Field, got: tuple[int, ...]) -> None:
    """Refuses a value with one axis more than the field: a stack with another number of frames."""
    frames = got[0] if got[1:] == field.shape else got[-1]
    if field.stack == 1:
        mend = f"give the field shape {got}, or pass single frames with Field(stack={frames})"
    else:
        mend = "pass single frames, or whole stacks with the frames on the first axis"
    expected = f"{field.shape}" if field.stack == 1 else f"{field.shape} or {(field.stack, *field.shape)}"
    raise SchemaError(f"add(): field {name!r}: expected shape {expected}, got {got}; {mend}")


def _fit_ragged(
    name: str, field: Field, value: Any, lead: tuple[int, ...], rows: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Values of different lengths, one after the other, and the byte at which each starts."""
    parts = [value] if not lead else list(value) if isinstance(value, (list, tuple, np.ndarray)) else None
    if parts is None or len(parts) != rows:
        got = type(value).__name__ if parts is None else f"{len(parts)}"
        raise SchemaError(f"add(): field {name!r}: expected a list of {rows} arrays, one per row, got {got}")
    longest, item = field.shape[0], field.shape[1:]
    fitted = []
    for i, part in enumerate(parts):
        array = as_array(f"field {name!r}", part)
        if array.shape == (0,) and item:
            array = array.reshape(0, *item)
        if array.ndim != len(field.shape) or array.shape[1:] != item or len(array) > longest:
            raise SchemaError(
                f"add(): field {name!r}: expected shape (0 to {longest}{''.join(f', {n}' for n in item)}), got "
                f"{array.shape} in row {i} of {rows}"
            )
        fitted.append(np.ascontiguousarray(cast_value(f"field {name!r}", field, array)).reshape(-1))
    starts = np.zeros(rows + 1, np.uint64)
    starts[1:] = np.cumsum([part.nbytes for part in fitted])
    return np.ascontiguousarray(np.concatenate(fitted)), starts


def cast_value(what: str, field: Field, array: np.ndarray[Any, Any], where: str = "add()") -> np.ndarray[Any, Any]:
    """Casts to the field's dtype where values keep their meaning; raises for any other cast."""
    want, have = field.dtype, array.dtype
    if want == have:
        return array

    def refused(why: str) -> SchemaError:
        return SchemaError(f"{where}: {what}: expected {want}, got {have}{why}")

    if want.kind == "b" and have.kind in "iuf":
        if not np.isin(array, (0, 1)).all():
            raise refused(" with values other than 0 and 1; compare before you add")
        return array.astype(want)
    if want.kind in "iu" and have.kind in "biu":
        cast = array.astype(want)
        if have.kind != "b" and not (cast == array).all():
            raise refused(f" with values beyond {want}; give the field dtype {have}")
        return cast
    if want.kind in "fc" and have.kind in "biufc" and not (want.kind == "f" and have.kind == "c"):
        with np.errstate(all="ignore"):
            cast = array.astype(want)
        if not np.array_equal(np.isinf(cast), np.isinf(array)):
            raise refused(f" with values beyond {want}; give the field dtype {have}")
        return cast
    if want.kind == have.kind and np.can_cast(have, want, "safe"):
        return array.astype(want)
    raise refused(f", and the cast would lose meaning; give the field dtype {have}")


def agents_truncated(schema: Schema, truncated: Any, lead: tuple[int, ...], rows: int) -> np.ndarray[Any, Any] | None:
    """``truncated=`` with one truth value for each agent, shape (rows, agents); None if it has one for each row."""
    node = schema.fields["done"]
    if isinstance(node, Field):
        array = as_array("truncated", truncated)
        if array.shape == lead:
            return None
        if array.shape != (*lead, *node.shape):
            raise SchemaError(
                f"add(): truncated: expected shape {(*lead, *node.shape)}, one truth value per agent, or {lead}, one "
                f"per row, got {array.shape}"
            )
    elif not isinstance(truncated, tuple if isinstance(node, tuple) else Mapping):
        return None
    raw: list[tuple[str, Field, Any]] = []
    flatten("truncated", node, truncated, raw)
    parts = [truths(path, value, (*lead, *field.shape), "agent").reshape(rows, -1) for path, field, value in raw]
    return np.concatenate(parts, axis=1)


def truths(name: str, value: Any, lead: tuple[int, ...], each: str = "row") -> np.ndarray[Any, Any]:
    array = as_array(name, value)
    if array.shape != lead:
        raise SchemaError(f"add(): {name}: expected shape {lead}, one truth value per {each}, got {array.shape}")
    if array.dtype.kind not in "biuf" or not np.isin(array, (0, 1)).all():
        raise SchemaError(f"add(): {name}: expected truth values, got {array.dtype}")
    return array.astype(bool).reshape(-1)
