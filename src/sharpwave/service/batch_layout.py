"""BatchLayout: where the arrays of a batch stand in the body of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import _core
from ..rows.protocol import Batch

__all__ = ["BatchLayout"]


class BatchLayout:
    """The arrays of a batch in order, each at a multiple of 64 bytes. The same at the server and at the client.

    Args:
        blank: A batch of one example, as the engine makes it: names, nesting, dtypes and shapes are read from it.
    """

    def __init__(self, blank: Batch) -> None:
        leaves = list(_leaves(blank))
        self.blank, self.blank_arrays = blank, [array for _, array in leaves]
        self._shapes = [array.shape[1:] for array in self.blank_arrays]
        self._dtypes = [array.dtype for array in self.blank_arrays]
        self._paths = [path for path, _ in leaves]
        self._is_flat = all(len(path) == 1 for path in self._paths)
        names = tuple(path[0] for path in self._paths) if self._is_flat else None
        arrays = [(dtype, list(shape)) for dtype, shape in zip(self._dtypes, self._shapes, strict=True)]
        self._body = _core.BodyLayout(arrays, names)
        self._build = _builder(blank, iter(range(len(leaves))))
        self.bytes, self.memory = self._body.bytes, self._body.memory

    def describe(self) -> list[Any]:
        """For the reply to OPEN."""
        rows = zip(self._paths, self._dtypes, self._shapes, strict=True)
        return [[list(path), dtype.str, list(shape)] for path, dtype, shape in rows]

    def over(self, memory: Any, begin: int, count: int) -> Batch:
        """A batch whose arrays are views of ``memory``, a body that begins there."""
        arrays = self._body.over(memory, begin, count)
        batch: Batch = arrays if self._is_flat else self._build(arrays)
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
