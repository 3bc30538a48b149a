"""A run as processes: each of them is killed, and every item is trained once."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import HANG_S, pause, until
from run_sweep import SMALL, Sweep
from served import local

from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.generators import Sampling
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.items import Items
from sharpwave.llm.launchers import launcher as launcher_module
from sharpwave.llm.launchers.alive import describe_process, is_alive
from sharpwave.llm.launchers.controller_client import ControllerClient
from sharpwave.llm.launchers.controller_server import ControllerServer
from sharpwave.llm.launchers.found_generators import FoundGenerators
from sharpwave.llm.launchers.keeper import Keeper
from sharpwave.llm.launchers.launcher import LocalLauncher
from sharpwave.llm.log import EVENTS, STEPS, read_lines
from sharpwave.llm.rules import Rules
from sharpwave.llm.run_folder import RunFolder, write_whole
from sharpwave.sequences.sample import SequenceSample
from sharpwave.tools.train_process import stop


def test_each_role_is_killed_once_and_every_item_is_trained_once(tmp_path):
    sweep = Sweep(tmp_path / "run", 6, None, seed=1)
    (sweep.folder.path / "processes" / ".agents-0.json.1").touch()  # of a process that was killed while it wrote it
    sweep.run()
    sweep.check()
    assert sweep.done == sweep.keeper.restarts == 6
    died = [line["who"] for line in read_lines(sweep.folder.logs / EVENTS) if line["event"] == "died"]
    assert sorted(died) == ["agents-0", "controller", "evaluation", "generator-0", "learner", "reference"]
    assert not list((sweep.folder.path / "processes").iterdir())


def test_a_killed_keeper_is_started_again_by_the_controller(tmp_path):
    config = tmp_path / "run.toml"
    tables = {name: value for name, value in SMALL.items() if isinstance(value, dict)}
    plain = [f"{name} = {json.dumps(value)}" for name, value in SMALL.items() if name not in tables]
    for name, table in tables.items():
        plain += [f"[{name}]", *[f"{key} = {json.dumps(value)}" for key, value in table.items()]]
    config.write_text("\n".join(plain))
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-m", "sharpwave", "train", str(config), "--processes", "--out", str(folder.path)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: first.poll() is not None or bool(read_lines(folder.logs / STEPS)), "the first step")
        assert first.poll() is None
        first.kill()
        first.wait()
        steps = len(read_lines(folder.logs / STEPS))
        until(lambda: (folder.find("run") or {}).get("pid") not in (None, first.pid), "a new keeper")
        until(lambda: len(read_lines(folder.logs / STEPS)) > steps, "a step after the keeper died")
        until(lambda: folder.is_driven and is_alive(folder.find("keeper")), "the new keeper at work")
    finally:
        if first.poll() is None:
            first.terminate()
        stop(folder.path, HANG_S)
    assert folder.find("keeper") is None
    processes = [json.loads(path.read_text()) for path in (folder.path / "processes").iterdir()]
    assert not [said for said in processes if is_alive(said)]


class Stillborn(LocalLauncher):
    """Its processes end at once."""

    def start(self, role):
        child = subprocess.Popen(["true"])
        write_whole(self._place(role), describe_process(child.pid))
        child.wait()


def test_a_role_that_never_gets_ready_ends_the_run_with_the_place_of_its_words(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))
    with pytest.raises(NotReady, match=r"controller ended 5 times before it was ready; see .*controller\.txt"):
        Keeper(folder, launcher=Stillborn(folder)).run()
    assert folder.find("keeper") is None


class Rough(LocalLauncher):
    """A process that is asked to stop dies at once."""

    def stop(self, role, *, kill=False):
        super().stop(role, kill=True)


def test_a_run_that_is_stopped_ends_although_its_controller_dies(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))
    keeper = Keeper(folder, launcher=Rough(folder))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(keeper.run)
        until(lambda: running.done() or bool(read_lines(folder.logs / STEPS)), "the first step")
        keeper.stop()
        assert running.result(HANG_S).trained > 0
    died = [line["who"] for line in read_lines(folder.logs / EVENTS) if line["event"] == "died"]
    assert died == ["controller"]
    assert not list((folder.path / "addresses").glob("stop*"))


class EndsTheRun(LocalLauncher):
    """After the first step it lets the run end while the keeper asks whether the learner lives."""

    def alive(self, role):
        if role == "learner" and read_lines(self._folder.logs / STEPS):
            self.stop("controller")
            until(lambda: not super(EndsTheRun, self).alive(role), "the end of the learner")
        return super().alive(role)


class Interrupted(BaseException):
    """In the place of a SIGKILL."""


def test_a_process_is_known_although_its_keeper_was_killed_while_it_started_it(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))
    folder.register("keeper", describe_process(os.getpid()))
    first, second = LocalLauncher(folder), LocalLauncher(folder)
    with monkeypatch.context() as killed:

        def interrupt(*_):
            raise Interrupted

        killed.setattr("sharpwave.llm.launchers.launcher.write_whole", interrupt)
        with contextlib.suppress(Interrupted):
            first.start("controller")
    try:
        until(lambda: second.alive("controller"), "the record of the process")
        known = second.process("controller")
        second.start("controller")  # as where its number was lost with the process that forked it
        nursery = second._nursery.pid
        children = Path(f"/proc/{nursery}/task/{nursery}/children")
        until(lambda: not children.read_text(), "the end of the second process")
        assert second.process("controller") == known
        assert second.alive("controller")
    finally:
        second.stop("controller", kill=True)
        first.close()
        second.close()
    until(lambda: not second.alive("controller"))
    assert "another buffer" not in (folder.logs / "controller.txt").read_text()


def test_processes_are_started_although_the_one_that_forks_them_is_stopped(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))
    folder.register("keeper", describe_process(os.getpid()))
    start_nursery = launcher_module._start_nursery

    def start_patiently(output):
        monkeypatch.setattr(launcher_module, "_FORK_S", HANG_S)
        return start_nursery(output)

    monkeypatch.setattr(launcher_module, "_start_nursery", start_patiently)
    launcher = LocalLauncher(folder)
    try:
        launcher.start("controller")
        first = launcher._nursery
        pause(first.pid)
        launcher.stop("controller", kill=True)
        until(lambda: not launcher.alive("controller"))
        monkeypatch.setattr(launcher_module, "_FORK_S", 0.2)
        launcher.start("controller")
        assert first.poll() == -signal.SIGKILL
        assert first.stdin.closed
        assert first.stdout.closed
        assert launcher.alive("controller")
        pause(launcher._nursery.pid)
    finally:
        launcher.stop("controller", kill=True)
        launcher.close()
    until(lambda: not launcher.alive("controller"))


def test_a_learner_that_has_ended_in_order_is_not_started_again(tmp_path):
    """It writes the outcome and ends between two looks of the keeper."""
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))
    keeper = Keeper(folder, launcher=EndsTheRun(folder))
    assert keeper.run().trained > 0
    assert not [line for line in read_lines(folder.logs / EVENTS) if line["event"] == "died"]
    assert keeper.restarts == 0


def test_ids_of_processes_that_are_used_again_are_noticed():
    mine = describe_process(os.getpid())
    assert is_alive(mine)
    assert not is_alive({**mine, "ticks": mine["ticks"] + 1})
    child = subprocess.Popen(["sleep", "100"])
    said = describe_process(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not is_alive(said)
    assert not is_alive(None)


def test_answers_of_other_generators_go_on_while_one_is_started_again(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))

    async def main():
        found = FoundGenerators(folder, ["generator-0", "generator-1"])
        async with local() as generator, GeneratorServer(generator) as server:
            folder.register("generator-0", {"address": "http://127.0.0.1:9"})
            folder.register("generator-1", {"address": server.address})
            await found.generate([1, 2], Sampling(max_tokens=1))
            await generator.pause()
            answer = asyncio.ensure_future(found.generate([1, 2], Sampling(max_tokens=3, ignore_eos=True)))
            while not (await generator.health()).waiting:
                await asyncio.sleep(0.001)
            folder.forget("generator-0")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(found.generate([1, 2], Sampling(max_tokens=1)), 0.5)
            await generator.resume()
            assert len((await answer).tokens) == 3
            await found.close()

    asyncio.run(main())


# ---- the controller and its clients ----------------------------------------------------------------------------------


def sample(permit, reward=1.0):
    import numpy as np

    lens = [[3, 3]]
    data = {
        "input_ids": np.arange(6), "loss_mask": np.array([0, 1, 1] * 2, bool),
        "logprobs": np.zeros(6, np.float32), "versions": np.zeros(6, np.int64),
        "rewards": np.array([reward, 0.0], np.float32),
    }  # fmt: skip
    return SequenceSample([permit.key], {**dict.fromkeys(data, lens), "rewards": [[1, 1]]}, data)


class Place:
    """A controller's server, and clients of it in the same event loop."""

    def __init__(self, tmp_path):
        (tmp_path / "addresses").mkdir()
        self.folder, self.path, self.server, self.address = RunFolder(tmp_path), tmp_path, None, None
        self.events = []

    async def start(self, client_timeout_s=HANG_S):
        items = Items([{"id": str(number)} for number in range(8)])
        rules = Rules(2, max_staleness=1, epochs=1, shuffle=False)
        self.server = ControllerServer(
            items, rules, journal=self.path / "journal", address=self.address, client_timeout_s=client_timeout_s,
            log=lambda event, **about: self.events.append((event, about)),
        )  # fmt: skip
        self.address = await self.server.start()
        self.folder.register("controller", {"address": self.address})

    def client(self, owner):
        return ControllerClient(self.folder, owner)


def test_calls_go_over_the_service_and_a_client_that_closes_loses_what_it_had(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        agent, other, learner = (place.client(name) for name in ("agent", "other", "learner"))
        permits = [await agent.start("agent") for _ in range(2)]
        assert [permit.key for permit in permits] == ["0/0", "0/1"]
        with pytest.raises(SchemaError, match="expected one sample with the permit's key"):
            await agent.finish(permits[1], sample(permits[0]))
        assert await agent.finish(permits[0], sample(permits[0])) == "kept"
        await agent.close()  # with one permit
        again = await other.start("other")
        assert again.key == "0/1"
        assert await other.finish(again, sample(again)) == "kept"
        lease = await learner.take("learner")
        assert sorted(lease.batch.ids) == ["0/0", "0/1"]
        await learner.trained(lease, 1, 1)
        with pytest.raises(StaleHandle):
            await learner.trained(lease, 2, 2)
        assert (await learner.stats())["trained"] == 2
        cut = await learner.checkpoint()
        assert (cut.step, cut.version) == (1, 1)
        await learner.stop()
        assert await other.start("other") is None
        for client in (other, learner):
            await client.close()
        await place.server.close()

    asyncio.run(main())


def test_a_learner_that_begins_again_gets_back_what_it_had_not_saved(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        agent, first = place.client("agent"), place.client("learner.1")
        await first.begin(None, 0)
        cut = await first.checkpoint()
        for _ in range(2):
            permit = await agent.start("agent")
            await agent.finish(permit, sample(permit))
        lease = await first.take("learner.1")
        await first.trained(lease, 1, 1)
        waiting = [asyncio.ensure_future(agent.start("agent")) for _ in range(6)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await first.close()
        second = place.client("learner.2")
        await second.begin(cut, 1)
        lease = await second.take("learner.2")
        assert sorted(lease.batch.ids) == ["0/0", "0/1"]
        for task in waiting:
            task.cancel()
        for client in (agent, second):
            await client.close()
        await place.server.close()

    asyncio.run(main())


def test_a_call_waits_for_a_controller_that_comes_later(tmp_path):
    async def main():
        place = Place(tmp_path)
        client = place.client("agent")
        call = asyncio.ensure_future(client.start("agent"))
        await asyncio.sleep(0)
        await place.start()
        assert (await call).key == "0/0"
        await client.close()
        await place.server.close()
        hasty = ControllerClient(place.folder, "hasty", patience_s=0)
        with pytest.raises(NotReady, match="no controller answered within 0 s"):
            await hasty.start("hasty")
        await hasty.close()

    asyncio.run(main())


def test_calls_that_wait_go_on_at_the_next_server_of_the_address(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        agent, learner = place.client("agents-0.1"), place.client("learner.1")
        permits = [await agent.start("") for _ in range(4)]  # as many as may run
        await agent.finish(permits[0], sample(permits[0]))
        waiting = asyncio.ensure_future(learner.take(""))
        await learner.stats()
        await place.server.close()
        others = [asyncio.ensure_future(agent.finish(permit, sample(permit))) for permit in permits[1:3]]
        await asyncio.sleep(0.1)
        await place.start()
        assert [await call for call in others] == ["kept", "kept"]  # of permits that the new controller does not know
        lease = await waiting
        assert sorted(lease.batch.ids) == ["0/0", "0/1"]
        await learner.trained(lease, 1, 1)
        assert not [about for event, about in place.events if event == "lose"]  # a server's end is no client's death
        for client in (agent, learner):
            await client.close()
        await place.server.close()

    asyncio.run(main())


def test_the_next_server_goes_on_from_the_last_cut_also_where_the_learner_has_not_saved_it(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        agent, learner = place.client("agents-0.1"), place.client("learner.1")
        await learner.begin(None, 0)
        permit = await agent.start("")
        assert await agent.finish(permit, sample(permit, reward=0.0)) == "no_signal"
        await learner.checkpoint(7)
        await place.server.close()
        await place.start()
        stats = await learner.stats()
        assert (stats["step"], stats["no_signal"]) == (7, 1)
        assert (await agent.start("")).key == "0/1"
        for client in (agent, learner):
            await client.close()
        await place.server.close()

    asyncio.run(main())


def test_a_new_process_of_a_role_takes_the_place_of_the_one_before(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        first, second, other = (place.client(name) for name in ("agents-0.1", "agents-0.2", "agents-1.3"))
        for _ in range(3):
            await first.start("")
        kept = await other.start("")
        waiting = asyncio.ensure_future(first.start(""))
        while not (await other.stats())["waiting"]:  # a call that comes too late hears another reason
            await asyncio.sleep(0.01)
        assert [(await second.start("")).key for _ in range(3)] == ["0/0", "0/1", "0/2"]
        with pytest.raises(ClosedError, match="owner is dead"):
            await waiting
        with pytest.raises(ClosedError, match=r"agents-0\.1 was replaced by another process of its role"):
            await first.start("")
        assert await other.finish(kept, sample(kept)) == "kept"
        await first.close()  # takes nothing from its successor
        assert (await other.stats())["running"] == 3
        for client in (second, other):
            await client.close()
        await place.server.close()

    asyncio.run(main())


HOLD_A_PERMIT = """
import asyncio, sys, time
from sharpwave.llm.launchers.controller_client import ControllerClient
from sharpwave.llm.run_folder import RunFolder

async def main():
    print((await ControllerClient(RunFolder(sys.argv[1]), "agents-0.1").start("")).key, flush=True)
    time.sleep(600)  # the event loop stands still, and heartbeats go on

asyncio.run(main())
"""


def test_a_client_that_is_busy_keeps_its_permit_and_one_that_is_killed_loses_it(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start(client_timeout_s=1.0)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", HOLD_A_PERMIT, str(tmp_path), stdout=subprocess.PIPE
        )
        try:
            assert await asyncio.wait_for(child.stdout.readline(), HANG_S) == b"0/0\n"
            await asyncio.sleep(3.0)
            assert not [about for event, about in place.events if event == "lose"]
        finally:
            child.kill()
            await child.wait()
        other = place.client("agents-1.1")
        taken = [(await asyncio.wait_for(other.start(""), HANG_S)).key for _ in range(4)]
        assert sorted(taken) == ["0/0", "0/1", "0/2", "0/3"]
        assert [about["owner"] for event, about in place.events if event == "lose"] == ["agents-0.1"]
        await other.close()
        await place.server.close()

    asyncio.run(main())


def test_more_agents_than_threads_wait_at_once(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        client = place.client("agents-0.1")
        waiting = [asyncio.ensure_future(client.start("")) for _ in range(100)]
        while (await client.stats())["running"] < 4:
            await asyncio.sleep(0.01)
        assert (await client.stats())["waiting"] <= 1
        await client.stop()
        permits = [permit for permit in await asyncio.gather(*waiting) if permit is not None]
        assert [permit.key for permit in permits] == ["0/0", "0/1", "0/2", "0/3"]
        await client.close()
        await place.server.close()

    asyncio.run(main())


def test_wrong_calls_are_refused(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        client = place.client("agents-0.1")
        with pytest.raises(SchemaError, match="a Controller has no verb 'fly'"):
            await client._call("fly")
        client.owner = 3
        with pytest.raises(SchemaError, match="owner: expected a name, got 3"):
            await client.stats()
        client.owner = "agents-0.1"
        with pytest.raises(TypeError, match="unexpected keyword argument 'high'"):
            await client._call("stats", high=True)
        assert (await client.stats())["trained"] == 0
        await client.close()
        await place.server.close()

    asyncio.run(main())


def test_without_pyzmq_the_keeper_says_what_to_install(tmp_path, monkeypatch):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(SMALL))
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(StorageError, match=r"need pyzmq; pip install sharpwave\[serve\]"):
        Keeper(folder)
