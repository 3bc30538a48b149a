"""Each example runs as a newcomer would run it, only shorter."""

import contextlib
import copy
import dataclasses
import importlib.util
import inspect
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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
    """Imports an example from where it stands, where it finds the others, as it does when Python runs it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their own module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        spec.loader.exec_module(module)
    return module


def refusal(name: str, *arguments: object) -> str:
    """What an example says when it refuses its arguments."""
    said, example = io.StringIO(), load(name)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            example.main()
    assert end.value.code == 2
    return said.getvalue()


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
    told = (stats["updates_applied"], stats["updates_stale"])
    assert told == (gradient_steps * config.batch_size if prioritized else 0, 0)
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


def test_per_dqn_gives_the_same_curve_for_the_same_seed() -> None:
    per_dqn = load("per_dqn")
    config = per_dqn.Config(steps=400, learning_starts=200, evaluate_every=200)
    runs = [per_dqn.train(dataclasses.replace(config, seed=seed)) for seed in (1, 1, 2)]
    curves = [(run.evaluations, run.episodes) for run in runs]
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_per_dqn_refuses_zero_steps(tmp_path: Path) -> None:
    assert "--steps must be at least 1" in refusal("per_dqn", "--steps", 0, "--out", tmp_path / "run")
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
    assert "--steps must be at least 1" in refusal("sac", "--steps", 0)


def test_her_reaches_goals_only_with_hindsight() -> None:
    her = load("her")
    success = {}
    for hindsight in (True, False):
        seen = []
        config = her.Config(steps=2_000, learning_starts=500, bits=10, evaluate_every=800, hindsight=hindsight)
        result = her.train(config, report=lambda step, value, seen=seen: seen.append((step, value)))
        assert seen == result.evaluations
        assert len(seen) == 2
        assert len(result.buffer) == 2_000
        success[hindsight] = result.success
    assert success[True] > 0.8, success
    assert success[False] < 0.2, success


def test_her_batches_hold_rewards_of_the_goals_they_name() -> None:
    her = load("her")
    result = her.train(her.Config(steps=600, learning_starts=10**6, bits=6, seed=7))
    batch = result.buffer.sample(2_000)
    achieved, desired = batch["next_obs"]["achieved_goal"], batch["next_obs"]["desired_goal"]
    assert 0.75 < batch["relabelled"].mean() < 0.85
    assert (batch["obs"]["desired_goal"] == desired).all()
    assert (batch["reward"] == her.reward(achieved, desired)).all()
    assert (batch["done"] == her.reached(achieved, desired)).all()
    assert (batch["obs"]["observation"] != batch["next_obs"]["observation"]).sum(axis=1).tolist() == [1] * 2_000

    plain = her.train(her.Config(steps=600, learning_starts=10**6, bits=6, seed=7, hindsight=False))
    assert not plain.buffer.sample(2_000)["relabelled"].any()


def test_her_runs_from_the_command_line_and_compares(monkeypatch: Any, capsys: Any) -> None:
    finished = run(EXAMPLES / "her.py", "--compare", "--steps", 300, "--bits", 4, "--seed", 5, "--seeds", 2)
    assert finished.returncode == 0, finished.stderr
    _, seeds, with_hindsight, without = finished.stdout.splitlines()
    assert seeds.split() == ["seed", "5", "6"]
    assert with_hindsight.startswith("with hindsight")
    assert without.startswith("without")
    monkeypatch.setattr(sys, "argv", ["her.py", "--steps", "300", "--bits", "4", "--no-hindsight"])
    load("her").main()
    assert "goal reached in 500 greedy episodes" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["her.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        load("her").main()
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_demos_learns_from_both_buffers_and_keeps_the_demonstrations() -> None:
    demos = load("demos")
    seen: list[tuple[int, float]] = []
    config = demos.Config(steps=1_200, demos=3, learning_starts=400, evaluate_every=600, capacity=1_000, seed=5)
    result = demos.train(config, report=lambda step, value: seen.append((step, value)))
    assert seen == result.evaluations
    assert [step for step, _ in seen] == [600, 1_200]
    online, shown = result.mix.buffers
    learnt = len(range(400, 1_201, config.learn_every))
    assert result.mix.stats()["rows_by_buffer"] == [learnt * 32, learnt * 32]
    assert len(online) == 1_000
    rows = next(shown.rows())
    assert rows["done"].sum() == 3  # each demonstration reaches the goal
    assert (rows["reward"][rows["done"]] > 90).all()
    assert all(buffer.stats()["updates_applied"] > 0 for buffer in (online, shown))
    weights = [weight for weight in result.policy.parameters() if weight.isfinite().all()]
    assert len(weights) == 6


def test_demos_compares_draws_and_refuses_zero_steps(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    monkeypatch.setenv("MPLBACKEND", "agg")
    demos = load("demos")
    demos.compare(demos.Config(steps=500, demos=2, learning_starts=400, evaluate_every=250), range(1), str(picture))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "with", "without"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(sys, "argv", ["demos.py", "--steps", "300", "--no-demos"])
    load("demos").main()
    assert "mean return of 100 greedy episodes:" in capsys.readouterr().out
    assert "--steps must be at least 1" in refusal("demos", "--steps", 0)


@pytest.mark.parametrize("memoryless", [False, True], ids=["recurrent", "memoryless"])
def test_r2d2_learns_and_tells_every_windows_priority(memoryless: bool) -> None:
    r2d2 = load("r2d2")
    seen = []
    config = r2d2.Config(steps=800, learning_starts=400, evaluate_every=400, corridor=4, memoryless=memoryless)
    before = r2d2.train(r2d2.Config(steps=1, corridor=4, memoryless=memoryless)).policy.state_dict()
    result = r2d2.train(config, report=lambda step, value: seen.append((step, value)))
    after = result.policy.state_dict()
    assert seen == result.evaluations
    assert [step for step, _ in seen] == [400, 800]
    assert any((after[name] != before[name]).any() for name in before), "gradient steps change the policy"
    assert all(torch.isfinite(weight).all() for weight in after.values())
    stats = result.buffer.stats()
    assert stats["sample_calls"] % config.updates_per_episode == 0
    assert (stats["updates_applied"], stats["updates_stale"]) == (stats["sample_calls"] * config.batch_size, 0)
    assert stats["updates_applied"] > 0


def test_r2d2_learns_a_short_maze_that_needs_memory() -> None:
    r2d2 = load("r2d2")
    windows = {"corridor": 2, "length": 5, "burn_in": 2, "stride": 2}
    short = {"steps": 1_800, "seed": 1, "learning_starts": 200, "epsilon_steps": 600, "state_size": 16, **windows}
    assert r2d2.train(r2d2.Config(**short)).success > 0.9
    assert r2d2.train(r2d2.Config(**short, memoryless=True)).success < 0.65


def test_r2d2_windows_begin_with_the_state_that_was_stored() -> None:
    r2d2 = load("r2d2")
    result = r2d2.train(r2d2.Config(steps=600, learning_starts=10**6, corridor=5))  # the weights never change
    batch = result.buffer.sample(200, device="cpu")
    places = 4 + 16 + 1
    assert batch["obs"].shape == (200, places, 4)
    assert batch["mask"].shape == batch["valid"].shape == batch["first"].shape == (200, places)
    assert batch["valid"][:, 0].all()
    assert (batch["mask"].sum(dim=1) >= 1).all()
    assert not batch["mask"][:, -1].any(), "the bootstrap row is not learnt from"
    assert batch["first"][:, 1:].sum() == 0, "windows stay in one episode"
    assert (batch["h"][batch["first"]] == 0).all()
    assert 0 < batch["first"][:, 0].sum() < 200

    after, _ = result.policy.memory(batch["obs"], batch["h"][:, 0][None])
    follows = batch["valid"][:, 1:]
    assert torch.allclose(after[:, :-1][follows], batch["h"][:, 1:][follows], atol=1e-5)


def test_r2d2_errors_come_from_the_rows_of_a_window_alone() -> None:
    r2d2 = load("r2d2")
    result = r2d2.train(r2d2.Config(steps=600, learning_starts=10**6, corridor=5))
    batch = result.buffer.sample(100, device="cpu")
    other = copy.deepcopy(result.policy)
    errors, states = r2d2.td_errors(result.policy, other, batch, 0.9)
    assert states.shape == batch["h"].shape
    assert errors.shape == batch["mask"].shape
    assert (errors[~batch["mask"]] == 0).all()
    # By hand, one place at a time: a window that begins inside an episode and sees its end.
    window = int((batch["done"].any(dim=1) & ~batch["first"][:, 0]).nonzero()[0])
    state = batch["h"][window, 0][None]
    values = []
    for obs in batch["obs"][window]:
        value, after = result.policy(obs[None, None], state)
        state = after[:, -1]
        values.append(value[0, 0].detach())
    last = int(batch["valid"][window].sum()) - 1
    for place in np.flatnonzero(batch["mask"][window]):
        goal = batch["reward"][window, place]
        if place < last:
            goal = goal + 0.9 * values[place + 1].max()
        elif not batch["done"][window, place]:
            continue
        assert errors[window, place].item() == pytest.approx(
            (goal - values[place][batch["action"][window, place]]).item(), abs=1e-5
        )

    padding = ~batch["valid"]
    assert padding.any()
    for name in ("obs", "reward", "h"):
        batch[name][padding] = 1e3
    batch["done"][padding] = ~batch["done"][padding]
    assert torch.equal(errors, r2d2.td_errors(result.policy, other, batch, 0.9)[0])


def test_r2d2_refreshes_the_states_of_rows_that_it_drew() -> None:
    r2d2 = load("r2d2")
    config = {"corridor": 5, "steps": 600, "updates_per_episode": 20}
    # Until learning starts both runs add the same rows.
    acted = r2d2.train(r2d2.Config(**config, learning_starts=10**6)).buffer
    learnt = r2d2.train(r2d2.Config(**config, learning_starts=400)).buffer
    first, second = (next(iter(buffer.rows(batch_size=400))) for buffer in (acted, learnt))
    assert (first["obs"] == second["obs"]).all()
    assert (first["h"] != second["h"]).any(axis=1).mean() > 0.5


def test_r2d2_maze_is_solved_by_its_sign_and_by_nothing_else() -> None:
    r2d2 = load("r2d2")
    env = r2d2.TMaze(6)
    seen = set()
    for seed in range(20):
        obs, _ = env.reset(seed=seed)
        turn = r2d2.LEFT if obs[0] else r2d2.RIGHT
        walk = []
        for action in [r2d2.FORWARD] * 6 + [turn]:
            obs, reward, terminated, truncated, _ = env.step(action)
            walk.append(tuple(obs))
        assert (reward, terminated, truncated) == (1.0, True, False)
        seen.add(tuple(walk))
    assert len(seen) == 1, "after the sign both ways look the same"


def test_r2d2_runs_from_the_command_line_and_refuses_zero_steps(monkeypatch: Any, capsys: Any) -> None:
    finished = run(EXAMPLES / "r2d2.py", "--steps", 300, "--memoryless")
    assert finished.returncode == 0, finished.stderr
    assert "turned as the sign said in 500 greedy episodes" in finished.stdout
    monkeypatch.setattr(sys, "argv", ["r2d2.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        load("r2d2").main()
    assert "--steps must be at least 1" in capsys.readouterr().err


# ---- sb3_dqn ---------------------------------------------------------------------------------------------------------


def test_sb3_trains_with_every_buffer() -> None:
    pytest.importorskip("stable_baselines3")
    example = load("sb3_dqn")
    results = example.compare(1_500, range(1))
    assert list(results) == ["SB3's own", "Sharpwave", "Sharpwave, prioritized, 3-step"]
    for curves in results.values():
        assert curves.shape == (1, example.EVALUATIONS)
        assert (curves >= 8).all()  # no pole falls in fewer steps
    assert "--steps" in refusal("sb3_dqn", "--steps", 7)


# ---- her_sb3 ---------------------------------------------------------------------------------------------------------


def test_her_sb3_learns_and_draws_its_curve(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    example = load("her_sb3")
    config = example.Config(steps=1_200, learning_starts=200, evaluate_every=400, hidden_size=16)
    result = example.train(config)
    assert [step for step, _ in result.evaluations] == [400, 800, 1_200]
    assert all(0 <= success <= 1 for _, success in result.evaluations)
    buffer = result.model.replay_buffer
    assert len(buffer.inner) == result.model.num_timesteps == 1_216  # whole rollouts
    assert buffer.inner.stats()["sample_calls"] == result.model._n_updates > 200
    data = buffer.sample(4_000)
    near = (data.next_observations["achieved_goal"] - data.observations["desired_goal"]).norm(dim=1) <= example.REACH
    assert torch.equal(data.rewards[:, 0], near.float() - 1)
    assert near.float().mean() > 0.1, "new goals are reached"
    example.draw({"Sharpwave": result}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "--steps must be at least 1000" in refusal("her_sb3", "--steps", 7)


def test_her_sb3_without_new_goals_and_with_the_buffer_of_its_own() -> None:
    pytest.importorskip("stable_baselines3")
    example = load("her_sb3")
    few = {"steps": 240, "learning_starts": 200, "evaluate_every": 240, "hidden_size": 16}
    plain = example.train(example.Config(**few, goals=0)).model.replay_buffer
    own_goals = {tuple(goal) for goal in next(iter(plain.inner.rows()))["obs"]["desired_goal"].tolist()}
    assert {tuple(goal) for goal in plain.sample(500).observations["desired_goal"].tolist()} <= own_goals
    assert not hasattr(example.train(example.Config(**few, own_buffer=True)).model.replay_buffer, "inner")


# ---- dqn_jax ---------------------------------------------------------------------------------------------------------


def test_dqn_jax_learns_and_gives_the_same_run_for_the_same_seed() -> None:
    jax = pytest.importorskip("jax")
    example = load("dqn_jax")
    seen: list[int] = []
    config = example.Config(steps=1_000, seed=0)
    first = example.train(config, progress=lambda step, now: seen.append(step))
    again, other = example.train(config), example.train(example.Config(steps=1_000, seed=1))
    assert seen == [500, 1_000]
    assert first.buffer.stats()["sample_calls"] == len(range(500, 1_001, config.learn_every))
    assert math.isfinite(first.loss)
    untrained = example.evaluate(example.init(jax.random.key(0)), seed=2_000_000)
    assert untrained < 12, "always to the left"
    assert first.greedy_return > 5 * untrained
    assert first.evaluations == again.evaluations
    weights = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.params)]) for run in (first, again, other)
    ]
    assert np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])


def test_dqn_jax_runs_from_the_command_line_and_refuses_zero_steps() -> None:
    pytest.importorskip("jax")
    finished = run(EXAMPLES / "dqn_jax.py", "--steps", 600, "--seed", 3)
    assert finished.returncode == 0, finished.stderr
    *reports, last = finished.stdout.splitlines()
    assert [line.split()[1] for line in reports] == ["500", "600"]
    assert math.isfinite(float(reports[-1].split()[-1]))
    assert last.startswith("greedy return over 100 episodes: ")
    assert "--steps must be at least 1, got 0" in refusal("dqn_jax", "--steps", 0)


# ---- ppo -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["gym", "torch"])
def test_ppo_learns_and_tells_its_evaluations(env: str) -> None:
    ppo = load("ppo")
    seen = []
    config = ppo.Config(steps=1_280, seed=1, env=env, target=1_000.0)
    result = ppo.train(config, progress=lambda now: seen.append(now.evaluations[-1]))
    assert seen == result.evaluations
    assert [steps for steps, _ in seen] == list(range(4 * 64 * 16, 1_280 * 16 + 1, 4 * 64 * 16))
    assert result.steps == 1_280 * 16
    untrained = ppo.evaluate(ppo.Policy().logits, seed=2_000_000)
    assert untrained < 12, "always to the left"
    assert result.greedy_return > 20 * untrained
    assert result.rollout.is_full
    assert result.rollout.observations.shape == (64, 16, 4)
    assert 0.2 < result.rollout.values.mean() < 1.2, "of rewards that sum to 1 at most"


def test_ppo_gives_the_same_run_for_the_same_seed() -> None:
    ppo = load("ppo")
    runs = [ppo.train(ppo.Config(steps=128, seed=seed, evaluate_every=1)) for seed in (1, 1, 2)]
    weights = [torch.cat([value.flatten() for value in run.policy.state_dict().values()]) for run in runs]
    assert torch.equal(weights[0], weights[1])
    assert runs[0].evaluations == runs[1].evaluations
    assert not torch.equal(weights[0], weights[2])


def test_ppo_ends_after_five_evaluations_that_reach_the_target() -> None:
    ppo = load("ppo")
    result = ppo.train(ppo.Config(steps=640, envs=2, evaluate_every=1, epochs=1, target=1.0))
    assert len(result.evaluations) == 5
    assert result.steps == 5 * 64 * 2


@pytest.mark.parametrize("env", ["gym", "torch"])
def test_ppo_takes_the_value_of_the_final_observation_behind_time_limits(env: str, monkeypatch: Any) -> None:
    ppo = load("ppo")
    envs = (ppo.GymCartPole if env == "gym" else ppo.TorchCartPole)(8, 3, "cpu")
    monkeypatch.setattr(ppo, "TIME_LIMIT", 15)
    if env == "gym":
        for single in envs.envs.envs:
            single._max_episode_steps = 15
    torch.manual_seed(0)
    config, policy = ppo.Config(envs=8), ppo.Policy()
    torch.nn.init.normal_(policy.critic[-1].weight)  # no two observations have the same value
    rollout = sw.RolloutBuffer(8, config.rollout_steps, obs_shape=(4,), device="cpu", seed=0)
    taken, step = [], envs.step
    monkeypatch.setattr(envs, "step", lambda action: taken.append(step(action)) or taken[-1])
    ppo.collect(envs, policy, rollout, config)

    terminated, truncated = (torch.stack([getattr(now, name) for now in taken]) for name in ("terminated", "truncated"))
    assert terminated.any()
    assert (truncated & ~terminated).any()
    with torch.no_grad():
        value = policy.value(rollout.observations).double()
        final_value = policy.value(torch.stack([now.final_obs for now in taken])).double()
        advantage, wanted = policy.value(envs.obs).double() * 0, []
        for t in reversed(range(config.rollout_steps)):
            # final_obs is also the next observation where nothing ended; behind a fall there is nothing.
            ahead = torch.where(terminated[t], 0, final_value[t])
            error = 0.01 + 0.99 * ahead - value[t]
            advantage = error + 0.99 * 0.95 * torch.where(terminated[t] | truncated[t], 0, advantage)
            wanted.insert(0, advantage)
    assert torch.allclose(rollout.advantages.double(), torch.stack(wanted), atol=1e-5)
    starts = rollout.observations[1:][(terminated | truncated)[:-1]]
    assert len(starts) > 0
    assert (starts.abs() <= 0.05).all(), "a new episode begins in the row after an end"


def test_ppo_environment_in_torch_moves_as_gymnasiums() -> None:
    ppo = load("ppo")
    reference, ours = ppo.GymCartPole(16, 0, "cpu"), ppo.TorchCartPole(16, 0, "cpu")
    ours.obs = reference.obs.clone()
    stream, falls = torch.Generator().manual_seed(0), 0
    for _ in range(500):
        action = torch.randint(2, (16,), generator=stream)
        theirs, made = reference.step(action), ours.step(action)
        assert torch.allclose(made.final_obs, theirs.final_obs, atol=1e-4)
        assert torch.equal(made.terminated, theirs.terminated)
        assert torch.equal(made.truncated, theirs.truncated)
        assert torch.equal(made.reward, theirs.reward)
        over = theirs.terminated | theirs.truncated
        falls += int(over.sum())
        assert (ours.obs[over].abs() <= 0.05).all(), "new starts of its own"
        ours.obs[over] = reference.obs[over]
    assert falls > 100


def test_ppo_environment_in_torch_ends_at_the_time_limit_as_gymnasiums() -> None:
    ppo = load("ppo")
    reference, ours = ppo.GymCartPole(4, 0, "cpu"), ppo.TorchCartPole(4, 0, "cpu")
    ends = []
    for step in range(1, 1_010):
        ours.obs = reference.obs.clone()  # every step: small differences grow, as poles fall
        action = (ours.obs @ torch.tensor([0.05, 0.1, 1.0, 0.3]) > 0).long()
        theirs, made = reference.step(action), ours.step(action)
        assert torch.allclose(made.final_obs, theirs.final_obs, atol=1e-5)
        assert not theirs.terminated.any()
        assert torch.equal(made.truncated, theirs.truncated)
        ends += [step] * bool(made.truncated.any())
    assert ends == [500, 1_000]


def test_ppo_runs_from_the_command_line_and_refuses_zero_steps(monkeypatch: Any, capsys: Any) -> None:
    finished = run(EXAMPLES / "ppo.py", "--steps", 256, "--envs", 4, "--env", "torch", "--seed", 2)
    assert finished.returncode == 0, finished.stderr
    report, last = finished.stdout.splitlines()
    assert report.startswith("      1,024 steps  greedy return")
    assert last.startswith("greedy return over 20 episodes: ")
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--steps", "0"])
    with pytest.raises(SystemExit):
        load("ppo").main()
    assert "--steps and --envs must be at least 1" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_ppo_on_a_gpu_waits_for_nothing() -> None:
    ppo = load("ppo")
    config, policy = ppo.Config(device="cuda", env="torch", envs=64), ppo.Policy().to("cuda")
    envs = ppo.TorchCartPole(64, 0, "cuda")
    optimizer = torch.optim.Adam(policy.parameters(), fused=True)
    rollout = sw.RolloutBuffer(64, config.rollout_steps, obs_shape=(4,), device="cuda", seed=0)

    def cycle() -> None:
        ppo.collect(envs, policy, rollout, config)
        ppo.learn(policy, optimizer, rollout, config)

    cycle()  # kernels are compiled once
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- distill ---------------------------------------------------------------------------------------------------------


class Balancer(torch.nn.Module):
    """A teacher that nobody had to train: it leans against the fall, and towards the middle."""

    def logits(self, obs: Any) -> Any:
        right = obs @ torch.tensor([0.5, 1.0, 10.0, 3.0])
        return torch.stack([-right, right], dim=-1)


def test_distilled_student_does_as_its_teacher(tmp_path: Path) -> None:
    distill = load("distill")
    seen, teacher, config = [], Balancer(), distill.Config(seed=3)
    result = distill.train(teacher, config, tmp_path / "rows", progress=lambda now: seen.append(now.rounds[-1]))
    rows = config.steps * config.envs
    assert [held for held, _, _ in seen] == [rows * number for number in range(1, config.rounds + 1)]
    assert seen[-1][1] > 0.9, "both act alike"
    assert seen[0][2] < seen[-1][2], "what the student lived through taught it more"
    assert result.teacher_return > 450
    assert result.share() >= 0.9
    assert sum(weight.numel() for weight in result.student.parameters()) == 58


def test_distill_labels_every_row_by_the_teacher_and_opens_what_it_saved(tmp_path: Path) -> None:
    distill = load("distill")
    teacher, config = Balancer(), distill.Config(rounds=3, steps=8, envs=4, updates=2)
    result = distill.train(teacher, config, tmp_path / "rows")
    assert len(result.buffer) == result.buffer.capacity == 3 * 8 * 4
    batch = next(result.buffer.batches(96))
    assert np.allclose(batch["logits"], teacher.logits(batch["obs"]), atol=1e-5)
    assert (batch["action"] == batch["logits"].argmax(axis=-1)).all()

    saved = sw.open(tmp_path / "rows")
    assert isinstance(saved, sw.DistillationBuffer)
    assert len(saved) == 8 * 4, "saved before the student acted"
    for then, now in zip(saved.steps(), result.buffer.steps(), strict=False):
        assert all(np.array_equal(then[name], now[name]) for name in ("obs", "action", "logits", "done", "indices"))


def test_distill_trains_its_teacher_once_and_reaches_nine_tenths_of_it(tmp_path: Path) -> None:
    command = [EXAMPLES / "distill.py", "--teacher", tmp_path / "teacher.pt", "--out", tmp_path / "out"]
    first, again = run(*command), run(*command)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout.splitlines()[0] == "training a teacher"
    assert first.stdout.splitlines()[1:] == again.stdout.splitlines(), "the same teacher, the same student"
    words = first.stdout.splitlines()[-1].split()
    student, teacher, share = float(words[6].strip(",")), float(words[8].strip(":")), int(words[9].strip("%"))
    assert teacher >= 450
    assert student >= 0.9 * teacher
    assert share >= 90
    student_weights = torch.load(tmp_path / "out" / "student.pt", weights_only=True)
    assert all(torch.isfinite(weight).all() for weight in student_weights.values())


def test_distill_refuses_zero_rounds() -> None:
    assert "--rounds must be at least 1, got 0" in refusal("distill", "--rounds", 0)


def test_async_grpo_learns_to_close_brackets() -> None:
    pytest.importorskip("safetensors")
    finished = run(EXAMPLES / "async_grpo.py", "--steps", 40, "--seed", 1)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    scores = [float(line.split()[2]) for line in lines if line.startswith("version")]
    assert scores[0] < 0.25, "random weights"
    assert sum(scores[-2:]) / 2 > scores[0] + 0.15, scores
    staleness = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(staleness) == 2
    assert max(staleness) > 0, "generators went on while the learner trained"
    assert lines[-1].startswith(f"reward {scores[-1]:.3f} on held-out items after 40 steps")


def test_async_grpo_scores_answers_by_places() -> None:
    pytest.importorskip("safetensors")
    grpo = load("async_grpo")
    assert grpo.reward({"id": "([{<"}, ">}])") == 1.0
    assert grpo.reward({"id": "([{<"}, ">}])>") == 0.8
    assert grpo.reward({"id": "([{<"}, ">])") == 0.25
    assert grpo.reward({"id": "([{<"}, "") == 0.0
    task = grpo.brackets(depth=2)
    assert (len(task.items), len(task.held_out)) == (14, 2)


# ---- trajectories ----------------------------------------------------------------------------------------------------


def test_trajectories_are_recorded_over_a_kill_and_cloned(tmp_path: Path) -> None:
    example = load("trajectories")
    result = example.run(example.Config(out=tmp_path, seed=1))
    assert 0 < result.killed_with < 60, "killed in the middle"
    assert result.checkpoint_with % 10 == 0
    assert result.checkpoint_with <= result.killed_with
    assert result.recorded == 60
    assert result.from_files > 0.7, "five of sixty are in memory"
    assert result.agreement > 0.9
    assert result.greedy_return > 300
    with sw.TrajectoryReplayBuffer(tmp_path / "buffer") as buffer:
        batch = buffer.sample(5_000)
        assert (batch["actions"] == example.rule(batch["curr_obs"]["state"])).all()
        going = ~batch["terminations"] & ~batch["truncations"]
        moved = batch["curr_obs"]["state"][:, 0] + 0.02 * batch["curr_obs"]["state"][:, 1]
        assert np.allclose(batch["next_obs"]["state"][:, 0], moved, atol=1e-5), "what a step led to, also at ends"
        assert 0.5 < going.mean() < 1


def test_trajectories_run_from_the_command_line_and_refuse_zero(tmp_path: Path) -> None:
    finished = run(EXAMPLES / "trajectories.py", "--trajectories", 20, "--out", tmp_path / "out")
    assert finished.returncode == 0, finished.stderr
    killed, went_on, cloned, last = finished.stdout.splitlines()
    assert killed.startswith("killed: ")
    assert went_on == "went on: 20 trajectories"
    assert cloned.startswith("cloned: agrees with the rule on ")
    assert last.startswith("greedy return over 20 episodes: ")
    assert "--trajectories" in refusal("trajectories", "--trajectories", 0)
