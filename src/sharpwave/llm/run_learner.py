"""`RunLearner`: learners as a run drives them: train, publish, save, resume."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..errors import SchemaError
from ..sequences.sample import SequenceSample
from .checkpoints import Checkpoints
from .learner import Learner
from .weights import Weights

__all__ = ["RunLearner"]


class _Cut(Protocol):
    """The controller's part of a checkpoint."""

    @property
    def mark(self) -> str: ...
    @property
    def step(self) -> int: ...
    def to_json(self) -> dict[str, Any]: ...


class RunLearner:
    """A policy, the folder its versions go to, and its checkpoints.

    The coroutines work in a thread, so that they do not block the event loop; `train_now`, `publish_now` and `save_now`
    are the same for a process that has no event loop.

    Args:
        policy: Its weights are published.
        weights: Where to.
        checkpoints: Where `save` writes; None saves nothing.
        values: The learner of PPO's value model, which trains on the same batches and is saved with the policy.
        dtype: Of published weights; None for the policy's own.

    Attributes:
        said: What `resume` has found: the cut of a checkpoint as JSON, or None.
    """

    def __init__(
        self,
        policy: Learner,
        weights: Weights,
        checkpoints: Checkpoints | None = None,
        *,
        values: Learner | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.policy, self.values, self.weights, self.checkpoints = policy, values, weights, checkpoints
        self.dtype, self.said = dtype, None
        self.learners = {"policy": policy} if values is None else {"policy": policy, "values": values}

    def warm_up(self) -> None:
        """Compiles what steps run, before others wait for one."""
        for learner in self.learners.values():
            learner.warm_up()

    async def train(self, batch: SequenceSample) -> Mapping[str, float]:
        """One step on a batch. With a value model and without the key `values`, it computes them first.

        Returns:
            Numbers for the log. `refused` counts updates that were not made, because they were not finite.
        """
        return await asyncio.to_thread(self.train_now, batch)

    async def publish(self) -> int:
        """Publishes the policy as the next version, above every earlier one. Returns the version."""
        return await asyncio.to_thread(self.publish_now)

    async def save(self, cut: _Cut) -> None:
        """Writes a checkpoint with the controller's cut, which was made after the last step and before the next."""
        await asyncio.to_thread(self.save_now, cut)

    def train_now(self, batch: SequenceSample) -> dict[str, float]:
        told = {}
        if self.values is not None:
            if "values" not in batch:
                batch = batch.update(self.values.scorer.column(batch, "values"))
            made = self.values.step(batch)
            told = {f"values_{name}": value for name, value in made.statistics.items()} | {"values_loss": made.loss}
        report = self.policy.step(batch)
        line = {**report.to_json(), **told, "refused": len(report.refusals)}
        numbers = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        return {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}

    def publish_now(self) -> int:
        latest = self.weights.latest()
        version = 0 if latest is None else latest.version + 1
        return self.policy.publish(self.weights, version, dtype=self.dtype).version

    def save_now(self, cut: _Cut) -> None:
        if self.checkpoints is None:
            raise SchemaError("save(): the learner has no folder for checkpoints; give RunLearner(checkpoints=)")
        self.checkpoints.save(self.learners, step=cut.step, mark=cut.mark, position=cut.to_json())

    def resume(self) -> Any:
        """Loads the newest checkpoint. Returns the cut in it as JSON, or None where there is no checkpoint."""
        found = None if self.checkpoints is None else self.checkpoints.latest()
        if found is None:
            return None
        found.load(self.learners)
        self.said = found.position
        return self.said
