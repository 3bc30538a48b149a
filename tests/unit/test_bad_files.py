"""Files that are absent, foreign, cut short, damaged or in the way: named reasons, and nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numbered import filled, make, numbers_in, row, state_of

import sharpwave as sw
from sharpwave.errors import StorageError


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Seventeen rows in a ring of ten, one of them masked, with an episode end."""
    buffer = filled(15)
    buffer.add(**row(15, mask=False))
    buffer.add(**row(16, done=True))
    path = tmp_path / "snapshot"
    buffer.save(path)
    return path


@pytest.fixture
def live(tmp_path: Path) -> Path:
    path = tmp_path / "live.sw"
    filled(15, storage=f"file://{path}").close()
    return path


# ---- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["{0}/absent", "file://{0}/absent", "shm://absent-for-sure"])
def test_absent_file_is_named(address: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot open .*absent.*No such file"):
        sw.open(address.format(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["tcp://host", "shm://", "shm://a/b", "file://", "weird://x"])
def test_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(StorageError, match=r"open\(\): expected"):
        sw.open(address)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_directory_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"is not a file|Is a directory"):
        sw.open(f"{prefix}{tmp_path}")


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("content", [b"", b"x", b"SHRPWAVE", b"not a table\n" * 1000, bytes(4096), bytes(100_000)])
def test_foreign_file_is_refused_and_left(prefix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StorageError, match="is not a Sharpwave table"):
        sw.open(f"{prefix}{path}")
    assert path.read_bytes() == content


def test_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = f"import sharpwave as sw\ntry: sw.open('{tmp_path}/pipe')\nexcept sw.errors.StorageError: print('refused')"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3, check=False)
    except subprocess.TimeoutExpired:
        pytest.fail("open() hangs")
    assert done.stdout == "refused\n"


def test_unwritable_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    buffer = filled(3)
    with pytest.raises(StorageError, match=r"save\(\): cannot make the folder"):
        buffer.save(tmp_path / "file" / "snapshot")
    with pytest.raises(StorageError, match=r"save\(\): cannot make the folder"):
        buffer.save(tmp_path / "file" / "deeper" / "snapshot")
    with pytest.raises(StorageError, match="cannot create"):
        make(storage=f"file://{tmp_path}/file/live.sw")
    with pytest.raises(StorageError, match="cannot create"):
        make(storage=f"file://{tmp_path}/absent/live.sw")
    with pytest.raises(StorageError, match="leave out the 'file://'"):
        buffer.save(f"file://{tmp_path}/x")
    with pytest.raises(StorageError, match="expected 'shm://name' or 'file://path'"):
        buffer.save("weird://x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "in the way"


def test_name_too_long_for_the_system_is_a_storage_error_to_open(tmp_path: Path) -> None:
    for address in (f"{tmp_path}/{'a' * 300}", f"file://{tmp_path}/{'a' * 300}"):
        with pytest.raises(StorageError, match="File name too long"):
            sw.open(address)


def test_name_too_long_for_the_system_is_a_storage_error_to_save(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="File name too long"):
        filled(3).save(tmp_path / ("a" * 300))


def test_save_makes_folders_and_replaces_an_older_snapshot_only(tmp_path: Path, live: Path) -> None:
    path = tmp_path / "run" / "deep" / "snapshot"
    filled(3).save(path)
    filled(5).save(path)
    assert numbers_in(sw.open(path)) == list(range(5))
    assert os.listdir(path.parent) == ["snapshot"]
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"years of work")
    with pytest.raises(StorageError, match="exists and is not a Sharpwave snapshot; give another path"):
        filled(3).save(notes)
    assert notes.read_bytes() == b"years of work"
    with pytest.raises(StorageError, match="exists and is not a file; give another path"):
        filled(3).save(tmp_path)
    before = live.read_bytes()
    with pytest.raises(StorageError, match="is a live table; give another path"):
        filled(3).save(live)
    assert live.read_bytes() == before
    leftovers = {entry.name for entry in tmp_path.iterdir()}
    assert leftovers == {"run", "notes.txt", "live.sw", "live.sw.lock"}


def test_refused_creation_leaves_nothing_beside_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"years of work")
    with pytest.raises(StorageError, match="exists"):
        make(storage=f"file://{tmp_path}/notes.txt")
    assert (tmp_path / "notes.txt").read_bytes() == b"years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_live_file_is_not_a_snapshot_and_the_reverse(snapshot: Path, live: Path) -> None:
    with pytest.raises(StorageError, match="is a live table; open it in place with"):
        sw.open(live)
    with pytest.raises(StorageError, match="is a snapshot; open it without file://"):
        sw.open(f"file://{snapshot}")
    with pytest.raises(StorageError, match="is a snapshot"):
        make(storage=f"file://{snapshot}", exist="attach")
    assert numbers_in(sw.open(snapshot)) == [7, 8, 9, 10, 11, 12, 13, 14, 16]


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_truncated_file_is_refused_at_every_length(prefix: str, snapshot: Path, live: Path) -> None:
    whole = (snapshot if prefix == "" else live).read_bytes()
    path = snapshot.parent / "cut"
    lengths = {1, 8, 100, 4095, 4096, 4097, 8192, len(whole) // 2, len(whole) - 4096, len(whole) - 1}
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError, match=r"truncated|is not a Sharpwave table"):
            sw.open(f"{prefix}{path}")
    path.write_bytes(whole + b"more")
    with pytest.raises(StorageError, match="truncated or has grown"):
        sw.open(f"{prefix}{path}")


def test_other_version_and_other_byte_order_are_named(snapshot: Path) -> None:
    whole = snapshot.read_bytes()
    snapshot.write_bytes(whole[:8] + (99).to_bytes(4, "little") + whole[12:])
    with pytest.raises(StorageError, match="has format version 99, this Sharpwave reads version 1"):
        sw.open(snapshot)
    snapshot.write_bytes(whole[:12] + whole[12:16][::-1] + whole[16:])
    with pytest.raises(StorageError, match="other byte order"):
        sw.open(snapshot)


HEADER_BYTES = 432 + 24 * 16
REGIONS = ["runtime", "counters", "writers", "blocks", "fields", "description", "rows", "words", "checksums"]


def regions_of(whole: bytes) -> dict[str, tuple[int, int]]:
    """Where each region lies, as core/storage/format.h has it."""
    table = np.frombuffer(whole, np.uint64, 48, 432).reshape(24, 2)
    found = {name: (int(table[i, 0]), int(table[i, 1])) for i, name in enumerate(REGIONS) if table[i, 1]}
    return {"header": (0, HEADER_BYTES), **found}


def flip(whole: bytes, at: int, bit: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :]


def wide_rows() -> sw.ReplayBuffer:
    """Rows over 1 KB: their words stand in a column of their own."""
    buffer = sw.ReplayBuffer(6, schema={"obs": sw.Field((400,))}, next_obs=None, seed=0)
    for number in range(9):
        buffer.add(obs=np.full(400, number), reward=float(number), done=number == 4)
    return buffer


@pytest.mark.parametrize("build", [lambda: filled(15), wide_rows, lambda: make()], ids=["small", "wide", "empty"])
def test_flipped_bit_of_a_snapshot_is_noticed_wherever_it_matters(
    build: Callable[[], sw.ReplayBuffer], tmp_path: Path
) -> None:
    buffer = build()
    path = tmp_path / "snapshot"
    buffer.save(path)
    whole = path.read_bytes()
    regions = regions_of(whole)
    if len(buffer):
        assert {"header", "counters", "writers", "blocks", "fields", "description", "rows", "checksums"} <= set(regions)
    loaded = state_of(sw.open(path))
    stream = np.random.default_rng(1)
    # Anywhere in the file, and in every region by name: padding is most of a small file.
    places = [int(at) for at in stream.integers(0, len(whole), 150)]
    for offset, size in regions.values():
        places += [offset, offset + size - 1, *(int(at) for at in stream.integers(offset, offset + size, 15))]
    assert len(places) > 250
    noticed = 0
    for at in places:
        path.write_bytes(flip(whole, at, int(stream.integers(8))))
        try:
            same = state_of(sw.open(path)) == loaded
        except StorageError:
            noticed += 1
            continue
        assert same, f"byte {at} changed the contents unnoticed"
        inside = [name for name, (offset, size) in regions.items() if offset <= at < offset + size]
        assert inside in ([], ["rows"]), f"byte {at} of {inside} is not covered by a checksum"
    assert noticed > 100


DAMAGED_LIVE = """
import sys
import numpy as np
import sharpwave as sw
for path in sys.argv[1:]:
    print(path, flush=True)
    try:
        buffer = sw.open("file://" + path)
    except sw.errors.StorageError:
        continue
    except Exception as error:
        print("not a StorageError:", type(error).__name__, error, flush=True)
        continue
    try:
        len(buffer), buffer.stats(), list(buffer.rows())
        buffer.add(np.zeros(2), 0.0, 0.0, np.zeros(2), False)
        buffer.sample(8)
        buffer.clear()
        buffer.add(np.zeros(2), 0.0, 0.0, np.zeros(2), False)
        list(buffer.rows())
    except sw.errors.SharpwaveError:
        pass
    except Exception as error:
        print("not an error of ours:", type(error).__name__, error, flush=True)
    buffer.close()
print("survived")
"""


def open_damaged(folder: Path, whole: bytes, places: list[tuple[int, int]]) -> str:
    """What a fresh process says when it opens and uses one damaged copy after another."""
    paths = []
    for i, (at, bit) in enumerate(places):
        path = folder / f"damaged-{i}-byte-{at}-bit-{bit}.sw"
        path.write_bytes(flip(whole, at, bit))
        paths.append(str(path))
    command = [sys.executable, "-c", DAMAGED_LIVE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    wrong = [line for line in done.stdout.splitlines() if line.startswith("not ")]
    last = done.stdout.splitlines()[-1] if done.stdout else "nothing"
    if done.returncode:
        return f"exit {done.returncode} at {last}"
    return "; ".join(wrong) or last


def test_flipped_bit_in_the_header_or_rows_of_a_live_file_never_crashes(live: Path, tmp_path: Path) -> None:
    whole = live.read_bytes()
    regions = regions_of(whole)
    stream = np.random.default_rng(2)
    places = [
        (int(stream.integers(offset, offset + size)), int(stream.integers(8)))
        for name in ("header", "runtime", "rows", "checksums", "blocks")
        for offset, size in [regions[name]]
        for _ in range(20)
    ]
    assert open_damaged(tmp_path, whole, places) == "survived"


def test_flipped_bit_in_the_counters_of_a_live_file_never_crashes(live: Path, tmp_path: Path) -> None:
    whole = live.read_bytes()
    offset, _ = regions_of(whole)["counters"]
    writers_used = offset + 4 * 64
    assert open_damaged(tmp_path, whole, [(writers_used + 5, 7)]) == "survived"


def test_damaged_description_of_a_live_file_is_a_storage_error(live: Path, tmp_path: Path) -> None:
    whole = live.read_bytes()
    offset, size = regions_of(whole)["description"]
    text = whole[offset : offset + size]
    shape = offset + text.index(b"[[2]") + 2
    assert open_damaged(tmp_path, whole, [(offset, 0), (shape, 0), (offset + size - 1, 3)]) == "survived"
