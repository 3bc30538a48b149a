"""One contract for every storage and every kind of row: the same calls give the same answers everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model.oracle import Oracle, expected_bytes, make_row, read_all, row_bytes, stack_rows

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle

STORAGES = ["memory", "shm", "file"]

SCHEMAS: dict[str, dict[str, Any]] = {
    "number": {"schema": {"obs": sw.Field(())}},
    "vector": {"schema": {"obs": sw.Field((17,)), "action": sw.Field((6,))}},
    "no next_obs": {"schema": {"obs": sw.Field((3,), "float64")}, "next_obs": None},
    "image": {"schema": {"obs": sw.Field((24, 24, 3), "uint8"), "action": sw.Field((), "int64")}},
    "bytes of odd sizes": {"schema": {"obs": sw.Field((3,), "S5"), "flag": sw.Field((7,), "bool")}},
    "nested dict": {"schema": {"obs": {"image": sw.Field((8, 8), "uint8"), "state": sw.Field((9,))}}},
    "tuple": {"schema": {"obs": (sw.Field((2,)), sw.Field((), "int16")), "action": {"a": (sw.Field(()),)}}},
    "own reward and done": {
        "schema": {"obs": sw.Field(2), "reward": sw.Field((), "float64"), "done": sw.Field((), "float32")}
    },
    "three environments": {"schema": {"obs": sw.Field((4,))}, "num_envs": 3},
}
CAPACITY = 60


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest, shm_address: str, tmp_path: Path) -> str | None:
    return {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/live.sw"}[request.param]


@pytest.fixture(params=list(SCHEMAS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SCHEMAS[request.param]


@pytest.fixture
def buffer(storage: str | None, options: dict[str, Any]) -> Iterator[sw.ReplayBuffer]:
    made = sw.ReplayBuffer(CAPACITY, storage=storage, seed=4, **options)
    yield made
    made.close(unlink=True)


def add(buffer: sw.ReplayBuffer, oracle: Oracle, first: int, count: int, mask: np.ndarray | None = None) -> None:
    rows = [make_row(buffer.schema, number) for number in range(first, first + count)]
    for row in rows:
        row.terminated, row.truncated = row.number % 7 == 3, row.number % 11 == 5
    extra = {}
    if mask is not None:
        extra["mask"] = mask
        for row, kept in zip(rows, mask, strict=True):
            row.masked = not kept
    values = stack_rows(buffer.schema, rows, (count,))
    buffer.add(**values, truncated=np.array([row.truncated for row in rows]), **extra)
    oracle.add(rows)


def assert_agree(buffer: sw.ReplayBuffer, oracle: Oracle) -> None:
    expected = [(row.truncated, expected_bytes(buffer.schema, row)) for row in oracle.rows()]
    assert [row[1:] for row in read_all(buffer, buffer.schema, 7)] == expected
    assert len(buffer) == len(expected) == buffer.stats()["size"]
    assert buffer.is_full == (len(expected) == CAPACITY)


def test_rows_come_back_through_fill_wrap_mask_and_clear(buffer: sw.ReplayBuffer) -> None:
    oracle = Oracle(CAPACITY, buffer.num_envs)
    assert_agree(buffer, oracle)
    with pytest.raises(NotReady):
        buffer.sample(1)
    add(buffer, oracle, 0, 12)
    assert_agree(buffer, oracle)
    add(buffer, oracle, 12, CAPACITY - 12)
    assert_agree(buffer, oracle)
    add(buffer, oracle, 100, 21, mask=np.arange(21) % 4 != 0)
    assert_agree(buffer, oracle)
    for first in range(200, 380, 15):
        add(buffer, oracle, first, 15)
    assert_agree(buffer, oracle)
    buffer.clear()
    oracle.clear()
    assert_agree(buffer, oracle)
    add(buffer, oracle, 500, 30)
    assert_agree(buffer, oracle)
    assert buffer.stats()["rows_added"] == CAPACITY + 21 - 6 + 180 + 30


def test_draws_and_gets_give_the_rows_that_their_indices_name(buffer: sw.ReplayBuffer) -> None:
    oracle = Oracle(CAPACITY, buffer.num_envs)
    add(buffer, oracle, 0, CAPACITY)
    add(buffer, oracle, 100, 33)
    held = {serial: row for serial, _, row in read_all(buffer, buffer.schema)}
    batch = buffer.sample(300)
    for taken in (batch, buffer.sample(300, out=batch), buffer.get(batch["indices"])):
        for i, serial in enumerate(taken["indices"].tolist()):
            assert row_bytes(taken, buffer.schema, i) == held[serial]
    assert set(batch["indices"].tolist()) > set(list(held)[:5])  # old rows too
    add(buffer, oracle, 200, CAPACITY)
    with pytest.raises(StaleHandle):
        buffer.get(batch["indices"])


def test_snapshot_round_trip_goes_on_as_if_nothing_happened(buffer: sw.ReplayBuffer, tmp_path: Path) -> None:
    oracle = Oracle(CAPACITY, buffer.num_envs)
    add(buffer, oracle, 0, CAPACITY)
    add(buffer, oracle, 100, 21)
    buffer.sample(3)
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    assert_agree(copy, oracle)
    twin = oracle.copy()
    add(copy, twin, 300, 9)
    add(buffer, oracle, 300, 9)
    assert read_all(copy, buffer.schema) == read_all(buffer, buffer.schema)
    for size in (1, 64):
        assert copy.sample(size)["indices"].tolist() == buffer.sample(size)["indices"].tolist()


def test_failed_add_changes_nothing(buffer: sw.ReplayBuffer) -> None:
    oracle = Oracle(CAPACITY, buffer.num_envs)
    add(buffer, oracle, 0, 12)
    before = read_all(buffer, buffer.schema), buffer.stats()["rows_added"]
    rows = [make_row(buffer.schema, number) for number in range(3)]
    values = stack_rows(buffer.schema, rows, (3,))
    with pytest.raises(SchemaError):
        buffer.add(**{**values, "done": np.zeros(2, bool)})
    with pytest.raises(SchemaError):
        buffer.add(**values, unknown=1)
    assert (read_all(buffer, buffer.schema), buffer.stats()["rows_added"]) == before


def test_close_ends_every_verb(buffer: sw.ReplayBuffer) -> None:
    buffer.close()
    for verb in (len, lambda b: b.sample(1), lambda b: b.stats(), lambda b: b.clear(), lambda b: b.get([0])):
        with pytest.raises(ClosedError):
            verb(buffer)


def test_same_seed_and_same_calls_give_the_same_batches_on_every_storage(
    options: dict[str, Any], shm_address: str, tmp_path: Path
) -> None:
    def run(storage: str | None) -> list[Any]:
        buffer = sw.ReplayBuffer(CAPACITY, storage=storage, seed=4, **options)
        oracle = Oracle(CAPACITY, buffer.num_envs)
        seen: list[Any] = []
        for turn in range(12):
            add(buffer, oracle, turn * 100, 12 if turn % 3 else 30, mask=np.arange(12 if turn % 3 else 30) % 5 != turn)
            for size in (1, 40):
                batch = buffer.sample(size)
                seen.append(batch["indices"].tolist())
                seen += [row_bytes(batch, buffer.schema, i) for i in range(size)]
            if turn == 7:
                buffer.clear()
        seen.append(read_all(buffer, buffer.schema))
        stats = buffer.stats()
        seen.append({name: stats[name] for name in ("size", "rows_added", "rows_voided", "episodes", "redraws")})
        buffer.close(unlink=True)
        return seen

    memory, shared, file = run(None), run(shm_address), run(f"file://{tmp_path}/live.sw")
    assert memory == shared
    assert memory == file
