"""A rollout as a file: its columns as safetensors, its settings, counters and random state as JSON in the header."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import one_of, truth, whole
from ..errors import SchemaError, StorageError
from ..files import named_arrays, replace_file
from ..schema import Field, Node
from .columns import leaves_of

__all__ = ["COMPUTED", "RolloutState", "is_rollout_file", "read_rollout", "write_rollout"]

_FACE, _VERSION = "RolloutBuffer", 1
_NUMBERS = ("rewards", "values", "log_probs", "advantages", "returns", "final_values")
_FLAGS = ("dones", "truncated")
COMPUTED = ("advantages", "returns", "mask")  # columns that add() does not take
_ALWAYS = {"observations", "rewards", "dones", "values", "log_probs", "advantages", "returns"}
_MAYBE = {"privileged_observations", "actions", "truncated", "final_values", "mask", "hidden_states"}
# Arrays that are no columns. No column's path begins with '/'.
_WAS_OVER, _GENERATOR = "/was_over", "/generator"


@dataclasses.dataclass
class RolloutState:
    """Everything that a file holds of a rollout buffer."""

    num_envs: int
    num_steps: int
    autoreset: str
    seed: int
    extras: list[str]
    step: int
    has_returns: bool
    rollouts: int  # finished before this one
    steps_before: int  # added in those
    stream: dict[str, Any]  # state of NumPy's generator
    generator_on: str | None  # type of the device whose torch generator is in the file
    nodes: dict[str, Node]
    arrays: dict[str, np.ndarray[Any, Any]]  # (num_steps, num_envs, ...) by path
    was_over: np.ndarray[Any, Any] | None  # with autoreset="next_step": whether the last step ended an episode
    generator: np.ndarray[Any, Any] | None  # state of torch's generator, as bytes


_ABOUT = [field.name for field in dataclasses.fields(RolloutState)][:-4]  # what JSON holds


def write_rollout(path: Path, state: RolloutState) -> None:
    """Writes the whole file or none. An older file of a rollout is replaced, anything else is not.

    Raises:
        StorageError: It cannot be written there.
        SchemaError: A column has a dtype that safetensors lacks.
    """
    if os.path.lexists(path) and not is_rollout_file(path):
        raise StorageError(f"save(): {str(path)!r} exists and is no rollout; remove it or give another path")
    about = {"face": _FACE, "version": _VERSION, **{name: getattr(state, name) for name in _ABOUT}}
    leaves = [leaf for name, node in state.nodes.items() for leaf in leaves_of(name, node)]
    about["fields"] = {path: [list(field.shape), field.dtype.str] for path, field in leaves}
    named = dict(state.arrays)
    named |= {} if state.was_over is None else {_WAS_OVER: state.was_over}
    named |= {} if state.generator is None else {_GENERATOR: state.generator}
    arrays = {name: (array.dtype.name, array.shape, [named_arrays.raw_bytes(array)]) for name, array in named.items()}
    try:
        replace_file(path, named_arrays.encode(arrays, about, checksum=True))
    except SchemaError as error:
        raise SchemaError(f"save(): {error}") from None
    except StorageError as error:
        raise StorageError(f"save(): {error}") from None


def is_rollout_file(path: Path) -> bool:
    """Whether a file is one that ``write_rollout`` wrote, damaged or not."""
    try:
        if not path.is_file():  # opening a pipe would wait
            return False
        with path.open("rb") as file:
            head = file.read(4096)
    except (OSError, ValueError):  # ValueError: a null character in the path
        return False
    return head[8:9] == b"{" and b'"face\\":\\"' + _FACE.encode() in head


def read_rollout(path: Path) -> RolloutState:
    """Reads a file. Its sizes and dtypes are checked before memory is taken, its checksum before it is used.

    Raises:
        StorageError: Damaged, cut short, or no rollout; the message says which.
    """
    try:
        file, header = named_arrays.open_arrays(path)
        with file:
            state = _read_about(header)
            named = dict(state.arrays)
            named |= {} if state.was_over is None else {_WAS_OVER: state.was_over}
            named |= {} if state.generator is None else {_GENERATOR: state.generator}
            named_arrays.read_arrays(file, header, named)
    except StorageError as error:
        raise StorageError(f"open(): {str(path)!r}: {error}") from None
    except MemoryError:
        raise StorageError(f"open(): {str(path)!r}: not enough memory for its arrays") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise StorageError(f"open(): {str(path)!r}: damaged: {error}") from None
    return state


def _read_about(header: named_arrays.Header) -> RolloutState:
    about = header.about
    if about["face"] != _FACE:
        raise StorageError(f"expected a file of a {_FACE}, got one of {about['face']!r:.60}")
    if about["version"] != _VERSION:
        raise StorageError(f"expected version {_VERSION} of the format, got {about['version']!r:.60}")
    if header.checksum is None:
        raise StorageError("it has no checksum: damaged")
    where = "header"
    num_envs, num_steps = whole(where, "num_envs", about["num_envs"]), whole(where, "num_steps", about["num_steps"])
    autoreset = one_of(where, "autoreset", about["autoreset"], ("same_step", "next_step"))
    extras = [str(name) for name in about["extras"]]
    leaves = {str(path): Field(tuple(shape), dtype) for path, (shape, dtype) in about["fields"].items()}
    nodes = _nest(leaves)
    step = whole(where, "step", about["step"], 0, num_steps)
    has_returns = truth(where, "has_returns", about["has_returns"])
    must = _ALWAYS | set(extras) | ({"mask"} if autoreset == "next_step" else set()) | ({"actions"} if step else set())
    may = must | _MAYBE - ({"final_values"} if autoreset == "next_step" else {"mask"})
    if not must <= set(nodes) <= may or (has_returns and not step):
        raise ValueError(f"its fields are {', '.join(nodes)[:200]}")
    for name, node in nodes.items():
        numbers = {"float32"} if name in _NUMBERS else {"bool", "float32"} if name in _FLAGS else {"bool"}
        is_plain = isinstance(node, Field) and node.shape == () and node.dtype.name in numbers
        if name in (*_NUMBERS, *_FLAGS, "mask") and not is_plain:
            raise ValueError(f"field {name!r}: expected a number of {' or '.join(numbers)}, got {node!r:.100}")
    wanted = {path: (field.dtype, (num_steps, num_envs, *field.shape)) for path, field in leaves.items()}
    if autoreset == "next_step":
        wanted[_WAS_OVER] = np.dtype(bool), (num_envs,)
    if about["generator_on"] is not None:
        wanted[_GENERATOR] = np.dtype(np.uint8), header.places[_GENERATOR].shape
    got = {path: (place.dtype, place.shape) for path, place in header.places.items()}
    if got != {path: (named_arrays.DTYPES[dtype.name], shape) for path, (dtype, shape) in wanted.items()}:
        raise ValueError("the arrays and their description differ")
    made = {path: np.empty(shape, dtype) for path, (dtype, shape) in wanted.items()}  # as large as the file at most
    return RolloutState(
        num_envs=num_envs,
        num_steps=num_steps,
        autoreset=autoreset,
        seed=whole(where, "seed", about["seed"], 0),
        extras=extras,
        step=step,
        has_returns=has_returns,
        rollouts=whole(where, "rollouts", about["rollouts"], 0),
        steps_before=whole(where, "steps_before", about["steps_before"], 0),
        stream=_read_stream(about["stream"]),
        generator_on=about["generator_on"],
        nodes=nodes,
        was_over=made.pop(_WAS_OVER, None),
        generator=made.pop(_GENERATOR, None),
        arrays=made,
    )


def _nest(leaves: dict[str, Field]) -> dict[str, Node]:
    """Fields by name from fields by path: the opposite of ``leaves_of``."""
    nodes: dict[str, Any] = {}
    for path, field in leaves.items():
        *outer, last = path.split("/")
        inside: Any = nodes
        for key in outer:
            inside = inside.setdefault(key, {}) if isinstance(inside, dict) else None
        if not all((*outer, last)) or not isinstance(inside, dict) or last in inside:
            raise ValueError(f"field {path!r}: expected a name of its own")
        inside[last] = field
    return nodes


def _read_stream(state: dict[str, Any]) -> dict[str, Any]:
    np.random.default_rng(0).bit_generator.state = state  # refuses what is not one
    return state
