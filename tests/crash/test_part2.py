"""Processes killed at random instants, snapshots of a running buffer, and damaged files, with everything switched on:
priorities, derived next observations, stacks, compression.

Every frame is made from a number that its row tells, so whatever can be read can be checked to the last byte.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw

_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload(["numpy", "sharpwave"])

# ---- numbered episodes -----------------------------------------------------------------------------------------------

EPISODE = 7  # steps of an episode
ENVS = 2
STACK = 3
SIDE = 12
RUN = 400_000  # numbers of one writer's life; a float32 tells them apart
FINAL = 1 << 26  # added to a number: the observation after an episode's last row
_pixels = np.arange(SIDE * SIDE, dtype=np.int64).reshape(SIDE, SIDE)


def frame(number: np.ndarray) -> np.ndarray:
    """One frame a number: neighbours differ, and it compresses."""
    number = np.asarray(number, np.int64)[..., None, None]
    return ((_pixels // 9 * (number % 241 + 1) + number // 7) % 251).astype(np.uint8)


def number_of(run: int, step: Any, env: Any) -> Any:
    return run * RUN + step * ENVS + env


def next_number(number: np.ndarray) -> np.ndarray:
    is_last = number % RUN // ENVS % EPISODE == EPISODE - 1
    return np.where(is_last, number + FINAL, number + ENVS)


def make(capacity: int = 240, **options: Any) -> sw.ReplayBuffer:
    schema = {"obs": sw.Field((SIDE, SIDE), "uint8", stack=STACK, compression="lz4")}
    defaults = {"next_obs": "derived", "num_envs": ENVS, "writers": 8, "seed": 3}
    return sw.ReplayBuffer(capacity, schema=schema, **{**defaults, **options})


def add_step(target: Any, run: int, step: int) -> None:
    numbers = number_of(run, step, np.arange(ENVS))
    done = np.full(ENVS, step % EPISODE == EPISODE - 1)
    target.add(obs=frame(numbers), reward=numbers.astype(np.float32), next_obs=frame(next_number(numbers)), done=done)


def check_batch(batch: dict[str, Any]) -> np.ndarray:
    """Every array of a batch is what its rows' numbers say; returns the numbers."""
    numbers = batch["reward"].astype(np.int64)
    steps = numbers % RUN // ENVS
    ages = np.minimum(np.arange(STACK - 1, -1, -1), (steps % EPISODE)[:, None])  # an episode's start is repeated
    stacks = numbers[:, None] - ages * ENVS
    np.testing.assert_array_equal(batch["obs"], frame(stacks))
    after = np.concatenate([stacks[:, 1:], next_number(numbers)[:, None]], axis=1)
    np.testing.assert_array_equal(batch["next_obs"], frame(after))
    np.testing.assert_array_equal(batch["done"], steps % EPISODE == EPISODE - 1)
    return numbers


def check_rows(buffer: sw.ReplayBuffer, alone: bool = True) -> dict[int, bool]:
    """Reads everything; returns truncated by number.

    Where one writer wrote at a time, each env's rows of one run follow each other. With several, old rows may stand in
    the block that a slower writer holds.
    """
    truncated: dict[int, bool] = {}
    for batch in buffer.rows():
        numbers = check_batch(batch)
        assert not set(numbers.tolist()) & truncated.keys(), "a row twice"
        truncated.update(zip(numbers.tolist(), batch["truncated"].tolist(), strict=True))
    held = np.array(sorted(truncated), np.int64)
    for run in np.unique(held // RUN) if alone else []:
        for env in range(ENVS):
            steps = held[(held // RUN == run) & (held % ENVS == env)] % RUN // ENVS
            assert (np.diff(steps) == 1).all(), f"run {run}, env {env} has holes: {steps}"
    return truncated


def check_ends(truncated: dict[int, bool], run: int) -> None:
    """Of a run that is over, the newest row of each env ended its episode; no other row says so."""
    mine = [number for number in truncated if number // RUN == run]
    for env in range(ENVS):
        rows = sorted(number for number in mine if number % ENVS == env)
        for number in rows:
            is_last = number % RUN // ENVS % EPISODE == EPISODE - 1
            assert truncated[number] == (number == rows[-1] and not is_last), (number, rows[-1])


# ---- the processes that are killed ----------------------------------------------------------------------------------


def write_forever(address: str, run: int, ready: Any) -> None:
    buffer = sw.open(address)
    writer = buffer.writer()
    step = 0
    while True:
        add_step(writer, run, step)
        step += 1
        if step == 20:
            ready.set()


def learn_forever(address: str, seed: int, ready: Any) -> None:
    buffer = sw.open(address)
    stream = np.random.default_rng(seed)
    while True:
        try:
            batch = buffer.sample(512)
        except sw.errors.NotReady:
            continue
        buffer.update_priorities(batch["indices"], stream.uniform(0.5, 1.5, 512))
        ready.set()


def tune_forever(address: str, ready: Any) -> None:
    buffer = sw.open(address)
    while True:
        for alpha in (0.5, 1.0):
            buffer.tune(alpha=alpha)
            ready.set()


class Process:
    def __init__(self, target: Any, *arguments: Any) -> None:
        ready = _processes.Event()
        self._process = _processes.Process(target=target, args=(*arguments, ready), daemon=True)
        self._process.start()
        assert ready.wait(2 * HANG_S), "the process did not get going"

    def kill(self) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(HANG_S)
        assert self._process.exitcode == -signal.SIGKILL, self._process.exitcode


@contextmanager
def running(*processes: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process._process.is_alive():
                process.kill()


def check_index(buffer: sw.ReplayBuffer) -> None:
    """While nobody else runs: all rows can be drawn, and their probabilities are one in all.

    No priority is three times another, so that of eight strata a row each row fills one at least.
    """
    held = np.concatenate([batch["indices"] for batch in buffer.rows()])
    # Rows that several writers kept for their neighbours' stacks only leave the index when a draw meets them.
    buffer.sample(8 * len(held))
    batch = buffer.sample(8 * len(held))
    drawn, first = np.unique(batch["indices"], return_index=True)
    missing = set(held.tolist()) - set(drawn.tolist())
    assert not missing, f"{len(missing)} of {len(held)} rows cannot be drawn"
    assert batch["probabilities"][first].sum() == pytest.approx(1, abs=1e-9)
    # And they are those of the priorities: given anew, all are alike.
    assert buffer.update_priorities(held, np.ones(len(held))) == {"applied": len(held), "stale": 0}
    again = buffer.sample(2 * len(held))
    np.testing.assert_allclose(again["probabilities"], 1 / len(held), rtol=1e-6)
    assert len(np.unique(again["indices"])) == len(held)


# ---- learners --------------------------------------------------------------------------------------------------------


def by_priority(**changes: Any) -> sw.Prioritized:
    return sw.Prioritized(**{"alpha": 1.0, "eps": 0.0, "new_rows": 1.0, **changes})


def test_learner_killed_inside_the_index_holds_nobody_up(shm_address: str) -> None:
    buffer = sw.ReplayBuffer(3000, obs_shape=(4,), sampler=by_priority(), storage=shm_address, seed=1)
    numbers = np.arange(4000, dtype=np.float32)
    wide = np.repeat(numbers[:, None], 4, axis=1)
    for at in range(0, 4000, 500):
        part = slice(at, at + 500)
        buffer.add(wide[part], numbers[part], numbers[part], wide[part] + 1, np.zeros(500, bool))
        buffer.sample(8)
    stream = np.random.default_rng(7)
    for turn in range(5):
        victim, other = (Process(learn_forever, shm_address, 10 * turn + k) for k in range(2))
        with running(victim, other):
            time.sleep(float(stream.uniform(0, 0.06)))
            victim.kill()
            batch = buffer.sample(512, timeout=HANG_S)
            buffer.update_priorities(batch["indices"], stream.uniform(0.5, 1.5, 512))
            calls = buffer.stats()["sample_calls"]
            until(lambda calls=calls: buffer.stats()["sample_calls"] != calls, "a batch of the other learner")
        for name in ("obs", "next_obs"):
            expected = batch["reward"][:, None] + (name == "next_obs")
            np.testing.assert_array_equal(batch[name], np.broadcast_to(expected, (512, 4)))
        np.testing.assert_array_equal(batch["reward"], batch["indices"].astype(np.float32))
        check_index(buffer)
    buffer.close()


def test_process_killed_while_it_makes_every_mass_anew(shm_address: str) -> None:
    """Nearly all of its time is spent inside the lock: whoever comes next finds it abandoned and the tree half made."""
    buffer = sw.ReplayBuffer(100_000, obs_shape=(1,), sampler=by_priority(), storage=shm_address, seed=2)
    flat = np.zeros(100_000, np.float32)
    buffer.add(flat[:, None], flat, flat, flat[:, None], flat.astype(bool))
    stream = np.random.default_rng(13)
    for _ in range(4):
        buffer.update_priorities(np.arange(100_000), stream.uniform(0.5, 1.5, 100_000))
        with running(Process(tune_forever, shm_address)):
            time.sleep(float(stream.uniform(0, 0.02)))
        buffer.sample(32, timeout=HANG_S)
        check_index(buffer)
    buffer.close()


def test_learners_and_writers_killed_together_leave_a_whole_index(shm_address: str) -> None:
    buffer = make(sampler=by_priority(), storage=shm_address)
    stream = np.random.default_rng(8)
    for turn in range(4):
        writer = Process(write_forever, shm_address, turn)
        learner = Process(learn_forever, shm_address, turn)
        with running(writer, learner):
            time.sleep(float(stream.uniform(0, 0.08)))
            check_batch(buffer.sample(64))
            for process in (writer, learner) if turn % 2 else (learner, writer):
                process.kill()
        check_batch(buffer.sample(64))
        buffer.writer().close()  # whoever takes a writer gives back what the dead one held
        check_ends(check_rows(buffer), turn)
        check_index(buffer)
    buffer.close()


# ---- writers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [None, by_priority()], ids=["uniform", "prioritized"])
def test_killed_writer_in_shared_memory(sampler: Any, shm_address: str) -> None:
    buffer = make(sampler=sampler, storage=shm_address)
    stream = np.random.default_rng(9)
    for turn in range(8):
        writer = Process(write_forever, shm_address, turn)
        with running(writer):
            time.sleep(float(stream.uniform(0, 0.05)))
            check_batch(buffer.sample(32))
        before = check_rows(buffer)
        check_batch(buffer.sample(256))
        with buffer.writer() as mine:
            after = check_rows(buffer)
            check_ends(after, turn)
            # A step that was half written is gone; nothing else is.
            assert set(after) <= set(before)
            assert len(set(before) - set(after)) <= ENVS
            for step in range(30):
                add_step(mine, 20 + turn, step)
        truncated = check_rows(buffer)
        assert sum(number // RUN == 20 + turn for number in truncated) == 30 * ENVS
        check_ends(truncated, turn)
        check_ends(truncated, 20 + turn)
        check_batch(buffer.sample(256))
    buffer.close()


def write_many_forever(address: str, ready: Any) -> None:
    buffer = sw.open(address)
    writer = buffer.writer()
    wide, flat, ends = np.zeros((2000, 200), np.float32), np.zeros(2000), np.zeros(2000, bool)
    while True:
        writer.add(wide, flat, flat, wide, ends)
        ready.set()


def test_killed_writers_leave_the_right_number_of_rows(shm_address: str) -> None:
    buffer = sw.ReplayBuffer(5000, obs_shape=(200,), storage=shm_address, writers=4, seed=0)
    stream = np.random.default_rng(10)
    for turn in range(8):
        with running(Process(write_many_forever, shm_address)):
            time.sleep(float(stream.uniform(0, 0.02)))
        buffer.writer().close()
        held = sum(len(batch["indices"]) for batch in buffer.rows())
        assert (turn, len(buffer)) == (turn, held)
    buffer.close()


@pytest.mark.parametrize("sampler", [None, by_priority()], ids=["uniform", "prioritized"])
def test_killed_writers_of_a_file_that_everybody_left(sampler: Any, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/live.sw"
    make(sampler=sampler, storage=address).close()
    stream = np.random.default_rng(11)
    for turn in range(0, 8, 2):
        writers = [Process(write_forever, address, turn + k) for k in range(1 + turn % 4 // 2)]
        with running(*writers):
            time.sleep(float(stream.uniform(0, 0.05)))
        buffer = sw.open(address)
        truncated = check_rows(buffer, alone=False)
        for k in range(len(writers)):
            check_ends(truncated, turn + k)
        assert len(buffer) == len(truncated)
        check_batch(buffer.sample(256))
        for step in range(10):
            add_step(buffer, 20 + turn, step)
        truncated = check_rows(buffer, alone=False)
        assert sum(number // RUN == 20 + turn for number in truncated) == 10 * ENVS
        if sampler is not None:
            check_index(buffer)
        buffer.close()


POWER_LOSS = """
import os, sys, numpy as np, sharpwave as sw
buffer = sw.ReplayBuffer(200, obs_shape=(4,), next_obs="derived", sampler=sw.Prioritized(), storage=sys.argv[1],
                         writers=2, seed=0)
for i in range(100): buffer.add(np.full(4, i), 0.0, float(i), np.full(4, i + 1), False)
os._exit(0)
"""


def test_row_lost_by_a_power_failure_takes_only_its_neighbours_along(tmp_path: Path) -> None:
    path = tmp_path / "live.sw"
    subprocess.run([sys.executable, "-c", POWER_LOSS, f"file://{path}"], check=True, timeout=2 * HANG_S)
    whole = bytearray(path.read_bytes())
    regions = regions_of(bytes(whole))
    (row_bytes,) = struct.unpack_from("<Q", whole, PLACES["row_bytes"])
    whole[regions["rows"][0] + 10 * row_bytes + 12] ^= 1
    boot_id = regions["counters"][0] + 9 * 64 + 8
    assert whole[boot_id + 8 : boot_id + 9] == b"-"
    whole[boot_id] ^= 1  # the machine was started again: only checksums can be trusted
    path.write_bytes(whole)
    buffer = sw.open(f"file://{path}")
    # Row 10 is lost, and with it the next observation of row 9.
    assert buffer.stats()["rows_lost"] == 2
    held = np.concatenate([batch["reward"] for batch in buffer.rows()]).astype(int).tolist()
    assert held == [*range(9), *range(11, 100)]
    assert len(buffer) == 98
    assert sorted(set(buffer.sample(2000)["reward"].astype(int).tolist())) == held
    buffer.close()


# ---- snapshots -------------------------------------------------------------------------------------------------------


def test_snapshot_of_a_running_buffer_is_whole(shm_address: str, tmp_path: Path) -> None:
    # Large enough that writers do not go round it while the one who saves is kept waiting for a processor.
    buffer = make(6000, sampler=by_priority(), storage=shm_address)
    processes = [Process(write_forever, shm_address, run) for run in range(2)]
    processes.append(Process(learn_forever, shm_address, 0))
    with running(*processes):
        until(lambda: len(buffer) >= 4000)
        for turn in range(8):
            buffer.save(tmp_path / "snapshot")
            loaded = sw.open(tmp_path / "snapshot")
            held = check_rows(loaded, alone=False)
            assert len(loaded) == len(held)
            assert len(held) > 100
            check_batch(loaded.sample(256))
            for step in range(20):
                add_step(loaded, 10 + turn, step)
            truncated = check_rows(loaded, alone=False)
            assert sum(number // RUN == 10 + turn for number in truncated) == 20 * ENVS
            check_batch(loaded.sample(256))
    buffer.close()


def test_every_row_of_a_snapshot_of_a_running_buffer_can_be_drawn(shm_address: str, tmp_path: Path) -> None:
    buffer = make(6000, sampler=by_priority(), writers=2, storage=shm_address)
    with running(Process(write_forever, shm_address, 0)):
        for turn in range(5):
            buffer.save(tmp_path / "snapshot")
            loaded = sw.open(tmp_path / "snapshot")
            for step in range(40):
                add_step(loaded, 10 + turn, step)
            check_index(loaded)
    buffer.close()


def test_every_row_can_be_drawn_when_the_first_draw_comes_after_the_ring_went_round() -> None:
    buffer = sw.ReplayBuffer(64, obs_shape=(2,), sampler=by_priority(), writers=2, seed=0)
    for number in range(64 + 11):
        buffer.add(np.full(2, number), 0.0, float(number), np.full(2, number), False)
    assert buffer.stats()["block_rows"] > 1
    check_index(buffer)


# ---- close() in another thread ---------------------------------------------------------------------------------------

TUNE_AND_CLOSE = """
import threading, time, numpy as np, sharpwave as sw
for turn in range(3):
    buffer = sw.ReplayBuffer(1_000_000, obs_shape=(1,), sampler=sw.Prioritized(), writers=1, seed=0)
    zeros = np.zeros(1_000_000, np.float32)
    buffer.add(zeros[:, None], zeros, zeros, zeros[:, None], zeros.astype(bool))
    def tune():
        try:
            while True:
                buffer.tune(alpha=0.3)
        except sw.errors.ClosedError:
            pass
    thread = threading.Thread(target=tune)
    thread.start()
    time.sleep(0.03 + 0.005 * turn)
    buffer.close()
    thread.join()
print("fine")
"""


def test_close_in_another_thread_waits_for_tune_to_be_over() -> None:
    command = [sys.executable, "-c", TUNE_AND_CLOSE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-500:]


# ---- several writers in a small ring --------------------------------------------------------------------------------

FULL_OF_ENDS = """
import numpy as np, sharpwave as sw
buffer = sw.ReplayBuffer(64, obs_shape=(2,), next_obs="derived", writers=4, seed=0)
assert (buffer.stats()["block_rows"], buffer.stats()["blocks"]) == (4, 16)
def add(writer, now, then, done=False):
    writer.add(np.full(2, now), 0.0, float(now), np.full(2, then), done)
first, second, third = buffer.writer(), buffer.writer(), buffer.writer()
for i in range(4): add(first, i, i + 1)                     # block 0: an episode goes on ...
for i in range(4): add(first, 4 if i == 0 else 10 * i, 99, True)  # ... and ends in block 1, where every row is an end
for i in range(13 * 4): add(first, 1000 + i, 0, True)       # blocks 2 to 14
for i in range(4): add(second, i, i + 1)                    # block 15, whose newest row is open
add(third, 7, 8)                                            # block 0 again, the row before block 1 still there
add(second, 55, 56)                                         # block 1 again, and a reset nobody told of
add(second, 56, 57)
rows = {}
for batch in buffer.rows():
    for obs, then in zip(batch["obs"], batch["next_obs"]): rows[float(obs[0])] = float(then[0])
assert rows[3.0] == 4.0 and rows[55.0] == 56.0 and rows[56.0] == 57.0, rows
print("fine")
"""


def test_block_full_of_ends_has_room_for_those_of_its_neighbours() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_OF_ENDS], capture_output=True, text=True, timeout=2 * HANG_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-500:]


# ---- damage ----------------------------------------------------------------------------------------------------------

REGIONS = ["runtime", "counters", "writers", "blocks", "fields", "description", "rows", "words", "checksums"]
REGIONS += ["priorities", "given", "tree", "order", "heap", "finals", "waiting"]
HEADER_BYTES = 432 + 24 * 16
NUMBERS = ["total_bytes", "capacity", "slots", "spare_rows", "block_rows", "blocks", "width", "max_writers"]
NUMBERS += ["field_count", "row_bytes", "payload_offset", "seed", "created_ns", "saved_slots"]
PLACES = {name: 24 + 8 * i for i, name in enumerate(NUMBERS)}
PLACES |= {"block_heap_bytes": 176, "block_finals_bytes": 184, "waiting_bytes": 192}


def regions_of(whole: bytes) -> dict[str, tuple[int, int]]:
    table = np.frombuffer(whole, np.uint64, 48, 432).reshape(24, 2)
    found = {name: (int(table[i, 0]), int(table[i, 1])) for i, name in enumerate(REGIONS) if table[i, 1]}
    return {"header": (0, HEADER_BYTES), **found}


# Opens one damaged copy after another and uses each in every way; names each before, so that a crash has a name.
USE = """
import json, sys
import numpy as np
import sharpwave as sw
source, target, prefix = sys.argv[1:4]
whole = open(source, "rb").read()
side, envs = 12, 2
def step(n):
    return dict(obs=np.full((envs, side, side), n, np.uint8), reward=np.zeros(envs),
                next_obs=np.full((envs, side, side), n + 1, np.uint8), done=np.full(envs, n % 5 == 4))
def use(buffer):
    uses = [
        lambda: (len(buffer), buffer.stats()),
        lambda: list(buffer.rows()),
        lambda: buffer.sample(8),
        lambda: buffer.sample(64),
        lambda: buffer.update_priorities(np.arange(300), np.ones(300)),
        lambda: [buffer.add(**step(n)) for n in range(40)],
        lambda: buffer.sample(64),
        lambda: buffer.tune(alpha=0.3),
        lambda: buffer.save(target + ".saved"),
        lambda: list(buffer.rows()),
        lambda: buffer.clear(),
        lambda: [buffer.add(**step(n)) for n in range(40)],
        lambda: buffer.sample(64),
        lambda: list(buffer.rows()),
    ]
    for i, one in enumerate(uses):
        try:
            one()
        except sw.errors.SharpwaveError:
            pass
        except Exception as error:
            print(json.dumps(["use", i, type(error).__name__, str(error)]), flush=True)
for line in sys.stdin:
    at, data = json.loads(line)
    print(json.dumps(["at", at]), flush=True)
    data = bytes.fromhex(data)
    with open(target, "wb") as file:
        file.write(whole[:at] + data + whole[at + len(data):])
    try:
        buffer = sw.open(prefix + target)
    except sw.errors.StorageError:
        continue
    except Exception as error:
        print(json.dumps(["open", type(error).__name__, str(error)]), flush=True)
        continue
    use(buffer)
    buffer.close()
print(json.dumps(["survived"]), flush=True)
"""


def find_wrongs(folder: Path, source: Path, prefix: str, changes: list[tuple[str, int, bytes]]) -> list[str]:
    """What went wrong with each change of a file: crashes, hangs, errors that are not Sharpwave's."""
    wrongs = []
    while changes:
        command = [sys.executable, "-c", USE, str(source), str(folder / "damaged.sw"), prefix]
        text = "".join(json.dumps([at, data.hex()]) + "\n" for _, at, data in changes)
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=4 * HANG_S, check=False)
            output, code = done.stdout, str(done.returncode)
        except subprocess.TimeoutExpired as hung:
            output, code = (hung.stdout or b"").decode(), "a hang"
        said = [json.loads(line) for line in output.splitlines()]
        at, tried = -1, 0
        for words in said:
            if words[0] == "at":
                at, tried = words[1], tried + 1
            elif words[0] != "survived":
                wrongs.append(f"{changes[tried - 1][0]} at {at}: {words}")
        if said and said[-1] == ["survived"]:
            return wrongs
        tried = max(tried, 1)
        wrongs.append(f"{changes[tried - 1][0]} at {at}: exit {code}")
        changes = changes[tried:]
        if len(wrongs) > 20:
            break
    return wrongs


def build_for_damage(folder: Path, kind: str) -> Path:
    """Everything switched on, a ring that went round, an open episode in each env."""
    code = (
        "import sys, os; sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]; import test_part2 as t\n"
        "options = {'storage': 'file://' + sys.argv[2]} if sys.argv[3] != 'snapshot' else {}\n"
        "options |= {'sampler': t.sw.Prioritized(mix=0.1), 'view': t.sw.Transitions(n_step=2), 'writers': 2}\n"
        "buffer = t.make(60, **options)\n"
        "for step in range(50):\n    t.add_step(buffer, 0, step)\n    step % 9 or buffer.sample(8)\n"
        "if sys.argv[3] == 'snapshot': buffer.save(sys.argv[2])\n"
        "if sys.argv[3] == 'killed': os._exit(0)\n"
        "buffer.close()\n"
    )
    path = folder / "whole.sw"
    subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(path), kind], check=True, timeout=2 * HANG_S
    )
    return path


@pytest.mark.parametrize("kind", ["snapshot", "closed", "killed"])
def test_damage_in_any_region_never_crashes(kind: str, tmp_path: Path) -> None:
    source = build_for_damage(tmp_path, kind)
    whole = source.read_bytes()
    regions = regions_of(whole)
    expected = {"rows", "priorities", "given", "heap", "finals", "blocks", "fields", "counters", "writers"}
    assert expected <= set(regions)
    stream = np.random.default_rng(12)
    changes = []
    for name, (offset, size) in regions.items():
        used = np.flatnonzero(np.frombuffer(whole, np.uint8, size, offset))
        for turn in range(6):
            # What is used is mostly a small part of a region.
            at = offset + int(stream.choice(used) if turn % 2 and len(used) else stream.integers(size))
            changes.append((name, at, bytes([whole[at] ^ 1 << int(stream.integers(8))])))
        for ending in (offset, offset + (size - 8) // 8 * 8):
            changes.append((name, ending, b"\xff" * 8))
    shape = regions["fields"][0] + 96 + 16
    changes.append(("a field's shape", shape, b"\xff" * 8))
    assert find_wrongs(tmp_path, source, "" if kind == "snapshot" else "file://", changes) == []


@pytest.mark.parametrize("kind", ["closed", "killed"])
def test_damaged_waiting_observation_never_crashes(kind: str, tmp_path: Path) -> None:
    source = build_for_damage(tmp_path, kind)
    whole = source.read_bytes()
    offset, _ = regions_of(whole)["waiting"]
    (place_bytes,) = struct.unpack_from("<Q", whole, PLACES["waiting_bytes"])
    changes = []
    for place in range(2 * ENVS):
        at = offset + place * place_bytes + 16
        assert struct.unpack_from("<II", whole, at) == (SIDE * SIDE, SIDE * SIDE)
        changes += [("kept bytes", at + 3, b"\x40"), ("value bytes", at + 7, b"\x40"), ("tag", at - 16, b"\xff" * 8)]
    assert find_wrongs(tmp_path, source, "file://", changes) == []


def test_damaged_tree_never_crashes(tmp_path: Path) -> None:
    """Mass where there is no row: a child that does not exist must never be followed."""
    source = build_for_damage(tmp_path, "closed")
    whole = source.read_bytes()
    regions = regions_of(whole)
    tree, size = regions["tree"]
    leaves, leaves_size = regions["priorities"]
    changes = [("tree", at + 15 * 8, struct.pack("<d", 1e12)) for at in range(tree, tree + size, 256)]
    changes += [("leaf", leaves + leaves_size - 4, struct.pack("<f", 1e12))]
    changes += [("index head", leaves + 8 * i, struct.pack("<Q", 1 << 40)) for i in range(3)]
    assert find_wrongs(tmp_path, source, "file://", changes) == []


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def forged(whole: bytes, **numbers: int) -> bytes:
    header = bytearray(whole[:HEADER_BYTES])
    for name, value in numbers.items():
        place = 432 + 16 * REGIONS.index(name[6:]) + 8 if name.startswith("bytes_") else PLACES[name]
        struct.pack_into("<Q", header, place, value % (1 << 64))
    header[20:24] = bytes(4)
    header[20:24] = struct.pack("<I", crc32c(bytes(header)))
    return bytes(header)


@pytest.mark.parametrize("kind", ["snapshot", "closed"])
def test_forged_header_never_crashes(kind: str, tmp_path: Path) -> None:
    """The checksum is right, the numbers are not."""
    source = build_for_damage(tmp_path, kind)
    whole = source.read_bytes()
    assert forged(whole) == whole[:HEADER_BYTES]
    changes = []

    def change(**numbers: int) -> None:
        changes.append((str(numbers), 0, forged(whole, **numbers)))

    value = {name: struct.unpack_from("<Q", whole, place)[0] for name, place in PLACES.items()}
    for name in set(NUMBERS) - {"seed", "created_ns"}:
        for wrong in (0, 1, value[name] + 1, 2 * value[name], 1 << 40, (1 << 63) + value[name]):
            change(**{name: wrong})
    blocks, rows = value["blocks"], value["block_rows"]
    many = 1 << 20
    change(capacity=2, spare_rows=value["slots"] - 2)
    change(capacity=value["capacity"] - 2, spare_rows=value["spare_rows"] + 2)
    change(width=rows * 2, block_rows=rows * 2, blocks=(value["slots"] - 1) // (rows * 2) + 1)
    change(capacity=many * blocks - value["spare_rows"], slots=many * blocks, block_rows=many)
    change(capacity=value["capacity"] + 1, slots=value["slots"] + 1)
    change(block_rows=1 << 62, width=1 << 62, blocks=1, bytes_blocks=64, bytes_heap=0)
    assert find_wrongs(tmp_path, source, "" if kind == "snapshot" else "file://", changes) == []


PLAIN = """
import sys, numpy as np, sharpwave as sw
kind, path = sys.argv[1:]
options = {} if kind == "snapshot" else {"storage": "file://" + path}
buffer = sw.ReplayBuffer(50_000, obs_shape=(2,), writers=2, seed=0, **options)
buffer.add(np.zeros((50_000, 2)), np.zeros(50_000), np.zeros(50_000), np.zeros((50_000, 2)), np.zeros(50_000, bool))
if kind == "snapshot": buffer.save(path)
buffer.close()
"""
USE_PLAIN = """
import sys, numpy as np, sharpwave as sw
try:
    buffer = sw.open(sys.argv[1])
    list(buffer.rows())
    buffer.add(np.zeros((9, 2)), np.zeros(9), np.zeros(9), np.zeros((9, 2)), np.zeros(9, bool))
    buffer.sample(10_000)
    buffer.close()
except sw.errors.SharpwaveError:
    pass
"""


@pytest.mark.parametrize("kind", ["snapshot", "live"])
def test_header_forged_to_reach_far_never_crashes(kind: str, tmp_path: Path) -> None:
    """More rows than the file has, in numbers that agree with each other."""
    path = tmp_path / "plain.sw"
    subprocess.run([sys.executable, "-c", PLAIN, kind, str(path)], check=True, timeout=2 * HANG_S)
    whole = path.read_bytes()
    value = {name: struct.unpack_from("<Q", whole, place)[0] for name, place in PLACES.items()}
    huge = 1 << 30
    numbers = {"capacity": 2, "spare_rows": value["slots"] - 2}
    if kind == "live":
        block_rows = (huge + value["blocks"] - 1) // value["blocks"]
        numbers = {"capacity": huge, "slots": huge, "block_rows": block_rows}
    path.write_bytes(forged(whole, **numbers) + whole[HEADER_BYTES:])
    address = str(path) if kind == "snapshot" else f"file://{path}"
    done = subprocess.run(
        [sys.executable, "-c", USE_PLAIN, address], capture_output=True, text=True, timeout=2 * HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-300:]
