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
from sharpwave.sequences import journal as journal_module

Sample = sw.SequenceSample
FLOW = sw.Dataflow([sw.Consumer("inf", {"a"}, {"b"}, 2), sw.Consumer("train", {"a", "b"}, batch_size=2)])


def sample(names: Any, key: str = "a", length: int = 3) -> Sample:
    listed = [str(name) for name in names]
    return Sample(listed, {key: [length] * len(listed)}, {key: np.arange(length * len(listed))}, metadata={"m": listed})


def open_at(path: Path, **options: Any) -> sw.SequenceBuffer:
    return sw.SequenceBuffer(FLOW, 100, journal=path / "journal", **options)


def infer(seq: sw.SequenceBuffer) -> None:
    with seq.get("inf", timeout=0) as lease:
        seq.amend(lease.handles, sample(lease.batch.ids, "b"))


def train(seq: sw.SequenceBuffer) -> list[str]:
    with seq.get("train", timeout=0) as lease:
        return lease.batch.ids


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
    other = sw.SequenceBuffer(FLOW, 100)  # the seed's form: ids saved beside the checkpoint, data made anew
    other.take_up(["a", "b"])
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
    monkeypatch.setattr(journal_module.Journal, "is_wasteful", lambda self: True)
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


def test_the_file_is_rewritten_when_half_of_it_is_waste(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(journal_module, "_SLACK", 10_000)
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


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_tail_is_cut(tmp_path: Path, cut: int) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("ab"))
    whole = (tmp_path / "journal").stat().st_size
    seq.put(sample("cd"))
    seq.close()
    os.truncate(tmp_path / "journal", whole + cut)
    seq = open_at(tmp_path)
    assert seq.ids() == ["a", "b"]
    seq.put(sample("cd"))
    seq.close()
    assert open_at(tmp_path).ids() == ["a", "b", "c", "d"]


def test_zeros_behind_the_end_are_cut(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("ab"))
    seq.close()
    os.truncate(tmp_path / "journal", (tmp_path / "journal").stat().st_size + 5000)
    assert open_at(tmp_path).ids() == ["a", "b"]


def test_damage_before_whole_records_is_refused(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    for names in ("ab", "cd", "ef"):
        seq.put(sample(names))
    seq.close()
    raw = bytearray((tmp_path / "journal").read_bytes())
    raw[100] ^= 0xFF
    (tmp_path / "journal").write_bytes(raw)
    with pytest.raises(StorageError, match=r"damaged at byte 16, and [0-9]+ bytes follow"):
        open_at(tmp_path)
    assert (tmp_path / "journal").read_bytes() == raw, "refused, not mended"


def test_foreign_and_busy_files_are_refused(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    with pytest.raises(StorageError, match="another process writes it"):
        open_at(tmp_path)
    seq.close()
    (tmp_path / "journal").write_bytes(b"something else altogether")
    with pytest.raises(StorageError, match="not a journal"):
        open_at(tmp_path)
    with pytest.raises(StorageError, match="No such file"):
        sw.SequenceBuffer(FLOW, 10, journal=tmp_path / "no" / "folder")
    for options in ({"sync": True}, {"resume": "x"}):
        with pytest.raises(SchemaError, match="need journal="):
            sw.SequenceBuffer(FLOW, 10, **options)
    with pytest.raises(SchemaError, match="needs SequenceBuffer"):
        sw.SequenceBuffer(FLOW, 10).checkpoint("x")


def test_records_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    file = journal_module.Journal(tmp_path / "journal", sync=False)
    file.write(99, {})
    file.close()
    with pytest.raises(StorageError, match="newer Sharpwave"):
        open_at(tmp_path)


def test_another_dataflow_is_refused(tmp_path: Path) -> None:
    seq = open_at(tmp_path)
    seq.put(sample("ab"))
    infer(seq)
    seq.close()
    with pytest.raises(StorageError, match="consumers that are not here"):
        sw.SequenceBuffer(sw.Dataflow([sw.Consumer("train", {"a"})]), 10, journal=tmp_path / "journal")


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
seq = sw.SequenceBuffer(flow, 100, journal={str(tmp_path / "journal")!r})
seq.put(sw.SequenceSample(["a"], {{"a": [1000]}}, {{"a": np.arange(1000)}}))
try:
    seq.put(sw.SequenceSample(["b"], {{"a": [3000]}}, {{"a": np.arange(3000)}}))
except StorageError as error:
    print(error)
print(seq.ids())
seq.put(sw.SequenceSample(["c"], {{"a": [5]}}, {{"a": np.arange(5)}}))
seq.close()
print(sw.SequenceBuffer(flow, 100, journal={str(tmp_path / "journal")!r}).ids())
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
    epochs, most = (100, 120) if os.environ.get("SHARPWAVE_SOAK") == "1" else (20, 20)
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
