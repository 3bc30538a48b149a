"""Local sockets of servers: which file they take, and which they leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from service.server_child import ServerChild

import sharpwave as sw
from sharpwave.errors import StorageError


def empty() -> sw.ReplayBuffer:
    return sw.ReplayBuffer(10, obs_shape=(2,), seed=0)


def test_a_second_server_does_not_take_the_socket_of_a_live_one(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with sw.serve({"first": empty()}, address):
        with pytest.raises(StorageError, match="in use; give another address"):
            sw.serve({"second": empty()}, address)
        with sw.open(address + "/first") as buffer:
            assert len(buffer) == 0
    assert not (tmp_path / "socket").exists()


def test_a_server_takes_the_socket_of_a_dead_one(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with ServerChild(empty, address=address) as server:
        server.kill()
        assert (tmp_path / "socket").exists()
        with sw.serve({"it": empty()}, address), sw.open(address + "/it") as buffer:
            assert len(buffer) == 0


def test_a_stopped_server_keeps_its_socket(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with ServerChild(empty, address=address) as server:
        server.pause()
        with pytest.raises(StorageError, match="in use"):
            sw.serve({"it": empty()}, address)
        server.go_on()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "rows.sw").write_text("rows")
    with pytest.raises(StorageError, match="in use"):
        sw.serve({"it": empty()}, f"ipc://{tmp_path}/rows.sw")
    assert (tmp_path / "rows.sw").read_text() == "rows"


def test_a_server_that_ends_leaves_the_socket_of_its_successor(tmp_path: Path) -> None:
    path, address = tmp_path / "socket", f"ipc://{tmp_path}/socket"
    first = sw.serve({"it": empty()}, address)
    path.unlink()
    with sw.serve({"it": empty()}, address):
        first.close()
        with sw.open(address + "/it") as buffer:
            assert len(buffer) == 0
