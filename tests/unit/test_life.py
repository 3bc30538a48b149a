"""From creation to the last byte removed: snapshots, live files, shared memory, kills, pickles."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import check_whole, filled, make, numbers_in, row, rows

import sharpwave as sw
from sharpwave.errors import ClosedError, SchemaError, StorageError


@pytest.fixture(params=["shm", "file"])
def address(request: pytest.FixtureRequest, shm_address: str, tmp_path: Path) -> str:
    return shm_address if request.param == "shm" else f"file://{tmp_path}/live.sw"


def path_of(address: str) -> Path:
    if address.startswith("shm://"):
        return Path("/dev/shm") / f"sharpwave-{address.removeprefix('shm://')}.sw"
    return Path(address.removeprefix("file://"))


# ---- snapshots -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 9, 10, 37])
@pytest.mark.parametrize("storage", ["memory", "shm", "file"])
def test_snapshot_holds_rows_serials_and_the_random_stream(
    count: int, storage: str, tmp_path: Path, shm_address: str
) -> None:
    place = {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/live.sw"}[storage]
    buffer = filled(count, storage=place)
    if count:
        buffer.sample(5)
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    assert numbers_in(copy) == numbers_in(buffer) == list(range(max(0, count - 10), count))
    for both in (buffer, copy):
        both.add(**row(count))
    assert [b["indices"].tolist() for b in copy.rows()] == [b["indices"].tolist() for b in buffer.rows()]
    assert copy.sample(64)["indices"].tolist() == buffer.sample(64)["indices"].tolist()
    assert (copy.capacity, copy.num_envs, copy.schema) == (buffer.capacity, buffer.num_envs, buffer.schema)
    assert copy.stats()["seed"] == buffer.stats()["seed"]
    assert copy.stats()["incarnation"] == buffer.stats()["incarnation"] + 1
    buffer.close(unlink=True)


def test_snapshot_is_a_copy_that_may_be_loaded_twice(tmp_path: Path) -> None:
    filled(3).save(str(tmp_path / "snapshot"))
    before = (tmp_path / "snapshot").read_bytes()
    first, second = sw.open(str(tmp_path / "snapshot")), sw.open(tmp_path / "snapshot")
    first.add(**row(3))
    first.clear()
    assert numbers_in(second) == [0, 1, 2]
    assert (tmp_path / "snapshot").read_bytes() == before


def test_snapshot_of_a_cleared_buffer_is_empty_and_its_serials_go_on(tmp_path: Path) -> None:
    buffer = filled(7)
    old = next(buffer.rows())["indices"]
    buffer.clear()
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    assert len(copy) == 0
    copy.add(**row(1))
    assert next(copy.rows())["indices"][0] > old.max()


def test_snapshot_keeps_num_envs_and_nested_schema(tmp_path: Path) -> None:
    schema = {"obs": {"tuple": sw.Field((2,), "uint8"), "dict": (sw.Field(()), {"x": sw.Field((), "S3")})}}
    buffer = sw.ReplayBuffer(12, schema=schema, next_obs=None, num_envs=3)
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    assert copy.schema == buffer.schema
    assert copy.num_envs == 3


def test_failed_save_leaves_the_older_snapshot(tmp_path: Path) -> None:
    buffer = filled(3)
    buffer.save(tmp_path / "snapshot")
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.save(tmp_path / "snapshot")
    assert numbers_in(sw.open(tmp_path / "snapshot")) == [0, 1, 2]
    assert os.listdir(tmp_path) == ["snapshot"]


# ---- live files ------------------------------------------------------------------------------------------------------


def test_what_one_adds_the_other_sees(address: str) -> None:
    buffer = make(storage=address)
    other = sw.open(address)
    buffer.add(**row(0))
    other.add(**row(1))
    assert sorted(numbers_in(buffer)) == sorted(numbers_in(other)) == [0, 1]
    assert buffer.sample(8)["indices"].tolist() != other.sample(8)["indices"].tolist()  # one stream for both
    assert other.stats()["sample_calls"] == buffer.stats()["sample_calls"] == 2
    other.clear()
    assert len(buffer) == 0
    other.close()
    buffer.add(**row(2))
    assert numbers_in(buffer) == [2]
    buffer.close(unlink=True)


def test_buffer_goes_on_where_it_was_closed(address: str) -> None:
    twin = filled(14)
    filled(14, storage=address).close()
    buffer = sw.open(address)
    assert numbers_in(buffer) == list(range(4, 14))
    assert (buffer.stats()["recoveries"], buffer.stats()["writers"]) == (0, 0)
    for both in (buffer, twin):
        both.add(**row(14))
    assert buffer.sample(32)["indices"].tolist() == twin.sample(32)["indices"].tolist()
    buffer.close(unlink=True)


def test_existing_name_is_an_error_unless_told(address: str) -> None:
    first = filled(3, storage=address)
    with pytest.raises(
        StorageError, match=f"{address}' exists; open it .*'sharpwave rm {address}', or give exist='replace'"
    ):
        make(storage=address)
    assert numbers_in(first) == [0, 1, 2]
    attached = make(storage=address, exist="attach")
    assert numbers_in(attached) == [0, 1, 2]
    attached.close()
    first.close()
    replaced = make(storage=address, exist="replace")
    assert len(replaced) == 0
    replaced.close(unlink=True)
    fresh = make(storage=address, exist="attach")  # nothing there: it is made
    assert len(fresh) == 0
    fresh.close(unlink=True)


@pytest.mark.parametrize(
    "other", [{"obs_shape": (3,)}, {"capacity": 20}, {"num_envs": 2}, {"action_dtype": "int64"}, {"next_obs": None}]
)
def test_attaching_to_another_kind_of_buffer_is_refused(address: str, other: dict[str, Any]) -> None:
    buffer = filled(3, storage=address)
    with pytest.raises(SchemaError, match=r"exist='attach': .* has another schema, capacity or num_envs"):
        make(**{"capacity": 10, "storage": address, "exist": "attach", **other})
    assert numbers_in(buffer) == [0, 1, 2]
    buffer.close(unlink=True)


def test_files_are_readable_by_their_owner_only(address: str, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        buffer = filled(3, storage=address)
        buffer.save(tmp_path / "snapshot")
    finally:
        os.umask(old)
    for path in (path_of(address), tmp_path / "snapshot"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    buffer.close(unlink=True)


def test_close_with_unlink_leaves_nothing(address: str) -> None:
    folder = path_of(address).parent
    name = path_of(address).name
    buffer = filled(3, storage=address)
    assert any(name in entry for entry in os.listdir(folder))
    buffer.close(unlink=True)
    assert not any(name in entry for entry in os.listdir(folder))
    with pytest.raises(StorageError, match="cannot open"):
        sw.open(address)
    buffer.close(unlink=True)


def test_close_without_unlink_keeps_the_rows(address: str) -> None:
    with filled(3, storage=address) as buffer:
        pass
    with pytest.raises(ClosedError):
        len(buffer)
    with sw.open(address) as again:
        assert numbers_in(again) == [0, 1, 2]
    again.close(unlink=True)


@pytest.mark.parametrize("spelling", ["relative", "hard link", "dots"])
def test_one_file_under_two_spellings_is_one_buffer(spelling: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    other = {
        "relative": "live.sw",
        "hard link": f"{tmp_path}/second.sw",
        "dots": f"{tmp_path}/../{tmp_path.name}/live.sw",
    }
    buffer = make(10_000, storage=f"file://{tmp_path}/live.sw")  # blocks of several rows
    os.link(tmp_path / "live.sw", tmp_path / "second.sw")
    for number in range(10):
        buffer.add(**row(number))
    with sw.open(f"file://{other[spelling]}") as again:
        for number in range(10, 20):
            again.add(**row(number))
        for number in range(20, 30):
            buffer.add(**row(number))
        assert sorted(numbers_in(buffer)) == list(range(30))
        assert again.stats()["recoveries"] == 0


def test_name_used_again_is_not_recovered_by_the_next_process(shm_address: str) -> None:
    first = make(storage=shm_address)
    second = sw.open(shm_address)
    first.close(unlink=True)
    third = filled(3, storage=shm_address)
    code = f"import sharpwave as sw; b = sw.open({shm_address!r}); print(b.stats()['recoveries'], b.stats()['writers'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    second.close()
    third.close(unlink=True)
    assert done.stdout == "0 1\n"


# ---- processes -------------------------------------------------------------------------------------------------------

CHILD = """
import sys
import numpy as np
import sharpwave as sw
buffer = {buffer}
number = 0
while True:
    obs = np.full((3, 2), np.arange(number, number + 3)[:, None], np.float32)
    flat = obs[:, 0].copy()
    buffer.add(obs, flat, flat, obs + 1, np.zeros(3, bool))
    number += 3
    sys.stdout.write(f"{{number}}\\n")
    sys.stdout.flush()
"""


def killed_child(buffer: str, after: int) -> int:
    """A process that adds numbered rows until it is killed; how many it said it had added."""
    child = subprocess.Popen([sys.executable, "-c", CHILD.format(buffer=buffer)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = 0
    for line in child.stdout:
        told = int(line)
        if told >= after:
            break
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().splitlines()
    child.wait()
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    return max([told, *(int(line) for line in rest if line)])


@pytest.mark.parametrize("after", [3, 300, 5000])
def test_file_of_a_killed_writer_holds_every_row_it_told_of(after: int, address: str) -> None:
    capacity = 1000
    told = killed_child(f"sw.ReplayBuffer({capacity}, obs_shape=(2,), storage={address!r}, seed=0)", after)
    buffer = sw.open(address)
    numbers = numbers_in(buffer)
    # It may have finished rows that it did not live to tell of, at most those of one more add; and where it died
    # while overwriting, as many of the oldest are gone.
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert told - 1 <= numbers[-1] <= told + 2
    assert len(numbers) >= min(told, capacity - 3)
    assert buffer.stats()["recoveries"] == 1
    assert buffer.stats()["writers"] == 0
    buffer.add(**row(7))
    assert numbers_in(buffer)[-1] == 7
    buffer.close(unlink=True)


def test_open_episode_of_a_killed_writer_ends_as_truncated(address: str) -> None:
    killed_child(f"sw.ReplayBuffer(1000, obs_shape=(2,), storage={address!r}, seed=0)", 9)
    with sw.open(address) as buffer:
        (batch,) = buffer.rows()
        truncated = batch["truncated"].tolist()
    buffer.close(unlink=True)
    assert truncated == [False] * (len(truncated) - 1) + [True]


def test_writer_of_a_killed_process_is_free_again_for_survivors(shm_address: str) -> None:
    buffer = make(1000, storage=shm_address, writers=2)
    try:
        killed_child(f"sw.open({shm_address!r})", 3)
        killed_child(f"sw.open({shm_address!r})", 3)
        buffer.add(**row(1))
        assert buffer.stats()["writers"] == 1
    finally:
        buffer.close(unlink=True)


def test_survivor_goes_on_beside_a_killed_writer(shm_address: str) -> None:
    buffer = filled(5, capacity=200_000, storage=shm_address)
    told = killed_child(f"sw.open({shm_address!r})", 30)
    numbers = numbers_in(buffer)
    assert 5 + told <= len(numbers) <= 5 + told + 3
    buffer.add(**row(5))
    assert len(buffer) == len(numbers) + 1
    assert buffer.stats()["recoveries"] == 0
    check_whole(buffer.sample(500))
    buffer.close(unlink=True)


def test_pickle_of_a_shared_buffer_is_its_address(address: str) -> None:
    buffer = filled(3, storage=address)
    again = pickle.loads(pickle.dumps(buffer))
    assert numbers_in(again) == [0, 1, 2]
    again.add(**row(3))
    assert len(buffer) == 4
    again.close()
    buffer.close(unlink=True)
    with pytest.raises(ClosedError, match="pickle: the buffer is closed"):
        pickle.dumps(buffer)


@pytest.mark.parametrize(("verb", "name"), [(copy.deepcopy, "deepcopy"), (copy.copy, "copy")])
def test_copy_of_a_buffer_in_memory_is_refused_with_the_way_to_a_copy(verb: Any, name: str, address: str) -> None:
    buffer = filled(3)
    mend = r"is not copied; save\(\) it, and sharpwave.open\(\) the file for a copy"
    with pytest.raises(TypeError, match=rf"^{name}: a buffer in memory {mend}"):
        verb(buffer)
    buffer.close()
    with pytest.raises(ClosedError, match=f"{name}: the buffer is closed"):
        verb(buffer)
    shared = filled(3, storage=address)
    with verb(shared) as again:  # over the same rows, as a pickle
        again.add(**row(3))
        assert len(shared) == 4
    shared.close(unlink=True)


def test_updates_are_counted_for_every_sampler() -> None:
    stats = filled(3).stats()
    assert (stats["updates_applied"], stats["updates_stale"]) == (0, 0)


def test_pickle_of_a_buffer_in_memory_is_refused_with_a_reason(tmp_path: Path) -> None:
    buffer = filled(3)
    with pytest.raises(TypeError, match=r"a buffer in memory belongs to one process; give storage='shm://name'"):
        pickle.dumps(buffer)
    buffer.save(tmp_path / "snapshot")
    with pytest.raises(TypeError, match="belongs to one process"):
        pickle.dumps(sw.open(tmp_path / "snapshot"))


# ---- facts -----------------------------------------------------------------------------------------------------------


def test_repr_tells_place_state_and_fields(shm_address: str) -> None:
    buffer = filled(3)
    assert repr(buffer) == "<ReplayBuffer in memory: 3 of 10 rows, fields obs, action, reward, next_obs, done>"
    buffer.close()
    assert repr(buffer) == "<ReplayBuffer in memory: closed>"
    with make(storage=shm_address) as shared:
        assert repr(shared).startswith(f"<ReplayBuffer {shm_address}: 0 of 10 rows")
    shared.close(unlink=True)
    assert repr(sw.Field((2, 3), "uint8")) == "Field((2, 3), 'uint8')"
    assert (repr(sw.Uniform()), repr(sw.Transitions())) == ("Uniform()", "Transitions(n_step=1, gamma=0.99)")


STATS = [
    "storage",
    "updates_applied",
    "updates_stale",
    "resets_unflagged",
    "writers_reclaimed",
    "index_takeovers",
    "rows_retired",
    "heap_bytes",
    "size",
    "capacity",
    "rows_added",
    "rows_voided",
    "episodes",
    "rows_sampled",
    "sample_calls",
    "redraws",
    "writers",
    "max_writers",
    "blocks",
    "block_rows",
    "row_bytes",
    "payload_bytes",
    "storage_bytes",
    "pooled_bytes",
    "incarnation",
    "recoveries",
    "rows_lost",
    "seed",
    "copy_kernel",
]


def test_stats_count_what_happened() -> None:
    buffer = make(8)
    assert set(buffer.stats()) == set(STATS)
    buffer.add(**row(0))
    buffer.add(**row(1, done=True))
    buffer.add(**row(2, truncated=True))
    buffer.add(**row(3, done=True, truncated=True))
    buffer.add(**row(4, mask=False))
    buffer.add(**rows(range(5, 9), mask=np.array([True, False, True, True])))
    buffer.sample(10)
    buffer.sample(3)
    buffer.writer().close()
    writer = buffer.writer()
    stats = buffer.stats()
    expected = {"storage": "memory", "size": 6, "capacity": 8, "rows_added": 7, "rows_voided": 2, "episodes": 3}
    expected |= {"rows_sampled": 13, "sample_calls": 2, "writers": 2, "max_writers": 64, "seed": 0, "recoveries": 0}
    expected |= {"incarnation": 1, "rows_lost": 0, "payload_bytes": 25}
    assert {name: stats[name] for name in expected} == expected
    assert stats["storage_bytes"] >= 8 * stats["row_bytes"]
    assert stats["blocks"] * stats["block_rows"] >= 8
    writer.close()
    buffer.clear()
    assert (buffer.stats()["size"], buffer.stats()["rows_added"]) == (0, 7)


def test_properties_tell_what_was_asked_for() -> None:
    buffer = make(12, num_envs=4, action_shape=(3,), action_dtype="int64")
    assert (buffer.capacity, buffer.num_envs, buffer.is_full, len(buffer)) == (12, 4, False, 0)
    assert buffer.schema == {
        "obs": sw.Field((2,)),
        "action": sw.Field((3,), "int64"),
        "reward": sw.Field(()),
        "next_obs": sw.Field((2,)),
        "done": sw.Field((), "bool"),
    }


def test_flush_returns(address: str) -> None:
    filled(3).flush()
    buffer = filled(3, storage=address)
    buffer.flush()
    buffer.close(unlink=True)
