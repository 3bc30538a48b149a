"""Checkpoints of trajectories, RLinf's folders, files of every format, damage; merging and splitting."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from slabs import as_dict, check, make, read_rlinf, write_rlinf

import sharpwave as sw
from sharpwave.compat import rlinf
from sharpwave.errors import SchemaError, StorageError
from sharpwave.trajectories.folder import open_index
from sharpwave.trajectories.formats import locate
from sharpwave.trajectories.index import INDEX
from sharpwave.trajectories.ranks import merge, plan_merge, split


def build(folder: Path, **options: Any) -> sw.TrajectoryReplayBuffer:
    return sw.TrajectoryReplayBuffer(folder, **{"format": "pt", "seed": 1234, **options})


def fill(folder: Path, numbers: Any, **options: Any) -> None:
    with build(folder, **options) as buffer:
        buffer.add([make(number) for number in numbers])


def ids(buffer: sw.TrajectoryReplayBuffer | rlinf.TrajectoryReplayBuffer) -> list[int]:
    return [number for number, _ in buffer.trajectories()]


def content(folder: Path) -> list[int]:
    """Which of our numbers are there, in order, bit for bit."""
    index, files = open_index(folder, "test", True)
    found = []
    for entry in index.entries:
        tree = torch.load(files[entry.id], weights_only=True)
        number = int(tree["rewards"][0, 0]) // 1000
        for name, value in as_dict(make(number)).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(tree[name], value)
        found.append(number)
    return found


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["pt", "safetensors", "pkl"])
def test_checkpoint_is_whole_without_a_prior_sample_and_with_writes_under_way(tmp_path: Path, format: str) -> None:
    with build(tmp_path / "live", format=format, allow_pickle=True) as buffer:
        buffer.add([make(number) for number in range(7)])
        buffer.save(tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "live")
    with build(tmp_path / "other", allow_pickle=True) as buffer:
        buffer.load(tmp_path / "checkpoint")
        assert ids(buffer) == list(range(7))
        for number, trajectory in buffer.trajectories():
            for name, value in as_dict(make(number)).items():
                if isinstance(value, torch.Tensor):
                    assert np.array_equal(getattr(trajectory, name), value.numpy())
        assert check(buffer.sample(42), 42) <= set(range(7))
    assert (tmp_path / "checkpoint" / f"trajectory_3_w_0.{format}").exists(), "the checkpoint stays as it was"


def test_checkpoint_may_be_moved_and_is_made_of_links(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0)])
        buffer.save(tmp_path / "checkpoint")
        name = "trajectory_0_w_0.pt"
        assert (tmp_path / "live" / name).samefile(tmp_path / "checkpoint" / name)
    shutil.rmtree(tmp_path / "live")
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    with build(tmp_path / "other") as buffer:
        buffer.load(tmp_path / "moved")
        check(buffer.sample(6), 6)


def test_load_without_a_folder_of_its_own_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0), make(1)])
        buffer.save(tmp_path / "checkpoint")
        buffer.add([make(2)])
    with rlinf.TrajectoryReplayBuffer() as follower:
        follower.load_checkpoint("checkpoint")
        assert follower.storage_dir == tmp_path / "live"
        assert ids(follower) == [0, 1], "it replaces"
        follower.add_trajectories([make(5)])
    assert content(tmp_path / "live") == [0, 1, 5]
    shutil.rmtree(tmp_path / "live")
    with rlinf.TrajectoryReplayBuffer() as follower:
        follower.load_checkpoint("checkpoint")
        assert follower.storage_dir == Path("checkpoint")
        follower.add_trajectories([make(6)])
    assert content(tmp_path / "checkpoint") == [0, 1, 6]


def test_checkpoint_into_the_live_folder_and_after_a_resume(tmp_path: Path) -> None:
    fill(tmp_path / "first", range(3))
    with build(tmp_path / "live") as buffer:
        buffer.load(tmp_path / "first")
        buffer.add([make(3)])
        buffer.save(tmp_path / "live")
        buffer.save(tmp_path / "second")
        buffer.save(tmp_path / "second")
        assert sorted(read_rlinf(tmp_path / "live")) == sorted(read_rlinf(tmp_path / "second")) == [0, 1, 2, 3]
        check(buffer.sample(24), 24)
    assert content(tmp_path / "second") == content(tmp_path / "live") == [0, 1, 2, 3]
    assert content(tmp_path / "first") == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_resume_continues_the_random_stream_and_the_ids(tmp_path: Path) -> None:
    def run(name: str, resumes: bool) -> list[Any]:
        buffer = build(tmp_path / name)
        batches = []
        for number in range(6):
            buffer.add([make(number)])
            batches.append(buffer.sample(5))
            if number == 2:
                buffer.save(tmp_path / f"{name}-checkpoint")
                if resumes:
                    buffer.add([make(50)])
                    buffer.sample(3)
                    buffer.close()
                    buffer = build(tmp_path / f"{name}-resumed", seed=99)
                    buffer.load(tmp_path / f"{name}-checkpoint")
        buffer.close()
        return batches

    for one, other in zip(run("plain", False), run("resumed", True), strict=True):
        for name in ("rewards", "trajectory_id", "step", "env"):
            assert np.array_equal(one[name], other[name])


def test_load_after_sampling_replaces_never_mixes(tmp_path: Path) -> None:
    fill(tmp_path / "other", range(6))
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number) for number in range(10, 13)])
        assert check(buffer.sample(18), 18) <= {10, 11, 12}
        buffer.load(tmp_path / "other")
        seen = set[int]()
        for _ in range(10):
            seen |= check(buffer.sample(36), 36)
        assert seen == set(range(6))
        assert buffer.stats()["set_aside"] == 3
        assert sorted(path.name for path in (tmp_path / "live").glob("trajectory_*.pt")) == [
            f"trajectory_{number}_w_0.pt" for number in range(9)
        ]
    assert content(tmp_path / "live") == list(range(6))
    with build(tmp_path / "live") as buffer:
        assert ids(buffer) == list(range(6)), "what was set aside stays aside"
        assert buffer.stats()["set_aside"] == 3


def test_load_into_memory_keeps_the_newest(tmp_path: Path) -> None:
    fill(tmp_path / "saved", range(6))
    with sw.TrajectoryReplayBuffer(None, capacity=4) as buffer:
        buffer.load(tmp_path / "saved")
        assert ids(buffer) == [2, 3, 4, 5]
        assert check(buffer.sample(24), 24) <= {2, 3, 4, 5}
        buffer.add([make(6)])
        assert ids(buffer) == [3, 4, 5, 6]
    with sw.TrajectoryReplayBuffer(None) as buffer:
        buffer.load(tmp_path / "saved")
        assert ids(buffer) == list(range(6))
        two = buffer.stats()["stored_bytes"] // 3
    with sw.TrajectoryReplayBuffer(None, max_bytes=two) as buffer:
        buffer.load(tmp_path / "saved")
        assert ids(buffer) == [4, 5]


def test_missing_parts_are_told_and_nothing_changes(tmp_path: Path) -> None:
    fill(tmp_path / "saved", range(3))
    write_rlinf(tmp_path / "rlinf", {0: make(0)}, era=2)
    (tmp_path / "rlinf" / "metadata.json").unlink()
    write_rlinf(tmp_path / "rlinf2", {0: make(0)}, era=2)
    (tmp_path / "rlinf2" / "trajectory_index.json").unlink()
    (tmp_path / "saved" / "trajectory_1_w_0.pt").unlink()
    (tmp_path / "empty").mkdir()
    with build(tmp_path / "live") as buffer:
        buffer.add([make(9)])
        for name, words in {
            "nowhere": "there is no such folder",
            "empty": "metadata.json: there is no such file",
            "rlinf": "metadata.json: there is no such file",
            "rlinf2": "trajectory_index.json: there is no such file",
            "saved": "trajectory_1_w_0.pt: there is no such file, and the index lists it",
        }.items():
            with pytest.raises(FileNotFoundError, match=words) as raised:
                buffer.load(tmp_path / name)
            assert isinstance(raised.value, StorageError)
        assert ids(buffer) == [0]
        assert buffer.get(0).rewards[0, 0] == 9000
        check(buffer.sample(6), 6)


def test_folder_with_other_things_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.pt").write_bytes(b"weights")
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0)])
        with pytest.raises(StorageError, match=r"it holds 'model\.pt', which no index lists; give it a folder"):
            buffer.save(tmp_path / "mine")
        with build(tmp_path / "other"), pytest.raises(StorageError, match="has it open"):
            buffer.save(tmp_path / "other")
        buffer.save(tmp_path / "other")
        assert content(tmp_path / "other") == [0]
    assert (tmp_path / "mine" / "model.pt").read_bytes() == b"weights"


def test_checkpoints_are_one_instant_while_adds_and_drops_go_on(tmp_path: Path) -> None:
    with build(tmp_path / "live", capacity=20) as buffer:
        stop = threading.Event()

        def add() -> None:
            number = 0
            while not stop.is_set():
                buffer.add([make(number % 900)])
                number += 1

        thread = threading.Thread(target=add)
        thread.start()
        try:
            for turn in range(8):
                while len(buffer) < 20:
                    pass
                buffer.save(tmp_path / f"{turn}")
        finally:
            stop.set()
            thread.join()
        for turn in range(8):
            index, _ = open_index(tmp_path / f"{turn}", "test", False)
            numbers = [entry.id for entry in index.entries]
            assert numbers == list(range(numbers[0], numbers[0] + 20))
            assert content(tmp_path / f"{turn}") == [number % 900 for number in numbers]
        buffer.flush()
        assert len(list((tmp_path / "live").glob("trajectory_*"))) == 20


# ---- open ------------------------------------------------------------------------------------------------------------


def damage(folder: Path) -> None:
    """Flips a byte of the record that lists the third trajectory, in the middle of the journal."""
    data = bytearray((folder / INDEX).read_bytes())
    at = data.index(b'{"add":[[2,')
    data[at + 3] ^= 1
    (folder / INDEX).write_bytes(data)


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_open_of_a_checkpoint_is_a_copy_in_memory(tmp_path: Path, format: str) -> None:
    with build(tmp_path / "live", format=format) as buffer:
        buffer.add([make(number) for number in range(3)])
        buffer.save(tmp_path / "checkpoint")
        expected = buffer.sample(12)["rewards"]
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "checkpoint").iterdir()}
    with sw.open(tmp_path / "checkpoint") as copy, sw.open(str(tmp_path / "checkpoint")) as other:
        assert type(copy) is sw.TrajectoryReplayBuffer
        assert (copy.folder, copy.capacity, copy.recent, len(copy)) == (None, None, None, 3)
        assert np.array_equal(copy.sample(12)["rewards"], expected), "the random stream continues"
        assert copy.stats()["format"] == format
        copy.add(make(3))
        assert (len(copy), len(other)) == (4, 3)
        copy.save(tmp_path / "second")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "checkpoint").iterdir()} == before
    with sw.open(tmp_path / "second", device="cpu") as copy:
        assert ids(copy) == [0, 1, 2, 3]
        assert isinstance(copy.sample(4)["rewards"], torch.Tensor)


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_open_of_an_address_continues_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "live", range(3), format=format)
    with sw.open("file://live", device="cpu") as buffer:
        assert type(buffer) is sw.TrajectoryReplayBuffer
        assert buffer.folder == tmp_path / "live"
        assert isinstance(buffer.sample(4)["rewards"], torch.Tensor)
        buffer.add(make(3))
        with pytest.raises(StorageError, match="has it open"):
            sw.open("file://live")
        buffer.flush()
        with sw.open("live") as copy:
            assert ids(copy) == [0, 1, 2, 3], "a copy can be taken of an open folder"
    assert (tmp_path / "live" / f"trajectory_3_w_0.{format}").exists(), "in the format of the others"
    with build(tmp_path / "live") as buffer:
        assert ids(buffer) == [0, 1, 2, 3]


def test_open_reads_folders_of_rlinf_and_of_ranks(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "rlinf", {number: make(number) for number in range(3)}, era=2)
    with sw.open(tmp_path / "rlinf") as copy:
        assert check(copy.sample(18), 18) <= {0, 1, 2}
    assert not (tmp_path / "rlinf" / INDEX).exists(), "a copy changes nothing"
    with sw.open(f"file://{tmp_path}/rlinf") as buffer:
        buffer.add(make(3))
    assert sorted(read_rlinf(tmp_path / "rlinf")) == [0, 1, 2, 3]
    for rank in range(2):
        fill(tmp_path / "all" / f"rank_{rank}", [10 * rank])
    with sw.open(tmp_path / "all") as copy:
        assert len(copy) == 2
    with pytest.raises(StorageError, match="rank_0"):
        sw.open(f"file://{tmp_path}/all")
    assert not (tmp_path / "all" / INDEX).exists()


def test_open_refuses_options_that_trajectories_do_not_have(tmp_path: Path) -> None:
    fill(tmp_path / "live", range(1))
    for address in (tmp_path / "live", f"file://{tmp_path}/live"):
        with pytest.raises(SchemaError, match=r"open\(\): view: .* is a folder of trajectories; leave view= out"):
            sw.open(address, view=sw.Transitions())
        with pytest.raises(SchemaError, match=r"open\(\): verify: "):
            sw.open(address, verify=False)
        with pytest.raises(SchemaError, match=r"open\(\): device: "):
            sw.open(address, device="nowhere")
    fill(tmp_path / "pkl", range(1), format="pkl", allow_pickle=True)
    with pytest.raises(StorageError, match="give the buffer allow_pickle=True"):
        sw.open(tmp_path / "pkl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError):
        sw.open(tmp_path / "empty")


def test_open_of_a_damaged_folder_recovers_where_asked(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        for number in range(5):
            buffer.add(make(number))
            buffer.flush()
    damage(tmp_path / "live")
    for address in (str(tmp_path / "live"), f"file://{tmp_path}/live"):
        with pytest.raises(StorageError, match="damaged"):
            sw.open(address)
        with pytest.warns(UserWarning, match="damaged"):
            buffer = sw.open(address, recover=True)
        with buffer:
            assert ids(buffer) == [0, 1, 3, 4]
            check(buffer.sample(24), 24)
        assert len(list((tmp_path / "live").glob("trajectory_*.pt"))) == 5, "no file is deleted"


def test_checkpoint_without_a_file_is_loaded_where_asked(tmp_path: Path) -> None:
    fill(tmp_path / "saved", range(3))
    (tmp_path / "saved" / "trajectory_1_w_0.pt").unlink()
    with sw.TrajectoryReplayBuffer(None) as buffer, pytest.raises(FileNotFoundError, match="trajectory_1_w_0"):
        buffer.load(tmp_path / "saved")
    with sw.TrajectoryReplayBuffer(None, recover=True) as buffer:
        with pytest.warns(UserWarning, match="1 trajectories of its index have no whole file"):
            buffer.load(tmp_path / "saved")
        assert ids(buffer) == [0, 2]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_share_by_count_and_their_new_ids_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "live", range(10))
    with build(tmp_path / "live") as buffer:
        buffer.save(tmp_path / "checkpoint")
    ranks = [rlinf.TrajectoryReplayBuffer(log_dir=tmp_path / f"log{rank}") for rank in range(4)]
    parts, new = [], []
    for rank, follower in enumerate(ranks):
        follower.load_checkpoint("checkpoint", is_distributed=True, local_rank=rank, world_size=4)
        place = tmp_path / "live" / f"rank_{rank}"
        assert follower.storage_dir == place, "they share what the checkpoint was taken of"
        parts.append(ids(follower))
        follower.add_trajectories([make(100 + rank), make(200 + rank)])
        new += ids(follower)[-2:]
        check(follower.sample(6), 6)
        follower.close()
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert len(set(new)) == 8
    assert min(new) >= 10
    for world, sizes in ((1, [10]), (3, [4, 3, 3]), (12, [1] * 10 + [0, 0])):
        for rank in range(world):
            with build(tmp_path / f"{world}-{rank}") as buffer:
                buffer.load("checkpoint", rank=rank, world_size=world)
                assert len(buffer) == sizes[rank]
                if not sizes[rank]:
                    with pytest.raises(sw.errors.NotReady):
                        buffer.sample(1)
    with build(tmp_path / "bad") as buffer:
        for rank, world in ((4, 4), (-1, 4), (0, 0), (True, 2)):
            with pytest.raises(SchemaError, match=r" rank: expected 0 to|world_size"):
                buffer.load("checkpoint", rank=rank, world_size=world)


def test_ranks_share_by_samples_or_stride_where_asked(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number, steps=60 if number < 2 else 10) for number in range(14)])
        buffer.save(tmp_path / "checkpoint")
    for how, expected in {
        "count": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13]],
        "stride": [[0, 3, 6, 9, 12], [1, 4, 7, 10, 13], [2, 5, 8, 11]],
        "samples": [[0], [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13]],
    }.items():
        for rank in range(3):
            with build(tmp_path / f"{how}{rank}") as buffer:
                buffer.load(tmp_path / "checkpoint", rank=rank, world_size=3, split_by=how)
                assert ids(buffer) == expected[rank]
    with (
        build(tmp_path / "bad") as buffer,
        pytest.raises(SchemaError, match="split_by: expected 'count', 'samples' or 'stride'"),
    ):
        buffer.load(tmp_path / "checkpoint", split_by="size")


def test_checkpoints_of_four_ranks_load_in_two(tmp_path: Path) -> None:
    for rank in range(4):
        fill(tmp_path / "all" / f"rank_{rank}", [10 * rank, 10 * rank + 1])
    found = []
    for rank in range(2):
        with build(tmp_path / f"new{rank}") as buffer:
            buffer.load(tmp_path / "all", rank=rank, world_size=2)
            found.append([int(trajectory.rewards[0, 0]) // 1000 for _, trajectory in buffer.trajectories()])
            check(buffer.sample(24), 24)
    assert found == [[0, 10, 20, 30], [1, 11, 21, 31]]


# ---- RLinf's folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("era", [1, 2])
def test_folder_of_rlinf_loads_and_can_be_lived_in(tmp_path: Path, era: int) -> None:
    there = {number: make(number, epochs=number % 2, weights=f"{'ab' * number}_{number}") for number in (0, 1, 4)}
    write_rlinf(tmp_path / "rlinf", there, era, counter=9)
    with build(tmp_path / "live") as buffer:
        buffer.load(tmp_path / "rlinf")
        assert ids(buffer) == [0, 1, 4]
        assert check(buffer.sample(18), 18) <= {0, 1, 4}
        buffer._store.empty_cache("test")
        check(buffer.sample(18), 18)
        buffer.add([make(5)])
        assert ids(buffer)[-1] == 9
    with build(tmp_path / "rlinf") as buffer:
        assert ids(buffer) == [0, 1, 4]
        check(buffer.sample(18), 18)
    with build(tmp_path / "rlinf") as buffer:
        assert ids(buffer) == [0, 1, 4]


def test_first_version_s_checkpoint_has_its_data_elsewhere(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "data", {0: make(0), 1: make(1)}, era=1)
    (tmp_path / "checkpoint").mkdir()
    for name in ("metadata.json", "trajectory_index.json"):
        shutil.copy(tmp_path / "data" / name, tmp_path / "checkpoint")
    with build(tmp_path / "live") as buffer:
        buffer.load(tmp_path / "checkpoint")
        check(buffer.sample(12), 12)


def test_index_under_the_tool_s_misspelt_name_is_read(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "rlinf", {0: make(0), 1: make(1)}, era=1)
    (tmp_path / "rlinf" / "trajectory_index.json").rename(tmp_path / "rlinf" / "trajector_index.json")
    with build(tmp_path / "live") as buffer:
        buffer.load(tmp_path / "rlinf")
        check(buffer.sample(12), 12)


def test_rlinf_s_index_entries_without_files_are_told(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "rlinf", {0: make(0), 1: make(1), 2: make(2)}, era=2)
    (tmp_path / "rlinf" / "trajectory_1_w_0.pt").unlink()
    with build(tmp_path / "live") as buffer:
        with pytest.warns(
            UserWarning, match=r"1 of 3 trajectories of its index have no file and are left out \(the first: 1"
        ):
            buffer.load(tmp_path / "rlinf")
        assert ids(buffer) == [0, 2]


def test_rlinf_reads_our_checkpoints_and_goes_on_in_them(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number, epochs=1) for number in range(3)])
        buffer.save(tmp_path / "checkpoint")
    found = read_rlinf(tmp_path / "checkpoint")
    for number, tree in found.items():
        expected = as_dict(make(number, epochs=1))
        assert tree.keys() == expected.keys() - {"forward_inputs"}
        assert torch.equal(tree["curr_obs"]["more"]["image"], expected["curr_obs"]["more"]["image"])
        assert torch.equal(tree["dones"], expected["dones"])
        assert (tree["max_episode_length"], tree["model_weights_id"]) == (20, "w_0")
    metadata = json.loads((tmp_path / "checkpoint" / "metadata.json").read_text())
    assert {key: metadata[key] for key in ("size", "total_samples", "trajectory_counter", "seed")} == {
        "size": 3,
        "total_samples": 18,
        "trajectory_counter": 3,
        "seed": 1234,
    }
    write_rlinf(tmp_path / "checkpoint", {number: make(number) for number in range(5)}, era=2)
    with build(tmp_path / "other") as buffer:
        buffer.load(tmp_path / "checkpoint")
        assert ids(buffer) == [0, 1, 2, 3, 4], "RLinf wrote here last"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_torch_and_safetensors_read_our_files(tmp_path: Path) -> None:
    expected = as_dict(make(0, epochs=3))
    for format in ("pt", "safetensors"):
        with build(tmp_path / format, format=format) as buffer:
            buffer.add([make(0, epochs=3)])
    path = tmp_path / "pt" / "trajectory_0_w_0.pt"
    assert zipfile.ZipFile(path).testzip() is None
    for maps in (False, True):
        tree = torch.load(path, weights_only=True, mmap=maps)
        assert torch.equal(tree["prev_values"], expected["prev_values"])
        assert torch.equal(tree["curr_obs"]["state"], expected["curr_obs"]["state"])
        assert tree["dones"].dtype == torch.bool
    flat = safetensors.torch.load_file(tmp_path / "safetensors" / "trajectory_0_w_0.safetensors")
    assert torch.equal(flat["next_obs/more/image"], expected["next_obs"]["more"]["image"])


def test_pickles_need_trust_also_inside_pt_files(tmp_path: Path) -> None:
    fill(tmp_path / "pkl", range(2), format="pkl", allow_pickle=True)
    with (
        build(tmp_path / "live") as buffer,
        pytest.raises(StorageError, match=r"holds pickles.*give the buffer allow_pickle=True"),
    ):
        buffer.load(tmp_path / "pkl")

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    write_rlinf(tmp_path / "evil", {0: make(0)}, era=2)
    torch.save({"rewards": torch.zeros(3, 2), "curr_obs": {"x": Evil()}}, tmp_path / "evil" / "trajectory_0_w_0.pt")
    with build(tmp_path / "live") as buffer, pytest.raises(StorageError, match=r"names \w+\.system, which is neither"):
        buffer.load(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


def test_damaged_files_are_refused_with_words(tmp_path: Path) -> None:
    fill(tmp_path / "good", range(3))
    name = "trajectory_1_w_0.pt"
    data = (tmp_path / "good" / name).read_bytes()

    def spoiled(what: str, new: bytes) -> Path:
        shutil.copytree(tmp_path / "good", tmp_path / what)
        (tmp_path / what / name).write_bytes(new)
        return tmp_path / what

    with build(tmp_path / "live", cache=3) as buffer:
        with pytest.raises(StorageError, match=rf"{name}: expected {len(data)} bytes, got {len(data) - 1}"):
            buffer.load(spoiled("short", data[:-1]))
        flipped = bytearray(data)
        flipped[data.index(np.float32(1001).tobytes())] ^= 1
        with pytest.raises(StorageError, match="damaged: its checksum is not the index's"):
            buffer.load(spoiled("flipped", bytes(flipped)))
        assert len(buffer) == 0
        buffer.add([make(0)])
    with pytest.raises(StorageError, match="damaged: its checksum is not the index's"):
        build(tmp_path / "flipped")
    with build(tmp_path / "flipped", cache=1):
        pass  # a refused folder is nobody's
    for cut in range(0, len(data), 97):
        path = tmp_path / "cut.pt"
        path.write_bytes(data[:cut])
        with pytest.raises(StorageError):
            locate("test", path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        noisy = np.frombuffer(data, np.uint8).copy()
        noisy[rng.integers(0, len(noisy), 5)] = rng.integers(0, 256, 5)
        (tmp_path / "noisy.pt").write_bytes(noisy.tobytes())
        try:
            found = locate("test", tmp_path / "noisy.pt")
        except StorageError:
            continue
        assert found.layout.bytes <= len(data), "nothing outside of the file"


def test_index_s_torn_end_is_cut_and_damage_before_it_is_told(tmp_path: Path) -> None:
    fill(tmp_path / "good", [0])
    with build(tmp_path / "good") as buffer:
        for number in range(1, 5):
            buffer.add([make(number)])
            buffer.flush()
        shutil.copytree(tmp_path / "good", tmp_path / "killed")  # as a killed process leaves it
    journal = (tmp_path / "killed" / INDEX).read_bytes()
    synced = int.from_bytes(journal[64:72], "little")
    assert synced < len(journal)
    for cut in range(len(journal), synced, -7):
        shutil.rmtree(tmp_path / "live", ignore_errors=True)
        shutil.copytree(tmp_path / "killed", tmp_path / "live")
        (tmp_path / "live" / INDEX).write_bytes(journal[:cut])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with build(tmp_path / "live", cache=0) as buffer:
                count = len(buffer)
                assert ids(buffer) == list(range(count))
                buffer.add([make(count)])
        assert all("its last record was not written whole" in str(one.message) for one in told)
        with build(tmp_path / "live", cache=0) as buffer:
            assert [int(one.rewards[0, 0]) // 1000 for _, one in buffer.trajectories()] == list(range(count + 1))
            check(buffer.sample(6), 6)
    shutil.rmtree(tmp_path / "live")
    shutil.copytree(tmp_path / "killed", tmp_path / "live")
    spoiled = bytearray(journal)
    spoiled[journal.rindex(b'"add"') - 200] ^= 1
    (tmp_path / "live" / INDEX).write_bytes(bytes(spoiled))
    with pytest.raises(StorageError, match=r"damaged at byte \d+: .* give recover=True to keep them"):
        build(tmp_path / "live")
    with pytest.warns(UserWarning, match="was damaged: 1 records|1 records of the index are lost"):
        buffer = build(tmp_path / "live", recover=True)
    assert len(buffer) == 4
    check(buffer.sample(6), 6)
    buffer.close()
    for foreign in (b"hello\n", b"\0" * 100, pickle.dumps({"a": 1})):
        (tmp_path / "live" / INDEX).write_bytes(foreign)
        with pytest.raises(StorageError, match="not a journal of this Sharpwave"):
            build(tmp_path / "live")


# ---- merge and split -------------------------------------------------------------------------------------------------


def ranks_of_a_7(folder: Path) -> None:
    """Ranks 0, 10 and 2 with ids {0, 1, 3}, {0, 5} and {0, 1}: the example of upstream's tool."""
    for rank, numbers in ((0, (0, 1, 3)), (10, (0, 5)), (2, (0, 1))):
        there = {number: make(rank * 10 + number, weights=f"r{rank}") for number in numbers}
        write_rlinf(folder / f"rank_{rank}", there, era=1)


@pytest.mark.parametrize(
    ("order", "expected"), [("string", [0, 100, 20, 1, 21, 3, 105]), ("numeric", [0, 20, 100, 1, 21, 3, 105])]
)
def test_merge_orders_by_id_then_rank(tmp_path: Path, order: str, expected: list[int]) -> None:
    ranks_of_a_7(tmp_path / "all")
    merge(tmp_path / "all", tmp_path / "merged", copy=True, order=order, legacy=True)
    assert content(tmp_path / "merged") == expected
    found = read_rlinf(tmp_path / "merged")
    assert sorted(found) == list(range(7))
    metadata = json.loads((tmp_path / "merged" / "metadata.json").read_text())
    assert (metadata["size"], metadata["total_samples"], metadata["trajectory_counter"]) == (7, 42, 7)
    assert metadata["seed"] == 77
    assert metadata["storage_dir"] == str(tmp_path / "merged")
    legacy = (tmp_path / "merged" / "trajector_index.json").read_text()
    assert legacy == (tmp_path / "merged" / "trajectory_index.json").read_text()
    assert (tmp_path / "merged" / f"trajectory_{expected.index(105)}_r10.pt").exists()
    assert sorted(read_rlinf_ids(tmp_path / "all" / "rank_10")) == [0, 5], "a copy leaves the source as it was"
    with build(tmp_path / "merged") as buffer:
        check(buffer.sample(42), 42)


def read_rlinf_ids(folder: Path) -> list[int]:
    return [int(number) for number in json.loads((folder / "trajectory_index.json").read_text())["trajectory_id_list"]]


def test_moved_source_lists_nothing_that_went(tmp_path: Path) -> None:
    ranks_of_a_7(tmp_path / "all")
    fill(tmp_path / "all" / "rank_3", [30, 31])
    merge(tmp_path / "all", tmp_path / "merged")
    assert content(tmp_path / "merged") == [0, 20, 30, 100, 1, 21, 31, 3, 105]
    for rank in (0, 2, 3, 10):
        folder = tmp_path / "all" / f"rank_{rank}"
        assert list(folder.glob("trajectory_*.pt")) == []
        assert content(folder) == []
        if rank != 3:
            assert read_rlinf(folder) == {}
        with build(folder) as buffer:
            assert len(buffer) == 0
            buffer.add([make(7)])


def test_split_takes_the_first_and_leaves_the_others(tmp_path: Path) -> None:
    fill(tmp_path / "all", range(5))
    for wrong in (0, -1, 6):
        with pytest.raises(SchemaError, match="split_count"):
            split(tmp_path / "all", tmp_path / "part", wrong)
        assert not (tmp_path / "part").exists()
    split(tmp_path / "all", tmp_path / "copy", 2, copy=True)
    assert content(tmp_path / "copy") == [0, 1]
    assert content(tmp_path / "all") == [0, 1, 2, 3, 4]
    split(tmp_path / "all", tmp_path / "part", 3)
    assert content(tmp_path / "part") == [0, 1, 2]
    assert content(tmp_path / "all") == [3, 4]
    with build(tmp_path / "all") as buffer:
        buffer.add([make(9)])
        assert ids(buffer) == [3, 4, 5]


def test_tool_refuses_what_it_would_spoil(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match="expected folders named rank_0"):
        merge(tmp_path / "none", tmp_path / "merged")
    fill(tmp_path / "all" / "rank_0", range(2))
    fill(tmp_path / "all" / "rank_1", range(2), format="safetensors")
    with pytest.raises(SchemaError, match="expected one storage format, got pt, safetensors"):
        merge(tmp_path / "all", tmp_path / "merged")
    shutil.rmtree(tmp_path / "all" / "rank_1")
    with build(tmp_path / "all" / "rank_1") as buffer:
        buffer.add([sw.Trajectory(rewards=np.zeros((1, 1), np.float32))])
        buffer.flush()
        with pytest.raises(SchemaError, match="its rows are not those of the others: actions, "):
            merge(tmp_path / "all", tmp_path / "merged")
    shutil.rmtree(tmp_path / "all" / "rank_1")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "x").touch()
    with pytest.raises(StorageError, match="expected a new or empty folder"):
        merge(tmp_path / "all", tmp_path / "merged")
    (tmp_path / "merged" / "x").unlink()
    with build(tmp_path / "all" / "rank_0"), pytest.raises(StorageError, match="has it open"):
        merge(tmp_path / "all", tmp_path / "merged")
    plan = plan_merge("merge", tmp_path / "all", "numeric", False)
    assert [entry.id for entry in plan.index.entries] == [0, 1]
    assert list((tmp_path / "merged").iterdir()) == []
