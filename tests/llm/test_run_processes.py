"""A run as processes: each of them is killed, and every item is trained once."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest
from patience import HANG_S, until
from run_sweep import SMALL, Sweep

from sharpwave.errors import NotReady, SchemaError, StaleHandle
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.items import Items
from sharpwave.llm.launchers.alive import describe_process, is_alive
from sharpwave.llm.launchers.controller_client import ControllerClient
from sharpwave.llm.launchers.controller_server import ControllerServer
from sharpwave.llm.launchers.keeper import Keeper
from sharpwave.llm.launchers.launcher import LocalLauncher
from sharpwave.llm.log import EVENTS, STEPS, read_lines
from sharpwave.llm.rules import Rules
from sharpwave.llm.run_folder import RunFolder, write_whole
from sharpwave.sequences.sample import SequenceSample
from sharpwave.tools.train_process import stop


def test_each_role_is_killed_once_and_every_item_is_trained_once(tmp_path):
    sweep = Sweep(tmp_path / "run", 5, None, seed=1)
    sweep.run()
    sweep.check()
    assert sweep.done == sweep.keeper.restarts == 5
    died = [line["who"] for line in read_lines(sweep.folder.logs / EVENTS) if line["event"] == "died"]
    assert sorted(died) == ["agents-0", "controller", "evaluation", "generator-0", "learner"]
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


# ---- the controller over its socket, in one process ------------------------------------------------------------------


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
    """A controller's server and clients of it in one event loop."""

    def __init__(self, tmp_path):
        (tmp_path / "addresses").mkdir()
        self.folder, self.path, self.server = RunFolder(tmp_path), tmp_path, None

    async def start(self):
        items = Items([{"id": str(number)} for number in range(8)])
        rules = Rules(2, max_staleness=1, epochs=1, shuffle=False)
        self.server = ControllerServer(items, rules, journal=self.path / "journal")
        self.folder.register("controller", {"address": await self.server.start()})

    def client(self, owner):
        return ControllerClient(self.folder, owner)


def test_calls_go_over_the_socket_and_a_dead_client_loses_what_it_had(tmp_path):
    async def main():
        place = Place(tmp_path)
        await place.start()
        agent, other, learner = (place.client(name) for name in ("agent", "other", "learner"))
        permits = [await agent.start("agent") for _ in range(2)]
        assert [permit.key for permit in permits] == ["0/0", "0/1"]
        with pytest.raises(SchemaError, match="expected one sample with the permit's key"):
            await agent.finish(permits[1], sample(permits[0]))
        assert await agent.finish(permits[0], sample(permits[0])) == "kept"
        await agent.close()  # dead, with one permit
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
        await second.begin(cut, 2)
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
