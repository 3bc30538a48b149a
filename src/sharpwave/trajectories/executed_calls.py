"""ExecutedCalls: which calls of which clients were executed, so that one that is sent again is not executed again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..files.origin import Origin

__all__ = ["ExecutedCalls"]

_TOKEN_BYTES = 16
_MOST_TOKENS = 4_096  # clients; of more than that, those that were silent for longest are forgotten
_MOST = 2**62


class ExecutedCalls:
    """The calls that were executed, by token: all numbers below ``oldest``, and those of a set above it.

    A client says with each call which is its oldest one without an answer, so the sets stay as small as the number of
    calls that a client makes at the same time. Not safe for threads.
    """

    def __init__(self) -> None:
        self._done: OrderedDict[bytes, tuple[int, set[int]]] = OrderedDict()

    def __contains__(self, origin: Origin) -> bool:
        oldest, numbers = self._done.get(origin.token, (0, ()))
        return origin.number < oldest or origin.number in numbers

    def __bool__(self) -> bool:
        return bool(self._done)

    def add(self, origin: Origin) -> None:
        """Remembers that a call was executed."""
        oldest, numbers = self._done.pop(origin.token, (0, set[int]()))
        numbers.add(origin.number)
        if origin.oldest > oldest:
            oldest = origin.oldest
            numbers = {number for number in numbers if number >= oldest}
        self._put(origin.token, oldest, numbers)

    def _put(self, token: bytes, oldest: int, numbers: set[int]) -> None:
        self._done[token] = oldest, numbers
        if len(self._done) > _MOST_TOKENS:
            self._done.popitem(last=False)

    def joined(self, other: ExecutedCalls | None = None) -> ExecutedCalls:
        """A copy, with what another one remembers."""
        made = ExecutedCalls()
        for part in (self,) if other is None else (other, self):
            for token, (oldest, numbers) in part._done.items():
                known, more = made._done.pop(token, (0, set[int]()))
                oldest = max(oldest, known)
                made._put(token, oldest, {number for number in numbers | more if number >= oldest})
        return made

    # ---- in the journal ---------------------------------------------------------------------------------------

    def rows(self) -> list[list[Any]]:
        """JSON of all of them, the client that was silent for longest first."""
        return [[token.hex(), oldest, sorted(numbers)] for token, (oldest, numbers) in self._done.items()]

    def take_row(self, row: Any) -> None:
        """Reads what ``rows`` made.

        Raises:
            ValueError: The row is not of that form.
        """
        token, oldest, numbers = row
        if type(numbers) is not list:
            raise ValueError("expected a list of the numbers of calls")
        read = {_number(number) for number in numbers}
        known, more = self._done.pop(_token(token), (0, set[int]()))
        oldest = max(_number(oldest), known)
        self._put(_token(token), oldest, {number for number in read | more if number >= oldest})


def _token(text: Any) -> bytes:
    token = bytes.fromhex(text) if type(text) is str else b""
    if len(token) != _TOKEN_BYTES:
        raise ValueError(f"expected a token of {_TOKEN_BYTES} bytes in hex, got {str(text)[:60]!r}")
    return token


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"expected the number of a call, got {str(value)[:60]}")
    return value
