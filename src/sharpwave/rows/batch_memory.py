"""The memory of batches on a GPU: tensors of the right shapes, nested as the schema is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import SchemaError
from ..schema import Field, Node
from .columns import Torch
from .spec import RowSpec

__all__ = ["BatchMemory"]

_SLAB_BYTES = 128 << 20
_SLAB_BATCHES = 64


class _Slab(NamedTuple):
    """Batches of one size that are not drawn yet; the last one is drawn first."""

    batches: list[dict[str, Any]]
    draws: Any


class BatchMemory:
    """Makes the tensors that ``DeviceRows.sample`` fills, and checks those that a user gives. The caller must hold the
    lock of the rows."""

    def __init__(self, spec: RowSpec, place: Torch, table: Any) -> None:
        self._spec, self._table = spec, table
        self._torch, self._device = place.torch, place.device
        self._is_gpu = place.device.type == "cuda"
        self.slabs: dict[tuple[int, int], _Slab] = {}  # by batch size and CUDA stream
        self._known_out: Any = None  # the last one that was checked
        self.is_flat = all(isinstance(node, Field) for node in spec.schema.fields.values())
        self._keys = [*spec.schema.fields, *self.extra_names()]

    def shapes(self, size: int) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of a batch's tensors: fields, then those that ``extra_names`` lists."""
        torch = self._torch
        specs: list[tuple[tuple[int, ...], Any]] = [
            ((size, *leaf.shape), dtype) for leaf, dtype in zip(self._table.leaves, self._table.dtypes, strict=True)
        ]
        if self._table.tells_truncated:
            specs.append(((size,), torch.bool))
        if self._table.n_step > 1:
            specs.append(((size,), torch.float32))
        if self._spec.is_prioritized:
            specs += [((size,), torch.float32), ((size,), torch.float64)]
        return [*specs, ((size,), torch.int64)]

    def new(self, size: int) -> tuple[dict[str, Any], Any, int]:
        """A batch to be filled, the launch that fills it, and the number of the batch in its slab.

        Making a tensor takes longer than filling it, so the tensors of several batches are made at once."""
        torch = self._torch
        specs = self.shapes(size)
        # A CUDA graph writes to the same memory at each replay: it gets tensors of its own.
        if self._is_gpu and size % 16 == 0 and not torch._C._cuda_isCurrentStreamCapturing():
            key = size, torch._C._cuda_getCurrentRawStream(self._device.index)
            slab = self.slabs.get(key)
            if slab is None or not slab.batches:
                each = sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)
                slab = self._slab(size, max(1, min(_SLAB_BATCHES, _SLAB_BYTES // each)), specs)
                self.slabs.pop(key, None)
                while len(self.slabs) >= 4:
                    self.slabs.pop(next(iter(self.slabs)))
                self.slabs[key] = slab
            return slab.batches.pop(), slab.draws, len(slab.batches)
        with torch.inference_mode(False):
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in specs]
        return self.tree(tensors), self._table.draws(size, [tensor.data_ptr() for tensor in tensors]), 0

    def _slab(self, size: int, count: int, specs: Any) -> _Slab:
        torch = self._torch
        with torch.inference_mode(False):
            slabs = [
                torch.empty((count * shape[0], *shape[1:]), dtype=dtype, device=self._device) for shape, dtype in specs
            ]
            # split() would make views of one tensor: then changing one batch in place breaks the gradients of the
            # others.
            parts = [slab.unsafe_split(size) for slab in slabs]
        steps = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        draws = self._table.draws(size, [slab.data_ptr() for slab in slabs], steps)
        return _Slab([self.tree(tensors) for tensors in zip(*parts, strict=True)], draws)

    def extra_names(self) -> list[str]:
        names = ["truncated"] if self._table.tells_truncated else []
        names += ["discount"] if self._table.n_step > 1 else []
        return [*names, *(["weights", "probabilities"] if self._spec.is_prioritized else []), "indices"]

    def tree(self, tensors: Any, extras: list[str] | None = None) -> dict[str, Any]:
        """A batch of these tensors, which are in the order of ``shapes``.

        Args:
            extras: Names of the tensors behind the fields; those of a sampled batch by default.
        """
        if self.is_flat and extras is None:
            return dict(zip(self._keys, tensors, strict=True))
        at = iter(tensors)
        batch = {name: _nest(node, at) for name, node in self._spec.schema.fields.items()}
        for name in self.extra_names() if extras is None else extras:
            batch[name] = next(at)
        return batch

    def check_out(self, size: int, out: Any) -> Any:
        """The launch that fills a batch of the user's. The last one is remembered, and is not checked again."""
        known = self._known_out
        if known is not None and known[0] == size and isinstance(out, dict):
            parts = [out.get(name) for name in self._keys]
            same = all(one is other for one, other in zip(parts, known[1], strict=True))
            if same and [part.data_ptr() for part in known[1]] == known[2]:
                return known[3]
        if not isinstance(out, dict):
            raise SchemaError(f"sample(): out: expected a batch of tensors, got {type(out).__name__}")
        given: list[tuple[str, Any]] = []
        for name, node in self._spec.schema.fields.items():
            _collect(f"[{name!r}]", node, out.get(name), given)
        given += [(f"[{name!r}]", out.get(name)) for name in self.extra_names()]
        for (path, value), (shape, dtype) in zip(given, self.shapes(size), strict=True):
            fits = isinstance(value, self._torch.Tensor) and value.device == self._device
            if not fits or tuple(value.shape) != shape or value.dtype != dtype or not value.is_contiguous():
                got = f"{value.dtype} of {tuple(value.shape)} on {value.device}" if hasattr(value, "device") else value
                raise SchemaError(
                    f"sample(): out{path}: expected a contiguous {dtype} tensor of {shape} on {self._device}, got "
                    f"{got}; pass a batch of the same size"
                )
            if value.data_ptr() % 16:
                raise SchemaError(
                    f"sample(): out{path}: expected memory at a multiple of 16 bytes; pass a whole tensor"
                )
        tensors = [value for _, value in given]
        spans = sorted((t.data_ptr(), t.numel() * t.element_size()) for t in tensors)
        if any(a + n > b for (a, n), (b, _) in itertools.pairwise(spans)):
            raise SchemaError("sample(): out: two of its tensors share memory; give each its own")
        addresses = [tensor.data_ptr() for tensor in tensors]
        draws = self._table.draws(size, addresses)
        if self.is_flat:
            self._known_out = size, tensors, addresses, draws
        return draws


# Functions of the module: one that calls itself from inside another function would keep the tensors alive until a
# garbage collection.
def _nest(node: Node, at: Iterator[Any]) -> Any:
    if isinstance(node, Field):
        return next(at)
    if isinstance(node, tuple):
        return tuple(_nest(part, at) for part in node)
    return {name: _nest(part, at) for name, part in node.items()}


def _collect(path: str, node: Node, value: Any, given: list[tuple[str, Any]]) -> None:
    if isinstance(node, Field):
        given.append((path, value))
    elif isinstance(node, tuple):
        parts = value if isinstance(value, tuple) else ()
        for i, part in enumerate(node):
            _collect(f"{path}[{i}]", part, parts[i] if i < len(parts) else None, given)
    else:
        for name, part in node.items():
            _collect(f"{path}[{name!r}]", part, value.get(name) if isinstance(value, dict) else None, given)
