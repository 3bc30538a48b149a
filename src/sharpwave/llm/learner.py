"""`Learner`: an objective and an optimizer over batches of a SequenceBuffer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import number, whole
from ..errors import SchemaError
from ..sequences.sample import SequenceSample
from .captured_pass import CapturedPass
from .model.transformer import Transformer
from .model.value import ValueModel
from .objectives import Objective
from .scorer import Scorer
from .token_batch import IDS, MASK, TokenBatch
from .weights import Published, Weights

__all__ = ["Learner", "OptimizerConfig", "StepReport"]

Array = np.ndarray[Any, Any]
_NO_TOKENS = "no token to learn from: all of them are masked or too old"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate, which rises linearly over `warmup_steps` and may fall linearly to 0 behind them.

    Args:
        learning_rate: After the warm-up.
        warmup_steps: Steps of the learner until the rate is reached.
        decay_steps: Steps from the end of the warm-up until the rate is 0; None keeps it.
        betas, eps, weight_decay: Of AdamW.
        max_grad_norm: Gradients with a larger norm are scaled down to it; None for no bound.
    """

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay_steps: int | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0

    def __post_init__(self) -> None:
        where = "OptimizerConfig()"
        number(where, "learning_rate", self.learning_rate, 0, 1e3)
        whole(where, "warmup_steps", self.warmup_steps, 0)
        if self.decay_steps is not None:
            whole(where, "decay_steps", self.decay_steps)
        number(where, "eps", self.eps, 0, 1e3)
        number(where, "weight_decay", self.weight_decay, 0, 1e3)
        if self.max_grad_norm is not None:
            number(where, "max_grad_norm", self.max_grad_norm, 1e-9, 1e9)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, 1 - (step - self.warmup_steps) / self.decay_steps)


@dataclass(frozen=True)
class StepReport:
    """What a step did. `statistics` are means over learned tokens that are fresh, or maxima where a name says so."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    updates: int  # of the weights; fewer than `minibatches` where some were refused
    sequences: int
    tokens: int
    learned_tokens: int
    stale_tokens: int
    fill: float  # share of the computed places that held a token
    refusals: list[str] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One flat line of a log."""
        line = asdict(self)
        return {**line.pop("statistics"), **line}


class Learner:
    """Trains a model on leased batches.

    A step reads the batch, splits its sequences into `minibatches`, packs each into rows, and updates the weights once
    for each. Rows beyond one pass are accumulated: the update is that of one large batch. An update whose loss or
    gradient is not finite is refused: the weights stay, and the report says why.

    Args:
        model: A `Transformer`, or a `ValueModel` for the objective `ValueFit`. Its weights are trained in place, and
            should be float32: bfloat16 loses small updates.
        objective: `SFT`, `GRPO`, `PPO` or `ValueFit`.
        optimizer: Its settings.
        minibatches: Updates of a step.
        row_tokens, rows, temperature, head_tokens, autocast: As of `Scorer`.
        recompute_layers: Activations are computed again in the backward pass: less memory, about a third more time.
        compile: Layers and the head through `torch.compile`. None: on CUDA only.
        capture: Passes as CUDA graphs. None: on CUDA. It needs an objective that does not wait for the device, and
            keeps the gradients' memory between steps.
        seed: Of the order of sequences.

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> from sharpwave.llm.model import small_model
        >>> from sharpwave.llm.objectives import SFT
        >>> learner = Learner(small_model(), SFT(), row_tokens=16, rows=1)
        >>> data = {"input_ids": np.arange(5), "loss_mask": np.array([0, 1, 1, 1, 1], bool)}
        >>> learner.step(sw.SequenceSample(["a"], {"input_ids": [5], "loss_mask": [5]}, data)).learned_tokens
        4
    """

    def __init__(
        self,
        model: Transformer | ValueModel,
        objective: Objective,
        *,
        optimizer: OptimizerConfig | None = None,
        minibatches: int = 1,
        row_tokens: int = 2048,
        rows: int = 4,
        temperature: float = 1.0,
        head_tokens: int = 4096,
        autocast: bool | None = None,
        recompute_layers: bool = False,
        compile: bool | None = None,
        capture: bool | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(model, ValueModel) != objective.is_of_values:
            needed = "ValueModel" if objective.is_of_values else "Transformer"
            raise SchemaError(
                f"Learner(): model: {type(objective).__name__} trains a {needed}, got a {type(model).__name__}"
            )
        self.model, self.objective = model, objective
        self.config = optimizer or OptimizerConfig()
        self.minibatches = whole("Learner()", "minibatches", minibatches)
        self.scorer = Scorer(
            model, row_tokens=row_tokens, rows=rows, temperature=temperature, head_tokens=head_tokens, autocast=autocast
        )
        on_cuda = model.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), self.config.learning_rate, betas=self.config.betas, eps=self.config.eps,
            weight_decay=self.config.weight_decay, fused=on_cuda,
        )  # fmt: skip
        self.scorer.transformer.recomputes_layers = recompute_layers
        if on_cuda if compile is None else compile:
            self.scorer.compile()
        # Under dynamic scaling the longest position is read on the host.
        can_capture = on_cuda and self.scorer.transformer.config.rope.scaling != "dynamic"
        if capture and not can_capture:
            why = "the model's positions scale dynamically" if on_cuda else f"the model is on {model.device}"
            raise SchemaError(
                f"Learner(): capture=True needs a model on CUDA with fixed positions, but {why}; leave it out"
            )
        self._captured: CapturedPass | None = None
        if can_capture if capture is None else capture:
            self._captured = CapturedPass(self._backward, model.parameters())
        self.random = np.random.default_rng(seed)
        self.steps = 0

    def step(self, batch: SequenceSample) -> StepReport:
        """Trains on a batch.

        Raises:
            SchemaError: A key is missing or has other lengths than `input_ids`, a value is not finite, or a sequence is
                longer than a row. Nothing was changed. Or the memory is too small for a pass.
        """
        tokens = TokenBatch.read("step()", batch, self.objective.inputs, self.objective.optional)
        self._check_lens(tokens)
        with self._tell_short_memory("step()"):
            return self._step(tokens)

    def _step(self, tokens: TokenBatch) -> StepReport:
        columns = self.objective.prepare(tokens)
        trained = np.flatnonzero(np.bincount(tokens.sequence_of, tokens.learned, len(tokens.lens)) > 0)
        if self.objective.has_proximal and "proximal" not in columns and self.minibatches > 1:
            columns["proximal"] = self.scorer.flat(tokens.columns[IDS], tokens.lens)
        columns = {IDS: tokens.columns[IDS], **columns}
        rate = self.config.rate(self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        order = self.random.permutation(trained)
        updates = [self._update(tokens, columns, np.sort(part)) for part in self._parts(order)]
        self.steps += 1
        return self._report(tokens, rate, updates)

    def warm_up(self) -> None:
        """Compiles and captures what a step runs, so that the first one takes no longer than others. Weights stay."""
        data: dict[str, Array] = {IDS: np.zeros(2, np.int64), MASK: np.array([False, True])}
        data |= {name: np.zeros(2, np.float32) for name in self.objective.inputs}
        batch = SequenceSample(["warm-up"], {key: [2] for key in data}, data)
        tokens = TokenBatch.read("warm_up()", batch, self.objective.inputs)
        columns = {IDS: tokens.columns[IDS], **self.objective.prepare(tokens)}
        backward = self._backward if self._captured is None else self._captured
        with self._tell_short_memory("warm_up()"):
            if self.objective.has_proximal and self.minibatches > 1:
                columns["proximal"] = self.scorer.flat(tokens.columns[IDS], tokens.lens)
            columns["share"] = np.zeros(2, np.float32)
            for rows in self.scorer.passes(self.scorer.pack(tokens.lens), columns):
                backward(rows)
        self._clear_gradients()

    def publish(self, weights: Weights, version: int, *, dtype: torch.dtype | None = None) -> Published:
        """Publishes the model's weights as a version for generators, in a dtype of their own where one is given."""
        if not isinstance(self.model, Transformer):
            raise SchemaError("publish(): a ValueModel generates nothing; publish the policy's learner")
        return weights.publish(self.model, version, dtype=dtype)

    @contextlib.contextmanager
    def _tell_short_memory(self, where: str) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_short_of_memory(error):
                raise
            raise SchemaError(
                f"{where}: a pass of rows={self.scorer.rows} x row_tokens={self.scorer.row_tokens} tokens needs more "
                f"memory than {self.model.device} has; lower rows or row_tokens"
            ) from error

    def _check_lens(self, tokens: TokenBatch) -> None:
        if len(tokens.lens) and tokens.lens.max() > self.scorer.row_tokens:
            at = int(tokens.lens.argmax())
            raise SchemaError(
                f"step(): {tokens.names[at]!r} has {tokens.lens[at]} tokens, row_tokens="
                f"{self.scorer.row_tokens}; raise Learner(row_tokens=)"
            )

    def _parts(self, order: Array) -> Iterator[Array]:
        """So many minibatches; fewer where there are fewer sequences."""
        return (part for part in np.array_split(order, self.minibatches) if len(part))

    def _update(self, tokens: TokenBatch, columns: Mapping[str, Array], part: Array) -> dict[str, Any]:
        """One update of the weights, from the sequences of a minibatch."""
        share = _token_shares(tokens, part, self.objective.level)
        # Sequences without a fresh token count in the mean, but need no pass.
        part = part[np.bincount(tokens.sequence_of, tokens.fresh, len(tokens.lens))[part] > 0]
        if not len(part):
            return {"refusal": _NO_TOKENS}
        is_chosen = np.zeros(len(tokens.lens), bool)
        is_chosen[part] = True
        chosen = is_chosen[tokens.sequence_of]
        own = {name: column[chosen] for name, column in columns.items()}
        packing = self.scorer.pack(tokens.lens[part])
        self._clear_gradients()
        sums: dict[str, Tensor] = {}
        backward = self._backward if self._captured is None else self._captured
        for rows in self.scorer.passes(packing, {**own, "share": share[chosen]}):
            _collect(sums, backward(rows))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or math.inf)
        sums["grad_norm"] = norm.detach()
        told = dict(zip(sums, torch.stack([one.double() for one in sums.values()]).tolist(), strict=True))
        refusal = next(
            (f"{name} is {told[name]}" for name in ("loss", "grad_norm") if not math.isfinite(told[name])), None
        )
        if refusal is None:
            self.optimizer.step()
        self._clear_gradients()
        return {**told, "fill": packing.fill, "refusal": refusal}

    def _clear_gradients(self) -> None:
        """A captured pass adds to the gradients' memory, so that memory stays."""
        self.optimizer.zero_grad(set_to_none=self._captured is None)

    def _backward(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the gradient of one pass. Returns sums over its tokens, on the device."""
        scores = self.scorer.score(rows, entropy_learns=self.objective.entropy_learns)
        if self.objective.has_proximal and "proximal" not in rows:
            # The only update of the step: the policy at its start is this one.
            rows = {**rows, "proximal": scores.logprobs.detach()}
        each, said = self.objective.loss(scores, rows)
        share = rows["share"]
        # where(), because padding may have any value, and a product with 0 keeps infinity as NaN
        loss = torch.where(share > 0, each, 0.0).mul(share).sum()
        loss.backward()
        made = {"loss": loss.detach(), "share": share.sum()}
        for name, values in said.items():
            kept = torch.where(share > 0, values.detach(), 0.0)
            made[name] = kept.max() if name.endswith("_max") else (kept * share).sum()
        return made

    def _report(self, tokens: TokenBatch, rate: float, updates: list[dict[str, Any]]) -> StepReport:
        refusals = [update["refusal"] for update in updates if update["refusal"]] if updates else [_NO_TOKENS]
        count, updates = len(updates), [update for update in updates if "loss" in update]
        names = [name for name in (updates[0] if updates else {}) if name not in _OWN]
        return StepReport(
            step=self.steps,
            loss=_mean([update["loss"] for update in updates]),
            grad_norm=_mean([update["grad_norm"] for update in updates]),
            learning_rate=rate,
            updates=count - len(refusals) if count else 0,
            sequences=len(tokens.lens),
            tokens=int(tokens.lens.sum()),
            learned_tokens=int(tokens.learned.sum()),
            stale_tokens=int((tokens.learned & ~tokens.fresh).sum()),
            fill=_mean([update["fill"] for update in updates]),
            refusals=refusals,
            statistics={name: _statistic(name, updates) for name in names},
        )


def is_short_of_memory(error: BaseException) -> bool:
    """Whether NumPy or torch says so, on any device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


_OWN = ("loss", "share", "grad_norm", "fill", "refusal")


def _token_shares(tokens: TokenBatch, part: Array, level: str) -> Array:
    """How much each token counts in the loss of a minibatch.

    Shares of all learned tokens of the minibatch add up to 1. Tokens that are too old then get 0: the others do not
    count more because of them, so an update with few fresh tokens is a small one.
    """
    sequence = tokens.sequence_of
    counts = np.bincount(sequence, tokens.learned, len(tokens.lens))
    if level == "token":
        each = np.full(len(tokens.lens), 1 / max(1.0, counts[part].sum()))
    else:
        each = 1 / (np.maximum(counts, 1) * len(part))
    return np.where(tokens.fresh, each[sequence], 0).astype(np.float32)


def _collect(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    for name, value in more.items():
        if name not in sums:
            sums[name] = value
        else:
            sums[name] = torch.maximum(sums[name], value) if name.endswith("_max") else sums[name] + value


def _statistic(name: str, updates: list[dict[str, Any]]) -> float:
    if name.endswith("_max"):
        return max(float(update[name]) for update in updates)
    # Shares add up to less than 1 where tokens are too old.
    return _mean([update[name] / update["share"] for update in updates if update["share"] > 0])


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else 0.0
