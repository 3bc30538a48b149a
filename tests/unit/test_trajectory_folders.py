"""Folders of trajectories: adopted from RLinf, set aside by a load, forged, damaged, left by dead processes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slabs import as_dict, check, make, read_rlinf, write_rlinf

import sharpwave as sw
from sharpwave.compat import rlinf
from sharpwave.errors import SchemaError, StorageError
from sharpwave.files import Entry, read_journal, write_journal
from sharpwave.trajectories.index import ADD, DROP, INDEX, KIND, LAYOUTS, ROWS, STATE
from sharpwave.trajectories.layout import NOT_HELD
from sharpwave.trajectories.ranks import merge, split
from sharpwave.trajectories.trajectory import DTYPES

HERE = str(Path(__file__).parent)


def build(folder: Path, **options: Any) -> sw.TrajectoryReplayBuffer:
    return sw.TrajectoryReplayBuffer(folder, **{"format": "pt", **options})


def fill(folder: Path, numbers: Any, **options: Any) -> None:
    with build(folder, **options) as buffer:
        buffer.add([make(number) for number in numbers])


def numbers_of(buffer: sw.TrajectoryReplayBuffer) -> list[int]:
    return [int(trajectory.rewards[0, 0]) // 1000 for _, trajectory in buffer.trajectories()]


def held(folder: Path, **options: Any) -> list[int]:
    with build(folder, **options) as buffer:
        found = numbers_of(buffer)
        if found:
            check(buffer.sample(6 * len(found)), 6 * len(found))
        return found


def draw_many(buffer: sw.TrajectoryReplayBuffer, count: int) -> None:
    """Until every trajectory was surely drawn from."""
    for _ in range(50):
        buffer.sample(count)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("trajectory_*.pt"))


def run(code: str, *arguments: Any, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {HERE!r})\n{code}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


# ---- RLinf's folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("era", [1, 2])
@pytest.mark.parametrize("loads", [False, True])
def test_what_is_added_to_a_folder_of_rlinf_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, era: int, loads: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rlinf(tmp_path / "rlinf", {number: make(number) for number in range(3)}, era)
    with rlinf.TrajectoryReplayBuffer() if loads else rlinf.TrajectoryReplayBuffer(storage_dir="rlinf") as buffer:
        if loads:
            buffer.load_checkpoint("rlinf")
        buffer.add_trajectories([make(number) for number in range(3, 6)])
    for _ in range(2):
        assert held(tmp_path / "rlinf") == list(range(6))
    assert sorted(read_rlinf(tmp_path / "rlinf")) == list(range(6)), "RLinf finds all of them"


def test_killed_adoption_is_done_again(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "rlinf", {number: make(number) for number in range(3)}, era=2)
    metadata = (tmp_path / "rlinf" / "metadata.json").read_bytes()
    assert held(tmp_path / "rlinf") == [0, 1, 2]
    (tmp_path / "rlinf" / "metadata.json").write_bytes(metadata)  # the journal is there, our mark is not
    assert held(tmp_path / "rlinf") == [0, 1, 2]
    fill(tmp_path / "rlinf", [3])
    assert held(tmp_path / "rlinf") == [0, 1, 2, 3]


def test_trajectories_that_rlinf_does_not_list_are_kept_and_told(tmp_path: Path) -> None:
    fill(tmp_path / "live", range(4))
    (tmp_path / "live" / "trajectory_0_w_0.pt").unlink()
    write_rlinf(tmp_path / "live", {0: make(7)}, era=2)  # it started anew and overwrote the first
    with pytest.warns(UserWarning, match="does not list 3 trajectories of our index whose files are whole; 3 of them"):
        assert held(tmp_path / "live") == [7, 1, 2, 3]
    fill(tmp_path / "live", [8])
    assert held(tmp_path / "live") == [7, 1, 2, 3, 8], "and no id is given twice"


def test_rlinf_sees_what_was_added_to_our_own_checkpoint_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number) for number in range(3)])
        buffer.save("checkpoint")
    assert sorted(read_rlinf(tmp_path / "live")) == [0, 1, 2], "RLinf reads a live folder too"
    shutil.rmtree("live")
    metadata = json.loads(Path("checkpoint/metadata.json").read_text())
    assert metadata["storage_dir"] == str(tmp_path / "checkpoint"), "the first RLinf looks for the data there"
    with rlinf.TrajectoryReplayBuffer() as follower:
        follower.load_checkpoint("checkpoint")
        follower.add_trajectories([make(number) for number in range(3, 6)])
    assert sorted(read_rlinf(tmp_path / "checkpoint")) == list(range(6))


def test_flags_of_all_environments_are_drawn_for_each(tmp_path: Path) -> None:
    trajectory = make(0, steps=6, envs=4)
    trajectory.intervene_flags = torch.zeros(6, 1, dtype=torch.bool)
    trajectory.intervene_flags[2] = True
    write_rlinf(tmp_path / "rlinf", {0: trajectory}, era=1)
    for cache in (0, 5):
        with build(tmp_path / f"live{cache}", cache=cache) as buffer:
            buffer.load(tmp_path / "rlinf")
            buffer.add([trajectory])
            buffer.flush()
            batch = buffer.sample(48)
            assert np.array_equal(batch["intervene_flags"], batch["step"] == 2)
            for _, found in buffer.trajectories():
                assert np.array_equal(found.intervene_flags, trajectory.intervene_flags.expand(6, 4).numpy())
    wrong = make(0, steps=6, envs=4)
    wrong.actions = wrong.actions[:, :1]
    with build(tmp_path / "wrong") as buffer, pytest.raises(SchemaError, match=r"actions: expected shape \(6, 4"):
        buffer.add([wrong])


@pytest.mark.parametrize("cache", [0, 5])
def test_tensors_that_are_parts_of_larger_ones_load(tmp_path: Path, cache: int) -> None:
    whole = make(0, steps=5, envs=4)

    def half(value: Any, part: int) -> Any:
        if isinstance(value, dict):
            return {key: half(inner, part) for key, inner in value.items()}
        return torch.chunk(value, 2, dim=1)[part] if isinstance(value, torch.Tensor) else value

    halves = {
        part: sw.Trajectory(**{name: half(value, part) for name, value in as_dict(whole).items()}) for part in (0, 1)
    }
    assert not halves[1].rewards.is_contiguous()
    write_rlinf(tmp_path / "rlinf", halves, era=1)
    with build(tmp_path / "live", cache=cache) as buffer:
        buffer.load(tmp_path / "rlinf")
        for _ in range(10):
            batch = buffer.sample(20)
            check(batch, 20)
            expected = batch["step"] * 4 + batch["env"] + 2 * batch["trajectory_id"]
            assert np.array_equal(batch["rewards"], expected)
        for number, found in buffer.trajectories():
            assert np.array_equal(found.curr_obs["state"], halves[number].curr_obs["state"].numpy())
        buffer.save(tmp_path / "checkpoint")
    assert sorted(read_rlinf(tmp_path / "checkpoint")) == [0, 1]
    assert held(tmp_path / "live", cache=cache) == [0, 0], "what the index says of them is enough"


@pytest.mark.parametrize("row", [(), (1,), (3,)])
def test_values_that_rlinf_saved_flat_get_their_axes_back(tmp_path: Path, row: tuple[int, ...]) -> None:
    trajectory = make(0, steps=4, envs=3)
    values = torch.arange(15.0).reshape(5, 3)
    wide = values.reshape(5, 3, *[1] * len(row)).expand(5, 3, *row).contiguous()
    trajectory.prev_values = wide.reshape(15, *row)  # as RLinf's own cache has them
    write_rlinf(tmp_path / "rlinf", {0: trajectory}, era=2)
    for cache in (0, 5):
        with build(tmp_path / f"live{cache}", cache=cache) as buffer:
            buffer.load(tmp_path / "rlinf")
            batch = buffer.sample(12)
            first = batch["prev_values"].reshape(12, -1)[:, 0]
            assert np.array_equal(first, batch["step"] * 3 + batch["env"])
            assert np.array_equal(buffer.get(0).prev_values, wide.numpy())


NEW_DTYPES = (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)
DTYPE_NAMES = {getattr(torch, kind): name for name, (_, kind) in DTYPES.items()}
BITS_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)


@pytest.mark.parametrize("dtype", [*NEW_DTYPES, *BITS_ONLY], ids=str)
@pytest.mark.parametrize("format", ["pt", "safetensors", "pkl"])
def test_every_dtype_that_can_be_kept_is_kept_exactly(tmp_path: Path, dtype: torch.dtype, format: str) -> None:
    trajectory = make(0)
    trajectory.forward_inputs = {"x": (torch.arange(18).reshape(3, 2, 3) % 7).to(torch.float32).to(dtype)}
    write_rlinf(tmp_path / "rlinf", {0: trajectory}, era=2)
    options: dict[str, Any] = {"format": format, "allow_pickle": True, "device": "cpu"}
    with build(tmp_path / "live", cache=0, **options) as buffer:
        buffer.load(tmp_path / "rlinf")
        if DTYPE_NAMES[dtype] in NOT_HELD.get(format, ()):
            with pytest.raises(SchemaError, match=f"forward_inputs/x: {format} files cannot hold"):
                buffer.add([trajectory])
            return
        buffer.add([trajectory])
        buffer.flush()
        for _, found in buffer.trajectories():
            assert found.forward_inputs["x"].dtype == dtype
            assert found.forward_inputs["x"].tolist() == trajectory.forward_inputs["x"].tolist()
        batch = buffer.sample(12)
        rows = trajectory.forward_inputs["x"].reshape(6, 3)[batch["step"] * 2 + batch["env"]]
        assert batch["forward_inputs"]["x"].tolist() == rows.tolist()
    path = tmp_path / "live" / f"trajectory_1_w_0.{format}"
    if format == "pt":
        assert torch.load(path, weights_only=True)["forward_inputs"]["x"].dtype == dtype


def test_arrays_inside_of_a_pt_file_are_read(tmp_path: Path) -> None:
    trajectory = make(0)
    trajectory.curr_obs = {
        "state": trajectory.curr_obs["state"].numpy(),
        "more": {"image": np.asfortranarray(trajectory.curr_obs["more"]["image"].numpy())},
    }
    trajectory.actions = trajectory.actions.numpy().astype(">i8").astype("<i8")
    trajectory.next_obs["state"] = trajectory.next_obs["state"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    write_rlinf(tmp_path / "rlinf", {0: trajectory}, era=2)
    for cache in (0, 5):
        with build(tmp_path / f"live{cache}", cache=cache) as buffer:
            buffer.load(tmp_path / "rlinf")
            check(buffer.sample(6), 6)
            found = buffer.get(0)
            assert np.array_equal(found.curr_obs["state"], trajectory.curr_obs["state"])
            assert np.array_equal(found.next_obs["state"], trajectory.next_obs["state"].numpy())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.array([[None, 1], [2, 3], [4, 5]], object), "object|refused"),
        (np.zeros((3, 2), "M8[s]"), "dtype .*M8: refused"),
        (np.zeros((3, 2), ">f4"), "dtype >f4: refused"),
        (np.zeros((3, 2), [("a", "<f4")]), "refused"),
        (torch.zeros(3, 2, dtype=torch.complex64).conj(), r"computed when it is read \(conj\): refused"),
        (torch.zeros(3, 2).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
    ],
    ids=["objects", "times", "big-endian", "records", "conjugated", "float8 of another kind"],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path, value: Any, words: str) -> None:
    trajectory = make(0)
    trajectory.actions = value
    write_rlinf(tmp_path / "rlinf", {0: trajectory}, era=2)
    with build(tmp_path / "live") as buffer, pytest.raises(StorageError, match=words):
        buffer.load(tmp_path / "rlinf")


# ---- set aside -------------------------------------------------------------------------------------------------------


def flat_values(folder: Path, envs: tuple[int, ...], format: str) -> None:
    """A checkpoint as RLinf writes it of a buffer without files: values with one row more have both axes in one."""
    made = {number: make(number, envs=count, epochs=1) for number, count in enumerate(envs)}
    for trajectory in made.values():
        trajectory.prev_values = trajectory.prev_values[..., None]
    write_rlinf(folder, made, era=2)
    for number, trajectory in made.items():
        trajectory.prev_values = trajectory.prev_values.flatten(0, 1)
        path = folder / f"trajectory_{number}_w_0.pt"
        torch.save(as_dict(trajectory), path)
        if format == "pkl":
            path.with_suffix(".pkl").write_bytes(pickle.dumps(as_dict(trajectory)))
            path.unlink()
    metadata = json.loads((folder / "metadata.json").read_text()) | {"trajectory_format": format}
    (folder / "metadata.json").write_text(json.dumps(metadata))


@pytest.mark.parametrize("format", ["pt", "pkl"])
@pytest.mark.parametrize("envs", [(2, 2), (1, 2), (2, 1), (1, 1, 3)])
@pytest.mark.parametrize("cache", [0, 5])
def test_flat_values_get_their_axes_back_in_every_format_and_for_one_environment(
    tmp_path: Path, format: str, envs: tuple[int, ...], cache: int
) -> None:
    flat_values(tmp_path / "rlinf", envs, format)
    options: dict[str, Any] = {"cache": cache, "device": "cpu", "allow_pickle": True}
    for folder in (tmp_path / "live", tmp_path / "rlinf"):
        with build(folder, **options) as buffer:
            buffer.load(tmp_path / "rlinf")
            for number, trajectory in buffer.trajectories():
                assert trajectory.prev_values.shape == (4, envs[number], 1)
        with build(folder, **options) as buffer:
            batch = buffer.sample(6)
            assert batch["prev_values"].shape == (6, 1)
            check(batch | {"prev_values": batch["prev_values"][:, 0]}, 6)


@pytest.mark.parametrize("way", ["closed", "checkpoint", "own"])
def test_rlinf_is_told_the_format_that_the_files_have(tmp_path: Path, way: str) -> None:
    fill(tmp_path / "live", range(2), format="pkl", allow_pickle=True)
    target = tmp_path / ("live" if way == "own" else "checkpoint")
    with build(tmp_path / "live", format="pt", allow_pickle=True) as buffer:
        if way == "closed":
            buffer.load(tmp_path / "live")
            target = tmp_path / "live"
        else:
            buffer.save(target)
    metadata = json.loads((target / "metadata.json").read_text())
    assert (metadata["storage_format"], metadata["trajectory_format"]) == ("pkl", "pkl")
    assert (target / "trajectory_1_w_0.pkl").exists()


def test_rlinf_learns_what_a_killed_process_added_when_the_folder_is_next_closed(tmp_path: Path) -> None:
    fill(tmp_path / "live", range(2))
    with build(tmp_path / "live") as buffer:
        buffer.add([make(2)])
        buffer.flush()
        shutil.copytree(tmp_path / "live", tmp_path / "killed")  # as a process that is killed now leaves it
    assert sorted(read_rlinf(tmp_path / "killed")) == [0, 1]
    assert held(tmp_path / "killed") == [0, 1, 2]
    assert sorted(read_rlinf(tmp_path / "killed")) == [0, 1, 2]


def test_folder_with_files_of_two_formats_stays_for_rlinf_what_it_was(tmp_path: Path) -> None:
    fill(tmp_path, range(2))
    fill(tmp_path, [2], format="pkl", allow_pickle=True)
    assert sorted(read_rlinf(tmp_path)) == [0, 1], "RLinf looks for files of one format only"
    assert held(tmp_path, allow_pickle=True) == [0, 1, 2]


def test_shape_in_rlinf_s_index_is_that_of_the_log_probabilities(tmp_path: Path) -> None:
    trajectory = make(0)
    trajectory.prev_logprobs = torch.zeros(3, 2, 7)
    with build(tmp_path) as buffer:
        buffer.add([trajectory])
    listed = json.loads((tmp_path / "trajectory_index.json").read_text())["trajectory_index"]
    assert listed["0"]["shape"] == [3, 2, 7]


def test_buffer_without_files_keeps_what_its_format_can_hold(tmp_path: Path) -> None:
    trajectory = make(0)
    trajectory.forward_inputs = {"x": torch.full((3, 2, 1), 1 - 2j, dtype=torch.complex128)}
    with sw.TrajectoryReplayBuffer(None, format="pt", device="cpu") as buffer:
        buffer.add([trajectory])
        assert buffer.sample(2)["forward_inputs"]["x"].tolist() == [[1 - 2j]] * 2
        buffer.save(tmp_path)
    assert read_rlinf(tmp_path)[0]["forward_inputs"]["x"].dtype == torch.complex128
    with (
        sw.TrajectoryReplayBuffer(None, format="safetensors") as buffer,
        pytest.raises(SchemaError, match="safetensors files cannot hold complex128"),
    ):
        buffer.add([trajectory])


def test_load_of_one_rank_s_part_deletes_nothing(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number) for number in range(8)])
        buffer.save(tmp_path / "checkpoint")
        buffer.add([make(number) for number in range(8, 12)])
        buffer.load(tmp_path / "checkpoint", rank=0, world_size=4)
        assert numbers_of(buffer) == [0, 1]
        assert buffer.stats()["set_aside"] == 10
        assert len(files(tmp_path / "live")) == 12
        buffer.add([make(50)])
        assert check(buffer.sample(18), 18) <= {0, 1, 50}
    assert held(tmp_path / "live") == [0, 1, 50]
    split(tmp_path / "live", tmp_path / "all", 13, copy=True)
    assert held(tmp_path / "all") == [0, 1, 50, *range(2, 12)]
    with build(tmp_path / "live") as buffer:
        buffer.clear()
        buffer.flush()
        assert len(files(tmp_path / "live")) == 10
        buffer.clear(set_aside=True)
        buffer.flush()
        assert files(tmp_path / "live") == []
    assert held(tmp_path / "checkpoint") == list(range(8))


def test_load_of_other_trajectories_with_the_same_ids_keeps_both(tmp_path: Path) -> None:
    fill(tmp_path / "other", range(20, 23))
    fill(tmp_path / "third", [30])
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number) for number in range(5)])
        buffer.load(tmp_path / "other")
        assert numbers_of(buffer) == [20, 21, 22]
        buffer.load(tmp_path / "third")
        buffer.add([make(31)])
        assert numbers_of(buffer) == [30, 31]
        assert buffer.stats()["set_aside"] == 8
    assert held(tmp_path / "live") == [30, 31]
    split(tmp_path / "live", tmp_path / "all", 10, copy=True)
    assert sorted(held(tmp_path / "all")) == [*range(5), *range(20, 23), 30, 31]


def test_load_of_other_rows_keeps_the_files_of_the_old_ones(tmp_path: Path) -> None:
    rewards = np.arange(4, dtype=np.float32).reshape(2, 2)
    with build(tmp_path / "plain") as buffer:
        buffer.add([sw.Trajectory(rewards=rewards)])
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0), make(1)])
        buffer.load(tmp_path / "plain")
        assert set(buffer.sample(4)) == {"rewards", "trajectory_id", "step", "env"}
        buffer.add([sw.Trajectory(rewards=rewards)])
    with build(tmp_path / "live") as buffer:
        assert len(buffer) == 2
        assert buffer.stats()["set_aside"] == 2
        buffer.clear()
        buffer.add([make(5)])
    assert held(tmp_path / "live") == [5]
    assert len(files(tmp_path / "live")) == 3


def test_load_of_an_empty_checkpoint_sets_everything_aside(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.save(tmp_path / "empty")
        buffer.add([make(0)])
        buffer.load(tmp_path / "empty")
        assert (len(buffer), buffer.stats()["set_aside"]) == (0, 1)
        buffer.add([sw.Trajectory(rewards=np.zeros((1, 1), np.float32))])
    with build(tmp_path / "live") as buffer:
        assert (len(buffer), buffer.stats()["set_aside"]) == (1, 1)


def test_failed_load_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "other", range(20, 24))
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number) for number in range(3)])
        buffer.flush()
        (tmp_path / "live" / "trajectory_3_w_0.pt").write_bytes(b"mine")  # the name that the fourth needs
        before = files(tmp_path / "live")
        with pytest.raises(
            StorageError, match=r"load\(\): .*trajectory_3_w_0\.pt: a file of that name exists and is not in"
        ):
            buffer.load(tmp_path / "other")
        assert numbers_of(buffer) == [0, 1, 2]
        assert files(tmp_path / "live") == before
    assert held(tmp_path / "live") == [0, 1, 2]
    assert (tmp_path / "live" / "trajectory_3_w_0.pt").read_bytes() == b"mine"


# ---- what is not ours ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trajectory_9_mine.pt", "trajectory_0_w_0.pt", "trajectory_notes.txt", ".x.tmp"])
def test_checkpoint_never_takes_the_place_of_files_that_no_index_lists(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("thesis")
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0)])
        with pytest.raises(StorageError, match="which no index lists; give it a folder of its own"):
            buffer.save(tmp_path / "mine")
        buffer.save(tmp_path / "checkpoint")
        (tmp_path / "checkpoint" / "trajectory_7_mine.pt").write_text("thesis")
        with pytest.raises(StorageError, match=r"holds 'trajectory_7_mine\.pt', which no index lists"):
            buffer.save(tmp_path / "checkpoint")
    assert (tmp_path / "mine" / name).read_text() == "thesis"
    assert (tmp_path / "checkpoint" / "trajectory_7_mine.pt").read_text() == "thesis"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_checkpoint_does_not_take_the_place_of_trajectories_set_aside(tmp_path: Path) -> None:
    fill(tmp_path / "saved", [0])
    with build(tmp_path / "old") as buffer:
        buffer.add([make(5)])
        buffer.load(tmp_path / "saved")
    with build(tmp_path / "live") as buffer:
        buffer.add([make(1)])
        with pytest.raises(StorageError, match="holds 1 trajectories that a load set aside"):
            buffer.save(tmp_path / "old")
    assert len(files(tmp_path / "old")) == 2


def test_files_of_others_in_a_live_folder_stay_and_their_ids_are_not_given(tmp_path: Path) -> None:
    fill(tmp_path / "live", range(2))
    for name in ("trajectory_2_w_0.pt", "trajectory_40_x.pt", ".note.tmp", "trajectory_2_w_0.pt.next"):
        (tmp_path / "live" / name).write_text("mine")
    for number in range(2, 5):
        fill(tmp_path / "live", [number])
    assert held(tmp_path / "live") == [0, 1, 2, 3, 4]
    for name in ("trajectory_2_w_0.pt", "trajectory_40_x.pt", ".note.tmp", "trajectory_2_w_0.pt.next"):
        assert (tmp_path / "live" / name).read_text() == "mine"


# ---- forged indexes --------------------------------------------------------------------------------------------------


def forge(folder: Path, change: Callable[[int, Any], Any], extra: list[Entry] | None = None) -> None:
    """Writes the index of a folder anew, with right checksums and other content."""
    records = [(record.kind, json.loads(record.head)) for record in read_journal(folder / INDEX, KIND)]
    entries = [Entry(kind, change(kind, said)) for kind, said in records]
    write_journal(folder / INDEX, KIND, entries + (extra or []))


def layout(at: int, value: Any) -> Callable[[int, Any], Any]:
    def change(kind: int, said: Any) -> Any:
        if kind == LAYOUTS:
            for row in said["layouts"]:
                row[at] = value(row[at]) if callable(value) else value
        return said

    return change


def entry(at: int, value: Any) -> Callable[[int, Any], Any]:
    def change(kind: int, said: Any) -> Any:
        if kind == ADD:
            for row in said["add"]:
                row[at] = value(row[at]) if callable(value) else value
        return said

    return change


def both(*changes: Callable[[int, Any], Any]) -> Callable[[int, Any], Any]:
    def change(kind: int, said: Any) -> Any:
        for one in changes:
            said = one(kind, said)
        return said

    return change


def rows(at: int, value: Any) -> Callable[[int, Any], Any]:
    def change(kind: int, said: Any) -> Any:
        if kind == ROWS:
            for leaf in said["leaves"]:
                leaf[at] = value
        return said

    return change


def same(kind: int, said: Any) -> Any:
    return said


FORGED: dict[str, Any] = {
    "format that leaves the folder": layout(1, "d/../../precious.txt"),
    "format unknown": layout(1, "zip"),
    "format a list": layout(1, ["pt"]),
    "steps huge": both(layout(2, 10**9), entry(2, 10**9)),
    "steps of the entry only": entry(2, 10**6),
    "steps negative": both(layout(2, -5), entry(2, -5)),
    "no environments": both(layout(3, 0), entry(3, 0)),
    "rows that overflow": both(layout(2, 2**40), entry(2, 2**40), layout(3, 2**40), entry(3, 2**40)),
    "epochs huge": layout(4, lambda values: [10**6] * len(values)),
    "epochs negative": layout(4, lambda values: [-3] * len(values)),
    "epochs missing": layout(4, lambda values: values[:-1]),
    "offsets huge": layout(5, lambda values: [2**40] * len(values)),
    "offsets near 2^64": layout(5, lambda values: [2**64 - 8] * len(values)),
    "offsets negative": layout(5, lambda values: [-(2**20)] * len(values)),
    "offsets as floats": layout(5, lambda values: [float(value) for value in values]),
    "last leaf beyond the end": layout(5, lambda values: [*values[:-1], values[-1] + 4096]),
    "bytes huge": layout(6, 2**60),
    "bytes small": layout(6, 8),
    "strides huge": layout(7, lambda _: [[2**50, 2**50]] * 8),
    "strides of half the leaves": layout(7, lambda _: [[4, 4]]),
    "packed as a word": layout(8, "yes"),
    "id a word": entry(0, "x"),
    "id of 2^70": entry(0, 2**70),
    "id negative": entry(0, -1),
    "id twice": entry(0, 1),
    "uuid a number": entry(1, 5),
    "weights that leave the folder": entry(5, "../../precious"),
    "weights a number": entry(5, 5),
    "weights too long": entry(5, "w" * 300),
    "layout unknown": entry(6, 77),
    "start huge": entry(7, 2**50),
    "start negative": entry(7, -4096),
    "size negative": entry(8, -1),
    "checksum of 2^40": entry(9, 2**40),
    "leaf huge": rows(2, [10**6]),
    "leaf of 2^200 bytes": rows(2, [2**40] * 5),
    "leaf of 60 axes": rows(2, [1] * 60),
    "leaf negative": rows(2, [-1]),
    "dtype unknown": rows(1, "F999"),
    "leaves twice": rows(0, ["rewards"]),
    "leaf of no field": rows(0, ["secret"]),
    "path empty": rows(0, []),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_index_is_refused_and_nothing_outside_is_touched(tmp_path: Path, what: str) -> None:
    (tmp_path / "precious.txt").write_text("thesis")
    fill(tmp_path / "live", range(3))
    forge(tmp_path / "live", FORGED[what])
    before = files(tmp_path / "live")
    for cache in (0, 5):
        with pytest.raises(StorageError, match="its content is wrong"):
            build(tmp_path / "live", cache=cache)
    with build(tmp_path / "other") as buffer, pytest.raises(StorageError, match="its content is wrong"):
        buffer.load(tmp_path / "live")
    assert (tmp_path / "precious.txt").read_text() == "thesis"
    assert files(tmp_path / "live") == before


@pytest.mark.parametrize(
    "extra",
    [
        Entry(STATE, {"seed": -1, "calls": 0, "opens": 0, "next_id": 0, "id_step": 1}),
        Entry(STATE, {"seed": 1, "calls": 0, "opens": 0, "next_id": 0, "id_step": 0}),
        Entry(STATE, {"entries": 5}),
        Entry(DROP, {"drop": [99]}),
        Entry(DROP, {"drop": ["../precious.txt"]}),
        Entry(DROP, {"drop": [[0]]}),
        Entry(9, {"names": ["../precious.txt"]}),
        Entry(9, {"names": ["precious.txt"]}),
        Entry(77, {}),
        Entry(ADD, b"[1]"),
        Entry(ADD, b"{}, {}"),
        Entry(ADD, b"\xff"),
        Entry(ADD, {"add": [[1, 2]]}),
        Entry(ADD, {"add": 7}),
    ],
    ids=str,
)
def test_forged_record_is_refused(tmp_path: Path, extra: Entry) -> None:
    fill(tmp_path / "live", range(3))
    (tmp_path / "live" / "precious.txt").write_text("thesis")
    forge(tmp_path / "live", same, [extra])
    with pytest.raises(StorageError, match=r"its content is wrong|is not JSON"):
        build(tmp_path / "live")
    assert (tmp_path / "live" / "precious.txt").exists()
    assert len(files(tmp_path / "live")) == 3


def test_index_of_another_trajectory_s_file_is_refused_when_it_is_read(tmp_path: Path) -> None:
    fill(tmp_path / "live", range(3))
    with build(tmp_path / "small") as buffer:
        buffer.add([sw.Trajectory(rewards=np.zeros((1, 1), np.float32), model_weights_id="w_0")])
    shutil.copy(tmp_path / "small" / "trajectory_0_w_0.pt", tmp_path / "live" / "trajectory_1_w_0.pt")
    with build(tmp_path / "live", cache=0) as buffer:
        match = r"trajectory_1_w_0\.pt: expected \d+ bytes, got \d+"
        with pytest.raises(StorageError, match=match):
            draw_many(buffer, 18)


def test_engine_refuses_layouts_and_slabs_that_do_not_fit() -> None:
    core = sw._core
    good = core.SlabLayout(4, 3, 48, 0, [(0, 4, 12, 4, 0, 0)])
    for steps, envs, size, place in (
        (5, 3, 48, (0, 4, 12, 4, 0, 0)),
        (4, 3, 48, (4, 4, 12, 4, 0, 0)),
        (4, 3, 48, (0, 4, 2**63, 4, 0, 0)),
        (4, 3, 48, (0, 4, 12, 4, 1, 1)),
        (0, 3, 48, (0, 4, 12, 4, 0, 0)),
        (2**40, 2**40, 48, (0, 0, 0, 0, 0, 0)),
    ):
        with pytest.raises(StorageError, match="the layout of a slab"):
            core.SlabLayout(steps, envs, size, 0, [place])
    rows = core.Trajectories()
    rows.append(0, 4, 3)
    slab = np.zeros(48, np.uint8)
    with pytest.raises(SchemaError, match="too small"):
        rows.hold(0, slab[:40], good)
    with pytest.raises(StorageError, match="expected a slab of 4 steps and 3 environments, got 2 and 3"):
        rows.hold(0, slab, core.SlabLayout(2, 3, 48, 0, [(0, 4, 12, 4, 0, 0)]))
    draw = rows.draw(12, 0, 1, 1)
    with pytest.raises(StorageError, match="has no step"):
        draw.fill(0, slab, core.SlabLayout(1, 1, 48, 0, [(0, 4, 12, 4, 0, 0)]))
    rows.hold(0, slab, good)
    with pytest.raises(SchemaError, match="rows of another kind"):
        rows.draw(4, 0, 1, 1).gather(core.RowKinds([(np.dtype("<f8"), ())]))
    with pytest.raises(SchemaError, match="rows of another kind"):
        rows.draw(4, 0, 1, 1).gather(core.RowKinds([(np.dtype("<f4"), ()), (np.dtype("<f4"), ())]))
    with pytest.raises(StorageError, match="more rows than can be counted"):
        rows.append(1, 2**63, 2)


# ---- hostile files ---------------------------------------------------------------------------------------------------


def pt_with(path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")


def nested_dicts(depth: int) -> bytes:
    """Dicts with the same dict under two names, again and again: two to the depth places in a few bytes."""
    text = b"\x80\x02}" + b"q\0"
    for level in range(depth):
        text += (
            b"}" + b"q" + bytes([level + 1]) + b"(X\1\0\0\0ah" + bytes([level]) + b"X\1\0\0\0bh" + bytes([level]) + b"u"
        )
    return text + b"."


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02}r" + struct.pack("<I", 2**26) + b".",
        b"\x80\x02}r" + struct.pack("<I", 2**31) + b".",
        b"\x80\x02(c_codecs\nencode\nX\x06\0\0\0latin1tR.",
        nested_dicts(40),
        b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.",
        b"\x80\x02cbuiltins\neval\nX\x01\0\0\x001\x85R.",
        b"\x80\x02}}b.",
    ],
    ids=["memo of 2^26", "memo of 2^31", "no text", "dicts in dicts", "frame", "eval", "state of a dict"],
)
def test_small_hostile_pt_file_takes_no_memory_and_no_time(tmp_path: Path, pickled: bytes) -> None:
    write_rlinf(tmp_path / "rlinf", {0: make(0)}, era=2)
    pt_with(tmp_path / "rlinf" / "trajectory_0_w_0.pt", pickled)
    code = """
import resource, sys
import sharpwave as sw
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    sw.TrajectoryReplayBuffer(sys.argv[1])
except sw.errors.StorageError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = run(code, tmp_path / "rlinf", timeout=120)
    assert done.returncode == 0, done.stderr
    error, grown = done.stdout.splitlines()
    assert "trajectory_0_w_0.pt" in error
    assert int(grown) < 30_000, "kilobytes"


def test_same_bytes_named_many_times_are_refused(tmp_path: Path) -> None:
    text = "x" * 100_000
    encoded = b"c_codecs\nencode\nq\2(h\0h\1tR"
    pickled = (
        b"\x80\x02X" + struct.pack("<I", len(text)) + text.encode() + b"q\0X\x06\0\0\0latin1q\1" + encoded * 50 + b"."
    )
    write_rlinf(tmp_path / "rlinf", {0: make(0)}, era=2)
    pt_with(tmp_path / "rlinf" / "trajectory_0_w_0.pt", pickled)
    with pytest.raises(StorageError, match="holds the same bytes many times: refused"):
        build(tmp_path / "rlinf")


def test_tensor_whose_rows_are_all_the_same_bytes_does_not_fill_the_memory(tmp_path: Path) -> None:
    trajectory = make(0)
    trajectory.actions = torch.zeros(1).expand(3, 2, 2**40)
    write_rlinf(tmp_path / "rlinf", {0: trajectory}, era=2)
    with build(tmp_path / "live") as buffer, pytest.raises(StorageError, match=r"its rows are \d+ bytes, and the file"):
        buffer.load(tmp_path / "rlinf")


# ---- files that are mapped -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["pt", "safetensors"])
def test_flipped_bit_in_a_file_that_is_mapped_is_told(tmp_path: Path, format: str) -> None:
    fill(tmp_path / "live", range(3), format=format)
    path = tmp_path / "live" / f"trajectory_1_w_0.{format}"
    data = bytearray(path.read_bytes())
    data[data.index(np.float32(1001).tobytes())] ^= 1
    path.write_bytes(data)
    with build(tmp_path / "live", cache=0) as buffer:
        match = r"trajectory_1_w_0\.\w+: damaged: its checksum is not the index's"
        with pytest.raises(StorageError, match=match):
            draw_many(buffer, 18)


def test_flipped_bit_in_a_file_of_rlinf_is_told(tmp_path: Path) -> None:
    write_rlinf(tmp_path / "rlinf", {number: make(number) for number in range(3)}, era=2)
    path = tmp_path / "rlinf" / "trajectory_1_w_0.pt"
    data = bytearray(path.read_bytes())
    data[data.index(np.float32(1001).tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"damaged: storage \d+ does not have its checksum"):
        build(tmp_path / "rlinf")
    with build(tmp_path / "rlinf", cache=0) as buffer:
        match = r"damaged: storage \d+ does not have its checksum"
        with pytest.raises(StorageError, match=match):
            draw_many(buffer, 18)


def test_file_that_is_written_to_while_it_is_mapped_is_checked_again(tmp_path: Path) -> None:
    fill(tmp_path / "live", range(2))
    path = tmp_path / "live" / "trajectory_0_w_0.pt"
    data = path.read_bytes()
    with build(tmp_path / "live", cache=0) as buffer:
        check(buffer.sample(12), 12)
        at = data.index(np.float32(1).tobytes())
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
        os.utime(path, ns=(0, 1))
        with pytest.raises(StorageError, match="damaged: its checksum"):
            draw_many(buffer, 12)
        with path.open("r+b") as file:
            file.write(data)
        os.utime(path, ns=(0, 2))
        for _ in range(20):
            check(buffer.sample(12), 12)


def test_file_that_is_cut_while_it_is_mapped_is_an_error_not_a_signal(tmp_path: Path) -> None:
    code = """
import os, sys
import numpy as np
import sharpwave as sw
def make(n):
    rewards = np.full((600, 2), n, np.float32)
    return sw.Trajectory(rewards=rewards, curr_obs={"s": np.zeros((600, 2, 40), np.float32)}, model_weights_id="w")
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt", cache=0)
buffer.add([make(n) for n in range(3)])
buffer.flush()
buffer.sample(500)
os.truncate(sys.argv[1] + "/trajectory_1_w.pt", int(sys.argv[2]))
for call in (lambda: buffer.sample(500), lambda: buffer.get(1)):
    try:
        call()
    except sw.errors.StorageError as error:
        print(error)
"""
    for size in (0, 100, 4096, 150_000, 196_000):
        done = run(code, tmp_path / str(size), size)
        assert done.returncode == 0, (size, done.returncode, done.stderr)
        assert done.stdout.count("trajectory_1_w.pt: expected") == 2


def test_few_descriptors_are_enough_for_many_files(tmp_path: Path) -> None:
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
import sharpwave as sw
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt", cache=0)
buffer.add([sw.Trajectory(rewards=np.full((2, 1), n, np.float32)) for n in range(300)])
buffer.flush()
for _ in range(5):
    batch = buffer.sample(500)
    assert (batch["rewards"] == batch["trajectory_id"]).all()
buffer.close()
"""
    done = run(code, tmp_path / "live")
    assert done.returncode == 0, done.stderr


# ---- life and death --------------------------------------------------------------------------------------------------


def test_forked_child_neither_keeps_the_folder_nor_writes_to_it(tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
import sharpwave as sw
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt")
buffer.add([make(0)])
buffer.flush()
with buffer._store._lock, buffer._store._adding:  # as another thread may have them when this one forks
    pid = os.fork()
if pid == 0:
    signal.alarm(120)
    told = 0
    for call in (
        lambda: buffer.add([make(1)]), lambda: buffer.sample(1), buffer.flush, buffer.clear,
        lambda: buffer.save(sys.argv[1] + "-c"), lambda: buffer.load(sys.argv[1]),
        lambda: buffer.get(0), lambda: list(buffer.trajectories()), lambda: len(buffer), buffer.stats,
        lambda: buffer._store._folder.append([buffer._store._folder.index.state_record()]),
    ):
        try:
            call()
        except sw.errors.ClosedError:
            told += 1
    buffer.close()
    print(told, flush=True)
    sys.exit(0)  # finalizers run
assert os.waitpid(pid, 0)[1] == 0
buffer.add([make(2)])
buffer.close()
"""
    done = run(code, tmp_path / "live")
    assert (done.returncode, done.stdout.strip()) == (0, "11"), done.stderr
    assert held(tmp_path / "live") == [0, 2]


def test_killed_owner_whose_forked_child_lives_can_start_again(tmp_path: Path) -> None:
    code = """
import os, sys, time
import sharpwave as sw
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt")
buffer.add([make(0)])
buffer.flush()
if os.fork() == 0:
    print(os.getpid(), flush=True)  # it runs: until then it has all that its parent has
    time.sleep(600)
time.sleep(600)
"""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {HERE!r})\n{code}", str(tmp_path / "live")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            with pytest.raises(StorageError, match=rf"another buffer \(process {owner.pid}\) has it open"):
                build(tmp_path / "live")
            owner.kill()
            owner.wait()
            assert held(tmp_path / "live") == [0]
        finally:
            os.kill(child, signal.SIGKILL)


def test_reading_and_copying_an_open_folder_leaves_it_open(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0)])
        buffer.flush()
        shutil.copytree(tmp_path / "live", tmp_path / "backup")
        with pytest.raises(StorageError, match="has it open"):
            build(tmp_path / "live")
        assert held(tmp_path / "backup") == [0]
        buffer.add([make(1)])
    assert held(tmp_path / "live") == [0, 1]


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's limit is needed, which root can take on")
def test_without_a_thread_nothing_counts_and_nothing_hangs(open_folder: Path) -> None:
    open_folder.chmod(0o777)
    code = """
import os, resource, sys
import sharpwave as sw
import torch
from slabs import make
trajectories = [make(0), make(1)]
Buffer = sw.TrajectoryReplayBuffer  # imported here: the other user may not be allowed to read the files
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setuid(54321)
buffer = Buffer(sys.argv[1], format="pt")
for call in (lambda: buffer.add(trajectories), lambda: buffer.save(sys.argv[1] + "-c")):
    try:
        call()
        print("no error")
    except sw.errors.StorageError as error:
        print(error)
print(len(buffer), buffer.stats()["transitions"], buffer.stats()["unsaved"])
buffer.close()
print("closed")
"""
    done = run(code, open_folder / "live", timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, counts, end = done.stdout.splitlines()
    assert first.startswith("add(): cannot start the thread that saves trajectories: ")
    assert "nothing was changed: allow this process more threads" in first
    assert second.startswith("save(): cannot start the thread")
    assert (counts, end) == ("0 0 0", "closed")


def test_dropped_files_that_a_killed_process_left_are_collected(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import sharpwave as sw
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt", capacity=4)
buffer._store._folder.pin(1)  # as a checkpoint that is being taken does
for number in range(40):
    buffer.add([make(number)])
    if number % 3 == 0:
        buffer.flush()
buffer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(code, tmp_path / "live").returncode == -signal.SIGKILL
    assert len(files(tmp_path / "live")) == 40
    assert held(tmp_path / "live") == [36, 37, 38, 39]
    assert files(tmp_path / "live") == [f"trajectory_{number}_w_0.pt" for number in range(36, 40)]


def test_file_whose_record_was_never_written_is_collected(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import sharpwave as sw
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1], format="pt")
buffer.add([make(0)])
buffer.flush()
buffer._store._folder.append = lambda records: os.kill(os.getpid(), signal.SIGKILL)
buffer.add([make(1)])
buffer.flush()
"""
    assert run(code, tmp_path / "live").returncode == -signal.SIGKILL
    assert len(files(tmp_path / "live")) == 2
    assert held(tmp_path / "live") == [0]
    assert len(files(tmp_path / "live")) == 1
    fill(tmp_path / "live", [5])
    assert held(tmp_path / "live") == [0, 5]


def test_leftovers_of_killed_checkpoints_go_and_those_being_made_stay(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import sharpwave as sw
from sharpwave.trajectories import checkpoint
from slabs import make
buffer = sw.TrajectoryReplayBuffer(sys.argv[1] + "/live", format="pt")
buffer.add([make(number) for number in range(3)])
made = checkpoint.write_upstream
def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[2] == "kill" else signal.SIGSTOP)
checkpoint.write_upstream = die
buffer.save(sys.argv[1] + "/checkpoint")
"""
    assert run(code, tmp_path, "kill").returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".checkpoint.*.tmp"))) == 1
    (tmp_path / ".checkpoint.notes.tmp").mkdir()
    (tmp_path / ".checkpoint.01234567.tmp").mkdir()
    (tmp_path / ".checkpoint.01234567.tmp" / "mine").touch()
    (tmp_path / "live").rename(tmp_path / "first")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {HERE!r})\n{code}", str(tmp_path), "stop"]
    with subprocess.Popen(command) as maker:
        try:
            os.waitid(os.P_PID, maker.pid, os.WSTOPPED | os.WNOWAIT)
            being_made = [path for path in tmp_path.glob(".checkpoint.*.tmp") if len(list(path.iterdir())) > 1]
            assert len(being_made) == 1, "the killed one's is gone"
            with build(tmp_path / "first") as buffer:
                buffer.save(tmp_path / "checkpoint")
            assert being_made[0].exists()
        finally:
            maker.kill()
    assert held(tmp_path / "checkpoint") == [0, 1, 2]
    with build(tmp_path / "first") as buffer:
        buffer.save(tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.glob(".checkpoint.*.tmp")) == [
        ".checkpoint.01234567.tmp",
        ".checkpoint.notes.tmp",
    ]


def test_recovered_folder_counts_what_is_lost(tmp_path: Path) -> None:
    with build(tmp_path / "live") as buffer:
        for number in range(6):
            buffer.add([make(number)])
            buffer.flush()
    (tmp_path / "live" / "trajectory_4_w_0.pt").unlink()
    with build(tmp_path / "live", cache=0) as buffer, pytest.raises(FileNotFoundError, match="got no file"):
        draw_many(buffer, 36)
    with pytest.warns(
        UserWarning, match="1 trajectories of the index have no whole file or no layout and are left out"
    ):
        buffer = build(tmp_path / "live", recover=True)
    assert numbers_of(buffer) == [0, 1, 2, 3, 5]
    buffer.close()
    assert held(tmp_path / "live") == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("is_killed", [False, True])
def test_index_that_was_cut_to_nothing_is_told(tmp_path: Path, is_killed: bool) -> None:
    with build(tmp_path / "live") as buffer:
        buffer.add([make(number) for number in range(3)])
        buffer.flush()
        if is_killed:
            shutil.copytree(tmp_path / "live", tmp_path / "killed")
    folder = tmp_path / ("killed" if is_killed else "live")
    os.truncate(folder / INDEX, 0)
    with pytest.raises(StorageError, match="damaged: it has no record, and 3 files of trajectories are beside it"):
        build(folder)
    with pytest.warns(UserWarning, match="its index is lost, with 3 files beside it"):
        buffer = build(folder, recover=True)
    assert numbers_of(buffer) == ([] if is_killed else [0, 1, 2])
    buffer.add([make(5)])
    buffer.close()
    assert len(files(folder)) == 4
    assert held(folder)[-1] == 5


def test_index_of_the_version_before_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "index.jsonl").write_text("{}")
    with pytest.raises(StorageError, match=r"its index is index\.jsonl, of a Sharpwave before"):
        build(tmp_path / "live")
    assert os.listdir(tmp_path / "live") == ["index.jsonl"]


# ---- what is no argument ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"allow_pickle": "False"},
        {"allow_pickle": 1},
        {"recover": "yes"},
        {"folder": 5},
        {"folder": ""},
        {"folder": "a\0b"},
        {"device": "nowhere"},
        pytest.param({"device": object()}, id="a device of no kind"),
        {"format": ["pt"]},
        {"seed": "1"},
        {"cache": None},
        {"cache": 2.5},
    ],
    ids=str,
)
def test_settings_of_the_wrong_kind_are_schema_errors(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=next(iter(options))):
        sw.TrajectoryReplayBuffer(**{"folder": tmp_path / "live", **options})
    assert not (tmp_path / "live").exists()


def test_arguments_of_the_wrong_kind_are_schema_errors_and_change_nothing(tmp_path: Path) -> None:
    masked = make(1)
    masked.rewards = np.ma.masked_array(masked.rewards.numpy(), np.zeros((3, 2), bool))
    surrogate = make(1)
    surrogate.curr_obs = {"\ud800": surrogate.rewards}
    weights = make(1)
    weights.model_weights_id = "\ud800"
    axes = make(1)
    axes.actions = np.zeros((3, 2, *[1] * 29), np.float32)
    with build(tmp_path / "live") as buffer:
        buffer.add([make(0)])
        before = buffer.sample(6)
        buffer.flush()
        stats = buffer.stats()
        for call in (
            lambda: buffer.add(None),  # type: ignore[arg-type]
            lambda: buffer.add(5),  # type: ignore[arg-type]
            lambda: buffer.add([5]),
            lambda: buffer.add([{"rewards": before}]),
            lambda: buffer.add([masked]),
            lambda: buffer.add([surrogate]),
            lambda: buffer.add([weights]),
            lambda: buffer.add([axes]),
            lambda: buffer.sample("6"),  # type: ignore[arg-type]
            lambda: buffer.sample(6, device="nowhere"),
            lambda: buffer.get("6"),  # type: ignore[arg-type]
            lambda: buffer.load(5),  # type: ignore[arg-type]
            lambda: buffer.load(tmp_path / "live", rank=1),
            lambda: buffer.load(tmp_path / "live", world_size="2"),  # type: ignore[arg-type]
            lambda: buffer.load(tmp_path / "live", split_by="size"),
            lambda: buffer.clear(set_aside=1),  # type: ignore[arg-type]
        ):
            with pytest.raises(SchemaError):
                call()
        assert buffer.stats() == stats
        assert buffer._store._contents.calls == 1


def test_buffer_without_files_has_checkpoints(tmp_path: Path) -> None:
    with sw.TrajectoryReplayBuffer(None, capacity=4, format="pt") as buffer:
        buffer.save(tmp_path / "empty")
        buffer.add([make(number, epochs=3 * (number % 2)) for number in range(6)])
        buffer.save(tmp_path / "checkpoint")
        buffer.save(tmp_path / "checkpoint")
        after = buffer.sample(12)["rewards"]
    assert sorted(read_rlinf(tmp_path / "checkpoint")) == [2, 3, 4, 5]
    with sw.TrajectoryReplayBuffer(None, capacity=4, format="pt") as buffer:
        buffer.load(tmp_path / "checkpoint")
        assert np.array_equal(buffer.sample(12)["rewards"], after), "the random stream goes on"
        for number, trajectory in buffer.trajectories():
            assert np.array_equal(trajectory.dones, make(number, epochs=3 * (number % 2)).dones.numpy())
        buffer.load(tmp_path / "empty")
        assert len(buffer) == 0


def test_merge_of_a_killed_move_removes_what_its_journal_names(tmp_path: Path) -> None:
    for rank in range(2):
        fill(tmp_path / "ranks" / f"rank_{rank}", [10 * rank, 10 * rank + 1])
    code = """
import os, signal, sys
from pathlib import Path
from sharpwave.trajectories.ranks import merge
Path.unlink = lambda self, missing_ok=False: os.kill(os.getpid(), signal.SIGKILL)
merge(sys.argv[1] + "/ranks", sys.argv[1] + "/merged")
"""
    assert run(code, tmp_path).returncode == -signal.SIGKILL
    assert held(tmp_path / "merged") == [0, 10, 1, 11]
    assert len(files(tmp_path / "ranks" / "rank_0")) == 2
    assert held(tmp_path / "ranks" / "rank_0") == []
    assert files(tmp_path / "ranks" / "rank_0") == []
    merge(tmp_path / "ranks", tmp_path / "again")
    assert held(tmp_path / "again") == [10, 11]
