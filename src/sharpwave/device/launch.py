"""The launch of kernels. Triton inspects every argument of every launch, which takes longer than a small kernel. Here
the compiled kernel is found once, at the first call, and later launches skip the inspection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import _core

__all__ = ["Kernel", "on_device_of", "start"]

_ready: dict[Any, Callable[..., None]] = {}


class Kernel:
    """A Triton kernel with its constants, for one device. Arguments are addresses and other whole numbers, or tuples of
    them. The first call compiles the kernel for its arguments: in later calls the same must be 0, and the same
    must be multiples of 16. Later calls go to the driver directly. Each product and sum is rounded, as on the host."""

    def __init__(self, kernel: Any, constants: tuple[Any, ...], warps: int = 4) -> None:
        self.kernel, self.constants = kernel, constants
        self.options = {"num_warps": warps, "enable_fp_fusion": False}
        self.compiled: Any = None
        self.run: Any = None  # launches through the driver; None where that is not possible
        self.device = 0

    def __call__(
        self, grid: tuple[int, int], numbers: tuple[Any, ...], steps: tuple[Any, ...] | None = None, times: int = 0
    ) -> None:
        """With ``steps``, each number is increased by ``times`` times its step."""
        if self.run is not None:
            self.run(torch._C._cuda_getCurrentRawStream(self.device), *grid, numbers, steps, times)
            return
        if steps is not None:
            numbers = _moved(numbers, steps, times)
        compiled = self.kernel[grid](*numbers, *self.constants, **self.options)
        if self.compiled is None and hasattr(compiled, "metadata"):  # Triton's interpreter returns None
            self.compiled = compiled
            self._take_over(compiled, _count(numbers))

    def _take_over(self, compiled: Any, count: int) -> None:
        try:
            meta = compiled.metadata
            others = meta.num_ctas - 1, meta.launch_cooperative_grid, meta.launch_pdl
            if any(others) or meta.global_scratch_size or meta.profile_scratch_size:
                return
            launch = _core.Launch(compiled.function, 32 * meta.num_warps, meta.shared, count)
        except (AttributeError, TypeError, ValueError):  # another version of the driver or of Triton
            return
        self.device = torch.cuda.current_device()
        self.run = launch.run


def _moved(numbers: tuple[Any, ...], steps: tuple[Any, ...], times: int) -> tuple[Any, ...]:
    return tuple(
        _moved(number, step, times) if isinstance(number, tuple) else number + times * step
        for number, step in zip(numbers, steps, strict=True)
    )


def _count(numbers: tuple[Any, ...]) -> int:
    return sum(_count(number) if isinstance(number, tuple) else 1 for number in numbers)


def start(key: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Starts a kernel on tensors. ``key`` identifies the grid and everything that the compiled code depends on."""
    ready = _ready.get(key)
    if ready is not None:
        ready(*arguments)
        return
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = kernel[grid](*arguments, **options)
    if not hasattr(compiled, "__getitem__"):
        return  # Triton's interpreter has no compiled kernel
    if len(_ready) > 1000:
        _ready.clear()
    _ready[key] = _once_checked(key, compiled[(*grid, 1, 1)[:3]], functools.partial(kernel[grid], **options))


def _once_checked(key: Any, quick: Any, slow: Any) -> Any:
    """The quick launch, unless this version of Triton expects other arguments: then the first call raises before the
    kernel starts, and the slow launch is used."""

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
    """Runs a call on the device of its first argument: kernels start on the current device, which may be another."""

    @functools.wraps(call)
    def there(first: Any, *arguments: Any, **named: Any) -> Any:
        device = first.device
        if device.type == "cpu" or device.index == torch._C._cuda_getDevice():
            return call(first, *arguments, **named)
        with torch.cuda.device(device):
            return call(first, *arguments, **named)

    return there
