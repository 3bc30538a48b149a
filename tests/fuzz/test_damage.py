"""Damage of every class of bytes, in live files and snapshots: an error of ours with a reason, or a buffer that can be
used. Never a crash, never a hang, never a torn row where checksums are checked."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fuzz import layout
from fuzz.make_corpus import GROWN, LIVE, OLDER, STEPS, TABLES, fill, make
from fuzz.opener import Opener, Rows, rows_of, use

from sharpwave import _core

IS_SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
FLIPS_A_REGION = 400 if IS_SOAK else 3

# How a file came to be: saved; the increment beside such a one; live and closed; left by a process that was killed; the
# same, and the power went too.
FORMS = ("saved", "grown", "closed", "killed", "power went")
LIVE_FORMS = FORMS[2:]


@pytest.fixture(scope="module")
def opener() -> Iterator[Opener]:
    process = Opener()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory: thousands of files are flushed."""
    with tempfile.TemporaryDirectory(dir=_core.shared_memory_folder) as name:
        yield Path(name)


class Whole(NamedTuple):
    data: bytes  # that is damaged
    rows: Rows  # every one that was ever saved or is there
    base: bytes  # the snapshot that an increment stands beside


@pytest.fixture(scope="module")
def files(folder: Path) -> Any:
    """A table in one of its forms."""

    @cache
    def whole(table: str, form: str) -> Whole:
        path, saved, delta = (folder / f"{table}.{name}" for name in ("sw", "saved", "saved.delta"))
        for old in (path, saved, delta):
            old.unlink(missing_ok=True)
        steps = 0 if table == "empty" else STEPS
        buffer = make(table, f"file://{path}")
        fill(buffer, steps)
        rows = rows_of(buffer)
        buffer.save(saved)
        killed = path.read_bytes()
        if form == "grown":
            fill(buffer, 1)
            rows |= rows_of(buffer)
            buffer.save(saved, incremental=True)
            if not delta.exists():
                pytest.skip("one step changes half of so small a table: it is saved whole again")
        buffer.close()
        data = {"saved": saved, "closed": path, "grown": delta}.get(form)
        damaged = data.read_bytes() if data else killed
        if form == "power went":
            boot = next(span for span in layout.COUNTERS if span.name == "system")
            at = layout.regions_of(damaged)["counters"].offset + boot.offset + 8
            damaged = damaged[:at] + b"another boot".ljust(40, b"\0") + damaged[at + 40 :]
        made = Whole(damaged, rows, saved.read_bytes() if form == "grown" else b"")
        found = use(table, put(made.data, made, folder / "whole", form))
        assert "rows" in found, found
        assert found["strange"] == []
        assert (len(found["rows"]) > 0) == (table != "empty" or form == "grown")
        assert found["rows"].items() <= rows.items()
        return made

    return whole


def put(data: bytes, whole: Whole, path: Path, form: str) -> str:
    """Writes a file, with what belongs beside it; the address to open."""
    delta = Path(f"{path}.delta")
    delta.unlink(missing_ok=True)
    path.write_bytes(whole.base if form == "grown" else data)
    if form == "grown":
        delta.write_bytes(data)
    return f"file://{path}" if form in LIVE_FORMS else str(path)


def flip(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def flips_of(data: bytes, stream: np.random.Generator, header: bool) -> Iterator[tuple[str, int, int]]:
    """(what, byte, bit): of every number the lowest bit, the two highest and another; of every region some."""
    for span in layout.places_of(data):
        if span.name.startswith("header") and not header:
            continue
        size = span.size if "." not in span.name or span.name.startswith("fields") else min(span.size, 8)
        yield span.name, span.offset, 0
        yield span.name, span.offset + size - 1, 7
        yield span.name, span.offset + size - 1, 6  # the exponent, where it is a real number
        for _ in range(1 if "." in span.name else FLIPS_A_REGION):
            yield span.name, span.offset + int(stream.integers(size)), int(stream.integers(8))


def is_retired_flag(data: bytes, at: int, bit: int) -> bool:
    """Bit 8 of a word changes after the commit and no checksum covers it. A row that it brings back is a true one."""
    regions = layout.regions_of(data)
    words, stride = regions.get("words"), 8
    if words is None:
        words, stride = regions["rows"], layout.field(data, "row_bytes")
    return words.offset <= at < words.offset + words.size and (at - words.offset) % stride == 1 and bit == 0


def is_written_before(path: str, value: bytes, truth: bytes, form: str) -> bool:
    """What a mutable field had before it was written back. After a power loss that may be what is whole; below a
    damaged increment it is what the snapshot has, from before both writes of the last step."""
    writes = {"power went": 1, "grown": 2}.get(form)
    if path != "/state" or writes is None:
        return False
    return value == (np.frombuffer(truth, np.float32) - writes * OLDER).tobytes()


def wrong_rows(found: dict[str, Any], truth: Rows, form: str = "") -> list[str]:
    """Rows that were never added, or that differ from what was."""
    wrong = []
    for serial, row in found.get("rows", {}).items():
        if serial not in truth:
            wrong.append(f"row {serial} was never added")
        elif row != truth[serial]:
            paths = [
                path
                for path in row
                if row[path] != truth[serial].get(path)
                and not is_written_before(path, row[path], truth[serial][path], form)
            ]
            if paths:
                wrong.append(f"row {serial} differs in {paths}")
    return wrong


def test_every_region_and_record_is_known_by_the_page() -> None:
    documented = [name for index, name, _ in layout.table("Regions") if index.isdigit()]
    assert documented == layout.region_names()
    assert layout.HEADER_BYTES == layout.REGIONS_AT + 24 * 16


def test_every_region_is_in_some_table(files: Any) -> None:
    found = {name for table in LIVE for name in layout.regions_of(files(table, "closed").data)}
    found |= {name for form in ("saved", "grown") for name in layout.regions_of(files("wide", form).data)}
    assert found == set(layout.region_names())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("table", list(TABLES))
def test_flipped_bit_of_any_class_never_crashes_and_gives_no_torn_row(
    table: str, form: str, files: Any, opener: Opener, folder: Path
) -> None:
    whole = files(table, form)
    data = whole.data
    path = folder / "damaged.sw"
    stream = np.random.default_rng(list(TABLES).index(table))
    findings: list[str] = []
    for number, (what, at, bit) in enumerate(flips_of(data, stream, header=table == "plain")):
        if form in ("killed", "power went") and is_retired_flag(data, at, bit):
            continue  # a closed file is sealed
        for recover in (False, True) if number % 3 == 0 else (False,):
            found = opener.use(table, put(flip(data, at, bit), whole, path, form), recover)
            wrong = found["strange"] + ([found["died"]] if "died" in found else [])
            wrong += wrong_rows(found, whole.rows, form)
            how = f"{table}, {form}, recover={recover}: {what}, byte {at}, bit {bit}"
            findings += [f"{how}: {words}" for words in wrong]
    assert not findings, f"{len(findings)} findings:\n" + "\n".join(findings[:40])


def used_after(
    flips: tuple[int, int], table: str, form: str, files: Any, opener: Opener, folder: Path, recover: bool = False
) -> dict[str, Any]:
    whole = files(table, form)
    return opener.use(table, put(flip(whole.data, *flips), whole, folder / "damaged.sw", form), recover)


def test_count_of_rows_that_cannot_be_is_not_believed(files: Any, opener: Opener, folder: Path) -> None:
    whole = files("plain", "closed")
    live = next(span for span in layout.RECORDS["writers"] if span.name == "live")
    at = layout.regions_of(whole.data)["writers"].offset + live.offset + 5
    found = used_after((at, 0), "plain", "closed", files, opener, folder)
    assert "its counts and index have a wrong checksum" in found["refused"]
    found = used_after((at, 0), "plain", "closed", files, opener, folder, recover=True)
    assert found["strange"] == []
    assert found["rows"] == whole.rows


@pytest.mark.parametrize("table", [table for table in TABLES if table != "empty"])
def test_one_row_less_than_was_counted_is_noticed(table: str, files: Any, opener: Opener, folder: Path) -> None:
    """Nobody was in the middle of anything when this file was left: there is nothing to forgive."""
    live = next(span for span in layout.RECORDS["writers"] if span.name == "live")
    at = layout.regions_of(files(table, "killed").data)["writers"].offset + live.offset
    found = used_after((at, 0), table, "killed", files, opener, folder)
    assert "another number of rows than it counted" in found.get("refused", str(found))


@pytest.mark.parametrize("filler", [b"\0", b"\0\0\x80\x3f"], ids=["zeros", "numbers"])
def test_rows_without_any_record_are_counted_as_lost(filler: bytes, files: Any, opener: Opener, folder: Path) -> None:
    """Counters, records, words and checksums are gone at once: rows are known by their bytes alone."""
    whole = files("wide", "killed")
    regions = layout.regions_of(whole.data)
    first = min(regions[name].offset for name in ("counters", "writers", "blocks", "words", "checksums"))
    size = regions["rows"].offset - first
    data = whole.data[:first] + (filler * size)[:size] + whole.data[first + size :]
    found = opener.use("wide", put(data, whole, folder / "damaged.sw", "killed"), recover=True)
    assert found["strange"] == []
    assert found["rows"] == {}
    assert found["lost"] >= len(whole.rows)


def test_exponent_that_cannot_be_is_not_believed(files: Any, opener: Opener, folder: Path) -> None:
    alpha = next(span for span in layout.COUNTERS if span.name == "alpha")
    at = layout.regions_of(files("writers", "closed").data)["counters"].offset + alpha.offset + 7
    found = used_after((at, 6), "writers", "closed", files, opener, folder)
    assert "died" not in found
    assert found["strange"] == []


@pytest.mark.parametrize(("form", "recover"), [("closed", False), ("saved", True)])
def test_damaged_name_of_a_field_is_noticed(form: str, recover: bool, files: Any, opener: Opener, folder: Path) -> None:
    """The name stands in the field's record too."""
    whole = files("plain", form)
    _, offset, size = layout.regions_of(whole.data)["description"]
    at = whole.data.index(b'"done"', offset, offset + size) + 1
    found = used_after((at, 4), "plain", form, files, opener, folder, recover)
    assert wrong_rows(found, whole.rows) == []


def lengths_of(data: bytes) -> Iterator[tuple[str, int]]:
    """Every class of lengths that a cut or a growth may leave."""
    yield from (("nothing", 0), ("one byte", 1), ("the magic", 8))
    yield from ((f"the header {by:+}", layout.HEADER_BYTES + by) for by in (-1, 0, 1))
    yield from ((f"the first page {by:+}", layout.PAGE_BYTES + by) for by in (-1, 0, 1))
    for region in layout.regions_of(data).values():
        yield f"the start of {region.name}", region.offset
        yield f"inside {region.name}", region.offset + region.size // 2
        yield f"all but the end of {region.name}", region.offset + region.size - 1
        yield f"{region.name} and nothing after", region.offset + region.size
    yield from ((f"the file {by:+}", len(data) + by) for by in (-layout.PAGE_BYTES, -1, 1, 8, layout.PAGE_BYTES))


def rows_in(data: bytes, table: str, opener: Opener, folder: Path) -> Rows:
    """Of a whole snapshot."""
    return opener.use(table, put(data, Whole(data, {}, b""), folder / "base.sw", "saved"))["rows"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("table", ["plain", "wide", "heap", "windows", "empty", "mutable"])
def test_cut_or_grown_file_is_refused_at_every_class_of_lengths(
    table: str, form: str, files: Any, opener: Opener, folder: Path
) -> None:
    """And with recover=True it is refused, or opened without what the cut took."""
    whole = files(table, form)
    data = whole.data
    path = folder / "cut.sw"
    for what, length in lengths_of(data):
        if length == len(data):
            continue
        address = put(data[:length].ljust(length, b"\0"), whole, path, form)
        found = opener.use(table, address)
        if form == "grown" and length < layout.HEADER_BYTES:
            # Too short to say what it belongs to: as if it were not there.
            assert found.get("rows") == rows_in(whole.base, table, opener, folder), what
            continue
        reason = found.get("refused", f"not refused: {found}")
        assert "is truncated or has grown" in reason or "is not a Sharpwave table" in reason, f"{what}: {reason}"
        changed = Path(f"{path}.delta") if form == "grown" else path
        assert changed.stat().st_size == length, f"{what}: a refused file was changed"
        found = opener.use(table, address, recover=True)
        assert "died" not in found, f"{what}: {found['died']}"
        assert found["strange"] + wrong_rows(found, whole.rows, form) == [], what
        gone = whole.rows.keys() - found.get("rows", whole.rows).keys()
        assert form == "grown" or not gone or found["lost"], f"{what}: {len(gone)} rows are gone and nobody says so"


DATA = ("rows", "words", "checksums", "heap", "finals", "waiting", "mutables", "selectors")


def tables_and_forms() -> Iterator[Any]:
    for table, form, recover in itertools.product(TABLES, LIVE_FORMS, (False, True)):
        name = f"{table}-{form}{'-recover' if recover else ''}"
        yield pytest.param(table, form, recover, id=name)


@pytest.mark.parametrize(("table", "form", "recover"), list(tables_and_forms()))
def test_no_damaged_row_of_a_live_file_is_given_out(
    table: str, form: str, recover: bool, files: Any, opener: Opener, folder: Path
) -> None:
    """Bytes of rows, wherever they stand: the row is lost and the loss is counted, or the file is refused."""
    whole = files(table, form)
    data, truth = whole.data, whole.rows
    path = folder / "damaged.sw"
    stream = np.random.default_rng(list(TABLES).index(table))
    findings: list[str] = []
    regions = layout.regions_of(data)
    words = regions["words" if "words" in regions else "rows"]
    stride = 8 if "words" in regions else layout.field(data, "row_bytes")
    for region in (regions[name] for name in DATA if name in regions):
        places = region.offset + np.flatnonzero(np.frombuffer(data, np.uint8, region.size, region.offset))
        for at in stream.choice(places, min(len(places), 3 * FLIPS_A_REGION), replace=False).tolist():
            bit = int(stream.integers(8))
            # Whether a row is retired, or has a final observation, may change after it was written: no checksum covers
            # these bits of its word, nor does one cover what was never added.
            is_word = words.offset <= at < words.offset + words.size
            if is_word and (at - words.offset) % stride * 8 + bit in (0, 1, 5, 6, 7, 8, 9) and form != "closed":
                continue
            found = opener.use(table, put(flip(data, at, bit), whole, path, form), recover)
            findings += [f"{region.name}, byte {at}, bit {bit}: {why}" for why in wrong_rows(found, truth, form)]
            if found.get("rows", truth).keys() < truth.keys() and not found["lost"]:
                findings.append(f"{region.name}, byte {at}, bit {bit}: a row is gone and nobody says so")
    assert not findings, f"{table}, {form}: {len(findings)} findings:\n" + "\n".join(findings[:40])


# ---- any damage ------------------------------------------------------------------------------------------------------

SWEEP_FILES = int(os.environ.get("SHARPWAVE_DAMAGED_FILES", "5000" if IS_SOAK else "30"))
SECTOR = 512


def damaged(data: bytes, stream: np.random.Generator) -> bytes:
    """What disks, memory and people do to a file."""
    made = bytearray(data)
    size = len(made)
    # Mostly where something stands: most of a file is zeros.
    used = np.flatnonzero(np.frombuffer(data, np.uint8))

    def place() -> int:
        return int(stream.choice(used) if stream.random() < 0.7 else stream.integers(size))

    kind = stream.choice(["bit", "bits", "byte", "sector", "pages", "cut"], p=[0.35, 0.15, 0.15, 0.15, 0.1, 0.1])
    if kind == "cut":
        return bytes(made[: place()])
    if kind == "sector":
        at = place() // SECTOR * SECTOR
        made[at : at + SECTOR] = bytes(min(SECTOR, size - at))
    elif kind == "pages":  # two that changed places
        first, second = (place() // 4096 * 4096 for _ in range(2))
        one, two = bytes(made[first : first + 4096]), bytes(made[second : second + 4096])
        if len(one) == len(two):
            made[first : first + 4096], made[second : second + 4096] = two, one
    else:
        for _ in range({"bit": 1, "byte": 1}.get(str(kind), int(stream.integers(2, 30)))):
            made[place()] ^= int(stream.integers(1, 256)) if kind == "byte" else 1 << int(stream.integers(8))
    return bytes(made)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMS)
def test_damaged_file_gives_right_rows_or_is_told(form: str, files: Any, opener: Opener, folder: Path) -> None:
    stream = np.random.default_rng(FORMS.index(form))
    path = folder / "swept.sw"
    tables = [table for table in TABLES if table != "empty" and (form != "grown" or table in GROWN)]
    findings: list[str] = []
    outcomes = {"refused": 0, "whole": 0, "told": 0}
    for number in range(SWEEP_FILES):
        table = tables[number % len(tables)]
        whole = files(table, form)
        recover = bool(number // len(tables) % 2)
        data = damaged(whole.data, stream)
        found = opener.use(table, put(data, whole, path, form), recover)
        wrong = found["strange"] + wrong_rows(found, whole.rows, form) + ([found["died"]] if "died" in found else [])
        findings += [f"file {number}, {table}, recover={recover}: {why}" for why in wrong]
        is_whole = "rows" in found and found["rows"].keys() == whole.rows.keys()
        # An increment's rows are those of two moments, and some of the first are gone by the second.
        if "rows" in found and not is_whole and not found["lost"] and form != "grown":
            gone = len(whole.rows.keys() - found["rows"].keys())
            findings.append(f"file {number}, {table}, recover={recover}: {gone} rows are gone and nobody says so")
        outcomes["refused" if "rows" not in found else "whole" if is_whole else "told"] += 1
    print(f"{form}: {SWEEP_FILES} damaged files: {outcomes}, {len(findings)} findings")
    assert not findings, f"{len(findings)} findings:\n" + "\n".join(findings[:40])
