"""The parts of a run, made from an `Experiment`: model, learner, reference, engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..checks import one_of, whole
from ..errors import SchemaError
from ..sequences.dataflow import Dataflow
from .agent_worker import AgentWorker, Gate
from .characters import Tokenizer
from .clock import Clock
from .episode import train_flow
from .experiment import Experiment
from .generators.engine import Engine
from .generators.mends import Mends
from .generators.protocol import Generator
from .keys import read_dataclass
from .learner import Learner, OptimizerConfig, is_short_of_memory
from .model.config import ModelConfig
from .model.folder import load_model
from .model.small import small_model
from .model.transformer import Transformer
from .model.value import ValueModel
from .objectives import GRPO, PPO, ValueFit
from .run_folder import RunFolder
from .run_learner import RunLearner
from .scorer import Scorer
from .tasks import Task
from .tokenizer import ChatTokenizer

__all__ = [
    "TASK_MENDS",
    "LearnerSettings",
    "beat_s_of",
    "make_engine",
    "make_flow",
    "make_learner",
    "make_model",
    "make_reference",
    "make_worker",
    "model_keys",
    "runs_children",
]

_BEAT_S = 5.0
_PROMPTS = 8  # of a task, to compare tokenizers by
TASK_MENDS = Mends("raise Task(context=)", "raise Task(vocabulary=) or give ids of the task's tokenizer")
"""The limits of a run's engines come from its task."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LearnerSettings:
    """The table `learner` of an experiment: what `GRPO` or `PPO`, `OptimizerConfig` and `Learner` take, side by side.

    Args:
        objective: "grpo", or "ppo" with a value model.
        method, clip, clip_high, cap, over_cap, level, entropy: Of the objective.
        kl: Weight of the KL divergence to the model at the beginning of the run. Above 0 the run has one more process,
            `reference`, which keeps that model.
        learning_rate, warmup_steps, max_grad_norm, weight_decay: Of the optimizer.
        minibatches, rows: Of the learner.
        row_tokens: Tokens of a packed row; None for the longest episode of the task, at least 256.
        device: Where the learner trains and generators generate: "cpu", "cuda", ...
        generator_dtype: Of generators and published weights: "float32", "bfloat16" or "float16"; None for bfloat16 on
            CUDA, else float32. The learner's own weights are float32.
    """

    objective: str = "grpo"
    method: str = "decoupled"
    clip: float = 0.2
    clip_high: float | None = None
    cap: float | None = 5.0
    over_cap: str = "mask"
    level: str = "token"
    entropy: float = 0.0
    kl: float = 0.0
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    weight_decay: float = 0.0
    minibatches: int = 1
    rows: int = 4
    row_tokens: int | None = None
    device: str = "cpu"
    generator_dtype: str | None = None

    def __post_init__(self) -> None:
        one_of("Experiment(), learner", "objective", self.objective, ("grpo", "ppo"))
        self.make_objective()
        self.optimizer  # noqa: B018 (its checks)
        whole("Experiment(), learner", "minibatches", self.minibatches)
        whole("Experiment(), learner", "rows", self.rows)
        check_device("Experiment(), learner", self.device)
        if self.generator_dtype is not None:
            one_of("Experiment(), learner", "generator_dtype", self.generator_dtype, tuple(_DTYPES))

    @property
    def published_dtype(self) -> torch.dtype:
        if self.generator_dtype is None:
            return torch.bfloat16 if torch.device(self.device).type == "cuda" else torch.float32
        return _DTYPES[self.generator_dtype]

    def make_objective(self) -> GRPO | PPO:
        names = ("method", "clip", "clip_high", "cap", "over_cap", "level", "entropy", "kl")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return GRPO(**given) if self.objective == "grpo" else PPO(**given)

    @property
    def optimizer(self) -> OptimizerConfig:
        names = ("learning_rate", "warmup_steps", "max_grad_norm", "weight_decay")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return OptimizerConfig(**given)

    @property
    def learners(self) -> tuple[str, ...]:
        """The names of a checkpoint's learners."""
        return ("policy",) if self.objective == "grpo" else ("policy", "values")

    def row_tokens_for(self, task: Task) -> int:
        """Raises:
        SchemaError: An episode of the task does not fit into a row.
        """
        row_tokens = max(256, task.context) if self.row_tokens is None else self.row_tokens
        if row_tokens < task.context:
            raise SchemaError(
                f"Experiment(), learner: row_tokens: expected at least {task.context}, the longest episode of the task "
                f"{task.name!r}, got {row_tokens}"
            )
        return row_tokens

    @classmethod
    def of(cls, experiment: Experiment) -> LearnerSettings:
        settings = read_dataclass(cls, experiment.learner, "Experiment(), learner")
        if settings.objective == "grpo" and experiment.group == 1:
            raise SchemaError(
                "Experiment(): group: expected at least 2, got 1: objective 'grpo' compares the answers to an item; "
                'raise group, or give learner.objective="ppo"'
            )
        return settings


def check_device(where: str, device: str, mend: str = 'give device="cpu"') -> None:
    """Raises:
    SchemaError: torch knows no such device, or it is not there: `mend` says what to do.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise SchemaError(f"{where}: device: expected cpu, cuda or cuda:1, got {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise SchemaError(f"{where}: device: {device!r} is not there: torch finds no GPU; {mend}")


def runs_children(experiment: Experiment) -> bool:
    """Whether the learner, the engines and the agents of a run in one process have child processes: on a GPU.

    There a step takes less time than a thread waits for an interpreter that others use.
    """
    return torch.device(LearnerSettings.of(experiment).device).type == "cuda"


def model_keys() -> list[str]:
    """The keys of an experiment's table `model`."""
    return ["path", *(name for name in ModelConfig.__dataclass_fields__ if name not in ("other", "rope"))]


def make_model(experiment: Experiment, task: Task) -> Transformer:
    """The model at the beginning of a run: of the folder `model.path`, or random weights of the experiment's seed.

    Raises:
        SchemaError: The model does not fit the task.
    """
    given = dict(experiment.model)
    path = given.pop("path", None)
    where = "Experiment(), model"
    if path is not None:
        if given:
            raise SchemaError(f"{where}: {sorted(given)[0]!r} is a size of a new model; leave it out with path")
        model = load_model(Path(path), dtype="float32")
        _check_tokens(where, Path(path), task)
    else:
        positions = max(512, task.context)
        sizes = {"vocab_size": task.vocabulary, "max_position_embeddings": positions, "initializer_range": 0.05}
        # A task's own tokenizer says by stop ids where an answer ends.
        try:
            model = small_model(seed=experiment.seed, **{"other": {}, **sizes, **given})
        except (MemoryError, RuntimeError) as error:
            if not is_short_of_memory(error):
                raise
            raise SchemaError(f"{where}: the memory is too small for it; lower {', '.join(given)}") from error
    if model.config.vocab_size < task.vocabulary:
        raise SchemaError(
            f"{where}: the model has {model.config.vocab_size} tokens, the task {task.name!r} needs {task.vocabulary}"
        )
    if model.config.max_context < task.context:
        raise SchemaError(
            f"{where}: max_position_embeddings: expected at least {task.context}, the longest episode of the task "
            f"{task.name!r}, got {model.config.max_context}"
        )
    return model


def _check_tokens(where: str, folder: Path, task: Task) -> None:
    """Raises SchemaError where the task's ids are of another tokenizer than the folder's: the run would train, and the
    model would read other text. A folder without tokenizer.json says nothing about that."""
    if not (folder / "tokenizer.json").is_file():
        return
    theirs, wrong = ChatTokenizer.read(folder), None
    for name in task.items.ids[:_PROMPTS]:
        prompt = task.items[name].get("prompt")
        if not isinstance(prompt, str):
            continue
        said = _text_of(theirs, task.tokenizer.encode(prompt))
        if "".join(prompt.split()) in "".join(said.split()):
            return
        wrong = f"{said[:40]!r} where the task says {prompt[:40]!r}"
    if wrong is not None:
        raise SchemaError(
            f"{where}: path: with the tokenizer of {folder} the model would read {wrong}: the task {task.name!r} has "
            "another tokenizer; give the task's function an argument tokenizer=, which gets the folder's, or choose "
            "another task"
        )


def _text_of(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    try:
        return tokenizer.decode(ids)
    except Exception:  # the library has no class for ids that it does not know
        return ""


def make_flow(experiment: Experiment) -> Dataflow:
    """The consumers of a run's samples."""
    return train_flow(experiment.batch, reference=LearnerSettings.of(experiment).kl > 0)


def make_reference(experiment: Experiment, task: Task) -> Scorer | None:
    """The model at the beginning of the run, for `learner.kl`; None where that is 0."""
    settings = LearnerSettings.of(experiment)
    if not settings.kl:
        return None
    model = make_model(experiment, task).to(settings.device).eval().requires_grad_(False)
    rows = settings.row_tokens_for(task)
    return Scorer(model, row_tokens=rows, rows=settings.rows, temperature=task.sampling.temperature)


def make_learner(experiment: Experiment, task: Task, folder: RunFolder) -> RunLearner:
    """The learner of a run; it starts from the weights of `make_model`, and publishes them with the files of the
    model's tokenizer."""
    settings = LearnerSettings.of(experiment)
    common: dict[str, Any] = {
        "optimizer": settings.optimizer,
        "minibatches": settings.minibatches,
        "rows": settings.rows,
        "row_tokens": settings.row_tokens_for(task),
        "seed": experiment.seed,
    }
    model = make_model(experiment, task).to(settings.device)
    values = None
    if settings.objective == "ppo":
        level: Literal["token", "sequence"] = "token" if settings.level == "token" else "sequence"
        values = Learner(ValueModel.like(model), ValueFit(level=level), **common)
    policy = Learner(model, settings.make_objective(), temperature=task.sampling.temperature, **common)
    weights = folder.weights(companions=experiment.model.get("path"))
    return RunLearner(policy, weights, folder.checkpoints(), values=values, dtype=settings.published_dtype)


def make_engine(experiment: Experiment, task: Task, model: Transformer, version: int, *, slots: int) -> Engine:
    """An engine over a model of its own: it writes new weights into it."""
    settings, seed = LearnerSettings.of(experiment), experiment.seed
    model = model.to(settings.device, settings.published_dtype).eval()
    # A GPU computes a thousand tokens of prompts in the time of a few.
    chunk = 1024 if model.device.type == "cuda" else 256
    return Engine(
        model, slots=slots, context=task.context, chunk=chunk, version=version, seed=seed,
        tokenizer=_EndText(task.tokenizer), mends=TASK_MENDS,
    )  # fmt: skip


class _EndText:
    """A task's tokenizer, as an engine asks for the text in which it looks for stop strings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids)


def beat_s_of(experiment: Experiment) -> float:
    """How often the owners of permits and leases say that they are alive: several times in `owner_timeout_s`."""
    limit_s = experiment.owner_timeout_s
    return _BEAT_S if limit_s is None else min(_BEAT_S, limit_s / 8)


def make_worker(
    experiment: Experiment, task: Task, name: str, controller: Gate, generator: Generator, clock: Clock
) -> AgentWorker:
    """The agents of a run, or a part of them."""
    return AgentWorker(
        name, controller, generator, task.agent,
        tokenizer=task.tokenizer, clock=clock, group=experiment.group, concurrent=experiment.concurrent,
        tries=experiment.tries, sampling=task.sampling, beat_s=beat_s_of(experiment),
    )  # fmt: skip
