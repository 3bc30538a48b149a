"""Does things to folders of trajectories until it is killed: one process for every line on stdin.

A job says what to do, in which folder, and when to die: at the n-th call that changes a file (before it, after it, or,
of a write, in the middle), or after some microseconds. The answer is how the process ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave import _core
from sharpwave.files.origin import Origin
from sharpwave.trajectories.ranks import merge, split

CALL_SIZES = (1, 3, 2, 20, 4)
CALLS = ("rename", "link", "unlink", "ftruncate", "mkdir", "rmdir", "fsync", "fdatasync", "pwrite", "pwritev")


def make(number: int, steps: int = 4, envs: int = 2) -> sw.Trajectory:
    row = np.arange(steps * envs, dtype=np.float32).reshape(steps, envs) + number * 100
    obs = np.repeat(row[..., None], 30, 2)
    return sw.Trajectory(rewards=row, curr_obs={"state": obs}, next_obs={"state": obs + 0.5}, model_weights_id="w")


def check(folder: Path) -> list[int]:
    """Opens a folder as a user would; every trajectory in it must be whole. Their numbers."""
    with sw.TrajectoryReplayBuffer(folder, cache=1_000, format="pt") as buffer:
        numbers = []
        for _, trajectory in buffer.trajectories():
            number = int(trajectory.rewards[0, 0]) // 100
            assert np.array_equal(trajectory.rewards, make(number).rewards)
            assert np.array_equal(trajectory.next_obs["state"], make(number).next_obs["state"])
            numbers.append(number)
        buffer.flush()
        files = len(list(folder.glob("trajectory_*.pt*")))
        assert files == len(numbers) + buffer.stats()["set_aside"], "no file is left that the index does not list"
        if numbers:
            batch = buffer.sample(8)
            assert np.array_equal(batch["rewards"] + np.float32(0.5), batch["next_obs"]["state"][:, 7])
        return numbers


def call_of(number: int) -> range:
    """The numbers of the trajectories that the ``number``-th call of a client adds; every fifth call adds more than the
    folder may have files without a record."""
    first = sum(CALL_SIZES[part % len(CALL_SIZES)] for part in range(number))
    return range(first, first + CALL_SIZES[number % len(CALL_SIZES)])


def add_calls(live: Path, first: int, say: Callable[[str], None]) -> None:
    """Adds as the server does for a client that asks again from its ``first`` call on."""
    with sw.TrajectoryReplayBuffer(live, cache=2, format="pt") as buffer:
        store: Any = buffer._store
        for number in range(first, first + 6):
            origin = Origin(b"client" + bytes(10), number, max(0, number - 2))
            store.add("add()", [make(part) for part in call_of(number)], origin)
            say(f"acknowledged {number + 1}")


def die_at(count: int, how: str) -> None:
    """Kills this process at the count-th call that changes a file."""
    left = [count]
    guard = threading.Lock()

    def wrap(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with guard:
                left[0] -= 1
                is_now = left[0] == 0
            if is_now and how == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if is_now and how == "middle" and name == "pwritev":
                data = b"".join(args[1])
                os.pwrite(args[0], data[: len(data) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            done = call(*args, **kwargs)
            if is_now:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return wrapped

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name), name))
    whole = _core.NewFile

    class NewFile:
        """The engine's, with a place to die at each of its steps."""

        def __init__(self, path: str) -> None:
            self._made = wrap(whole, "new")(path)
            for step in ("write", "own", "sync", "publish"):
                setattr(self, step, wrap(getattr(self._made, step), step))

        @property
        def size(self) -> int:
            return self._made.size  # type: ignore[no-any-return]

    _core.NewFile = NewFile  # type: ignore[assignment,misc]
    _core.exchange_paths = wrap(_core.exchange_paths, "exchange")  # type: ignore[assignment]


def work(job: dict[str, Any]) -> None:
    root = Path(job["folder"])
    live, said = root / "live", os.open(root / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(what: str) -> None:
        os.write(said, f"{what}\n".encode())

    if job["do"] in ("add", "checkpoint", "load", "budget"):
        most = 6 if job["do"] == "budget" else None
        with sw.TrajectoryReplayBuffer(live, cache=2, capacity=most, format="pt") as buffer:
            if job["do"] == "load":
                buffer.load(root / "saved")
                say("loaded")
            index = buffer._store._kinds.index
            for turn in range(6):
                buffer.add([make(index.next_id + number) for number in range(1 + turn % 3)])
                buffer.sample(4)
                if turn % 2:
                    buffer.flush()
                    say(f"flushed {index.next_id}")
                if job["do"] == "checkpoint":
                    buffer.save(root / "checkpoint")
                    say(f"checkpoint {index.next_id}")
    elif job["do"] == "calls":
        add_calls(live, job["first"], say)
    elif job["do"] == "merge":
        merge(root / "ranks", root / "merged")
    else:
        split(root / "ranks" / "rank_0", root / "merged", 3)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                if "calls" in job:
                    die_at(job["calls"], job["how"])
                work(job)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if "us" in job:
            time.sleep(job["us"] / 1e6)
            os.kill(pid, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
