"""episodes() and the ids of rows() beside their model: several writers and environments, masks, ends, wraps."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

# From both rooms: tests/contract imports the models as a package.
try:
    from episode_model import EpisodeModel, Piece
except ImportError:
    from model.episode_model import EpisodeModel, Piece

import sharpwave as sw

MORE = 30 if os.environ.get("SHARPWAVE_SOAK") == "1" else 1
SHAPES: dict[str, dict[str, Any]] = {
    "stored": {"schema": {"obs": sw.Field((2,)), "id": sw.Field((), "int64")}},
    "derived": {"schema": {"obs": sw.Field((2,)), "id": sw.Field((), "int64")}, "next_obs": "derived"},
    "stack": {"schema": {"obs": sw.Field((2,), stack=3), "id": sw.Field((), "int64")}, "next_obs": "derived"},
    "compressed": {"schema": {"obs": sw.Field((40,), compression="lz4"), "id": sw.Field((), "int64")}},
    "ragged": {"schema": {"obs": sw.Field((2,)), "id": sw.Field((), "int64"), "words": sw.Field((4,), ragged=True)}},
    "priorities": {"schema": {"obs": sw.Field(()), "id": sw.Field((), "int64")}, "sampler": sw.Prioritized()},
    "windows": {"schema": {"obs": sw.Field(()), "id": sw.Field((), "int64")}, "view": sw.Windows(3)},
}


class Pair:
    """A buffer and the model, told the same."""

    def __init__(self, buffer: sw.ReplayBuffer, can_tell_starts: bool = True) -> None:
        self.buffer, self.can_tell_starts = buffer, can_tell_starts
        self.model = EpisodeModel(buffer.num_envs or 1)
        self.writers: dict[int, Any] = {}
        self.records: dict[Any, int] = {}  # the engine's number of each writer, as ids told
        self.serials: dict[int, int] = {}  # of all rows ever seen, by number
        self.rng = np.random.default_rng(0)
        self.positions: dict[Any, float] = {}  # of each environment
        self.cleared = 0  # rows before this number are cleared
        self.closed = [0, 0, 0]  # how often each writer was closed

    def add(self, name: int, steps: int, seed: int, masks: bool = True, one_call: bool = True) -> None:
        """Some steps by a writer; the name 0 is the buffer's own."""
        rng = np.random.default_rng(seed)
        width, writer = self.model.width, (name, self.closed[name])
        rows = steps * width
        masked = (rng.random(rows) < (0.25 if masks else 0)).tolist()
        done, truncated = rng.random((2, rows)) < 0.12
        can_reset = self.buffer._rows.spec.schema.derives_next
        resets, obs, after = [], [], []
        for i in range(rows):
            stream = (writer, i % width)
            is_reset = can_reset and not masked[i] and rng.random() < 0.1
            if is_reset or stream not in self.positions:
                self.positions[stream] = float(self.rng.integers(1 << 20))
            obs.append(self.positions[stream])
            after.append(obs[-1] + 1)
            if not masked[i]:
                self.positions[stream] = after[-1]
                if done[i] or truncated[i]:
                    del self.positions[stream]
            resets.append(is_reset)
        numbers = self.model.add(writer, masked, (done | truncated).tolist(), resets)
        shape = self.buffer.schema["obs"].shape
        values = {
            "obs": np.array([np.full(shape, x, np.float32) for x in obs]),
            "next_obs": np.array([np.full(shape, x, np.float32) for x in after]),
            "id": np.array(numbers),
            "reward": np.array(numbers, np.float32),
            "done": done,
            "truncated": truncated,
            "mask": ~np.array(masked),
        }
        if "words" in self.buffer.schema:
            values["words"] = [np.arange(number % 5, dtype=np.float32) for number in numbers]
        add = self.buffer.add
        if name:
            self.writers.setdefault(name, None)
            if self.writers[name] is None:
                self.writers[name] = self.buffer.writer()
            add = self.writers[name].add
        add(**values)
        seen = {int(i) for part in self.buffer.rows() for i in part["id"]}
        newest = max((n for n, m in zip(numbers, masked, strict=True) if not m and n in seen), default=None)
        if newest is not None:  # the writer's record, while its rows are surely there
            parts = self.buffer.rows(ids=True)
            ids = {int(i): int(s) for part in parts for i, s in zip(part["id"], part["stream"], strict=True)}
            self.records.setdefault(writer, ids[newest] // width)

    def close(self, name: int) -> None:
        if self.writers.get(name) is not None:
            self.writers.pop(name).close()
            self.model.close((name, self.closed[name]))
            self.closed[name] += 1

    def clear(self) -> None:
        self.buffer.clear()
        self.model.forget()
        self.positions.clear()
        self.cleared = self.model.count

    def check(self, batch_size: int = 5) -> None:
        width, buffer = self.model.width, self.buffer
        there: dict[int, tuple[int, int, int]] = {}
        for part in buffer.rows(batch_size, ids=True):
            assert len(part["stream"]) == len(part["episode"]) == len(part["indices"])
            columns = [np.asarray(part[name]).tolist() for name in ("id", "indices", "stream", "episode")]
            there |= {number: rest for number, *rest in zip(*columns, strict=True)}
        self.serials |= {number: serial for number, (serial, _, _) in there.items()}
        assert list(there) == [int(i) for part in buffer.rows(7) for i in part["id"]], "ids change nothing else"
        begins = {number for number, (serial, _, episode) in there.items() if serial == episode}
        pieces = self.model.pieces(set(there), begins if len(set(self.records.values())) > 1 else ())
        for piece in pieces:
            first = there[piece.numbers[0]][0]
            writer, env = piece.stream
            for number in piece.numbers:
                _, stream, episode = there[number]
                assert episode == first
                if stream == -1:
                    younger = [n for n, s in self.serials.items() if s > there[number][0] and n not in there]
                    record = self.records[writer]
                    assert any(self.records[self.model.stream_of(n)[0]] == record for n in younger if n >= self.cleared)
                else:
                    assert stream == self.records[writer] * width + env
        pieces.sort(key=lambda piece: there[piece.numbers[0]][0])
        for partial in (False, True):
            for unfinished in (False, True):
                wanted = [p for p in pieces if (partial or self.is_whole(p)) and (unfinished or p.is_finished)]
                given = list(buffer.episodes(partial=partial, unfinished=unfinished))
                assert [np.asarray(one["id"]).tolist() for one in given] == [p.numbers for p in wanted]
                for one, piece in zip(given, wanted, strict=True):
                    self.check_one(one, piece, there)

    def is_whole(self, piece: Piece) -> bool:
        if self.can_tell_starts or not piece.is_whole:
            return piece.is_whole
        # Rows of a GPU do not say it: an earlier row of the environment must be there, or none was ever overwritten.
        width, first = self.model.width, piece.numbers[0]
        oldest = self.model.count - self.buffer.capacity
        before = [n for t in self.model.episodes if t.stream == piece.stream for n in t.numbers if oldest <= n < first]
        return oldest <= self.cleared or any(n % width == first % width and n >= self.cleared for n in before)

    def check_one(self, given: dict[str, Any], piece: Piece, there: dict[int, Any]) -> None:
        assert type(given["stream"]) is int
        assert type(given["episode"]) is int
        serials = [there[number][0] for number in piece.numbers]
        assert (given["episode"], np.asarray(given["indices"]).tolist()) == (serials[0], serials)
        assert given["stream"] == there[piece.numbers[0]][1]
        got = self.buffer.get(serials)
        assert given.keys() == got.keys() | {"stream", "episode"}
        for name, value in got.items():
            for one, other in zip(parts_of(given[name]), parts_of(value), strict=True):
                assert np.array_equal(one, other), name
        ends = np.asarray(got["done"]).astype(bool) | np.asarray(got["truncated"])
        assert ends.tolist() == [False] * (len(ends) - 1) + [piece.is_finished]


def parts_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [np.asarray(value)]


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["add"] * 8 + ["close", "clear", "again"]),
        st.integers(0, 2),
        st.integers(1, 9),
        st.integers(0, 1 << 16),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("shape", SHAPES)
@given(
    calls=CALLS,
    width=st.sampled_from([1, 1, 2, 3]),
    size=st.sampled_from([9, 16, 40, 64]),
    writers=st.sampled_from([3, 4]),
    storage=st.sampled_from(["memory", "memory", "file"]),
)
@settings(max_examples=MORE * 25, deadline=None)
def test_episodes_and_ids_are_those_of_the_model(
    shape: str, calls: list[Any], width: int, size: int, writers: int, storage: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{folder}/live.sw" if storage == "file" else None
        options = {"num_envs": width, "writers": writers, "seed": 0, "storage": place, **SHAPES[shape]}
        pair = Pair(sw.ReplayBuffer(size * width, **options))
        try:
            for call, name, steps, seed in calls:
                if call == "add":
                    pair.add(name, min(steps, size), seed)
                elif call == "close":
                    pair.close(name)
                elif call == "clear":
                    pair.clear()
                else:
                    reopen(pair, Path(folder), place)
                pair.check()
        finally:
            pair.buffer.close()


def reopen(pair: Pair, folder: Path, place: str | None) -> None:
    """In place, after every writer is closed; in memory from a snapshot, in which nobody ends what is open."""
    if place is None:
        pair.buffer.save(folder / "snapshot")
        before = pair.buffer
        pair.buffer = sw.open(folder / "snapshot")
        for writer in pair.writers.values():
            writer.close()
        before.close()
        pair.model.forget()
    else:
        for writer in pair.writers.values():
            writer.close()
        pair.buffer.close()
        pair.buffer = sw.open(place)
        for stream in list(pair.model.running):
            pair.model.end(stream)
    pair.writers = {}
    pair.closed = [count + 1 for count in pair.closed]
