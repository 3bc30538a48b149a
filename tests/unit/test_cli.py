"""The command line: what it prints, and how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import sharpwave as sw

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from sharpwave.tools import cli


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved buffer of three rows."""
    buffer = sw.ReplayBuffer(8, obs_shape=(2,), action_shape=())
    for row in range(3):
        obs = np.full(2, row, np.float32)
        buffer.add(obs=obs, action=0.0, reward=1.0, next_obs=obs, terminated=False, truncated=False)
    path = tmp_path / "replay"
    buffer.save(path)
    buffer.close()
    return path


def run_module(*arguments: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `python -m sharpwave`, optionally as if one module were not installed."""
    if without is None:
        command = [sys.executable, "-m", "sharpwave", *arguments]
    else:
        # A None in sys.modules makes the import raise ModuleNotFoundError, as a missing package does.
        source = (
            f"import sys; sys.modules[{without!r}] = None; sys.argv = ['sharpwave', *{list(arguments)!r}]; "
            "from sharpwave.tools.cli import main; main()"
        )
        command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_version_is_printed_by_the_module() -> None:
    finished = run_module("--version")
    assert finished.returncode == 0
    assert finished.stdout.strip() == f"sharpwave {sw.__version__}"


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(cli.build_app(), ["--help"])
    assert shown.exit_code == 0
    assert "demo" in shown.stdout
    assert "info" in shown.stdout


def test_info_shows_the_stats_of_a_saved_buffer_as_a_table(saved: Path) -> None:
    shown = CliRunner().invoke(cli.build_app(), ["info", str(saved)])
    assert shown.exit_code == 0
    cells = {tuple(line.strip("│").replace(" ", "").split("│")) for line in shown.stdout.splitlines()}
    assert ("size", "3") in cells
    assert ("capacity", "8") in cells


def test_info_prints_json_that_equals_the_stats(saved: Path) -> None:
    shown = CliRunner().invoke(cli.build_app(), ["info", str(saved), "--json"])
    assert shown.exit_code == 0
    stats = json.loads(shown.stdout)
    assert stats.keys() == sw.open(saved).stats().keys()
    assert (stats["size"], stats["capacity"]) == (3, 8)


def test_info_on_a_missing_path_fails_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "nothing-here"
    finished = run_module("info", str(missing))
    assert finished.returncode == 1
    assert finished.stdout == ""
    (line,) = finished.stderr.splitlines()
    assert line.startswith("sharpwave: ")
    assert "nothing-here" in line


@pytest.mark.parametrize(
    ("arguments", "without", "extra"),
    [
        (("demo",), "typer", "demo"),
        (("demo",), "rich", "demo"),
        (("demo",), "torch", "demo"),
        (("demo",), "gymnasium", "demo"),
        (("demo",), "matplotlib", "demo"),
        (("info", "anywhere"), "typer", "cli"),
    ],
)
def test_missing_extra_is_named_in_one_line(
    arguments: tuple[str, ...], without: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments == ("demo",):
        for module in ("torch", "gymnasium", "matplotlib"):  # else another missing one may be named first
            pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    finished = run_module(*arguments, without=without)
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert without in line
    assert f'pip install "sharpwave[{extra}]"' in line
    assert list(tmp_path.iterdir()) == []


def test_missing_module_that_is_no_extra_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'elsewhere'", name="elsewhere")

    monkeypatch.setattr(cli, "build_app", lambda: fail)
    with pytest.raises(ModuleNotFoundError, match="elsewhere"):
        cli.main()


def test_unwritable_out_fails_in_one_line_before_training(tmp_path: Path) -> None:
    for module in ("torch", "gymnasium", "matplotlib"):
        pytest.importorskip(module)
    (tmp_path / "file").write_text("")
    finished = run_module("demo", "--out", str(tmp_path / "file" / "demo"))
    assert finished.returncode == 1
    (line,) = finished.stderr.splitlines()
    assert "NotADirectoryError" in line
