"""`Weights`: versions of a model's weights in a folder, published by a learner and read by generators."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import told, whole
from ..errors import NotReady, SchemaError, StaleHandle, StorageError
from .manifest import MANIFEST, describe, sync_to_disk
from .model.config import ModelConfig
from .model.folder import check_companions, copy_companions, is_finite, read_state, write_state
from .model.transformer import Transformer

__all__ = ["Published", "Weights", "check_version"]

_NAME = re.compile(r"v(\d{12})")
# What safetensors can write and every reader of a published folder knows.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_TICK_NS = 50_000_000
_POLL_S = 0.002  # looking into a folder takes some 10 us, so a waiting process uses less than 1 % of a core


def check_version(where: str, version: Any, least: int = 0) -> int:
    """The version of weights as an int, for `Weights` and for every generator.

    Args:
        where: The call that was given the version, for the message.
        version: A whole number from `least` to 10**12 - 1: the names of published folders have twelve digits.
        least: -1 for a generator that has no version yet.

    Raises:
        SchemaError: It is no such number.
    """
    return whole(where, "version", version, least, 10**12 - 1)


@dataclass(frozen=True)
class Published:
    """One version. Its `path` is a Hugging Face folder where the publisher gave a model, so other engines load it."""

    version: int
    path: Path

    def read(self, *, check: bool = True) -> dict[str, Tensor]:
        """The tensors. Sizes of files are always compared with those published, checksums where `check` is true.

        Raises:
            StaleHandle: The version was removed, because `keep` newer ones were published.
            StorageError: A file is not what was published.
        """
        try:
            if not (self.path / MANIFEST).is_file():
                raise StorageError(f"{self.path} has no {MANIFEST}; read the path of a version that was published")
            return read_state(self.path, check=check)
        except StorageError as error:
            if not self.path.exists():
                raise StaleHandle(
                    f"version {self.version} was removed; read latest(), or raise Weights(keep=)"
                ) from error
            raise


class Weights:
    """Versions of weights in a folder. Any number of processes may read; publishers take turns.

    A version is written aside, flushed to the disk and put in place by one rename. So readers see whole versions only,
    and a publisher that is killed leaves the versions that were there.

    Args:
        folder: Made where it is missing. Under /dev/shm versions are in memory, and gone after a reboot.
        keep: So many of the newest versions stay; older ones are removed at a publish.
        companions: A Hugging Face folder whose tokenizer files and chat template go into each version; it must exist.

    Example:
        >>> from sharpwave.llm.model import small_model
        >>> import tempfile
        >>> weights = Weights(tempfile.mkdtemp())
        >>> weights.publish(small_model(), version=1).version
        1
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, companions: str | Path | None = None) -> None:
        self.folder, self.keep = Path(folder), whole("Weights()", "keep", keep)
        self._companions = None if companions is None else check_companions(companions)
        self._found: tuple[int, list[int]] = (-1, [])
        # In memory there is nothing to flush, and a reboot takes all of it.
        self._is_synced = not str(self.folder.resolve()).startswith("/dev/shm/")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"Weights(): {folder} cannot be made: {error.strerror}") from error

    def publish(
        self, state: Transformer | Mapping[str, Tensor], version: int, *, dtype: torch.dtype | None = None
    ) -> Published:
        """Puts a version in place. It must be higher than every earlier one, and every number must be finite.

        Args:
            state: A model, whose config.json is written too, or tensors by name.
            version: The learner's count of updates, usually.
            dtype: Floating point numbers are published in it; None: in their own.

        Raises:
            SchemaError: The version does not grow, or a tensor has NaN or infinity. Nothing was changed.
            StorageError: The folder cannot be written. The versions that were there stay.
        """
        config = None
        if isinstance(state, Transformer):
            config = state.config.replace(dtype=_said_dtype(state.dtype if dtype is None else dtype))
        tensors = _checked(dict(state.weights() if isinstance(state, Transformer) else state), dtype)
        version = check_version("publish()", version)
        with self._turn():
            versions = self._versions()
            if versions and version <= versions[-1]:
                raise SchemaError(f"publish(): version={version}, but {versions[-1]} is published; versions only grow")
            # Left by publishers that were killed: only this one has the turn.
            for left in [*self.folder.glob(".new-*"), *self.folder.glob(".old-*")]:
                shutil.rmtree(left, ignore_errors=True)
            aside, place = self.folder / f".new-{uuid.uuid4().hex}", self._place(version)
            try:
                self._write(aside, tensors, config, version)
                aside.rename(place)
                self._sync(self.folder)
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise StorageError(f"publish(): {self.folder} cannot be written: {error}") from error
            finally:
                shutil.rmtree(aside, ignore_errors=True)  # gone after the rename
            for old in [*versions, version][: -self.keep]:
                self._remove(old)
        return Published(version, place)

    def latest(self) -> Published | None:
        """The newest version, or None where nothing was published."""
        versions = self._versions()
        return Published(versions[-1], self._place(versions[-1])) if versions else None

    def wait(self, newer_than: int = -1, timeout: float | None = None) -> Published:
        """Waits for a version above `newer_than`, and gives the newest.

        Args:
            newer_than: The version that the caller has; -1 for none.
            timeout: Seconds; None waits for ever, 0 looks once.

        Raises:
            NotReady: The timeout passed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self.latest()
            if found is not None and found.version > newer_than:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                have = "nothing" if found is None else f"version {found.version}"
                raise NotReady(f"wait(): {have} is published, newer_than={newer_than}; timeout={timeout} s passed")
            time.sleep(_POLL_S)

    def _write(self, aside: Path, tensors: Mapping[str, Tensor], config: ModelConfig | None, version: int) -> None:
        aside.mkdir(mode=0o700)
        names = write_state(tensors, aside)
        if config is not None:
            (aside / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
        if self._companions is not None:
            copy_companions(self._companions, aside)
        files = {name: describe(aside / name) for name in names}
        (aside / MANIFEST).write_text(json.dumps({"version": version, "files": files}, indent=2) + "\n")
        for path in [*aside.iterdir(), aside]:
            self._sync(path)

    def _versions(self) -> list[int]:
        """All that are there, in order. The folder is listed only where it has changed: readers look often."""
        try:
            changed_ns = self.folder.stat().st_mtime_ns
            if changed_ns == self._found[0] and time.time_ns() - changed_ns > _TICK_NS:
                return self._found[1]
            names = os.listdir(self.folder)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be read: {error.strerror}; it was there before") from error
        versions = sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))
        # Two changes in one tick of the file system's clock have the same time, so a young time says nothing yet.
        self._found = (changed_ns if time.time_ns() - changed_ns > _TICK_NS else -1, versions)
        return versions

    def _place(self, version: int) -> Path:
        return self.folder / f"v{version:012}"

    def _remove(self, version: int) -> None:
        # Renamed first: no reader sees a version without some of its files.
        gone = self.folder / f".old-{uuid.uuid4().hex}"
        self._place(version).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _sync(self, path: Path) -> None:
        if self._is_synced:
            sync_to_disk(path)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One publisher at a time. The kernel gives the lock back when its process dies."""
        file = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _checked(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """In the dtype, without NaN and infinity: one too large for a narrower dtype is infinite there."""
    if not tensors:
        raise SchemaError("publish(): no tensors given")
    if dtype is not None and dtype not in _FLOATS:
        raise SchemaError(f"publish(): dtype={told(dtype)}, expected None or {', '.join(map(str, _FLOATS))}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise SchemaError(f"publish(): a tensor has the name {told(name)}, expected a string")
        if not isinstance(tensor, Tensor):
            raise SchemaError(f"publish(): {name} is {type(tensor).__name__}, expected a tensor")
        if tensor.dtype not in (*_FLOATS, *_WHOLE):
            raise SchemaError(
                f"publish(): {name} has dtype {tensor.dtype}, expected {_said_dtype(_FLOATS[0])}, another "
                "floating point type of 16 to 64 bits, or whole numbers"
            )
    wanted = {
        name: dtype if dtype is not None and one.is_floating_point() else one.dtype for name, one in tensors.items()
    }
    made: dict[str, Tensor] = {}
    for kind in dict.fromkeys((one.device, wanted[name]) for name, one in tensors.items()):
        made |= _on_host({n: one for n, one in tensors.items() if (one.device, wanted[n]) == kind}, kind[1])
    return {name: made[name] for name in tensors}


def _on_host(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """In memory of the host. From a device by one copy: each copy waits for the device, and others use it, too."""
    if all(one.device.type == "cpu" for one in tensors.values()):
        made = {name: one.detach().to(dtype) for name, one in tensors.items()}
        is_good = not dtype.is_floating_point or all(map(is_finite, made.values()))
    else:
        flat = torch.cat([one.detach().reshape(-1).to(dtype) for one in tensors.values()])
        is_good = not dtype.is_floating_point or bool(is_finite(flat))
        parts = flat.cpu().split([one.numel() for one in tensors.values()])
        made = {name: part.view(one.shape) for (name, one), part in zip(tensors.items(), parts, strict=True)}
    for name, one in made.items() if not is_good else ():
        if count := int((~torch.isfinite(one)).sum()):
            raise SchemaError(f"publish(): {name} has {count} of {one.numel()} values that are NaN or infinite")
    return made


def _said_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
