"""`WeightStage`: new weights on their way to the device, checked before any of them replaces an old one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...errors import SchemaError
from ..model.folder import check_state
from ..model.transformer import Transformer

__all__ = ["WeightStage"]


class WeightStage:
    """Checks new weights, on a GPU beside the old ones.

    There they are copied to the device while steps go on, so steps wait for a copy within the device only. The price is
    the memory of the weights once more, taken at the first update. On a CPU the given tensors are checked, and copied
    between two steps.
    """

    def __init__(self, model: Transformer) -> None:
        self._model, self._lock = model, threading.Lock()
        self._staged: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def put(self, state: Mapping[str, Tensor], where: str) -> Iterator[Mapping[str, Tensor]]:
        """Weights that are ready to be loaded, until the end of the block. Blocks of threads follow each other.

        Raises:
            SchemaError: Names or shapes are wrong, or a value is NaN or infinite, also in the model's dtype.
        """
        check_state(self._model, state, where)
        with self._lock:
            if self._model.device.type == "cuda":
                state = self._sent(state)
            with torch.cuda.stream(self._stream):  # None changes nothing
                flags = torch.stack([torch.isfinite(tensor).all() for tensor in state.values()]).tolist()
            bad = [name for name, is_finite in zip(state, flags, strict=True) if not is_finite]
            if bad:
                raise SchemaError(f"{where}: {bad[0]} has values that are NaN or infinite; the old weights stay")
            yield state

    def _sent(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        device = self._model.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            self._staged = {name: torch.empty_like(tensor) for name, tensor in self._model.weights()}
        self._stream.wait_stream(torch.cuda.current_stream(device))  # tensors of a learner on the device are complete
        with torch.cuda.stream(self._stream):
            for name, staged in self._staged.items():
                staged.copy_(state[name], non_blocking=True)
        return self._staged
