"""A guessing game of several turns: the model names a number, a tool says "<" or ">", until it is found.

The reward is 1 for a hit at the first guess and falls evenly with every further guess; 0 where it is not found.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from ...checks import whole
from ...errors import SchemaError
from ..agent import several_turns
from ..characters import Characters
from ..generators.sampling import Sampling
from ..items import Item, Items
from .task import Task

__all__ = ["make", "oracle"]

_END = "\n"


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


def make(*, highest: int = 100, turns: int = 7, count: int | None = None, held_out: int = 8, seed: int = 0) -> Task:
    """Args:
    highest: Secrets are 1 to this.
    turns: Most guesses.
    count: Items to train on; None for all that are not held out.
    held_out: Items to evaluate on.
    seed: Of the items.
    """
    where = "task 'guess'"
    whole(where, "highest", highest, 2, 10**6)
    whole(where, "turns", turns)
    # Which secrets are held out does not depend on the seed.
    secrets = sorted(range(1, highest + 1), key=lambda secret: zlib.crc32(str(secret).encode()))
    kept, rest = secrets[: whole(where, "held_out", held_out, 1, highest - 1)], secrets[held_out:]
    chosen = np.random.default_rng(seed).permutation(rest)[: None if count is None else whole(where, "count", count)]
    if count is not None and count > len(rest):
        raise SchemaError(
            f"{where}: count: expected at most {len(rest)}, the secrets that are not held out, got {count}"
        )
    prompt = f"{highest}?{_END}"

    def items(numbers: Iterable[int]) -> Items:
        return Items([{"id": f"{one}", "prompt": prompt, "secret": int(one), "turns": turns} for one in numbers])

    tokenizer = Characters("0123456789?<>!\n")
    answer = len(str(highest)) + 1
    return Task(
        name="guess",
        items=items(chosen),
        held_out=items(kept),
        agent=several_turns(oracle, turns=turns),
        tokenizer=tokenizer,
        vocabulary=tokenizer.size,
        context=len(prompt) + turns * (answer + 2),
        sampling=Sampling(max_tokens=answer, stop_ids=(Characters.eos, tokenizer.encode(_END)[0])),
    )
