"""Sorting digits: "3142>" is to be answered by "1234". The reward is the share of places that are right."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...checks import whole
from ..agent import single_turn
from ..characters import Characters
from ..generators.sampling import Sampling
from ..items import Item
from .drawing import draw_items, share_right
from .task import Task

__all__ = ["make", "reward"]


def reward(item: Item, text: str) -> float:
    return share_right(text, item["answer"])


def make(*, digits: int = 4, count: int | None = None, held_out: int | None = None, seed: int = 0) -> Task:
    """Args:
    digits: How many are to be sorted.
    count: Items to train on; None for 4096, or all that there are.
    held_out: Items to evaluate on; None for 256, or all that there are.
    seed: Of the items.
    """
    whole("task 'sort'", "digits", digits, 2)

    def draw(random: np.random.Generator) -> dict[str, Any]:
        drawn = "".join(map(str, random.integers(10, size=digits)))
        return {"prompt": f"{drawn}>", "answer": "".join(sorted(drawn))}

    tokenizer = Characters("0123456789>")
    return Task(
        name="sort",
        items=draw_items(count, 4096, seed, draw, False),
        held_out=draw_items(held_out, 256, seed, draw, True),
        agent=single_turn(reward),
        tokenizer=tokenizer,
        vocabulary=tokenizer.size,
        context=2 * digits + 2,
        sampling=Sampling(max_tokens=digits + 1, stop_ids=(Characters.eos,)),
    )
