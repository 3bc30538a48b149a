"""C++ programs for tests of the C++ interface, compiled against the engine that was built for the wheel.

They are kept under build/ and compiled again when a source or the engine is newer. (The C++ part of `make test` builds
the examples against the installed package.)
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {
    "actor": ROOT / "examples/cpp/actor.cpp",
    "learner": ROOT / "examples/cpp/learner.cpp",
    "open_probe": ROOT / "tests/cpp/open_probe.cpp",
}
ENGINE = ROOT / "build/cpp/release/libsharpwave_core.a"
NET = ROOT / "build/cpp/release/libsharpwave_net.a"  # where libzmq is installed


def program(*names: str) -> list[Path]:
    """The programs; skips the test where there is no compiler or no engine."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not ENGINE.exists():
        pytest.skip("no C++ compiler, or the engine was not built in this checkout (make test)")
    folder = ROOT / "build/cpp/programs"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes run the tests
        _compile(compiler, folder, [name for name in names if not _is_fresh(folder / name, SOURCES[name])])
    return [folder / name for name in names]


def _is_fresh(made: Path, source: Path) -> bool:
    needed = [
        source,
        ENGINE,
        *([NET] if NET.exists() else []),
        *(ROOT / "core/include").rglob("*.h"),
        *(ROOT / "examples/cpp").glob("*.h"),
    ]
    return made.exists() and made.stat().st_mtime > max(path.stat().st_mtime for path in needed)


def _compile(compiler: str, folder: Path, names: list[str]) -> None:
    found = importlib.util.find_spec("blosc2")
    blosc2 = Path(found.submodule_search_locations[0]) / "lib/libblosc2.a" if found else None
    flags = ["-std=c++20", "-O1", f"-I{ROOT / 'core'}", f"-I{ROOT / 'core/include'}"]
    net = ["-Wl,--undefined=sharpwave_net_open", str(NET), "-lzmq"] if NET.exists() else []
    libraries = [
        *net[:2],
        str(ENGINE),
        *net[2:],
        *([str(blosc2)] if blosc2 and blosc2.exists() else []),
        "-ldl",
        "-pthread",
    ]
    running = [
        subprocess.Popen(
            [compiler, *flags, str(SOURCES[name]), "-o", str(folder / name), *libraries],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    said = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(said)


def needs_net() -> None:
    """Skips the tests of the C++ client where it was not built."""
    if not NET.exists():
        pytest.skip("sharpwave::net was not built: libzmq is missing (Debian: libzmq3-dev)", allow_module_level=True)


class CppError(Exception):
    """An error of the probe: its kind (the number of sharpwave::ErrorKind) and its message."""

    def __init__(self, kind: int, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Probe:
    """tests/cpp/open_probe.cpp with a buffer open: the calls of a C++ program, with NumPy arrays."""

    def __init__(self, address: str, timeout: float = 10, keys: object = "") -> None:
        (path,) = program("open_probe")
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask(f"open {address} {timeout} {keys}")

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, line: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = []
        while (got := self.process.stdout.readline().rstrip("\n")) != "done":
            if got.startswith("error "):
                _, kind, message = got.split(" ", 2)
                raise CppError(int(kind), message)
            assert got, f"the program ended during {line[:80]!r}"
            answer.append(got)
        return answer

    def add(self, **values: object) -> None:
        """Arrays by path, '/' written as '__'; a list of arrays is a ragged field of several rows."""
        words = []
        for name, value in values.items():
            if isinstance(value, list):
                whole = b"".join(part.tobytes() for part in value)
                words.append(f"{name.replace('__', '/')}={whole.hex()}@{','.join(str(len(part)) for part in value)}")
            else:
                words.append(f"{name.replace('__', '/')}={np.asarray(value).tobytes().hex()}")
        self.ask("add " + " ".join(words))

    def sample(self, size: int, timeout: float = 10) -> dict[str, object]:
        """Arrays by path; of a ragged field a list of flat arrays."""
        batch: dict[str, object] = {}
        for line in self.ask(f"sample {size} {timeout}"):
            name, dtype, shape, *parts = line.split(" ")
            extents = tuple(map(int, shape.split(",")))
            arrays = [np.frombuffer(bytes.fromhex(part.strip("-")), dtype) for part in parts if part != "ragged"]
            batch[name] = arrays if parts[0] == "ragged" else arrays[0].reshape(extents)
        return batch

    def update(self, indices: object, priorities: object) -> tuple[int, int]:
        rows, values = np.asarray(indices, np.int64), np.asarray(priorities, np.float32)
        (line,) = self.ask(f"update {rows.tobytes().hex()} {values.tobytes().hex()}")
        applied, stale = map(int, line.split())
        return applied, stale

    def size(self) -> int:
        return int(self.ask("size")[0])
