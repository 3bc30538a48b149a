"""Parts of batches: a batch that several buffers fill is cut into views, or joined from batches of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..schema import Field, Node
from .protocol import Batch

__all__ = ["join", "leaves", "part", "pick"]


def part(value: Any, begin: int, end: int) -> Any:
    """Views of some examples of a batch."""
    if isinstance(value, dict):
        array = np.ndarray  # most items are arrays: the call is left out for them
        return {
            name: item[begin:end] if type(item) is array else part(item, begin, end) for name, item in value.items()
        }
    if isinstance(value, tuple):
        return tuple(part(item, begin, end) for item in value)
    return value[begin:end]


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The arrays of a batch with their paths, as messages name them: ``obs/image``."""
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in leaves(item, f"{path}/{name}" if path else name)]
    if isinstance(value, tuple):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, f"{path}/{i}")]
    return [(path, value)]


def join(fields: dict[str, Node], batches: Sequence[Batch]) -> Batch:
    """One batch of several, in their order. They have the same keys; ``fields`` says which of them are ragged."""
    first = batches[0]
    if isinstance(first["indices"], np.ndarray):
        concatenate: Callable[[list[Any]], Any] = np.concatenate
    else:
        import torch

        concatenate = torch.cat
    if len(batches) == 1:
        return dict(first)
    return {name: _join(fields.get(name), [batch[name] for batch in batches], concatenate) for name in first}


def _join(node: Node | None, values: list[Any], concatenate: Callable[[list[Any]], Any]) -> Any:
    if isinstance(node, Field) and node.ragged is True:
        offsets = [values[0]["offsets"]]
        for value in values[1:]:
            offsets.append(value["offsets"][1:] + offsets[-1][-1])
        return {"values": concatenate([value["values"] for value in values]), "offsets": concatenate(offsets)}
    if isinstance(values[0], dict):
        nodes = node if isinstance(node, dict) else {}
        return {name: _join(nodes.get(name), [value[name] for value in values], concatenate) for name in values[0]}
    if isinstance(values[0], tuple):
        return tuple(_join(None, list(parts), concatenate) for parts in zip(*values, strict=True))
    return concatenate(values)


def pick(fields: dict[str, Node], batch: Batch, order: np.ndarray[Any, Any]) -> Batch:
    """The examples of a batch in another order."""
    at: Any = order
    if not isinstance(batch["indices"], np.ndarray):
        import torch

        at = torch.from_numpy(order).to(batch["indices"].device)
    return {name: _pick(fields.get(name), value, at) for name, value in batch.items()}


def _pick(node: Node | None, value: Any, order: Any) -> Any:
    if isinstance(node, Field) and node.ragged is True:
        values, offsets = value["values"], value["offsets"]
        lengths = (offsets[1:] - offsets[:-1])[order]
        moved = np.zeros_like(offsets)
        np.cumsum(lengths, out=moved[1:])
        within = np.arange(moved[-1]) - np.repeat(moved[:-1], lengths)
        return {"values": values[np.repeat(offsets[:-1][order], lengths) + within], "offsets": moved}
    if isinstance(value, dict):
        nodes = node if isinstance(node, dict) else {}
        return {name: _pick(nodes.get(name), item, order) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_pick(None, item, order) for item in value)
    return value[order]
