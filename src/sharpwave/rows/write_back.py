"""The arguments of ``write``: which mutable fields it names, and their values in the fields' shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..arrays import as_array, cast_value
from ..errors import SchemaError
from ..schema import Field, Node, Schema
from .handles import as_handles
from .tensors import to_host

__all__ = ["fit_value", "fit_values", "leaf_values", "refuse_shape"]


def leaf_values(schema: Schema, fields: Mapping[str, Any]) -> tuple[list[int], list[Any]]:
    """The leaves that a call names, by their numbers, and the value of each. A dict may name some of its fields."""
    leaves: list[int] = []
    values: list[Any] = []

    def take(path: str, node: Node, value: Any) -> None:
        if isinstance(node, Field):
            number = schema.mutable.get(path)
            if number is None:
                there = ", ".join(schema.mutable) or "none"
                raise SchemaError(
                    f"write(): field {path!r}: expected a mutable field, got one that is written once; declare it with "
                    f"Field(..., mutable=True); mutable are: {there}"
                )
            leaves.append(number)
            values.append(value)
            return
        if isinstance(node, tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(node):
                got = f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
                raise SchemaError(f"write(): field {path!r}: expected a tuple of {len(node)} values, got {got}")
            for i, part in enumerate(node):
                take(f"{path}/{i}", part, value[i])
            return
        if not isinstance(value, Mapping) or not value:
            got = "none" if isinstance(value, Mapping) else type(value).__name__
            raise SchemaError(f"write(): field {path!r}: expected a dict with some of {', '.join(node)}, got {got}")
        for key, part in value.items():
            if key not in node:
                raise SchemaError(f"write(): field {path!r}: expected some of the keys {', '.join(node)}, got {key!r}")
            take(f"{path}/{key}", node[key], part)

    if not fields:
        there = ", ".join(schema.mutable) or "none; declare one with Field(..., mutable=True)"
        raise SchemaError(f"write(): expected new values of at least one mutable field, got none; mutable are: {there}")
    for name, value in fields.items():
        if name not in schema.fields:
            raise SchemaError(f"write(): unknown field {name!r}; the schema has {', '.join(schema.names)}")
        take(name, schema.fields[name], value)
    return leaves, values


def fit_values(schema: Schema, handles: Any, fields: dict[str, Any]) -> tuple[Any, list[int], list[Any]]:
    """The arguments of ``write`` as serials, numbers of fields and one array each, (serials, *shape)."""
    leaves, values = leaf_values(schema, fields)
    serials = as_handles("write()", handles, any_shape=True)
    arrays = []
    for leaf, value in zip(leaves, values, strict=True):
        name, field = schema.leaves[leaf]
        arrays.append(fit_value(name, field, to_host(value), serials.shape).reshape(-1, *field.shape))
    return serials.reshape(-1), leaves, arrays


def refuse_shape(name: str, lead: tuple[int, ...], field: Field, got: tuple[int, ...]) -> SchemaError:
    return SchemaError(
        f"write(): field {name!r}: expected shape {(*lead, *field.shape)}, that of indices {lead} and then the field's "
        f"{field.shape}, got {got}"
    )


def fit_value(name: str, field: Field, value: Any, lead: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The value in the field's dtype, contiguous; raises where it does not fit, as ``add`` does."""
    array = as_array(f"field {name!r}", value, "write()")
    if array.shape != (*lead, *field.shape):
        raise refuse_shape(name, lead, field, array.shape)
    cast = cast_value(f"field {name!r}", field, array, "write()")
    return np.require(cast, requirements=["C_CONTIGUOUS", "ALIGNED"])
