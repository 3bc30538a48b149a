"""The journal: a restart loses nothing that was put and repeats nothing that was trained, wherever the process died."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError, StorageError
from sharpwave.files import Entry, Journal
from sharpwave.sequences import store as store_module
from sharpwave.sequences.history import (
    ACK,
    AMEND,
    BASE,
    EVICT,
    MARK,
    MEND,
    PUT,
    VERSION,
    pack_samples,
    pack_whole,
    read_samples,
)

Sample = sw.SequenceSample
FLOW = sw.Dataflow([sw.Consumer("inf", {"a"}, {"b"}, 2), sw.Consumer("train", {"a", "b"}, batch_size=2)])


def sample(names: Any, key: str = "a", length: int = 3) -> Sample:
    listed = [str(name) for name in names]
    return Sample(listed, {key: [length] * len(listed)}, {key: np.arange(length * len(listed))}, metadata={"m": listed})


def open_at(path: Path, **options: Any) -> sw.SequenceBuffer:
    return sw.SequenceBuffer(100, flow=FLOW, journal=path / "journal", **options)


def infer(seq: sw.SequenceBuffer) -> None:
    with seq.get("inf", timeout=0) as lease:
        seq.amend(lease.handles, sample(lease.batch.ids, "b"))


def train(seq: sw.SequenceBuffer) -> list[str]:
    with seq.get("train", timeout=0) as lease:
        return lease.batch.ids


@pytest.mark.filterwarnings("ignore:.*was not written whole")
def test_keys_and_their_acknowledgement_are_one_record(tmp_path: Path) -> None:
    """A journal that ends at any byte has both or neither: else the trainer gets samples that the maker has to see."""
    seq = open_at(tmp_path)
    seq.put(sample("ab"))
    seq.close()
    whole = (tmp_path / "journal").stat().st_size
    seq = open_at(tmp_path)
    seq.get("inf", timeout=0).ack(sample("ab", "b"))
    raw = (tmp_path / "journal").read_bytes()[: seq.stats()["journal_bytes"]]  # reserved blocks follow
    seq.close()
    for end in range(whole, len(raw) + 1):
        (tmp_path / "journal").write_bytes(raw[:end])
        seq = open_at(tmp_path)
        said = seq.stats()["consumers"]
        assert (said["inf"]["ready"], said["train"]["ready"]) == ((0, 2) if end == len(raw) else (2, 0))
        seq.close()


def test_resuming_undoes_what_a_former_trainer_made_and_acknowledged(tmp_path: Path) -> None:
    """A consumer that made keys before the restart, and makes none in the new dataflow, is a trainer."""
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, {"b"}, 2), sw.Consumer("other", {"a"}, batch_size=2)])
    seq = sw.SequenceBuffer(100, flow=flow, journal=tmp_path / "journal")
    seq.put(sample("ab"))
    seq.checkpoint("one")
    seq.get("train", timeout=0).ack(sample("ab", "b"))
    seq.close()
    trainers = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=2), sw.Consumer("other", {"a"}, batch_size=2)])
    for resume in ("one", None):  # the second time from the journal that the first one wrote again
        seq = sw.SequenceBuffer(100, flow=trainers, journal=tmp_path / "journal", resume=resume)
        with seq.get("train", timeout=0) as lease:
            assert lease.batch.ids == ["a", "b"]
            lease.release()
        seq.close()


def test_a_restart_is_what_it_was(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    handles = seq.put(sample("abcdef"), version=2)
    infer(seq)
    infer(seq)
    train(seq)
    seq.set_version(5)
    lost = seq.get("inf", timeout=0)
    seq.close()

    seq = open_at(tmp_path)
    assert (seq.ids(), seq.version, seq.used_ids) == (["c", "d", "e", "f"], 5, ["a", "b"])
    assert seq.stats()["staleness"] == {3: 4}
    again = seq.get("inf", timeout=0)
    assert again.handles.tolist() == lost.handles.tolist() == handles[4:].tolist()
    assert again.batch == lost.batch
    with seq.get("train", timeout=0) as lease:
        assert lease.batch.ids == ["c", "d"]
        assert lease.batch.metadata == {"m": ["c", "d"]}
    assert seq.put(sample("g"))[0] == 6, "handles go on: none is given twice"


@pytest.mark.parametrize("births", [[1], None])
def test_a_restart_knows_whether_births_were_given(tmp_path: Path, births: list[int] | None) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("a"), births=births)  # 1 is what the order of puts would have given
    seq.close()
    seq = open_at(tmp_path)
    with pytest.raises(SchemaError, match="do not compare"):
        seq.put(sample("b"), births=None if births else [1])
    seq.put(sample("b"), births=births)


def test_wanted_leaves_out_what_is_held_and_once_what_was_trained(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("abcd"))
    infer(seq)
    train(seq)
    seq.close()
    seq = open_at(tmp_path)
    assert seq.wanted("abcdef") == ["e", "f"]
    infer(seq)
    train(seq)
    assert seq.wanted("abcdef") == list("abcdef"), "the next epoch wants them again"
    other = sw.SequenceBuffer(100, flow=FLOW)  # the seed's form: ids saved beside the checkpoint, data made anew
    other.mark_used(["a", "b"])
    assert other.wanted("abcd") == ["c", "d"]


def test_epochs_that_are_over_are_forgotten(tmp_path: Path) -> None:
    seq = open_at(tmp_path, epoch_size=3)
    for names in ("abcd", "efgh"):
        seq.put(sample(names))
        for _ in range(2):
            infer(seq)
            train(seq)
    assert seq.used_ids == ["g", "h"]
    seq.close()
    assert open_at(tmp_path, epoch_size=3).used_ids == ["g", "h"]


def test_resume_undoes_what_was_acknowledged_since(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("abcdefgh"))
    for step in range(3):
        infer(seq)
        train(seq)
        seq.set_version(step + 1)
        seq.checkpoint(f"step-{step}")
    infer(seq)
    train(seq)
    seq.close()
    for _ in range(2):  # what was undone stays undone
        seq = open_at(tmp_path, resume="step-1")
        assert (seq.ids(), seq.version) == (["e", "f", "g", "h"], 2)
        assert seq.used_ids == ["a", "b", "c", "d"]
        assert seq.stats()["consumers"]["inf"]["done"] == 4, "what 'inf' made is in the samples"
        assert seq.get("train", timeout=0).batch.ids == ["e", "f"]
        seq.close()
    with pytest.raises(StorageError, match=r"expected one of the marks .*got 'step-2'"):
        open_at(tmp_path, resume="step-2")


def test_rewriting_keeps_what_both_marks_need(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store_module.Store, "is_wasteful", lambda self, journal: True)
    seq = open_at(tmp_path, epoch_size=1000)
    sizes = []
    for step in range(40):
        seq.put(sample([f"{step}-{at}" for at in range(5)], length=500))
        for _ in range(2):
            infer(seq)
            train(seq)
        seq.checkpoint(f"step-{step}")
        sizes.append((tmp_path / "journal").stat().st_size)
    assert max(sizes) < 3 * 40 * 500 * 8 * 2, "what nobody needs is left out"
    assert sizes[-1] < sum(500 * 8 * 5 for _ in range(40)), sizes
    held, used = seq.ids(), seq.used_ids
    infer(seq)
    train(seq)
    seq.close()
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    seq = open_at(tmp_path, epoch_size=1000, resume="step-38")
    assert len(seq.used_ids) == 39 * 4
    assert seq.used_ids == used[: 39 * 4]
    assert set(seq.ids()) | set(seq.used_ids) == set(held) | set(used)
    assert len(seq.ids()) + len(seq.used_ids) == 40 * 5


def test_a_checkpoint_that_is_asked_for_again_leaves_the_one_before(tmp_path: Path, monkeypatch: Any) -> None:
    """A caller that did not get the answer asks again. It needs the one before if it dies before its own is written."""
    monkeypatch.setattr(store_module.Store, "is_wasteful", lambda self, journal: True)
    seq = open_at(tmp_path)
    seq.put(sample("abcdefgh"))
    for name in ("one", "two"):
        infer(seq)
        train(seq)
        seq.checkpoint(name)
    seq.close()
    seq = open_at(tmp_path)
    seq.checkpoint("two")
    seq.close()
    seq = open_at(tmp_path, resume="one")
    assert (seq.ids(), seq.used_ids) == (["c", "d", "e", "f", "g", "h"], ["a", "b"])


def test_the_file_is_rewritten_when_half_of_it_is_waste(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store_module, "_SLACK", 10_000)
    seq = open_at(tmp_path)
    sizes = []
    for step in range(40):
        seq.put(sample([f"{step}-a", f"{step}-b"], length=500))
        infer(seq)
        train(seq)
        seq.checkpoint(f"step-{step}")
        sizes.append((tmp_path / "journal").stat().st_size)
    assert max(sizes) < 15 * 500 * 8 * 4
    assert any(later < earlier for earlier, later in itertools.pairwise(sizes))
    seq.close()
    seq = open_at(tmp_path, resume="step-38")
    assert seq.ids() == ["39-a", "39-b"]
    assert len(seq.used_ids) == 78


def test_what_was_evicted_does_not_come_back_with_an_older_version(tmp_path: Path) -> None:
    seq = open_at(tmp_path, max_staleness=0)
    seq.put(sample("ab"), version=0)
    seq.checkpoint("before")
    seq.set_version(1)
    seq.put(sample("ab"), version=1)  # made anew
    seq.close()
    seq = open_at(tmp_path, max_staleness=0, resume="before")
    assert (seq.version, seq.ids(), seq.stats()["staleness"]) == (0, ["a", "b"], {-1: 2})


def written(path: Path, *puts: str) -> list[int]:
    """The journal of a buffer that was never closed, as after a kill; where each put ends."""
    seq = open_at(path)
    ends = [(path / "journal").stat().st_size]
    for names in puts:
        seq.put(sample(names))
        ends.append((path / "journal").stat().st_size)
    return ends


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_tail_is_cut_with_a_warning_and_a_count(tmp_path: Path, cut: int) -> None:
    ends = written(tmp_path, "ab", "cd")
    os.truncate(tmp_path / "journal", ends[1] + cut)
    with pytest.warns(UserWarning, match=f"not written whole: {cut} bytes are cut off") as told:
        seq = open_at(tmp_path)
    assert told[0].filename == __file__
    assert seq.ids() == ["a", "b"]
    assert seq.stats()["cut_bytes"] == cut
    seq.put(sample("cd"))
    seq.close()
    assert open_at(tmp_path).ids() == ["a", "b", "c", "d"]


def test_zeros_behind_the_end_are_cut(tmp_path: Path) -> None:
    ends = written(tmp_path, "ab")
    os.truncate(tmp_path / "journal", ends[1] + 5000)
    with pytest.warns(UserWarning, match="5000 bytes are cut off"):
        assert open_at(tmp_path).ids() == ["a", "b"]


def damage(path: Path, at: int, bit: int = 1) -> bytes:
    raw = bytearray((path / "journal").read_bytes())
    raw[at] ^= bit
    (path / "journal").write_bytes(raw)
    return bytes(raw)


@pytest.mark.parametrize("byte", range(0, 80))
def test_one_flipped_bit_is_refused_and_recovered_with_the_loss_counted(tmp_path: Path, byte: int) -> None:
    """Of a record in the middle: also where it is in the record's length."""
    ends = written(tmp_path, "a", "b", "c", "d", "e")
    damage(tmp_path, ends[1] + byte, 1 << byte % 8)
    size = ends[2] - ends[1]
    message = rf"damaged at byte {ends[1]}: {size} bytes with 1 records or more .*; 5 records .*recover=True"
    with pytest.raises(StorageError, match=message):
        open_at(tmp_path)
    assert (tmp_path / "journal").stat().st_size == ends[5], "refused, not mended"
    with pytest.warns(UserWarning, match=rf"1 records \({size} bytes\) are lost"):
        seq = open_at(tmp_path, recover=True)
    assert seq.ids() == ["a", "c", "d", "e"]
    told = seq.stats()
    assert (told["lost_records"], told["lost_bytes"], told["cut_bytes"]) == (1, size, 0)
    seq.close()
    seq = open_at(tmp_path)
    assert seq.put(sample("f"))[0] > 2**32, "no handle is given twice"
    seq.close()
    seq = open_at(tmp_path)  # it was written anew: nothing is damaged any more
    assert (seq.ids(), seq.stats()["lost_records"]) == (["a", "c", "d", "e", "f"], 0)


def test_what_a_producer_made_is_made_again_where_its_record_is_lost(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("ab"))
    lease = seq.get("inf", timeout=0)
    at = (tmp_path / "journal").stat().st_size
    seq.amend(lease.handles, sample("ab", "b"))
    lease.ack()
    seq.close()
    damage(tmp_path, at + 60)
    with pytest.warns(UserWarning, match="1 records"):
        seq = open_at(tmp_path, recover=True)
    for _ in range(2):  # a further restart finds the same, without recover=
        with pytest.raises(sw.errors.NotReady):
            seq.get("train", timeout=0)
        assert seq.get("inf", timeout=0).batch.ids == ["a", "b"]
        seq.close()
        seq = open_at(tmp_path)
    infer(seq)
    assert train(seq) == ["a", "b"]


def test_an_id_that_was_put_again_is_there_once_after_a_loss(tmp_path: Path) -> None:
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=1)])
    seq = sw.SequenceBuffer(10, flow=flow, journal=tmp_path / "journal")
    seq.put(sample("a"))
    at = (tmp_path / "journal").stat().st_size
    train(seq)
    seq.put(sample("a", length=5))
    seq.close()
    damage(tmp_path, at)
    with pytest.warns(UserWarning, match="1 records"):
        seq = sw.SequenceBuffer(10, flow=flow, journal=tmp_path / "journal", recover=True)
    assert seq.ids() == ["a"]
    assert seq.get("train", timeout=0).batch["a"].tolist() == [0, 1, 2, 3, 4]


def test_foreign_and_busy_files_are_refused(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    with pytest.raises(
        StorageError, match=rf"another buffer \(process {os.getpid()}\) has it open; close that one first"
    ):
        open_at(tmp_path)
    seq.close()
    (tmp_path / "journal").write_bytes(b"something else altogether")
    with pytest.raises(StorageError, match="not a journal"):
        open_at(tmp_path)
    with pytest.raises(StorageError, match="No such file"):
        sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "no" / "folder")
    for options in ({"sync": True}, {"resume": "x"}, {"recover": True}):
        with pytest.raises(SchemaError, match="need journal="):
            sw.SequenceBuffer(10, flow=FLOW, **options)
    with pytest.raises(SchemaError, match="needs SequenceBuffer"):
        sw.SequenceBuffer(10, flow=FLOW).checkpoint("x")


def test_records_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    with_records(tmp_path, Entry(99, {}))
    with pytest.raises(StorageError, match="newer Sharpwave"):
        open_at(tmp_path)


def with_records(path: Path, *entries: Entry) -> None:
    journal = Journal(path / "journal", "sequences")
    journal.append(entries)
    journal.close()


def body(*names: str) -> list[Any]:
    return pack_samples([sample(name) for name in names])


PUT_HEAD = {"serials": [0], "births": None, "versions": [None]}
CRAFTED = {
    "no JSON": [Entry(PUT, b"\xff\xfe")],
    "a list": [Entry(PUT, [1])],
    "deep JSON": [Entry(PUT, b"[" * 100_000)],
    "no serials": [Entry(PUT, {"births": None, "versions": []})],
    "serials that are text": [Entry(PUT, {**PUT_HEAD, "serials": ["0"]}, body("a"))],
    "serials beyond 64 bits": [Entry(PUT, {**PUT_HEAD, "serials": [2**64]}, body("a"))],
    "negative serials": [Entry(PUT, {**PUT_HEAD, "serials": [-1]}, body("a"))],
    "serials that are true": [Entry(PUT, {**PUT_HEAD, "serials": [True]}, body("a"))],
    "no sample": [Entry(PUT, PUT_HEAD)],
    "two samples": [Entry(PUT, PUT_HEAD, body("a", "b"))],
    "a sample twice": [Entry(PUT, PUT_HEAD, body("a"))] * 2,
    "births that are no numbers": [Entry(PUT, {**PUT_HEAD, "births": [None]}, body("a"))],
    "too few versions": [Entry(PUT, {**PUT_HEAD, "versions": []}, body("a"))],
    "versions that are no numbers": [Entry(PUT, {**PUT_HEAD, "versions": [0.5]}, body("a"))],
    "a body of three bytes": [Entry(PUT, PUT_HEAD, [b"abc"])],
    "a body that claims more": [Entry(PUT, PUT_HEAD, [b"\xff" * 8])],
    "a body that is no sample": [Entry(PUT, PUT_HEAD, [(8).to_bytes(8, "little"), b"\xff" * 8])],
    "an amend of another id": [Entry(PUT, PUT_HEAD, body("a")), Entry(AMEND, {"serials": [0]}, body("b"))],
    "an amend of no serials": [Entry(AMEND, {})],
    "an ack of nobody": [Entry(ACK, {"serials": []})],
    "an ack of a number": [Entry(ACK, {"serials": [], "consumer": 3})],
    "an ack of a list": [Entry(ACK, {"serials": [], "consumer": ["train"]})],
    "an evict of an object": [Entry(EVICT, {"serials": {"0": 1}})],
    "a version that is text": [Entry(VERSION, {"version": "1"})],
    "a version below 0": [Entry(VERSION, {"version": -1})],
    "a mark without a name": [Entry(MARK, {})],
    "a mend of nothing": [Entry(MEND, {})],
    "a mend of text": [Entry(MEND, {"redo": {"inf": "all"}, "gone": [], "next": 1})],
    "a base of nothing": [Entry(BASE, {})],
    "a base of other things": [Entry(BASE, {"used": [1], "trained": 0, "version": 0, "next": 0})],
    "a base of wrong numbers": [Entry(BASE, {"used": [], "trained": 0, "version": 0, "next": None})],
    "one key in two dtypes": [
        Entry(PUT, PUT_HEAD, body("a")),
        Entry(PUT, {**PUT_HEAD, "serials": [1]}, pack_samples([Sample(["b"], {"a": [1]}, {"a": np.ones(1)})])),
    ],
}


@pytest.mark.parametrize("name", CRAFTED)
def test_whole_records_that_make_no_sense_are_storage_errors(tmp_path: Path, name: str) -> None:
    with_records(tmp_path, *CRAFTED[name])
    with pytest.raises(StorageError, match=r"journal.*(record at byte [0-9]+|does not fit this buffer)"):
        open_at(tmp_path)
    open_at_again = Journal(tmp_path / "journal", "sequences")  # and the refused one was let go
    open_at_again.close()


def test_another_dataflow_is_refused(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("ab"))
    infer(seq)
    seq.close()
    with pytest.raises(StorageError, match="consumers that are not here"):
        sw.SequenceBuffer(10, flow=sw.Dataflow([sw.Consumer("train", {"a"})]), journal=tmp_path / "journal")


def test_journal_is_private_and_may_wait_for_the_disk(tmp_path: Path) -> None:
    seq = open_at(tmp_path, sync=True)
    seq.put(sample("ab"))
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    code = f"""
import resource, signal, numpy as np, sharpwave as sw
from sharpwave.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
flow = sw.Dataflow([sw.Consumer("train", {{"a"}}, batch_size=1)])
seq = sw.SequenceBuffer(100, flow=flow, journal={str(tmp_path / "journal")!r})
seq.put(sw.SequenceSample(["a"], {{"a": [1000]}}, {{"a": np.arange(1000)}}))
try:
    seq.put(sw.SequenceSample(["b"], {{"a": [3000]}}, {{"a": np.arange(3000)}}))
except StorageError as error:
    print(error)
print(seq.ids())
seq.put(sw.SequenceSample(["c"], {{"a": [5]}}, {{"a": np.arange(5)}}))
seq.close()
print(sw.SequenceBuffer(100, flow=flow, journal={str(tmp_path / "journal")!r}).ids())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "File too large; nothing was changed" in lines[0]
    assert lines[1:] == ["['a']", "['a', 'c']"]
    assert resource.RLIMIT_FSIZE is not None


# ---- 300 ids, batch 63, a checkpoint every 2 steps, killed at random -------------------------------------------------

TRAINER = Path(__file__).parent / "sequence_trainer.py"


@pytest.mark.parametrize("form", ["journal", "used ids"])
def test_each_epoch_trains_each_id_exactly_once_through_kills(tmp_path: Path, form: str) -> None:
    epochs, most = (100, 120) if os.environ.get("SHARPWAVE_SOAK") == "1" else (14, 14)
    stream = random.Random(7)
    command = [sys.executable, str(TRAINER), str(tmp_path), str(epochs), form]
    kills = 0
    deadline = time.monotonic() + 280
    while True:
        assert time.monotonic() < deadline
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            process.wait(stream.uniform(0.0, 0.1) if kills < most else 100)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills >= 10, "the test is about kills"
    trained = json.loads((tmp_path / "checkpoint.json").read_text())["trained"]
    assert len(trained) >= epochs * 300
    for epoch in range(epochs):
        part = trained[epoch * 300 : (epoch + 1) * 300]
        assert sorted(part) == sorted(f"id{at}" for at in range(300)), f"epoch {epoch}"


def test_a_sample_of_several_data_is_written_as_its_parts_are() -> None:
    lens = {"a": [[2, 1], [0], [3]], "b": [1, 1, 1]}
    whole = Sample("xyz", lens, {"a": np.arange(6), "b": np.ones((3, 2))}, metadata={"m": [1, None, "t"]})
    assert b"".join(pack_whole(whole)) == b"".join(pack_samples(whole.unpack()))


def test_records_look_into_the_samples_own_arrays() -> None:
    samples = [Sample([name], {"a": [4]}, {"a": np.arange(4)}) for name in "abc"]
    pieces = pack_samples(samples)
    for one in samples:
        assert any(piece is one["a"] for piece in pieces)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(12).reshape(2, 6)[:, ::2].reshape(6)[::-1],
        np.asfortranarray(np.arange(12.0).reshape(6, 2)),
        np.zeros((6, 0), np.float32),
        np.arange(6, dtype=">i4").astype("<i4"),
        np.array([True, False] * 3),
        np.arange(6, dtype=np.float16),
    ],
    ids=["strided", "by columns", "empty rows", "int32", "truth", "float16"],
)
def test_arrays_of_every_layout_come_back_from_one_record(values: Any) -> None:
    names = ["a", "b", "c"]
    samples = [Sample([name], {"x": [6]}, {"x": values}, metadata={"m": [name]}) for name in names]
    samples.append(Sample(["d"], {"x": [0]}, {"x": values[:0]}, metadata={"m": ["d"]}))
    samples.append(Sample(["e"], {"x": [6], "y": [2]}, {"x": values, "y": np.ones(2)}))  # a block of its own
    samples.append(Sample(["e"], {"y": [2], "x": [6]}, {"y": np.ones(2), "x": values}))  # so is a second one of an id
    body = b"".join(pack_samples(samples))
    assert read_samples(bytearray(body)) == samples
