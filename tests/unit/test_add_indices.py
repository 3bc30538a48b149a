"""Serials of rows just added: add(return_indices=True) by every way into the engine, and what they are good for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import make, row, rows, unchanged

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError, StaleHandle


def numbers_at(buffer: sw.ReplayBuffer, serials: Any) -> list[int]:
    """The numbers of the rows that these serials name."""
    return buffer.get(serials)["reward"].astype(int).tolist()


def check_told(serials: Any, count: int) -> None:
    assert isinstance(serials, np.ndarray)
    assert (serials.dtype, serials.shape) == (np.int64, (count,))


# ---- what comes back -------------------------------------------------------------------------------------------------


def test_an_add_returns_nothing_unless_it_is_asked() -> None:
    buffer = make()
    assert buffer.add(**row(0)) is None
    assert buffer.add(**row(1)) is None  # the engine's own function by now
    assert buffer.add(**row(2), return_indices=False) is None
    assert buffer.add(**rows([3, 4]), return_indices=False) is None
    assert len(buffer) == 5


@pytest.mark.parametrize("storage", ["memory", "shm", "file"])
def test_serials_name_the_rows_of_the_add_in_their_order(storage: str, shm_address: str, tmp_path: Path) -> None:
    address = {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/rows.sw"}[storage]
    buffer = make(30, storage=address)
    one = buffer.add(**row(0), return_indices=True)
    check_told(one, 1)  # one row: an array of one, as indices are
    assert numbers_at(buffer, one) == [0]
    for first in range(1, 60, 7):  # over the seam of the ring, and over those of its blocks
        serials = buffer.add(**rows(range(first, first + 7)), return_indices=True)
        check_told(serials, 7)
        assert numbers_at(buffer, serials) == list(range(first, first + 7))
        assert numbers_at(buffer, serials[::-1]) == list(range(first, first + 7))[::-1]
    with pytest.raises(StaleHandle):
        buffer.get(one)  # written over since: its name is nobody else's
    buffer.close(unlink=True)


def test_rows_of_several_environments_come_in_the_order_of_time() -> None:
    buffer = make(12, num_envs=3)
    for step in range(0, 24, 2):
        flat = rows(range(3 * step, 3 * step + 6))
        values = {name: value.reshape(2, 3, *value.shape[1:]) for name, value in flat.items()}
        serials = buffer.add(**values, return_indices=True)
        check_told(serials, 6)
        assert numbers_at(buffer, serials) == list(range(3 * step, 3 * step + 6))


def test_rows_that_are_left_out_have_no_serial() -> None:
    buffer = make(12, num_envs=3)
    serials = buffer.add(**rows(range(6)), mask=[True, False, True, False, False, True], return_indices=True)
    assert (serials == -1).tolist() == [False, True, False, True, True, False]
    assert numbers_at(buffer, serials[serials >= 0]) == [0, 2, 5]
    assert buffer.add(**rows(range(3)), mask=np.zeros(3, bool), return_indices=True).tolist() == [-1] * 3
    with pytest.raises(StaleHandle):
        buffer.get(serials)


def test_positions_and_names_built_at_run_time_are_understood() -> None:
    buffer = make()
    values = row(3)
    assert numbers_at(buffer, buffer.add(*values.values(), return_indices=True)) == [3]
    name = "".join(["return_", "indices"])
    assert numbers_at(buffer, buffer.add(*values.values(), **{name: True})) == [3]
    assert numbers_at(buffer, buffer.add(**{name: True}, **values)) == [3]


def test_values_that_are_converted_and_rows_of_many_fields_tell_their_serials() -> None:
    buffer = make(6)
    listed = {name: np.asarray(value).tolist() for name, value in rows([1, 2]).items()}
    assert numbers_at(buffer, buffer.add(**listed, return_indices=True)) == [1, 2]

    class Odd:  # nothing but NumPy knows what it is
        def __array__(self, *_: Any, **__: Any) -> Any:
            return np.full(2, 3, np.float32)

    assert numbers_at(buffer, buffer.add(**row(3, obs=Odd()), return_indices=True)) == [3]
    wide = sw.ReplayBuffer(8, schema={f"f{i}": sw.Field() for i in range(80)}, next_obs=None)
    values = {f"f{i}": np.arange(3.0) for i in range(80)} | {"reward": np.arange(3.0), "done": np.zeros(3, bool)}
    assert numbers_at(wide, wide.add(**values, return_indices=True)) == [0, 1, 2]
    assert wide.add(**values) is None


@pytest.mark.parametrize("wrong", [1, 0, None, "yes", np.True_])
def test_what_is_no_truth_value_is_refused(wrong: Any) -> None:
    buffer = make()
    buffer.add(**row(0))
    with unchanged(buffer), pytest.raises(SchemaError, match="return_indices: expected True or False"):
        buffer.add(**row(1), return_indices=wrong)


def test_a_refused_add_is_refused_with_serials_too() -> None:
    buffer = make()
    with unchanged(buffer), pytest.raises(SchemaError, match="'obs'"):
        buffer.add(**row(1, obs=np.zeros(3)), return_indices=True)
    with unchanged(buffer), pytest.raises(SchemaError, match="'obs'"):
        buffer.add(np.zeros(3), 0.0, 0.0, np.zeros(2), False, return_indices=True)
    with pytest.raises(SchemaError, match="reserved"):
        sw.ReplayBuffer(8, schema={"return_indices": sw.Field()}, next_obs=None)


# ---- who adds --------------------------------------------------------------------------------------------------------


def test_writers_tell_the_serials_of_their_own_rows() -> None:
    buffer = make(64, writers=3)
    with buffer.writer() as one, buffer.writer() as other:
        told: dict[int, int] = {}
        for number in range(0, 40, 2):
            told[number] = int(one.add(**row(number), return_indices=True)[0])
            told[number + 1] = int(other.add(**row(number + 1), return_indices=True)[0])
    assert len(set(told.values())) == 40
    live = {int(s) for batch in buffer.rows() for s in batch["indices"]}
    kept = {number: serial for number, serial in told.items() if serial in live}
    assert len(kept) == len(live)
    assert numbers_at(buffer, list(kept.values())) == list(kept)


def test_threads_that_share_a_writer_get_their_own_serials() -> None:
    buffer = make(20_000)
    told: list[tuple[int, int]] = []

    def add(first: int) -> None:
        mine = []
        for number in range(first, first + 900, 3):
            serials = buffer.add(**rows(range(number, number + 3)), return_indices=True)
            mine += list(zip(range(number, number + 3), serials.tolist(), strict=True))
        told.extend(mine)

    threads = [threading.Thread(target=add, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3600
    assert numbers_at(buffer, [serial for _, serial in told]) == [number for number, _ in told]


def test_an_event_loop_and_a_pace_hand_the_serials_on() -> None:
    buffer = make(10, pace=sw.Pace(min_size=1, samples_per_insert=1.0, max_diff=2.0))

    async def run() -> None:
        assert numbers_at(buffer, await buffer.add_async(**row(0), return_indices=True)) == [0]
        assert numbers_at(buffer, await buffer.add_async(**row(1), return_indices=True, timeout=5)) == [1]

    asyncio.run(run())
    with pytest.raises(NotReady):
        buffer.add(**row(3), return_indices=True, timeout=0)
    plain = make()
    assert asyncio.run(plain.add_async(**row(1), return_indices=True)).tolist() == [0]


@pytest.mark.parametrize("options", [{"next_obs": "derived"}, {"view": sw.Windows(3)}], ids=str)
def test_derived_rows_and_rows_of_windows_have_serials(options: dict[str, Any]) -> None:
    buffer = make(9, num_envs=1, **options)
    for number in range(0, 30, 3):
        serials = buffer.add(**rows(range(number, number + 3)), return_indices=True)
        assert numbers_at(buffer, serials) == [number, number + 1, number + 2]


# ---- what they are good for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [sw.Transitions(n_step=3), sw.Windows(4, end="stop")], ids=str)
def test_rows_just_added_get_priorities_by_their_serials(view: Any) -> None:
    """No draw comes between: the index takes the rows in first. Rows that may not start a window yet keep theirs."""
    sampler = sw.Prioritized(alpha=1.0, eps=0.0)
    buffer = make(20, num_envs=1, sampler=sampler, view=view)
    told = []
    for number in range(8):
        told.append(buffer.add(**rows([number]), truncated=[number == 7], return_indices=True))
        if number % 3 == 2:
            known = np.concatenate(told[number - 2 : number + 1])
            report = buffer.update_priorities(known, -1.0 - np.arange(number - 2, number + 1))
            assert report == {"applied": 3, "stale": 0}
    batch = buffer.sample(400)
    starts = {"Transitions": range(8), "Windows": range(5)}[type(view).__name__]
    wanted = {number: number + 1.0 if number < 6 else 6.0 for number in starts}  # the newest two: as large as any
    chances = {number: value / sum(wanted.values()) for number, value in wanted.items()}
    serials = np.concatenate(told).tolist()
    for serial, chance in zip(batch["indices"].tolist(), batch["probabilities"].tolist(), strict=True):
        assert chance == pytest.approx(chances[serials.index(serial)])


def test_serials_of_masked_rows_are_stale() -> None:
    buffer = make(10, num_envs=2, sampler=sw.Prioritized())
    serials = buffer.add(**rows(range(4)), mask=[True, False, False, True], return_indices=True)
    assert buffer.update_priorities(serials, np.arange(4.0)) == {"applied": 2, "stale": 2}


def test_an_actor_in_another_process_sets_priorities_later(shm_address: str) -> None:
    learner = make(50, storage=shm_address, sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    with sw.open(shm_address) as actor:
        serials = actor.add(**rows(range(5)), return_indices=True)
        learner.sample(4)
        assert actor.update_priorities(serials, [0, 0, 7, 0, 0]) == {"applied": 5, "stale": 0}
    assert set(learner.sample(64)["reward"].astype(int).tolist()) == {2}
    learner.close(unlink=True)
