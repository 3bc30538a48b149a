"""Each example runs as a newcomer would run it, only shorter."""

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import sharpwave as sw

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Runs one command to its end."""
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example_is_shorter_than_250_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 250


def test_dqn_trains_and_leaves_policy_curve_and_buffer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = run(EXAMPLES / "dqn.py", "--steps", 600, "--seed", 3, "--out", out)
    assert finished.returncode == 0, finished.stderr
    assert "greedy return over 20 episodes" in finished.stdout
    last_report = finished.stdout.splitlines()[-2]
    assert last_report.startswith("step    600")
    assert math.isfinite(float(last_report.split()[-1])), "600 steps include gradient steps"

    curve = json.loads((out / "curve.json").read_text())
    assert curve["evaluations"][-1][0] == 600
    steps_in_episodes = curve["episodes"][-1][0]
    assert sum(value for _, value in curve["episodes"]) == steps_in_episodes
    policy = torch.load(out / "policy.pt", weights_only=True)
    assert all(torch.isfinite(weight).all() for weight in policy.values())
    assert len(sw.open(out / "replay")) == 600


def test_dqn_gives_the_same_curve_for_the_same_seed(tmp_path: Path) -> None:
    curves = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        finished = run(EXAMPLES / "dqn.py", "--steps", 600, "--seed", seed, "--out", tmp_path / name)
        assert finished.returncode == 0, finished.stderr
        curves.append(json.loads((tmp_path / name / "curve.json").read_text()))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_dqn_refuses_zero_steps(tmp_path: Path) -> None:
    finished = run(EXAMPLES / "dqn.py", "--steps", 0, "--out", tmp_path / "run")
    assert finished.returncode == 2
    assert "--steps must be at least 1" in finished.stderr
    assert not (tmp_path / "run").exists()


def test_demo_prints_a_table_and_writes_the_learning_curve(tmp_path: Path) -> None:
    for module in ("typer", "rich", "matplotlib"):
        pytest.importorskip(module)
    finished = run("-m", "sharpwave", "demo", "--steps", 600, "--out", tmp_path / "demo")
    assert finished.returncode == 0, finished.stderr
    assert "share of it spent in the buffer" in finished.stdout
    assert (tmp_path / "demo" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_demo_trains_as_long_as_the_example_by_default() -> None:
    for module in ("typer", "rich", "matplotlib"):
        pytest.importorskip(module)
    from sharpwave.tools import cli, dqn

    commands = {command.callback.__name__: command.callback for command in cli.build_app().registered_commands}
    defaults = inspect.signature(commands["demo"]).parameters
    assert (defaults["steps"].default, defaults["seed"].default) == (dqn.Config.steps, dqn.Config.seed)
