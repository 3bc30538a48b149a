"""TrajectoryReplayBuffer: adding, drawing, the window, the cache, the budget, what is refused, and life."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from patience import HANG_S, until
from slabs import check, make

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle, StorageError


def build(folder: Path, **options: Any) -> sw.TrajectoryReplayBuffer:
    """A buffer in a folder; without files where ``saves`` is False."""
    place = folder / "live" if options.pop("saves", True) else None
    return sw.TrajectoryReplayBuffer(place, **{"format": "pt", "seed": 1234, **options})


FORMATS = ["pt", "safetensors", "pkl"]


# ---- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cache", [0, 2, 10])
def test_rows_are_whole_and_tell_where_they_come_from(tmp_path: Path, format: str, cache: int) -> None:
    with build(tmp_path, cache=cache, format=format, allow_pickle=True) as buffer:
        buffer.add([make(number, epochs=number % 2) for number in range(4)])
        batch = buffer.sample(24)
        assert check(batch, 24) <= set(range(4))
        place = batch["trajectory_id"] * 1000 + batch["step"] * 2 + batch["env"]
        assert np.array_equal(place, batch["rewards"])
        buffer.flush()
        check(buffer.sample(24), 24)


def test_batches_are_tensors_where_asked_for(tmp_path: Path) -> None:
    with build(tmp_path, device="cpu") as buffer:
        trajectory = make(0)
        trajectory.forward_inputs = {"logits": torch.randn(3, 2, 4).bfloat16()}
        buffer.add([trajectory])
        batch = buffer.sample(6)
        check(batch, 6)
        assert batch["forward_inputs"]["logits"].dtype == torch.bfloat16
        rows = trajectory.forward_inputs["logits"].reshape(6, 4)[batch["step"] * 2 + batch["env"]]
        assert torch.equal(batch["forward_inputs"]["logits"], rows)
        buffer.flush()
        buffer._store.empty_cache("test")
        assert torch.equal(buffer.get(0).forward_inputs["logits"], trajectory.forward_inputs["logits"])
    with build(tmp_path / "numpy") as buffer, pytest.raises(SchemaError, match="device='cpu'"):
        buffer.add([trajectory])


def test_counts_are_of_trajectories_and_of_transitions(tmp_path: Path) -> None:
    with build(tmp_path) as buffer:
        with pytest.raises(NotReady, match=r"sample\(\): the buffer is empty; add\(\) first"):
            buffer.sample(1)
        buffer.add([])
        assert len(buffer) == buffer.stats()["transitions"] == 0
        buffer.add([make(0), make(1, steps=5)])
        assert len(buffer) == 2
        buffer.sample(16)
        buffer.flush()
        stats = buffer.stats()
        assert (stats["size"], stats["transitions"], stats["added"], stats["capacity"]) == (2, 16, 2, None)
        assert (stats["seed"], stats["format"]) == (1234, "pt")
        assert set(stats) == {
            "size",
            "capacity",
            "added",
            "transitions",
            "cached",
            "cache_bytes",
            "cache_hits",
            "cache_misses",
            "stored_bytes",
            "unsaved",
            "set_aside",
            "seed",
            "format",
        }
        for wrong in (0, -1, 2.5, True):
            with pytest.raises(SchemaError, match="batch_size: expected a whole number, at least 1"):
                buffer.sample(wrong)  # type: ignore[arg-type]


def test_batch_larger_than_the_recent_trajectories_is_not_ready(tmp_path: Path) -> None:
    with build(tmp_path, recent=1) as buffer:
        buffer.add([make(0), make(1)])
        with pytest.raises(
            NotReady,
            match=r"sample\(\): batch_size: the newest 1 trajectories hold 6 transitions, got 7; add more, or set a",
        ):
            buffer.sample(7)
        assert buffer._store._contents.calls == 0, "the random stream did not move"
        buffer.recent = None
        assert check(buffer.sample(7), 7) <= {0, 1}


def test_every_transition_of_the_window_is_as_likely_as_any_other(tmp_path: Path) -> None:
    with build(tmp_path, recent=3) as buffer:
        buffer.add([make(number, steps=1 + 3 * number) for number in range(5)])
        seen = Counter[float]()
        for _ in range(400):
            seen.update(buffer.sample(50)["rewards"].tolist())
        rows = 2 * (7 + 10 + 13)
        assert len(seen) == rows, "trajectories 2, 3 and 4, and no others"
        expected = 400 * 50 / rows
        chi = sum((count - expected) ** 2 / expected for count in seen.values())
        assert chi < rows - 1 + 5 * (2 * (rows - 1)) ** 0.5


def test_window_takes_effect_at_once(tmp_path: Path) -> None:
    for saves in (True, False):
        with build(tmp_path / str(saves), saves=saves) as buffer:
            buffer.add([make(number) for number in range(8)])
            assert check(buffer.sample(48), 48) > {7}
            for window in (2, 1, 5):
                buffer.recent = window
                assert check(buffer.sample(6), 6) <= set(range(8 - window, 8))
            buffer.recent = None
            seen = set[int]()
            for _ in range(20):
                seen |= check(buffer.sample(48), 48)
            assert seen == set(range(8))


def test_same_seed_gives_the_same_batches_and_no_other_stream_is_touched(tmp_path: Path) -> None:
    np.random.seed(5)
    torch.manual_seed(5)
    state = np.random.get_state()[1].copy(), torch.random.get_rng_state().clone()  # type: ignore[index]
    batches = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        with build(tmp_path / name, seed=seed) as buffer:
            buffer.add([make(0, steps=100)])
            batches.append([buffer.sample(50)["rewards"] for _ in range(2)])
    assert np.array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])
    assert not np.array_equal(*batches[0])
    assert np.array_equal(np.random.get_state()[1], state[0])  # type: ignore[index]
    assert torch.equal(torch.random.get_rng_state(), state[1])


# ---- alignment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_flags_and_values_are_aligned_from_memory_from_files_and_mixed(tmp_path: Path, format: str) -> None:
    flags = torch.tensor([9, 1, 2, 9, 3, 4], dtype=torch.uint8)[:, None]
    values = torch.tensor([10, 11, -1, 12, 13, -1])[:, None]
    trajectory = sw.Trajectory(rewards=torch.zeros(4, 1), terminations=flags, prev_values=values)
    for cache in (0, 1, 2):
        with build(tmp_path / str(cache), cache=cache, format=format) as buffer:
            buffer.add([trajectory, trajectory])
            for _ in range(2):
                batch = buffer.sample(8)
                assert np.array_equal(batch["terminations"], batch["step"] + 1)
                assert np.array_equal(batch["prev_values"], batch["step"] + 10)
                buffer.flush()


def test_rows_that_make_no_epochs_change_nothing(tmp_path: Path) -> None:
    with build(tmp_path) as buffer:
        buffer.add([make(0)])
        bad = make(1)
        bad.dones = torch.zeros(5, 2, dtype=torch.bool)
        with pytest.raises(
            SchemaError, match=r"dones: expected 3 rows and one more for every epoch, got 5: 3 steps do not"
        ):
            buffer.add([make(2), bad])
        assert len(buffer) == 1
        buffer.flush()
        assert [path.name for path in (tmp_path / "live").glob("trajectory_*")] == ["trajectory_0_w_0.pt"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def wrong_trajectories() -> dict[str, tuple[sw.Trajectory, str]]:
    good = make(0)
    return {
        "nothing": (sw.Trajectory(actions=good.actions), "neither rewards nor prev_logprobs"),
        "missing": (
            replace(good, next_obs={}),
            r"missing next_obs/more/image, next_obs/state; expected what the first",
        ),
        "extra": (replace(good, versions=good.rewards.clone()), "unknown versions; expected"),
        "dtype": (replace(good, rewards=good.rewards.double()), r"rewards: expected float32 rows of shape \(\)"),
        "shape": (
            replace(good, actions=torch.zeros(3, 2, 2, dtype=torch.int64)),
            r"expected int64 rows of shape \(1,\)",
        ),
        "envs": (
            replace(good, actions=torch.zeros(3, 4, 1)),
            r"actions: expected shape \(3, 2, ...\), got \(3, 4, 1\)",
        ),
        "steps": (replace(good, actions=torch.zeros(4, 2, 1)), "actions: expected 3 rows as the rewards have, got 4"),
        "one axis": (replace(good, actions=torch.zeros(3)), r"actions: expected shape \(3, 2, ...\), got \(3,\)"),
        "list": (replace(good, actions=[1, 2, 3]), "actions: expected an array or a tensor, got list"),
        "dtype that nothing keeps": (
            replace(good, actions=torch.zeros(3, 2).to(torch.float8_e4m3fnuz)),
            "got torch.float8_e4m3fnuz; cast it",
        ),
        "empty": (sw.Trajectory(rewards=torch.zeros(0, 2)), r"both at least 1, got \(0, 2\)"),
        "key": (replace(good, curr_obs={3: good.rewards}), "curr_obs: expected names as keys, got 3"),
        "weights": (replace(good, model_weights_id="../x"), "without '/'"),
        "length": (replace(good, max_episode_length=-1), "max_episode_length: expected a whole number"),
    }


@pytest.mark.parametrize("what", wrong_trajectories())
@pytest.mark.parametrize("saves", [True, False])
def test_wrong_trajectory_is_refused_whole(tmp_path: Path, what: str, saves: bool) -> None:
    wrong, words = wrong_trajectories()[what]
    with build(tmp_path, saves=saves) as buffer:
        buffer.add([make(0)])
        buffer.flush()
        before = buffer.stats()
        with pytest.raises(SchemaError, match=words):
            buffer.add([make(5), wrong])
        buffer.flush()
        assert buffer.stats() == before
        buffer.add([make(1)])
        assert check(buffer.sample(12), 12) <= {0, 1}
        assert buffer.get(1).rewards[0, 0] == 1000
    if saves:
        assert len(list((tmp_path / "live").glob("trajectory_*.pt"))) == 2


def test_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    turned = make(1)
    turned.curr_obs = dict(reversed(turned.curr_obs.items()))
    with build(tmp_path) as buffer:
        buffer.add([make(0), turned])
        for _ in range(5):
            check(buffer.sample(12), 12)


def test_tensors_on_a_gpu_are_refused(tmp_path: Path) -> None:
    with (
        build(tmp_path) as buffer,
        pytest.raises(SchemaError, match=r"rewards: expected a tensor on the CPU, got one on meta"),
    ):
        buffer.add([sw.Trajectory(rewards=torch.zeros(2, 2, device="meta"))])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "zip"}, "format: expected 'pt', 'safetensors' or 'pkl', got 'zip'"),
        ({"format": "pkl"}, "allow_pickle=True"),
        ({"saves": False, "cache": 0}, "cache: with folder=None every trajectory is in memory"),
        ({"saves": False, "cache_bytes": 100}, "cache_bytes: with folder=None every trajectory is in memory"),
        ({"cache": 0, "cache_bytes": 100}, "cache_bytes: with cache=0 there is no cache"),
        ({"cache": -1}, "cache: expected a whole number, at least 0"),
        ({"capacity": 0}, "capacity: expected a whole number, at least 1"),
        ({"recent": 0}, "recent: expected a whole number, at least 1"),
        ({"max_bytes": 0}, "max_bytes: expected a whole number, at least 1"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        build(tmp_path, **options)
    assert not (tmp_path / "live").exists()


# ---- cache and budget ------------------------------------------------------------------------------------------------


def test_cache_lets_the_oldest_go_and_counts(tmp_path: Path) -> None:
    with build(tmp_path, cache=2) as buffer:
        buffer.add([make(number) for number in range(3)])
        buffer.add([make(3, steps=50)])
        buffer.flush()
        assert buffer.stats()["cached"] == 2
        assert [number for number in range(4) if buffer._store._contents.rows.slab(number) is not None] == [2, 3]
        seen = Counter[int]()
        for _ in range(20):
            seen.update(buffer.sample(100)["trajectory_id"].tolist())
        stats = buffer.stats()
        assert stats["cache_hits"] == seen[2] + seen[3]
        assert stats["cache_misses"] == seen[0] + seen[1] > 0
        assert buffer.get(2).rewards[0, 0] == 2000, "a longer one came, and the older stays as it was"
        buffer._store.empty_cache("test")
        assert buffer.stats()["cached"] == buffer.stats()["cache_bytes"] == 0
        check(buffer.sample(50), 50)
        buffer.add([make(4)])
        buffer.flush()
        assert buffer.stats()["cached"] == 1
        assert (tmp_path / "live" / "trajectory_4_w_0.pt").exists()


def test_cache_is_bounded_in_bytes(tmp_path: Path) -> None:
    with build(tmp_path / "one") as buffer:
        buffer.add([make(0)])
        waiting = buffer.stats()["cache_bytes"]
        buffer.flush()
        one = buffer.stats()["cache_bytes"]
        assert waiting >= one
    with build(tmp_path, cache=100, cache_bytes=3 * one) as buffer:
        buffer.add([make(number) for number in range(8)])
        buffer.flush()
        assert 1 <= buffer.stats()["cached"] <= 3
        assert buffer.stats()["cache_bytes"] <= 3 * one
        buffer.add([make(9, steps=100)])
        buffer.flush()
        assert buffer.stats()["cached"] == 0, "larger than the cache by itself"
        check(buffer.sample(100), 100)
    with build(tmp_path, saves=False) as buffer:
        buffer.add([make(0)])
        one = buffer.stats()["cache_bytes"]
    with build(tmp_path, saves=False, max_bytes=3 * one) as buffer:
        buffer.add([make(number) for number in range(8)])
        assert len(buffer) == 3
        assert check(buffer.sample(18), 18) <= {5, 6, 7}
        with pytest.raises(SchemaError, match=f"max_bytes={3 * one}; give a larger max_bytes"):
            buffer.add([make(9, steps=100)])


@pytest.mark.parametrize("budget", [{"capacity": 3}, {"max_bytes": 3}])
def test_budget_deletes_the_oldest_also_on_disk(tmp_path: Path, budget: dict[str, int]) -> None:
    with build(tmp_path / "one") as buffer:
        buffer.add([make(0)])
        one = buffer.stats()["stored_bytes"]
    budget = {name: value if name == "capacity" else value * one for name, value in budget.items()}
    with build(tmp_path, **budget) as buffer:  # type: ignore[arg-type]
        for number in range(7):
            buffer.add([make(number)])
        assert (len(buffer), buffer.stats()["transitions"], buffer.stats()["stored_bytes"]) == (3, 18, 3 * one)
        buffer.flush()
        names = sorted(path.name for path in (tmp_path / "live").glob("trajectory_*"))
        assert names == [f"trajectory_{number}_w_0.pt" for number in (4, 5, 6)]
        with pytest.raises(StaleHandle, match="there is no trajectory 3"):
            buffer.get(3)
    with build(tmp_path) as buffer:
        assert check(buffer.sample(18), 18) <= {4, 5, 6}
        assert [number for number, _ in buffer.trajectories()] == [4, 5, 6]


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_what_the_caller_does_to_its_tensors_later_does_not_matter(tmp_path: Path) -> None:
    with build(tmp_path, cache=1) as buffer:
        given = [make(number) for number in range(3)]
        buffer.add(given)
        for trajectory in given:
            for tensor in (trajectory.rewards, trajectory.actions, trajectory.curr_obs["state"]):
                tensor.zero_()
        check(buffer.sample(18), 18)
        buffer.flush()
        buffer._store.empty_cache("test")
        check(buffer.sample(18), 18)


def test_sampling_right_after_adding_needs_no_file(tmp_path: Path) -> None:
    with build(tmp_path, cache=0) as buffer:
        for number in range(60):
            buffer.add([make(number)])
            check(buffer.sample(6), 6)


def test_unwritable_folder_is_told_and_nothing_is_lost(tmp_path: Path) -> None:
    buffer = build(tmp_path, cache=0)
    buffer.add([make(0)])
    buffer.flush()
    (tmp_path / "live").rename(tmp_path / "away")
    buffer.add([make(1)])
    until(lambda: buffer._store._saver is None or buffer._store._saver._failure is not None)
    with pytest.raises(StorageError, match=r"sample\(\): 1 trajectories are not saved: .*No such file.*tries again"):
        buffer.sample(1)
    assert buffer._store._contents.rows.slab(1) is not None
    for _ in range(2):
        with pytest.raises(StorageError, match=r"add\(\): 1 trajectories are not saved"):
            buffer.add([make(2)])
    assert (len(buffer), buffer.stats()["transitions"], buffer.stats()["unsaved"]) == (2, 12, 1)
    with pytest.raises(StorageError, match=r"flush\(\): "):
        buffer.flush()
    with pytest.raises(StorageError, match=r"save\(\): "):
        buffer.save(tmp_path / "checkpoint")
    (tmp_path / "away").rename(tmp_path / "live")
    buffer.add([make(2)])
    buffer.flush()
    check(buffer.sample(18), 18)
    (tmp_path / "live").rename(tmp_path / "away")
    buffer.add([make(3)])
    with pytest.raises(StorageError, match=r"close\(\): 1 trajectories are not saved"):
        buffer.close()
    buffer.close()
    (tmp_path / "away").rename(tmp_path / "live")
    with build(tmp_path) as again:
        assert [number for number, _ in again.trajectories()] == [0, 1, 2]
        again.add([make(3)])
        check(again.sample(24), 24)


def test_full_disk_is_told_and_what_was_there_stays(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
import sharpwave as sw
from slabs import make, check
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes beyond the limit fail, as on a full disk
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt")
buffer.add([make(0)])
buffer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
buffer.add([make(1, steps=200)])
try:
    buffer.flush()
except sw.errors.StorageError as error:
    print(error)
print(len(buffer), buffer.stats()["transitions"], buffer.stats()["unsaved"])
check(buffer.sample(100), 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
buffer.flush()
buffer.close()
"""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "live", here], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    error, counts = done.stdout.splitlines()
    assert error.startswith("flush(): 1 trajectories are not saved: cannot write ")
    assert "trajectory_1_w_0.pt': File too large; they are kept in memory" in error
    assert counts == "2 406 1"
    assert [path for path in (tmp_path / "live").iterdir() if path.name.endswith(".tmp")] == []
    with build(tmp_path) as buffer:
        assert buffer.stats()["transitions"] == 406
        check(buffer.sample(300), 300)


def test_buffer_that_nobody_closes_saves_everything(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[2])
import sharpwave as sw
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt")
buffer.add([make(number) for number in range(200)])
"""
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, tmp_path / "live", here], check=True, timeout=60)
    with build(tmp_path) as buffer:
        assert len(buffer) == 200
    for turn in range(20):  # the thread is somewhere else every time
        buffer = build(tmp_path)
        buffer.add([make(number) for number in range(1 + turn)])
        time.sleep(turn / 4_000)
        del buffer
    with build(tmp_path) as buffer:
        assert len(buffer) == 200 + 210


def test_one_writer_and_four_readers_get_whole_rows(tmp_path: Path) -> None:
    seconds = float(os.environ.get("SHARPWAVE_RACE_S", "10" if os.environ.get("SHARPWAVE_SOAK") else "3"))
    buffer = build(tmp_path, cache=5, recent=20, capacity=40)
    buffer.add([make(0)])
    errors: list[BaseException] = []
    batches = [0] * 4
    number, deadline, hang = 1, time.monotonic() + seconds, time.monotonic() + seconds + 2 * HANG_S

    def is_over() -> bool:
        now = time.monotonic()
        return bool(errors) or now > hang or (now > deadline and min(batches) > 20 and number > 50)

    def read(reader: int) -> None:
        try:
            while not is_over():
                check(buffer.sample(6), 6)
                batches[reader] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(4)]
    for thread in threads:
        thread.start()
    while not is_over():
        buffer.add([make(number % 900)])
        number += 1
        if number % 50 == 0:
            buffer.save(tmp_path / "checkpoint")
    for thread in threads:
        thread.join()
    buffer.close()
    assert errors == []
    assert min(batches) > 20
    assert number > 50
    print(f"{number} trajectories, {sum(batches)} batches in {seconds} s")


# ---- life ------------------------------------------------------------------------------------------------------------


def test_folder_is_a_path_or_none(tmp_path: Path) -> None:
    with sw.TrajectoryReplayBuffer(str(tmp_path / "live")) as buffer:
        assert buffer.folder == tmp_path / "live"
    with sw.TrajectoryReplayBuffer(None) as buffer:
        assert buffer.folder is None
    for address in ("file://live", "shm://live", "s3://live"):
        with pytest.raises(SchemaError, match="folder: expected a path"):
            sw.TrajectoryReplayBuffer(address)


def test_one_trajectory_is_added_without_a_list(tmp_path: Path) -> None:
    with build(tmp_path) as buffer:
        buffer.add(make(0))
        asyncio.run(buffer.add_async(make(1)))
        assert [number for number, _ in buffer.trajectories()] == [0, 1]
        check(buffer.sample(12), 12)


def test_batch_that_max_bytes_never_allows_is_refused(tmp_path: Path) -> None:
    for saves in (True, False):
        with build(tmp_path, saves=saves, max_bytes=20_000) as buffer:
            with pytest.raises(NotReady):
                buffer.sample(100_000)
            buffer.add(make(0))
            with pytest.raises(NotReady, match="hold 6 transitions, got 20"):
                buffer.sample(20)
            with pytest.raises(SchemaError, match=r"batch_size: expected at most \d+, which is all that max_bytes="):
                buffer.sample(100_000)


def test_repr_tells_place_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffers = {"in memory": sw.TrajectoryReplayBuffer(None), "run/buffer": sw.TrajectoryReplayBuffer("run/buffer")}
    for place, buffer in buffers.items():
        assert repr(buffer) == f"<TrajectoryReplayBuffer {place}: 0 trajectories, 0 transitions>"
        buffer.add([make(number, steps=25) for number in range(3)])
        assert repr(buffer) == f"<TrajectoryReplayBuffer {place}: 3 trajectories, 150 transitions>"
        buffer.close()
        assert repr(buffer) == f"<TrajectoryReplayBuffer {place}: closed>"


def test_seed_is_random_unless_given(tmp_path: Path) -> None:
    with sw.TrajectoryReplayBuffer(None) as one, sw.TrajectoryReplayBuffer(None) as other:
        assert one.stats()["seed"] != other.stats()["seed"]
    with sw.TrajectoryReplayBuffer(tmp_path / "live", seed=5) as buffer:
        buffer.add(make(0))
    with sw.TrajectoryReplayBuffer(tmp_path / "live", seed=6) as buffer:
        assert buffer.stats()["seed"] == 5, "a folder that exists has its own"


def test_capacity_bounds_what_is_kept_in_memory(tmp_path: Path) -> None:
    with sw.TrajectoryReplayBuffer(None, capacity=2, recent=1) as buffer:
        buffer.add([make(number) for number in range(5)])
        assert (len(buffer), buffer.capacity, buffer.recent) == (2, 2, 1)
        assert (buffer.stats()["capacity"], buffer.stats()["added"]) == (2, 5)
        assert check(buffer.sample(6), 6) == {4}
    for wrong in (0, -1, 1.5, True, "all"):
        with sw.TrajectoryReplayBuffer(None) as buffer, pytest.raises(SchemaError, match="recent: expected a whole"):
            buffer.recent = wrong  # type: ignore[assignment]


def test_folder_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    with build(tmp_path / "whole") as whole:
        whole.add([make(0, steps=40)])
        expected = [whole.sample(20)["rewards"] for _ in range(4)]
    with build(tmp_path) as buffer:
        buffer.add([make(0, steps=40)])
        got = [buffer.sample(20)["rewards"] for _ in range(2)]
    with build(tmp_path) as buffer:
        got += [buffer.sample(20)["rewards"] for _ in range(2)]
        buffer.add([make(1)])
        assert [number for number, _ in buffer.trajectories()] == [0, 1]
    assert np.array_equal(got, expected)


def test_folder_has_one_owner(tmp_path: Path) -> None:
    with build(tmp_path) as buffer:
        with pytest.raises(
            StorageError, match=rf"another buffer \(process {os.getpid()}\) has it open; close that one"
        ):
            build(tmp_path)
        buffer.add([make(0)])
    build(tmp_path).close()


def test_clear_deletes_and_ids_go_on(tmp_path: Path) -> None:
    with build(tmp_path) as buffer:
        buffer.add([make(0), make(1)])
        buffer.clear()
        assert len(buffer) == buffer.stats()["transitions"] == buffer.stats()["cached"] == 0
        with pytest.raises(NotReady):
            buffer.sample(1)
        buffer.flush()
        assert list((tmp_path / "live").glob("trajectory_*")) == []
        buffer.add([sw.Trajectory(rewards=np.zeros((2, 2), np.float32))])
        assert [number for number, _ in buffer.trajectories()] == [2], "no id is given twice, and a row may be another"
    with build(tmp_path) as buffer:
        assert set(buffer.sample(4)) == {"rewards", "trajectory_id", "step", "env"}


@pytest.mark.parametrize("saves", [True, False])
def test_closed_buffer_says_so(tmp_path: Path, saves: bool) -> None:
    buffer = build(tmp_path, saves=saves)
    buffer.add([make(0)])
    buffer.close()
    buffer.close()
    for call in (
        lambda: buffer.add([make(1)]),
        lambda: asyncio.run(buffer.add_async([make(1)])),
        lambda: buffer.sample(1),
        lambda: asyncio.run(buffer.sample_async(1)),
        lambda: buffer.get(0),
        buffer.trajectories,
        buffer.flush,
        lambda: asyncio.run(buffer.flush_async()),
        buffer.clear,
        buffer.stats,
        lambda: len(buffer),
        lambda: buffer.save(tmp_path / "c"),
        lambda: asyncio.run(buffer.save_async(tmp_path / "c")),
        lambda: buffer.load(tmp_path / "live"),
    ):
        with pytest.raises(ClosedError, match="the buffer is closed"):
            call()
    with pytest.raises(TypeError, match="belongs to one process"):
        buffer.__reduce__()


def test_child_of_a_fork_does_not_use_its_parent_s_buffer(tmp_path: Path) -> None:
    code = """
import os, sys
sys.path.insert(0, sys.argv[2])
import sharpwave as sw
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt")
buffer.add([make(0)])
pid = os.fork()
if pid == 0:
    try:
        buffer.sample(1)
    except sw.errors.ClosedError as error:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
buffer.close()
"""
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "live", here], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "7", done.stderr


def test_memory_of_the_cache_goes_back(tmp_path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    rewards = np.zeros((1_000, 100), np.float32)  # 400 kB
    obs = {"state": np.zeros((1_000, 100, 10), np.float32)}
    with build(tmp_path, saves=False, capacity=2) as buffer:
        for _ in range(10):
            buffer.add([sw.Trajectory(rewards=rewards, curr_obs=obs)])
        before = resident()
        for _ in range(60):
            buffer.add([sw.Trajectory(rewards=rewards, curr_obs=obs)])
            buffer.sample(100)
        assert resident() - before < 60 * 4.4e6 / 3, "it keeps three of them, not sixty"


def test_an_event_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    async def work(buffer: sw.TrajectoryReplayBuffer) -> dict[str, Any]:
        await buffer.add_async(make(number) for number in range(3))
        both = await asyncio.gather(buffer.sample_async(12), buffer.save_async(tmp_path / "checkpoint"))
        await buffer.flush_async()
        assert buffer.stats()["unsaved"] == 0
        return both[0]

    with build(tmp_path) as buffer:
        check(asyncio.run(work(buffer)), 12)
        with pytest.raises(NotReady, match="batch_size"):
            asyncio.run(buffer.sample_async(10_000))
    with build(tmp_path / "again") as buffer:
        buffer.load(tmp_path / "checkpoint")
        assert len(buffer) == 3
