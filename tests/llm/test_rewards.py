"""Reward functions in real processes: what they may do wrong, and that it costs one answer only."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import reward_functions
from patience import HANG_S, until

from sharpwave.errors import NotReady, SchemaError
from sharpwave.llm.launchers.alive import describe_process, is_alive
from sharpwave.llm.rewards import Rewards


@asynccontextmanager
async def rewards_of(function, **options):
    rewards = Rewards(function, **options)
    try:
        yield rewards
    finally:
        await rewards.close()


def test_rewards_come_back_whatever_the_function_prints():
    async def main():
        async with rewards_of(reward_functions.exact, processes=2) as rewards:
            asked = [rewards({"answer": "7"}, text) for text in ("7", "8", "7", "")]
            return await asyncio.gather(*asked)

    assert asyncio.run(main()) == [1.0, 0.0, 1.0, 0.0]


def test_every_way_to_fail_is_told_and_the_next_call_works(tmp_path):
    async def main():
        said = {}
        async with rewards_of("reward_functions:by_word", processes=1, tries=2, timeout_s=HANG_S) as rewards:
            for text in ("raise", "nan", "text", "die"):
                with pytest.raises(SchemaError) as error:
                    await rewards({}, text)
                said[text] = str(error.value)
            assert await rewards({}, "fine") == 0.5
            assert await rewards({}, f"once {tmp_path / 'mark'}") == 1.0
            return said, dict(rewards.failures)

    said, failures = asyncio.run(main())
    start = "reward reward_functions:by_word: 2 tries failed, the last by "
    assert said == {
        "raise": start + "error: RuntimeError: no reward today",
        "nan": start + "not finite: expected a finite number, got nan",
        "text": start + "error: ValueError: could not convert string to float: 'good'",
        "die": start + "died: its process ended",
    }
    assert failures == {"error": 5, "not finite": 2, "died": 2}


def test_a_function_that_never_returns_is_ended():
    async def main():
        async with rewards_of("reward_functions:by_word", tries=2, timeout_s=0.2) as rewards:
            with pytest.raises(SchemaError, match=r"2 tries failed, the last by timeout: longer than timeout_s=0\.2"):
                await rewards({}, "hang")
            return len(rewards._all), dict(rewards.failures)

    assert asyncio.run(main()) == (0, {"timeout": 2})


@pytest.mark.parametrize("name", ["no_such_module:f", "reward_functions:no_such_function"])
def test_a_function_that_cannot_be_imported_is_told(name):
    async def main():
        async with rewards_of(name) as rewards:
            for _ in range(2):  # the second time no process is started
                with pytest.raises(SchemaError, match=f"reward {name} cannot be imported in a process of its own"):
                    await rewards({}, "")
            return len(rewards._all)

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("function", [lambda item, text: 1.0, "reward_functions", ":exact"])
def test_a_function_without_a_name_is_refused(function):
    with pytest.raises(SchemaError, match="'module:function'"):
        Rewards(function)


def test_closing_ends_the_processes():
    async def main():
        rewards = Rewards(reward_functions.exact)
        await rewards({"answer": ""}, "")
        [process] = rewards._all
        await rewards.close()
        with pytest.raises(NotReady, match="was closed"):
            await rewards({"answer": ""}, "")
        return process.returncode

    assert asyncio.run(main()) is not None


def test_closing_while_a_process_starts_ends_it():
    async def main():
        rewards = Rewards(reward_functions.exact)
        call = asyncio.ensure_future(rewards({"answer": ""}, ""))
        await asyncio.sleep(0)  # it has begun to start the process
        await rewards.close()
        with pytest.raises(NotReady, match="was closed"):
            await call
        return rewards._all

    assert asyncio.run(main()) == set()


def told_processes(mark):
    until(mark.exists, "the start of the program")
    return [describe_process(int(pid)) for pid in mark.read_text().split()]


def test_programs_that_a_function_started_end_with_its_call(tmp_path):
    async def main():
        async with rewards_of("reward_functions:by_word", tries=1, timeout_s=HANG_S) as rewards:
            call = asyncio.ensure_future(rewards({}, f"start {tmp_path / 'mark'}"))
            processes = await asyncio.to_thread(told_processes, tmp_path / "mark")
            call.cancel()
            await asyncio.wait([call])
            return processes

    for process in asyncio.run(main()):
        until(lambda process=process: not is_alive(process), "the end of a process")


def test_programs_that_a_function_left_end_with_its_process(tmp_path):
    """Also where that ends by itself, between two calls."""

    async def main():
        async with rewards_of("reward_functions:by_word") as rewards:
            assert await rewards({}, f"leave {tmp_path / 'mark'}") == 0.5
            process, program = told_processes(tmp_path / "mark")
            os.kill(process["pid"], signal.SIGKILL)
            await asyncio.to_thread(until, lambda: not is_alive(program), "the end of the program")
            assert await rewards({}, "fine") == 0.5

    asyncio.run(main())


def test_a_call_ends_with_the_process_that_made_it(tmp_path):
    code = """
import asyncio, sys
from sharpwave.llm.rewards import Rewards
sys.path.insert(0, sys.argv[2])
asyncio.run(Rewards("reward_functions:by_word", timeout_s=1000)({}, f"start {sys.argv[1]}"))
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "mark"), str(Path(__file__).parent)])
    try:
        processes = told_processes(tmp_path / "mark")
    finally:
        parent.kill()
        parent.wait()
    for process in processes:
        until(lambda process=process: not is_alive(process), "the end of a process")
