"""One key of a sample: packed values and the length of each sequence in them, as a NumPy array or a torch tensor."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..errors import SchemaError

__all__ = [
    "Column",
    "concatenate",
    "dtype_from_name",
    "dtype_name",
    "equal",
    "fits_exactly",
    "is_tensor",
    "read_lens",
    "read_list",
]


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
    torch = sys.modules.get("torch")  # without it there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def read_list(where: str, what: str, value: Any) -> list[Any]:
    """A list of anything; text is none."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return list(value)
    except TypeError:
        raise SchemaError(f"{where}: {what}: expected a list, got {value!r:.100}") from None


def read_lens(where: str, key: str, value: Any, count: int) -> list[list[int]]:
    """Lengths over data, then over sequences; one whole number a datum means one sequence each."""
    if not isinstance(value, (list, tuple)) or len(value) != count:
        got = f"{len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
        raise SchemaError(f"{where}: seqlens[{key!r}]: expected a list of {count}, one entry an id, got {got}")
    lens = []
    for at, inner in enumerate(value):
        if type(inner) is int and inner >= 0:  # what most are
            lens.append([inner])
            continue
        if type(inner) is list and len(inner) == 1 and type(inner[0]) is int and inner[0] >= 0:  # as files have it
            lens.append([inner[0]])
            continue
        row = [inner] if isinstance(inner, (int, np.integer)) else inner
        if not isinstance(row, (list, tuple)):
            raise SchemaError(f"{where}: seqlens[{key!r}][{at}]: expected a list of lengths, got {inner!r}")
        for length in row:
            if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0:
                raise SchemaError(f"{where}: seqlens[{key!r}][{at}]: expected whole numbers, 0 or more, got {length!r}")
        lens.append([int(length) for length in row])
    return lens


def fits_exactly(dtype: Any, value: Any) -> bool:
    """Whether one number is the same in that dtype: no fraction cut off, no finite value become infinite."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if is_tensor(value) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        return False
    least, most, kind = _bounds(dtype)
    if kind == "b":
        return bool(value == 0 or value == 1)
    if kind == "c":
        return True
    if kind in "iu":
        return math.isfinite(value) and int(value) == value and least <= value <= most
    return not math.isfinite(value) or bool(least <= value <= most)


def _bounds(dtype: Any) -> tuple[Any, Any, str]:
    """The smallest and largest finite value, and NumPy's letter of the kind; "O" and nothing fits what is no number."""
    if isinstance(dtype, np.dtype):
        if dtype.kind in "iu":
            whole = np.iinfo(dtype)
            return int(whole.min), int(whole.max), dtype.kind
        if dtype.kind == "f":
            real = np.finfo(dtype)
            return float(real.min), float(real.max), "f"
        return (0, -1, "f") if dtype.kind not in "bc" else (0, 1, dtype.kind)
    import torch

    if dtype == torch.bool:
        return 0, 1, "b"
    if dtype.is_complex:
        return 0, 1, "c"
    if dtype.is_floating_point:
        return torch.finfo(dtype).min, torch.finfo(dtype).max, "f"
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max, "i"


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


@functools.lru_cache(64)
def dtype_name(dtype: Any) -> str | None:
    """``"float32"`` of NumPy, ``"torch.float32"`` of torch."""
    return None if dtype is None else str(dtype)


def dtype_from_name(where: str, name: Any) -> Any:
    if name is None:
        return None
    try:
        if isinstance(name, str) and name.startswith("torch."):
            import torch

            found = getattr(torch, name.removeprefix("torch."))
            if isinstance(found, torch.dtype):
                return found
            raise TypeError
        found = np.dtype(name)
        if found.hasobject:
            raise TypeError
        return found
    except (TypeError, AttributeError, ValueError, SyntaxError):
        raise SchemaError(f"{where}: dtype: expected the name of a NumPy or torch dtype, got {name!r}") from None
