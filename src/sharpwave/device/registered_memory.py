"""Host memory registered for a GPU: pages are pinned once, in parts, as rows fill them.

It calls the CUDA driver and not torch: an error of torch's call would be raised again by the next, unrelated CUDA call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from typing import Any

import torch

__all__ = ["RegisteredMemory", "Unregistered"]

_PAGE = 4096
_HUGE_PAGE = 2 << 20
_PART = 256 << 20
_MOST_PARTS = 64
_PORTABLE, _MAPPED, _READ_ONLY = 1, 2, 8  # CU_MEMHOSTREGISTER_*


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Unregistered(OSError):
    """The CUDA driver cannot register host memory."""


class RegisteredMemory:
    """Host memory that a GPU may read, up to the size given to ``reach()``.

    Args:
        address: Address of the first byte.
        size: Size in bytes.
        path: Path of the file behind the memory, or None. Pages of a file can be pinned for reading only, so it is
            mapped a second time.
        offset: Offset of the memory in the file.
    """

    def __init__(self, address: int, size: int, path: str | None = None, offset: int = 0) -> None:
        self.size, self.bytes = size, 0
        self.mapping: mmap.mmap | None = None
        self.flags = _PORTABLE | _MAPPED
        if path is not None:
            self._map(path, offset)
            self.flags |= _READ_ONLY
        else:
            self.begin, self.base = address // _PAGE * _PAGE, address
        self.end = -(-(self.base + size) // _PAGE) * _PAGE
        self.part = max(_PART, -(-(self.end - self.begin) // _MOST_PARTS // _HUGE_PAGE) * _HUGE_PAGE)
        self.parts: list[int] = []
        self.lock = threading.Lock()  # several threads may sample at the same time

    def _map(self, path: str, offset: int) -> None:
        page = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            length = -(-(offset - page + self.size) // _PAGE) * _PAGE
            self.mapping = mmap.mmap(handle, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        finally:
            os.close(handle)
        import numpy as np

        self.begin = int(np.frombuffer(self.mapping, np.uint8).ctypes.data)
        self.base = self.begin + offset - page

    def reach(self, size: int) -> None:
        """Registers at least the first ``size`` bytes.

        Raises:
            Unregistered: The driver cannot register them; the message has its error.
        """
        with self.lock:
            want = min(self.base + size, self.end)
            if self.begin + self.bytes < want:
                torch.cuda.mem_get_info()  # makes a CUDA context in a thread that has none
            while self.begin + self.bytes < want:
                at = self.begin + self.bytes
                length = min(self.part, self.end - at)
                code = _driver().cuMemHostRegister_v2(ctypes.c_void_p(at), ctypes.c_size_t(length), self.flags)
                if code:
                    raise Unregistered(
                        f"the CUDA driver cannot register {length >> 20} MiB of the host's memory: {_name(code)}"
                    )
                there = ctypes.c_uint64()
                code = _driver().cuMemHostGetDevicePointer_v2(ctypes.byref(there), ctypes.c_void_p(at), 0)
                if code or there.value != at:
                    _driver().cuMemHostUnregister(ctypes.c_void_p(at))
                    raise Unregistered("this GPU does not use the host's addresses for host memory")
                self.parts.append(at)
                self.bytes += length

    def close(self) -> None:
        """Unregisters the memory, after all kernels have finished."""
        if self.parts:
            torch.cuda.synchronize()
        for at in self.parts:
            _driver().cuMemHostUnregister(ctypes.c_void_p(at))
        self.parts.clear()
        self.bytes = 0
        self.mapping = None


def _name(code: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(code, ctypes.byref(name))
    return (name.value or b"unknown").decode()
