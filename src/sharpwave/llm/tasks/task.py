"""`Task`: items, an agent with exact rewards, and what a model needs for them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...checks import told
from ...errors import SchemaError
from ..agent import Agent
from ..characters import Tokenizer
from ..generators.sampling import Sampling
from ..items import Items
from ..keys import nearest

__all__ = ["TASKS", "Task", "load_task"]


@dataclass(frozen=True)
class Task:
    """What an experiment trains on.

    Attributes:
        items: To train on.
        held_out: To evaluate on; none of them is among `items`.
        agent: From an item to an episode with a reward, 1 for a perfect one.
        tokenizer: Of a model that is made for this task; a model of your own brings its own.
        vocabulary: Tokens that the tokenizer has.
        context: Tokens that the longest episode has.
        sampling: Of answers.
    """

    name: str
    items: Items
    held_out: Items
    agent: Agent
    tokenizer: Tokenizer
    vocabulary: int
    context: int
    sampling: Sampling


TASKS = {"sort": "sort", "sums": "sums", "guess": "guess", "math": "word_problems"}
"""Names of tasks, and the modules in which `make` makes them."""


def load_task(name: str, **options: Any) -> Task:
    """A task by its name.

    Args:
        name: One of `TASKS`, or "module:function" of your own: a function that returns a `Task`.
        options: Arguments of the task: see the function `make` of its module.

    Raises:
        SchemaError: There is no such task, or it has no such option: the message names the nearest one. Or the
            function raised, or returned something else.
    """
    make = _maker(name)
    known = list(make.__code__.co_varnames[: make.__code__.co_argcount + make.__code__.co_kwonlyargcount])
    for key in options:
        if key not in known:
            raise SchemaError(f"task {name!r}: unknown key {key!r}{nearest(key, known)}; it has {', '.join(known)}")
    try:
        made: Any = make(**options)
    except SchemaError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        raise SchemaError(f"task {name!r} cannot be loaded: {type(error).__name__}: {error} ({place})") from error
    if not isinstance(made, Task):
        raise SchemaError(f"task {name!r}: expected a function that returns a Task, got {told(made)}")
    return made


def _maker(name: str) -> Callable[..., Task]:
    module, sign, function = name.partition(":")
    if name in TASKS:
        module, function = f"{__package__}.{TASKS[name]}", "make"
    elif not sign:
        known = ", ".join(TASKS)
        raise SchemaError(f"task: expected one of {known}, or module:function, got {name!r}{nearest(name, TASKS)}")
    try:
        made: Callable[..., Task] = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SchemaError(f"task {name!r}: {error}; is its folder in PYTHONPATH?") from error
    return made
