"""Rows at a server: what a client may rely on when servers, clients and calls end early."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, pause, until, until_thread_waits
from service.server_child import ServerChild, processes

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError


def in_memory(**options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(1000, obs_shape=(2,), seed=0, **options)


def in_file(path: str, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(10_000, obs_shape=(2,), seed=0, storage=f"file://{path}", exist="attach", **options)


def row(number: int) -> tuple[Any, ...]:
    return [number, -number], number, number, [number + 1, -number], number % 10 == 9


def numbers_of(buffer: Any) -> list[int]:
    return [int(one) for part in buffer.rows() for one in part["action"]]


# ---- servers that die ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 50])
def test_rows_are_there_once_after_a_server_on_a_file_was_killed(window: int | None, tmp_path: Path) -> None:
    with ServerChild(in_file, str(tmp_path / "live.sw")) as server:
        buffer = sw.open(server.address, direct=False)
        with buffer.writer(window=window) as writer:
            for number in range(400):
                if number in (100, 250):
                    server.kill()
                    restart = threading.Timer(0.2, server.start)
                    restart.start()
                writer.add(*row(number))
            writer.flush()
            restart.join()
            assert numbers_of(buffer) == list(range(400))
        assert buffer.stats()["server"]["sessions"] == 3
        buffer.close()


def test_a_call_without_a_server_ends_at_its_deadline_and_goes_on_after_the_restart(tmp_path: Path) -> None:
    with ServerChild(in_file, str(tmp_path / "live.sw")) as server:
        buffer = sw.open(server.address, direct=False)
        buffer.add(*row(0))
        server.kill()
        for call in (lambda: buffer.sample(4, timeout=0.3), lambda: buffer.sample(4, timeout=0)):
            begun = time.monotonic()
            with pytest.raises(NotReady, match="is the server running"):
                call()
            assert time.monotonic() - begun < 0.3 + 1.0
        with pytest.raises(NotReady, match="not known until the next add"):
            buffer.add(*row(1), timeout=0.2)
        server.start()
        assert buffer.sample(4)["action"].tolist() == [0.0] * 4
        buffer.add(*row(2))
        assert numbers_of(buffer) == [0, 2]
        buffer.close()


def test_a_table_in_memory_is_another_one_after_a_restart() -> None:
    with ServerChild(in_memory) as server:
        buffer = sw.open(server.address)
        for number in range(7):
            buffer.add(*row(number))
        server.kill()
        server.start()
        for call in (lambda: buffer.sample(2), lambda: buffer.add(*row(7)), lambda: len(buffer)):
            with pytest.raises(
                StorageError, match=r"another table \(incarnation .*the 7 rows .* are gone.*open it again"
            ):
                call()
        again = sw.open(server.address)
        assert len(again) == 0
        again.close()
        buffer.close()


def test_a_stopped_server_is_waited_for_and_answers_once(tmp_path: Path) -> None:
    with ServerChild(in_memory) as server:
        buffer = sw.open(server.address)
        buffer.add(*row(0))
        server.pause()
        threading.Timer(1.5, server.go_on).start()  # longer than a client waits before it asks
        buffer.add(*row(1))
        assert numbers_of(buffer) == [0, 1]
        buffer.close()


# ---- clients that die ------------------------------------------------------------------------------------------------


def add_and_stop(address: str, pipe: Any) -> None:
    buffer = sw.open(address, direct=False)
    for number in range(5):
        buffer.add(*row(number))
    pipe.send(None)
    pipe.recv()


def test_the_open_episode_of_a_dead_client_ends_as_truncated() -> None:
    table = in_memory(num_envs=1)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0", client_timeout=0.5) as server:
        here, theirs = processes.Pipe()
        child = processes.Process(target=add_and_stop, args=(f"{server.address}/it", theirs), daemon=True)
        child.start()
        here.recv()
        assert list(table.episodes()) == []
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        until(lambda: server.stats()["lost"] == 1)
        (episode,) = table.episodes()
        assert episode["action"].tolist() == [0, 1, 2, 3, 4]
        assert episode["truncated"].tolist() == [False] * 4 + [True]
    table.close()


def hold_batches(address: str, pipe: Any) -> None:
    buffer = sw.open(address)
    for _ in buffer.batches(2, prefetch=3):
        pipe.send(None)
        pipe.recv()


def test_rows_reserved_by_a_dead_client_are_given_again() -> None:
    table = sw.ReplayBuffer(100, obs_shape=(2,), sampler=sw.Fifo(), seed=0)
    for number in range(20):
        table.add(*row(number))
    with sw.serve({"it": table}, "tcp://127.0.0.1:0", client_timeout=0.5) as server:
        here, theirs = processes.Pipe()
        child = processes.Process(target=hold_batches, args=(f"{server.address}/it", theirs), daemon=True)
        child.start()
        here.recv()
        here.send(None)
        here.recv()  # two batches were returned, others are on their way
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        until(lambda: server.stats()["lost"] == 1)
        left = [int(one) for one in table.sample(16)["action"]]
        # That a batch was returned is told with a later request, which may be lost with the client.
        assert left in [list(range(first, first + 16)) for first in (0, 2, 4)]
    table.close()


def test_a_client_taken_for_dead_goes_on_and_doubles_nothing() -> None:
    table = in_memory(num_envs=1)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0", client_timeout=0.5) as server:
        here, theirs = processes.Pipe()
        child = processes.Process(target=add_when_told, args=(f"{server.address}/it", theirs), daemon=True)
        child.start()
        here.send(3)
        here.recv()
        pause(child.pid)
        until(lambda: server.stats()["lost"] == 1)
        os.kill(child.pid, signal.SIGCONT)
        here.send(3)
        here.recv()
        assert numbers_of(table) == list(range(6))
        assert [episode["action"].tolist() for episode in table.episodes()] == [[0, 1, 2]], "cut where it was silent"
        here.send(0)
        child.join()
    table.close()


def add_when_told(address: str, pipe: Any) -> None:
    buffer, number = sw.open(address), 0
    while count := pipe.recv():
        for _ in range(count):
            buffer.add(*row(number))
            number += 1
        pipe.send(None)
    buffer.close()


# ---- waiting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def paced() -> Any:
    table = sw.ReplayBuffer(100, obs_shape=(2,), sampler=sw.Fifo(), pace=sw.Pace.queue(4), seed=0)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server:
        yield table, f"{server.address}/it"
    table.close()


def test_the_pace_holds_over_the_network_and_explains_itself(paced: Any) -> None:
    _, address = paced
    with sw.open(address) as actor, sw.open(address) as learner:
        with pytest.raises(NotReady, match="0 rows"):
            learner.sample(2, timeout=0)
        for number in range(4):
            actor.add(*row(number))
        begun = time.monotonic()
        with pytest.raises(NotReady) as refused:
            actor.add(*row(4), timeout=0.2)
        assert 0.2 <= time.monotonic() - begun < HANG_S
        assert "is the server running" not in str(refused.value), "the server's own answer"
        waiting = threading.Thread(target=lambda: actor.add(*row(4)))
        waiting.start()
        until_thread_waits(waiting)
        assert learner.sample(2)["action"].tolist() == [0, 1]
        waiting.join(HANG_S)
        assert not waiting.is_alive()
        assert len(actor) == 5


def test_coroutines_wait_without_blocking_their_loop(paced: Any) -> None:
    _, address = paced

    async def main() -> list[float]:
        with sw.open(address) as buffer:
            drawn = asyncio.create_task(buffer.sample_async(2))
            await asyncio.sleep(0.05)
            assert not drawn.done()
            await asyncio.gather(buffer.add_async(*row(0)), buffer.add_async(*row(1)))
            return sorted((await drawn)["action"].tolist())

    assert asyncio.run(main()) == [0.0, 1.0]


def test_a_waiting_call_ends_with_its_timeout_at_the_server_too(paced: Any) -> None:
    table, address = paced
    with sw.open(address) as buffer:
        with pytest.raises(NotReady):
            buffer.sample(2, timeout=0.1)
        for number in range(4):
            table.add(*row(number))
        assert buffer.sample(2)["action"].tolist() == [0, 1], "the call that was given up took none"


def test_a_call_that_was_interrupted_keeps_no_later_one_waiting(paced: Any) -> None:
    """Ctrl-C in a wait for the pace: the server forgets the call, and rows that come are not drawn for it."""
    table, address = paced
    with sw.open(address) as buffer:
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            buffer.sample(2)
        assert len(buffer) == 0
        for number in range(4):
            table.add(*row(number))
        assert buffer.sample(2)["action"].tolist() == [0, 1]


# ---- the same object -------------------------------------------------------------------------------------------------


def test_a_pickled_buffer_opens_its_address() -> None:
    table = in_memory()
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it", direct=False) as one:
        with pickle.loads(pickle.dumps(one)) as other:
            other.add(*row(0))
        assert len(one) == 1
    table.close()


def test_a_forked_child_has_a_session_of_its_own() -> None:
    with ServerChild(in_memory) as server:
        buffer = sw.open(server.address)
        buffer.add(*row(0))
        child = os.fork()
        if child == 0:
            try:
                buffer.add(*row(1))
                buffer.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        buffer.add(*row(2))
        assert sorted(numbers_of(buffer)) == [0, 1, 2]
        buffer.close()


def test_writers_of_the_parent_are_closed_to_a_forked_child() -> None:
    table = in_memory()
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:
        writers = [buffer.writer(window=8), buffer.writer()]
        for number, writer in enumerate(writers):
            writer.add(*row(number))
            writer.flush()  # a row that waits here would make the child's first add send both, and so be refused
        child = os.fork()
        if child == 0:
            refused = 0
            for writer in writers:
                try:
                    writer.add(*row(50))
                except ClosedError as error:
                    refused += "of the parent process" in str(error)
                writer.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        for writer in writers:
            writer.close()
        assert sorted(numbers_of(table)) == [0, 1]
    table.close()


def test_closing_in_another_thread_tells_the_server() -> None:
    table = in_memory()
    with sw.serve({"it": table}, "tcp://127.0.0.1:0", client_timeout=HANG_S) as server:
        buffer = sw.open(f"{server.address}/it")
        thread = threading.Thread(target=buffer.close)
        thread.start()
        thread.join()
        until(lambda: not server.stats()["clients"])
    table.close()


def test_a_running_call_is_answered_by_a_server_that_ends(tmp_path: Path) -> None:
    table = sw.ReplayBuffer(200, obs_shape=(100_000,), seed=0)
    zeros = np.zeros((200, 100_000), np.float32)
    table.add(zeros, np.zeros(200), np.zeros(200), zeros, np.zeros(200, bool))
    server = sw.serve({"it": table}, "tcp://127.0.0.1:0", folder=tmp_path)
    buffer = sw.open(f"{server.address}/it")
    told: list[Any] = []
    caller = threading.Thread(target=lambda: told.append(buffer.save("copy.sw")))
    caller.start()
    until(lambda: server.stats()["waiting"] == 1)
    server.close(drain_s=HANG_S)  # a busy disk may take long for it
    caller.join(HANG_S)
    assert told == [None]
    assert (tmp_path / "copy.sw").exists()
    buffer.close()
    table.close()


def test_a_schedule_of_beta_is_set_at_the_server() -> None:
    table = in_memory(sampler=sw.Prioritized())
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:
        buffer.tune(beta=sw.Linear(0.5, 1.0, 100))
        assert table.sampler.beta == sw.Linear(0.5, 1.0, 100)
        buffer.tune(alpha=0.25, beta=0.75)
        assert (table.sampler.alpha, table.sampler.beta) == (0.25, 0.75)
    table.close()


def test_batches_that_wait_too_long_tell_what_the_pace_waits_for() -> None:
    table = in_memory(pace=sw.Pace(min_size=10))
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:
        for map_ in (None, lambda batch: batch):
            with pytest.raises(NotReady, match="0 rows < min_size 10"):
                next(buffer.batches(2, timeout=0.1, map=map_))
    table.close()


def test_threads_have_calls_under_way_at_once() -> None:
    table = in_memory(writers=64)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:

        def work(first: int) -> None:
            with buffer.writer(window=20) as writer:
                for number in range(first, first + 100):
                    writer.add(*row(number))
                    if number % 20 == 0:
                        buffer.sample(8) if len(buffer) else None

        threads = [threading.Thread(target=work, args=(100 * one,)) for one in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(numbers_of(table)) == list(range(800))
    table.close()


@pytest.mark.parametrize("storage", ["shm", "file"])
def test_a_process_of_the_same_machine_uses_the_tables_own_file(storage: str, shm_address: str, tmp_path: Path) -> None:
    place = {"shm": shm_address, "file": f"file://{tmp_path}/live.sw"}[storage]
    table = in_memory(storage=place)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server:
        address = f"{server.address}/it"
        with sw.open(address) as near, sw.open(address, direct=False) as far:
            assert near.stats()["server"] == {"address": address, "is_direct": True}
            assert far.stats()["server"]["is_direct"] is False
            near.add(*row(0))
            far.add(*row(1))
            assert numbers_of(near) == numbers_of(far) == numbers_of(table)
            assert sorted(numbers_of(table)) == [0, 1]
    table.close(unlink=True)


def test_rows_of_a_writer_with_a_window_arrive_without_a_flush() -> None:
    table = in_memory()
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:
        writer = buffer.writer(window=1000)
        writer.add(*row(0))
        until(lambda: len(table) == 1, "the keeper sends a row that waits")
        indices = writer.add(*row(1), return_indices=True)
        assert table.get(indices)["action"].tolist() == [1.0]
        writer.close()
        with pytest.raises(ClosedError):
            writer.add(*row(2))
    table.close()


def add_until_refused(writer: Any, added: list[int]) -> None:
    for number in range(1, 50):
        writer.add(*row(number), timeout=0.2)
        added.append(number)


def test_a_full_window_refuses_a_row_at_its_deadline_and_keeps_the_others(tmp_path: Path) -> None:
    with ServerChild(in_file, str(tmp_path / "live.sw")) as server:
        buffer = sw.open(server.address, direct=False)
        writer = buffer.writer(window=4)
        writer.add(*row(0))
        writer.flush()
        server.kill()
        added = [0]
        with pytest.raises(NotReady, match=r"window=4|is the server running"):
            add_until_refused(writer, added)
        assert len(added) < 10
        server.start()
        writer.flush()
        assert numbers_of(buffer) == added
        writer.close()
        buffer.close()


def test_a_refusal_of_the_server_reaches_a_writer_with_a_window() -> None:
    table = in_memory(writers=1)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:
        writer = buffer.writer(window=100)
        with pytest.raises(sw.errors.BufferFull, match="writers"):
            buffer.add(*row(0))
        writer.close()
        buffer.add(*row(0))
    table.close()


def test_hindsight_runs_functions_at_the_client() -> None:
    goal = {"achieved_goal": sw.Field((1,)), "desired_goal": sw.Field((1,))}
    view = sw.Transitions(hindsight=sw.Hindsight("final", 1.0, at_the_client))
    table = sw.ReplayBuffer(100, schema={"obs": goal, "action": sw.Field()}, view=view, num_envs=1, seed=0)
    steps = np.arange(10, dtype=np.float32)[:, None]
    obs = {"achieved_goal": steps, "desired_goal": steps * 0}
    after = {"achieved_goal": steps + 1, "desired_goal": steps * 0}
    table.add(obs=obs, action=steps[:, 0], reward=steps[:, 0], next_obs=after, done=np.arange(10) == 9)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server:
        with pytest.raises(SchemaError, match="has functions"):
            sw.open(f"{server.address}/it")
        with sw.open(f"{server.address}/it", view=view) as buffer:
            called.clear()
            batch = buffer.sample(8)
            assert called == [threading.get_ident()]
            assert batch["reward"].tolist() == [float(threading.get_ident() % 1000)] * 8
    table.close()


called: list[int] = []


def at_the_client(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    called.append(threading.get_ident())
    return np.full(len(achieved), threading.get_ident() % 1000, np.float32)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("tcp://127.0.0.1:1/it", "nothing listens there"),
        ("ipc:///nowhere/at/all/it", "does not answer"),
        ("tcp://127.0.0.1/it", "expected 'tcp://host:port/name'"),
        ("tcp://127.0.0.1:7001", "expected 'tcp://host:port/name'"),
        ("tcp://127.0.0.1:99999/it", "expected 'tcp://host:port/name'"),
        ("tcp://127.0.0.1:7001/a b", "expected 'tcp://host:port/name'"),
        ("ipc://relative/it", "an absolute path"),
    ],
)
def test_a_wrong_address_is_told_within_five_seconds(address: str, told: str) -> None:
    begun = time.monotonic()
    with pytest.raises(StorageError, match=told):
        sw.open(address)
    assert time.monotonic() - begun < 6


def test_a_program_that_speaks_something_else_is_told() -> None:
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(StorageError, match="connections and is silent"),
    ):
        sw.open(f"tcp://127.0.0.1:{silent.getsockname()[1]}/it", timeout=0.5)


def test_an_unknown_table_and_the_wrong_options_are_told() -> None:
    table = in_memory()
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server:
        with pytest.raises(StorageError, match="no table 'that'; it has it"):
            sw.open(f"{server.address}/that")
        for wrong in ({"recover": True}, {"verify": False}):
            with pytest.raises(SchemaError, match="at a server already"):
                sw.open(f"{server.address}/it", **wrong)
        with pytest.raises(StorageError, match="cannot listen"):
            sw.serve({"it": table}, server.address)
        with sw.open(f"{server.address}/it") as buffer, pytest.raises(StorageError, match="give serve\\(\\) folder="):
            buffer.save("/tmp/anywhere")
    for wrong_address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://example.org:0"):
        with pytest.raises(StorageError, match="can be reached from other machines; give keys="):
            sw.serve({"it": table}, wrong_address)
    with pytest.raises(SchemaError, match="RolloutBuffer is filled and read by the process"):
        sw.serve({"it": sw.RolloutBuffer(2, 2, obs_shape=(1,))}, "tcp://127.0.0.1:0")
    table.close()


def test_a_batch_above_the_limit_is_refused_before_it_is_drawn() -> None:
    table = sw.ReplayBuffer(1000, obs_shape=(64,), seed=0)
    table.add(np.zeros(64), 0, 0, np.zeros(64), False)
    limits = {"message_bytes": 65536}
    with (
        sw.serve({"it": table}, "tcp://127.0.0.1:0", limits=limits) as server,
        sw.open(f"{server.address}/it") as buffer,
    ):
        with pytest.raises(SchemaError, match=r"above limits\['message_bytes'\]=65536"):
            buffer.sample(10_000)
        with pytest.raises(StorageError, match="takes at most 65536"):
            buffer.add(np.zeros((1000, 64)), *[np.zeros(1000)] * 2, np.zeros((1000, 64)), np.zeros(1000, bool))
        assert len(buffer) == 1
        buffer.add(np.zeros(64), 0, 0, np.zeros(64), False)
        assert len(buffer) == 2
    table.close()
