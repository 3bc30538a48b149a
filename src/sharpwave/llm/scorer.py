"""`Scorer`: what a model says about the tokens of a batch, computed in packed rows of one fixed shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import number, whole
from ..errors import SchemaError
from ..sequences.sample import SequenceSample
from .model.transformer import Transformer
from .model.value import ValueModel
from .objectives import Scores
from .packing import Packing

__all__ = ["Scorer"]

Array = np.ndarray[Any, Any]


class Scorer:
    """Log-probabilities of a language model, or values of a value model, for every token of a batch.

    Every pass through the model has the same shape, [rows, row_tokens]: nothing is compiled or captured again, and
    the memory that a pass takes is known from the first one.

    Args:
        model: A `Transformer` or a `ValueModel`.
        row_tokens: Tokens of a row. No sequence may be longer.
        rows: Rows of a pass.
        temperature: Logits are divided by it, as the generator did. Filters (top-k, top-p) are not repeated here.
        head_tokens: Logits are computed for so many tokens at a time. In training they are computed again in the
            backward pass, so the logits of all tokens are never in memory together.
        autocast: Matrix products in bfloat16. None: on CUDA devices that have it.

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> from sharpwave.llm.model import small_model
        >>> batch = sw.SequenceSample(["a"], {"input_ids": [[3, 2]]}, {"input_ids": np.arange(5)})
        >>> Scorer(small_model(), row_tokens=8, rows=1).column(batch, "ref_logprobs").seqlens["ref_logprobs"]
        [[3, 2]]
    """

    def __init__(
        self,
        model: Transformer | ValueModel,
        *,
        row_tokens: int = 2048,
        rows: int = 4,
        temperature: float = 1.0,
        head_tokens: int = 4096,
        autocast: bool | None = None,
    ) -> None:
        self.model = model
        self.row_tokens = whole("Scorer()", "row_tokens", row_tokens, 2)
        self.rows = whole("Scorer()", "rows", rows)
        self.temperature = number("Scorer()", "temperature", temperature, 1e-6, 1e6)
        self.head_tokens = whole("Scorer()", "head_tokens", head_tokens)
        has_bfloat16 = model.device.type == "cuda" and torch.cuda.is_bf16_supported()
        self.autocast = has_bfloat16 if autocast is None else autocast
        most = self.transformer.config.max_position_embeddings
        if row_tokens > most and self.transformer.config.rope.scaling == "dynamic":
            raise SchemaError(
                f"Scorer(): row_tokens={row_tokens}, but the model's positions depend on the longest one "
                f"above {most} (dynamic scaling); lower row_tokens="
            )
        self._logprobs = _logprobs
        if model.device.type == "cuda":
            self.transformer.packed_attention = "flex"

    @property
    def transformer(self) -> Transformer:
        return self.model.transformer if isinstance(self.model, ValueModel) else self.model

    def compile(self) -> None:
        """Compiles the layers, each for itself, and the head: their shapes never change."""
        for layer in self.transformer.model.layers:
            layer.compile()
        self._logprobs = torch.compile(_logprobs, dynamic=False)

    def pack(self, lens: Array) -> Packing:
        return Packing.of(lens, row_tokens=self.row_tokens, multiple=self.rows)

    def passes(self, packing: Packing, columns: Mapping[str, Array]) -> Iterator[dict[str, Tensor]]:
        """The columns in rows on the model's device, as many rows at a time as a pass takes."""
        packed = {name: packing.place(column) for name, column in columns.items()}
        packed["segments"], packed["positions"] = packing.segments, packing.positions
        # All of a batch at once: a copy from memory that is not pinned waits for the pass before it.
        sent = {name: torch.from_numpy(rows).to(self.model.device, non_blocking=True) for name, rows in packed.items()}
        for first in range(0, packing.rows, self.rows):
            yield {name: rows[first : first + self.rows] for name, rows in sent.items()}

    def score(self, rows: Mapping[str, Tensor], *, entropy_learns: bool = False) -> Scores:
        """Scores of `input_ids` in rows. The first token of each sequence, and padding, has 0.

        Args:
            rows: `input_ids`, `segments` and `positions`, each [rows, row_tokens].
            entropy_learns: Whether the gradient flows through the entropy.
        """
        ids, positions = rows["input_ids"].long(), rows["positions"].long()
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.transformer.hidden(ids, rows["segments"], positions)
            # What is said behind token t is about token t + 1.
            if isinstance(self.model, ValueModel):
                values = _later(self.model.values(hidden).float(), positions)
                return Scores(values, torch.zeros_like(values), values)
            flat, wanted = hidden.flatten(0, 1), ids.roll(-1, 1).flatten()
            pieces = [
                self._head(flat[at : at + self.head_tokens], wanted[at : at + self.head_tokens], entropy_learns)
                for at in range(0, len(flat), self.head_tokens)
            ]
        logprobs, entropy = (torch.cat(parts).view(ids.shape) for parts in zip(*pieces, strict=True))
        return Scores(_later(logprobs, positions), _later(entropy, positions))

    def _head(self, hidden: Tensor, wanted: Tensor, entropy_learns: bool) -> tuple[Tensor, Tensor]:
        assert isinstance(self.model, Transformer)
        given = (self.model, hidden, wanted, self.temperature, entropy_learns)
        if torch.is_grad_enabled() and hidden.requires_grad:
            return checkpoint(self._logprobs, *given, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._logprobs(*given)

    @torch.no_grad()
    def flat(self, ids: Array, lens: Array) -> Array:
        """The log-probability (or value) of each token of flat sequences."""
        packing = self.pack(lens)
        made = [self.score(rows) for rows in self.passes(packing, {"input_ids": ids})]
        if not made:
            return np.zeros(0, np.float32)
        packed = torch.cat([scores.logprobs for scores in made]).cpu().numpy()
        return packing.take(packed).astype(np.float32)

    def column(self, batch: SequenceSample, key: str) -> SequenceSample:
        """The scores of a leased batch as a sample with one key, to amend the batch with."""
        lens = batch.seqlens["input_ids"]
        ids = batch["input_ids"]
        ids = ids.cpu().numpy() if hasattr(ids, "cpu") else np.asarray(ids)
        flat = self.flat(ids, np.array([length for row in lens for length in row], np.int64))
        return SequenceSample(batch.ids, {key: lens}, {key: flat})


def _later(made: Tensor, positions: Tensor) -> Tensor:
    """Each value one token later; 0 at the first token of each sequence."""
    return torch.where(positions > 0, F.pad(made, (1, 0))[:, :-1], 0.0)


def _logprobs(
    model: Transformer, hidden: Tensor, wanted: Tensor, temperature: float, entropy_learns: bool
) -> tuple[Tensor, Tensor]:
    logits = model.logits(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, wanted[:, None])[:, 0] - total
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_learns):
        entropy = total - (logits.softmax(-1) * logits).sum(-1)
    return chosen, entropy
