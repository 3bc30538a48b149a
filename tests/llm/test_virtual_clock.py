"""Simulated time: it jumps, runs are equal, and a computer that is shared takes exactly as long as it should."""

import asyncio

import pytest

from sharpwave.errors import NotReady
from sharpwave.llm.simulation import Device, simulate


def test_time_passes_only_where_a_coroutine_waits_for_it():
    async def main(clock):
        order = []

        async def sleeper(name, seconds):
            await clock.sleep(seconds)
            order.append((name, clock.now()))

        await asyncio.gather(sleeper("late", 1e6), sleeper("early", 5), sleeper("equal", 5))
        assert await clock.outside(lambda: 7) == 7
        return order, clock.now()

    assert simulate(main) == ([("early", 5.0), ("equal", 5.0), ("late", 1e6)], 1e6)


def test_coroutines_that_wait_for_each_other_are_an_error_and_not_a_hang():
    ended = []

    async def main(clock):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(clock.now())

    with pytest.raises(NotReady, match="every coroutine waits for another one"):
        simulate(main)
    assert ended == [0.0]  # its cleanup ran


def test_a_timeout_is_one_of_simulated_time():
    async def main(clock):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600)
        return clock.now()

    assert simulate(main) == 3600


def test_users_of_a_device_share_its_time():
    async def main(clock):
        device, ends = Device(), {}

        async def user(name, begin, seconds):
            await clock.sleep(begin)
            await device.use(seconds)
            ends[name] = round(clock.now(), 9)

        await asyncio.gather(user("a", 0, 4), user("b", 1, 1), user("c", 10, 2))
        return ends, device.busy_s

    # a is alone for 1 s, shares 2 s with b, and is alone for its last 2 s.
    assert simulate(main) == ({"b": 3.0, "a": 5.0, "c": 12.0}, 7.0)


def test_a_cancelled_user_leaves_the_device_to_the_others():
    async def main(clock):
        device = Device()
        gone, stays = (asyncio.ensure_future(device.use(seconds)) for seconds in (10, 4))
        await clock.sleep(2)
        gone.cancel()
        await stays
        return clock.now()

    assert simulate(main) == 5.0
