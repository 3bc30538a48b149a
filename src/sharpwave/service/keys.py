"""Keys of a server and its clients: who may call, and what.

A folder of keys has three kinds of files (``key_file.py`` has their form):

    server.secret    the server's key pair
    clients.list     the known clients: public key, roles and name of each
    NAME.key         a client's key pair and the server's public key: give it to that client and to nobody else

The keys are CURVE keys of ZeroMQ (32 bytes, written as 40 characters of Z85). They authenticate both sides and encrypt
the connection. A server reads the list again when it has changed, so a revoked client is refused at its next message.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import zmq

from ..errors import SchemaError, StorageError
from .key_file import read_key_file, write_key_file

__all__ = ["ROLES", "Client", "ClientKey", "Keys", "default_folder", "make_key", "read_clients", "revoke_key"]

ROLES = ("read", "write", "admin")
_SERVER, _CLIENTS = "server.secret", "clients.list"
_SERVER_TITLE = "Sharpwave server key, format 1. It is a secret: it stays on the server."
_CLIENT_TITLE = "Sharpwave client key, format 1. It is a secret: it is for one client alone."
_LIST_TITLE = "Sharpwave list of clients, format 1. 'sharpwave keys' writes it."
_HANDSHAKE_MS = 10_000  # after which a connection that has shown no key is closed
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_KEY = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")


class Client(NamedTuple):
    """A client that a server knows."""

    name: str
    roles: frozenset[str]


def default_folder() -> Path:
    """``$SHARPWAVE_KEYS``, or ``~/.config/sharpwave/keys``."""
    return Path(os.environ.get("SHARPWAVE_KEYS") or Path.home() / ".config/sharpwave/keys")


@dataclass(frozen=True)
class ClientKey:
    """What a client shows, and the server that it expects."""

    name: str
    public: str
    secret: str = field(repr=False)
    server: str

    @classmethod
    def read(cls, path: str | os.PathLike[str], where: str = "keys") -> ClientKey:
        """Reads a file ``NAME.key``.

        Raises:
            StorageError: It is absent, damaged, a symbolic link, or other users can read it; the message says which.
        """
        file = Path(path)
        if file.is_dir():
            raise StorageError(f"{where}: '{file}' is a folder; a client gives its own file, '{file / 'NAME.key'}'")
        try:
            lines = dict(read_key_file(where, file, _CLIENT_TITLE, secret=True))
        except FileNotFoundError:
            raise StorageError(
                f"{where}: there is no file '{file}'; 'sharpwave keys new NAME' makes one on the server"
            ) from None
        _check_pair(where, file, lines, "name", "server")
        return cls(lines["name"], lines["public"], lines["secret"], lines["server"])

    def protect(self, socket: Any) -> None:
        """Makes a client's socket show this key, and talk to this server only; call it before ``connect``."""
        socket.curve_serverkey = self.server.encode()
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ClientKey is a secret and is not pickled; pass the path of its file")


class Keys:
    """The keys of a server, read from its folder. Any thread may ask it.

    Attributes:
        public: The server's public key; a client's file holds it.
        problem: Why the list of clients cannot be read at present; None where it can. Meanwhile no client is known.
    """

    def __init__(self, folder: Path, public: str, secret: str) -> None:
        self.folder, self.public, self.problem = folder, public, None
        self._secret = secret
        self.list_path = folder / _CLIENTS
        # Replaced together in one assignment, so that another thread never sees the one without the other.
        self._read: tuple[Any, Mapping[str, Client]] = (None, MappingProxyType({}))

    problem: str | None

    @classmethod
    def read_folder(cls, path: str | os.PathLike[str], where: str = "keys") -> Keys:
        """Reads the folder that ``sharpwave keys new`` made.

        Raises:
            StorageError: The folder or a file in it is absent, damaged, of another user, or open to other users.
        """
        folder = Path(path).absolute()
        _check_folder(where, folder)
        public, secret = _read_server(where, folder)
        read_clients(folder, where)  # a damaged list is an error now, not at the first client
        return cls(folder, public, secret)

    @property
    def secret(self) -> str:
        """The server's secret key."""
        return self._secret

    @property
    def clients(self) -> Mapping[str, Client]:
        """The known clients by public key, as the list has them now."""
        try:
            version = _state(os.stat(self.list_path, follow_symlinks=False))
            if version != self._read[0]:
                self._read = (version, read_clients(self.folder))
            self.problem = None
        except (OSError, ValueError) as error:
            # Refuses everybody: a list that cannot be read may be one that revokes.
            self._read = (None, MappingProxyType({}))
            self.problem = str(error)
        return self._read[1]

    def list_state(self) -> tuple[int, int, int, int, int]:
        """What changes when the list of clients does; zeros where there is none."""
        try:
            return _state(os.stat(self.list_path, follow_symlinks=False))
        except OSError:
            return 0, 0, 0, 0, 0

    def protect(self, socket: Any) -> None:
        """Makes a server's socket talk to clients with keys only; call it before ``bind``. It asks a ``Gatekeeper``."""
        socket.zap_domain = b"sharpwave"
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it ZeroMQ admits everybody where there is no gatekeeper
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self._secret.encode()

    def roles_of(self, public_key: str) -> frozenset[str] | None:
        """The roles of a client; None if it is not known (any more). Costs one ``stat``: ask it for every message."""
        client = self.clients.get(public_key)
        return None if client is None else client.roles

    def name_of(self, public_key: str) -> str | None:
        """The name of a client, for messages and statistics."""
        client = self.clients.get(public_key)
        return None if client is None else client.name

    def __repr__(self) -> str:
        return f"Keys({str(self.folder)!r}, public={self.public!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Keys hold a secret and are not pickled; pass the path of the folder")


def _state(info: os.stat_result) -> tuple[int, int, int, int, int]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def read_clients(folder: Path, where: str = "keys") -> Mapping[str, Client]:
    """The list of known clients by public key; empty where there is none yet."""
    path = folder / _CLIENTS
    try:
        lines = read_key_file(where, path, _LIST_TITLE, secret=False)
    except FileNotFoundError:
        return MappingProxyType({})
    clients = {}
    for kind, text in lines:
        public, roles, name = [*text.split(" "), "", ""][:3]
        if kind != "client" or not _KEY.fullmatch(public) or not _NAME.fullmatch(name):
            raise StorageError(f"{where}: '{path}' is damaged: a line is not that of a client")
        clients[public] = Client(name, frozenset(roles.split(",")) & frozenset(ROLES))
    return MappingProxyType(clients)


def make_key(folder: Path, name: str, roles: Iterable[str] = ("read", "write"), where: str = "keys new") -> Path:
    """Makes a client's key, and at first that of the server; returns the path of the client's file.

    The client is known when this returns. If the process is killed before, the same call can be made again.
    """
    wanted = _check_roles(where, roles)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SchemaError(f"{where}: name: expected letters, digits, '_', '.', '-', at most 100, got {name!r}")
    with _own_folder(where, folder):
        clients = dict(read_clients(folder, where))
        if any(client.name == name for client in clients.values()):
            raise StorageError(
                f"{where}: there is a client {name!r} already; 'sharpwave keys revoke {name}' ends its key"
            )
        server, _ = _make_server(where, folder)
        public, secret = (part.decode() for part in zmq.curve_keypair())
        path = folder / f"{name}.key"
        # The file first: an entry in the list is a key that somebody has.
        lines = [("name", name), ("public", public), ("secret", secret), ("server", server)]
        write_key_file(path, _CLIENT_TITLE, lines)
        clients[public] = Client(name, wanted)
        _write_clients(folder, clients)
    return path


def revoke_key(folder: Path, name: str, where: str = "keys revoke") -> None:
    """Takes a client out of the list, and removes its file from the folder. Running servers refuse it from then on."""
    with _own_folder(where, folder, make=False):
        clients = dict(read_clients(folder, where))
        left = {public: client for public, client in clients.items() if client.name != name}
        if len(left) == len(clients):
            known = ", ".join(sorted(client.name for client in clients.values())) or "none"
            raise StorageError(f"{where}: there is no client {name!r} in '{folder}'; known: {known}")
        _write_clients(folder, left)
        with contextlib.suppress(FileNotFoundError):
            (folder / f"{name}.key").unlink()


def _write_clients(folder: Path, clients: Mapping[str, Client]) -> None:
    lines = [
        ("client", f"{public} {','.join(role for role in ROLES if role in client.roles)} {client.name}")
        for public, client in clients.items()
    ]
    write_key_file(folder / _CLIENTS, _LIST_TITLE, lines)


def _make_server(where: str, folder: Path) -> tuple[str, str]:
    if not os.path.lexists(folder / _SERVER):
        public, secret = (part.decode() for part in zmq.curve_keypair())
        write_key_file(folder / _SERVER, _SERVER_TITLE, [("public", public), ("secret", secret)])
    return _read_server(where, folder)


def _read_server(where: str, folder: Path) -> tuple[str, str]:
    path = folder / _SERVER
    try:
        lines = dict(read_key_file(where, path, _SERVER_TITLE, secret=True))
    except FileNotFoundError:
        raise StorageError(
            f"{where}: '{folder}' has no {_SERVER}; 'sharpwave keys new NAME --folder {folder}' makes one"
        ) from None
    _check_pair(where, path, lines)
    return lines["public"], lines["secret"]


def _check_pair(where: str, path: Path, lines: Mapping[str, str], *others: str) -> None:
    missing = [name for name in ("public", "secret", *others) if name not in lines]
    keys = [lines.get(name, "") for name in ("public", "secret", *others) if name != "name"]
    if missing or not all(map(_KEY.fullmatch, keys)):
        raise StorageError(f"{where}: '{path}' is damaged: {', '.join(missing) or 'a key in it'} is missing or no key")
    if zmq.curve_public(lines["secret"].encode()).decode() != lines["public"]:
        raise StorageError(f"{where}: '{path}' is damaged: its two keys are no pair")


def _check_roles(where: str, roles: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(roles)
    if not wanted or not wanted <= frozenset(ROLES):
        raise SchemaError(
            f"{where}: role: expected some of {', '.join(ROLES)}, got {', '.join(sorted(wanted)) or 'none'}"
        )
    return wanted


def _check_folder(where: str, folder: Path) -> None:
    """A user who can write to the folder could put another list into it."""
    try:
        info = os.stat(folder)
    except FileNotFoundError:
        raise StorageError(
            f"{where}: there is no folder '{folder}'; 'sharpwave keys new NAME --folder {folder}' makes it"
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise StorageError(f"{where}: '{folder}' is not a folder; a server gives the folder of its keys")
    if info.st_uid != os.geteuid():
        raise StorageError(
            f"{where}: '{folder}' belongs to user {info.st_uid}, this process is user {os.geteuid()}; run it as the "
            "owner of the keys"
        )
    if info.st_mode & 0o022:
        raise StorageError(
            f"{where}: '{folder}' has mode {stat.S_IMODE(info.st_mode):04o}: other users can change it; "
            f"run: chmod 700 '{folder}'"
        )


@contextlib.contextmanager
def _own_folder(where: str, folder: Path, make: bool = True) -> Iterator[None]:
    """One command at a time changes a folder; the lock ends with the process."""
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(where, folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
