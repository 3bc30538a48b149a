"""`WeightStage`: new weights on their way to the device, checked before any of them replaces an old one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...errors import SchemaError
from ..manifest import check_files
from ..model.folder import check_config, check_state, is_finite, read_state
from ..model.transformer import Transformer
from ..weights import Published

__all__ = ["WeightStage"]


class WeightStage:
    """Checks new weights, on a GPU beside the old ones.

    There they are copied to the device while steps go on, so steps wait for a copy within the device only. The price is
    the memory of the weights once more, taken at the first update. On a CPU the given tensors are checked, and copied
    between two steps. Checksums of files are computed by another thread while their tensors are copied to the device.
    """

    def __init__(self, model: Transformer) -> None:
        self._model, self._lock = model, threading.Lock()
        self._staged: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def put(self, state: Mapping[str, Tensor] | str | Path | Published, where: str) -> Iterator[Mapping[str, Tensor]]:
        """Weights that are ready to be loaded, until the end of the block. Blocks of threads follow each other.

        Args:
            state: Tensors by name, a Hugging Face folder, or a version of `Weights`.
            where: The call, for messages.

        Raises:
            SchemaError: Names or shapes are wrong, a value is NaN or infinite, also in the model's dtype, or the folder
                is of a model with other settings.
            StorageError: The folder cannot be read, or is not what was published.
        """
        folder = None
        if isinstance(state, (str, Path, Published)):
            folder = state.path if isinstance(state, Published) else Path(state)
            check_config(self._model.config, folder, where)
            # Files are read when their tensors are used, so that another thread may compare checksums meanwhile.
            state = state.read(check=False) if isinstance(state, Published) else read_state(folder, check=False)
        check_state(self._model, state, where)
        with self._lock, ThreadPoolExecutor(1, "sharpwave-checksums") as beside:
            compared = None if folder is None else beside.submit(check_files, folder, ())
            if self._model.device.type == "cuda":
                state = self._sent(state)
            if compared is not None:
                compared.result()
            self._check_numbers(state, where)
            yield state

    def note_load(self) -> None:
        """The operations of the current stream up to now read what was put: later weights are staged after them."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._model.device))

    def _check_numbers(self, state: Mapping[str, Tensor], where: str) -> None:
        wanted = dict(self._model.weights())
        with torch.cuda.stream(self._stream):  # None changes nothing
            # In the model's dtype: what is finite in float32 may be infinite in a narrower one.
            flags = torch.stack([is_finite(state[name].to(one.dtype)) for name, one in wanted.items()]).tolist()
        bad = [name for name, is_finite in zip(wanted, flags, strict=True) if not is_finite]
        if bad:
            raise SchemaError(f"{where}: {bad[0]} has values that are NaN or infinite; the old weights stay")

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
