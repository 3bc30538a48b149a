"""Agents in child processes: runs that have all their parts in processes, as on a GPU, and deaths."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError
from sharpwave.llm.agent_frames import pack_sample, unpack_sample
from sharpwave.llm.channel import Door
from sharpwave.llm.clock import WallClock
from sharpwave.llm.controller import Controller
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.items import Items
from sharpwave.llm.log import EVENTS, RunLog, read_lines
from sharpwave.llm.process_agents import ProcessAgents
from sharpwave.llm.rules import Rules
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_agents import KeptAgents
from sharpwave.llm.run_folder import RunFolder
from sharpwave.llm.tasks import sort

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def make_task(*, fault="", place="", count=40, seed=0):
    """For runs of this file: sorting, with agents that have a fault once, or always."""
    task = sort.make(count=count, held_out=4, seed=os.getpid() if fault == "other items" else seed)

    def is_first(name):
        with contextlib.suppress(FileExistsError):
            Path(place, name).touch(exist_ok=False)
            return True
        return False

    if fault == "dies starting" and "agents-0" in sys.argv and Path(place, "an agent").exists() and is_first("a start"):
        os._exit(3)

    async def agent(item, generate):
        if fault == "dies" or (fault == "two kill" and item["id"] in "78"):
            os._exit(3)
        if fault == "raises half a character" and item["id"] == "7":
            raise OSError("\udcff")
        if fault == "blocks once" and is_first("an agent"):
            time.sleep(60)
        if fault in ("dies once", "dies starting") and is_first("an agent"):
            os._exit(3)
        if fault == "cancels once" and is_first("an agent"):
            own = asyncio.ensure_future(asyncio.sleep(60))
            own.cancel()
            await own
        return await task.agent(item, generate)

    return dataclasses.replace(task, agent=agent)


def folder_of(tmp_path, **changes):
    settings = {
        "task": f"{__name__}:make_task", "model": SMALL, "batch": 4, "group": 2, "slots": 8, "concurrent": 4,
        "skip_no_signal": False, "evaluation": {"every": 0}, **changes,
    }  # fmt: skip
    return RunFolder.create(tmp_path / "run", Experiment.read(settings))


@pytest.fixture
def has_children(monkeypatch):
    """The processes of a run on a GPU, on the CPU."""
    for module in ("run", "process_learner", "run_engines"):
        monkeypatch.setattr(f"sharpwave.llm.{module}.runs_children", lambda experiment: True)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 180))


async def train(folder):
    with contextlib.closing(RunLog(folder.logs)) as log:
        return await LocalRun(folder, log).run()


def trained(folder):
    return sorted(
        key for line in read_lines(folder.logs / EVENTS) if line["event"] == "trained" for key in line["keys"]
    )


def deaths(folder):
    return [line["why"] for line in read_lines(folder.logs / EVENTS) if line["event"] == "died"]


def test_a_run_in_processes_trains_every_item_once(tmp_path, has_children):
    folder = folder_of(tmp_path, epochs=1, agent_workers=3, generators=2, task_options={"count": 50})
    result = run(train(folder))
    assert (result.trained, result.step, result.rejected) == (50, 13, 0)
    assert trained(folder) == sorted(f"0/{number}" for number in range(50))
    owners = {line["owner"] for line in read_lines(folder.logs / EVENTS) if line["event"] == "kept"}
    assert owners == {"agents-0", "agents-1", "agents-2"}
    assert deaths(folder) == []


@pytest.mark.parametrize("fault", ["dies once", "blocks once"])
def test_agents_that_die_or_stand_still_are_replaced_and_every_item_is_trained_once(tmp_path, has_children, fault):
    """Also where the code of an agent holds up its whole process: its items come again after `owner_timeout_s`."""
    timeout_s = HANG_S if fault == "dies once" else 4.0
    options = {"fault": fault, "place": str(tmp_path)}
    folder = folder_of(tmp_path, epochs=1, owner_timeout_s=timeout_s, watchdog_s=10 * HANG_S, task_options=options)
    assert run(train(folder)).trained == 40
    assert trained(folder) == sorted(f"0/{number}" for number in range(40))
    (why,) = deaths(folder)
    assert ("has ended" if fault == "dies once" else "was silent for owner_timeout_s=4") in why


def test_agents_that_are_killed_again_and_again_lose_no_item(tmp_path, has_children):
    folder = folder_of(tmp_path, epochs=1, agent_workers=2, task_options={"count": 300})
    children, start = [], ProcessAgents.start.__func__

    async def noted(cls, *args):
        children.append(await start(cls, *args))
        return children[-1]

    async def main():
        going = asyncio.ensure_future(train(folder))
        kills = 0
        while not going.done():
            await asyncio.sleep(0.05)
            alive = [one for one in children if not one.has_ended and one.finished > 8]
            if alive and kills < 6:
                os.kill(alive[kills % len(alive)].pid, signal.SIGKILL)
                kills += 1
                await asyncio.sleep(0.3)
        assert kills >= 3
        return await going, kills

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessAgents, "start", classmethod(noted))
        result, kills = run(main())
    assert result.trained == 300
    assert trained(folder) == sorted(f"0/{number}" for number in range(300))
    assert kills - 2 <= len(deaths(folder)) <= kills  # a worker that has nothing to do any more may be killed, too


def test_agents_that_die_at_once_every_time_end_the_run(tmp_path, has_children):
    folder = folder_of(tmp_path, steps=1, max_losses=1, task_options={"fault": "dies"})
    why = r"'agents-0' has ended \(exit status 3\); .*; 4 items in a row end their process, the last of 0/\d+"
    with pytest.raises(NotReady, match=why):
        run(train(folder))
    assert len(deaths(folder)) == 5  # with the first one all items that it had are suspected


class Dying:
    """In the place of a process: it dies while another worker has an item rejected."""

    has_ended, finished = True, 0

    async def run(self, controller, items, timeout_s):
        await controller.reject(await controller.start("another"), "every try failed")
        raise NotReady("the process has ended")

    async def close(self):
        pass


def test_items_that_other_workers_have_rejected_did_not_end_a_process(tmp_path, monkeypatch):
    async def start(folder, name, engine):
        engine.close()
        return Dying()

    async def main():
        items, door = Items([{"id": number} for number in range(20)]), Door()
        controller = Controller(items, Rules(batch=4, max_losses=5), WallClock())
        with contextlib.closing(RunLog(tmp_path)) as log:
            kept = KeptAgents(None, "agents-0", door, items, log)
            with pytest.raises(NotReady, match="; 7 ended in a row without a sample"):
                await kept.run(controller, None)
            await kept.close()
        controller.close()
        door.close()

    monkeypatch.setattr(ProcessAgents, "start", start)
    run(main())


def test_a_run_that_is_cancelled_while_its_agents_are_closed_is_cancelled(monkeypatch):
    class Slow(Dying):
        async def close(self):
            begun.set()
            await asyncio.sleep(180)

    async def start(folder, name, engine):
        engine.close()
        return Slow()

    async def main():
        door = Door()
        kept = KeptAgents(None, "agents-0", door, None, None)
        await kept.ready()
        closing = asyncio.ensure_future(kept.close())
        await begun.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        door.close()

    begun = asyncio.Event()
    monkeypatch.setattr(ProcessAgents, "start", start)
    run(main())


def test_items_that_kill_their_process_are_rejected_and_all_others_are_trained(tmp_path, has_children):
    """Two of them need more processes in a row than one may."""
    folder = folder_of(tmp_path, epochs=1, max_losses=2, shuffle=False, task_options={"fault": "two kill", "count": 16})
    result = run(train(folder))
    assert (result.trained, result.rejected) == (14, 2)
    assert not {"0/7", "0/8"} & set(trained(folder))
    assert 4 <= len(deaths(folder)) <= 6


@pytest.mark.parametrize("has_a_process", [False, True])
def test_an_agent_that_raises_half_a_character_has_its_item_rejected(tmp_path, request, has_a_process):
    if has_a_process:
        request.getfixturevalue("has_children")
    folder = folder_of(tmp_path, epochs=1, task_options={"fault": "raises half a character", "count": 12})
    result = run(train(folder))
    assert (result.trained, result.rejected) == (11, 1)


def test_agents_that_have_lost_their_engine_alone_end_and_are_started_again(tmp_path, has_children, monkeypatch):
    """The engine closes a channel for which it has no file number, and lives."""
    folder, opened = folder_of(tmp_path, epochs=1, task_options={"count": 60}), []
    open_door = Door.open
    monkeypatch.setattr(Door, "open", lambda door: opened.append(open_door(door)) or opened[-1].dup())

    async def main():
        going = asyncio.ensure_future(train(folder))
        while not trained(folder):
            assert not going.done(), going.result()
            await asyncio.sleep(0.05)
        opened[0].shutdown(socket.SHUT_RDWR)
        return await going

    try:
        assert run(main()).trained == 60
    finally:
        for one in opened:
            one.close()
    (why,) = deaths(folder)
    assert "the process of the agents 'agents-0' has ended" in why


def test_agents_that_die_while_they_start_again_are_started_once_more(tmp_path, has_children):
    options = {"fault": "dies starting", "place": str(tmp_path), "count": 8}
    folder = folder_of(tmp_path, epochs=1, task_options=options)
    assert run(train(folder)).trained == 8
    assert [why for why in deaths(folder) if "exit status 3" not in why] == []
    assert len(deaths(folder)) == 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task cannot tell whether it is cancelled")
@pytest.mark.parametrize("has_a_process", [False, True])
def test_an_agent_that_lets_a_cancellation_of_its_own_out_has_failed_a_try(tmp_path, request, has_a_process):
    if has_a_process:
        request.getfixturevalue("has_children")
    options = {"fault": "cancels once", "place": str(tmp_path), "count": 8}
    folder = folder_of(tmp_path, epochs=1, task_options=options)
    assert run(train(folder)).trained == 8
    assert deaths(folder) == []


def test_a_signal_to_all_processes_of_a_run_ends_it_in_order(tmp_path, has_children):
    """As a cluster's scheduler sends it."""
    folder = folder_of(tmp_path, steps=10**6, task_options={"count": 300}, evaluation={"every": 5, "concurrent": 4})
    log, children = RunLog(folder.logs), set()

    async def main():
        local = LocalRun(folder, log)
        going = asyncio.ensure_future(local.run())
        while len(log.recent) < 3:
            await asyncio.sleep(0.02)
            assert not going.done(), going.result()
        children.update(int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
        assert len(children) >= 4  # learner, engine, evaluation, agents
        for child in children:
            os.kill(child, signal.SIGTERM)
        await asyncio.sleep(1.0)
        local.stop()
        return await going

    result = run(main())
    log.close()
    assert folder.checkpoints().latest().step == result.step >= 3


def test_a_task_whose_items_differ_between_processes_is_refused(tmp_path, has_children):
    folder = folder_of(tmp_path, steps=1, task_options={"fault": "other items"})
    with pytest.raises(SchemaError, match=r"'agents-0' made other items .*arguments and its seed only"):
        run(train(folder))
    assert trained(folder) == []


def test_fewer_workers_than_generators_are_refused(tmp_path):
    folder = folder_of(tmp_path, steps=1, generators=3, agent_workers=2)
    with pytest.raises(SchemaError, match=r"agent_workers=2, but generators=3: .* give agent_workers=3 or more"):
        run(train(folder))


def test_a_task_that_cannot_be_made_is_told_at_the_start(tmp_path):
    folder = folder_of(tmp_path, steps=1, task="sort")
    said = (folder.path / "experiment.json").read_text()
    (folder.path / "experiment.json").write_text(said.replace('"task_options": {}', '"task_options": {"digits": 0}'))

    async def main():
        _, engine = socket.socketpair()
        await ProcessAgents.start(folder, "agents-0", engine)

    with pytest.raises(SchemaError, match="digits"):
        run(main())


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@given(key=st.text(max_size=20), lens=lengths, seed=st.integers(0, 2**32 - 1))
def test_samples_come_back_as_they_were(key, lens, seed):
    random, total = np.random.default_rng(seed), sum(lens)
    data = {
        "input_ids": random.integers(0, 2**62, total),
        "versions": random.integers(-1, 2**62, total),
        "logprobs": random.normal(size=total).astype(np.float32),
        "loss_mask": random.random(total) < 0.5,
        "rewards": random.normal(size=len(lens)).astype(np.float32),
    }
    sample = sw.SequenceSample([key], {**{name: [lens] for name in data}, "rewards": [[1] * len(lens)]}, data)
    body = pack_sample(sample)
    got = unpack_sample(body)
    assert got.ids == [key]
    for name, expected in data.items():
        assert got[name].tobytes() == expected.tobytes()
        assert got[name].dtype == expected.dtype
        assert got[name].flags.aligned
        assert got[name].flags.writeable
        assert got.seqlens[name] == sample.seqlens[name]
    with pytest.raises(SchemaError, match=f"{len(body) + 1} bytes, expected {len(body)}"):
        unpack_sample(body + b"x")
