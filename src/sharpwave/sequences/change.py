"""A change of a SequenceBuffer: what a call is about to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ..files import Entry

__all__ = ["Change", "Later"]

_Result = TypeVar("_Result")


class Later(Exception):
    """It depends on another change, whose record is being written: its fate decides."""


class Change(Generic[_Result]):
    """What a call is about to do: its records, and how to make it or to go back.

    Several may be planned before the first is made, if none depends on one before it.

    Args:
        reads: Serials of samples whose present state it was planned on.
        writes: Serials of samples that it changes.
        alone: Whether it depends on more than samples, or others may depend on it.
    """

    __slots__ = ("alone", "make", "reads", "records", "undo", "writes")

    def __init__(
        self,
        records: list[Entry],
        make: Callable[[float], _Result],
        undo: Callable[[], None] = lambda: None,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        alone: bool = False,
    ) -> None:
        self.records, self.make, self.undo = records, make, undo
        self.reads, self.writes, self.alone = reads, writes, alone
