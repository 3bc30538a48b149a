"""examples/remote_apex.py as separate commands: they train together, with keys, and go on after kills."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from patience import HANG_S, until

pytest.importorskip("zmq")
pytest.importorskip("torch")
pytest.importorskip("gymnasium")

import sharpwave as sw
from sharpwave.service.keys import make_key

EXAMPLE = Path(__file__).parents[2] / "examples" / "remote_apex.py"


@contextmanager
def command(*words: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no {pattern!r} in {seen}: {process.communicate()[1]}")


def test_server_actors_and_learner_train_together_with_keys(tmp_path: Path) -> None:
    learner_key, actor_key = (make_key(tmp_path / "keys", name) for name in ("learner", "actor"))
    with ExitStack() as ends:
        server = ends.enter_context(command("server", "--at", "tcp://127.0.0.1:0", "--keys", tmp_path / "keys"))
        at = read_until(server, r"serving at (\S+)")[1]
        words = ("learner", "--at", at, "--keys", learner_key, "--updates", 300)
        learner = ends.enter_context(command(*words))
        actors = [
            ends.enter_context(command("actor", "--at", at, "--keys", actor_key, "--number", number, "--of", 2))
            for number in range(2)
        ]
        for number, actor in enumerate(actors):
            read_until(actor, rf"actor {number}: epsilon")
        final = read_until(learner, r"greedy return over 20 episodes: ([\d.]+)")
        assert float(final[1]) >= 8  # no pole falls in fewer steps
        assert learner.wait(HANG_S) == 0
        for process in (*actors, server):
            process.terminate()
            assert process.wait(HANG_S) == 0, process.communicate()[1]


def test_the_others_go_on_when_server_and_actor_are_killed_and_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        at = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    words = ("server", "--at", at, "--folder", tmp_path)

    def rows_added() -> int:
        with sw.open(f"{at}/replay", direct=False) as buffer:
            return int(buffer.stats()["rows_added"])

    with ExitStack() as ends:
        server = ends.enter_context(command(*words))
        read_until(server, "serving at")
        learner = ends.enter_context(command("learner", "--at", at, "--updates", 10**9, "--stop-return", 1e9))
        first, second = (ends.enter_context(command("actor", "--at", at, "--number", number)) for number in range(2))
        read_until(first, "epsilon")
        until(lambda: rows_added() > 600)
        first.kill()
        before = rows_added()
        until(lambda: rows_added() > before + 100)
        assert second.poll() is None
        server.kill()
        server.wait()
        server = ends.enter_context(command(*words))
        read_until(server, "serving at")
        after = rows_added()
        assert after >= before
        third = ends.enter_context(command("actor", "--at", at, "--number", 0))
        read_until(third, "epsilon")
        until(lambda: rows_added() > after + 200)
        assert second.poll() is learner.poll() is None
