"""Origins: which calls of other processes were made already, so that a call that is sent again is made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..errors import SchemaError, StaleHandle
from ..files.origin import Origin
from .change import Change, Later

__all__ = ["Origins"]

_MOST_TOKENS = 4096  # those that were used longest ago leave
_MOST_NUMBERS = 4096  # of a token, from its oldest on: more calls are refused, none is forgotten

_Result = TypeVar("_Result")
Run = tuple[int, int]  # first handle, how many: those of one put follow each other


class _Calls:
    """The calls of one token that may be asked for again."""

    __slots__ = ("oldest", "results")

    def __init__(self) -> None:
        self.oldest = 0
        self.results: dict[int, Run | None] = {}

    def advance(self, oldest: int) -> None:
        if oldest > self.oldest:
            self.oldest = oldest
            for number in [one for one in self.results if one < oldest]:
                del self.results[number]


class Origins:
    """The results of calls by their origin. Not safe for threads: the buffer's lock is around each call.

    At most 4,096 tokens, and 4,096 calls of each: the memory that strangers can take is bounded.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[bytes, _Calls] = OrderedDict()  # used longest ago first
        self._asked: set[tuple[bytes, int]] = set()  # calls whose records are being written

    def __len__(self) -> int:
        return len(self._tokens)

    def once(self, origin: Origin | None, plan: Callable[[], Change[_Result]]) -> Change[_Result]:
        """The change of a call that may be sent again: nothing, with the first one's result, where it was made.

        A head that is a dict gets the origin; ``put_head`` writes it into its own.
        """
        if origin is None:
            return plan()
        if self.knows(origin):
            known = self.result(origin)
            return Change([], lambda _: known)
        name = origin.token, origin.number
        if name in self._asked:
            raise Later
        change = plan()
        records = [
            one._replace(head={**one.head, "origin": origin.to_json()}) if isinstance(one.head, dict) else one
            for one in change.records
        ]

        def make(now: float) -> _Result:
            self._asked.discard(name)
            result = change.make(now)
            self.keep(origin, (int(result[0]), len(result)) if isinstance(result, np.ndarray) else None)
            return result

        def undo() -> None:
            self._asked.discard(name)
            change.undo()

        self._asked.add(name)
        return Change(records, make, undo, reads=change.reads, writes=change.writes, alone=change.alone)

    def knows(self, origin: Origin) -> bool:
        """Whether the call was made.

        Raises:
            StaleHandle: The client has said that it does not ask for it again.
            SchemaError: The client has too many calls that it may ask for again.
        """
        calls = self._tokens.get(origin.token)
        if calls is None:
            return False
        if origin.number < calls.oldest:
            raise StaleHandle(
                f"call {origin.number} comes after its sender has said that it asks for none before {calls.oldest} "
                "again; it was made or refused then"
            )
        if origin.number in calls.results:
            return True
        if len(calls.results) >= _MOST_NUMBERS and min(calls.results) >= origin.oldest:
            raise SchemaError(
                f"origin: expected at most {_MOST_NUMBERS} calls that may be asked for again, from {origin.oldest} on; "
                "tell a larger oldest"
            )
        return False

    def result(self, origin: Origin) -> Any:
        """Of a call that is known: the handles of a put, None of others."""
        run = self._tokens[origin.token].results[origin.number]
        return None if run is None else np.arange(run[0], run[0] + run[1])

    def keep(self, origin: Origin, run: Run | None) -> None:
        """The call was made."""
        calls = self._tokens.get(origin.token)
        if calls is None:
            calls = self._tokens[origin.token] = _Calls()
            if len(self._tokens) > _MOST_TOKENS:
                self._tokens.popitem(last=False)
        self._tokens.move_to_end(origin.token)
        calls.advance(origin.oldest)
        if origin.number >= calls.oldest:
            calls.results[origin.number] = run

    def to_json(self) -> list[Any]:
        return [
            [token.hex(), calls.oldest, [[number, *(run or ())] for number, run in calls.results.items()]]
            for token, calls in self._tokens.items()
        ]

    def read(self, said: Any) -> None:
        """Becomes what ``to_json`` gave.

        Raises:
            ValueError, TypeError: It is not that.
        """
        self._tokens.clear()
        for token, oldest, results in said:
            calls = _Calls()
            for number, *run in results:
                if len(run) not in (0, 2) or not all(map(_is_count, (number, oldest, *run))):
                    raise ValueError(f"origins: expected whole numbers, got {[number, *run]!r:.100}")
                calls.results[number] = (run[0], run[1]) if run else None
            calls.advance(oldest)
            self._tokens[Origin.read([token, oldest, oldest]).token] = calls


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
