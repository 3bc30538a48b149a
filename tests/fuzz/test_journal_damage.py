"""Damaged journals of a SequenceBuffer: what comes back is right, or the damage is told; never wrong, never silent.

Right: equal to what was acknowledged. Told: a StorageError; or a warning with the number of bytes that were cut, and
the state is one that there was; or, with ``recover=True``, a count of what is lost, and every value was put once.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from crash.journal_ops import Driver, Model, observe, open_journal

from sharpwave.errors import StorageError
from sharpwave.files.records import HEADER_BYTES
from sharpwave.sequences import store

DAMAGED = 5000 if os.environ.get("SHARPWAVE_SOAK") == "1" else 60
STEPS = 120
SECTOR = 512
KINDS = ("bit", "bits", "byte run", "cut", "zeroed sector", "zeroed end", "repeated", "removed", "grown")


class Whole(NamedTuple):
    data: bytes
    states: list[dict[str, Any]]  # after each operation
    values: set[tuple[str, str, int]]  # id, key and revision of everything that was ever put
    is_closed: bool
    ends: set[int]  # of operations, by bytes


def grow(folder: Path, seed: int) -> tuple[Whole, Whole]:
    """A journal as a killed process leaves it, and the same one closed."""
    path = folder / f"whole-{seed}"
    model = Model()
    seq = open_journal(path)
    driver = Driver(seq, model, seed)
    states, ends = [model.seen()], {HEADER_BYTES, path.stat().st_size}
    values: set[tuple[str, str, int]] = set()

    def after(op: dict[str, Any]) -> None:
        states.append(model.seen())
        ends.add(path.stat().st_size)
        key = op.get("key", "a")
        values.update((name, key, op["revision"]) for name in op.get("ids", ()) if "revision" in op)

    driver.after = after
    for _ in range(STEPS):
        driver.step()
    killed = path.read_bytes()
    seq.close()
    return Whole(killed, states, values, False, ends), Whole(path.read_bytes(), states, values, True, ends)


def damage(data: bytes, stream: random.Random) -> tuple[str, bytes]:
    raw = bytearray(data)
    kind = stream.choice(KINDS)
    at = stream.randrange(len(raw))
    length = min(stream.choice([1, 8, 40, 100, 512, 2000, len(raw)]), len(raw) - at)
    if kind == "bit":
        raw[at] ^= 1 << stream.randrange(8)
    elif kind == "bits":
        for _ in range(stream.randint(2, 30)):
            raw[stream.randrange(len(raw))] ^= 1 << stream.randrange(8)
    elif kind == "byte run":
        raw[at : at + length] = stream.randbytes(length)
    elif kind == "cut":
        del raw[at:]
    elif kind == "zeroed sector":
        start = at // SECTOR * SECTOR
        raw[start : start + SECTOR] = bytes(len(raw[start : start + SECTOR]))
    elif kind == "zeroed end":
        raw[at:] = bytes(len(raw) - at)
    elif kind == "repeated":
        raw[at + length : at + length] = raw[at : at + length]
    elif kind == "removed":
        del raw[at : at + length]
    else:
        raw += stream.choice([bytes(length), stream.randbytes(length), raw[at : at + length]])
    return kind, bytes(raw)


def opened(path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What a buffer says that it holds, its counts, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seq = open_journal(path, **options)
    found, told = observe(seq), seq.stats()
    seq.close()
    return found, told, [str(one.message) for one in said]


def judge(whole: Whole, path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    try:
        found, told, said = opened(path)
    except StorageError:
        return judge_recovery(whole, path, raw)
    if found == whole.states[-1] and not said:
        return "right"
    if said:
        assert told["cut_bytes"] > 0
        assert len(said) == 1
        assert found in whole.states
        assert not whole.is_closed or found == whole.states[-1], "the end of a closed journal is never torn"
        return "cut and told"
    # A file that was never closed, cut exactly between two records, is the file of an earlier moment: no reader can
    # tell. So is an empty file.
    assert (not whole.is_closed and len(raw) in whole.ends) or not raw
    assert found in whole.states
    return "an earlier moment"


def judge_recovery(whole: Whole, path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    try:
        found, told, said = opened(path, recover=True)
    except StorageError:
        return "refused, nothing to recover"
    assert told["lost_records"] + told["lost_bytes"] > 0
    assert any("was damaged" in one for one in said)
    for name, (revision,) in found["inf"].items():
        assert (name, "a", revision) in whole.values
    for name, (first, second) in found["train"].items():
        assert (name, "a", first) in whole.values
        assert (name, "b", second) in whole.values
    again, told, said = opened(path)
    assert (again, told["lost_records"], said) == (found, 0, []), "a recovered journal is whole"
    return "refused, recovered with the loss counted"


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: Any) -> list[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    slack, store._SLACK = store._SLACK, 3000  # some of them were rewritten
    try:
        return [whole for seed in (1, 2, 3) for whole in grow(folder, seed)]
    finally:
        store._SLACK = slack


def test_damaged_journals_are_right_or_told(tmp_path: Path, wholes: list[Whole]) -> None:
    stream = random.Random(5)
    outcomes: Counter[str] = Counter()
    for number in range(DAMAGED):
        whole = wholes[number % len(wholes)]
        kind, raw = damage(whole.data, stream)
        try:
            outcomes[judge(whole, tmp_path / "journal", raw)] += 1
        except Exception as error:
            raise AssertionError(f"file {number}: {kind}, closed: {whole.is_closed}") from error
    print(dict(outcomes))
    assert outcomes["refused, recovered with the loss counted"] > DAMAGED // 4


def test_every_single_flip_of_a_short_journal_is_right_or_told(tmp_path: Path) -> None:
    model = Model()
    seq = open_journal(tmp_path / "short")
    driver = Driver(seq, model, 9)
    states = [model.seen()]
    driver.after = lambda op: states.append(model.seen())
    for verb in ("put", "inf", "mark", "train"):
        getattr(driver, f"_{verb}")()
    values = {(name, "a", pair[0]) for state in states for name, pair in state["train"].items()}
    values |= {(name, "b", pair[1]) for state in states for name, pair in state["train"].items()}
    values |= {(name, "a", pair[0]) for state in states for name, pair in state["inf"].items()}
    seq.close()
    data = (tmp_path / "short").read_bytes()
    step = 1 if DAMAGED > 1000 else 13
    outcomes: Counter[str] = Counter()
    for at in range(0, len(data), step):
        raw = bytearray(data)
        raw[at] ^= 1 << at % 8
        outcomes[judge(Whole(data, states, values, True, set()), tmp_path / "journal", bytes(raw))] += 1
    print(dict(outcomes))
    assert set(outcomes) <= {"right", "refused, recovered with the loss counted"}
    assert outcomes["right"] < 70 // step + 10, "only the bytes of the header that nobody needs"
