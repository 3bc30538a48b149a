"""Keys as files: what they hold, how they are refused, and that no secret is ever shown."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("zmq")

import zmq
from zmq.utils.monitor import recv_monitor_message

from sharpwave.errors import SchemaError, StorageError
from sharpwave.service.gatekeeper import Gatekeeper
from sharpwave.service.keys import ClientKey, Keys, default_folder, make_key, read_clients, revoke_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_new_key_is_a_pair_that_the_server_knows_with_its_roles(folder: Path) -> None:
    path = make_key(folder, "actor-1", ("write",))
    assert path == folder / "actor-1.key"
    key, keys = ClientKey.read(path), Keys.read_folder(folder)
    assert zmq.curve_public(key.secret.encode()).decode() == key.public
    assert key.server == keys.public == zmq.curve_public(keys.secret.encode()).decode()
    assert keys.clients == {key.public: ("actor-1", frozenset({"write"}))}
    assert keys.roles_of(key.public) == {"write"}
    assert keys.name_of(key.public) == "actor-1"
    assert keys.roles_of(key.server) is None


def test_second_key_has_the_same_server(folder: Path) -> None:
    first, second = (ClientKey.read(make_key(folder, name)) for name in ("a", "b"))
    assert first.server == second.server
    assert first.public != second.public
    assert sorted(client.name for client in read_clients(folder).values()) == ["a", "b"]


def test_nobody_else_can_read_folder_and_files(folder: Path) -> None:
    make_key(folder, "actor")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "actor.key": 0o600,
        "clients.list": 0o600,
        "server.secret": 0o600,
    }


def test_secrets_are_in_no_text_about_the_keys(folder: Path) -> None:
    key, keys = ClientKey.read(make_key(folder, "actor")), Keys.read_folder(folder)
    assert key.secret not in f"{key!r} {key}"
    assert keys.secret not in f"{keys!r} {keys} {vars(type(keys))}"
    for secret in (key, keys):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(secret)
    path = folder / "actor.key"
    path.write_text(path.read_text().replace("name = ", "name= "))
    with pytest.raises(StorageError) as refused:
        ClientKey.read(path)
    assert key.secret not in str(refused.value)


def test_a_running_server_sees_who_is_revoked_and_who_is_new(folder: Path) -> None:
    key = ClientKey.read(make_key(folder, "first"))
    keys = Keys.read_folder(folder)
    assert keys.roles_of(key.public) is not None
    revoke_key(folder, "first")
    assert keys.roles_of(key.public) is None
    assert not (folder / "first.key").exists()
    again = ClientKey.read(make_key(folder, "first", ("read",)))
    assert again.public != key.public
    assert keys.roles_of(again.public) == {"read"}
    assert keys.roles_of(key.public) is None


def test_a_list_that_is_damaged_later_lets_nobody_in_and_says_why(folder: Path) -> None:
    key = ClientKey.read(make_key(folder, "actor"))
    keys = Keys.read_folder(folder)
    assert keys.roles_of(key.public) is not None
    path = folder / "clients.list"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert keys.roles_of(key.public) is None
    assert "is damaged" in (keys.problem or "")
    path.write_bytes(whole)
    assert keys.roles_of(key.public) is not None
    assert keys.problem is None
    path.unlink()
    assert keys.roles_of(key.public) is None


def test_every_changed_byte_of_a_file_is_refused(folder: Path) -> None:
    path = make_key(folder, "actor")
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=r"actor\.key"):
            ClientKey.read(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(StorageError, match=r"actor\.key"):
            ClientKey.read(path)
    path.write_bytes(whole)
    assert ClientKey.read(path).name == "actor"


def test_refusals_say_which(folder: Path, tmp_path: Path) -> None:
    path = make_key(folder, "actor")

    path.chmod(0o640)
    with pytest.raises(StorageError, match=r"mode 0640: other users can read it; run: chmod 600"):
        ClientKey.read(path)
    path.chmod(0o600)

    link = tmp_path / "link.key"
    link.symlink_to(path)
    with pytest.raises(StorageError, match="symbolic link"):
        ClientKey.read(link)

    os.mkfifo(tmp_path / "pipe.key", 0o600)
    with pytest.raises(StorageError, match="not a file"):
        ClientKey.read(tmp_path / "pipe.key")

    with pytest.raises(StorageError, match="there is no file"):
        ClientKey.read(folder / "nobody.key")
    with pytest.raises(StorageError, match="is a folder"):
        ClientKey.read(folder)
    with pytest.raises(StorageError, match=r"not a Sharpwave client key"):
        ClientKey.read(folder / "server.secret")

    with pytest.raises(StorageError, match="there is no folder"):
        Keys.read_folder(tmp_path / "nothing")
    with pytest.raises(StorageError, match="is not a folder"):
        Keys.read_folder(path)
    (tmp_path / "empty").mkdir(0o700)
    with pytest.raises(StorageError, match=r"has no server\.secret"):
        Keys.read_folder(tmp_path / "empty")
    (folder / "clients.list").chmod(0o620)
    with pytest.raises(StorageError, match="other users can change it"):
        Keys.read_folder(folder)
    (folder / "clients.list").chmod(0o600)
    folder.chmod(0o770)
    with pytest.raises(StorageError, match="run: chmod 700"):
        Keys.read_folder(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_owner_is_refused(folder: Path) -> None:
    path = make_key(folder, "actor")
    os.chown(path, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        ClientKey.read(path)
    os.chown(folder, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        Keys.read_folder(folder)


def test_bad_names_and_roles_change_nothing(folder: Path) -> None:
    for name in ("", "a/b", "..", ".hidden", "-x", "a b", "x" * 101):
        with pytest.raises(SchemaError, match="name: expected letters"):
            make_key(folder, name)
    for roles in ((), ("reed",), ("read", "root")):
        with pytest.raises(SchemaError, match="role: expected some of read, write, admin"):
            make_key(folder, "actor", roles)
    assert not folder.exists()
    make_key(folder, "actor")
    before = (folder / "actor.key").read_bytes()
    with pytest.raises(StorageError, match="'sharpwave keys revoke actor'"):
        make_key(folder, "actor")
    assert (folder / "actor.key").read_bytes() == before
    with pytest.raises(StorageError, match=r"no client 'other'.*known: actor"):
        revoke_key(folder, "other")


def test_keys_made_at_the_same_time_are_all_in_the_list(folder: Path) -> None:
    code = (
        "import sys, pathlib; from sharpwave.service.keys import make_key; "
        "make_key(pathlib.Path(sys.argv[1]), sys.argv[2])"
    )

    def make(number: int) -> int:
        return subprocess.run([sys.executable, "-c", code, str(folder), f"n{number}"], check=False).returncode

    with ThreadPoolExecutor(4) as several:
        assert list(several.map(make, range(8))) == [0] * 8
    keys = [ClientKey.read(folder / f"n{number}.key") for number in range(8)]
    known = Keys.read_folder(folder)
    assert {key.public for key in keys} == set(known.clients)
    assert {key.server for key in keys} == {known.public}


def test_default_folder_is_the_environments_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARPWAVE_KEYS", str(tmp_path))
    assert default_folder() == tmp_path
    monkeypatch.delenv("SHARPWAVE_KEYS")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".config/sharpwave/keys"


class Door:
    """A guarded ROUTER socket and DEALER sockets that knock."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys.read_folder(folder)
        self.context = zmq.Context()
        self.gatekeeper = Gatekeeper(self.context, self.keys)
        self.router = self.context.socket(zmq.ROUTER)
        self.keys.protect(self.router)
        self.router.handshake_ivl = 500
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.visitors = zmq.Context()

    def knock(self, key: ClientKey | None, server: str | None = None) -> tuple[object, object]:
        """The handshake's event at the visitor, and its value."""
        dealer = self.visitors.socket(zmq.DEALER)
        if key is not None:
            key.protect(dealer)
            dealer.curve_serverkey = (server or key.server).encode()
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        assert monitor.poll(10_000), "no end of the handshake"
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            dealer.send(b"hello")
        self.last = dealer
        return event["event"], event["value"]

    def close(self) -> None:
        self.router.close(0)
        self.gatekeeper.close()
        self.gatekeeper.close()
        self.visitors.destroy(0)
        self.context.term()  # returns only when every socket of the gatekeeper is closed


@pytest.fixture
def door(folder: Path):
    make_key(folder, "actor")
    door = Door(folder)
    yield door
    door.close()


def test_a_message_of_a_known_client_names_its_public_key(door: Door, folder: Path) -> None:
    key = ClientKey.read(folder / "actor.key")
    assert door.knock(key)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    _, body = door.router.recv_multipart(copy=False)
    assert body.bytes == b"hello"
    assert body.get("User-Id") == key.public
    assert (door.gatekeeper.admitted, door.gatekeeper.refused) == (1, 0)


def test_unknown_and_revoked_clients_are_refused_with_400(door: Door, folder: Path, tmp_path: Path) -> None:
    stranger = ClientKey.read(make_key(tmp_path / "other", "stranger"))
    assert door.knock(stranger, door.keys.public) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    key = ClientKey.read(folder / "actor.key")
    revoke_key(folder, "actor")
    assert door.knock(key) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
    later = ClientKey.read(make_key(folder, "later"))
    assert door.knock(later)[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert (door.gatekeeper.admitted, door.gatekeeper.refused) == (1, 2)


def test_client_gets_in_by_itself_when_a_list_that_was_damaged_is_mended(door: Door, folder: Path) -> None:
    key = ClientKey.read(folder / "actor.key")
    path = folder / "clients.list"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert door.knock(key)[0] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL  # the server has closed after its patience
    path.write_bytes(whole)
    door.last.send(b"hello")  # it waits for the connection, which the same socket makes
    _, body = door.router.recv_multipart()
    assert body == b"hello"


def test_client_without_a_key_or_for_another_server_gets_no_connection(
    door: Door, folder: Path, tmp_path: Path
) -> None:
    # Which of the two a visitor sees depends on who is first: the server closes, the client finds another mechanism.
    closed = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    assert door.knock(None)[0] in closed
    other = ClientKey.read(make_key(tmp_path / "other", "stranger"))
    key = ClientKey.read(folder / "actor.key")
    assert door.knock(key, other.server)[0] in closed
    assert door.router.poll(0) == 0
    assert door.gatekeeper.admitted == 0


def test_a_context_has_one_gatekeeper(door: Door) -> None:
    with pytest.raises(StorageError, match="has an authenticator already"):
        Gatekeeper(door.context, door.keys)


def test_a_protected_socket_without_a_gatekeeper_admits_nobody(folder: Path) -> None:
    key = ClientKey.read(make_key(folder, "actor"))
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        Keys.read_folder(folder).protect(router)
        key.protect(dealer)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor = dealer.get_monitor_socket(events)
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        if monitor.poll(1_000):
            assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
        dealer.disable_monitor()
    context.destroy(0)
