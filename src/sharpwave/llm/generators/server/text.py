"""`TextStream`: text of tokens that come in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]


class TextStream:
    """Text without special tokens and without the stop string that ended it.

    The end of the text is held back while it may be a part of a character, or of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._hold = max((len(one) for one in stop), default=1) - 1
        self._ids: list[int] = []
        self._from, self._to = 0, 0  # ids before _to are in the text; decoding starts some before: tokens depend
        self._held = ""

    def push(self, ids: Sequence[int], stop: str | None = None, matched: int | str | None = None) -> str:
        """The text that these tokens add. With `stop` they are the last."""
        self._ids += ids
        self._held += self._decoded(is_last=stop is not None)
        if stop is not None:
            cut = self._held.find(matched) if isinstance(matched, str) else -1
            return self._held if cut < 0 else self._held[:cut]
        size = max(0, len(self._held) - self._hold)
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _decoded(self, *, is_last: bool) -> str:
        if self._tokenizer is None:
            return ""
        before = self._tokenizer.decode(self._ids[self._from : self._to], skip_special_tokens=True)
        after = self._tokenizer.decode(self._ids[self._from :], skip_special_tokens=True)
        if len(after) <= len(before) or (after.endswith("\ufffd") and not is_last):
            return ""
        self._from, self._to = self._to, len(self._ids)
        return str(after[len(before) :])
