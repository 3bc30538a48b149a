"""One key of a sample: packed values and the length of each sequence in them, as a NumPy array or a torch tensor."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ..errors import SchemaError

__all__ = ["Column", "concatenate", "dtype_from_name", "dtype_name", "equal", "is_tensor", "read_lens"]


class Column(NamedTuple):
    """Lengths per datum and per sequence, values (or None: described only), trailing shape, dtype."""

    lens: list[list[int]]
    data: Any
    shape: tuple[int, ...] | None
    dtype: Any

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lens))


def is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # who has a tensor has imported torch
    return torch is not None and isinstance(value, torch.Tensor)


def read_lens(where: str, key: str, value: Any, count: int) -> list[list[int]]:
    """Lengths over data, then over sequences; one whole number a datum means one sequence each."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        got = f"{len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
        raise SchemaError(f"{where}: seqlens[{key!r}]: expected a list of {count}, one entry an id, got {got}")
    lens = []
    for at, inner in enumerate(value):
        row = [inner] if isinstance(inner, (int, np.integer)) else inner
        if not isinstance(row, (list, tuple)):
            raise SchemaError(f"{where}: seqlens[{key!r}][{at}]: expected a list of lengths, got {inner!r}")
        for length in row:
            if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0:
                raise SchemaError(f"{where}: seqlens[{key!r}][{at}]: expected whole numbers, 0 or more, got {length!r}")
        lens.append([int(length) for length in row])
    return lens


def concatenate(parts: list[Any]) -> Any:
    """Values one after the other; None where they are only described."""
    if parts[0] is None:
        return None
    if len(parts) == 1:
        return parts[0]
    if is_tensor(parts[0]):
        import torch

        return torch.cat(parts)
    return np.concatenate(parts)


def equal(one: Any, two: Any) -> bool:
    """Whether two columns' values are the same, kind and dtype included; NaN equals NaN."""
    if one is None or two is None:
        return one is two
    if is_tensor(one) != is_tensor(two) or one.dtype != two.dtype or one.shape != two.shape:
        return False
    if is_tensor(one):
        import torch

        if one.is_floating_point():
            return bool(((one == two) | (torch.isnan(one) & torch.isnan(two))).all())
        return bool(torch.equal(one, two))
    return bool(np.array_equal(one, two, equal_nan=one.dtype.kind in "fc"))


def dtype_name(dtype: Any) -> str | None:
    """``"float32"`` of NumPy, ``"torch.float32"`` of torch."""
    return None if dtype is None else str(dtype)


def dtype_from_name(where: str, name: str | None) -> Any:
    if name is None:
        return None
    try:
        if name.startswith("torch."):
            import torch

            found = getattr(torch, name.removeprefix("torch."))
            if isinstance(found, torch.dtype):
                return found
            raise TypeError
        found = np.dtype(name)
        if found.hasobject:
            raise TypeError
        return found
    except (TypeError, AttributeError):
        raise SchemaError(f"{where}: dtype: expected the name of a NumPy or torch dtype, got {name!r}") from None
