"""`sharpwave serve` and its relatives as processes: what they print, how they end, and with which code."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from patience import HANG_S

pytest.importorskip("zmq")
pytest.importorskip("typer")
pytest.importorskip("rich")

import sharpwave as sw
from sharpwave.errors import NotReady

CONFIG = """
at = "tcp://127.0.0.1:0"
[tables.replay.create]
face = "ReplayBuffer"
capacity = 1_000
obs_shape = [2]
storage = "file://replay.sw"
[tables.small.create]
face = "ReplayBuffer"
capacity = 10
obs_shape = [2]
pace = { kind = "min_size", n = 5 }
"""


def sharpwave(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sharpwave", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


@contextmanager
def serving(*words: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address, which is its first line."""
    command = [sys.executable, "-m", "sharpwave", "serve", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address:
                raise AssertionError(process.communicate(timeout=HANG_S)[1])
            yield process, address
        finally:
            process.kill()


def add(buffer: object, number: int) -> None:
    obs = np.full(2, number, np.float32)
    buffer.add(obs, 0.0, float(number), obs, False)  # type: ignore[attr-defined]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_a_new_server_goes_on(config: Path, number: int) -> None:
    with serving(config) as (process, address):
        with sw.open(f"{address}/replay", direct=False) as buffer:
            for value in range(10):
                add(buffer, value)
        process.send_signal(number)
        out, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, out, errors) == (0, "", "")
    with sw.open(f"file://{config.parent}/replay.sw") as buffer:
        assert len(buffer) == 10
        assert buffer.stats()["recoveries"] == 0, "it was not closed in order"
    with serving(config) as (_, address), sw.open(f"{address}/replay", direct=False) as buffer:
        assert len(buffer) == 10


def test_calls_that_wait_end_when_it_is_told_to_end(config: Path) -> None:
    with serving(config) as (process, address), sw.open(f"{address}/small") as buffer:
        ends: list[str] = []

        def sample() -> None:
            try:
                buffer.sample(1, timeout=20)
            except (NotReady, sw.errors.ClosedError) as error:
                ends.append(type(error).__name__)

        thread = threading.Thread(target=sample)
        thread.start()
        time.sleep(0.3)
        begun = time.monotonic()
        process.terminate()
        assert process.wait(HANG_S) == 0
        assert time.monotonic() - begun < 15
        buffer.close()
        thread.join(HANG_S)
        assert ends


def test_a_killed_server_loses_no_row_of_its_file(config: Path) -> None:
    with serving(config) as (process, address), sw.open(f"{address}/replay", direct=False) as buffer:
        for value in range(100):
            add(buffer, value)
        process.kill()
        process.wait()
    with serving(config) as (_, address), sw.open(f"{address}/replay", direct=False) as buffer:
        rewards = [float(reward) for rows in buffer.rows() for reward in rows["reward"]]
        assert rewards == list(range(100))


def test_ls_info_and_rm_ask_the_server(config: Path) -> None:
    with serving(config) as (_, address):
        with sw.open(f"{address}/replay") as buffer:
            add(buffer, 1)
        listed = json.loads(sharpwave("ls", address, "--json").stdout)
        assert listed[0] == {"name": "replay", "face": "ReplayBuffer", "size": 1, "capacity": 1_000}
        shown = sharpwave("ls", address).stdout.splitlines()
        assert [line.split() for line in shown] == [
            ["address", "face", "size", "capacity"],
            [f"{address}/replay", "ReplayBuffer", "1", "1,000"],
            [f"{address}/small", "ReplayBuffer", "0", "10"],
        ]
        assert json.loads(sharpwave("info", f"{address}/replay", "--json").stdout)["size"] == 1
        removed = sharpwave("rm", f"{address}/replay")
        assert (removed.returncode, removed.stdout) == (0, f"removed {address}/replay\n")
        assert not (config.parent / "replay.sw").exists()
        again = sharpwave("rm", f"{address}/nothing")
        assert again.returncode == 1
        assert "has no table 'nothing'" in again.stderr


def test_existing_buffers_are_served_by_their_addresses(tmp_path: Path, shm_address: str) -> None:
    with sw.ReplayBuffer(10, obs_shape=(2,), storage=shm_address) as shared:
        add(shared, 1)
        sw.ReplayBuffer(20, obs_shape=(2,), storage=f"file://{tmp_path}/live.sw").close()
        words = (f"own={shm_address}", f"file://{tmp_path}/live.sw", "--at", f"ipc://{tmp_path}/socket")
        with serving(*words) as (_, address):
            assert address == f"ipc://{tmp_path}/socket"
            listed = json.loads(sharpwave("ls", address, "--json").stdout)
            assert {table["name"]: table["size"] for table in listed} == {"own": 1, "live": 0}
            with sw.open(f"{address}/own", direct=False) as remote:
                add(remote, 2)
            assert len(shared) == 2


def test_a_server_with_keys_and_the_commands_of_its_clients(config: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = sharpwave("keys", "new", "boss", "--role", "read,write,admin", "--folder", keys)
    assert (made.returncode, made.stdout) == (0, f"{keys / 'boss.key'}\n")
    assert sharpwave("keys", "new", "reader", "--role", "read", "--folder", keys).returncode == 0
    listed = [line.split("\t")[:2] for line in sharpwave("keys", "list", "--folder", keys).stdout.splitlines()]
    assert listed == [["boss", "read,write,admin"], ["reader", "read"]]
    with serving(config, "--at", "tcp://127.0.0.1:0", "--keys", keys) as (_, address):
        refused = sharpwave("ls", address)
        assert refused.returncode == 1
        assert "keys=" in refused.stderr
        listed = json.loads(sharpwave("ls", address, "--json", "--keys", keys / "reader.key").stdout)
        assert [table["name"] for table in listed] == ["replay", "small"]
        info = sharpwave("info", f"{address}/replay", "--json", "--keys", keys / "reader.key")
        assert json.loads(info.stdout)["size"] == 0
        refused = sharpwave("rm", f"{address}/replay", "--keys", keys / "reader.key")
        assert refused.returncode == 1
        assert "needs the role 'admin'" in refused.stderr
        assert sharpwave("keys", "revoke", "reader", "--folder", keys).stdout == "revoked reader\n"
        assert sharpwave("rm", f"{address}/replay", "--keys", keys / "boss.key").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing.toml",), "nothing.toml: cannot be read"),
        (("wrong.toml",), "'capcity' is not an argument of ReplayBuffer; did you mean 'capacity'?"),
        (("shm://nothing-here", "--at", "tcp://127.0.0.1:0"), "shm://nothing-here"),
        (("shm://a",), "expected --at tcp://host:port"),
        (("right.toml", "--at", "tcp://127.0.0.1"), "expected 'tcp://host:port' or 'ipc:///path'"),
        (("right.toml", "--at", "udp://127.0.0.1:1"), "expected 'tcp://host:port' or 'ipc:///path'"),
        (("right.toml", "--at", "tcp://0.0.0.0:0"), "can be reached from other machines; give keys="),
        (("right.toml", "--keys", "nowhere"), "there is no folder"),
        (("right.toml", "--at", "tcp://127.0.0.1:PORT"), "cannot listen on"),
        (("limits.toml",), "clientz"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_start_that_fails_says_why_in_one_line_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "right.toml").write_text(CONFIG)
    (tmp_path / "wrong.toml").write_text(CONFIG.replace("capacity = 10\n", "capcity = 10\n"))
    (tmp_path / "limits.toml").write_text(
        CONFIG.replace("[tables.replay.create]", "[limits]\nclientz = 3\n[tables.replay.create]")
    )
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = sharpwave("serve", *(word.replace("PORT", port) for word in words))
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("sharpwave: ")
    assert said in line
    assert "Traceback" not in done.stderr


def test_the_commands_say_that_pyzmq_is_missing() -> None:
    source = (
        "import sys; sys.modules['zmq'] = None; sys.argv = ['sharpwave', 'keys', 'list']; "
        "from sharpwave.tools.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 1
    assert (
        done.stderr == 'sharpwave: this command needs zmq, which is not installed: pip install "sharpwave[cli,serve]"\n'
    )
