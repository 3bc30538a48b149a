"""Trajectories of a server: the same face, the same batches, the same errors; every acknowledged call once."""

from __future__ import annotations

import asyncio
import pickle
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("zmq")
from patience import until
from proxy import Plan, Proxy
from trajectory_server import ServerProcess

import sharpwave as sw
from sharpwave.errors import ClosedError, SchemaError, StorageError
from sharpwave.service.keys import make_key
from sharpwave.service.session import Session
from sharpwave.service.trajectory_document import from_incoming
from sharpwave.trajectories.incoming import read_incoming
from sharpwave.trajectories.index import read_index


def make(number: int, steps: int = 3, envs: int = 2, width: int = 5) -> sw.Trajectory:
    row = np.arange(steps * envs, dtype=np.float32).reshape(steps, envs) + number * 100
    obs = np.repeat(row[..., None], width, 2)
    flags = np.zeros((steps + 1, envs), bool)
    return sw.Trajectory(
        rewards=row, dones=flags, curr_obs={"state": obs, "more": {"deep": obs + 1}}, next_obs={"state": obs + 0.5},
        model_weights_id=f"w{number}", max_episode_length=steps,
    )  # fmt: skip


def number_of(trajectory: sw.Trajectory) -> int:
    return int(trajectory.rewards[0, 0]) // 100


def held(buffer: sw.TrajectoryReplayBuffer) -> list[int]:
    return [number_of(one) for _, one in buffer.trajectories()]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a server to be; a path of pytest's would be too long for a socket."""
    if request.param == "tcp":
        yield "tcp://127.0.0.1:0"
    else:
        with tempfile.TemporaryDirectory(prefix="sharpwave-test-") as folder:
            yield f"ipc://{folder}/socket"


@pytest.fixture
def server(address: str, tmp_path: Path) -> Iterator[ServerProcess]:
    """On a folder, with the seed of ``twin``."""
    made = ServerProcess(address, tmp_path / "live", buffer={"seed": 7, "capacity": 50, "recent": 20, "cache": 3})
    yield made
    made.close()


@pytest.fixture
def remote(server: ServerProcess) -> Iterator[sw.TrajectoryReplayBuffer]:
    with sw.open(server.address + "/live") as made:
        yield made


@pytest.fixture
def twin(tmp_path: Path) -> Iterator[sw.TrajectoryReplayBuffer]:
    """What the buffer of the server is, in this process."""
    with sw.TrajectoryReplayBuffer(tmp_path / "twin", seed=7, capacity=50, recent=20, cache=3) as made:
        yield made


# ---- the same as in process ------------------------------------------------------------------------------------------


def test_every_verb_does_what_it_does_in_process(
    remote: sw.TrajectoryReplayBuffer, twin: sw.TrajectoryReplayBuffer, tmp_path: Path
) -> None:
    assert isinstance(remote, sw.TrajectoryReplayBuffer)
    for buffer in (remote, twin):
        buffer.add(make(0))
        buffer.add([make(1), make(2, steps=4)])
        buffer.add([])
        buffer.add(make(number) for number in range(3, 60))
        buffer.flush()
    assert len(remote) == len(twin) == 50
    assert remote.capacity == 50
    assert remote.recent == 20
    assert remote.folder == str(tmp_path / "live")
    assert remote.device is None
    for size in (1, 32, 100):
        assert_same(remote.sample(size), twin.sample(size))
    for buffer in (remote, twin):
        buffer.recent = None
    assert_same(remote.sample(200), twin.sample(200))
    assert_same(vars(remote.get(55)), vars(twin.get(55)))
    for (number, one), (other_number, other) in zip(remote.trajectories(), twin.trajectories(), strict=True):
        assert number == other_number
        assert_same(vars(one), vars(other))
    assert remote.stats() == twin.stats()
    assert repr(remote).endswith("/live: 50 trajectories, 300 transitions>")
    remote.clear()
    assert (len(remote), held(remote)) == (0, [])
    remote.add(sw.Trajectory(rewards=np.ones((2, 2), np.int64)))  # other fields than before
    assert remote.sample(1)["rewards"].dtype == np.int64
    remote.close()
    remote.close()
    assert repr(remote).endswith("/live: closed>")
    for call in (
        lambda: len(remote),
        remote.stats,
        lambda: remote.sample(1),
        lambda: remote.add(make(0)),
        remote.flush,
    ):
        with pytest.raises(ClosedError, match="the buffer is closed"):
            call()


def test_async_forms_do_the_same(remote: sw.TrajectoryReplayBuffer, twin: sw.TrajectoryReplayBuffer) -> None:
    async def use(buffer: sw.TrajectoryReplayBuffer) -> Any:
        await asyncio.gather(*(buffer.add_async([make(0)]) for _ in range(8)))
        await buffer.flush_async()
        return await buffer.sample_async(16)

    assert_same(asyncio.run(use(remote)), asyncio.run(use(twin)))
    assert held(remote) == [0] * 8


def test_recent_belongs_to_each_client(server: ServerProcess) -> None:
    with sw.open(server.address + "/live") as one, sw.open(server.address + "/live") as other:
        one.add(make(number) for number in range(10))
        one.recent, other.recent = 1, None
        assert set(one.sample(6)["trajectory_id"]) == {9}
        assert len(set(other.sample(60)["trajectory_id"])) > 3
        assert (one.recent, other.recent) == (1, None)


def test_tensors_are_made_at_the_client(server: ServerProcess, remote: sw.TrajectoryReplayBuffer) -> None:
    remote.add([make(0), make(1)])
    with sw.open(server.address + "/live", device="cpu") as buffer:
        assert buffer.device == "cpu"
        batch = buffer.sample(4)
        assert isinstance(batch["curr_obs"]["more"]["deep"], torch.Tensor)
        assert isinstance(batch["trajectory_id"], torch.Tensor)
        assert isinstance(buffer.get(0).rewards, torch.Tensor)
        assert all(isinstance(one.dones, torch.Tensor) for _, one in buffer.trajectories())
        buffer.add(buffer.get(0))
    assert isinstance(remote.sample(4, device="cpu")["rewards"], torch.Tensor)
    assert held(remote) == [0, 1, 0]


def test_values_that_numpy_lacks_travel_as_their_bits(address: str) -> None:
    server = ServerProcess(address, None, buffer={"device": "cpu"})
    values = torch.randn(3, 2, 4).to(torch.bfloat16)
    small = torch.randn(3, 2).to(torch.float8_e4m3fn)
    given = sw.Trajectory(rewards=torch.ones(3, 2, dtype=torch.bfloat16), curr_obs={"a": values, "$": {"b": small}})
    with sw.open(server.address + "/live", device="cpu") as buffer:
        buffer.add(given)
        found = buffer.get(0)
        assert torch.equal(found.curr_obs["a"], values)
        assert found.curr_obs["$"]["b"].dtype == torch.float8_e4m3fn
        assert torch.equal(found.curr_obs["$"]["b"].view(torch.uint8), small.view(torch.uint8))
        assert buffer.sample(2)["rewards"].dtype == torch.bfloat16
    with sw.open(server.address + "/live") as plain:
        with pytest.raises(
            SchemaError, match=r"sample\(\): rewards: NumPy has no bfloat16; give open\(\) device='cpu'"
        ):
            plain.sample(2)
        assert plain.sample(2, device="cpu")["rewards"].dtype == torch.bfloat16
    server.close()


def test_buffer_of_a_server_pickles_as_its_address(remote: sw.TrajectoryReplayBuffer) -> None:
    remote.add(make(0))
    remote.recent = 3
    with pickle.loads(pickle.dumps(remote)) as again:
        assert again.recent == 3
        again.add(make(1))
    assert held(remote) == [0, 1]


def test_all_trajectories_come_in_pieces(
    server: ServerProcess, remote: sw.TrajectoryReplayBuffer, twin: sw.TrajectoryReplayBuffer
) -> None:
    big = [make(number, steps=50, envs=20, width=50) for number in range(20)]  # 600 KB each
    for one in big:
        remote.add(one)
    every = remote.trajectories()
    remote.add(make(99, width=50))
    first = [number_of(next(every)[1]) for _ in range(3)]
    twice = remote.trajectories()
    assert number_of(next(twice)[1]) == 0
    assert first + [number_of(one) for _, one in every] == list(range(20)), "those that were there at the call"
    assert [number_of(one) for _, one in twice] == [*range(1, 20), 99]


def test_iterators_that_are_left_do_not_add_up(server: ServerProcess, remote: sw.TrajectoryReplayBuffer) -> None:
    for number in range(20):
        remote.add(make(number, steps=50, envs=20, width=50))
    first = remote.trajectories()
    for _ in range(70):
        next(remote.trajectories())
    assert [number_of(one) for _, one in first] == list(range(20)), "one that was put aside goes on"


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_have_the_class_and_words_of_those_in_process(
    remote: sw.TrajectoryReplayBuffer, twin: sw.TrajectoryReplayBuffer, tmp_path: Path
) -> None:
    def wrong(buffer: sw.TrajectoryReplayBuffer) -> Iterator[Any]:
        yield lambda: buffer.sample(1)
        yield lambda: buffer.add(3)
        yield lambda: buffer.add([sw.Trajectory()])
        yield lambda: buffer.add([sw.Trajectory(rewards=[1, 2])])
        yield lambda: buffer.add([sw.Trajectory(rewards=np.ones((2, 2)), model_weights_id="a/b")])
        yield lambda: buffer.add([make(0), make(1, width=4)])
        buffer.add([make(0), make(1)])
        yield lambda: buffer.add([make(0, width=4)])
        yield lambda: buffer.sample(13)
        yield lambda: buffer.sample(0)
        yield lambda: buffer.sample(1, device="nowhere")
        yield lambda: buffer.get(2)
        yield lambda: buffer.get(-1)
        yield lambda: buffer.clear(set_aside=3)
        yield lambda: buffer.load(7)
        yield lambda: buffer.load(tmp_path, rank=2, world_size=2)
        yield lambda: buffer.save("")
        yield lambda: setattr(buffer, "recent", 0)
        yield lambda: setattr(buffer, "recnt", 1)

    for call, other in zip(wrong(remote), wrong(twin), strict=True):
        with pytest.raises((Exception,)) as expected:
            other()
        with pytest.raises(type(expected.value)) as got:
            call()
        assert type(got.value) is type(expected.value)
        assert str(got.value) == str(expected.value)
    assert held(remote) == held(twin) == [0, 1]


def test_closed_buffer_of_the_server_is_told(address: str) -> None:
    buffer = sw.TrajectoryReplayBuffer(None)
    with sw.serve({"live": buffer}, address) as server, sw.open(server.address + "/live") as remote:
        remote.add(make(0))
        buffer.close()
        with pytest.raises(ClosedError, match=r"sample\(\): the buffer is closed"):
            remote.sample(1)
    with pytest.raises(ClosedError, match=r"serve\(\): live: the TrajectoryReplayBuffer is closed"):
        sw.serve({"live": buffer}, address)


def test_server_that_cannot_write_tells_and_completes_the_call_later(address: str, tmp_path: Path) -> None:
    live, away = tmp_path / "live", tmp_path / "away"
    with (
        sw.TrajectoryReplayBuffer(live) as buffer,
        sw.serve({"live": buffer}, address) as server,
        sw.open(server.address + "/live") as remote,
    ):
        remote.add(make(0))
        live.rename(away)
        with pytest.raises(StorageError, match=r"add\(\): 2 trajectories are not saved: .*No such file"):
            remote.add([make(1), make(2)])
        assert remote.stats()["unsaved"] == 2
        away.rename(live)
        remote.flush()
        remote.add(make(3))
        assert held(remote) == [0, 1, 2, 3]
        assert remote.stats()["unsaved"] == 0


def test_adds_made_again_after_a_full_disk_are_stored_once(address: str, tmp_path: Path) -> None:
    live, away = tmp_path / "live", tmp_path / "away"
    with (
        sw.TrajectoryReplayBuffer(live) as buffer,
        sw.serve({"live": buffer}, address) as server,
        sw.open(server.address + "/live") as remote,
    ):
        remote.add(make(0))
        live.rename(away)
        for number in (1, 2, 1, 2, 1):  # the first is taken, and kept in memory; the others are refused before that
            with pytest.raises(StorageError, match="not saved"):
                remote.add(make(number))
        away.rename(live)
        remote.add(make(1))
        remote.add(make(2))
        assert held(remote) == [0, 1, 2]
        remote.add(make(1))  # not after a failure: it is added
        assert held(remote) == [0, 1, 2, 1]
    with sw.TrajectoryReplayBuffer(live) as again:
        assert held(again) == [0, 1, 2, 1]


def test_settings_that_a_server_s_buffer_does_not_have_are_refused(server: ServerProcess) -> None:
    for options in ({"view": sw.Transitions()}, {"recover": True}, {"verify": False}):
        with pytest.raises(SchemaError, match=f"open.*{next(iter(options))}"):
            sw.open(server.address + "/live", **options)
    with pytest.raises(StorageError, match="no table 'other'; it has live"):
        sw.open(server.address + "/other")


def test_too_large_messages_are_told_with_the_limit(address: str) -> None:
    server = ServerProcess(address, None, serve={"limits": {"message_bytes": 1 << 20}})
    with sw.open(server.address + "/live") as remote:
        large = make(0, steps=50, envs=20, width=50)
        with pytest.raises(StorageError, match=r"add\(\): the message has .* bytes.*message_bytes"):
            remote.add([large, large])
        assert len(remote) == 0
        for _ in range(5):
            remote.add(large)
        assert held(remote) == [0] * 5, "pieces stay below the limit"
        with pytest.raises(SchemaError, match=r"the reply has .* bytes, above limits\['message_bytes'\]=1048576"):
            remote.sample(4000)
    server.close()


@contextmanager
def calling(address: str) -> Iterator[Callable[[str, dict[str, Any]], Any]]:
    """Calls as a client of another language may make them."""
    session = Session(address)
    table = session.open_table("live", 10.0)
    try:
        yield lambda verb, args: session.call(table, verb, args)
    finally:
        session.close()


def given(fields: dict[str, Any], *bits: Any) -> dict[str, Any]:
    one = {"fields": fields, "bits": list(bits), "max_episode_length": 0, "model_weights_id": ""}
    return {"trajectories": [one], "origin": [1, 1]}


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("add", {"trajectories": [{}], "origin": [1, 1]}),
        ("add", given({"nothing": np.ones((2, 2))})),
        ("add", given({"rewards": "text"})),
        ("add", given({"rewards": np.ones((2, 2))}, [["x"], "BF16"])),
        ("add", given({"rewards": np.ones((2, 2))}, [["rewards"], "F64"])),
        ("add", given({"rewards": np.ones((2, 2))}, [["rewards"], "BF16"])),
        ("add", given({"rewards": np.ones((2, 2))}, [["rewards", "x"], "BF16"])),
        ("add", {"trajectories": [], "origin": [-1, 0]}),
        ("add", {"trajectories": [], "origin": [2**62, 0]}),
        ("add", {"trajectories": [], "origin": "x"}),
        ("add", {"trajectories": []}),
        ("sample", {"batch_size": "many", "recent": None}),
        ("sample", {"batch_size": 1, "recent": -3}),
        ("clear", {"set_aside": 1, "origin": [1, 1]}),
        ("load", {"path": "/nowhere", "part": [1], "origin": [1, 1]}),
        ("get", {}),
        ("drop", {}),
    ],
)  # fmt: skip
def test_documents_of_another_form_are_refused_and_change_nothing(verb: str, args: dict[str, Any]) -> None:
    with sw.TrajectoryReplayBuffer(None) as buffer, sw.serve({"live": buffer}, "tcp://127.0.0.1:0") as server:
        buffer.add(make(0))
        with calling(server.address) as call:
            with pytest.raises((SchemaError, StorageError, RuntimeError, TypeError)):
                call(verb, args)
            assert call("len", {}) == 1


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_written_and_read_by_the_server(address: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    server = ServerProcess(address, tmp_path / "live", serve={"folder": str(place)})
    with sw.open(server.address + "/live") as remote:
        remote.add([make(0), make(1), make(2)])
        remote.save("deep/saved")
        asyncio.run(remote.save_async(place / "other"))
        with sw.open(place / "deep" / "saved") as copy:
            assert held(copy) == [0, 1, 2]
        remote.add(make(3))
        remote.load("deep/saved")
        assert held(remote) == [0, 1, 2]
        remote.load("other", rank=1, world_size=3)
        assert held(remote) == [1]
        assert remote.stats()["set_aside"] > 0
        remote.clear(set_aside=True)
        assert remote.stats()["set_aside"] == 0
        with pytest.raises(FileNotFoundError, match=r"load\(\): .*nothing"):
            remote.load("nothing")
        for call in (remote.save, remote.load):
            with pytest.raises(StorageError, match="expected a path in the server's folder"):
                call("../outside")
    server.close()


def test_server_without_a_folder_for_them_refuses_checkpoints_on_tcp(tmp_path: Path) -> None:
    with (
        sw.TrajectoryReplayBuffer(None) as buffer,
        sw.serve({"live": buffer}, "tcp://127.0.0.1:0") as server,
        sw.open(server.address + "/live") as remote,
    ):
        remote.add(make(0))
        with pytest.raises(StorageError, match=r"save\(\): .*folder= or keys="):
            remote.save(tmp_path / "saved")
        with pytest.raises(StorageError, match=r"load\(\): .*folder= or keys="):
            remote.load(tmp_path / "saved")
        assert held(remote) == [0]


def test_key_of_a_role_allows_its_verbs(tmp_path: Path) -> None:
    for role in ("read", "write"):
        make_key(tmp_path / "keys", role, (role,))
    with (
        sw.TrajectoryReplayBuffer(None) as buffer,
        sw.serve({"live": buffer}, "tcp://127.0.0.1:0", keys=tmp_path / "keys") as server,
        sw.open(server.address + "/live", keys=tmp_path / "keys" / "read.key") as reader,
        sw.open(server.address + "/live", keys=tmp_path / "keys" / "write.key") as writer,
    ):
        writer.add([make(0)])
        writer.flush()
        assert (len(reader), held(reader), number_of(reader.get(0))) == (1, [0], 0)
        reader.sample(2)
        with pytest.raises(StorageError, match="add needs the role 'write'"):
            reader.add(make(1))
        with pytest.raises(StorageError, match="sample needs the role 'read'"):
            writer.sample(1)
        saved = tmp_path / "saved"
        for call in (writer.clear, lambda: writer.save(saved), lambda: writer.load(saved)):
            with pytest.raises(StorageError, match=r"(clear|save|load) needs the role 'admin'"):
                call()
        assert len(buffer) == 1


# ---- many, dead and killed -------------------------------------------------------------------------------------------


def test_threads_share_a_buffer_and_every_call_counts_once(remote: sw.TrajectoryReplayBuffer) -> None:
    remote.add(make(0))

    def work(first: int) -> None:
        for number in range(5):
            remote.add([make(first + number)])
            remote.sample(2)

    threads = [threading.Thread(target=work, args=(10 + 5 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(held(remote)) == [0, *range(10, 50)]


def test_call_that_is_sent_twice_is_executed_once(server: ServerProcess, remote: sw.TrajectoryReplayBuffer) -> None:
    document = [from_incoming(one) for one in read_incoming("add()", [make(0), make(1)])]
    with calling(server.address) as call:
        for _ in range(2):
            call("add", {"trajectories": document, "origin": [5, 5]})
        server.kill()
        server.start()
        call("add", {"trajectories": document, "origin": [5, 5]})
        assert held(remote) == [0, 1]
        for _ in range(2):
            call("clear", {"set_aside": False, "origin": [6, 6]})
            remote.add(make(7))
        assert held(remote) == [7, 7]


@pytest.mark.parametrize("seed", range(2))
def test_calls_over_connections_that_break_are_executed_once(seed: int, tmp_path: Path) -> None:
    with (
        sw.TrajectoryReplayBuffer(tmp_path / "live") as buffer,
        sw.serve({"live": buffer}, "tcp://127.0.0.1:0") as server,
        Proxy(server.address, Plan(seed, ("cut", "drop", "replay", "cut"), after=(1_000, 12_000))) as proxy,
        sw.open(proxy.address + "/live", wait=True, timeout=60) as remote,
    ):
        number = 0
        while proxy.counts["cut"] + proxy.counts["drop"] < 5:
            remote.add([make(number), make(number + 1)])
            assert len(remote.sample(2)["rewards"]) == 2
            number += 2
            if number % 10 == 0:
                proxy.cut_all()  # those that the plan spares
        assert held(remote) == list(range(number))


def test_dead_client_leaves_the_others_and_whole_calls_alone(address: str, tmp_path: Path) -> None:
    code = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/.."]
from test_remote_trajectories import make
import sharpwave as sw
buffer = sw.open(sys.argv[2])
each = buffer.trajectories()
next(each)
print("begun", flush=True)
number = 1
while True:
    buffer.add([make(number, steps=50, envs=20, width=50), make(number, steps=50, envs=20, width=50)])
    number += 1
"""
    with (
        sw.TrajectoryReplayBuffer(tmp_path / "live", cache=1) as buffer,
        sw.serve({"live": buffer}, address, client_timeout=1.0) as server,
        sw.open(server.address + "/live") as remote,
    ):
        for _ in range(20):
            remote.add(make(0, steps=50, envs=20, width=50))
        command = [sys.executable, "-c", code, str(Path(__file__).parent), server.address + "/live"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "begun\n"
            until(lambda: len(buffer) >= 26)
            client.kill()
        until(lambda: len(server.stats()["clients"]) == 1, "the burial of the dead client")
        until(lambda: buffer.stats()["unsaved"] == 0)
        numbers = held(remote)
        assert numbers[:20] == [0] * 20
        assert numbers[20:] == [number for number in range(1, len(numbers) // 2 - 9) for _ in range(2)], "whole calls"
        remote.add(make(0, steps=50, envs=20, width=50))
        assert_same(remote.sample(4).keys(), buffer.sample(4).keys())


def test_iteration_goes_on_after_the_server_was_killed(
    server: ServerProcess, remote: sw.TrajectoryReplayBuffer
) -> None:
    for number in range(30):
        remote.add(make(number, steps=50, envs=20, width=50))
    every = remote.trajectories()
    first = [number_of(next(every)[1]) for _ in range(8)]
    server.kill()
    server.start()
    assert first + [number_of(one) for _, one in every] == list(range(30))


def test_buffer_in_memory_that_is_lost_with_its_server_is_told(address: str) -> None:
    server = ServerProcess(address, None)
    with sw.open(server.address + "/live") as remote:
        remote.add(make(0))
        server.kill()
        server.start()
        for call in (lambda: remote.add(make(1)), lambda: len(remote), lambda: remote.sample(1)):
            with pytest.raises(StorageError, match="the server was started again with another table"):
                call()
    with sw.open(server.address + "/live") as remote:
        assert len(remote) == 0
    server.close()


def test_repr_does_not_wait_for_a_server_that_is_gone(address: str) -> None:
    server = ServerProcess(address, None)
    with sw.open(server.address + "/live") as remote:
        server.kill()
        assert repr(remote).endswith("/live: the server does not answer>")


def test_server_killed_among_adds_has_every_acknowledged_trajectory_once(address: str, tmp_path: Path) -> None:
    server = ServerProcess(address, tmp_path / "live", buffer={"cache": 2})
    rng = random.Random(0)
    acknowledged: list[list[int]] = [[] for _ in range(4)]
    ends = threading.Event()
    failures: list[BaseException] = []

    def work(client: int, buffer: sw.TrajectoryReplayBuffer) -> None:
        sizes = random.Random(client)
        try:
            while not ends.is_set():
                first = len(acknowledged[client])
                numbers = range(first, first + sizes.choice((1, 2, 3, 20)))
                buffer.add([make(client * 100_000 + number) for number in numbers])
                acknowledged[client] += numbers
        except BaseException as error:
            failures.append(error)

    # Two threads of one buffer, and two buffers more.
    with sw.open(server.address + "/live") as one, sw.open(server.address + "/live") as two:
        with sw.open(server.address + "/live") as three:
            threads = [threading.Thread(target=work, args=pair) for pair in enumerate((one, one, two, three))]
            for thread in threads:
                thread.start()
            for _ in range(6):
                before = [len(numbers) for numbers in acknowledged]
                until(lambda before=before: all(map(int.__lt__, before, map(len, acknowledged))))
                ends.wait(rng.random() * 0.05)  # so that the kill comes at any moment of an add
                server.kill()
                listed = {entry_number(entry) for entry in entries(tmp_path / "live")}
                wanted = {client * 100_000 + number for client in range(4) for number in list(acknowledged[client])}
                assert wanted <= listed, "acknowledged, and not there after the kill"
                server.start()
            ends.set()
            for thread in threads:
                thread.join()
        assert not failures
        found = held(one)
    server.close()
    wanted = [client * 100_000 + number for client in range(4) for number in acknowledged[client]]
    assert sorted(found) == sorted(wanted), "each once, and nothing else"


def entries(folder: Path) -> list[Any]:
    return read_index(folder, "test", recover=True).entries  # the last record may be half written


def entry_number(entry: Any) -> int:
    return int(entry.weights_id.removeprefix("w"))
