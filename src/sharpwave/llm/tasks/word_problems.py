"""Math word problems in GSM8K's format, with an answer checker.

An item has a `question` and an `answer` that ends with "#### 42". Problems are made from templates, or read from a
JSONL file of that format. The reward is 1 where the last number of the model's answer is right, else 0. A model whose
folder has a chat template is asked in its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ...checks import whole
from ...errors import SchemaError
from ..agent import single_turn
from ..characters import to_tokenizer
from ..generators.sampling import Sampling
from ..items import Item, Items
from ..tokenizer import ChatTokenizer
from .drawing import draw_items
from .task import Task

__all__ = ["final_number", "make", "reward"]

_NUMBER = re.compile(r"-?\s?\$?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?|-?\.\d+")
_MARK = "####"
_MOST_DIGITS = 60
_NAMES = ("Ada", "Ben", "Chloe", "Dev", "Elif", "Femi")
_THINGS = ("apples", "books", "coins", "stamps", "shells")
_TEMPLATES: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?", "{a} + {b}", lambda a, b: a + b),
    ("{name} has {ab} {thing} and gives {b} away. How many {thing} are left?", "{ab} - {b}", lambda a, b: a),
    ("{name} fills {a} boxes with {b} {thing} each. How many {thing} is that?", "{a} * {b}", lambda a, b: a * b),
    ("{name} shares {axb} {thing} among {b} friends. How many does each get?", "{axb} / {b}", lambda a, b: a),
)


def final_number(text: str) -> Fraction | None:
    """The number that a text ends up with: behind "####", in the last \\boxed{}, or the last one; None for none.

    Example:
        >>> final_number("So it is 1,200 dollars."), final_number("3 + 4 = 7 #### 7"), final_number("no idea")
        (Fraction(1200, 1), Fraction(7, 1), None)
    """
    boxed = re.findall(r"\\boxed\s*\{([^{}]*)\}", text)
    part = text.rpartition(_MARK)[2] if _MARK in text else boxed[-1] if boxed else text
    found = _NUMBER.findall(part)
    if not found:
        return None
    said = re.sub(r"[\s$,]", "", found[0] if _MARK in text else found[-1])
    if len(said) > _MOST_DIGITS:
        return None
    top, _, bottom = said.partition("/")
    if bottom and not int(bottom):
        return None
    return Fraction(top) / int(bottom or 1)


def reward(item: Item, text: str) -> float:
    said = final_number(text)
    return float(said is not None and said == final_number(item["answer"]))


def make(
    *,
    path: str | Path | None = None,
    held_out_path: str | Path | None = None,
    count: int | None = None,
    held_out: int | None = None,
    max_tokens: int = 64,
    tokenizer: ChatTokenizer | None = None,
    seed: int = 0,
) -> Task:
    """Args:
    path: A JSONL file with `question` and `answer`; None for problems from templates.
    held_out_path: Likewise, to evaluate on.
    count: Problems from templates to train on; None for 2048.
    held_out: Problems from templates to evaluate on; None for 128.
    max_tokens: Of an answer.
    tokenizer: Of the model, which a run with `model.path` gives; None for one token a byte.
    seed: Of the problems.
    """
    whole("task 'math'", "max_tokens", max_tokens)
    if (path is None) != (held_out_path is None):
        raise SchemaError("task 'math': expected both path and held_out_path, or none of them")
    tokenizer = _bytes() if tokenizer is None else tokenizer
    encoder = to_tokenizer(tokenizer)
    items = draw_items(count, 2048, seed, _draw, False) if path is None else _read(path)
    kept = draw_items(held_out, 128, seed, _draw, True) if held_out_path is None else _read(held_out_path)
    items, kept = _asked(items, tokenizer), _asked(kept, tokenizer)
    longest = max(len(encoder.encode(side[name]["prompt"])) for side in (items, kept) for name in side.ids)
    return Task(
        name="math",
        items=items,
        held_out=kept,
        agent=single_turn(reward),
        tokenizer=tokenizer,
        vocabulary=tokenizer.size,
        context=longest + max_tokens,
        sampling=Sampling(max_tokens=max_tokens, stop_ids=tokenizer.end_ids),
    )


def _bytes() -> ChatTokenizer:
    from ..model.small import small_tokenizer

    return ChatTokenizer(small_tokenizer(), names={"eos_token": "<eos>"})


def _asked(items: Items, tokenizer: ChatTokenizer) -> Items:
    """With the prompts as the model is to read them."""

    def prompt(question: str) -> str:
        if not tokenizer.has_template:
            return tokenizer.beginning + _prompt(question)
        asked = f"{question}\nEnd with {_MARK} and the number."
        return tokenizer.apply_chat_template([{"role": "user", "content": asked}])

    return Items([{**items[name], "id": name, "prompt": prompt(items[name]["question"])} for name in items.ids])


def _draw(random: np.random.Generator) -> dict[str, Any]:
    question, work, solve = _TEMPLATES[random.integers(len(_TEMPLATES))]
    a, b = (int(one) for one in random.integers(2, 13, size=2))
    words = {"name": _NAMES[random.integers(len(_NAMES))], "thing": _THINGS[random.integers(len(_THINGS))]}
    numbers = {"a": a, "b": b, "ab": a + b, "axb": a * b}
    asked, result = question.format(**words, **numbers), solve(a, b)
    answer = f"{work.format(**numbers)} = {result}\n{_MARK} {result}"
    return {"question": asked, "answer": answer, "prompt": _prompt(asked)}


def _prompt(question: str) -> str:
    return f"Question: {question}\nAnswer: "


def _read(path: str | Path) -> Items:
    found = Items(path)
    made = []
    for place, name in enumerate(found.ids, 1):
        item = found[name]
        if not isinstance(item.get("question"), str) or final_number(str(item.get("answer", ""))) is None:
            raise SchemaError(f"task 'math': {path}, item {place}: expected a question, and an answer with a number")
        made.append({**item, "id": name, "prompt": _prompt(item["question"])})
    return Items(made)
