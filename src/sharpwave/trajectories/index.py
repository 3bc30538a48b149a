"""The index of a folder of trajectories: a journal of lines, each with its checksum.

``index.jsonl`` is appended to, one write for what belongs together, and replaced only whole. A line that the death of a
process cut short is the last one: it is cut off, and what stands before it is a prefix of what was added. The first
line says what the file is; then come, in any order:

    {"leaves": [[path, dtype, shape], ...]}         what a row is; once, before the first trajectory
    {"layouts": [[format, steps, envs, ...], ...]}  where leaves stand in files; numbered from 0 in order
    {"add": [[id, uuid, steps, ...], ...]}          trajectories whose files are whole, oldest first
    {"drop": 2}                                     the two oldest are gone
    {"clear": true}                                 all are gone, and what a row is may change
    {"opened": 3}                                   the third time; the random stream goes on where no draw was yet
    {"state": {"seed", "calls", "opens", "next_id", "id_step"}}   last line of a folder that was closed
"""

from __future__ import annotations

import gc
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import StorageError
from .files import Layout, write_all, write_whole
from .trajectory import Leaf

__all__ = ["INDEX", "Entry", "Index", "Missing", "line"]

INDEX = "index.jsonl"
_KIND, _VERSION = "sharpwave trajectories", 1
_TOGETHER = 1_000  # trajectories a line, when an index is written whole


class Missing(StorageError, FileNotFoundError):
    """A file or folder that should be there."""


@dataclass(slots=True)
class Entry:
    """One trajectory. ``start``, ``bytes`` and ``crc`` are known once its file is written; files of others have no
    ``crc``."""

    id: int
    uuid: str
    steps: int
    envs: int
    max_episode_length: int
    weights_id: str
    layout: int
    start: int = 0
    bytes: int = 0
    crc: int | None = None

    def row(self) -> list[Any]:
        facts = [self.id, self.uuid, self.steps, self.envs, self.max_episode_length, self.weights_id, self.layout]
        return [*facts, self.start, self.bytes, self.crc]

    def name(self, format: str) -> str:
        return f"trajectory_{self.id}_{self.weights_id}.{format}"


@dataclass
class Index:
    """What a journal says."""

    seed: int = 1234
    calls: int = 0  # of sample: the state of the random stream
    opens: int = 0
    next_id: int = 0
    id_step: int = 1
    leaves: tuple[Leaf, ...] | None = None
    layouts: list[Layout] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    dropped: list[Entry] = field(default_factory=list)  # by the last drop: their files may still be there
    was_closed: bool = False
    dead: int = 0  # trajectories in the journal that are gone
    _first: int = 0  # of entries, while lines are being read

    def state(self) -> dict[str, Any]:
        names = ("seed", "calls", "opens", "next_id", "id_step")
        return {"state": {name: getattr(self, name) for name in names}}

    def name(self, entry: Entry) -> str:
        return entry.name(self.layouts[entry.layout].format)

    @property
    def total_samples(self) -> int:
        return sum(entry.steps * entry.envs for entry in self.entries)

    # ---- reading ----------------------------------------------------------------------------------------------

    @classmethod
    def read(cls, folder: Path, where: str) -> tuple[Index, int]:
        """The index, and how many bytes of the journal are whole.

        Raises:
            Missing: There is none.
            StorageError: It is not one, or is damaged before its end.
        """
        path = folder / INDEX
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise Missing(f"{where}: {path}: there is no such file") from None
        with _no_collection():
            return cls._parse(data, path, where)

    @classmethod
    def _parse(cls, data: bytes, path: Path, where: str) -> tuple[Index, int]:
        texts, size = _whole_lines(data)
        if any(_unwrap(rest) for rest in data[size:].split(b"\n", 50)[1:50]):
            raise StorageError(f"{where}: {path}: line {len(texts) + 1} is damaged, and lines behind it are not")
        index = cls()
        try:
            # One call: a hundred thousand would take most of the time. Their checksums hold, so each is JSON.
            said = json.loads(b"[%s]" % b",".join(texts))
        except ValueError as error:
            raise StorageError(f"{where}: {path}: not an index of trajectories: {error}") from None
        return index._read(said, path, where), size

    def _read(self, said: list[Any], path: Path, where: str) -> Index:
        if not said or not isinstance(said[0], dict) or said[0].get("kind") != _KIND:
            raise StorageError(f"{where}: {path}: not an index of trajectories")
        if said[0].get("version") != _VERSION:
            raise StorageError(f"{where}: {path}: expected version {_VERSION}, got {said[0].get('version')!r}")
        for number, part in enumerate(said[1:], 2):
            try:
                self._apply(part)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                raise StorageError(f"{where}: {path}: line {number}: {type(error).__name__}: {error}") from None
        self.dead, self._first = self._first, 0
        del self.entries[: self.dead]
        return self

    def _apply(self, said: dict[str, Any]) -> None:
        self.was_closed = False
        if "add" in said:
            made = [Entry(*row) for row in said["add"]]
            for entry in made:
                if not 0 <= entry.layout < len(self.layouts) or "/" in entry.weights_id:
                    raise ValueError("a trajectory of no known layout, or with a name that is none")
            self.entries += made
            self.next_id = max(self.next_id, made[-1].id + self.id_step)
        elif "drop" in said:
            first, self._first = self._first, min(self._first + int(said["drop"]), len(self.entries))
            self.dropped = self.entries[first : self._first]
        elif "leaves" in said:
            self.leaves = tuple(Leaf(tuple(path), dtype, tuple(shape)) for path, dtype, shape in said["leaves"])
        elif "layouts" in said:
            for format, steps, envs, epochs, offsets, size in said["layouts"]:
                self.layouts.append(Layout(format, steps, envs, tuple(epochs), tuple(offsets), size))
        elif "clear" in said:
            self.dropped, self.leaves = self.entries[self._first :], None
            self._first = len(self.entries)
        elif "opened" in said:
            self.opens = int(said["opened"])
        elif "state" in said:
            for name, value in said["state"].items():
                setattr(self, name, int(value))
            self.was_closed = True
        else:
            raise ValueError(f"unknown line {list(said)}")

    # ---- writing ----------------------------------------------------------------------------------------------

    def lines(self) -> list[bytes]:
        """The whole index, as short as it can be said."""
        made = [line({"kind": _KIND, "version": _VERSION})]
        if self.leaves is not None:
            made.append(leaves_line(self.leaves))
        if self.layouts:
            made.append(line({"layouts": self.layouts}))
        for at in range(0, len(self.entries), _TOGETHER):
            made.append(line({"add": [entry.row() for entry in self.entries[at : at + _TOGETHER]]}))
        made.append(line(self.state()))
        return made

    def write(self, folder: Path, sync: bool = False) -> int:
        """Replaces the journal of a folder, in one step; returns its size."""
        return write_whole(folder / INDEX, [b"".join(self.lines())], sync)


def leaves_line(leaves: tuple[Leaf, ...]) -> bytes:
    return line({"leaves": leaves})


def line(said: dict[str, Any]) -> bytes:
    text = json.dumps(said, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing of what is made is garbage yet, and looking for it takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _unwrap(data: bytes) -> bytes:
    """What a line says; nothing if it is not whole."""
    text = data[9:]
    return text if len(data) > 10 and b"%08x" % zlib.crc32(text) == data[:8] else b""


def _whole_lines(data: bytes) -> tuple[list[bytes], int]:
    """What the lines say up to the first that is not whole, and how many bytes they are."""
    texts, size = [], 0
    for wrapped in data.split(b"\n")[:-1]:
        text = _unwrap(wrapped)
        if not text:
            break
        texts.append(text)
        size += len(wrapped) + 1
    return texts, size


class Journal:
    """The journal of a live folder, open for appending."""

    def __init__(self, folder: Path, size: int) -> None:
        self._file = os.open(folder / INDEX, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._file, size)
        self._size = size

    def append(self, lines: list[bytes]) -> None:
        """Appends them all, or none."""
        data = b"".join(lines)
        try:
            os.lseek(self._file, self._size, os.SEEK_SET)
            write_all(self._file, [data])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._file)
