"""`Characters`: a tokenizer for small alphabets; `Tokenizer`: what tasks and agents need of any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import SchemaError

__all__ = ["Characters", "Tokenizer", "to_tokenizer"]


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        ...


class _Letters(dict[int, str]):
    def __missing__(self, token: int) -> str:
        return ""  # a special token, or none of the alphabet's


class Characters:
    """A token for each character of a small alphabet, after `<pad>` (0) and `<eos>` (1).

    Example:
        >>> digits = Characters("0123456789>")
        >>> digits.encode("31>"), digits.decode([3, 5, 1]), digits.size
        ([5, 3, 12], '13', 13)
    """

    pad, eos = 0, 1

    def __init__(self, alphabet: str) -> None:
        self.alphabet = alphabet
        self._tokens = {letter: place + 2 for place, letter in enumerate(alphabet)}
        self._letters = _Letters(enumerate(alphabet, 2))
        if len(self._tokens) != len(alphabet):
            raise SchemaError(f"Characters(): expected each character once, got {alphabet!r}")

    @property
    def size(self) -> int:
        return len(self.alphabet) + 2

    def encode(self, text: str) -> list[int]:
        try:
            return list(map(self._tokens.__getitem__, text))
        except KeyError as error:
            raise SchemaError(f"encode(): {error.args[0]!r} in {text[:40]!r} is none of {self.alphabet!r}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._letters.__getitem__, tokens))


class _Wrapped:
    def __init__(self, other: Any) -> None:
        self._other = other

    def encode(self, text: str) -> list[int]:
        found = self._other.encode(text, add_special_tokens=False)
        return list(getattr(found, "ids", found))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._other.decode(list(tokens), skip_special_tokens=True))


def to_tokenizer(other: Any) -> Tokenizer:
    """A tokenizer of `tokenizers` or `transformers`. Special tokens of a prompt are written out in its text."""
    return _Wrapped(other)
