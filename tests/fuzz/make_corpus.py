"""Writes the corpus of the fuzzer: a few tiny tables of every kind, live and saved.

    python tests/fuzz/make_corpus.py [FOLDER]

What differs from run to run and from machine to machine (names, times, the boot) is replaced, so the same package
writes the same bytes.
"""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave._core import crc32c

REGIONS = 432  # of the header: 24 pairs (offset, bytes)
RUNTIME, COUNTERS, LIVE_KIND = 0, 1, 1
CLEAN, SEAL = 512, 2048  # counters
META = (1, 2, 3, 4, 5, 8, 9, 10, 14, 12, 16, 17)  # regions that meta_crc covers, in its order


def region(data: bytes, number: int) -> tuple[int, int]:
    return struct.unpack_from("<QQ", data, REGIONS + 16 * number)  # type: ignore[return-value]


def anonymous(whole: bytes, choice: int, base: bytes = b"") -> bytes:
    """The same table, made nowhere and never. The name chooses how the fuzzer draws from it. An increment goes with
    another snapshot then: `base`."""
    data = bytearray(whole)
    data[152:156] = base[20:24] or bytes(4)
    data[160:176] = struct.pack("<QQ", choice, 0)  # uuid
    data[120:128] = bytes(8)  # created_ns
    counters = region(data, COUNTERS)[0]
    data[counters + 576 : counters + 624] = struct.pack("<Q", 0) + b"a boot that is over".ljust(40, b"\0")
    data[counters + 896 : counters + 896 + 8] = bytes(8)  # times of the last add and sample
    data[counters + 960 : counters + 960 + 8] = bytes(8)
    for number in range(region(data, 2)[1] // 256):
        at = region(data, 2)[0] + 256 * number
        if any(data[at : at + 8]):
            struct.pack_into("<Q", data, at, 1 << 16 | 1)  # the owner's seat and token
    if struct.unpack_from("<I", data, 16)[0] == LIVE_KIND:
        offset, size = region(data, RUNTIME)
        data[offset : offset + size] = bytes(size)
        reseal(data)
    if struct.unpack_from("<I", data, 16)[0] != LIVE_KIND:
        crc = 0
        for number in META:
            offset, size = region(data, number)
            crc = crc32c(data[offset : offset + size], crc)
        struct.pack_into("<I", data, 148, crc)
    struct.pack_into("<I", data, 20, 0)
    struct.pack_into("<I", data, 20, crc32c(data[: REGIONS + 24 * 16]))
    return bytes(data)


def reseal(data: bytearray) -> None:
    """Makes the seal of a live file agree with what it covers."""
    slots, block_rows, blocks = (struct.unpack_from("<Q", data, at)[0] for at in (40, 56, 64))
    is_embedded = struct.unpack_from("<I", data, 136)[0]
    at, stride = (region(data, 6)[0], struct.unpack_from("<Q", data, 96)[0]) if is_embedded else (region(data, 7)[0], 8)
    words = []
    for block in range(blocks):
        crc = 0
        if struct.unpack_from("<Q", data, region(data, 3)[0] + 64 * block + 8)[0] != 2**64 - 1:
            for slot in range(block * block_rows, min((block + 1) * block_rows, slots)):
                crc = crc32c(data[at + slot * stride : at + slot * stride + 8], crc)
        words.append(crc)
    offset, size = region(data, COUNTERS)
    counters = data[offset : offset + size]
    counters[CLEAN : CLEAN + 8] = counters[SEAL : SEAL + 8] = bytes(8)
    crc = crc32c(counters, crc32c(struct.pack(f"<{blocks}I", *words)))
    for number in (2, 3, 8, 9, 10, 12, 16, 14, 20):
        start, length = region(data, number)
        crc = crc32c(data[start : start + length], crc)
    struct.pack_into("<Q", data, offset + SEAL, crc)


def reward(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(axis=1)


BYTES = sw.Field((6, 12), "uint8", compression="lz4")
GOALS = {"achieved_goal": sw.Field((2,)), "desired_goal": sw.Field((2,))}
HINDSIGHT = sw.Transitions(hindsight=sw.Hindsight("future", 0.8, reward))
TABLES: dict[str, dict[str, Any]] = {
    "plain": {"schema": {"obs": sw.Field((2,))}},
    "wide": {"schema": {"obs": sw.Field((260,))}, "next_obs": None},
    "derived": {"schema": {"obs": sw.Field((2,))}, "next_obs": "derived", "sampler": sw.Prioritized(), "num_envs": 2},
    "heap": {
        "schema": {"obs": BYTES, "tokens": sw.Field((5, 3), "int16", ragged=True)},
        "next_obs": "derived",
        "num_envs": 1,
        "sampler": sw.Prioritized(rank_based=True),
    },
    "stack": {"schema": {"obs": sw.Field((2, 2), "uint8", stack=3)}, "next_obs": "derived", "num_envs": 2},
    "stored-stack": {"schema": {"obs": sw.Field((2, 2), "uint8", stack=2)}, "num_envs": 1},
    "heap-stack": {
        "schema": {"obs": sw.Field((8, 8), "uint8", stack=2, compression="zstd")},
        "next_obs": "derived",
        "num_envs": 1,
    },
    "windows": {"schema": {"obs": sw.Field(())}, "view": sw.Windows(3, stride=2, end="stop"), "num_envs": 1},
    "goals": {"schema": {"obs": GOALS}, "view": HINDSIGHT, "next_obs": "derived", "num_envs": 1},
    "queue": {"schema": {"obs": sw.Field(())}, "sampler": sw.Fifo(max_reads=2)},
    "paced": {"schema": {"obs": sw.Field(())}, "pace": sw.Pace.samples_per_insert(2.0, min_size=1, error=1e6)},
    "writers": {
        "schema": {"obs": sw.Field(())},
        "view": sw.Windows(2, end="cross"),
        "sampler": sw.Prioritized(),
        "num_envs": 1,
        "writers": 2,
    },
    "empty": {"schema": {"obs": sw.Field(())}, "sampler": sw.Shuffle()},
    "mutable": {"schema": {"obs": sw.Field(()), "state": sw.Field((3,), mutable=True)}, "next_obs": None},
}
GROWN = ("plain", "heap", "wide", "mutable")  # a snapshot and an increment behind it
OLDER = 1000
STEPS = 26  # more than two laps
# The others are saved only.
LIVE = (
    "plain",
    "derived",
    "heap",
    "stack",
    "heap-stack",
    "windows",
    "goals",
    "queue",
    "writers",
    "mutable",
)  # the others: saved only


def make(name: str, storage: str | None = None) -> sw.ReplayBuffer:
    """Blocks of two steps, the last of one."""
    options = TABLES[name]
    writers, width = options.get("writers", 1), options.get("num_envs", 1)
    capacity = (8 * writers + 3) * width
    seed = list(TABLES).index(name)
    return sw.ReplayBuffer(capacity, **{**options, "writers": writers, "seed": seed, "storage": storage})


def fill(buffer: sw.ReplayBuffer, steps: int) -> None:
    """Steps with ends of episodes and masks, then a draw."""
    width = buffer.num_envs or 1
    derives = "next_obs" in buffer.schema

    def value(field: Any, step: int) -> Any:
        if isinstance(field, dict):
            return {part: value(inner, step) for part, inner in field.items()}
        if field.ragged:
            return [np.full((step % 6, *field.shape[1:]), step, field.dtype)] * width
        return np.full((width, *field.shape), step, field.dtype)

    others = [buffer.writer(), buffer.writer()] if buffer.stats()["max_writers"] == 2 else []
    place = 0
    for step in range(steps):
        values = {name: value(field, place) for name, field in buffer.schema.items()}
        values |= {"reward": np.full(width, step, np.float32), "done": np.full(width, step % 5 == 4)}
        if derives:
            values["next_obs"] = value(buffer.schema["obs"], place + 1)
        if width > 1:
            values["mask"] = np.arange(width) != step % 4
        place = 0 if step % 5 == 4 else place + 1
        if buffer.num_envs is None:
            values = {name: part[0] if isinstance(part, np.ndarray) else part for name, part in values.items()}
        (others[step // 4 % 2] if others else buffer).add(**values)
    for other in others:
        other.close()
    if steps and "state" in buffer.schema:
        newest = next(buffer.rows())["indices"][-2:]
        for _ in range(2):  # a row's other place holds what it had before, OLDER less
            buffer.write(newest, state=buffer.get(newest)["state"] + OLDER)
    if steps:
        buffer.sample(min(steps, 2))


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as there:
        for number, name in enumerate(TABLES):
            place = Path(there, name)
            buffer = make(name, f"file://{place}")
            fill(buffer, 0 if name == "empty" else STEPS)
            saved, delta = Path(there, f"{name}.saved"), Path(there, f"{name}.saved.delta")
            buffer.save(saved)
            killed = place.read_bytes()  # as a process that dies now leaves it
            if name in GROWN:
                fill(buffer, 2)
                buffer.save(saved, incremental=True)
            buffer.close()
            found = {"saved": saved.read_bytes()}
            if name in LIVE:
                found |= {"killed": killed} if number % 2 else {"closed": place.read_bytes()}
            for kind, data in found.items():
                (folder / f"{name}-{kind}.sw").write_bytes(anonymous(data, 16 * number))
            if name in GROWN:
                first = anonymous(found["saved"], 16 * number)
                both = first + anonymous(delta.read_bytes(), 16 * number, first)
                (folder / f"{name}-grown.sw").write_bytes(both)
    sizes = [path.stat().st_size for path in folder.iterdir()]
    print(f"{folder}: {len(sizes)} files, {sum(sizes)} bytes")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "corpus")
