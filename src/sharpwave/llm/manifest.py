"""Sizes and checksums of the files of a folder, and their way to the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import _core
from ..errors import StorageError

__all__ = ["MANIFEST", "check_files", "compare", "describe", "sync_to_disk"]

MANIFEST = "manifest.json"  # in a folder of published weights

_PIECE_BYTES = 1 << 18  # stays in the processor's cache between reading and summing


def describe(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32c": _checksum(path)}


def compare(path: Path, said: Mapping[str, int], check: bool = True) -> None:
    """Raises StorageError unless the file has the size and, where `check` is true, the checksum of `describe`."""
    size = path.stat().st_size
    if size != said["bytes"]:
        raise StorageError(f"{path} has {size} bytes, {said['bytes']} were published")
    if check and _checksum(path) != said["crc32c"]:
        raise StorageError(f"{path} is damaged: its checksum is not the published one")


def check_files(folder: Path, read: Iterable[str], check: bool = True) -> None:
    """Compares the files of a folder with its manifest. Where the folder has none, there is nothing to compare.

    Args:
        folder: With or without a manifest.
        read: Names of files that the manifest must have.
        check: False compares sizes only.

    Raises:
        StorageError: A file is not what was published, or the manifest is damaged.
    """
    path = folder / MANIFEST
    if not os.path.isfile(path):  # not Path.is_file, which raises where a path is too long
        return
    try:
        files = json.loads(path.read_text())["files"]
        said = {
            Path(name).name: {"bytes": int(one["bytes"]), "crc32c": int(one["crc32c"])} for name, one in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: {error!r}; publish the weights again") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    unknown = sorted(set(read) - set(said))
    if unknown:
        raise StorageError(
            f"{path} does not list {unknown[0]}, so it was not published; remove the manifest or the file"
        )
    for name, one in said.items():
        try:
            compare(folder / name, one, check)
        except FileNotFoundError as error:
            raise StorageError(f"{folder} lacks {name}, which was published") from error
        except StorageError:  # an OSError, too
            raise
        except OSError as error:
            raise StorageError(f"{folder / name} cannot be read: {error.strerror}") from error


def sync_to_disk(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _checksum(path: Path) -> int:
    crc = 0
    piece = memoryview(bytearray(min(_PIECE_BYTES, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc = _core.crc32c(piece[:count], crc)
    return crc
