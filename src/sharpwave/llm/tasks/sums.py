"""Running sums modulo ten: "3729>" is to be answered by "3021". Lists have log-normal lengths, and answers are as long.

So the lengths of answers have a long tail, which is what asynchronous training is for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...checks import number, whole
from ..agent import single_turn
from ..characters import Characters
from ..generators.sampling import Sampling
from ..items import Item
from .drawing import draw_items, share_right
from .task import Task

__all__ = ["make", "reward"]


def reward(item: Item, text: str) -> float:
    """The share of places that are right."""
    return share_right(text, item["answer"])


def make(
    *,
    median: float = 64,
    sigma: float = 1.0,
    longest: int = 900,
    shortest: int = 4,
    count: int | None = None,
    held_out: int | None = None,
    seed: int = 0,
) -> Task:
    """Args:
    median: Of the lengths of lists.
    sigma: Of the logarithm of the lengths.
    longest: No list is longer.
    shortest: No list is shorter.
    count: Items to train on; None for 4096, or all that there are.
    held_out: Items to evaluate on; None for 256, or all that there are.
    seed: Of the items.
    """
    where = "task 'sums'"
    number(where, "sigma", sigma, 0, 10)
    whole(where, "longest", longest, whole(where, "shortest", shortest))
    number(where, "median", median, shortest, longest)

    def draw(random: np.random.Generator) -> dict[str, Any]:
        length = int(np.clip(round(median * np.exp(sigma * random.normal())), shortest, longest))
        drawn = random.integers(10, size=length)
        return {
            "prompt": "".join(map(str, drawn)) + ">",
            "answer": "".join(map(str, np.cumsum(drawn) % 10)),
        }

    tokenizer = Characters("0123456789>")
    return Task(
        name="sums",
        items=draw_items(count, 4096, seed, draw, False),
        held_out=draw_items(held_out, 256, seed, draw, True),
        agent=single_turn(reward),
        tokenizer=tokenizer,
        vocabulary=tokenizer.size,
        context=2 * longest + 2,
        sampling=Sampling(max_tokens=longest + 1, stop_ids=(Characters.eos,)),
    )
