"""`Task`: items, an agent with exact rewards, and what a model needs for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...checks import told, whole
from ...errors import SchemaError
from ..agent import Agent, describe_error
from ..characters import Tokenizer, to_tokenizer
from ..generators.sampling import Sampling
from ..items import Items
from ..keys import nearest

__all__ = ["TASKS", "Task", "load_task", "takes_tokenizer"]


@dataclass(frozen=True)
class Task:
    """What an experiment trains on.

    Attributes:
        items: To train on.
        held_out: To evaluate on; none of them is among `items`.
        agent: From an item to an episode with a reward, 1 for a perfect one.
        tokenizer: Its ids are those that the model reads. Of one with a chat template, texts are encoded as they stand:
            special tokens are written out in them. A function with an argument `tokenizer` is given that of the model's
            folder, a `ChatTokenizer`, where a run has `model.path`.
        vocabulary: Tokens that the tokenizer has.
        context: Tokens that the longest episode has.
        sampling: Of answers.

    Raises:
        SchemaError: A value is of another type.
    """

    name: str
    items: Items
    held_out: Items
    agent: Agent
    tokenizer: Tokenizer
    vocabulary: int
    context: int
    sampling: Sampling

    def __post_init__(self) -> None:
        where = f"Task(), {self.name!r}"
        for name, value in (("items", self.items), ("held_out", self.held_out)):
            if not isinstance(value, Items):
                raise SchemaError(f"{where}: {name}: expected Items, got {told(value)}; give Items([...])")
        if not callable(self.agent):
            raise SchemaError(f"{where}: agent: expected an async function of (item, generate), got {told(self.agent)}")
        if hasattr(self.tokenizer, "apply_chat_template"):
            object.__setattr__(self, "tokenizer", to_tokenizer(self.tokenizer))
        whole(where, "vocabulary", self.vocabulary)
        whole(where, "context", self.context)
        if not isinstance(self.sampling, Sampling):
            raise SchemaError(f"{where}: sampling: expected a Sampling, got {told(self.sampling)}")


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
    arguments = inspect.signature(make).parameters
    kinds = {one.kind for one in arguments.values()}
    known = [key for key, one in arguments.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for key in options if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if key in known:
            continue
        if key == "seed":  # every run gives it
            raise SchemaError(f"task {name!r}: the function has no argument 'seed'; give it one: seed=0")
        raise SchemaError(f"task {name!r}: unknown key {key!r}{nearest(key, known)}; it has {', '.join(known)}")
    try:
        made: Any = make(**options)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(f"task {name!r} cannot be loaded: {describe_error(error)}") from error
    if not isinstance(made, Task):
        raise SchemaError(f"task {name!r}: expected a function that returns a Task, got {told(made)}")
    return made


def takes_tokenizer(name: str) -> bool:
    """Whether the function of a task has an argument `tokenizer`.

    Raises:
        SchemaError: There is no such task.
    """
    return "tokenizer" in inspect.signature(_maker(name)).parameters


def _maker(name: str) -> Callable[..., Task]:
    module, sign, function = name.partition(":")
    if name in TASKS:
        module, function = f"{__package__}.{TASKS[name]}", "make"
    elif not sign:
        known = ", ".join(TASKS)
        raise SchemaError(f"task: expected one of {known}, or module:function, got {name!r}{nearest(name, TASKS)}")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        is_own = error.name is not None and f"{module}.".startswith(f"{error.name}.")
        hint = "; is its folder in PYTHONPATH?" if is_own else f" (imported by {module})"
        raise SchemaError(f"task {name!r}: {error}{hint}") from error
    except Exception as error:
        raise SchemaError(f"task {name!r}: {module} cannot be imported: {describe_error(error)}") from error
    made: Any = getattr(found, function, None)
    if not callable(made):
        callables = [key for key, value in vars(found).items() if callable(value)]
        raise SchemaError(f"task {name!r}: {module} has no function {function!r}{nearest(function, callables)}")
    return made  # type: ignore[no-any-return]
