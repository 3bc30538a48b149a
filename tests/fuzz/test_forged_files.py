"""Files with wrong numbers: in any region, or in a header whose checksum is right. Each gives an error of ours or a
buffer that can be used, never a crash, a hang or another error."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crash.episodes import ENVS, SIDE
from fuzz import layout
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import StorageError

# Where the numbers of the header stand; any value is right for the seed and the time.
NUMBERS = {
    span.name: span.offset
    for span in layout.HEADER
    if span.size == 8 and span.name not in ("magic", "seed", "created_ns")
}


# Opens one damaged copy after another and uses each in every way; names each before, so that a crash has a name.
USE = """
import json, sys
import numpy as np
import sharpwave as sw
source, target, prefix = sys.argv[1:4]
whole = open(source, "rb").read()
side, envs = 12, 2
def step(n):
    return dict(obs=np.full((envs, side, side), n, np.uint8), reward=np.zeros(envs),
                next_obs=np.full((envs, side, side), n + 1, np.uint8), done=np.full(envs, n % 5 == 4))
def use(buffer):
    uses = [
        lambda: (len(buffer), buffer.stats()),
        lambda: list(buffer.rows()),
        lambda: buffer.sample(8),
        lambda: buffer.sample(64),
        lambda: buffer.update_priorities(np.arange(300), np.ones(300)),
        lambda: [buffer.add(**step(n)) for n in range(40)],
        lambda: buffer.sample(64),
        lambda: buffer.tune(alpha=0.3),
        lambda: buffer.save(target + ".saved"),
        lambda: list(buffer.rows()),
        lambda: buffer.clear(),
        lambda: [buffer.add(**step(n)) for n in range(40)],
        lambda: buffer.sample(64),
        lambda: list(buffer.rows()),
    ]
    for i, one in enumerate(uses):
        try:
            one()
        except sw.errors.SharpwaveError:
            pass
        except Exception as error:
            print(json.dumps(["use", i, type(error).__name__, str(error)]), flush=True)
for line in sys.stdin:
    at, data = json.loads(line)
    print(json.dumps(["at", at]), flush=True)
    data = bytes.fromhex(data)
    with open(target, "wb") as file:
        file.write(whole[:at] + data + whole[at + len(data):])
    try:
        buffer = sw.open(prefix + target)
    except sw.errors.StorageError:
        continue
    except Exception as error:
        print(json.dumps(["open", type(error).__name__, str(error)]), flush=True)
        continue
    use(buffer)
    buffer.close()
print(json.dumps(["survived"]), flush=True)
"""


def find_wrongs(folder: Path, source: Path, prefix: str, changes: list[tuple[str, int, bytes]]) -> list[str]:
    """What went wrong with each change of a file: crashes, hangs, errors that are not Sharpwave's."""
    wrongs = []
    while changes:
        command = [sys.executable, "-c", USE, str(source), str(folder / "damaged.sw"), prefix]
        text = "".join(json.dumps([at, data.hex()]) + "\n" for _, at, data in changes)
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=4 * HANG_S, check=False)
            output, code = done.stdout, str(done.returncode)
        except subprocess.TimeoutExpired as hung:
            output, code = (hung.stdout or b"").decode(), "a hang"
        said = [json.loads(line) for line in output.splitlines()]
        at, tried = -1, 0
        for words in said:
            if words[0] == "at":
                at, tried = words[1], tried + 1
            elif words[0] != "survived":
                wrongs.append(f"{changes[tried - 1][0]} at {at}: {words}")
        if said and said[-1] == ["survived"]:
            return wrongs
        tried = max(tried, 1)
        wrongs.append(f"{changes[tried - 1][0]} at {at}: exit {code}")
        changes = changes[tried:]
        if len(wrongs) > 20:
            break
    return wrongs


def build_for_damage(folder: Path, kind: str) -> Path:
    """Everything switched on, a ring that went round, an open episode in each env."""
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); from crash import episodes as t\n"
        "options = {'storage': 'file://' + sys.argv[2]} if sys.argv[3] != 'snapshot' else {}\n"
        "options |= {'sampler': t.sw.Prioritized(mix=0.1), 'view': t.sw.Transitions(n_step=2), 'writers': 2}\n"
        "buffer = t.make(60, **options)\n"
        "for step in range(50):\n    t.add_step(buffer, 0, step)\n    step % 9 or buffer.sample(8)\n"
        "if sys.argv[3] == 'snapshot': buffer.save(sys.argv[2])\n"
        "if sys.argv[3] == 'killed': os._exit(0)\n"
        "buffer.close()\n"
    )
    path = folder / "whole.sw"
    subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(path), kind], check=True, timeout=2 * HANG_S
    )
    return path


@pytest.mark.parametrize("kind", ["snapshot", "closed", "killed"])
def test_damage_in_any_region_never_crashes(kind: str, tmp_path: Path) -> None:
    source = build_for_damage(tmp_path, kind)
    whole = source.read_bytes()
    regions = {"header": layout.Span("header", 0, layout.HEADER_BYTES)} | layout.regions_of(whole)
    expected = {"rows", "priorities", "given", "heap", "finals", "blocks", "fields", "counters", "writers"}
    assert expected <= set(regions)
    stream = np.random.default_rng(12)
    changes = []
    for name, offset, size in regions.values():
        used = np.flatnonzero(np.frombuffer(whole, np.uint8, size, offset))
        for turn in range(6):
            # What is used is mostly a small part of a region.
            at = offset + int(stream.choice(used) if turn % 2 and len(used) else stream.integers(size))
            changes.append((name, at, bytes([whole[at] ^ 1 << int(stream.integers(8))])))
        for ending in (offset, offset + (size - 8) // 8 * 8):
            changes.append((name, ending, b"\xff" * 8))
    shape = regions["fields"].offset + next(span.offset for span in layout.RECORDS["fields"] if span.name == "shape")
    changes.append(("a field's shape", shape, b"\xff" * 8))
    assert find_wrongs(tmp_path, source, "" if kind == "snapshot" else "file://", changes) == []


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_damaged_waiting_observation_never_crashes(kind: str, tmp_path: Path) -> None:
    source = build_for_damage(tmp_path, kind)
    whole = source.read_bytes()
    offset, place_bytes = layout.regions_of(whole)["waiting"].offset, layout.field(whole, "waiting_bytes")
    changes = []
    for place in range(2 * ENVS):
        at = offset + place * place_bytes + 16
        assert struct.unpack_from("<II", whole, at) == (SIDE * SIDE, SIDE * SIDE)
        changes += [("kept bytes", at + 3, b"\x40"), ("value bytes", at + 7, b"\x40"), ("tag", at - 16, b"\xff" * 8)]
    assert find_wrongs(tmp_path, source, "file://", changes) == []


def test_damaged_tree_never_crashes(tmp_path: Path) -> None:
    """Mass where there is no row: a child that does not exist must never be followed."""
    source = build_for_damage(tmp_path, "closed")
    whole = source.read_bytes()
    regions = layout.regions_of(whole)
    _, tree, size = regions["tree"]
    _, leaves, leaves_size = regions["priorities"]
    changes = [("tree", at + 15 * 8, struct.pack("<d", 1e12)) for at in range(tree, tree + size, 256)]
    changes += [("leaf", leaves + leaves_size - 4, struct.pack("<f", 1e12))]
    changes += [("index head", leaves + 8 * i, struct.pack("<Q", 1 << 40)) for i in range(3)]
    assert find_wrongs(tmp_path, source, "file://", changes) == []


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def forged(whole: bytes, **numbers: int) -> bytes:
    """The header with other numbers: of the header, or ``bytes_`` of a region; the checksum is right."""
    header = bytearray(whole[: layout.HEADER_BYTES])
    for name, value in numbers.items():
        if name.startswith("bytes_"):
            place = layout.REGIONS_AT + 16 * layout.region_names().index(name.removeprefix("bytes_")) + 8
        else:
            place = NUMBERS[name]
        struct.pack_into("<Q", header, place, value % (1 << 64))
    header[20:24] = bytes(4)
    header[20:24] = struct.pack("<I", crc32c(bytes(header)))
    return bytes(header)


@pytest.mark.parametrize("kind", ["snapshot", "closed"])
def test_forged_header_never_crashes(kind: str, tmp_path: Path) -> None:
    """The checksum is right, the numbers are not."""
    source = build_for_damage(tmp_path, kind)
    whole = source.read_bytes()
    assert forged(whole) == whole[: layout.HEADER_BYTES]
    changes = []

    def change(**numbers: int) -> None:
        changes.append((str(numbers), 0, forged(whole, **numbers)))

    value = {name: struct.unpack_from("<Q", whole, place)[0] for name, place in NUMBERS.items()}
    for name in NUMBERS:
        for wrong in (0, 1, value[name] + 1, 2 * value[name], 1 << 40, (1 << 63) + value[name]):
            change(**{name: wrong})
    blocks, rows = value["blocks"], value["block_rows"]
    many = 1 << 20
    change(capacity=2, spare_rows=value["slots"] - 2)
    change(capacity=value["capacity"] - 2, spare_rows=value["spare_rows"] + 2)
    change(width=rows * 2, block_rows=rows * 2, blocks=(value["slots"] - 1) // (rows * 2) + 1)
    change(capacity=many * blocks - value["spare_rows"], slots=many * blocks, block_rows=many)
    change(capacity=value["capacity"] + 1, slots=value["slots"] + 1)
    change(block_rows=1 << 62, width=1 << 62, blocks=1, bytes_blocks=64, bytes_heap=0)
    assert find_wrongs(tmp_path, source, "" if kind == "snapshot" else "file://", changes) == []


PLAIN = """
import sys, numpy as np, sharpwave as sw
kind, path = sys.argv[1:]
options = {} if kind == "snapshot" else {"storage": "file://" + path}
buffer = sw.ReplayBuffer(50_000, obs_shape=(2,), writers=2, seed=0, **options)
buffer.add(np.zeros((50_000, 2)), np.zeros(50_000), np.zeros(50_000), np.zeros((50_000, 2)), np.zeros(50_000, bool))
if kind == "snapshot": buffer.save(path)
buffer.close()
"""
USE_PLAIN = """
import sys, numpy as np, sharpwave as sw
try:
    buffer = sw.open(sys.argv[1])
    list(buffer.rows())
    buffer.add(np.zeros((9, 2)), np.zeros(9), np.zeros(9), np.zeros((9, 2)), np.zeros(9, bool))
    buffer.sample(10_000)
    buffer.close()
except sw.errors.SharpwaveError:
    pass
"""


@pytest.mark.parametrize("kind", ["snapshot", "live"])
def test_header_forged_to_reach_far_never_crashes(kind: str, tmp_path: Path) -> None:
    """More rows than the file has, in numbers that agree with each other."""
    path = tmp_path / "plain.sw"
    subprocess.run([sys.executable, "-c", PLAIN, kind, str(path)], check=True, timeout=2 * HANG_S)
    whole = path.read_bytes()
    value = {name: struct.unpack_from("<Q", whole, place)[0] for name, place in NUMBERS.items()}
    huge = 1 << 30
    numbers = {"capacity": 2, "spare_rows": value["slots"] - 2}
    if kind == "live":
        block_rows = (huge + value["blocks"] - 1) // value["blocks"]
        numbers = {"capacity": huge, "slots": huge, "block_rows": block_rows}
    path.write_bytes(forged(whole, **numbers) + whole[layout.HEADER_BYTES :])
    address = str(path) if kind == "snapshot" else f"file://{path}"
    done = subprocess.run(
        [sys.executable, "-c", USE_PLAIN, address], capture_output=True, text=True, timeout=2 * HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-300:]


@pytest.mark.parametrize("recover", [False, True])
def test_more_rows_than_there_are_serials_are_refused_and_never_waited_for(tmp_path: Path, recover: bool) -> None:
    live, damaged = tmp_path / "live.sw", tmp_path / "damaged.sw"
    pace = sw.Pace.samples_per_insert(2.0, min_size=1, error=100.0)
    with sw.ReplayBuffer(50, obs_shape=(1,), action_shape=(), pace=pace, storage=f"file://{live}") as buffer:
        for number in range(20):
            buffer.add([number], 0.0, 0.0, [number], False)
        data = bytearray(live.read_bytes())  # as a killed process leaves it
    added = next(span for span in layout.places_of(bytes(data)) if span.name == "writers.added")
    data[added.offset : added.offset + 8] = struct.pack("<Q", 20 + 2**62)
    damaged.write_bytes(data)
    if not recover:
        with pytest.raises(StorageError, match="another number of rows than it counted"):
            sw.open(f"file://{damaged}")
        return
    with sw.open(f"file://{damaged}", recover=True) as buffer:
        assert len(buffer) == 20
        buffer.add([20], 0.0, 0.0, [20], False, timeout=5)
