"""Awaited calls on rows at a server: they do not wait for each other's threads, and can be cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from patience import HANG_S, until

import sharpwave as sw


def row(number: int) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], False


def test_many_samples_that_wait_leave_a_thread_for_the_add_that_they_wait_for() -> None:
    table = sw.ReplayBuffer(100, obs_shape=(2,), seed=0, pace=sw.Pace(min_size=3))

    async def run(buffer: Any) -> None:
        samples = [asyncio.create_task(buffer.sample_async(2)) for _ in range(60)]
        await asyncio.to_thread(until, lambda: server.stats()["waiting"] == 60)
        for number in range(3):
            await asyncio.wait_for(buffer.add_async(*row(number)), HANG_S)
        assert len(await asyncio.gather(*samples)) == 60

    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as buffer:
        asyncio.run(run(buffer))


def test_a_cancelled_sample_takes_no_rows() -> None:
    table = sw.ReplayBuffer(100, obs_shape=(2,), seed=0, sampler=sw.Fifo(), pace=sw.Pace.queue(10))

    async def run(buffer: Any) -> None:
        sample = asyncio.create_task(buffer.sample_async(2))
        await asyncio.to_thread(until, lambda: server.stats()["waiting"] == 1)
        sample.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sample
        for number in range(4):
            await buffer.add_async(*row(number))
        batch = await buffer.sample_async(4, timeout=HANG_S)
        assert batch["action"].tolist() == [0, 1, 2, 3]

    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as buffer:
        asyncio.run(run(buffer))


def test_a_cancelled_add_keeps_no_other_waiting() -> None:
    table = sw.ReplayBuffer(100, obs_shape=(2,), seed=0, sampler=sw.Fifo(), pace=sw.Pace.queue(2))

    async def run(buffer: Any) -> None:
        for number in range(2):
            await buffer.add_async(*row(number))
        add = asyncio.create_task(buffer.add_async(*row(2)))
        await asyncio.to_thread(until, lambda: server.stats()["waiting"] == 1)
        add.cancel()
        with pytest.raises(asyncio.CancelledError):
            await add
        assert table.sample(2)["action"].tolist() == [0, 1]
        await asyncio.wait_for(buffer.add_async(*row(3)), HANG_S)
        await asyncio.to_thread(until, lambda: len(buffer) >= 3)
        assert 3 in [int(one) for part in buffer.rows() for one in part["action"]]

    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as buffer:
        asyncio.run(run(buffer))


def test_a_mixture_with_a_served_buffer_is_awaited() -> None:
    tables = [sw.ReplayBuffer(100, obs_shape=(2,), seed=seed) for seed in range(2)]
    with sw.serve({"it": tables[0]}, "tcp://127.0.0.1:0") as server, sw.open(server.address + "/it") as remote:
        for table in tables:
            for number in range(10):
                table.add(*row(number))
        mix = sw.Mix({remote: 0.5, tables[1]: 0.5})
        assert len(asyncio.run(mix.sample_async(8))["action"]) == 8
