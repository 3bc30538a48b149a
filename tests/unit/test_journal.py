"""Journals and replaced files: what was written comes back, and what cannot come back is told."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharpwave import _core
from sharpwave.errors import ClosedError, SchemaError, StorageError
from sharpwave.files import Entry, Journal, read_journal, replace_file, write_journal
from sharpwave.files.records import HEADER_BYTES, RECORD_BYTES

ENTRIES = [Entry(at, {"number": at}, [bytes([at]) * (1000 * at)]) for at in range(6)]


def read(path: Path, **options: Any) -> list[tuple[int, bytes, bytes]]:
    journal = Journal(path, "test", **options)
    try:
        found = [(record.kind, record.head, bytes(record.body)) for record in journal.records()]
        journal.append([])  # after a loss: a new file of what is whole
        return found
    finally:
        journal.close()


def expected(entries: list[Entry]) -> list[tuple[int, bytes, bytes]]:
    return [(one.kind, b'{"number":%d}' % one.head["number"], b"".join(one.body)) for one in entries]


def written(path: Path, close: bool = True) -> list[int]:
    """A journal of ENTRIES; where each record ends."""
    journal = Journal(path, "test")
    ends = [HEADER_BYTES]
    for entry in ENTRIES:
        journal.append([entry])
        ends.append(journal.size)
    if close:
        journal.close()
    return ends  # without close() the object dies here, as in a killed process


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    ends = written(tmp_path / "j")
    assert ends[-1] == (tmp_path / "j").stat().st_size
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600
    assert read(tmp_path / "j") == expected(ENTRIES)
    journal = Journal(tmp_path / "j", "test", sync=True)
    journal.append([Entry(9, b"bytes as they are"), Entry(10, {}, [b"a", bytearray(b"b"), memoryview(b"c")])])
    assert [record.body for record in journal.records()][-2:] == [b"", b"abc"]
    journal.close()
    assert len(read(tmp_path / "j")) == 8


def test_bodies_larger_than_a_chunk_are_whole_and_writable(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "test")
    parts = [os.urandom(1500) for _ in range(3000)]  # more pieces than one system call takes
    journal.append([Entry(1, {}, parts), Entry(2, {"x": "y" * 2_000_000}, [])])
    first, second = journal.records()
    assert first.body == b"".join(parts)
    assert second.head == b'{"x":"%s"}' % (b"y" * 2_000_000)
    first.body[0] ^= 1


def test_another_kind_of_journal_and_other_files_are_refused(tmp_path: Path) -> None:
    written(tmp_path / "j")
    with pytest.raises(StorageError, match="expected a journal of other, got one of 'test'"):
        Journal(tmp_path / "j", "other")
    (tmp_path / "text").write_text("something else altogether")
    with pytest.raises(StorageError, match="not a journal of this Sharpwave; remove it or give another path"):
        Journal(tmp_path / "text", "test")
    with pytest.raises(StorageError, match="No such file"):
        Journal(tmp_path / "no" / "folder", "test")
    with pytest.raises(SchemaError, match="expected a path"):
        Journal("a\0b", "test")
    assert (tmp_path / "text").read_text() == "something else altogether"


def test_a_newer_format_is_refused_by_its_version(tmp_path: Path) -> None:
    from sharpwave import _core

    written(tmp_path / "j")
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[16] = 2
    raw[60:64] = _core.crc32c(bytes(raw[:60])).to_bytes(4, "little")
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(StorageError, match="expected version 1 of the journal format, got 2"):
        Journal(tmp_path / "j", "test")


def test_an_empty_file_becomes_a_journal(tmp_path: Path) -> None:
    (tmp_path / "j").touch()
    written(tmp_path / "j")
    assert read(tmp_path / "j") == expected(ENTRIES)


def test_a_journal_has_one_owner_and_the_message_names_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "test", where="Buffer(): journal")
    with pytest.raises(StorageError, match=rf"another buffer \(process {os.getpid()}\) has it open; close that one"):
        Journal(tmp_path / "j", "test")
    start = time.monotonic()
    with pytest.raises(StorageError, match="has it open"):
        Journal(tmp_path / "j", "test", timeout=0.2)
    assert time.monotonic() - start >= 0.2
    journal.replace([])
    with pytest.raises(StorageError, match="has it open"):  # the file that took its place is owned too
        Journal(tmp_path / "j", "test")
    journal.close()
    journal.close()
    with pytest.raises(ClosedError, match="was closed"):
        journal.append([Entry(0, {})])
    Journal(tmp_path / "j", "test").close()


def test_a_forked_child_cannot_write_its_parents_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "test")
    journal.append(ENTRIES[:1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            verbs: list[Callable[[], Any]] = [
                lambda: journal.append(ENTRIES[1:2]),
                lambda: journal.replace([]),
                lambda: list(journal.records()),
            ]
            for verb in verbs:
                with pytest.raises(ClosedError, match=r"belongs to the parent.*a path of its own after the fork"):
                    verb()
            journal.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    journal.append(ENTRIES[1:2])
    journal.close()
    assert read(tmp_path / "j") == expected(ENTRIES[:2])


def test_a_killed_owner_with_a_living_child_owns_nothing(tmp_path: Path) -> None:
    code = f"""
import os, time
from sharpwave.files import Entry, Journal
journal = Journal({str(tmp_path / "j")!r}, "test")
journal.append([Entry(0, {{"number": 0}})])
if os.fork() == 0:
    print(os.getpid(), flush=True)  # it runs: until then it has all that its parent has
    time.sleep(600)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            with pytest.raises(StorageError, match=rf"process {owner.pid}"):
                read(tmp_path / "j")
            owner.kill()
            owner.wait()
            assert read(tmp_path / "j") == expected(ENTRIES[:1])
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("cut", [1, 7, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 5, 4000])
def test_a_torn_last_record_is_cut_with_a_warning_and_a_count(tmp_path: Path, cut: int) -> None:
    ends = written(tmp_path / "j", close=False)
    os.truncate(tmp_path / "j", ends[-2] + cut)
    journal = Journal(tmp_path / "j", "test")
    with pytest.warns(UserWarning, match=rf"last record was not written whole: {cut} bytes are cut off"):
        assert len(list(journal.records())) == 5
    assert (journal.cut_bytes, journal.lost_records) == (cut, 0)
    journal.append(ENTRIES[5:])
    journal.close()
    assert read(tmp_path / "j") == expected(ENTRIES)


def test_zeros_and_noise_behind_the_end_are_cut(tmp_path: Path) -> None:
    for rest in (bytes(5000), os.urandom(3_000_000)):
        written(tmp_path / "j", close=False)
        with open(tmp_path / "j", "ab") as file:
            file.write(rest)
        with pytest.warns(UserWarning, match=f"{len(rest)} bytes are cut off"):
            assert read(tmp_path / "j") == expected(ENTRIES)
        assert read(tmp_path / "j") == expected(ENTRIES)
        os.unlink(tmp_path / "j")


@pytest.mark.parametrize("byte", range(RECORD_BYTES))
def test_a_flipped_bit_in_a_record_header_is_refused_and_recovered(tmp_path: Path, byte: int) -> None:
    ends = written(tmp_path / "j", close=False)
    raw = bytearray((tmp_path / "j").read_bytes())
    raw[ends[2] + byte] ^= 0x10
    (tmp_path / "j").write_bytes(raw)
    size = ends[3] - ends[2]
    message = rf"damaged at byte {ends[2]}: {size} bytes with 1 records or more cannot be read; 5 records before"
    with pytest.raises(StorageError, match=message):
        read(tmp_path / "j")
    assert (tmp_path / "j").read_bytes()[:88] == raw[:88]
    assert (tmp_path / "j").read_bytes()[92:] == raw[92:]
    journal = Journal(tmp_path / "j", "test", recover=True)
    with pytest.warns(UserWarning, match=rf"1 records \({size} bytes\) are lost, 5 are whole"):
        assert [record.kind for record in journal.records()] == [0, 1, 3, 4, 5]
    assert (journal.lost_records, journal.lost_bytes, journal.cut_bytes) == (1, size, 0)
    assert (tmp_path / "j").stat().st_size == len(raw), "the file is as it was until something is written"
    assert len(list(journal.records())) == 5
    assert journal.append([ENTRIES[2]]) == size
    journal.close()
    assert read(tmp_path / "j") == expected([*ENTRIES[:2], *ENTRIES[3:], ENTRIES[2]])


def test_damage_before_a_torn_tail_is_damage(tmp_path: Path) -> None:
    ends = written(tmp_path / "j", close=False)
    raw = bytearray((tmp_path / "j").read_bytes()[:-10])
    raw[ends[4] + 8] ^= 1
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(StorageError, match=rf"damaged at byte {ends[4]}"):
        read(tmp_path / "j")
    journal = Journal(tmp_path / "j", "test", recover=True)
    with pytest.warns(UserWarning, match="was damaged"), pytest.warns(UserWarning, match="cut off"):
        assert len(list(journal.records())) == 4
    assert (journal.lost_records, journal.cut_bytes) == (1, ends[6] - ends[5] - 10)


@pytest.mark.parametrize("how", ["flip", "cut", "cut at a record", "zeros"])
def test_the_end_of_a_closed_journal_is_never_taken_for_torn(tmp_path: Path, how: str) -> None:
    ends = written(tmp_path / "j")
    raw = bytearray((tmp_path / "j").read_bytes())
    if how == "flip":
        raw[-1] ^= 1
    elif how == "zeros":
        raw[ends[5] :] = bytes(ends[6] - ends[5])
    else:
        del raw[ends[5] + (3 if how == "cut" else 0) :]
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(StorageError, match=rf"damaged at byte {ends[5]}.* with 1 records"):
        read(tmp_path / "j")
    with pytest.warns(UserWarning, match="1 records"):
        assert read(tmp_path / "j", recover=True) == expected(ENTRIES[:5])


def test_removed_and_repeated_records_are_told(tmp_path: Path) -> None:
    ends = written(tmp_path / "j", close=False)
    raw = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(raw[: ends[2]] + raw[ends[4] :])
    with pytest.raises(StorageError, match="2 records are missing between others; 4 records are whole"):
        read(tmp_path / "j")
    (tmp_path / "j").write_bytes(raw[: ends[4]] + raw[ends[2] :])
    with pytest.raises(StorageError, match=rf"damaged at byte {ends[4]}"):
        read(tmp_path / "j")
    with pytest.warns(UserWarning, match="0 records"):
        assert read(tmp_path / "j", recover=True) == expected(ENTRIES)


def test_a_damaged_file_header_is_refused_and_recovered(tmp_path: Path) -> None:
    for start, end in ((3, 4), (41, 42), (0, 128), (0, 130)):
        written(tmp_path / "j")
        raw = bytearray((tmp_path / "j").read_bytes())
        raw[start:end] = bytes(byte ^ 0xFF for byte in raw[start:end])
        (tmp_path / "j").write_bytes(raw)
        with pytest.raises(StorageError, match=r"but the file has records; .*recover=True"):
            read(tmp_path / "j")
        with pytest.warns(UserWarning, match="was damaged"):
            assert read(tmp_path / "j", recover=True) == expected(ENTRIES[1 if end > 128 else 0 :])
        assert read(tmp_path / "j") == expected(ENTRIES[1 if end > 128 else 0 :])
        os.unlink(tmp_path / "j")


def test_another_journal_inside_a_body_is_not_taken_for_records(tmp_path: Path) -> None:
    written(tmp_path / "other")
    journal = Journal(tmp_path / "j", "test")
    journal.append([ENTRIES[0], Entry(1, {}, [(tmp_path / "other").read_bytes()])])
    end = journal.size
    del journal
    os.truncate(tmp_path / "j", end - 1)
    with pytest.warns(UserWarning, match="cut off"):
        assert read(tmp_path / "j") == expected(ENTRIES[:1])


def test_a_record_that_claims_more_than_the_file_takes_no_memory(tmp_path: Path) -> None:
    from sharpwave import _core

    ends = written(tmp_path / "j", close=False)
    raw = bytearray((tmp_path / "j").read_bytes())
    at = ends[5]
    raw[at + 24 : at + 32] = (1 << 60).to_bytes(8, "little")
    raw[at + 36 : at + 40] = _core.crc32c(bytes(raw[at : at + 36])).to_bytes(4, "little")
    (tmp_path / "j").write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.warns(UserWarning, match="cut off"):
        assert len(read(tmp_path / "j")) == 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_content_that_makes_no_sense_is_a_storage_error_that_names_the_byte(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "test")
    journal.append([Entry(0, b"{"), Entry(0, b"[1]"), Entry(0, b'{"a": 1}')])
    first, second, third = journal.records()
    with pytest.raises(StorageError, match=r"record at byte 128 has right checksums and wrong content"):
        journal.head(first)
    with pytest.raises(StorageError, match="expected an object, got list"):
        journal.head(second)
    with pytest.raises(StorageError, match="KeyError: 'b'"), journal.reading(third):
        assert journal.head(third)["b"]


def test_replacing_is_one_step_and_keeps_what_fails(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "test")
    journal.append(ENTRIES)
    identity = journal.identity
    journal.replace(Entry(one.kind, one.head, [one.body]) for one in journal.records() if one.kind % 2)
    assert journal.identity != identity
    journal.append([ENTRIES[0]])

    def failing() -> Any:
        yield ENTRIES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.replace(failing())
    journal.append([ENTRIES[2]])
    os.rename(tmp_path / "j", tmp_path / "moved")
    (tmp_path / "j").write_text("another file")
    with pytest.raises(StorageError, match="another file has this name now"):
        journal.replace([])
    journal.close()
    assert (tmp_path / "j").read_text() == "another file"
    assert read(tmp_path / "moved") == expected([ENTRIES[at] for at in (1, 3, 5, 0, 2)])
    assert sorted(os.listdir(tmp_path)) == ["j", "moved"]


def test_a_relative_path_keeps_its_file_after_chdir(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal("j", "test")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    journal.replace(ENTRIES)
    journal.close()
    assert os.listdir(tmp_path / "sub") == []
    assert read(tmp_path / "j") == expected(ENTRIES)


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    code = f"""
import resource, signal
from sharpwave.errors import StorageError
from sharpwave.files import Entry, Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
journal = Journal({str(tmp_path / "j")!r}, "test")
journal.append([Entry(0, {{"number": 0}}, [bytes(10_000)])])
for verb in (journal.append, journal.replace):
    try:
        verb([Entry(1, {{}}, [bytes(5000)]), Entry(1, {{}}, [bytes(50_000)])])
    except StorageError as error:
        print(error)
journal.append([Entry(2, {{"number": 2}})])
journal.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "File too large; nothing was changed" in done.stdout.splitlines()[0]
    assert [kind for kind, _, _ in read(tmp_path / "j")] == [0, 2]


def test_readers_need_no_ownership_and_change_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "test")
    journal.append(ENTRIES)
    assert [record.kind for record in read_journal(tmp_path / "j", "test")] == list(range(6))
    size = journal.size
    del journal
    with open(tmp_path / "j", "ab") as file:
        file.write(b"half a record")
    assert len(list(read_journal(tmp_path / "j", "test"))) == 6
    raw = bytearray((tmp_path / "j").read_bytes())
    assert len(raw) == size + 13
    raw[200] ^= 1
    (tmp_path / "j").write_bytes(raw)
    with pytest.raises(StorageError, match=r"damaged at byte .*recover=True"):
        list(read_journal(tmp_path / "j", "test"))
    assert len(list(read_journal(tmp_path / "j", "test", recover=True))) == 5
    assert (tmp_path / "j").read_bytes() == raw
    with pytest.raises(StorageError, match="No such file"):
        list(read_journal(tmp_path / "none", "test"))


def test_a_journal_may_be_written_whole(tmp_path: Path) -> None:
    for sync in (True, False):
        assert write_journal(tmp_path / "j", "test", iter(ENTRIES), sync) == (tmp_path / "j").stat().st_size
        assert read(tmp_path / "j") == expected(ENTRIES)
    os.truncate(tmp_path / "j", (tmp_path / "j").stat().st_size - 1)
    with pytest.raises(StorageError, match="damaged"):
        read(tmp_path / "j")


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert replace_file(path, [b"one", bytearray(b"two")]) == 6
    assert replace_file(path, iter([bytes(2_000_000), b"x"]), sync=False) == 2_000_001
    assert path.read_bytes() == bytes(2_000_000) + b"x"
    assert path.stat().st_mode & 0o777 == 0o600

    def failing() -> Any:
        yield b"y" * 3_000_000
        raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        replace_file(path, failing())
    assert path.stat().st_size == 2_000_001
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(StorageError, match="No such file"):
        replace_file(tmp_path / "no" / "folder", [b""])


def slow_crc32c(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1024, 3071, 3072, 3073, 6144, 6151, 9999])
def test_checksum_of_any_length_is_that_of_the_definition(size: int) -> None:
    data = random.Random(size).randbytes(size + 5)
    for start in (0, 1, 5):  # also from addresses that are not aligned
        part = memoryview(data)[start : start + size]
        assert _core.crc32c(part, 77) == slow_crc32c(bytes(part), 77)
    whole = _core.Checksum([data[:size], b"", memoryview(data)[size:]])
    assert (whole.finish(), whole.size) == (slow_crc32c(data), len(data))
    assert _core.crc32c_combine(slow_crc32c(b"head"), whole.finish(), whole.size) == slow_crc32c(b"head" + data)


def test_checksum_of_no_pieces_is_that_of_nothing() -> None:
    assert (_core.Checksum([]).finish(), _core.Checksum([]).size) == (0, 0)
    assert _core.crc32c_combine(5, 0, 0) == 5
    with pytest.raises(TypeError):
        _core.Checksum([b"a", "no bytes"])


@pytest.mark.parametrize("helps", ["begin", "compute"])
def test_checksum_that_another_thread_computes_is_the_same(helps: str) -> None:
    pieces = [np.arange(100_000, dtype=np.int32), b"x" * 70_001, np.zeros((3, 0)), np.ones((50, 7), np.float16)]
    expected = _core.crc32c(b"".join(pieces))
    for _ in range(50):
        made = _core.Checksum(pieces)
        helper = threading.Thread(target=getattr(made, helps))
        helper.start()
        assert made.finish() == expected
        assert made.finish() == expected
        helper.join()
    _core.Checksum(pieces).begin()  # nobody asks for it


def test_long_record_is_incomplete_until_its_header_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header comes last: the checksum is computed while the rest is written."""
    real, writes = os.pwritev, []

    def watch(file: int, pieces: list[Any], at: int) -> int:
        written = real(file, pieces, at)
        writes.append((at, written, [record.head for record in read_journal(tmp_path / "journal", "test")]))
        return written

    journal = Journal(tmp_path / "journal", "test")
    journal.append([Entry(1, b'"before"')])
    monkeypatch.setattr(os, "pwritev", watch)
    body = [np.arange(50_000), b"y" * 1000]
    journal.append([Entry(1, b'"small"'), Entry(2, b'"long"', body), Entry(2, b'"more"', body), Entry(1, b'"last"')])
    heads = [b'"before"', b'"small"', b'"long"', b'"more"', b'"last"']
    assert [seen for _, _, seen in writes] == [heads[:2], heads[:3], heads[:3], heads[:4], heads]
    assert writes[1][1] == writes[3][1] == 40
    monkeypatch.undo()
    journal.close()
    found = list(read_journal(tmp_path / "journal", "test"))
    assert [record.head for record in found] == heads
    assert found[2].body == found[3].body == b"".join(body)


def test_blocks_that_are_reserved_behind_the_records_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, "test")
    long = Entry(1, b'"long"', [bytes(300_000)])
    for _ in range(3):
        journal.append([long])

    def reserved() -> int:
        return os.stat(path).st_blocks * 512 - os.stat(path).st_size

    if reserved() < 1_000_000:
        pytest.skip("the file system reserves nothing")
    assert os.stat(path).st_size == journal.size
    real = os.pwritev

    def full(file: int, pieces: list[Any], at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="nothing was changed"):
        journal.append([long])
    assert reserved() < 100_000
    monkeypatch.setattr(os, "pwritev", real)
    journal.append([long])
    assert reserved() > 1_000_000
    journal._file.close()  # as a kill does
    with pytest.raises(ClosedError):
        journal.append([long])
    again = Journal(path, "test")
    assert len(list(again.records())) == 4
    assert reserved() < 100_000
    again.append([long])
    assert reserved() > 1_000_000
    again.close()
    assert reserved() < 100_000


def test_pieces_of_any_shape_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system writes less than it was asked to."""
    real = os.pwritev

    def some(file: int, pieces: Any, at: int) -> int:
        sizes = [memoryview(piece).nbytes for piece in pieces]
        return real(file, [memoryview(pieces[0]).cast("B")[:11]], at) if sum(sizes) > 11 else real(file, pieces, at)

    body = [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        b"",
        np.zeros((0, 3)),
        bytearray(b"end"),
        np.bool_([1, 0]),
    ]
    monkeypatch.setattr(os, "pwritev", some)
    journal = Journal(tmp_path / "j", "test")
    journal.append([Entry(1, {"number": 1}, body), Entry(2, {"number": 2}, [])])
    journal.close()
    whole = body[0].tobytes() + b"end" + b"\1\0"
    assert read(tmp_path / "j") == [(1, b'{"number":1}', whole), (2, b'{"number":2}', b"")]
