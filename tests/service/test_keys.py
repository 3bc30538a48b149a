"""Servers with keys, and clients that have the right one or not: each refusal comes soon and says which it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq")

import sharpwave as sw
from sharpwave.errors import NotReady, SharpwaveError, StorageError
from sharpwave.service.keys import ClientKey, make_key, revoke_key
from sharpwave.service.session import list_tables, remove_table

SOON_S = 5.0


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """The block is refused with an error that has these words, within five seconds, and without a secret."""
    begun = time.monotonic()
    with pytest.raises(StorageError) as error:
        yield
    assert time.monotonic() - begun < SOON_S
    for word in words:
        assert word in str(error.value)


def row(number: int) -> dict[str, object]:
    obs = np.full(2, number, np.float32)
    return {"obs": obs, "action": 0.0, "reward": float(number), "next_obs": obs, "terminated": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_key(tmp_path / "keys", "all", ("read", "write", "admin"))
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> Iterator[sw.service.server.Server]:
    replay = sw.ReplayBuffer(100, obs_shape=(2,), sampler=sw.Prioritized(), seed=0)
    with sw.serve({"replay": replay}, "tcp://127.0.0.1:0", keys=folder) as server:
        yield server


def test_a_client_with_a_key_does_everything(server, folder: Path) -> None:
    with sw.open(f"{server.address}/replay", keys=folder / "all.key") as buffer:
        for number in range(10):
            buffer.add(**row(number))
        batch = buffer.sample(8)
        assert (batch["obs"][:, 0] == batch["reward"]).all()
        buffer.update_priorities(batch["indices"], np.ones(8))
        assert len(buffer) == 10
        (client,) = server.stats()["clients"].values()
        assert client["roles"] == ["admin", "read", "write"]
        assert ClientKey.read(folder / "all.key").secret not in str(server.stats())
        buffer.clear()
        assert len(buffer) == 0
    (table,) = list_tables(server.address, keys=folder / "all.key")
    assert (table["name"], table["capacity"]) == ("replay", 100)


def test_no_key_is_told(server) -> None:
    with refused("a client without a key; give keys="):
        sw.open(f"{server.address}/replay")


def test_the_key_of_an_unknown_client_is_told(server, folder: Path, tmp_path: Path) -> None:
    """A client of this server's folder as it was once: the server's key is right, the client's is not in the list."""
    path = make_key(folder, "gone")
    text = path.read_bytes()
    revoke_key(folder, "gone")
    path.write_bytes(text)
    path.chmod(0o600)
    with refused("does not know this client's key"):
        sw.open(f"{server.address}/replay", keys=path)


def test_the_key_for_another_server_is_told(server, tmp_path: Path) -> None:
    with refused("the key is of another server"):
        sw.open(f"{server.address}/replay", keys=make_key(tmp_path / "other", "actor"))


def test_a_key_for_a_server_without_keys_is_told(folder: Path) -> None:
    replay = sw.ReplayBuffer(10, obs_shape=(2,))
    with sw.serve({"replay": replay}, "tcp://127.0.0.1:0") as plain, refused("the server has no keys"):
        sw.open(f"{plain.address}/replay", keys=folder / "all.key")


def test_a_file_that_is_no_key_is_told_before_a_connection(server, folder: Path, tmp_path: Path) -> None:
    with refused("there is no file"):
        sw.open(f"{server.address}/replay", keys=tmp_path / "nothing.key")
    (folder / "all.key").chmod(0o644)
    with refused("mode 0644", "chmod 600"):
        sw.open(f"{server.address}/replay", keys=folder / "all.key")


def test_a_client_that_is_revoked_while_connected_is_refused_at_its_next_call(server, folder: Path) -> None:
    path = make_key(folder, "actor")
    text = path.read_bytes()
    with sw.open(f"{server.address}/replay", keys=path) as buffer:
        buffer.add(**row(1))
        revoke_key(folder, "actor")
        with refused("the key of 'actor' was revoked"):
            buffer.add(**row(2))
    path.write_bytes(text)
    path.chmod(0o600)
    with sw.open(f"{server.address}/replay", keys=folder / "all.key") as buffer:
        assert [float(reward) for rows in buffer.rows() for reward in rows["reward"]] == [1.0]
        with refused("does not know this client's key"):
            sw.open(f"{server.address}/replay", keys=path)
        buffer.add(**row(3))  # others are unharmed


def test_nobody_is_let_in_while_the_list_of_clients_cannot_be_read(server, folder: Path) -> None:
    path = folder / "clients.list"
    whole = path.read_bytes()
    with sw.open(f"{server.address}/replay", keys=folder / "all.key") as buffer:
        buffer.add(**row(0))
        path.write_bytes(whole[:-20])
        with refused("the list of clients cannot be read"):
            buffer.add(**row(1))
        path.write_bytes(whole)
        buffer.add(**row(2))
        assert [float(reward) for rows in buffer.rows() for reward in rows["reward"]] == [0.0, 2.0]


def test_each_role_does_what_it_says_and_no_more(server, folder: Path) -> None:
    address = f"{server.address}/replay"
    with sw.open(address, keys=make_key(folder, "writer", ("write", "read"))) as buffer:
        for number in range(4):
            buffer.add(**row(number))
        with refused("needs the role 'admin'", "writer"):
            buffer.clear()
    with sw.open(address, keys=make_key(folder, "reader", ("read",))) as buffer:
        batch = buffer.sample(4)
        with refused("needs the role 'write'", "reader"):
            buffer.add(**row(9))
        with refused("needs the role 'write'", "reader"):
            buffer.update_priorities(batch["indices"], np.ones(4))
        with refused("needs the role 'admin'", "reader"):
            remove_table(address, keys=folder / "reader.key")
        assert len(buffer) == 4
    with sw.open(address, keys=make_key(folder, "actor", ("write",))) as buffer:
        buffer.add(**row(4))
        with refused("needs the role 'read'", "actor"):
            buffer.sample(4)


def test_a_server_that_others_reach_needs_keys(folder: Path) -> None:
    replay = sw.ReplayBuffer(10, obs_shape=(2,))
    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"):
        with refused("can be reached from other machines", "keys="):
            sw.serve({"replay": replay}, address)
    # With keys the address itself is not refused; 192.0.2.1 is of no machine, so nothing listens beyond this one.
    with refused("cannot listen on", "tcp://192.0.2.1:1"):
        sw.serve({"replay": replay}, "tcp://192.0.2.1:1", keys=folder)


def test_a_folder_without_keys_is_told(tmp_path: Path) -> None:
    replay = sw.ReplayBuffer(10, obs_shape=(2,))
    with refused("there is no folder", "sharpwave keys new"):
        sw.serve({"replay": replay}, "tcp://127.0.0.1:0", keys=tmp_path / "nothing")


def test_a_message_in_the_name_of_another_clients_session_is_not_taken(server, folder: Path) -> None:
    """Session numbers are no secrets: the key of the connection says who speaks."""
    import wire
    import zmq

    mine, theirs = (ClientKey.read(make_key(folder, name)) for name in ("mine", "theirs"))
    context = zmq.Context()
    peers = []
    for key in (mine, theirs):
        socket = context.socket(zmq.DEALER)
        key.protect(socket)
        peer = wire.Wire(context, server.address)
        peer.socket.close(0)
        peer.socket = socket
        socket.rcvtimeo = 20_000
        socket.connect(server.address)
        peers.append(peer)
    first, second = peers
    first.hello()
    second.hello()
    second.session = first.session
    reply = second.ask(wire.TABLES)
    assert reply.status == wire.UNKNOWN_SESSION
    second.token, second.session = first.token, 0  # the token is another client's, too
    taken = second.ask(wire.HELLO, wire.document({"versions": [1, 1], "token": first.token.hex(), "client": "x"}))
    assert taken.status != wire.OK or taken.head["session"] != first.session
    assert first.ask(wire.TABLES).status == wire.OK
    context.destroy(0)


def test_what_a_client_waits_for_ends_when_it_is_revoked(folder: Path) -> None:
    """A call that waits at the server does not outlive the key."""
    path = make_key(folder, "actor")
    replay = sw.ReplayBuffer(10, obs_shape=(2,), pace=sw.Pace.min_size(5))
    with sw.serve({"replay": replay}, "tcp://127.0.0.1:0", keys=folder) as server:
        with sw.open(f"{server.address}/replay", keys=path) as buffer:
            with pytest.raises(NotReady):
                buffer.sample(1, timeout=0.05)
            revoke_key(folder, "actor")
            begun = time.monotonic()
            with pytest.raises(SharpwaveError):
                buffer.sample(1, timeout=3.0)
            assert time.monotonic() - begun < SOON_S
        assert server.stats()["waiting"] == 0
