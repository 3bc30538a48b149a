"""Stages of training as consumers of a Dataflow: reward, reference, values, proximal log-probabilities, train."""

from __future__ import annotations

from collections.abc import Callable

from ..buffers.sequence import SequenceBuffer
from ..sequences.dataflow import Consumer, Dataflow
from ..sequences.sample import SequenceSample
from .learner import Learner, StepReport
from .objectives import Objective, ValueFit
from .token_batch import IDS, MASK, REWARDS

__all__ = ["add_key", "train_once", "training_flow"]

# The stage that makes a key, for keys that a generator does not put.
_MAKERS = {"ref_logprobs": "reference", "values": "values", "prox_logprobs": "proximal"}


def training_flow(
    objective: Objective,
    *,
    batch_size: int,
    values: ValueFit | None = None,
    proximal: bool = False,
    reward: bool = False,
) -> Dataflow:
    """The consumers that an objective needs. The generator puts `input_ids`, `loss_mask`, `logprobs` and `versions`.

    | consumer | makes | is there |
    |---|---|---|
    | `reward` | `rewards` | if asked for; else the generator puts them |
    | `reference` | `ref_logprobs` | if the objective has `kl` above 0 |
    | `values` | `values` | for `PPO` |
    | `proximal` | `prox_logprobs` | if asked for; else the learner computes them at the start of a step |
    | `train` | | always |
    | `train_values` | | with `values=ValueFit(...)` |

    Args:
        objective: Of the learner behind `train`.
        batch_size: Data of a step.
        values: The objective of the value model.
        proximal: A stage for proximal log-probabilities, which must run with the weights that `train` starts from.
        reward: A stage for rewards.

    Example:
        >>> from sharpwave.llm.objectives import PPO
        >>> [consumer.name for consumer in training_flow(PPO(kl=0.1), batch_size=8, values=ValueFit())]
        ['reference', 'values', 'train', 'train_values']
    """
    # SFT learns from data that no policy made.
    inputs = {IDS, MASK, *objective.inputs} | ({"versions"} if "logprobs" in objective.inputs else set())
    if proximal and objective.has_proximal:
        inputs.add("prox_logprobs")
    consumers = [Consumer("reward", {IDS, MASK}, {REWARDS}, batch_size)] if reward else []
    made = [key for key in _MAKERS if key in inputs]
    consumers += [Consumer(_MAKERS[key], {IDS}, {key}, batch_size) for key in made]
    consumers.append(Consumer("train", inputs, batch_size=batch_size))
    if values is not None:
        consumers.append(Consumer("train_values", {IDS, MASK, "versions", *values.inputs}, batch_size=batch_size))
    return Dataflow(consumers)


async def add_key(
    buffer: SequenceBuffer,
    consumer: str,
    make: Callable[[SequenceSample], SequenceSample],
    *,
    timeout: float | None = None,
    owner: str | None = None,
) -> int:
    """Takes one batch of a consumer, amends it with the keys that `make` gives, and acknowledges it.

    `make` is a reward function, or `functools.partial(scorer.column, key="ref_logprobs")`. If it raises, the lease is
    given back. Returns how many data it amended.
    """
    async with await buffer.get_async(consumer, timeout=timeout, owner=owner) as lease:
        await lease.ack_async(make(lease.batch))
        return len(lease.batch)


async def train_once(
    buffer: SequenceBuffer,
    learner: Learner,
    consumer: str = "train",
    *,
    timeout: float | None = None,
    owner: str | None = None,
) -> StepReport:
    """Takes one batch of a trainer, trains on it, and acknowledges it. If the step raises, the lease is given back."""
    async with await buffer.get_async(consumer, timeout=timeout, owner=owner) as lease:
        return learner.step(lease.batch)
