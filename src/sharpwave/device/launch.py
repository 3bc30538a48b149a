"""Starting kernels: Triton looks at every argument of every launch, which takes longer than a small kernel does. Which
compiled kernel fits depends on a few things only: looked up by them, it is started in half of the time."""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["on_device_of", "start"]

_ready: dict[Any, Any] = {}


def start(
    key: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], *, warps: int = 4, fuses: bool = False
) -> None:
    """Launches a kernel. ``key`` names all that the compiled code depends on, and the grid. ``fuses``: products and
    sums may be rounded once together; without it results are those of the host."""
    ready = _ready.get(key)
    if ready is not None:
        ready(*arguments)
        return
    options = {"num_warps": warps, "enable_fp_fusion": fuses}
    compiled = kernel[grid](*arguments, **options)
    if not hasattr(compiled, "__getitem__"):
        return  # the interpreter has none
    if len(_ready) > 1000:
        _ready.clear()
    _ready[key] = _once_checked(key, compiled[(*grid, 1, 1)[:3]], functools.partial(kernel[grid], **options))


def _once_checked(key: Any, quick: Any, slow: Any) -> Any:
    """The quick way, unless this version of Triton takes its arguments in another manner: it says so at the first call,
    before anything is started."""

    def first(*arguments: Any) -> None:
        try:
            quick(*arguments)
        except (TypeError, AttributeError, ValueError):
            _ready[key] = slow
            slow(*arguments)
        else:
            _ready[key] = quick

    return first


def on_device_of(call: Any) -> Any:
    """Kernels start on the current device, which need not be the first argument's."""

    @functools.wraps(call)
    def there(first: Any, *arguments: Any, **named: Any) -> Any:
        device = first.device
        if device.type == "cpu" or device.index == torch.cuda.current_device():
            return call(first, *arguments, **named)
        with torch.cuda.device(device):
            return call(first, *arguments, **named)

    return there
