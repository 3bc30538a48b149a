"""pyzmq, which only the service needs, and the library behind it."""

from __future__ import annotations

import functools
from typing import Any

from .. import _core
from ..errors import StorageError

__all__ = ["load_zmq", "zmq_functions"]

_MESSAGE = ("init", "init_size", "init_data", "close", "copy", "move", "data", "size", "more", "gets", "recv", "send")
_FUNCTIONS = (*(f"zmq_msg_{name}" for name in _MESSAGE), "zmq_errno")


def load_zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise StorageError("tcp:// and ipc:// need pyzmq; pip install sharpwave[serve]") from None
    return zmq


@functools.cache
def zmq_functions() -> _core.Zmq:
    """libzmq's functions for the engine, which reads and writes the sockets that pyzmq made.

    They are looked up in pyzmq's own module, so both use one copy of the library.
    """
    import ctypes

    load_zmq()
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.CDLL(_zmq.__file__)
        addresses = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS}
    except (ImportError, AttributeError, OSError) as error:
        raise StorageError(
            f"tcp:// and ipc:// need libzmq's functions, which this build of pyzmq hides ({error}); install a newer "
            "pyzmq as a wheel: pip install --upgrade --force-reinstall pyzmq"
        ) from None
    return _core.zmq(addresses)
