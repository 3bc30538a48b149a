"""compat.rlinf: RLinf's tutorial, snippet by snippet only import line and paths changed; then its flags."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slabs import check, make, read_rlinf, write_rlinf

import sharpwave as sw
from sharpwave.compat.rlinf import (
    PreloadReplayBufferDataset,
    PriorityStore,
    ReplayBufferDataset,
    Trajectory,
    TrajectoryReplayBuffer,
    replay_buffer_collate_fn,
)
from sharpwave.errors import NotReady, SchemaError, StorageError

QUICK_START = """
from sharpwave.compat.rlinf import TrajectoryReplayBuffer

buffer = TrajectoryReplayBuffer(
    seed=1234,
    storage_dir="path/to/buffer",
    enable_cache=True,
    cache_size=5,
    storage_format="pt",
    sample_window_size=100,
    save_trajectories=True,
)
"""
ADD = """
# trajectories is List[Trajectory]
buffer.add_trajectories(trajectories)
"""
SAMPLE = """
batch = buffer.sample(num_chunks=256)
# batch shape: [num_chunks, ...]
"""
SAVE_AND_LOAD = """
buffer.save_checkpoint("path/to/ckpt")

buffer.load_checkpoint(
    "path/to/ckpt",
    is_distributed=True,
    local_rank=0,
    world_size=4,
)
"""
CLEANUP = """
buffer.close()        # close async save thread
buffer.clear()        # clear index and counters
buffer.clear_cache()  # clear cache and close thread
"""


def run(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"trajectories": [make(number, steps=20) for number in range(8)]}
    exec(QUICK_START, names)
    exec(ADD, names)
    exec(SAMPLE, names)
    assert check(names["batch"], 256) <= set(range(8))
    assert isinstance(names["batch"]["rewards"], torch.Tensor)
    exec(SAVE_AND_LOAD, names)
    assert len(names["buffer"]) == 2, "a quarter of eight"
    assert sorted(read_rlinf(tmp_path / "path/to/ckpt")) == list(range(8))
    exec(CLEANUP, names)
    assert len(names["buffer"]) == 0
    assert (tmp_path / "path/to/ckpt/trajectory_7_w_0.pt").exists()

    done = run(
        "sharpwave.compat.rlinf",
        "--load-path",
        "path/to/ckpt",
        "--num-chunks",
        1024,
        "--cache-size",
        10,
        "--enable-cache",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "curr_obs/state: (320, 5) torch.float32" in done.stdout, "all that there is, as upstream clamps"
    assert "dones: (320,) torch.bool" in done.stdout


def test_tool_of_the_tutorial_runs(tmp_path: Path) -> None:
    for rank in range(2):
        with TrajectoryReplayBuffer(storage_dir=tmp_path / "buffer" / f"rank_{rank}") as buffer:
            buffer.add_trajectories([make(100 * rank + number) for number in range(20)])
    tool = "sharpwave.compat.rlinf.merge_or_split"
    done = run(tool, "--source-path", "buffer", "--save-path", "merged", "--copy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "40 trajectories in merged\n"), done.stderr
    done = run(tool, "--source-path", "merged", "--save-path", "split", "--split-count", 30, "--copy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "30 trajectories in split\n"), done.stderr
    rewards = [int(tree["rewards"][0, 0]) // 1000 for tree in read_rlinf(tmp_path / "split").values()]
    assert rewards == [100 * (number % 2) + number // 2 for number in range(30)], "interleaved by original id"
    done = run(tool, "--source-path", "merged", "--save-path", "more", "--split-count", 41, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("SchemaError: split: split_count: expected at most the 40 trajectories there, got 41")
    done = run("sharpwave.compat.rlinf", "--load-path", "nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "there is no such folder" in done.stderr


def test_names_of_today_work_too(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=tmp_path / "live", trajectory_format="pkl", allow_pickle=True
    ) as b:
        b.add_trajectories([make(0)])
        b.flush()
        assert (tmp_path / "live" / "trajectory_0_w_0.pkl").exists()
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=-1) as buffer:
        assert buffer.storage_dir is None
        buffer.add_trajectories([make(number) for number in range(200)])
        assert len(buffer) == 200
    assert issubclass(Trajectory, sw.Trajectory)


def test_returns_are_upstream_s(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(storage_dir=tmp_path) as buffer:
        with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer") as raised:
            buffer.sample(4)
        assert isinstance(raised.value, NotReady)
        with pytest.raises(SchemaError, match="num_chunks"):
            buffer.sample()
        buffer.add_trajectories([make(0)])
        assert buffer.get_stats() == {"num_trajectories": 1, "total_samples": 6, "cache_size": 1}
        assert asyncio.run(buffer.is_ready_async(1))
        assert set(buffer.sample_chunks(3)) == {"actions", "rewards", "dones", "prev_values", "curr_obs", "next_obs"}
        buffer.clear_cache()
        buffer.add_trajectories([make(1)])
        buffer.flush()
        assert (tmp_path / "trajectory_1_w_0.pt").exists(), "clearing the cache does not end saving"


def test_flag_brings_upstream_s_behaviour_back(tmp_path: Path) -> None:
    odd = make(1)
    odd.forward_inputs = {"prompt": ["a", "b"], "flat": torch.zeros(3)}
    empty = Trajectory(actions=torch.zeros(3, 2, 1))
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "strict") as strict:
        strict.add_trajectories([make(0)])
        for wrong in (odd, empty):
            with pytest.raises(SchemaError):
                strict.add_trajectories([wrong])
        with pytest.raises(SchemaError, match="at most the 6 transitions"):
            strict.sample(7)
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "loose", as_upstream=True) as loose:
        loose.add_trajectories([make(0), odd, empty])
        assert (len(loose), loose.num_skipped) == (2, 1)
        first = loose.sample(1_000)
        check(first, 12)
        loose.sample(5)
        loose.save_checkpoint(tmp_path / "checkpoint")
        loose.load_checkpoint(tmp_path / "checkpoint")
        assert torch.equal(loose.sample(1_000)["rewards"], first["rewards"]), "upstream starts its stream anew"
    with TrajectoryReplayBuffer(save_trajectories=False, as_upstream=True) as memory:
        memory.add_trajectories([make(0)])
        memory.clear_cache()
        assert len(memory) == 0
    with pytest.raises(ValueError, match="enable_cache=True"):
        TrajectoryReplayBuffer(save_trajectories=False, enable_cache=False)


def test_folder_of_upstream_is_looked_at_without_a_change(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "rlinf", {0: make(0, epochs=1)}, era=2)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rlinf").iterdir()}
    done = run("sharpwave.compat.rlinf", "--load-path", "rlinf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "actions: (4, 1) torch.int64" in done.stdout
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "rlinf").iterdir()} == before
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "live") as buffer, pytest.raises(StorageError):
        buffer.load_checkpoint(tmp_path / "live" / "nowhere")


def test_positional_arguments_are_those_of_either_version(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(7, True, 3, str(tmp_path / "first"), "pt", 10, True) as buffer:
        buffer.add_trajectories([make(0)])
        assert (buffer.storage_dir, buffer.sample_window_size) == (tmp_path / "first", 10)
    with TrajectoryReplayBuffer(7, True, 3, 10, True, str(tmp_path / "today"), "pt") as buffer:
        buffer.add_trajectories([make(0)])
        assert (buffer.storage_dir, buffer.sample_window_size) == (tmp_path / "today", 10)
    assert (tmp_path / "first" / "trajectory_0_w_0.pt").exists()
    assert (tmp_path / "today" / "trajectory_0_w_0.pt").exists()
    with TrajectoryReplayBuffer(7, True, 3, 10) as buffer:
        assert buffer.storage_dir is None, "today's saves only if told to"
    with pytest.raises(SchemaError, match="at most 7 positional arguments, got 8"):
        TrajectoryReplayBuffer(7, True, 3, 10, True, "a", "pt", 1)
    with pytest.raises(SchemaError, match="sample_window_size: given twice"):
        TrajectoryReplayBuffer(7, True, 3, 10, sample_window_size=5)
    with pytest.raises(SchemaError, match="storage_dir='a' and auto_save_path='b' are one argument"):
        TrajectoryReplayBuffer(storage_dir="a", auto_save_path="b")
    with pytest.raises(SchemaError, match="sample_window_size"):
        TrajectoryReplayBuffer(7, True, 3, 2.5)
    assert not Path("a").exists()


def test_upstream_s_names_of_paths_work(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "live") as buffer:
        buffer.add_trajectories(None)
        buffer.add_trajectories([])
        assert len(buffer) == 0
        buffer.add_trajectories([make(0), make(1)])
        buffer.save_checkpoint(save_path=tmp_path / "one")
        buffer.save_checkpoint(path=tmp_path / "other")
        buffer.load_checkpoint(load_path=str(tmp_path / "one"), is_distributed=True, local_rank=1, world_size=2)
        assert len(buffer) == 1
        buffer.load_checkpoint(path=tmp_path / "other")
        assert len(buffer) == 2
        for call in (buffer.save_checkpoint, buffer.load_checkpoint):
            with pytest.raises(SchemaError, match="path: expected a path, got ''"):
                call()
        with pytest.raises(SchemaError, match="load_path and path are one argument"):
            buffer.load_checkpoint(tmp_path / "one", load_path=tmp_path / "other")


@pytest.mark.parametrize("as_upstream", [False, True])
def test_buffer_that_saves_nothing_has_checkpoints(tmp_path: Path, as_upstream: bool) -> None:
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=3, as_upstream=as_upstream) as buffer:
        buffer.add_trajectories([make(number) for number in range(5)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
    assert sorted(read_rlinf(tmp_path / "checkpoint")) == [2, 3, 4]
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=3) as buffer:
        buffer.load_checkpoint(tmp_path / "checkpoint")
        assert check(buffer.sample(18), 18) <= {2, 3, 4}


def test_split_of_the_tutorial_s_folder_after_its_load(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "buffer") as buffer:
        buffer.add_trajectories([make(number) for number in range(40)])
        buffer.save_checkpoint(tmp_path / "ckpt")
        buffer.load_checkpoint(tmp_path / "ckpt", is_distributed=True, local_rank=0, world_size=4)
        assert len(buffer) == 10
    tool = "sharpwave.compat.rlinf.merge_or_split"
    done = run(tool, "--source-path", "buffer", "--save-path", "split", "--split-count", 30, "--copy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "30 trajectories in split\n"), done.stderr
    found = read_rlinf(tmp_path / "split").values()
    assert [int(tree["rewards"][0, 0]) // 1000 for tree in found] == list(range(30))


# ---- the names besides -----------------------------------------------------------------------------------------------


def rollout(number: int, epochs: int = 1, **fields: Any) -> Trajectory:
    """Six steps of two environments; a human acts in the second one, in steps 1 and 4, in 4 with both hands."""
    flags = torch.zeros(6, 2, 2, dtype=torch.bool)
    flags[1, 1, 0] = flags[4, 1, :] = True
    return Trajectory(**{**vars(make(number, steps=6, epochs=epochs)), "intervene_flags": flags, **fields})


def test_steps_in_which_a_human_acted_are_taken_out() -> None:
    whole = rollout(3, versions=torch.ones(6, 2, 1))
    (taken,) = whole.extract_intervene_traj() or []
    assert isinstance(taken, Trajectory)
    assert (taken.max_episode_length, taken.model_weights_id) == (20, "w_0")
    assert taken.rewards.tolist() == [[3003.0], [3009.0]], "steps 1 and 4 of the second environment"
    assert taken.curr_obs["state"][..., 0].tolist() == [[3003.0], [3009.0]]
    assert taken.prev_values.tolist() == [[3003.0], [3009.0]], "without the bootstrap value, which is no step's"
    assert taken.dones.tolist() == [[True], [True], [True]], "with the flag at the reset"
    assert taken.versions is None
    (both_hands,) = whole.extract_intervene_traj(mode="all") or []
    assert both_hands.rewards.tolist() == [[3009.0]]
    with TrajectoryReplayBuffer(auto_save=False) as buffer:
        buffer.add_trajectories([taken])
        check(buffer.sample(2), 2)


def test_flags_of_several_epochs_belong_to_the_steps_that_are_taken_out() -> None:
    flags = torch.zeros(6, 2, 1, dtype=torch.bool)
    flags[:3, 0] = flags[5, 0] = True
    (taken,) = rollout(0, epochs=2, intervene_flags=flags).extract_intervene_traj() or []
    assert taken.rewards.tolist() == [[0.0], [2.0], [4.0], [10.0]]
    assert taken.prev_values.tolist() == taken.rewards.tolist()
    assert taken.dones.tolist() == [[False], [False], [False], [False]]
    whole = rollout(0, epochs=2, intervene_flags=flags)
    whole.dones = torch.tensor([9, 0, 1, 2, 9, 3, 4, 5])[:, None].expand(8, 2).contiguous()
    (taken,) = whole.extract_intervene_traj() or []
    assert taken.dones.tolist() == [[0], [1], [2], [5]]


def test_nothing_is_taken_out_where_no_human_acted() -> None:
    assert rollout(0, intervene_flags=None).extract_intervene_traj() is None
    assert rollout(0, intervene_flags=torch.zeros(6, 2, 3, dtype=torch.bool)).extract_intervene_traj("all") is None
    arrays = Trajectory(rewards=np.ones((2, 1), np.float32), intervene_flags=np.array([[True], [False]]))
    (taken,) = arrays.extract_intervene_traj() or []
    assert isinstance(taken.rewards, np.ndarray), "arrays stay arrays"
    assert taken.rewards.shape == (1, 1)
    with pytest.raises(SchemaError, match="intervene_flags: expected bool, got int64"):
        rollout(0, intervene_flags=torch.ones(6, 2, dtype=torch.int64)).extract_intervene_traj()
    with pytest.raises(SchemaError, match="mode"):
        rollout(0).extract_intervene_traj("most")


def test_store_of_priorities_keeps_the_highest_and_counts_what_it_lost() -> None:
    def of(version: float) -> Trajectory:
        return Trajectory(versions=torch.full((2, 2, 1), version))

    store = PriorityStore(maxsize=3)
    first, second = of(5.0), of(5.0)
    assert [store.add((5, 5.0), one) for one in (first, second)] == [True, True]
    assert store.add((4, 4.9), of(4.0))
    assert not store.add((4, 4.8), of(4.0)), "lower than all that are there"
    assert store.get_metric() == {5: {"ratio": 2 / 3}, 4: {"ratio": 1 / 3}, "discarded_unused": 1}
    top = store.topn(2)
    assert top[0] is second, "the newer one of two that are equal"
    assert top[1] is first
    assert store.add((6, 6.0), of(6.0))
    assert store.get_metric()["discarded_unused"] == 2, "the lowest one went, never used"
    assert store.add((7, 7.0), of(7.0))
    assert store.get_metric()["discarded_unused"] == 2, "the older one of the fives went, and was used"
    store.remove_below(7)
    assert len(store) == 1
    assert store.get_metric() == {7: {"ratio": 1.0}, "discarded_unused": 3}
    assert len(store.topn(9)) == 1
    assert PriorityStore(1).get_metric() == {"discarded_unused": 0}
    for wrong in ((1,), (float("nan"), 1.0)):
        with pytest.raises(SchemaError, match="priority: expected two numbers"):
            store.add(wrong, of(0.0))  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="maxsize"):
        PriorityStore(0)
    with pytest.raises(SchemaError, match="n: "):
        store.topn(0)


def test_attributes_are_upstream_s(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(seed=5, storage_dir=tmp_path / "live", sample_window_size=-1) as buffer:
        assert (buffer.seed, buffer.storage_format, buffer.trajectory_format) == (5, "pt", "pt")
        assert (buffer.save_trajectories, buffer.auto_save, buffer.enable_cache) == (True, True, True)
        assert buffer.auto_save_path == str(tmp_path / "live")
        assert (buffer.size, buffer.total_samples, buffer.sample_window_size) == (0, 0, 0)
        buffer.logger.debug("there")
        buffer.add_trajectories([make(0), make(1)])
        buffer.sample_window_size = 1
        assert check(buffer.sample(6), 6) == {1}
        buffer.sample_window_size = -3
        assert buffer.sample_window_size == 0
        for name in ("seed", "storage_format", "auto_save", "enable_cache", "size"):
            with pytest.raises(AttributeError):
                setattr(buffer, name, 1)
    with TrajectoryReplayBuffer(auto_save=False) as buffer:
        assert (buffer.auto_save, buffer.auto_save_path) == (False, None)


def test_names_that_upstream_s_viewer_and_workers_read(tmp_path: Path) -> None:
    given = make(7, steps=4, epochs=2, weights="w_9")
    given.prev_logprobs = torch.zeros(4, 2, 3)
    with TrajectoryReplayBuffer(storage_dir=tmp_path) as buffer:
        buffer.add_trajectories([given, given])
        assert buffer._trajectory_id_list == [0, 1]
        assert buffer._trajectory_index[1] == {
            "num_samples": 8,
            "trajectory_id": 1,
            "max_episode_length": 20,
            "shape": (4, 2, 3),
            "model_weights_id": "w_9",
        }
        found = buffer._load_trajectory(1, "w_9")
        assert isinstance(found, Trajectory)
        assert torch.equal(found.dones, given.dones), "as it was added"
        flat = buffer._flatten_trajectory(given)
        check(flat, 8)
        assert flat["rewards"].tolist() == list(range(7000, 7008)), "steps first"
        assert flat["prev_logprobs"].shape == (8, 3)


def test_today_s_names_bring_today_s_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer(trajectory_format="pt") as buffer:
        assert not buffer.auto_save
    with (
        pytest.warns(UserWarning, match="auto_save_path='live': nothing is saved there without auto_save=True"),
        TrajectoryReplayBuffer(auto_save_path="live") as buffer,
    ):
        assert not buffer.auto_save
    with TrajectoryReplayBuffer(auto_save_path="live", auto_save=True) as buffer:
        assert buffer.auto_save
    with TrajectoryReplayBuffer(storage_dir="first") as buffer:
        assert buffer.auto_save
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "live"]


def test_window_of_a_buffer_without_files_is_what_it_keeps(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(auto_save=False, sample_window_size=2, max_trajectories=5) as buffer:
        kept = {2: 2, 4: 4, 0: 5, 3: 3}
        for window, count in kept.items():
            buffer.sample_window_size = window
            buffer.add_trajectories([make(number) for number in range(7)])
            assert buffer._trajectory_id_list[-1] % 7 == 6
            assert len(buffer) == count
    with TrajectoryReplayBuffer(storage_dir=tmp_path, sample_window_size=2) as buffer:
        buffer.add_trajectories([make(number) for number in range(7)])
        assert len(buffer) == 7, "with files the window only says what is drawn"


def test_errors_name_upstream_s_arguments_and_calls(tmp_path: Path) -> None:
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "live") as buffer:
        buffer.add_trajectories([make(0)])
        buffer.save_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(
            SchemaError, match=r"load_checkpoint\(\): local_rank: expected 0 to 1 \(world_size=2\), got 2"
        ):
            buffer.load_checkpoint(tmp_path / "checkpoint", is_distributed=True, local_rank=2, world_size=2)
        with pytest.raises(SchemaError, match=r"sample\(\): num_chunks: expected at most the 6 transitions"):
            buffer.sample(7)
        with pytest.raises(SchemaError, match=r"add_trajectories\(\): "):
            buffer.add_trajectories([5])
        with pytest.raises(sw.errors.StaleHandle, match=r"get_trajectory\(\): there is no trajectory 7"):
            buffer.get_trajectory(7)
        assert len(buffer) == 1
    assert len(buffer) == 1, "a closed buffer still counts"
    with pytest.raises(sw.errors.ClosedError, match=r"add_trajectories\(\): the buffer is closed"):
        buffer.add_trajectories([make(1)])


# ---- folders that RLinf reads while they are open --------------------------------------------------------------------


def rlinf_finds(folder: Path, count: int) -> dict[int, Any]:
    """What RLinf finds, once it finds so many. Its two files are written one after the other."""
    end = time.monotonic() + 20
    while True:
        try:
            found = read_rlinf(folder)
            assert len(found) == count
            return found
        except (FileNotFoundError, AssertionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def test_open_folder_is_readable_by_rlinf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrajectoryReplayBuffer, "_tell_rlinf_every_s", 0.02)
    with TrajectoryReplayBuffer(storage_dir=tmp_path / "live") as buffer:
        for count in range(1, 4):
            buffer.add_trajectories([make(count)])
            assert int(rlinf_finds(tmp_path / "live", count)[count - 1]["rewards"][0, 0]) == count * 1000
        merge = ("--source-path", "live", "--save-path", "split", "--split-count", 2, "--copy")
        assert run("sharpwave.compat.rlinf.merge_or_split", *merge, cwd=tmp_path).returncode == 0
        buffer.clear()
        assert rlinf_finds(tmp_path / "live", 0) == {}
        buffer.add_trajectories([make(9)])
    assert list(read_rlinf(tmp_path / "live")) == [3]
    with sw.TrajectoryReplayBuffer(tmp_path / "own", format="pt") as own:
        own.add([make(0)])
        own.flush()
        assert not (tmp_path / "own" / "metadata.json").exists(), "only what is asked for RLinf's names pays for it"


def test_rlinf_s_files_take_a_small_share_of_the_thread_s_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def slow(*given: Any, **options: Any) -> None:
        told.append(time.monotonic())
        time.sleep(0.05)

    monkeypatch.setattr("sharpwave.trajectories.folder.write_upstream", slow)
    monkeypatch.setattr(TrajectoryReplayBuffer, "_tell_rlinf_every_s", 0.0)
    with TrajectoryReplayBuffer(storage_dir=tmp_path) as buffer:
        begin = time.monotonic()
        while time.monotonic() < begin + 0.6:
            buffer.add_trajectories([make(0)])
            time.sleep(0.01)
        assert len(told) == 1, "after 0.05 s of it the next 2.45 s are for saving"


def test_files_of_rlinf_that_cannot_be_written_stop_nothing_and_close_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrajectoryReplayBuffer, "_tell_rlinf_every_s", 0.0)
    buffer = TrajectoryReplayBuffer(storage_dir=tmp_path)
    (tmp_path / "metadata.json" / "in the way").mkdir(parents=True)
    for number in range(3):
        buffer.add_trajectories([make(number)])
        buffer.flush()
    with pytest.raises(StorageError, match=r"metadata\.json"):
        buffer.close()
    (tmp_path / "metadata.json" / "in the way").rmdir()
    (tmp_path / "metadata.json").rmdir()
    with TrajectoryReplayBuffer(storage_dir=tmp_path) as buffer:
        assert len(buffer) == 3
        buffer.add_trajectories([make(3)])
    assert sorted(read_rlinf(tmp_path)) == [0, 1, 2, 3]


GROWS = """
import sys
sys.path.insert(0, sys.argv[2])
from slabs import make
from sharpwave.compat.rlinf import TrajectoryReplayBuffer
TrajectoryReplayBuffer._tell_rlinf_every_s = 0.0
buffer = TrajectoryReplayBuffer(storage_dir=sys.argv[1], enable_cache=False)
print("open", flush=True)
for number in range(len(buffer), 1_000_000):
    buffer.add_trajectories([make(number)])
"""


def test_killed_while_it_tells_rlinf_the_folder_opens_and_rlinf_reads_it(tmp_path: Path) -> None:
    rounds = 20 if os.environ.get("SHARPWAVE_SOAK") else 1
    for round in range(rounds):
        command = [sys.executable, "-c", GROWS, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            end = time.monotonic() + 20
            while not (tmp_path / "metadata.json").exists() and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.2 + 0.013 * round)
            child.kill()
        listed = json.loads((tmp_path / "trajectory_index.json").read_text())
        for number, facts in listed["trajectory_index"].items():
            found = torch.load(tmp_path / f"trajectory_{number}_{facts['model_weights_id']}.pt", weights_only=True)
            assert int(found["rewards"][0, 0]) == 1000 * int(number)
        with TrajectoryReplayBuffer(storage_dir=tmp_path, enable_cache=False, sample_window_size=0) as buffer:
            assert len(buffer) >= len(listed["trajectory_id_list"]) > 0
            assert buffer._trajectory_id_list == list(range(len(buffer)))
            check(buffer.sample(6), 6)  # a trajectory: on a busy machine the process is killed early
        assert sorted(read_rlinf(tmp_path)) == list(range(len(buffer)))


@pytest.mark.timeout(60)
def test_load_that_leaves_a_folder_does_not_wait_for_the_thread_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TrajectoryReplayBuffer, "_tell_rlinf_every_s", 0.0)
    with TrajectoryReplayBuffer(storage_dir="taken") as buffer:
        buffer.add_trajectories([make(0), make(1)])
        buffer.save_checkpoint("checkpoint")
    inside, go_on = threading.Event(), threading.Event()
    buffer = TrajectoryReplayBuffer()
    saver: Any = buffer._store._saver
    tell = saver._tell
    index, format = tell.args

    def when_the_load_has_the_lock() -> Any:
        inside.set()
        go_on.wait(10)
        return index()

    monkeypatch.setattr(saver, "_tell", lambda: tell.func(when_the_load_has_the_lock, format))
    buffer.add_trajectories([make(5)])
    assert inside.wait(10)
    loads = threading.Thread(target=buffer.load_checkpoint, args=("checkpoint",))
    loads.start()
    time.sleep(0.3)  # it holds the lock and waits for the thread by now, or soon
    go_on.set()
    loads.join(20)
    assert not loads.is_alive()
    assert len(buffer) == 2
    buffer.close()


# ---- datasets --------------------------------------------------------------------------------------------------------


def held(*numbers: int) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(auto_save=False)
    buffer.add_trajectories([make(number) for number in numbers])
    return buffer


@pytest.mark.parametrize("kind", [ReplayBufferDataset, PreloadReplayBufferDataset])
def test_half_of_a_batch_comes_from_the_demonstrations(kind: Any) -> None:
    data = kind(held(1), held(2), batch_size=8, min_replay_buffer_size=1, min_demo_buffer_size=1, prefetch_size=2)
    loader = torch.utils.data.DataLoader(data, batch_size=1, num_workers=0, collate_fn=replay_buffer_collate_fn)
    for batch in itertools.islice(loader, 5):
        check(batch, 8)
        assert (batch["rewards"] // 1000).tolist() == [1] * 4 + [2] * 4
    data.close()
    assert list(data) == [], "a closed one has no batches"


@pytest.mark.parametrize("kind", [ReplayBufferDataset, PreloadReplayBufferDataset])
def test_dataset_waits_until_the_buffer_is_ready(kind: Any) -> None:
    replay = TrajectoryReplayBuffer(auto_save=False)
    data = kind(replay, None, batch_size=5, min_replay_buffer_size=2, min_demo_buffer_size=0)
    replay.add_trajectories([make(0)])
    threading.Timer(0.2, replay.add_trajectories, ([make(1)],)).start()
    check(next(iter(data)), 5)
    assert len(replay) == 2
    data.close()


def test_fields_that_only_one_buffer_has_are_left_out_and_told() -> None:
    more = make(1)
    more.forward_inputs = {"only": torch.ones(3, 2, 1)}
    replay = TrajectoryReplayBuffer(auto_save=False)
    replay.add_trajectories([more])
    data = ReplayBufferDataset(replay, held(2), 4, 1, 1)
    with pytest.warns(UserWarning, match="left out: forward_inputs"):
        check(next(iter(data)), 4)


def test_error_of_a_buffer_reaches_who_iterates() -> None:
    data = PreloadReplayBufferDataset(held(1), None, batch_size=50, min_replay_buffer_size=1, min_demo_buffer_size=0)
    with pytest.raises(RuntimeError, match="at most the 6 transitions"):
        next(iter(data))
    data.close()
    with pytest.raises(SchemaError, match="prefetch_size"):
        PreloadReplayBufferDataset(held(1), None, 5, 1, 0, prefetch_size=0)
    with pytest.raises(SchemaError, match="batch_size"):
        ReplayBufferDataset(held(1), held(2), 1, 1, 1)
