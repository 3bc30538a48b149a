"""The C++ client of a server: a C++ program and Python share a served buffer, through kills, cuts and waits."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq")

from cpp_cases import CASES, OPTIONS, compare
from cpp_programs import CppError, Probe, needs_net, program
from patience import HANG_S, pause, until
from proxy import Plan, Proxy

import sharpwave as sw

needs_net()

NOT_READY, STORAGE, CLOSED = 1, 2, 4  # sharpwave::ErrorKind
CART = {"obs": sw.Field((4,)), "action": sw.Field((), "int64")}
SERVER = """
import sys, signal
import sharpwave as sw
buf = sw.ReplayBuffer(100_000, schema={"obs": sw.Field((4,)), "action": sw.Field((), "int64")}, storage=sys.argv[1],
                      exist="attach", seed=0)
server = sw.serve({"replay": buf}, sys.argv[2])
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def local(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


def row(number: int, done: bool = False) -> dict[str, Any]:
    obs = np.full(4, number, np.float32)
    rest = {"action": np.int64(number), "reward": np.float32(1), "done": np.bool_(done)}
    return {"obs": obs, "next_obs": obs + 1, **rest}


def actions(buf: sw.ReplayBuffer) -> list[int]:
    return [int(action) for rows in buf.rows(batch_size=4096) for action in rows["action"]]


@pytest.mark.parametrize("case", CASES)
def test_cpp_client_adds_and_draws_as_python_does(case: str, local: str) -> None:
    with (
        sw.ReplayBuffer(**OPTIONS | CASES[case]) as twin,
        sw.ReplayBuffer(**OPTIONS | CASES[case]) as shared,
        sw.serve({"replay": shared}, local),
        Probe(f"{local}/replay") as probe,
    ):
        compare(twin, shared, probe)


@pytest.mark.parametrize("ragged", [True, "padded"])
def test_cpp_client_sends_and_gets_observations_of_different_lengths(ragged: Any, local: str) -> None:
    schema = {"obs": sw.Field((6, 2), "float32", ragged=ragged), "action": sw.Field()}
    rng = np.random.default_rng(1)
    with (
        sw.ReplayBuffer(64, schema=schema, seed=2) as shared,
        sw.serve({"replay": shared}, local),
        Probe(f"{local}/replay") as probe,
    ):
        kept: list[np.ndarray[Any, Any]] = []
        for rows in (1, 3, 1, 4, 2, 5):
            obs = [rng.random((int(rng.integers(0, 7)), 2), np.float32) for _ in range(rows)]
            kept += obs
            rest = {"action": np.zeros(rows, np.float32), "reward": np.ones(rows, np.float32)}
            probe.add(obs=obs, next_obs=obs, done=np.zeros(rows, bool), **rest)
        batch = probe.sample(40)
        for index, items, after in zip(batch["indices"], batch["obs"], batch["next_obs"], strict=True):
            np.testing.assert_array_equal(items, kept[index].reshape(-1))
            np.testing.assert_array_equal(after, kept[index].reshape(-1))


def test_actor_in_cpp_and_learner_in_python_share_a_served_buffer() -> None:
    (actor,) = program("actor")
    with sw.ReplayBuffer(1000, schema=CART) as buf, sw.serve({"replay": buf}, "tcp://127.0.0.1:0") as server:
        address = f"{server.address}/replay"
        with sw.open(address, direct=False) as learner:
            done = subprocess.run([actor, address, "300"], capture_output=True, text=True, timeout=HANG_S)
            assert done.stdout == "added 300 rows; the buffer has 300 of 1000\n", done.stderr
            batch = learner.sample(64)
            rows = next(buf.rows(batch_size=300))
            assert rows["action"].tolist() == [int(step % 3 == 0) for step in range(300)]
            np.testing.assert_array_equal(batch["obs"], rows["obs"][batch["indices"]])


def test_actor_in_python_and_learner_in_cpp_share_a_served_buffer(local: str) -> None:
    (learner,) = program("learner")
    with (
        sw.ReplayBuffer(1000, schema=CART, sampler=sw.Prioritized(), seed=5) as buf,
        sw.serve({"replay": buf}, local),
        sw.open(f"{local}/replay", direct=False) as actor,
    ):
        for number in range(200):
            actor.add(**row(number))
        actor.flush()
        command = [learner, f"{local}/replay", "3", "16"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("sum of rewards 16.000000") == 3
        assert buf.stats()["updates_applied"] == 48


class Server:
    """A server process on a file, at an address that stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        self.storage = f"file://{folder}/replay.sw"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, self.storage, self.address]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


class Actor(threading.Thread):
    """Adds numbered rows from C++ until it is told to stop; `done` counts those whose add has returned."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self.probe, self.done, self.stops = probe, 0, False

    def run(self) -> None:
        while not self.stops:
            self.probe.add(**row(self.done, self.done % 7 == 6))
            self.done += 1

    def past(self, more: int) -> None:
        goal = self.done + more
        until(lambda: self.done >= goal or not self.is_alive())

    def stop(self) -> int:
        self.stops = True
        self.join(HANG_S)
        return self.done


def test_rows_are_taken_once_while_the_server_is_killed_and_started_again(server: Server) -> None:
    choices = random.Random(0)
    with Probe(f"{server.address}/replay") as probe:
        actor = Actor(probe)
        actor.start()
        for _ in range(4):
            actor.past(choices.randint(1, 200))
            server.kill()
            server.start()
        actor.past(20)
        count = actor.stop()
    server.kill()
    with sw.open(server.storage) as buf:
        assert actions(buf) == list(range(count))
    server.start()


@pytest.mark.parametrize("seed", range(2))
def test_rows_are_taken_once_over_a_bad_network(seed: int) -> None:
    plan = Plan(seed=seed, faults=("cut", "drop"), after=(300, 20_000))  # every connection ends some time
    with (
        sw.ReplayBuffer(100_000, schema=CART) as buf,
        sw.serve({"replay": buf}, "tcp://127.0.0.1:0") as server,
        Proxy(server.address, plan) as proxy,
        Probe(f"{proxy.address}/replay") as probe,
    ):
        actor = Actor(probe)
        actor.start()
        until(lambda: proxy.counts["cut"] + proxy.counts["drop"] >= 6 or not actor.is_alive())
        count = actor.stop()
        assert actions(buf) == list(range(count))


def test_add_that_was_given_up_is_settled_before_the_next(server: Server) -> None:
    with Probe(f"{server.address}/replay") as probe:
        probe.add(**row(0))
        pause(server.process.pid)
        try:
            probe.ask("timeout 0.1")
            with pytest.raises(CppError, match="may still be taken") as raised:
                probe.add(**row(1))
            assert raised.value.kind == NOT_READY
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        probe.ask("timeout")
        for number in range(2, 10):
            probe.add(**row(number))
        assert probe.size() == 10  # the stopped server took the row when it went on
    with sw.open(server.storage) as buf:
        assert actions(buf) == list(range(10))


def test_server_that_is_not_there_is_named_at_the_deadline(local: str) -> None:
    with pytest.raises(CppError, match=rf"'{local}/replay': no server answers; give a longer timeout_s") as raised:
        Probe(f"{local}/replay", timeout=0.2)
    assert raised.value.kind == NOT_READY
    with sw.ReplayBuffer(10, schema=CART) as buf:
        with sw.serve({"replay": buf}, local), pytest.raises(CppError, match="other") as refused:
            Probe(f"{local}/other")
        assert refused.value.kind == STORAGE


def test_draw_waits_for_the_pace_and_holds_up_no_add(local: str) -> None:
    with (
        sw.ReplayBuffer(100, schema=CART, pace=sw.Pace.min_size(5)) as buf,
        sw.serve({"replay": buf}, local),
        Probe(f"{local}/replay") as probe,
    ):
        with pytest.raises(CppError, match="sampling waits") as raised:
            probe.sample(2, timeout=0.1)
        assert raised.value.kind == NOT_READY
        for number in range(5):
            probe.add(**row(number))
        assert len(probe.sample(2)["indices"]) == 2
        probe.ask("close")
        with pytest.raises(CppError, match="closed") as closed:
            probe.sample(2)
        assert closed.value.kind == CLOSED


def test_killed_cpp_client_leaves_a_truncated_episode(local: str) -> None:
    with sw.ReplayBuffer(100, schema=CART) as buf, sw.serve({"replay": buf}, local, client_timeout=0.5):
        with Probe(f"{local}/replay") as probe:
            for number in range(3):
                probe.add(**row(number))
            # Alive in its own time, though it says nothing: its heartbeat speaks for it.
            threading.Event().wait(1.5)
            probe.add(**row(3))
            assert not any(next(buf.rows(batch_size=10))["truncated"])
        until(lambda: bool(next(buf.rows(batch_size=10))["truncated"][3]))
        assert next(buf.rows(batch_size=10))["truncated"].tolist() == [False, False, False, True]


def test_rows_too_large_for_one_message_go_in_several(local: str) -> None:
    with (
        sw.ReplayBuffer(5000, schema=CART) as buf,
        sw.serve({"replay": buf}, local, limits={"message_bytes": 65_536}),
        Probe(f"{local}/replay") as probe,
    ):
        rows = [row(number) for number in range(4000)]
        probe.add(**{name: np.stack([part[name] for part in rows]) for name in rows[0]})
        assert actions(buf) == list(range(4000))


def test_client_with_a_key_is_let_in_and_one_without_is_not(tmp_path: Path) -> None:
    from sharpwave.service.keys import make_key

    folder = tmp_path / "keys"
    key = make_key(folder, "actor", ("read", "write"))
    with (
        sw.ReplayBuffer(100, schema=CART) as buf,
        sw.serve({"replay": buf}, "tcp://127.0.0.1:0", keys=folder) as server,
    ):
        with Probe(f"{server.address}/replay", keys=key) as probe:
            probe.add(**row(0))
            assert probe.size() == 1
        with pytest.raises(CppError, match="no server answers"):
            Probe(f"{server.address}/replay", timeout=0.5)
        key.chmod(0o644)
        with pytest.raises(CppError, match="can be read by other users; run: chmod 600"):
            Probe(f"{server.address}/replay", keys=key)
