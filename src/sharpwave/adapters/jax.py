"""Batches as JAX arrays, without a copy where possible."""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import jax
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: pip install "sharpwave[jax]"', name=error.name) from None

from sharpwave.errors import SchemaError

__all__ = ["to_jax"]

_WHOLE = {"int64": "int32", "uint64": "uint32"}
_BROKEN = {"float64", "complex128"}


def to_jax(batch: Any) -> Any:
    """Converts the arrays of a batch to ``jax.Array``, on the device where they are.

    Arrays are passed through DLPack. On the CPU an array is not copied if it starts at a multiple of 64 bytes: sampled
    arrays of 16 KiB or more always do, smaller ones sometimes. Read-only arrays and arrays not in C order are copied.

    JAX has 64-bit numbers only with ``jax_enable_x64``; otherwise it cuts them to 32 bits without a warning. So without
    ``jax_enable_x64``:

    - ``int64`` becomes ``int32`` after every number was checked; on a GPU the check waits for the device. A field
      declared as ``int32`` needs no check.
    - ``float64`` is not converted: it stays a NumPy array or a torch tensor.

    ``"indices"`` are never converted: ``update_priorities`` takes them back, and they may need more than 32 bits.

    A sampled batch may be kept as long as you like: the engine does not reuse its memory while JAX holds it. A batch
    drawn into ``out=`` and the result of ``RolloutBuffer.get_all_data`` are different: later calls write into the same
    memory, and the JAX arrays change with it. Use them before the next call.

    Args:
        batch: The result of ``sample``, ``batches``, ``stream``, ``get`` or ``minibatches``: dicts and tuples of NumPy
            arrays or torch tensors, and None.

    Returns:
        New dicts and tuples with JAX arrays in them.

    Raises:
        SchemaError: An ``int64`` holds a number beyond 32 bits, JAX has no such dtype, or JAX does not see the GPU on
            which a tensor is.

    Example:
        >>> import sharpwave as sw
        >>> from sharpwave.adapters.jax import to_jax
        >>> buf = sw.ReplayBuffer(100, obs_shape=(3,), seed=0)
        >>> buf.add([1, 2, 3], 0, 1.0, [4, 5, 6], False)
        >>> batch = to_jax(buf.sample(2))
        >>> batch["obs"] + batch["reward"][:, None]
        Array([[2., 3., 4.],
               [2., 3., 4.]], dtype=float32)
    """
    if isinstance(batch, dict):
        return {key: value if key == "indices" else _convert(str(key), value) for key, value in batch.items()}
    return _convert("batch", batch)


def _convert(path: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert(f"{path}/{key}", part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_convert(f"{path}/{i}", part) for i, part in enumerate(value))
    if value is None:
        return None
    is_tensor = hasattr(value, "detach")
    if not is_tensor and not isinstance(value, np.ndarray):
        raise SchemaError(f"to_jax(): {path!r}: expected a NumPy array or a torch tensor, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    if jax.dtypes.canonicalize_dtype(np.int64) != np.int64:  # without jax_enable_x64
        if dtype in _BROKEN:
            return value
        if dtype in _WHOLE:
            value = _narrow(path, value, dtype)
    if is_tensor:
        value = value.detach().contiguous()
        if value.is_cuda and value.data_ptr() % 16:  # XLA needs kernel arguments at multiples of 16 bytes
            value = value.clone()
    elif not (value.flags.carray and value.ctypes.data % 64 == 0):
        value = _copy(value)
    try:
        return jax.dlpack.from_dlpack(value)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        device = f" on {value.device}" if is_tensor else ""
        mend = "; install JAX for this GPU, or sample with device='cpu'" if is_tensor and value.is_cuda else ""
        raise SchemaError(f"to_jax(): {path!r}: JAX does not take {dtype}{device}: {error}{mend}") from error


def _copy(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An aligned copy that JAX does not copy again. JAX would copy the array itself, some versions with a warning."""
    memory = np.empty(value.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy: np.ndarray[Any, Any] = memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


def _narrow(path: str, value: Any, dtype: str) -> Any:
    """Whole numbers as 32 bits; refuses numbers that do not fit."""
    short = np.iinfo(_WHOLE[dtype])
    if 0 not in value.shape:
        for extreme in (int(value.min()), int(value.max())):
            if not short.min <= extreme <= short.max:
                raise SchemaError(
                    f"to_jax(): {path!r}: expected numbers that fit {short.dtype}, got {extreme}; call "
                    'jax.config.update("jax_enable_x64", True) for 64 bits'
                )
    return value.int() if hasattr(value, "detach") else value.astype(short.dtype)
