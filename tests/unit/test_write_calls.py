"""ReplayBuffer.write: what it accepts, what it refuses and how it says so; threads, processes and deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.cases import flatten
from contract.device_place import PLACES, device_of, here, on_device
from patience import HANG_S
from test_feed import Direct

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle

torch = pytest.importorskip("torch")

SCHEMA: dict[str, Any] = {
    "obs": sw.Field((2,)),
    "action": sw.Field(),
    "state": {"h": sw.Field((4,), mutable=True), "c": sw.Field((), "int16", mutable=True), "id": sw.Field((), "int64")},
    "value": sw.Field((), "float64", mutable=True),
}


def values(first: int, count: int) -> dict[str, Any]:
    number = np.arange(first, first + count)
    return {
        "obs": np.stack([number, number], 1),
        "action": number,
        "reward": number,
        "next_obs": np.stack([number, number], 1),
        "done": np.zeros(count, bool),
        "state": {"h": np.stack([number] * 4, 1), "c": number, "id": number},
        "value": number,
    }


def make(rows: int = 30, **options: Any) -> sw.ReplayBuffer:
    buffer = sw.ReplayBuffer(40, schema=SCHEMA, seed=0, **options)
    if rows:
        buffer.add(**values(0, rows))
    return buffer


# ---- values and handles ----------------------------------------------------------------------------------------------


def test_values_come_as_arrays_lists_tensors_and_numbers() -> None:
    buffer = make()
    assert buffer.write([3, 4], value=[1, 2]) == {"applied": 2, "stale": 0}
    buffer.write(np.array([5], np.uint8), value=np.array([7], "f4"), state={"c": torch.tensor([9])})
    buffer.write(torch.tensor([6, 8])[::1], state={"h": torch.arange(8.0).reshape(2, 4)})
    buffer.write(9, value=3.5)
    buffer.write(np.array([10, 11, 12, 13])[::2], value=np.arange(4)[::2], state={"c": [1, 2]})
    buffer.write([], value=[])
    held = buffer.get(range(30))
    assert held["value"][[3, 4, 5, 9, 10, 12]].tolist() == [1, 2, 7, 3.5, 0, 2]
    assert held["state"]["c"][[5, 10, 12]].tolist() == [9, 1, 2]
    assert held["state"]["h"][[6, 8]].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    untouched = [i for i in range(30) if i not in (3, 4, 5, 6, 8, 9, 10, 12)]
    assert flatten(buffer.get(untouched)["state"]) == flatten(make().get(untouched)["state"])


def test_places_of_windows_are_written_and_minus_one_names_no_row() -> None:
    buffer = make(num_envs=1, view=sw.Windows(3, burn_in=1))
    indices = np.array([[5, 6, 7, -1], [8, -1, -1, -1]])
    fresh = np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 4, 4) + 100
    assert buffer.write(indices, state={"h": fresh}) == {"applied": 4, "stale": 0}
    held = buffer.get([5, 6, 7, 8])["state"]["h"]
    assert held.tolist() == [*fresh[0, :3].tolist(), fresh[1, 0].tolist()]


def test_batch_that_was_taken_before_a_write_does_not_change() -> None:
    buffer = make()
    batch = buffer.get(range(30))
    before = batch["state"]["h"].copy()
    buffer.write(range(30), state={"h": before + 1})
    np.testing.assert_array_equal(batch["state"]["h"], before)
    again = buffer.sample(64, out=buffer.sample(64))
    np.testing.assert_array_equal(again["state"]["h"][:, 0], again["state"]["id"] + 1)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no field": ([0], {}, r"at least one mutable field, got none; mutable are: state/h, state/c, value"),
    "unknown": ([0], {"x": [1]}, r"unknown field 'x'; the schema has obs, action, .*state, value"),
    "not mutable": ([0], {"reward": [1]}, r"'reward': expected a mutable field, got one that is written once; declare"),
    "nested, not mutable": ([0], {"state": {"id": [1]}}, r"'state/id': expected a mutable field"),
    "nested, unknown": ([0], {"state": {"x": [1]}}, r"'state': expected some of the keys h, c, id, got 'x'"),
    "no dict": ([0], {"state": [1]}, r"'state': expected a dict with some of h, c, id, got list"),
    "empty dict": ([0], {"state": {}}, r"'state': expected a dict with some of h, c, id, got none"),
    "shape": ([0, 1], {"state": {"h": np.zeros((2, 5))}}, r"'state/h': expected shape \(2, 4\).*got \(2, 5\)"),
    "one value for many": ([0, 1], {"value": 1.0}, r"'value': expected shape \(2,\).*got \(\)"),
    "flat values": ([[0], [1]], {"value": [1, 2]}, r"'value': expected shape \(2, 1\).*got \(2,\)"),
    "range": ([0], {"state": {"c": [70_000]}}, r"'state/c': expected int16, got int64 with values beyond int16"),
    "dtype": ([0], {"value": [1j]}, r"'value': expected float64, got complex128, and the cast would lose meaning"),
    "objects": ([0], {"value": [object()]}, r"'value': expected numbers, got Python objects"),
    "masked": ([0], {"value": np.ma.array([1.0], mask=[True])}, r"'value': expected an array without a mask"),
    "float handles": ([0.0], {"value": [1.0]}, r"indices: expected whole numbers, got float64"),
    "truth handles": ([True], {"value": [1.0]}, r"indices: expected whole numbers, got bool"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("place", ["host", *PLACES])
def test_call_that_does_not_fit_is_refused_and_changes_nothing(what: str, place: str) -> None:
    indices, fields, message = REFUSED[what]
    if place == "host":
        buffer = make()
    else:
        buffer = on_device(40, device=device_of(place), schema=SCHEMA, seed=0)
        buffer.add(**values(0, 30))
    before = flatten(here(buffer.get(range(30))))
    with pytest.raises(SchemaError, match=r"^write\(\): .*" + message):
        buffer.write(indices, **fields)
    with pytest.raises(SchemaError, match=r"^write\(\): stale: expected 'error' or 'skip', got 'x'"):
        buffer.write([0], stale="x", value=[1.0])  # type: ignore[arg-type]
    assert flatten(here(buffer.get(range(30)))) == before


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: sw.Field((2,), stack=2, mutable=True), "stack= makes values of the frames of several rows"),
        (lambda: sw.Field((2,), compression="lz4", mutable=True), "compression= gives values different sizes"),
        (lambda: sw.Field((2,), ragged=True, mutable=True), "ragged= gives values different sizes"),
        (lambda: sw.Field((2,), mutable=1), "mutable: expected True or False, got 1"),  # type: ignore[arg-type]
        (lambda: schema(done=sw.Field((), "bool", mutable=True)), "'done': it cannot be mutable: the ends of episodes"),
        (lambda: schema(stale=sw.Field(mutable=True)), "'stale': a mutable field needs another name"),
        (
            lambda: schema(obs={"a": sw.Field((2,), mutable=True)}, next_obs="derived"),
            "'obs/a': it cannot be mutable with next_obs='derived': its value is also the next observation",
        ),
        (lambda: sw.DistillationBuffer(8, obs_shape=sw.Field((2,), mutable=True)), "expected a plain Field"),
    ],
)
def test_fields_that_cannot_be_mutable_are_refused_with_the_reason(made: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        made()


def schema(next_obs: Any = "stored", **fields: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(8, schema={"obs": sw.Field((2,)), "action": sw.Field(), **fields}, next_obs=next_obs)


def test_buffer_without_mutable_fields_says_how_to_have_one() -> None:
    buffer = sw.ReplayBuffer(8, obs_shape=(1,))
    buffer.add([0], 0, 0, [0], False)
    with pytest.raises(SchemaError, match=r"declare it with Field\(..., mutable=True\); mutable are: none"):
        buffer.write([0], reward=[1.0])
    with pytest.raises(SchemaError, match=r"mutable are: none; declare one with Field\(..., mutable=True\)"):
        buffer.write([0])


@pytest.mark.parametrize("place", ["host", *PLACES])
def test_rows_that_are_gone_are_told_or_left_out(place: str) -> None:
    buffer = make(0) if place == "host" else on_device(40, device=device_of(place), schema=SCHEMA, seed=0)
    buffer.add(**values(0, 40))
    old = here(next(buffer.rows()))["indices"]
    buffer.add(**values(40, 10))
    with pytest.raises(StaleHandle, match=rf"write\(\): row {old[3]} is not in the buffer: .*nothing was written"):
        buffer.write([old[20], old[3], old[4]], value=[1.0, 2.0, 3.0])
    assert here(buffer.get([old[20]]))["value"].tolist() == [20]
    told = buffer.write([old[20], old[3], -1, old[4], old[21]], value=[1.0, 2.0, 3.0, 4.0, 5.0], stale="skip")
    assert {name: int(count) for name, count in told.items()} == {"applied": 2, "stale": 2}
    assert here(buffer.get(old[[20, 21]]))["value"].tolist() == [1, 5]
    buffer.clear()
    with pytest.raises(StaleHandle):
        buffer.write([old[20]], value=[1.0])
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.write([old[20]], value=[1.0])


@pytest.mark.parametrize("place", PLACES)
def test_device_takes_its_own_tensors_and_does_not_wait_where_stale_rows_are_skipped(place: str) -> None:
    device = device_of(place)
    buffer = on_device(40, device=device, schema=SCHEMA, sampler=sw.Prioritized(), seed=0)
    buffer.add(**values(0, 30))
    batch = buffer.sample(6)
    fresh = torch.arange(24.0, device=device).reshape(6, 4)
    told = buffer.write(batch["indices"].reshape(2, 3), state={"h": fresh.reshape(2, 3, 4)}, stale="skip")
    assert told["applied"].dim() == 0
    assert int(told["applied"]) == 6
    last = {int(serial): i for i, serial in enumerate(here(batch["indices"]))}
    held = here(buffer.get(list(last)))["state"]["h"]
    np.testing.assert_array_equal(held, here(fresh)[list(last.values())])
    with pytest.raises(SchemaError, match=r"write\(\): field 'state/c': expected int16, got torch.float32"):
        buffer.write(batch["indices"], state={"c": fresh[:, 0]})
    with pytest.raises(SchemaError, match=r"write\(\): indices: expected whole numbers, got torch.float32"):
        buffer.write(fresh[:, 0], value=fresh[:, 0])


# ---- beside other features -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", [sw.Transitions(), sw.Transitions(n_step=3), sw.Windows(3, burn_in=2)])
def test_gpu_that_reads_rows_of_the_host_gets_what_was_written(place: str, view: Any) -> None:
    device = device_of(place)
    one, other = (make(view=view, num_envs=1) for _ in range(2))
    direct = Direct(other, device)
    for turn in range(4):
        for buffer in (one, other):
            buffer.write(np.arange(turn, 30, 3), state={"c": np.arange(turn, 30, 3) + 1000})
        assert flatten(here(direct.sample(8))) == flatten(one.sample(8))


def test_rewards_are_relabelled_for_prioritized_n_step_examples() -> None:
    fields = {"obs": sw.Field((1,)), "action": sw.Field(), "reward": sw.Field(mutable=True)}
    view = sw.Transitions(n_step=3, gamma=0.5)
    buffer = sw.ReplayBuffer(50, schema=fields, view=view, sampler=sw.Prioritized(), num_envs=1, seed=0)
    number = np.arange(40, dtype=np.float32)
    buffer.add(number[:, None], number, number, number[:, None] + 1, number % 10 == 9)
    buffer.write(range(40), reward=number * 8)
    batch = buffer.sample(64)
    steps = np.minimum(3, 10 - batch["indices"] % 10)
    expected = sum(np.where(k < steps, 0.5**k * 8 * (batch["indices"] + k), 0) for k in range(3))
    np.testing.assert_array_equal(batch["reward"], expected)
    np.testing.assert_array_equal(batch["next_obs"][:, 0], batch["indices"] + steps)


def test_goals_that_are_mutable_are_relabelled_from_what_was_written() -> None:
    goal = sw.Field((2,), mutable=True)
    view = sw.Transitions(hindsight=sw.Hindsight("final", 1.0, lambda a, d: (a == d).all(axis=1)))
    fields = {"obs": {"achieved_goal": goal, "desired_goal": goal}, "action": sw.Field()}
    buffer = sw.ReplayBuffer(20, schema=fields, view=view, num_envs=1, seed=0)
    number = np.stack([np.arange(10.0)] * 2, 1)
    goals = {"achieved_goal": number, "desired_goal": number}
    buffer.add(goals, np.zeros(10), np.zeros(10), goals, np.arange(10) == 9)
    buffer.write([9], next_obs={"achieved_goal": [[70, 71]]})
    assert buffer.sample(8)["obs"]["desired_goal"].tolist() == [[70, 71]] * 8


def test_compression_and_stacks_stand_beside_mutable_fields() -> None:
    fields = {
        "obs": sw.Field((8, 8), "uint8", stack=3, compression="lz4"),
        "action": sw.Field(),
        "state": sw.Field((3,), mutable=True),
    }
    buffer = sw.ReplayBuffer(40, schema=fields, next_obs="derived", num_envs=1, seed=0)
    frames = np.arange(31 * 64, dtype=np.uint8).reshape(31, 8, 8)
    number = np.arange(30)
    buffer.add(frames[:30], number, number, frames[1:], number % 7 == 6, np.zeros((30, 3)))
    buffer.write(number, state=np.stack([number] * 3, 1))
    batch = buffer.sample(64)
    np.testing.assert_array_equal(batch["state"], np.stack([batch["indices"]] * 3, 1))
    np.testing.assert_array_equal(batch["obs"][:, -1], frames[batch["indices"]])


def test_increment_takes_what_was_written_since(tmp_path: Path) -> None:
    buffer = sw.ReplayBuffer(4000, schema=SCHEMA, seed=0, writers=4)
    buffer.add(**values(0, 4000))
    buffer.save(tmp_path / "snapshot")
    buffer.write([17], value=[1e6])
    buffer.save(tmp_path / "snapshot", incremental=True)
    assert (tmp_path / "snapshot.delta").stat().st_size < (tmp_path / "snapshot").stat().st_size / 2
    assert sw.open(tmp_path / "snapshot").get([16, 17, 18])["value"].tolist() == [16, 1e6, 18]


def test_second_place_of_a_row_takes_no_memory_before_it_is_written() -> None:
    state = sw.Field((4096,), mutable=True)
    buffer = sw.ReplayBuffer(8000, schema={"obs": sw.Field(()), "action": sw.Field(), "state": state}, next_obs=None)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    part = np.zeros((500, 4096), np.float32)
    for _ in range(0, 8000, 500):
        buffer.add(np.zeros(500), np.zeros(500), np.zeros(500), np.zeros(500, bool), part)
    raw = 8000 * 4096 * 4
    assert resident() - before < 1.3 * raw


# ---- threads, processes, deadlines -----------------------------------------------------------------------------------


def test_threads_that_write_and_read_see_whole_values() -> None:
    buffer = make(40)
    stop, torn = threading.Event(), []

    def write(base: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            number = np.float32(base + turn % 1000)
            buffer.write(range(40), state={"h": np.full((40, 4), number), "c": np.full(40, int(number) % 30_000)})

    def read() -> None:
        while not stop.is_set():
            state = buffer.sample(64)["state"]
            whole = (state["h"] == state["h"][:, :1]).all(axis=1) & (
                (state["h"][:, 0].astype(int) % 30_000 == state["c"]) | (state["h"][:, 0] == state["id"])
            )
            if not whole.all():
                torn.append(state)

    threads = [threading.Thread(target=write, args=(base,)) for base in (10_000, 20_000)]
    threads += [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.4)
    stop.set()
    for thread in threads:
        thread.join(HANG_S)
    assert not torn


OTHER = """
import sys, numpy as np, sharpwave as sw
buffer = sw.open(sys.argv[1])
print(buffer.write([1, 2, 3], value=[10, 20, 30]), flush=True)
for line in sys.stdin:
    buffer.write([4], value=[40], stale="skip")
    print("done", flush=True)
"""


@pytest.mark.parametrize("storage", ["shm", "file"])
def test_processes_that_share_a_buffer_see_each_others_writes(storage: str, shm_address: str, tmp_path: Path) -> None:
    address = shm_address if storage == "shm" else f"file://{tmp_path}/live.sw"
    buffer = make(storage=address)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "{'applied': 3, 'stale': 0}\n"
        assert buffer.get([1, 2, 3])["value"].tolist() == [10, 20, 30]
        buffer.write([4], value=[1])
        other.stdin.write("go\n")
        other.stdin.flush()
        assert other.stdout.readline() == "done\n"
        assert buffer.get([4])["value"].tolist() == [40]
    twin = sw.ReplayBuffer(40, schema=SCHEMA, storage=address, exist="attach", seed=0)
    assert twin.get([2])["value"].tolist() == [20]
    plain = {**SCHEMA, "value": sw.Field((), "float64")}
    with pytest.raises(SchemaError, match="exist='attach'"):
        sw.ReplayBuffer(40, schema=plain, storage=address, exist="attach", seed=0)
    twin.close()
    buffer.close(unlink=True)


def test_forked_child_writes_to_the_same_rows(shm_address: str) -> None:
    buffer = make(storage=shm_address)
    child = os.fork()
    if child == 0:
        try:
            buffer.write([7], value=[70])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert buffer.get([7])["value"].tolist() == [70]
    buffer.close(unlink=True)


STOPPED = """
import sys, numpy as np, sharpwave as sw
buffer = sw.open(sys.argv[1])
fresh = np.zeros((30, 4), np.float32)
print("in", flush=True)
while True:
    buffer.write(range(30), state={"h": fresh})
"""


def test_write_waits_for_a_stopped_process_until_its_timeout_and_nothing_else_does(shm_address: str) -> None:
    buffer = make(storage=shm_address, sampler=sw.Prioritized())
    with subprocess.Popen([sys.executable, "-c", STOPPED, shm_address], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        deadline = time.monotonic() + HANG_S
        while True:  # until it was stopped in its turn
            os.kill(other.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            try:
                buffer.write([0], value=[1.0], timeout=0)
            except NotReady as refusal:
                assert f"process {other.pid} writes to this buffer" in str(refusal)  # noqa: PT017
                break
            assert time.monotonic() < deadline, "it was never stopped in its turn"
            os.kill(other.pid, signal.SIGCONT)
            time.sleep(0.001)
        before = buffer.get([0])["value"].tolist()
        with pytest.raises(NotReady, match=r"write\(\): process \d+ writes to this buffer and did not finish"):
            buffer.write([0], value=[2.0], timeout=0.1)
        with pytest.raises(NotReady):
            asyncio.run(buffer.write_async([0], value=[2.0], timeout=0.1))
        assert buffer.get([0])["value"].tolist() == before
        buffer.add(**values(30, 5))
        batch = buffer.sample(16, timeout=0)
        buffer.update_priorities(batch["indices"], np.ones(16), timeout=0)
        other.kill()
        other.wait()
        assert buffer.write([0], value=[3.0]) == {"applied": 1, "stale": 0}
    assert buffer.get([0])["value"].tolist() == [3.0]
    assert buffer.stats()["index_takeovers"] == 0
    buffer.close(unlink=True)


@pytest.mark.parametrize("place", ["host", *PLACES])
def test_event_loop_writes(place: str) -> None:
    buffer = make() if place == "host" else on_device(40, device=device_of(place), schema=SCHEMA, seed=0)
    if place != "host":
        buffer.add(**values(0, 30))
    told = asyncio.run(buffer.write_async([1, 2], value=[5.0, 6.0], timeout=1))
    assert {name: int(count) for name, count in told.items()} == {"applied": 2, "stale": 0}
    assert here(buffer.get([1, 2]))["value"].tolist() == [5, 6]
    with pytest.raises(StaleHandle):
        asyncio.run(buffer.write_async([99], value=[5.0]))
