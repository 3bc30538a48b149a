"""BatchLayout: where the arrays of a batch stand in the body of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..rows.protocol import Batch

__all__ = ["BatchLayout", "Places"]

_ALIGNMENT = 64


class Places(NamedTuple):
    arrays: list[tuple[tuple[int, ...], np.dtype[Any], int]]  # shape, dtype, offset from the body's start
    end: int


class BatchLayout:
    """The arrays of a batch in order, each at a multiple of 64 bytes. The same at the server and at the client.

    Args:
        blank: A batch of one example, as the engine makes it: names, nesting, dtypes and shapes are read from it.
    """

    def __init__(self, blank: Batch) -> None:
        leaves = list(_leaves(blank))
        self._shapes = [array.shape[1:] for _, array in leaves]
        self._dtypes = [array.dtype for _, array in leaves]
        self._paths = [path for path, _ in leaves]
        self._item_bytes = [array.nbytes for _, array in leaves]
        self._is_flat = all(len(path) == 1 for path in self._paths)
        self._names = [path[0] for path in self._paths]
        self._build = _builder(blank, iter(range(len(leaves))))
        self._known: dict[int, Places] = {}

    def describe(self) -> list[Any]:
        """For the reply to OPEN."""
        rows = zip(self._paths, self._dtypes, self._shapes, strict=True)
        return [[list(path), dtype.str, list(shape)] for path, dtype, shape in rows]

    def places(self, count: int) -> Places:
        found = self._known.get(count)
        if found is None:
            at, arrays = 0, []
            for shape, dtype, size in zip(self._shapes, self._dtypes, self._item_bytes, strict=True):
                arrays.append(((count, *shape), dtype, at))
                at = (at + size * count + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
            found = Places(arrays, at)
            if len(self._known) < 64:
                self._known[count] = found
        return found

    def over(self, memory: Any, begin: int, count: int) -> Batch:
        """A batch whose arrays are views of ``memory``, a body that begins there."""
        places = self.places(count).arrays
        arrays = [np.ndarray(shape, dtype, memory, begin + offset) for shape, dtype, offset in places]
        if self._is_flat:
            return dict(zip(self._names, arrays, strict=True))
        batch: Batch = self._build(arrays)
        return batch


def _leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], np.ndarray[Any, Any]]]:
    if isinstance(node, np.ndarray):
        yield path, node
        return
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _builder(node: Any, numbers: Iterator[int]) -> Callable[[list[Any]], Any]:
    """A function that puts arrays into the nesting of ``node``."""
    if isinstance(node, np.ndarray):
        number = next(numbers)
        return lambda arrays: arrays[number]
    if isinstance(node, dict):
        parts = {key: _builder(item, numbers) for key, item in node.items()}
        return lambda arrays: {key: part(arrays) for key, part in parts.items()}
    items = [_builder(item, numbers) for item in node]
    return lambda arrays: tuple(item(arrays) for item in items)
