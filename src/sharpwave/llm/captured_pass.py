"""`CapturedPass`: a learner's forward and backward pass as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CapturedPass"]

Rows = dict[str, Tensor]


class CapturedPass:
    """One launch instead of thousands, which take longer than the work where the model is small.

    Every pass has the same shape. So it is captured at its first call, over memory that stays: inputs are copied in,
    and gradients are added to those that the parameters have. They must be set to zero, never to None.

    Args:
        run: From rows to numbers by name, each a tensor without dimensions; adds gradients to the parameters. It waits
            for the device nowhere.
        parameters: Those that may get gradients.
    """

    def __init__(self, run: Callable[[Rows], Rows], parameters: Iterable[nn.Parameter]) -> None:
        self._run, self._parameters = run, list(parameters)
        self._graphs: dict[tuple[Any, ...], _Graph] = {}

    def __call__(self, rows: Rows) -> Rows:
        shape = tuple(sorted((name, one.shape, one.dtype) for name, one in rows.items()))
        if shape not in self._graphs:
            self._graphs[shape] = _Graph(self._run, self._parameters, rows)
        return self._graphs[shape].launch(rows)


class _Graph:
    def __init__(self, run: Callable[[Rows], Rows], parameters: list[nn.Parameter], rows: Rows) -> None:
        self._inputs = {name: one.clone() for name, one in rows.items()}
        before = [None if one.grad is None else one.grad.clone() for one in parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and lets libraries and gradients take their memory
                run(self._inputs)
            for one, gradient in zip(parameters, before, strict=True):
                if gradient is not None:
                    one.grad.copy_(gradient)  # type: ignore[union-attr]
                elif one.grad is not None:
                    one.grad.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: an engine decodes beside the learner.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            made = run(self._inputs)
            self._names, self._made = list(made), torch.stack([one.float() for one in made.values()])

    def launch(self, rows: Rows) -> Rows:
        for name, one in self._inputs.items():
            one.copy_(rows[name], non_blocking=True)
        self._graph.replay()
        return dict(zip(self._names, self._made.clone().unbind(), strict=True))  # the next launch writes there again
