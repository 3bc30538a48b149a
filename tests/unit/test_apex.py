"""examples/apex.py as processes: it trains, goes on when actors are killed, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from patience import HANG_S, until

from sharpwave import _core
from sharpwave.tools import segments

pytest.importorskip("torch")
pytest.importorskip("gymnasium")

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def learner(folder: Path, *command: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a group of its own, as a terminal's; its temporary files go into `folder`."""
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no {pattern!r} in {seen} before the run ended")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Nobody has asked yet how it ended: a zombie, where the machine's first process does not ask either.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def assert_nothing_is_left(process: subprocess.Popen[str], actors: list[int], folder: Path) -> None:
    for pid in actors:
        until(lambda pid=pid: is_gone(pid))
    assert list(Path(_core.shared_memory_folder).glob(f"*apex-{process.pid}*")) == []
    assert list(folder.glob("apex-*")) == []


def test_apex_trains_at_the_pace_it_promises_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with learner(tmp_path, str(EXAMPLES / "apex.py"), "--steps", "2000", "--stop-return", "1000") as process:
        actors = [int(read_until(process, rf"actor {actor}: process (\d+)")[1]) for actor in range(2)]
        told = read_until(process, r"([\d,]+) steps, ([\d,]+)/s, samples ([\d,]+)/s, best return ([\d.]+)")
        by_actor = [read_until(process, rf"actor {actor}: +([\d,]+) steps, return +([\d.]+)") for actor in range(2)]
        final = read_until(process, r"greedy return over 20 episodes: ([\d.]+)")
        assert process.wait(2 * HANG_S) == 0

    steps, added, sampled = (int(number.replace(",", "")) for number in told.groups()[:3])
    # 500 updates of 64 at 16 samples a row; each side may be 16 batches ahead.
    assert abs(steps - 500 - 500 * 64 / 16) <= 64
    assert sampled > added > 0
    own = [int(line[1].replace(",", "")) for line in by_actor]
    assert min(own) > 0
    assert abs(sum(own) - steps) <= 130  # they went on while this was told
    assert float(final[1]) >= 8  # no pole falls in fewer steps
    assert_nothing_is_left(process, actors, tmp_path)


def test_run_goes_on_when_actors_are_killed_and_ends_at_ctrl_c(tmp_path: Path) -> None:
    endless = ["--steps", "1000000000", "--stop-return", "1000"]
    with learner(tmp_path, str(EXAMPLES / "apex.py"), *endless) as process:
        address = f"shm://apex-{process.pid}"
        first, second = (int(read_until(process, rf"actor {actor}: process (\d+)")[1]) for actor in range(2))
        until(lambda: {first, second} < set(segments.read(address).pids))
        until(lambda: segments.read(address).rows_added > 600)

        os.kill(first, signal.SIGKILL)
        rows = segments.read(address).rows_added
        read_until(process, rf"actor 0: process {first} died \(-9\)")
        third = int(read_until(process, r"actor 0: process (\d+), epsilon 0.4000")[1])
        until(lambda: segments.read(address).rows_added > rows + 200)
        until(lambda: third in segments.read(address).pids)

        os.kill(second, signal.SIGKILL)  # now every row comes from an actor that took a dead one's place
        rows = segments.read(address).rows_added
        read_until(process, rf"actor 1: process {second} died \(-9\)")
        fourth = int(read_until(process, r"actor 1: process (\d+)")[1])
        until(lambda: segments.read(address).rows_added > rows + 200)

        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does
        _, errors = process.communicate(timeout=2 * HANG_S)
        assert process.returncode == 1
        assert "the actors and the buffer are gone" in errors
        assert "Traceback" not in errors
    assert_nothing_is_left(process, [first, second, third, fourth], tmp_path)


def test_nothing_is_left_behind_by_an_exception(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import apex

def fail(*arguments, **options):
    raise ValueError("broken on purpose")

apex.evaluate = fail
apex.train(apex.Config(actors=1))
"""
    with learner(tmp_path, "-c", code) as process:
        actor = int(read_until(process, r"actor 0: process (\d+)")[1])
        _, errors = process.communicate(timeout=2 * HANG_S)
    assert process.returncode == 1
    assert "broken on purpose" in errors
    assert_nothing_is_left(process, [actor], tmp_path)
