"""How long the steps of a run take, by a cost model: the whole system on one shared device, in simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..agent import Generate
from ..agent_worker import AgentWorker
from ..controller import Controller
from ..episode import Episode
from ..generators.sampling import Sampling
from ..items import Item, Items
from ..rules import Rules
from ..training import follow, train
from .device import Device
from .loop import VirtualClock, simulate
from .parts import Costs, SimulatedGenerator, SimulatedLearner, SimulatedWeights, log_normal_lengths

__all__ = ["StepTimes", "simulate_steps"]

_PROMPT = (1, 2, 3)
_FOLLOW_S = 1e-4


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, and the staleness of the tokens that were trained on, in versions."""

    step_s: float
    mean_staleness: float
    max_staleness: int


def simulate_steps(
    *,
    batch: int,
    slots: int,
    max_staleness: int,
    steps: int = 40,
    warm_steps: int = 8,
    costs: Costs | None = None,
    length: Callable[[int], int] | None = None,
    seed: int = 0,
) -> StepTimes:
    """The mean time of a step behind the first `warm_steps`, with one answer an item.

    Args:
        batch: Answers of a step.
        slots: Answers that the generator makes at once.
        max_staleness: 0 is synchronous training.
        costs: Of decoding, training and swaps.
        length: The length of an answer, by its seed.

    Example:
        >>> options = {"batch": 16, "slots": 16, "steps": 12, "warm_steps": 4}
        >>> sync, overlapped = (simulate_steps(max_staleness=most, **options).step_s for most in (0, 4))
        >>> sync > 2 * overlapped
        True
    """
    used, lengths = Costs() if costs is None else costs, log_normal_lengths() if length is None else length

    async def main(clock: VirtualClock) -> StepTimes:
        device, weights = Device(), SimulatedWeights()
        items = Items([{"id": place} for place in range(2 * steps * batch + slots)])
        rules = Rules(batch, max_staleness, shuffle=False, seed=seed)
        controller = Controller(items, rules, clock)
        generator = SimulatedGenerator(device, slots=slots, costs=used, length=lengths)
        learner = SimulatedLearner(device, weights, used)
        worker = AgentWorker(
            "worker",
            controller,
            generator,
            _agent,
            tokenizer=_NoText(),
            clock=clock,
            group=1,
            concurrent=slots,
            sampling=Sampling(max_tokens=1 << 40),
        )
        lanes = [generator.run(), follow(weights, generator, clock=clock, poll_s=_FOLLOW_S), worker.run()]
        running = [asyncio.ensure_future(lane) for lane in lanes]
        await train(controller, learner, clock=clock, steps=steps)
        controller.close()
        for lane in running:
            lane.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        step_s = (learner.ends[-1] - learner.ends[warm_steps - 1]) / (steps - warm_steps)
        return StepTimes(step_s, float(np.mean(learner.staleness)), max(learner.staleness))

    return simulate(main)


async def _agent(item: Item, generate: Generate) -> Episode:
    episode = Episode(list(_PROMPT), reward=0.0)
    await generate(episode)
    return episode


class _NoText:
    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        return ""
