"""The package is typed: mypy --strict reads a program that uses it, and the package itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")

HERE = Path(__file__).parent


def mypy(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", "--cache-dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=folder)


def test_typed_program_passes_mypy_strict(tmp_path: Path) -> None:
    done = mypy("--warn-unused-ignores", str(HERE / "usage.py"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_sees_the_types_of_the_package_and_not_any(tmp_path: Path) -> None:
    """Without py.typed everything above would pass as Any."""
    program = tmp_path / "wrong.py"
    program.write_text("import sharpwave as sw\nx: str = sw.ReplayBuffer(10, obs_shape=(1,)).capacity\n")
    done = mypy(str(program), folder=tmp_path)
    assert done.returncode == 1
    assert 'expression has type "int"' in done.stdout
