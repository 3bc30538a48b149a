"""The text files of a folder of keys: lines ``name = value`` between a title and a checksum.

    # Sharpwave client key, format 1. It is a secret: it is for one client alone.
    name = actor-1
    public = ...
    check = 8 hexadecimal digits: the CRC32C of all bytes before this line

A name may stand in several lines. The files are written in one step by ``replace_file``, so a reader finds a complete
file. A file is refused if it is a symbolic link, belongs to another user, or is open to other users in a way that its
content does not allow. No message has a value of the file in it: it may be a secret key.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .. import _core
from ..errors import StorageError
from ..files import replace_file

__all__ = ["read_key_file", "write_key_file"]

_MOST_BYTES = 16 << 20  # a list of 100,000 clients has less


def write_key_file(path: Path, title: str, lines: list[tuple[str, str]]) -> None:
    """Replaces the file in one step; only its owner may read it."""
    text = "".join([f"# {title}\n", *(f"{name} = {value}\n" for name, value in lines)]).encode()
    replace_file(path, [text, f"check = {_core.crc32c(text):08x}\n".encode()])


def read_key_file(where: str, path: Path, title: str, *, secret: bool) -> list[tuple[str, str]]:
    """The lines of a file.

    Args:
        secret: Whether no other user may read it. Otherwise no other user may write to it.

    Raises:
        FileNotFoundError: There is none.
        StorageError: It is not ours, is open to other users, or is damaged; the message says which.
    """
    text = _read_own(where, path, 0o077 if secret else 0o022)
    kind = title.partition(",")[0]
    if not text.startswith(f"# {kind},".encode()):
        raise StorageError(f"{where}: '{path}' is not a {kind}: its first line is another one")
    if not text.startswith(f"# {title}\n".encode()):
        raise StorageError(f"{where}: '{path}' is a {kind} of a format that this Sharpwave does not read")
    body, found, check = text.rpartition(b"check = ")
    if not found or check != f"{_core.crc32c(body):08x}\n".encode():
        raise StorageError(f"{where}: '{path}' is damaged: its checksum is wrong or missing; {_remedy(secret)}")
    parts = [line.partition(" = ") for line in body.decode().splitlines()[1:]]
    return [(name, value) for name, _, value in parts]


def _remedy(secret: bool) -> str:
    return "make another by 'sharpwave keys new'" if secret else "restore it, or make the folder's keys again"


def _read_own(where: str, path: Path, closed_to: int) -> bytes:
    try:
        # O_NONBLOCK: a pipe under this name would otherwise wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink():
            raise StorageError(f"{where}: '{path}' is a symbolic link; give the file itself") from None
        raise StorageError(f"{where}: '{path}' cannot be read: {error.strerror}") from None
    with open(descriptor, "rb", closefd=True) as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise StorageError(f"{where}: '{path}' is not a file")
        if info.st_uid != os.geteuid():
            raise StorageError(
                f"{where}: '{path}' belongs to user {info.st_uid}, this process is user {os.geteuid()}; copy it as "
                "this user"
            )
        if info.st_mode & closed_to:
            what = "read" if closed_to & 0o044 else "change"
            raise StorageError(
                f"{where}: '{path}' has mode {stat.S_IMODE(info.st_mode):04o}: other users can {what} it; "
                f"run: chmod 600 '{path}'"
            )
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise StorageError(f"{where}: '{path}' is not a file of keys: it has more than {_MOST_BYTES} bytes")
    return text
