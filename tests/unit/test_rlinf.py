"""compat.rlinf: RLinf's tutorial, snippet by snippet only import line and paths changed; then its flags."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slabs import check, make, read_rlinf, write_rlinf

import sharpwave as sw
from sharpwave.compat.rlinf import Trajectory, TrajectoryReplayBuffer
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
