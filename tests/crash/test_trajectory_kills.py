"""Processes that are killed while they add, flush, checkpoint, load, merge and split trajectories."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trajectory_child import call_of, check, make

import sharpwave as sw
from sharpwave.trajectories.ranks import split

SOAK = bool(os.environ.get("SHARPWAVE_SOAK"))
KILLED = -signal.SIGKILL
# What a process did not finish writing was not acknowledged: it is cut off, and that is said.
pytestmark = pytest.mark.filterwarnings("ignore:.*its last record was not written whole")


class Jobs:
    """The process that forks the ones that die."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("trajectory_child.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, **job: Any) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job, default=str) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.close()


def ways(do: str, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Ways to die: at one call after the other, and at random moments."""
    rng = random.Random(f"{do}{seed}")
    for number in range(count):
        if number % 4 == 3:
            yield {"us": rng.randrange(500, 60_000 if do in ("add", "checkpoint", "budget", "calls") else 15_000)}
        else:
            how = ("before", "after", "middle")[number % 3]
            yield {"calls": 1 + number % 60, "how": how}


def said(root: Path) -> Counter[str]:
    """The highest number of every kind of thing that was said to be done."""
    found = Counter[str]()
    lines = (root / "said").read_text().splitlines() if (root / "said").exists() else []
    for line in lines:
        kind, _, number = line.partition(" ")
        found[kind] = max(found[kind], int(number or 1))
    return found


@pytest.mark.parametrize("do", ["add", "checkpoint", "budget"])
def test_killed_writer_leaves_a_prefix(tmp_path: Path, jobs: Jobs, do: str) -> None:
    kills = 0
    for way in ways(do, 1_000 if SOAK else 25):
        kills += jobs.run(do=do, folder=tmp_path, **way) == KILLED
        done = said(tmp_path)
        numbers = check(tmp_path / "live") if (tmp_path / "live").exists() else []
        first = numbers[0] if numbers else 0
        assert numbers == list(range(first, first + len(numbers)))
        assert do == "budget" or first == 0
        assert first + len(numbers) >= done["flushed"]
        assert do != "budget" or len(numbers) <= 6 + 3  # what was added before its drop was said
        if done["checkpoint"]:
            shutil.copytree(tmp_path / "checkpoint", tmp_path / "look")
            saved = check(tmp_path / "look")
            assert saved == list(range(len(saved)))
            assert len(saved) >= done["checkpoint"]
            shutil.rmtree(tmp_path / "look")
            assert len(list(tmp_path.glob(".checkpoint.*.tmp"))) <= 2, "the next checkpoint takes leftovers away"
        if len(numbers) > 60:
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    print(f"{do}: {kills} kills")
    assert kills > 10


def test_killed_server_has_every_acknowledged_call_once_and_no_part_of_another(tmp_path: Path, jobs: Jobs) -> None:
    kills, unacknowledged, most = 0, 0, 0
    for round_, way in enumerate(ways("calls", 1_000 if SOAK else 400)):
        if not SOAK and round_ >= 60 and kills > 20 and most > 4:  # on a busy machine kills come early in a call
            break
        done = said(tmp_path)["acknowledged"]
        # As a client does after a restart: from the oldest call on whose answer it may not have.
        kills += jobs.run(do="calls", folder=tmp_path, first=max(0, done - 2), **way) == KILLED
        done = said(tmp_path)["acknowledged"]
        numbers = check(tmp_path / "live") if (tmp_path / "live").exists() else []
        calls = next(count for count in range(done, done + 3) if len(call_prefix(count)) >= len(numbers))
        assert numbers == call_prefix(calls), "all of a call or none, each once, in order"
        unacknowledged += calls > done
        most = max(most, calls)
        if len(numbers) > 150:
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    print(f"calls: {kills} kills, {unacknowledged} between the record and the answer, up to call {most}")
    assert kills > 20
    assert most > 4, "a call of many trajectories was among them"


def call_prefix(count: int) -> list[int]:
    return [number for call in range(count) for number in call_of(call)]


def test_killed_load_leaves_the_old_or_the_new_and_deletes_neither(tmp_path: Path, jobs: Jobs) -> None:
    with sw.TrajectoryReplayBuffer(tmp_path / "other", format="pt") as buffer:
        buffer.add([make(number) for number in range(100, 105)])
        buffer.save(tmp_path / "saved")
    kills = Counter[str]()
    for way in ways("load", 500 if SOAK else 20):
        shutil.rmtree(tmp_path / "live", ignore_errors=True)
        (tmp_path / "said").unlink(missing_ok=True)
        with sw.TrajectoryReplayBuffer(tmp_path / "live", format="pt") as buffer:
            buffer.add([make(number) for number in range(3)])
        if jobs.run(do="load", folder=tmp_path, **way) != KILLED:
            continue
        numbers = check(tmp_path / "live")
        is_new = numbers[:5] == list(range(100, 105))
        assert is_new or (numbers == [0, 1, 2] and not said(tmp_path)["loaded"])
        kills["new" if is_new else "old"] += 1
        if is_new:
            with sw.TrajectoryReplayBuffer(tmp_path / "live", format="pt") as buffer:
                assert buffer.stats()["set_aside"] == 3
            split(tmp_path / "live", tmp_path / "everything", len(numbers) + 3)
            assert sorted(check(tmp_path / "everything"))[:3] == [0, 1, 2]
            shutil.rmtree(tmp_path / "everything")
        shutil.copytree(tmp_path / "saved", tmp_path / "look")
        assert check(tmp_path / "look") == list(range(100, 105)), "the checkpoint is as it was"
        shutil.rmtree(tmp_path / "look")
    print(f"load: {kills.total()} kills")
    assert kills["old"] > 3


@pytest.mark.parametrize("do", ["merge", "split"])
def test_killed_tool_loses_nothing_and_lists_nothing_that_is_not_there(tmp_path: Path, jobs: Jobs, do: str) -> None:
    kills = 0
    for way in ways(do, 500 if SOAK else 20):
        shutil.rmtree(tmp_path / "merged", ignore_errors=True)
        shutil.rmtree(tmp_path / "ranks", ignore_errors=True)
        for rank in range(2):
            with sw.TrajectoryReplayBuffer(tmp_path / "ranks" / f"rank_{rank}", format="pt") as buffer:
                buffer.add([make(10 * rank + number) for number in range(4)])
                if rank:
                    buffer.save(tmp_path / "ranks" / "rank_1")  # with RLinf's files beside ours
        kills += jobs.run(do=do, folder=tmp_path, **way) == KILLED
        left = {number for rank in range(2) for number in check(tmp_path / "ranks" / f"rank_{rank}")}
        went = check(tmp_path / "merged") if (tmp_path / "merged").exists() else []
        whole = [0, 10, 1, 11, 2, 12, 3, 13] if do == "merge" else [0, 1, 2]
        assert went in ([], whole), "whole or not there"
        assert left | set(went) == {0, 1, 2, 3, 10, 11, 12, 13}
        for folder in tmp_path.glob(".merged.*.tmp"):
            shutil.rmtree(folder)
    print(f"{do}: {kills} kills")
    assert kills > 8
