"""The specification of episodes() and of the ids of rows(), slow and obvious: a list of the rows of each episode.

Which rows are left is not decided here: with several writers that is the engine's choice. The model is told, and says
how they fall into streams and episodes.
"""

from __future__ import annotations

from collections.abc import Container, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class Told:
    """An episode as it was added."""

    stream: tuple[Hashable, int]  # writer and environment
    numbers: list[int] = field(default_factory=list)  # of all rows ever added, without masked ones
    is_over: bool = False


class Piece(NamedTuple):
    """Rows of one episode that follow each other, all of them left."""

    numbers: list[int]
    stream: tuple[Hashable, int]
    is_whole: bool  # the episode's first row is the first of it
    is_finished: bool  # the episode's last row is the last of it


class EpisodeModel:
    def __init__(self, width: int) -> None:
        self.width = width
        self.episodes: list[Told] = []
        self.running: dict[tuple[Hashable, int], Told] = {}
        self.skipping: set[tuple[Hashable, int]] = set()  # streams whose last row was masked
        self.after_mask: set[int] = set()  # rows right after masked ones
        self.count = 0

    def add(self, writer: Hashable, masked: list[bool], ends: list[bool], resets: list[bool]) -> list[int]:
        """One entry a row, time-major. `resets`: the row starts an episode though nobody ended the last one. Returns
        the numbers of the rows."""
        first = self.count
        for i, (is_masked, is_end, is_reset) in enumerate(zip(masked, ends, resets, strict=True)):
            number, stream = self.count, (writer, i % self.width)
            self.count += 1
            if is_masked:
                self.skipping.add(stream)
                continue
            if stream in self.skipping:
                self.after_mask.add(number)
                self.skipping.discard(stream)
            if is_reset:
                self.end(stream)
            if stream not in self.running:
                self.running[stream] = Told(stream)
                self.episodes.append(self.running[stream])
            self.running[stream].numbers.append(number)
            if is_end:
                self.end(stream)
        return list(range(first, self.count))

    def end(self, stream: tuple[Hashable, int]) -> None:
        if stream in self.running:
            self.running.pop(stream).is_over = True

    def close(self, writer: Hashable) -> None:
        for stream in [stream for stream in self.running if stream[0] == writer]:
            self.end(stream)

    def forget(self) -> None:
        """Nobody goes on with what is open now, and nobody ends it: a clear, or a copy of a snapshot."""
        self.running = {}

    def stream_of(self, number: int) -> tuple[Hashable, int]:
        return next(told.stream for told in self.episodes if number in told.numbers)

    def pieces(self, left: set[int], cuts: Container[int] = ()) -> list[Piece]:
        """Of the rows that are left. Not in order.

        `cuts`: rows before which the engine has cut an episode. It may where a masked row before them is overwritten,
        which happens only with several writers: rows do not say whether that one was masked.
        """
        found = []
        for told in self.episodes:
            runs: list[list[int]] = [[]]
            for number in told.numbers:
                if number in left:
                    if runs[-1] and number in cuts and number in self.after_mask:
                        runs.append([])
                    runs[-1].append(number)
                elif runs[-1]:
                    runs.append([])
            for run in filter(None, runs):
                ends = told.is_over and run[-1] == told.numbers[-1]
                found.append(Piece(run, told.stream, run[0] == told.numbers[0], ends))
        return found
