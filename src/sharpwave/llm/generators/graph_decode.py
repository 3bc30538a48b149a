"""`GraphDecode`: decode steps and prompts as CUDA graphs over fixed memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.forward import FusedForward
from ..model.cache import KVCache
from ..model.transformer import Transformer
from .decode import Ids, Meanwhile, Scores, nothing
from .sampler import Sampler

__all__ = ["GraphDecode"]

_LEAST_ROWS = 16
T = TypeVar("T")


class GraphDecode:
    """One graph for a decode step, and one for each of a few sizes of prompts.

    Graphs read and write the same memory at every launch: inputs are copied in before it, tokens and log-probabilities
    come back in one copy, which is the only time that the host waits for the device. Lengths are read on the device, so
    one graph serves all of them. New weights are written into the same memory, so graphs stay valid.

    On a CPU the same functions run without graphs; this is for tests.

    Args:
        chunk: As many tokens are filled between two flushes at most.
        kernels: The module `fused` or `plain`.
    """

    def __init__(self, model: Transformer, cache: KVCache, sampler: Sampler, chunk: int, kernels: Any) -> None:
        device = model.device
        self._model, self._cache, self._sampler, self._kernels = model, cache, sampler, kernels
        self._forward = FusedForward(model, cache, kernels)
        self._every = torch.arange(cache.slots, device=device)
        self._fed = _Inputs(3, cache.slots, device)  # ids, places, counts
        # Tokens, and the bits of their log-probabilities.
        self._drawn = torch.zeros((2, cache.slots), dtype=torch.int32, device=device)
        self._answer = torch.zeros((2, cache.slots), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._pieces: list[tuple[int, int, Ids]] = []
        self._moves: list[tuple[int, int, int, int]] = []  # after all pieces
        self._targets: set[int] = set()  # of the moves
        self._fed.host[1] = cache.context  # all idle while graphs are captured: nothing is written to the cache
        self._fed.send()
        self.stream = None
        pool = None
        if device.type == "cuda":
            # Its short kernels go before those of a learner on the same device, which fill it for milliseconds.
            self.stream = torch.cuda.Stream(device, priority=-1)
            pool = torch.cuda.graph_pool_handle()
        # The largest first: the others fit into the memory that it leaves.
        sizes = [chunk]
        while sizes[-1] > _LEAST_ROWS:
            sizes.append(max(_LEAST_ROWS, sizes[-1] // 4))
        self._prompts: dict[int, tuple[_Inputs, _Graph[Tensor]]] = {}
        for rows in sizes:
            inputs = _Inputs(3, rows, device)  # ids, slots, places
            inputs.host[2] = cache.context
            inputs.send()
            self._prompts[rows] = (inputs, _Graph(partial(self._forward, *inputs.device), self.stream, pool))
        self._step = _Graph(self._compute_step, self.stream, pool)

    def _compute_step(self) -> Tensor:
        ids, places, counts = self._fed.device
        logits = self._model.logits(self._forward(ids, self._every, places))
        tokens, scores = self._drawn[0], self._drawn[1].view(torch.float32)
        self._kernels.draw(logits, self._sampler.temperature, self._sampler.seed, counts, tokens, scores)
        return logits

    def fill(self, slot: int, start: int, ids: Ids) -> None:
        if slot in self._targets:  # the piece looks at what is copied
            self.flush()
        self._pieces.append((slot, start, ids))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        if source in self._targets or target in self._targets:
            self.flush()
        self._moves.append((source, target, start, end))
        self._targets.add(target)

    def flush(self) -> None:
        """All pieces in one pass, because tokens of many prompts are rows like those of one; then all copies."""
        if self._pieces:
            self._fill_all()
        if self._moves:
            moves = torch.tensor(self._moves).to(self._cache.keys.device, non_blocking=True)
            self._kernels.copy_places(self._cache.keys, self._cache.values, moves)
            self._moves.clear()
            self._targets.clear()

    def _fill_all(self) -> None:
        count = sum(len(ids) for _, _, ids in self._pieces)
        inputs, graph = self._prompts[min(rows for rows in self._prompts if rows >= count)]
        inputs.host[:2] = 0
        inputs.host[2] = self._cache.context
        row = 0
        for slot, start, ids in self._pieces:
            here = slice(row, row + len(ids))
            inputs.host[0, here], inputs.host[1, here] = ids, slot
            inputs.host[2, here] = np.arange(start, start + len(ids))
            row += len(ids)
        self._pieces.clear()
        inputs.send()
        graph()

    def step(self, ids: Ids, places: Ids, counts: Ids, meanwhile: Meanwhile = nothing) -> tuple[Ids, Scores]:
        self.flush()
        self._sampler.send()
        self._fed.host[:] = ids, places, counts
        self._fed.send()
        logits = self._step()
        if self._sampler.is_filtering:  # sorts the vocabulary: outside of the graph, which most steps do without
            tokens, scores = self._sampler.draw(logits, self._fed.device[2])
            self._drawn[0].copy_(tokens)
            self._drawn[1].view(torch.float32).copy_(scores)
        self._answer.copy_(self._drawn, non_blocking=True)
        meanwhile()
        if self._drawn.is_cuda:
            torch.cuda.current_stream(self._drawn.device).synchronize()
        return self._answer[0].numpy().astype("int64"), self._answer[1].view(torch.float32).numpy().copy()


class _Inputs:
    """Whole numbers that the host gives to a graph: written to `host`, then sent in one copy."""

    def __init__(self, kinds: int, rows: int, device: torch.device) -> None:
        self._source = torch.zeros((kinds, rows), dtype=torch.long)
        self._target = torch.zeros((kinds, rows), dtype=torch.long, device=device)
        self.host, self.device = self._source.numpy(), tuple(self._target)

    def send(self) -> None:
        # The memory is not pinned: the driver copies it aside before it returns, so the host may write to it at once.
        self._target.copy_(self._source, non_blocking=True)


class _Graph(Generic[T]):
    """A function that is captured here and launched at each call. Its result has the same memory each time."""

    def __init__(self, function: Callable[[], T], stream: torch.cuda.Stream | None, pool: Any) -> None:
        self._function: Callable[[], T] | None = function if stream is None else None
        if stream is None:
            return
        with torch.no_grad(), torch.cuda.device(stream.device):
            # Captured there, because the kernels of a graph keep the priority of the stream.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels, and lets libraries take their memory
                    function()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._result = function()
        self._graph, self._device = graph, stream.device

    def __call__(self) -> T:
        if self._function is not None:
            return self._function()
        with torch.cuda.device(self._device):
            self._graph.replay()
        return self._result
