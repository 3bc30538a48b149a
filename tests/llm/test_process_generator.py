"""An engine in a child process: what the conformance suite does not ask for."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG_S

from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.llm.channel import Frames, frame
from sharpwave.llm.generators import Answer, Engine, Sampling
from sharpwave.llm.generators.engine_frames import pack_answers, pack_ids, unpack_answers, unpack_ids
from sharpwave.llm.generators.process import ProcessGenerator
from sharpwave.llm.model import small_model

LONG = Sampling(max_tokens=400, ignore_eos=True)


def make(**changes):
    """For the child: an engine, and nothing that watches it."""
    if "fail" in changes:
        raise StorageError(changes["fail"])
    return Engine(small_model(**changes), slots=4), lambda: None


def started(**changes):
    return ProcessGenerator.start(f"{__name__}:make", **changes)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2**63), st.binary(max_size=50))), st.data())
def test_frames_are_whole_however_they_arrive(sent, data):
    stream = b"".join(frame(*one) for one in sent)
    frames, found, at = Frames(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += frames.push(stream[at : at + size])
        at += size
    assert found == sent


def test_ids_and_answers_come_back_as_they_were():
    for sampling in (Sampling(), Sampling(temperature=0.5, stop=["a"], stop_ids=[3], seed=2**63 - 1), Sampling(seed=0)):
        ids, said = unpack_ids(pack_ids([3, 2**40], sampling, "generate()"))
        assert (ids.tolist(), said) == ([3, 2**40], sampling)
    answers = [
        (7, Answer([1, 2], [-0.5, -1.25], [0, 1], "stop", "x")),
        (2**60, Answer([], [], [], "abort")),
        (9, Answer([5], [float("-inf")], [2**40], "stop", 5)),
    ]
    assert list(unpack_answers(pack_answers(answers))) == answers


def test_a_killed_child_fails_its_answers_and_calls_of_join():
    async def main():
        generator = await started()
        joined = asyncio.ensure_future(generator.join())
        calls = [asyncio.ensure_future(generator.generate([5, 6], LONG)) for _ in range(6)]
        await generator.generate([5], Sampling(max_tokens=2))
        os.kill(generator.pid, signal.SIGKILL)
        for one in (*calls, joined):
            with pytest.raises(NotReady, match="the process of the engine has ended"):
                await one
        with pytest.raises(NotReady, match="has ended"):
            await generator.generate([5])
        await generator.close()
        await generator.close()
        with pytest.raises(ClosedError, match="closed"):
            await generator.health()

    asyncio.run(main())


def test_what_the_maker_raises_is_raised_at_the_start():
    with pytest.raises(StorageError, match="the disk is gone"):
        asyncio.run(started(fail="the disk is gone"))


def test_bad_input_is_told_as_by_the_engine_and_the_others_go_on():
    async def main():
        generator = await started()
        good = asyncio.ensure_future(generator.generate([5, 6], LONG))
        with pytest.raises(SchemaError, match="expected 0 to"):
            await generator.generate([10**6])
        for ids in ([5.7, 6.2], [[5, 6], [7, 8]], [[5], [6, 7]], ["5"], [True], [], None, [2**63]):
            with pytest.raises(SchemaError, match=r"generate\(\): "):  # as by an engine here: nothing is cast
                await generator.generate(ids)
            with pytest.raises(SchemaError, match=r"score\(\): "):
                await generator.score(ids)
        with pytest.raises(StorageError):
            await generator.update("nowhere", 1)
        assert len((await good).tokens) == 400
        assert np.isfinite(await generator.score([5, 6, 7])).all()
        await generator.close()

    asyncio.run(main())


def make_on_a_full_disk():
    def watch():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return make()[0], watch


def test_a_full_disk_of_the_child_s_log_is_told_as_such():
    async def main():
        generator = await ProcessGenerator.start(f"{__name__}:make_on_a_full_disk")
        with pytest.raises(StorageError, match=r"cannot write its log: .*No space left on device"):
            await generator.join()
        await generator.close()

    asyncio.run(main())


def test_a_child_that_stands_still_stops_nobody_else():
    async def main():
        generator = await started()
        os.kill(generator.pid, signal.SIGSTOP)
        # More than the socket takes.
        calls = [asyncio.ensure_future(generator.generate([5] * 40, Sampling(max_tokens=2))) for _ in range(3000)]
        await asyncio.sleep(0.5)
        assert generator._channel.unsent_bytes
        assert not any(call.done() for call in calls)
        os.kill(generator.pid, signal.SIGCONT)
        assert {len(answer.tokens) <= 2 for answer in await asyncio.gather(*calls)} == {True}
        await generator.close()

    asyncio.run(main())


def make_failing():
    engine, watch = make()

    def fail(hidden):
        raise RuntimeError("the device is gone")

    engine.model.logits = fail
    return engine, watch


def test_a_child_whose_steps_fail_fails_their_answers_and_ends_at_the_fifth():
    async def main():
        generator = await ProcessGenerator.start(f"{__name__}:make_failing")
        for _ in range(4):
            with pytest.raises(NotReady, match=r"a step of the engine failed: .*the device is gone"):
                await generator.generate([5], LONG)
        assert (await generator.health())[1:] == (0, 0)
        with pytest.raises(NotReady, match=r"failed 5 times in a row: .*the device is gone"):
            await generator.generate([5], LONG)
        with pytest.raises(NotReady, match=r"failed 5 times in a row: .*the device is gone"):
            await generator.join()
        await generator.close()

    asyncio.run(main())


def test_the_child_ends_with_its_parent(tmp_path):
    code = (
        "import asyncio, os, signal, test_process_generator as t\n"
        "async def main():\n"
        "    generator = await t.started()\n"
        "    print(generator.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-c", code], env=there, stdout=subprocess.PIPE, text=True, check=False)
    child = Path(f"/proc/{int(ran.stdout)}")
    deadline = time.monotonic() + HANG_S
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
