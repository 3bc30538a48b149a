"""ApexRL's own tests and algorithms on our buffers.

Two checks. Its files ``test/test_*.py`` run unchanged, with the buffer classes of its modules replaced by ours before
anything imports them. And its PPO, DQN and SAC train twice with equal seeds, on its own buffers and on ours: what the
buffers hand out, the losses and the final weights must be equal.

Needs, besides the packages of our tests: tensordict>=0.6,<0.12.2 pyvers importlib_metadata zipp (``--no-deps``: the
first one asks for a torch of its own).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .outcome import Outcome, read_junit

__all__ = ["run"]

ROOT = Path(__file__).parents[2]
CLASSES = {"RolloutBuffer": "apexrl.buffer.rollout_buffer", "ReplayBuffer": "apexrl.buffer.replay_buffer"}
SPECS = ("apexrl.utils.observation", "apexrl.utils")
SECONDS = 900


def run(checkout: Path) -> list[Outcome]:
    """Its tests by file, then one line for each algorithm that was compared."""
    checkout = checkout.resolve()
    with tempfile.TemporaryDirectory() as folder:
        files = [file for file in sorted((checkout / "test").glob("test_*.py")) if "def test_" in file.read_text()]
        outcomes = [_run_file(checkout, file, Path(folder)) for file in files]
        return [*outcomes, *_run_training(checkout, Path(folder))]


def _start(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(checkout / "src"), str(checkout / "test"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "tests.originals.apexrl", *arguments],
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
            "OMP_NUM_THREADS": "1",  # the networks are small: threads would wait for each other
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


# ---- its tests -------------------------------------------------------------------------------------------------------


def _run_file(checkout: Path, file: Path, folder: Path) -> Outcome:
    report, counts = folder / f"{file.stem}.xml", folder / f"{file.stem}.json"
    process = _start(checkout, "tests", str(file), str(report), str(counts))
    outcome = read_junit(f"test/{file.name}", report)
    if not counts.exists():
        outcome.failed += 1
        outcome.notes.append(f"the process ended with {process.returncode}: {process.stderr.strip()[-300:]}")
        return outcome
    made = json.loads(counts.read_text())
    outcome.notes.append("buffers of ours: " + ", ".join(f"{count} {name}" for name, count in made.items()))
    # Tests that name a buffer, an algorithm or a runner, and built none of ours, have shown nothing.
    if re.search(r"\b(\w+Buffer|PPO|DQN|SAC|\w+Runner)\(\n", file.read_text()) and not sum(made.values()):
        outcome.failed += 1
        outcome.notes.append("none of our buffers was built")
    return outcome


def _tests(file: str, report: str, counts: str) -> int:
    """In a process of its own: swaps, then runs one file."""
    import pytest

    made = _swap()
    code = pytest.main(
        [file, "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={Path.cwd()}", f"--junitxml={report}"]
    )
    Path(counts).write_text(json.dumps(made))
    return int(code)


def _swap() -> dict[str, int]:
    """Puts our classes where its modules have theirs, which cannot be built from now on; counts ours."""
    from sharpwave.compat import apexrl as ours

    made: dict[str, int] = {}
    for name, place in CLASSES.items():
        module = importlib.import_module(place)
        if not hasattr(module, name):
            continue
        own = getattr(module, name)
        own.__init__ = _refuse
        counting = _counting(getattr(ours, name), name, made)
        for holder in (module, importlib.import_module("apexrl.buffer")):
            if hasattr(holder, name):
                setattr(holder, name, counting)
    for place in SPECS:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "TensorLeafSpec"):
            module.TensorLeafSpec = ours.TensorLeafSpec
    return made


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("one of ApexRL's own buffers was built")


def _counting(cls: Any, name: str, made: dict[str, int]) -> Any:
    made[name] = 0

    def build(*args: Any, **kwargs: Any) -> Any:
        made[name] += 1
        return cls(*args, **kwargs)

    return build


# ---- its algorithms --------------------------------------------------------------------------------------------------


def _run_training(checkout: Path, folder: Path) -> list[Outcome]:
    report = folder / "training.json"
    process = _start(checkout, "training", str(report))
    if process.returncode or not report.exists():
        return [Outcome("training", 0, 1, notes=[f"ended with {process.returncode}: {process.stderr.strip()[-500:]}"])]
    return [Outcome(**one) for one in json.loads(report.read_text())]


def _training(report: str) -> int:
    """In a process of its own: every algorithm that this checkout has, on its buffers and on ours."""
    outcomes = []
    for name, train in _algorithms().items():
        try:
            outcomes.append(_compare(name, train))
        except Exception as error:  # the others still tell something
            outcomes.append({"file": name, "passed": 0, "failed": 1, "notes": [f"{type(error).__name__}: {error}"]})
    Path(report).write_text(json.dumps(outcomes))
    return 0


def _compare(name: str, train: Callable[[], tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    import torch

    with _buffers_of("theirs"):
        buffer, theirs = train()
    assert not _is_ours(buffer)
    with _buffers_of("ours"):
        buffer, ours = train()
    assert _is_ours(buffer)
    equal, different, exact = 0, [], 0
    for key in sorted(theirs.keys() | ours.keys()):
        left, right = theirs.get(key), ours.get(key)
        same = left is not None and right is not None and left.shape == right.shape
        if same and torch.allclose(left.double(), right.double(), rtol=1e-4, atol=1e-5):
            equal += 1
            exact += bool(torch.equal(left.double(), right.double()))
        else:
            most = (left.double() - right.double()).abs().max().item() if same else "of another shape"
            different.append(f"{key}: {most}")
    notes = [f"{equal} tensors equal, {exact} of them to the last bit"]
    notes += [f"differs: {', '.join(different[:5])}"] if different else []
    return {"file": name, "passed": equal, "failed": len(different), "notes": notes}


@contextmanager
def _buffers_of(whom: str) -> Iterator[None]:
    """The names that the algorithms' modules hold, for the time of one training."""
    from sharpwave.compat import apexrl as ours

    places = [("apexrl.algorithms.ppo.ppo", "RolloutBuffer")]
    places += [("apexrl.algorithms.dqn.dqn", "ReplayBuffer"), ("apexrl.algorithms.sac.sac", "ReplayBuffer")]
    held = []
    for place, name in places:
        if importlib.util.find_spec(place.rpartition(".")[0]) is not None:
            module = importlib.import_module(place)
            held.append((module, name, getattr(module, name)))
            source = ours if whom == "ours" else importlib.import_module(CLASSES[name])
            setattr(module, name, getattr(source, name))
    try:
        yield
    finally:
        for module, name, before in held:
            setattr(module, name, before)


def _is_ours(buffer: Any) -> bool:
    return type(buffer).__module__.startswith("sharpwave.")


def _algorithms() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    made: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {"PPO, CartPole-v1": lambda: _ppo("CartPole-v1")}
    if importlib.util.find_spec("apexrl.algorithms.dqn") is None:
        return made  # 8488801: PPO alone, and for discrete actions alone
    made["PPO, Pendulum-v1"] = lambda: _ppo("Pendulum-v1")
    made["PPO, nested and privileged"] = lambda: _ppo("make_uint8_multimodal_discrete_env", use_asymmetric=True)
    made["DQN, CartPole-v1"] = lambda: _off_policy("CartPole-v1", "dqn")
    made["DQN, nested uint8"] = lambda: _off_policy("make_uint8_multimodal_discrete_env", "dqn")
    made["SAC, Pendulum-v1"] = lambda: _off_policy("Pendulum-v1", "sac")
    made["SAC, nested and privileged"] = lambda: _off_policy("make_multimodal_continuous_env", "sac")
    made["checkpoints in both directions"] = _checkpoints
    return made


def _seeded(env_id: str, envs: int = 4) -> Any:
    """Its vector environment, all randomness seeded."""
    import gymnasium
    import torch
    from apexrl.envs.gym_wrapper import GymVecEnv, GymVecEnvContinuous

    torch.manual_seed(7)

    def build(number: int) -> Any:
        made = gymnasium.make(env_id) if "-v" in env_id else getattr(importlib.import_module("helpers"), env_id)()
        made.reset(seed=number)
        return made

    continuous = "continuous" in env_id or "Pendulum" in env_id
    kind = GymVecEnvContinuous if continuous else GymVecEnv
    return kind([lambda number=number: build(number) for number in range(envs)], device="cpu")


def _ppo(env_id: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    import torch
    from apexrl.algorithms.ppo import PPO, PPOConfig
    from apexrl.models import MLPActor, MLPCritic, MLPDiscreteActor

    env = _seeded(env_id)
    options = {"num_steps": 32, "num_epochs": 3, "minibatch_size": 16, "learning_rate_schedule": "constant"}
    spaces = {"obs_space": env.envs[0].observation_space, "action_space": env.envs[0].action_space}
    agent = PPO(
        env=env,
        cfg=PPOConfig(**options, device="cpu", **settings),
        actor_class=MLPActor if "Pendulum" in env_id else MLPDiscreteActor,
        critic_class=MLPCritic,
        device=torch.device("cpu"),
        **spaces,
    )
    seen: dict[str, Any] = {}
    for iteration in range(4):
        _keep(seen, f"rollout {iteration}", agent.collect_rollout())
        _keep(seen, f"data {iteration}", agent.rollout_buffer.get_all_data())
        _keep(seen, f"update {iteration}", agent.update())
        drawn = agent.rollout_buffer.get_minibatch(20)
        _keep(seen, f"minibatch {iteration}", dict(enumerate(drawn)))
    _keep(seen, "actor", agent.actor.state_dict())
    _keep(seen, "critic", agent.critic.state_dict())
    env.close()
    return agent.rollout_buffer, seen


def _agent(env: Any, algorithm: str) -> tuple[Any, Any]:
    import torch
    from apexrl.agent.off_policy_runner import OffPolicyRunner
    from apexrl.algorithms.dqn import DQNConfig
    from apexrl.algorithms.sac import SACConfig
    from apexrl.models import MLPQNetwork

    # The ring goes round several times, and 4 environments do not divide its 50 rows: adds cross its end.
    options = {"batch_size": 16, "buffer_size": 50, "learning_starts": 20, "train_freq": 1, "gradient_steps": 1}
    options |= {"target_update_interval": 2, "log_interval": 0, "save_interval": 0}
    networks = {"q_network_class": MLPQNetwork} if algorithm == "dqn" else {}
    cfg = DQNConfig(**options) if algorithm == "dqn" else SACConfig(**options, device="cpu")
    runner = OffPolicyRunner(env=env, cfg=cfg, algorithm=algorithm, device=torch.device("cpu"), **networks)
    return runner, runner.agent


def _off_policy(env_id: str, algorithm: str) -> tuple[Any, dict[str, Any]]:
    env = _seeded(env_id)
    runner, agent = _agent(env, algorithm)
    seen: dict[str, Any] = {}
    update, sample = agent.update, agent.replay_buffer.sample

    def watched_update() -> Any:
        stats = update()
        _keep(seen, f"update {len(seen)}", stats)
        return stats

    def watched_sample(batch_size: int) -> Any:
        batch = sample(batch_size)
        _keep(seen, f"batch {len(seen)}", batch)
        return batch

    agent.update, agent.replay_buffer.sample = watched_update, watched_sample
    runner.learn(total_timesteps=200)
    assert agent.num_updates > 30
    _keep(seen, "state", agent.replay_buffer.state_dict())
    for name in ("observations", "actions", "rewards", "next_observations", "dones"):
        _keep(seen, f"stored {name}", getattr(agent.replay_buffer, name))
    for name in ("pos", "full", "size", "capacity"):
        _keep(seen, name, getattr(agent.replay_buffer, name))
    for name in ("q_network", "actor", "critic1", "critic2"):
        if hasattr(agent, name):
            _keep(seen, name, getattr(agent, name).state_dict())
    runner.close()
    return agent.replay_buffer, seen


def _checkpoints() -> tuple[Any, dict[str, Any]]:
    """What one kind of buffer saved is loaded into the other kind, by the algorithm's own save and load."""
    seen: dict[str, Any] = {}
    for algorithm, env_id in (("dqn", "make_uint8_multimodal_discrete_env"), ("sac", "make_multimodal_continuous_env")):
        runner, agent = _agent(_seeded(env_id), algorithm)
        runner.learn(total_timesteps=120)
        others = "theirs" if _is_ours(agent.replay_buffer) else "ours"
        with tempfile.TemporaryDirectory() as folder, _buffers_of(others):
            other = _agent(_seeded(env_id), algorithm)[1]
            assert _is_ours(other.replay_buffer) is not _is_ours(agent.replay_buffer)
            agent.save(str(Path(folder) / "agent.pt"))
            other.load(str(Path(folder) / "agent.pt"))
        _keep(seen, f"{algorithm} loaded", other.replay_buffer.state_dict())
        _keep(seen, f"{algorithm} drawn", other.replay_buffer.sample(16))
    return agent.replay_buffer, seen


def _keep(seen: dict[str, Any], key: str, value: Any) -> None:
    """Copies of all numbers in a tree, by path."""
    import torch

    if hasattr(value, "items"):
        for name, part in value.items():
            _keep(seen, f"{key}/{name}", part)
    elif isinstance(value, (int, float, torch.Tensor)):
        seen[key] = torch.as_tensor(value).detach().clone()


if __name__ == "__main__":
    sys.exit({"tests": _tests, "training": _training}[sys.argv[1]](*sys.argv[2:]))
