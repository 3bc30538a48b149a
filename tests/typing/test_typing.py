"""The package is typed: mypy --strict reads a program that uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")

HERE = Path(__file__).parent


def test_mypy_passes_a_typed_program_and_finds_the_error_of_another(tmp_path: Path) -> None:
    """The error shows that mypy sees types: without py.typed both programs would pass as Any. One run for both: mypy
    takes ten seconds to read NumPy and torch."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import sharpwave as sw\nx: str = sw.ReplayBuffer(10, obs_shape=(1,)).capacity\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--config-file", ""]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path), str(HERE / "usage.py"), str(wrong)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert "wrong.py:2: error: " in errors[0]
    assert 'expression has type "int"' in errors[0]
