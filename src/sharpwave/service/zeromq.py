"""pyzmq, which only the service needs."""

from __future__ import annotations

from typing import Any

from ..errors import StorageError

__all__ = ["load_zmq"]


def load_zmq() -> Any:
    try:
        import zmq
    except ImportError:
        raise StorageError("tcp:// and ipc:// need pyzmq; pip install sharpwave[serve]") from None
    return zmq
