"""Starting kernels. Triton looks at every argument of every launch, which takes longer than a small kernel does; which
compiled kernel fits depends on a few things only, and is looked up by them here."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["launch", "name_of", "on_device_of", "pack", "start"]

_ready: dict[Any, Callable[..., None]] = {}
_names: dict[Any, int] = {}


def name_of(constants: tuple[Any, ...]) -> int:
    """A number for them, to look kernels up by: a long tuple is hashed anew every time."""
    return _names.setdefault(constants, len(_names))


def start(key: Any, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Starts a kernel on tensors. ``key`` names all that the compiled code depends on, and the grid."""
    ready = _ready.get(key)
    if ready is not None:
        ready(*arguments)
        return
    options = {"num_warps": 4, "enable_fp_fusion": True}
    compiled = kernel[grid](*arguments, **options)
    if not hasattr(compiled, "__getitem__"):
        return  # the interpreter has none
    _keep(key, _once_checked(key, compiled[(*grid, 1, 1)[:3]], functools.partial(kernel[grid], **options)))


def launch(
    key: Any,
    kernel: Any,
    grid: tuple[int, int],
    numbers: Any,
    constants: tuple[Any, ...],
    warps: int = 4,
) -> None:
    """Starts a kernel on addresses, at multiples of 16, and other whole numbers, or tuples of them, or what ``pack``
    made of all that; the constants come last. Products and sums are rounded one by one, as on the host."""
    ready = _ready.get(key)
    if ready is not None:
        ready(numbers)
        return
    options = {"num_warps": warps, "enable_fp_fusion": False}
    compiled = kernel[grid](*numbers, *constants, **options)
    if not hasattr(compiled, "__getitem__"):
        return
    try:
        quick: Callable[..., None] = _Quick(compiled, grid, numbers)
    except (AttributeError, OSError, TypeError, ValueError):  # a driver or a Triton that does it in another way

        def quick(numbers: tuple[Any, ...]) -> None:
            kernel[grid](*numbers, *constants, **options)

    _keep(key, quick)


def _keep(key: Any, ready: Callable[..., None]) -> None:
    if len(_ready) > 1000:
        _ready.clear()
    _ready[key] = ready


class _Quick:
    """A compiled kernel, started by the driver itself.

    Raises:
        ValueError: The kernel takes other parameters than those that it was called with.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int], numbers: tuple[Any, ...]) -> None:
        meta = compiled.metadata
        others = meta.num_ctas - 1, meta.launch_cooperative_grid, meta.launch_pdl
        if any(others) or meta.global_scratch_size or meta.profile_scratch_size:
            raise ValueError
        driver = ctypes.PyDLL("libcuda.so.1")  # holds the interpreter's lock: the memory of the numbers is shared
        function, offset, size = ctypes.c_void_p(compiled.function), ctypes.c_size_t(), ctypes.c_size_t()
        layout, end, count, is_even = "<", 0, 0, True
        while (
            driver.cuFuncGetParamInfo(function, ctypes.c_size_t(count), ctypes.byref(offset), ctypes.byref(size)) == 0
        ):
            if size.value not in (4, 8):
                raise ValueError
            is_even = is_even and offset.value == 8 * count
            layout += f"{offset.value - end}x" + ("q" if size.value == 8 else "i")
            end, count = offset.value + size.value, count + 1
        # Behind the kernel's own stand two addresses of scratch memory, which it does not need.
        if count != len(_flat(numbers)) + 2:
            raise ValueError
        self.layout, self.is_even = struct.Struct(layout), is_even
        self.memory = ctypes.create_string_buffer(self.layout.size)
        self.size = ctypes.c_size_t(self.layout.size)
        self.own = ctypes.addressof(self.memory)
        # CU_LAUNCH_PARAM_BUFFER_POINTER, its value, ..._SIZE, its address, ..._END
        self.extra = (ctypes.c_void_p * 5)(1, self.own, 2, ctypes.addressof(self.size), 0)
        self.device = torch.cuda.current_device()
        self.run = driver.cuLaunchKernel
        self.run.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self.fixed = (compiled.function, *grid, 1, 32 * meta.num_warps, 1, 1, meta.shared)

    def pack(self, first: tuple[Any, ...], second: tuple[Any, ...], count: int) -> tuple[Any, Any, list[int]] | None:
        """Numbers of ``count`` launches that go on as the first two do, in one piece of memory; what
        starts them, that memory, and where each is in it."""
        if not self.is_even:
            return None
        one = np.array([*_flat(first), 0, 0], np.int64)
        step = np.array([*_flat(second), 0, 0], np.int64) - one
        memory = one + np.arange(count)[:, None] * step
        base, row = memory.ctypes.data, memory.strides[0]
        return self, memory, [base + i * row for i in range(count)]

    def __call__(self, numbers: tuple[Any, ...] | int) -> None:
        if type(numbers) is int:
            self.extra[1] = numbers
        else:
            self.layout.pack_into(self.memory, 0, *_flat(numbers), 0, 0)  # type: ignore[arg-type]
            self.extra[1] = self.own
        code = self.run(*self.fixed, torch._C._cuda_getCurrentRawStream(self.device), None, self.extra)
        if code:
            raise RuntimeError(f"the CUDA driver cannot start a kernel: error {code}")


def pack(key: Any, first: tuple[Any, ...], second: tuple[Any, ...], count: int) -> tuple[Any, Any, list[int]] | None:
    """The numbers of launches to come, in the form that starts quickest; None where there is none."""
    ready = _ready.get(key)
    return ready.pack(first, second, count) if isinstance(ready, _Quick) else None


def _flat(numbers: tuple[Any, ...]) -> list[int]:
    flat: list[int] = []
    for number in numbers:
        if type(number) is tuple:
            flat += number
        else:
            flat.append(number)
    return flat


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
        if device.type == "cpu" or device.index == torch._C._cuda_getDevice():
            return call(first, *arguments, **named)
        with torch.cuda.device(device):
            return call(first, *arguments, **named)

    return there
