"""Tasks with exact rewards that need no download: sorting, running sums, a guessing game, word problems."""

from .task import TASKS, Task, load_task, takes_tokenizer

__all__ = ["TASKS", "Task", "load_task", "takes_tokenizer"]
