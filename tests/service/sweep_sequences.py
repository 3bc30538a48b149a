"""SequenceTable: samples that clients put, lease and acknowledge, over kills of them and of their server."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from sweep_table import ACKNOWLEDGED, FAILED, QUOTA, TIMEOUTS_S, TRIED, Notes, SweepTable

import sharpwave as sw
from sharpwave.errors import BufferFull, NotReady, StaleHandle

__all__ = ["SequenceTable"]

CAPACITY = 400  # so that puts wait for room
FLOW = sw.Dataflow([sw.Consumer("train", {"x"}, batch_size=4)])
ENDING, ENDED = 1, 2  # of a sample in a client's notes: its ack was tried, and answered
ID = 10_000  # ids are stream * ID + number


def sample(stream: int, number: int) -> sw.SequenceSample:
    length = 1 + number % 7
    return sw.SequenceSample([f"{stream * ID + number}"], {"x": [length]}, {"x": values(stream, number, length)})


def values(stream: int, number: int, length: int) -> np.ndarray:
    return np.arange(length) + stream * 1_000 + number


def check_batch(batch: sw.SequenceSample, where: str) -> list[tuple[int, int]]:
    """The streams and numbers of samples, which must be as they were put."""
    found = []
    for part in batch.unpack():
        stream, number = divmod(int(part.ids[0]), ID)
        length = 1 + number % 7
        assert part["x"].tolist() == values(stream, number, length).tolist(), f"{where}: {part.ids} is torn"
        found.append((stream, number))
    return found


class SequenceTable(SweepTable):
    """Even clients put. Odd ones lease, and note in a second file what they acknowledge."""

    kind = "sequences"

    @staticmethod
    def make(path: str) -> Any:
        return sw.SequenceBuffer(CAPACITY, flow=FLOW, journal=path)

    @staticmethod
    def work(buffer: Any, notes: Notes, rng: random.Random, is_odd: bool) -> None:
        if is_odd:
            return _consume(buffer, notes, rng)
        for number in range(QUOTA):
            timeout_s = rng.choice(TIMEOUTS_S)
            with notes.call(0, timeout_s):
                notes.rows[number] = TRIED
                try:
                    buffer.put(sample(notes.stream, number), timeout=timeout_s)
                    notes.rows[number] = ACKNOWLEDGED
                except BufferFull:
                    notes.rows[number] = 0  # no room until the timeout: it is not there
                except NotReady:
                    notes.rows[number] = FAILED
                    raise
        while True:
            len(buffer)

    def check_items(self) -> None:
        """What was acknowledged to a putter is there, or a consumer has ended it; what was ended is not there."""
        ended: dict[tuple[int, int], int] = {}
        for notes in self.streams:
            for line in _ends(self.folder / f"ends-{notes.stream}"):
                stream, number, state = line
                before = ended.get((stream, number), 0)
                assert not (before == state == ENDED), f"sample {number} of stream {stream} was acknowledged twice"
                ended[stream, number] = max(before, state)
        with sw.SequenceBuffer(CAPACITY, flow=FLOW, journal=self.path) as buffer:
            held = [divmod(int(one), ID) for one in buffer.ids()]
            if held:  # every lease of the dead has returned
                lease = buffer.get("train", batch_size=len(held), timeout=0)
                assert sorted(check_batch(lease.batch, "the buffer")) == sorted(held)
                lease.release()
        assert len(set(held)) == len(held), "samples are there more than once"
        back = [one for one in held if ended.get(one) == ENDED]
        assert not back, f"samples {back[:5]} were acknowledged and are there again"
        for notes in self.streams:
            there = {number for stream, number in held if stream == notes.stream}
            acknowledged = set(np.flatnonzero(notes.rows == ACKNOWLEDGED).tolist())
            lost = sorted(one for one in acknowledged - there if (notes.stream, one) not in ended)
            assert not lost, f"stream {notes.stream} ({notes.about}): acknowledged samples {lost[:5]} are not there"
            assert all(notes.rows[one] for one in there), f"stream {notes.stream}: samples that were never put"
            self.counts["sequences acknowledged"] += len(acknowledged)
        self.counts["sequences ended"] += sum(state == ENDED for state in ended.values())
        self.counts["sequences left"] += len(held)


def _consume(buffer: Any, notes: Notes, rng: random.Random) -> None:
    with open(notes.path.with_name(f"ends-{notes.stream}"), "ab", buffering=0) as file:
        while True:
            timeout_s = rng.choice(TIMEOUTS_S)
            lease = None
            with notes.call(1, timeout_s):
                lease = buffer.get("train", timeout=timeout_s, partial=rng.random() < 0.3)
            if lease is None:
                continue
            found = check_batch(lease.batch, f"get() of stream {notes.stream}")
            try:
                if rng.random() < 0.2:
                    lease.release()
                    continue
                for state in (ENDING, ENDED):  # one line a write: a kill leaves whole ones
                    if state == ENDED:
                        lease.ack()
                    for stream, number in found:
                        file.write(b"%d %d %d\n" % (stream, number, state))
            except StaleHandle:
                continue  # the lease ended with its server: the samples come again


def _ends(path: Any) -> list[tuple[int, ...]]:
    if not path.exists():
        return []
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]
