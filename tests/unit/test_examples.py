"""Each example runs as a newcomer would run it, only shorter."""

import importlib.util
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def load(name: str) -> ModuleType:
    """Imports an example from where it stands."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def test_per_dqn_trains_and_leaves_policy_curve_and_buffer(tmp_path: Path) -> None:
    out = tmp_path / "run"
    finished = run(EXAMPLES / "per_dqn.py", "--steps", 600, "--seed", 3, "--out", out)
    assert finished.returncode == 0, finished.stderr
    assert "greedy return over 100 episodes" in finished.stdout
    last_report = finished.stdout.splitlines()[-2]
    assert last_report.startswith("step    600")
    assert math.isfinite(float(last_report.split()[-1])), "600 steps include gradient steps"

    curve = json.loads((out / "curve.json").read_text())
    assert curve["evaluations"][-1][0] == 600
    steps_in_episodes = curve["episodes"][-1][0]
    assert sum(value for _, value in curve["episodes"]) == steps_in_episodes
    policy = torch.load(out / "policy.pt", weights_only=True)
    assert all(torch.isfinite(weight).all() for weight in policy.values())
    replay = sw.open(out / "replay")
    assert len(replay) == 600
    assert isinstance(replay.sampler, sw.Prioritized)
    assert replay.view.n_step == 3


@pytest.mark.parametrize("prioritized", [True, False], ids=["prioritized", "uniform"])
def test_per_dqn_learns_from_both_samplers(prioritized: bool) -> None:
    per_dqn = load("per_dqn")
    seen = []
    config = per_dqn.Config(steps=700, learning_starts=300, evaluate_every=250, seed=4, prioritized=prioritized)
    result = per_dqn.train(config, progress=lambda step, now: seen.append((step, now.loss)))
    gradient_steps = len(range(300, 701, config.learn_every))
    stats = result.buffer.stats()

    assert [step for step, _ in seen] == [step for step, _ in result.evaluations] == [250, 500, 700]
    assert math.isnan(seen[0][1])
    assert math.isfinite(seen[-1][1])
    assert stats["sample_calls"] == gradient_steps
    # Every priority is told, and none comes too late: nothing leaves a ring that is not yet full.
    told = (stats.get("updates_applied"), stats.get("updates_stale"))
    assert told == ((gradient_steps * config.batch_size, 0) if prioritized else (None, None))
    assert set(result.buffer_ns) == ({"add", "sample", "update"} if prioritized else {"add", "sample"})
    assert "weights" in result.buffer.sample(4) or not prioritized
    assert result.greedy_return > 0


def test_per_dqn_stops_where_compare_asks() -> None:
    per_dqn = load("per_dqn")
    result = per_dqn.train(per_dqn.Config(steps=700, evaluate_every=250, stop_return=1.0))
    assert [step for step, _ in result.evaluations] == [250]
    assert len(result.buffer) == 250


def test_per_dqn_compares_both_samplers_over_seeds() -> None:
    finished = run(EXAMPLES / "per_dqn.py", "--compare", "--steps", 300, "--seed", 5, "--seeds", 2)
    assert finished.returncode == 0, finished.stderr
    head, seeds, prioritized, uniform = finished.stdout.splitlines()
    assert "450 or more" in head
    assert seeds.split() == ["seed", "5", "6", "median"]
    assert prioritized.split() == ["prioritized", "inf", "inf", "inf"]
    assert uniform.split() == ["uniform", "inf", "inf", "inf"]


def test_per_dqn_gives_the_same_curve_for_the_same_seed(tmp_path: Path) -> None:
    curves = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        finished = run(EXAMPLES / "per_dqn.py", "--steps", 600, "--seed", seed, "--out", tmp_path / name)
        assert finished.returncode == 0, finished.stderr
        curves.append(json.loads((tmp_path / name / "curve.json").read_text()))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_per_dqn_refuses_zero_steps(tmp_path: Path) -> None:
    finished = run(EXAMPLES / "per_dqn.py", "--steps", 0, "--out", tmp_path / "run")
    assert finished.returncode == 2
    assert "--steps must be at least 1" in finished.stderr
    assert not (tmp_path / "run").exists()


def test_demo_prints_a_table_and_writes_the_learning_curve(tmp_path: Path) -> None:
    for module in ("typer", "rich", "matplotlib"):
        pytest.importorskip(module)
    finished = run("-m", "sharpwave", "demo", "--steps", 600, "--out", tmp_path / "demo")
    assert finished.returncode == 0, finished.stderr
    assert "Prioritized 3-step DQN on CartPole-v1" in finished.stdout
    assert "share of it spent in the buffer" in finished.stdout
    assert "priorities updated, stale" in finished.stdout
    assert (tmp_path / "demo" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_demo_trains_as_long_as_the_example_by_default() -> None:
    for module in ("typer", "rich", "matplotlib"):
        pytest.importorskip(module)
    from sharpwave.tools import cli, per_dqn

    commands = {command.callback.__name__: command.callback for command in cli.build_app().registered_commands}
    defaults = inspect.signature(commands["demo"]).parameters
    assert (defaults["steps"].default, defaults["seed"].default) == (per_dqn.Config.steps, per_dqn.Config.seed)


def test_sac_learns_and_tells_its_evaluations() -> None:
    sac = load("sac")
    seen = []
    config = sac.Config(steps=600, learning_starts=300, batch_size=64, evaluate_every=300)
    result = sac.train(config, report=lambda step, value: seen.append((step, value)))
    assert seen == result.evaluations
    assert [step for step, _ in seen] == [300, 600]
    assert seen[0] != seen[1], "300 gradient steps change the policy"
    assert result.buffer.stats()["rows_sampled"] == 300 * 64
    assert 0 < result.temperature < 1, "entropy above its target lowers the temperature"
    assert -2000 < result.greedy_return < 0


def test_sac_runs_from_the_command_line_and_refuses_zero_steps() -> None:
    finished = run(EXAMPLES / "sac.py", "--steps", 50)
    assert finished.returncode == 0, finished.stderr
    assert "greedy return, mean of 10 episodes" in finished.stdout
    finished = run(EXAMPLES / "sac.py", "--steps", 0)
    assert finished.returncode == 2
    assert "--steps must be at least 1" in finished.stderr
