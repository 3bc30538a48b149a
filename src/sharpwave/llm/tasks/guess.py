"""A guessing game of several turns: "3-12?" asks for a number of that range, a tool says "<" or ">", until it is found.

The reward is 1 for a hit at the first guess and falls evenly with every further guess; 0 where it is not found.
Held-out items are ranges, not numbers: the model would unlearn a number that is never right in training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...checks import whole
from ..agent import several_turns
from ..characters import Characters
from ..generators.sampling import Sampling
from ..items import Item
from .drawing import draw_items
from .task import Task

__all__ = ["make", "oracle"]

_END = "\n"
_LOWEST = 8  # with fewer numbers all ranges may lie on one side


def oracle(item: Item, text: str, turn: int) -> tuple[str, float | None]:
    """What the tool says to a guess: "<" where the secret is smaller, ">" where it is larger, "!" to what is no number.

    The model reads it in a line of its own.
    """
    said = text.strip()
    if said.isdigit() and len(said) < 20:
        guess = int(said)
        if guess == item["secret"]:
            return "", 1.0 - turn / item["turns"]
        return ("<" if item["secret"] < guess else ">") + _END, None
    return "!" + _END, None


def make(
    *, highest: int = 100, turns: int = 7, count: int | None = None, held_out: int | None = None, seed: int = 0
) -> Task:
    """Args:
    highest: Ranges are within 1 to this; at least 8, because a tenth of all ranges are held out.
    turns: Most guesses.
    count: Items to train on, each a range and a number in it; None for 2048, or all that there are.
    held_out: Items to evaluate on; None for 64, or all that there are.
    seed: Of the items.
    """
    whole("task 'guess'", "highest", highest, _LOWEST, 10**6)
    whole("task 'guess'", "turns", turns)

    def draw(random: np.random.Generator) -> dict[str, Any]:
        low, high = sorted(int(one) + 1 for one in random.choice(highest, 2, replace=False))
        return {"prompt": f"{low}-{high}?{_END}", "secret": int(random.integers(low, high + 1)), "turns": turns}

    tokenizer = Characters("0123456789-?<>!\n")
    answer = len(str(highest)) + 1
    return Task(
        name="guess",
        items=draw_items(count, 2048, seed, draw, False),
        held_out=draw_items(held_out, 64, seed, draw, True),
        agent=several_turns(oracle, turns=turns),
        tokenizer=tokenizer,
        vocabulary=tokenizer.size,
        context=2 * answer + 2 + turns * (answer + 2),
        sampling=Sampling(max_tokens=answer, stop_ids=(Characters.eos, tokenizer.encode(_END)[0])),
    )
