"""Where tables of a GPU are tested: on one, or on the CPU with the kernels in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.buffers.replay import spec_of

torch = pytest.importorskip("torch")
HAS_GPU = torch.cuda.is_available()
SOAK = os.environ.get("SHARPWAVE_SOAK") == "1"  # the interpreter of kernels is slow: it runs fewer cases otherwise
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

PLACES = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


def device_of(place: str) -> str:
    if (place == "cuda") != HAS_GPU:
        pytest.skip("the kernels run on the GPU here" if HAS_GPU else "no GPU here")
    return "cuda" if HAS_GPU else "cpu"


def here(value: Any) -> Any:
    """A batch as NumPy arrays."""
    if isinstance(value, dict):
        return {name: here(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(here(part) for part in value)
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)


def on_device(capacity: int, *, device: str, **options: Any) -> sw.ReplayBuffer:
    """A buffer whose rows are on the device, where that is the CPU too."""
    from sharpwave.rows.device import DeviceRows

    if HAS_GPU:
        return sw.ReplayBuffer(capacity, device=device, **options)
    storage = options.pop("storage", None)
    return sw.ReplayBuffer._over(DeviceRows("ReplayBuffer()", spec_of(capacity, **options), device, storage))
