"""docs/format.md is the specification of the bytes: these tests read files by its tables alone."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import sharpwave as sw

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
SIZES = {4: "<I", 8: "<Q"}


def table(heading):
    """The rows of the first table under a heading, as lists of cells."""
    section = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def fields_of(heading, data, base=0):
    """Name to value, for the numbers that a table with (offset, bytes, field) describes."""
    found = {}
    for offset, size, name, *_ in table(heading):
        name = re.split(r"[:; ,]", name)[0]
        if int(size) in SIZES:
            found[name] = struct.unpack_from(SIZES[int(size)], data, base + int(offset))[0]
    return found


def regions_of(data):
    names = {int(index): name for index, name, _ in table("Regions") if index.isdigit()}
    return {name: struct.unpack_from("<QQ", data, 432 + 16 * index) for index, name in names.items()}


def crc32c(data, crc=0):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seal_of(data):
    """As the page says it."""
    header, regions = fields_of("Header: page 0", data), regions_of(data)
    offsets = {name: int(offset) for offset, name, _ in table("Counters")}
    stride, rows = (8, "words") if not header["word_is_embedded"] else (header["row_bytes"], "rows")
    words = []
    for block in range(header["blocks"]):
        ticket = struct.unpack_from("<Q", data, regions["blocks"][0] + 64 * block + 8)[0]
        slots = range(block * header["block_rows"], min((block + 1) * header["block_rows"], header["slots"]))
        crc = 0
        for slot in slots if ticket != 2**64 - 1 else ():
            at = regions[rows][0] + slot * stride
            crc = crc32c(data[at : at + 8], crc)
        words.append(crc)
    crc = crc32c(struct.pack(f"<{len(words)}I", *words))
    counters = bytearray(data[regions["counters"][0] :][: regions["counters"][1]])
    for name in ("clean", "seal"):
        counters[offsets[name] : offsets[name] + 8] = bytes(8)
    crc = crc32c(counters, crc)
    for name in ("writers", "blocks", "checksums", "priorities", "given", "episodes", "reads", "finals", "selectors"):
        at, size = regions[name]
        crc = crc32c(data[at : at + size], crc)
    return crc


@pytest.fixture
def written(tmp_path):
    """A live file and a snapshot of the same buffer, closed, as bytes."""
    buf = sw.ReplayBuffer(
        6,
        schema={"obs": sw.Field((3,), "int16"), "action": sw.Field((), "float64")},
        num_envs=2,
        seed=99,
        storage=f"file://{tmp_path}/live.sw",
    )
    for step in range(5):
        buf.add(
            obs=np.full((2, 3), step),
            action=np.arange(2) + step,
            reward=[step, step],
            next_obs=np.zeros((2, 3), int),
            terminated=[step == 3, False],
            truncated=[False, step == 2],
            mask=[True, step != 4],
        )
    buf.sample(4)
    buf.save(tmp_path / "snapshot")
    buf.close()
    return (tmp_path / "live.sw").read_bytes(), (tmp_path / "snapshot").read_bytes()


def test_header_is_where_the_page_says(written):
    for data, kind in zip(written, (1, 2), strict=True):
        header = fields_of("Header: page 0", data)
        assert data[:8] == b"SHRPWAVE"
        assert header["version"] == 2
        assert header["endian_mark"] == 0x01020304
        assert header["kind"] == kind
        assert header["total_bytes"] == len(data)
        assert (header["capacity"], header["slots"], header["width"], header["seed"]) == (6, 6, 2, 99)
        assert header["field_count"] == 5
        assert header["has_checksums"] == 1
        whole = bytearray(data[:816])
        whole[20:24] = bytes(4)
        assert header["header_crc"] == crc32c(whole)


def test_rows_words_and_checksums_are_where_the_page_says(written):
    for data in written:
        header, regions = fields_of("Header: page 0", data), regions_of(data)
        records = {}
        for i in range(header["field_count"]):
            at = regions["fields"][0] + 256 * i
            record = fields_of("Field record", data, at)
            records[data[at : at + 96].rstrip(b"\0").decode()] = (
                data[at + 96 : at + 112].rstrip(b"\0"),
                record["offset"],
            )
        assert records["obs"][0] == b"<i2"
        assert records["action"][1] == header["payload_offset"], "the largest items come first"
        counted = {}
        for slot in range(header["slots"]):
            row = regions["rows"][0] + slot * header["row_bytes"]
            word = struct.unpack_from("<Q", data, row)[0]
            serial, state = word >> 10, word & 3
            # What stays as the add left it. Other flags change while a table lives, and no more in a snapshot.
            told_truncated = bool(word & 16) and not word & 32
            lasting = serial << 4 | (state == 3) << 3 | told_truncated << 2 | bool(word & 8) << 1 | bool(word & 4)
            step = int(np.frombuffer(data, "<i2", 1, row + records["obs"][1])[0])
            if state == 2:
                counted[serial] = (step, bool(word & 8), bool(word & 16), bool(word & 32))
                payload = data[row + 8 : row + 8 + 2 * 3 + 8 + 4 + 6 + 1]
                crc = struct.unpack_from("<I", data, regions["checksums"][0] + 4 * slot)[0]
                assert crc == crc32c(struct.pack("<Q", lasting if header["kind"] == 1 else word) + payload)
            elif header["kind"] == 1 and state == 3:
                crc = struct.unpack_from("<I", data, regions["checksums"][0] + 4 * slot)[0]
                assert crc == crc32c(struct.pack("<Q", lasting))
            assert slot == serial % (header["blocks"] * header["block_rows"])
        # Steps 2, 3 and 4 are left; env 0 terminated at 3, env 1 was truncated at 2 and masked at 4.
        is_closed = data is written[0]  # closing ended what was open as truncated; the snapshot was taken before
        assert counted == {
            4: (2, False, False, False),
            5: (2, False, True, False),
            6: (3, True, False, False),
            7: (3, False, is_closed, is_closed),
            8: (4, False, is_closed, is_closed),
        }


def test_counters_and_description_are_where_the_page_says(written):
    for data in written:
        regions = regions_of(data)
        offsets = {name: int(offset) for offset, name, _ in table("Counters")}
        value = {
            name: struct.unpack_from("<Q", data, regions["counters"][0] + offset)[0]
            for name, offset in offsets.items()
            if " " not in name
        }
        assert value["call_number"] == 1
        assert value["rows_sampled"] == 4
        assert value["incarnation"] == 1
        assert value["writers_used"] == 1
        assert value["clean"] == (1 if data is written[0] else 0)
        if data is written[0]:
            assert value["seal"] == seal_of(data)
        start, size = regions["description"]
        assert json.loads(data[start : start + size])["num_envs"] == 2
        writer = fields_of("Writer record", data, regions["writers"][0])
        assert (writer["added"], writer["voided"], writer["episodes"], writer["live"]) == (9, 1, 2, 5)
        block = fields_of("Block record", data, regions["blocks"][0])
        assert block["ticket"] == 3, "the ring of three steps went round once"
