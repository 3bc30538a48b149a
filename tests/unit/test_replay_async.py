"""The async forms of calls that wait or write: an event loop continues meanwhile, and the results are the same."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.device_place import PLACES, device_of, here, on_device
from patience import HANG_S
from test_waits import shared, stopped_in_the_index

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError


def filled(**options: Any) -> sw.ReplayBuffer:
    buffer = sw.ReplayBuffer(64, obs_shape=3, sampler=sw.Prioritized(), seed=0, **options)
    name = np.arange(20.0)
    obs = np.stack([name] * 3, 1)
    buffer.add(obs, name, name, obs, name < 0)
    return buffer


def test_saved_by_an_event_loop_continues_with_the_same_draws(tmp_path: Path) -> None:
    buffer = filled(storage=f"file://{tmp_path / 'live.sw'}")

    async def run() -> Any:
        await buffer.flush_async()
        updated = await buffer.update_priorities_async([0, 1, 99], [1.0, 2.0, 3.0])
        await buffer.save_async(tmp_path / "new" / "copy.sw")
        buffer.update_priorities([2], [5.0])
        await buffer.save_async(tmp_path / "new" / "copy.sw", incremental=True)
        return updated

    assert asyncio.run(run()) == {"applied": 2, "stale": 1}
    again = sw.open(tmp_path / "new" / "copy.sw")
    for _ in range(3):
        one, other = again.sample(8), buffer.sample(8)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    buffer.close()
    for late in (buffer.save_async(tmp_path / "x"), buffer.flush_async(), buffer.update_priorities_async([0], [1.0])):
        with pytest.raises(ClosedError):
            asyncio.run(late)  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_a_device_are_saved_by_an_event_loop(place: str, tmp_path: Path) -> None:
    buffer = on_device(12, device=device_of(place), obs_shape=(3,), sampler=sw.Prioritized(), seed=0)
    name = np.arange(8, dtype=np.float32)
    obs = np.stack([name] * 3, 1)
    buffer.add(obs, name, name, obs, name < 0)

    async def run() -> Any:
        await buffer.flush_async()
        await buffer.save_async(tmp_path / "copy.sw")
        return await buffer.update_priorities_async(np.arange(4), np.ones(4))

    updated = asyncio.run(run())
    assert (int(updated["applied"]), int(updated["stale"])) == (4, 0)
    assert updated["applied"].dim() == 0
    saved = sw.open(tmp_path / "copy.sw")
    assert here(next(saved.rows()))["reward"].tolist() == name.tolist()


def test_event_loop_continues_while_a_stopped_process_holds_the_index(shm_address: str) -> None:
    buffer = shared(shm_address)
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def run(call: Any) -> None:
        ticking = asyncio.ensure_future(tick())
        try:
            await call
        finally:
            ticking.cancel()

    with stopped_in_the_index(shm_address) as holder:
        for call in (
            lambda: buffer.update_priorities_async(np.arange(8), np.ones(8), timeout=0.6),
            lambda: buffer.sample_async(8, timeout=0.6),
        ):
            ticks.clear()
            began = time.monotonic()
            with pytest.raises(NotReady, match=f"held by process {holder}"):
                asyncio.run(run(call()))
            assert 0.5 < time.monotonic() - began < HANG_S
            assert len(ticks) > 10, "the loop went on"
    buffer.close(unlink=True)


def test_wrong_timeouts_of_async_calls_are_refused() -> None:
    buffer = filled()
    for call in (
        lambda: buffer.update_priorities_async([0], [1.0], timeout=-1),
        lambda: buffer.sample_async(1, timeout="soon"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SchemaError, match="timeout: expected a number"):
            asyncio.run(call())  # type: ignore[arg-type]
    empty = sw.ReplayBuffer(4, obs_shape=1)
    with pytest.raises(NotReady, match="the buffer is empty"):
        asyncio.run(empty.sample_async(1))
