"""`Sampling`: how an answer is drawn and where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...checks import told
from ...errors import SchemaError

__all__ = ["Sampling"]

# Whole numbers go into arrays that requests share, where larger ones would fail a step.
_MOST = 2**31 - 1
_MOST_STOP_IDS = 256  # an engine compares each token with all of them, and each slot has room for the longest list
# Logits divided by less may be infinite in float32, and below 1e-45 the temperature itself is 0 there.
_LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """Settings of one request. Filters apply in this order: temperature, top-k, top-p, min-p.

    Args:
        max_tokens: The answer has at most so many tokens.
        temperature: Logits are divided by it, so it is at least 1e-6; 0 takes the likeliest token.
        top_k: Only the k likeliest tokens; 0 for all.
        top_p: Only the likeliest tokens that together have this probability.
        min_p: Only tokens at least this many times as likely as the likeliest.
        seed: The same seed draws the same answer from the same weights, whatever runs beside it, up to rounding.
            None: the engine chooses.
        stop_ids: An answer ends with any of these tokens, at most 256, and with the model's own end of text.
        stop: An answer ends as soon as its text has any of these strings.
        ignore_eos: The model's own end of text does not end the answer.

    Example:
        >>> Sampling(max_tokens=16, temperature=0.7, top_p=0.9).top_k
        0
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check("stop", self.stop, isinstance(self.stop, (list, tuple)), "a list of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        _check("stop_ids", self.stop_ids, isinstance(self.stop_ids, (list, tuple)), "a list of token ids")
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        allowed = _is_whole(self.max_tokens, 1, 2**53 - 1)
        _check("max_tokens", self.max_tokens, allowed, "an integer of at least 1, below 2**53")
        allowed = _is_number(self.temperature, _LEAST_TEMPERATURE, 1e6) or _is_number(self.temperature, 0.0, 0.0)
        expected = (
            f"a number from 0 to 1e6 and, unless it is 0, at least {_LEAST_TEMPERATURE}; 0 takes the likeliest token"
        )
        _check("temperature", self.temperature, allowed, expected)
        allowed = _is_whole(self.top_k, 0)
        _check("top_k", self.top_k, allowed, "an integer from 0 to 2**31 - 1; 0 keeps all tokens")
        allowed = _is_number(self.top_p, 0.0, 1.0) and self.top_p > 0
        _check("top_p", self.top_p, allowed, "a number above 0 and at most 1")
        _check("min_p", self.min_p, _is_number(self.min_p, 0.0, 1.0), "a number from 0 to 1")
        allowed = self.seed is None or _is_whole(self.seed, 0, 2**63 - 1)
        _check("seed", self.seed, allowed, "None or an integer from 0 to 2**63 - 1")
        count = len(self.stop_ids)
        _check("len(stop_ids)", count, count <= _MOST_STOP_IDS, f"at most {_MOST_STOP_IDS} token ids")
        _check("stop_ids", self.stop_ids, all(_is_whole(one, 0) for one in self.stop_ids), "token ids")
        _check("stop", self.stop, all(isinstance(one, str) and one for one in self.stop), "strings that are not empty")
        _check("stop", self.stop, all(map(_is_text, self.stop)), "strings of Unicode text, without single surrogates")
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "True or False")

    @property
    def is_filtered(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def seeded(self, seed: int | None) -> Sampling:
        """The same with another seed: None, or 0 to 2**63 - 1. The others were checked and are not checked again."""
        made = object.__new__(Sampling)
        made.__dict__.update(self.__dict__, seed=seed)
        return made

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Sampling:
        """Settings by name, for those that come from outside. An unknown name is refused."""
        known = [one.name for one in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SchemaError(f"Sampling: unknown key {unknown[0]!r}; expected some of {', '.join(known)}")
        return cls(**given)


def _is_whole(value: Any, least: int, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: str) -> bool:
    """Whether the text of tokens, which is UTF-8, may have it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise SchemaError(f"Sampling: {name}={told(value)}, expected {expected}")
