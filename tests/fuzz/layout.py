"""Where everything stands in a table's file, read from the constants of the format: core/storage/format.h says what
there is, docs/format.md where it is. What is new there is damaged by the tests without a word here."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HEADER_FILE = (ROOT / "core/storage/format.h").read_text()
PAGE = (ROOT / "docs/format.md").read_text()

PAGE_BYTES = 4096
REGIONS_AT = 432  # in the header: pairs (offset, bytes)


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of the page, as lists of cells."""
    section = PAGE.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def region_names() -> list[str]:
    """In the order of their numbers, as the engine has them."""
    body = HEADER_FILE.split("enum RegionId", 1)[1].split("};", 1)[0]
    names = re.findall(r"^\s*k(\w+?)(?: = \d+)?,", body, re.MULTILINE)
    assert names[-1] == "RegionCount"
    return [name.lower() for name in names[:-1]]


class Span(NamedTuple):
    name: str
    offset: int
    size: int


def spans_of(heading: str) -> list[Span]:
    """The fields of a record: tables with (offset, bytes, name)."""
    return [
        Span(re.split(r"[:; ,]", name)[0] or "reserved", int(offset), int(size))
        for offset, size, name, *_ in table(heading)
    ]


def counters() -> list[Span]:
    """Each with the bytes up to the next one; the last is what is reserved behind them."""
    found = [(int(offset), re.split(r"[ (,]", name)[0] or "reserved") for offset, name, _ in table("Counters")]
    ends = [offset for offset, _ in found[1:]] + [found[-1][0]]
    return [Span(name, offset, end - offset) for (offset, name), end in zip(found, ends, strict=True) if end > offset]


HEADER = spans_of("Header: page 0")
HEADER_BYTES = max(span.offset + span.size for span in HEADER)
COUNTERS = counters()
RECORDS = {"writers": spans_of("Writer record"), "blocks": spans_of("Block record"), "fields": spans_of("Field record")}
RECORD_BYTES = {name: max(span.offset + span.size for span in spans) for name, spans in RECORDS.items()}


def field(data: bytes, name: str) -> int:
    span = next(span for span in HEADER if span.name == name)
    return int(struct.unpack_from("<Q" if span.size == 8 else "<I", data, span.offset)[0])


def regions_of(data: bytes) -> dict[str, Span]:
    """The regions that a file has."""
    found = {}
    for number, name in enumerate(region_names()):
        offset, size = struct.unpack_from("<QQ", data, REGIONS_AT + 16 * number)
        if size:
            found[name] = Span(name, offset, size)
    return found


def places_of(data: bytes) -> list[Span]:
    """Every number of the header and of the records, and of each other region one entry a kind of row."""
    found = [Span(f"header.{span.name}", span.offset, span.size) for span in HEADER if span.name != "regions"]
    for number, name in enumerate(region_names()):
        for part, at in (("offset", 0), ("bytes", 8)):
            found.append(Span(f"header.regions.{name}.{part}", REGIONS_AT + 16 * number + at, 8))
    for name, region in regions_of(data).items():
        if name == "counters":
            found += [Span(f"counters.{span.name}", region.offset + span.offset, span.size) for span in COUNTERS]
        elif name in RECORDS:
            size = RECORD_BYTES[name]
            for first in {0, (region.size // size - 1) * size}:
                spans = RECORDS[name]
                found += [Span(f"{name}.{s.name}", region.offset + first + s.offset, s.size) for s in spans]
        else:
            found.append(region)
    return found
