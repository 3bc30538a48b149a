"""Settings of shipped tasks for random weights on a CPU; `sharpwave train TASK` begins with them."""

from __future__ import annotations

from typing import Any

from ..errors import SchemaError
from .keys import nearest
from .tasks.task import TASKS

__all__ = ["preset"]

_SMALL: dict[str, Any] = {
    "steps": 400,
    "batch": 16,
    "group": 16,
    "max_staleness": 2,
    "concurrent": 16,
    "slots": 128,
    "save_every": 10,
}
_SORT: dict[str, Any] = {
    **_SMALL,
    "task_options": {"digits": 3, "count": 800, "held_out": 64},
    "learner": {"learning_rate": 2e-3, "entropy": 0.03, "row_tokens": 64, "rows": 64},
    "evaluation": {"every": 10, "concurrent": 64, "goal": 0.8},
}
_SUMS: dict[str, Any] = {
    **_SMALL,
    "task_options": {"median": 6, "shortest": 2, "longest": 30, "held_out": 64},
    "learner": {"learning_rate": 2e-3, "entropy": 0.01, "rows": 16},
}
_GUESS: dict[str, Any] = {
    **_SMALL,
    "task_options": {"highest": 20, "turns": 5, "count": 1200, "held_out": 64},
    "learner": {"learning_rate": 2e-3, "entropy": 0.01, "rows": 16},
    "evaluation": {"temperature": None},  # the likeliest guess for a range is one number; training draws
}
_OTHERS: dict[str, Any] = {"steps": 400, "learner": {"learning_rate": 1e-3, "entropy": 0.01}}
_PRESETS = {"sort": _SORT, "sums": _SUMS, "guess": _GUESS}


def preset(task: str) -> dict[str, Any]:
    """The settings of a task, as `Experiment.read` takes them.

    Raises:
        SchemaError: There is no such task. The message names the nearest one.
    """
    if task not in TASKS and ":" not in task:
        raise SchemaError(
            f"train: expected a file run.toml, or a task: {', '.join(TASKS)}, or module:function; got {task!r}"
            f"{nearest(task, TASKS)}"
        )
    return {"task": task, **_PRESETS.get(task, _OTHERS)}
