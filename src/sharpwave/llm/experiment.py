"""`Experiment`: what a run does, as one dataclass or one TOML file."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checks import number, whole
from ..errors import SchemaError, StorageError
from .generators.sampling import Sampling
from .keys import check_keys, read_dataclass
from .rules import Rules
from .tasks import Task, load_task, takes_tokenizer
from .tokenizer import ChatTokenizer

__all__ = ["EvaluationSettings", "Experiment"]


@dataclass(frozen=True)
class EvaluationSettings:
    """Args:
    every: Versions between two evaluations; 0 for none.
    concurrent: Episodes at once.
    goal: The run ends when held-out items have this mean reward; None leaves the end to steps and epochs.
    temperature: Of its answers; 0 takes the likeliest tokens, None is that of training.
    """

    every: int = 10
    concurrent: int = 32
    goal: float | None = None
    temperature: float | None = 0.0

    def __post_init__(self) -> None:
        if self.temperature is not None:
            number("Experiment(), evaluation", "temperature", self.temperature, 0, 1e6)
        whole("Experiment(), evaluation", "every", self.every, 0)
        whole("Experiment(), evaluation", "concurrent", self.concurrent)
        if self.goal is not None:
            number("Experiment(), evaluation", "goal", self.goal, -1e9, 1e9)
            if not self.every:
                raise SchemaError("Experiment(), evaluation: goal needs evaluations; give every at least 1")


@dataclass(frozen=True)
class Experiment:
    """All settings of a run. Those of `Rules` have the same names and meanings there.

    Args:
        task: Its name: "sort", "sums", "guess" or "math"; or "module:function" of your own.
        task_options: Arguments of the task, for instance `digits`.
        steps: Training steps, at most; None leaves the end to `epochs`.
        group: Answers to each item.
        agent_workers: In how many workers agents run. On a GPU, and with `--processes`, each is a process.
        concurrent: Items that each of them works on at once.
        tries: How often an episode may fail before its item is rejected.
        generators: Processes that generate.
        slots: Answers that each of them makes at once.
        save_every: Steps between two checkpoints.
        sampling: Changes of the task's own sampling.
        evaluation: How held-out items are scored.
        learner: Settings of the learner and its objective.
        model: A Hugging Face folder (`path`), or sizes of a new one.

    Raises:
        SchemaError: A value makes no sense; the message names the key.

    Example:
        >>> Experiment(task="sort", steps=100, max_staleness=0).rules.limit
        32
    """

    task: str = "sort"
    task_options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    batch: int = 32
    group: int = 8
    max_staleness: int = 4
    stale: str = "mask"
    seed: int = 0
    shuffle: bool = True
    skip_no_signal: bool = True
    max_losses: int = 10
    max_running: int | None = None
    owner_timeout_s: float | None = 60.0
    watchdog_s: float | None = 600.0
    agent_workers: int = 1
    concurrent: int = 32
    tries: int = 3
    generators: int = 1
    slots: int = 64
    save_every: int = 50
    sampling: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    learner: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = "Experiment()"
        inner = ("sampling", "learner", "model")  # those that stay dicts
        check_keys({name: getattr(self, name) for name in inner}, _tables(), where)
        for name in ("group", "agent_workers", "concurrent", "tries", "generators", "slots", "save_every"):
            whole(where, name, getattr(self, name))
        if self.steps is not None:
            whole(where, "steps", self.steps)
        if self.steps is None and self.epochs is None:
            raise SchemaError(f"{where}: the run would never end; give steps or epochs")
        # The watchdog may not speak before a dead owner's items had time to come again.
        if self.owner_timeout_s is not None and self.watchdog_s is not None:
            least = number(where, "owner_timeout_s", self.owner_timeout_s, 1e-3, 1e9)
            if number(where, "watchdog_s", self.watchdog_s, -1e9, 1e9) < least:
                raise SchemaError(
                    f"{where}: watchdog_s: expected a number, {least:g} to 1e+09, got {self.watchdog_s}; it has to be "
                    "at least owner_timeout_s: raise it, or lower owner_timeout_s"
                )
        try:
            Sampling.from_dict(self.sampling)
            _ = self.rules
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from None

    @property
    def rules(self) -> Rules:
        """What the controller decides by."""
        return Rules(**{one.name: getattr(self, one.name) for one in dataclasses.fields(Rules)})

    def load_task(self) -> Task:
        """The task, with the experiment's sampling and the tokenizer of the model's folder.

        Raises:
            SchemaError: The task does not exist or lacks such options, or sizes do not fit it.
            StorageError: The task takes a tokenizer, and the model's folder has none.
        """
        options = {"seed": self.seed, **self.task_options}
        path = self.model.get("path")
        if path is not None and "tokenizer" not in options and takes_tokenizer(self.task):
            options["tokenizer"] = ChatTokenizer.read(path)
        task = load_task(self.task, **options)
        if self.epochs is not None and self.batch > len(task.items) * self.epochs:
            raise SchemaError(
                f"Experiment(): batch: expected at most {len(task.items) * self.epochs}, the items of all epochs, got "
                f"{self.batch}; lower batch or raise epochs"
            )
        sampling = dataclasses.replace(task.sampling, **self.sampling)
        if sampling.max_tokens >= task.context:
            raise SchemaError(
                f"Experiment(), sampling: max_tokens: expected less than {task.context}, the tokens of the longest "
                f"episode of task {task.name!r}, prompt and answers together; got {sampling.max_tokens}"
            )
        if not sampling.temperature:
            raise SchemaError(
                "Experiment(), sampling: temperature: expected more than 0, got 0: training needs answers that differ; "
                "evaluation.temperature=0 scores the likeliest ones"
            )
        return dataclasses.replace(task, sampling=sampling)

    @classmethod
    def read(cls, source: str | Path | Mapping[str, Any], changes: Iterable[str] = ()) -> Experiment:
        """From a TOML file or a dict.

        Args:
            changes: Settings on top of it, as "key=value". A dot leads into a table: "evaluation.every=5". A value is
                read as TOML, and as text where it is none. "none" stands for None, also in a file.

        Raises:
            SchemaError: A key is unknown, or a value is of another kind. The message names the nearest known key.
            StorageError: The file cannot be read.
        """
        where = "Experiment()" if isinstance(source, Mapping) else str(source)
        given = dict(source) if isinstance(source, Mapping) else _read_file(Path(source))
        for change in changes:
            key, sign, value = change.partition("=")
            if not sign or not key.strip():
                raise SchemaError(f"{where}: expected key=value, got {change!r}")
            _set(given, key.strip().split("."), _value(value.strip()), where)
        check_keys(given, _tables(), where)  # of all tables, before any value is looked at
        return read_dataclass(cls, given, where)

    def to_json(self) -> dict[str, Any]:
        """What `read` takes."""
        return dataclasses.asdict(self)


def _tables() -> dict[str, list[str]]:
    """The keys of an experiment's tables. Those of `task_options` are the task's."""
    from .parts import LearnerSettings, model_keys  # parts are made of experiments

    kinds: dict[str, Any] = {
        "": Experiment, "evaluation": EvaluationSettings, "learner": LearnerSettings, "sampling": Sampling,
    }  # fmt: skip
    names = {table: [one.name for one in dataclasses.fields(kind)] for table, kind in kinds.items()}
    return {**names, "model": model_keys()}


def _toml() -> Any:
    name = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("Python 3.10 has no reader of TOML; pip install tomli, or use Python 3.11") from error


def _read_file(path: Path) -> dict[str, Any]:
    toml = _toml()
    try:
        found: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SchemaError(f"{path}: expected TOML: {error}") from error
    return found


def _value(text: str) -> Any:
    if text in ("none", "None"):
        return None
    try:
        return _toml().loads(f"value = {text}")["value"]
    except ValueError:
        return text


def _set(given: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    for name in path[:-1]:
        inner = given.get(name, {})
        if not isinstance(inner, Mapping):
            raise SchemaError(f"{where}: {name}: expected a table, got {inner!r}")
        given[name] = dict(inner)
        given = given[name]
    given[path[-1]] = value
