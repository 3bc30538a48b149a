"""The host's memory, made readable for a GPU: pages are pinned once, a part at a time as rows fill them.

Through the driver and not through torch: a refusal there stays a refusal, and does not turn up as the error of somebody
else's next call.
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
    """The driver refuses to let a GPU read memory of the host."""


class RegisteredMemory:
    """Memory from ``address`` on, which a GPU may read as far as ``reach()`` was asked for.

    Args:
        address: Of the first byte.
        size: In bytes.
        path: Of the file behind the memory, if there is one: pages of files are pinned for reading only, so it is
            mapped a second time.
        offset: Where in the file the memory begins.
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
        self.lock = threading.Lock()  # threads sample at once

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
        """Lets the GPU read the first so many bytes.

        Raises:
            Unregistered: The driver refuses; the message is its own.
        """
        with self.lock:
            want = min(self.base + size, self.end)
            if self.begin + self.bytes < want:
                torch.cuda.mem_get_info()  # the driver knows no context in a thread that has not asked for anything
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
                    raise Unregistered("this GPU has another address for memory of the host")
                self.parts.append(at)
                self.bytes += length

    def close(self) -> None:
        """Waits for whoever reads it."""
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
