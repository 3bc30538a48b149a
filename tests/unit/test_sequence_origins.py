"""A call that another process sends again is made once: in memory, in the journal, and after a rewrite of it."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import BufferFull, SchemaError, StaleHandle
from sharpwave.files import read_journal
from sharpwave.files.origin import Origin
from sharpwave.sequences import origins
from sharpwave.sequences.history import KIND
from sharpwave.sequences.origins import Origins

FLOW = sw.Dataflow([sw.Consumer("train", {"x"}, batch_size=1)])
ONE, TWO = b"1" * 16, b"2" * 16


def sample(name: str, length: int = 3) -> sw.SequenceSample:
    return sw.SequenceSample([name], {"x": [length]}, {"x": np.arange(length)})


def made(folder: Path | None = None, capacity: int = 100, **options: Any) -> sw.SequenceBuffer:
    journal = None if folder is None else folder / "journal"
    return sw.SequenceBuffer(capacity, flow=FLOW, journal=journal, duplicate_ids=True, **options)


def put(seq: sw.SequenceBuffer, name: str, number: int, oldest: int = 0, token: bytes = ONE) -> list[int]:
    handles = seq._sequences.put("put()", [sample(name)], None, None, 0, origin=Origin(token, number, oldest))  # type: ignore[call-arg]
    return [int(one) for one in handles]


@pytest.fixture(params=["memory", "journal"])
def seq(request: Any, tmp_path: Path) -> Any:
    buffer = made(tmp_path if request.param == "journal" else None)
    yield buffer
    buffer.close()


def test_a_put_that_is_sent_again_has_the_same_handles_and_adds_nothing(seq: Any) -> None:
    assert [put(seq, "a", 0), put(seq, "b", 1), put(seq, "a", 0), put(seq, "b", 1)] == [[0], [1], [0], [1]]
    assert put(seq, "c", 0, token=TWO) == [2], "another client has its own numbers"
    assert seq.ids() == ["a", "b", "c"]
    assert seq.stats()["added"] == 3


def test_it_is_answered_when_the_buffer_is_full_the_sample_has_left_or_was_cleared() -> None:
    seq = made(capacity=1)
    put(seq, "a", 0)
    assert put(seq, "a", 0) == [0], "no room is needed for it"
    with pytest.raises(BufferFull):
        put(seq, "b", 1)
    seq.get("train", timeout=0).ack()
    assert (put(seq, "a", 0), len(seq)) == ([0], 0)
    put(seq, "b", 1)
    seq.clear()
    assert (put(seq, "b", 1), len(seq)) == ([1], 0)


def test_a_put_that_failed_is_tried_again(seq: Any) -> None:
    with pytest.raises(SchemaError, match="version"):
        seq._sequences.put("put()", sample("a"), "seven", None, 0, origin=Origin(ONE, 0, 0))
    assert put(seq, "a", 0) == [0]


def test_a_number_below_the_oldest_is_refused_and_forgotten(seq: Any) -> None:
    put(seq, "a", 0)
    put(seq, "b", 1, oldest=1)
    with pytest.raises(StaleHandle, match="asks for none before 1 again"):
        put(seq, "a", 0)
    assert put(seq, "b", 1) == [1]
    assert seq.ids() == ["a", "b"]


def test_every_call_that_changes_samples_is_made_once(seq: Any) -> None:
    inside = seq._sequences
    handles = seq.put([sample("a"), sample("b")])
    lease = seq.get("train", timeout=0)
    changed = sw.SequenceSample(["b"], {"y": [1]}, {"y": np.array([7])})
    for _ in range(2):
        inside.amend("amend()", handles[1:], changed, origin=Origin(ONE, 0, 0))
        inside.lender.ack(lease._claim, origin=Origin(ONE, 1, 0))
        inside.set_version("set_version()", 3, origin=Origin(ONE, 2, 0))
    assert (seq.stats()["amends"], seq.stats()["acks"]) == (1, 1)
    seq.set_version(5)
    inside.set_version("set_version()", 3, origin=Origin(ONE, 2, 0))
    assert seq.version == 5
    for _ in range(2):
        inside.clear("clear()", origin=Origin(ONE, 3, 0))
        if not seq.ids():
            seq.put(sample("later"))
    assert seq.ids() == ["later"], "a clear that is sent again does not drop what came in between"


def test_a_checkpoint_that_is_sent_again_keeps_the_one_before(tmp_path: Path) -> None:
    seq = made(tmp_path)
    seq.checkpoint("first")
    for _ in range(2):
        seq._sequences.checkpoint("checkpoint()", "second", origin=Origin(ONE, 0, 0))  # type: ignore[call-arg]
    seq.close()
    made(tmp_path, resume="first").close()


def test_both_copies_of_a_put_that_wait_for_room_have_the_same_handle(seq: Any) -> None:
    seq.put([sample(str(at)) for at in range(100)])
    found: list[list[int]] = []

    def wait() -> None:
        handles = seq._sequences.put("put()", sample("late"), None, None, HANG_S, origin=Origin(ONE, 0, 0))
        found.append([int(one) for one in handles])

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: seq.stats()["waiting_puts"] == 2)
    seq.get("train", batch_size=1, timeout=0).ack()
    for thread in threads:
        thread.join(HANG_S)
    assert found == [[100], [100]]
    assert seq.ids().count("late") == 1


def test_copies_of_a_put_that_share_a_write_are_made_once(tmp_path: Path) -> None:
    seq = made(tmp_path)
    inside: Any = seq._sequences

    async def many() -> list[list[int]]:
        calls = [
            inside.put_async("put_async()", sample("a"), None, None, HANG_S, origin=Origin(ONE, 0, 0)) for _ in range(8)
        ]
        with seq._commits._writing:  # they come while another one is written, so the next group has them all
            tasks = [asyncio.create_task(call) for call in calls]
            while len(seq._commits._requests) + len(seq._commits._begun) < 8:
                await asyncio.sleep(0)
        return [[int(one) for one in handles] for handles in await asyncio.gather(*tasks)]

    assert asyncio.run(many()) == [[0]] * 8
    assert seq.ids() == ["a"]
    seq.close()
    assert made(tmp_path).ids() == ["a"]


def test_a_journal_that_is_opened_again_knows_the_calls(tmp_path: Path) -> None:
    seq = made(tmp_path)
    put(seq, "a", 0)
    put(seq, "b", 5, oldest=3)
    lease = seq.get("train", timeout=0)
    inside: Any = seq._sequences
    inside.lender.ack(lease._claim, origin=Origin(ONE, 6, 3))
    seq.close()
    again = made(tmp_path)
    assert put(again, "b", 5) == [1]
    inside = again._sequences
    inside.lender.ack(None, origin=Origin(ONE, 6, 3))  # its lease is gone, its work is in the journal
    with pytest.raises(StaleHandle):
        put(again, "x", 2)
    assert put(again, "c", 7, oldest=5) == [2]
    assert again.ids() == ["b", "c"]


def test_a_rewritten_journal_knows_calls_whose_samples_have_left(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sharpwave.sequences.store.Store.is_wasteful", lambda *_: True)
    seq = made(tmp_path)
    for at in range(4):
        put(seq, f"{at}", at, oldest=1 if at else 0)
    for _ in range(2):
        seq.get("train", timeout=0).ack()
    for name in ("one", "two"):
        seq.checkpoint(name)
    seq.get("train", timeout=0).ack()
    for name in ("three", "four"):
        seq.checkpoint(name)
    seq.close()
    heads = [json.loads(record.head) for record in read_journal(tmp_path / "journal", KIND, where="test")]
    assert [head["serials"] for head in heads if "births" in head] == [[3]], "the others' records are gone"
    assert not any("origin" in head for head in heads), "they stand in the base, once"
    again = made(tmp_path)
    assert [put(again, f"{at}", at, oldest=1) for at in (1, 2, 3)] == [[1], [2], [3]]
    assert again.ids() == ["3"]
    again.close()
    resumed = made(tmp_path, resume="three")
    assert put(resumed, "1", 1, oldest=1) == [1]


def test_a_saved_copy_knows_the_calls(tmp_path: Path) -> None:
    seq = made(None)
    put(seq, "a", 0)
    seq.save(tmp_path / "copy")
    assert put(sw.open(tmp_path / "copy"), "a", 0) == [0]
    assert put(sw.open(f"file://{tmp_path / 'copy'}"), "a", 0) == [0]


def test_the_tokens_used_longest_ago_leave_and_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(origins, "_MOST_TOKENS", 3)
    monkeypatch.setattr(origins, "_MOST_NUMBERS", 4)
    known = Origins()
    for at in range(10):
        known.keep(Origin(ONE, at, at), (at, 1))
        known.keep(Origin(bytes([at]) * 16, 0, 0), None)
    assert (len(known), known.knows(Origin(ONE, 9, 9)), known.knows(Origin(bytes(16), 0, 0))) == (3, True, False)
    for at in range(10, 13):
        known.keep(Origin(ONE, at, 9), (at, 1))
    with pytest.raises(SchemaError, match=r"at most 4 calls .* from 9 on; tell a larger oldest"):
        known.knows(Origin(ONE, 13, 9))
    assert not known.knows(Origin(ONE, 13, 10))
    copy = Origins()
    copy.read(json.loads(json.dumps(known.to_json())))
    assert copy.to_json() == known.to_json()


@pytest.mark.parametrize(
    "wrong",
    [
        [["00", 0, []]],
        [["zz" * 16, 0, []]],
        [["00" * 16, -1, []]],
        [["00" * 16, 0, [[1, 2]]]],
        [["00" * 16, 0, [[-1]]]],
        7,
    ],
)
def test_what_is_no_list_of_calls_is_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Origins().read(wrong)
