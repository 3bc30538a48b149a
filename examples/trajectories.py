"""Records trajectories of CartPole to disk, is killed, goes on where it was, and clones the behaviour from the files.

    python examples/trajectories.py
    python examples/trajectories.py --trajectories 200 --out run

A process of its own plays with a rule that balances the pole, writes what it sees into a TrajectoryReplayBuffer and
takes a checkpoint now and then. In the middle of that it is killed (SIGKILL, no farewell). What is in the folder is
whole: a second recorder takes it up and finishes. Then a network learns the rule's answers from transitions that are
drawn from the files, most of which never were in this process' memory.
"""

import argparse
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

import sharpwave as sw


@dataclass(frozen=True)
class Config:
    """What a run may change."""

    out: Path = Path("sharpwave-trajectories")
    trajectories: int = 60
    seed: int = 0
    envs: int = 8
    steps: int = 50  # of every environment in a trajectory
    noise: float = 0.3  # share of actions that are random: the clone has to know the way back
    checkpoint_every: int = 10
    updates: int = 400
    batch_size: int = 256


@dataclass
class Result:
    killed_with: int  # trajectories that were in the folder when its process was killed
    checkpoint_with: int
    recorded: int
    from_files: float  # share of the drawn transitions that were read from files
    agreement: float  # with the rule, on what was recorded
    greedy_return: float


def rule(obs: np.ndarray) -> np.ndarray:
    """Leans against the fall, and towards the middle."""
    return (obs @ np.array([0.5, 1.0, 10.0, 3.0], np.float32) > 0).astype(np.int64)


# ---- recording -------------------------------------------------------------------------------------------------------


def play(envs: gym.vector.VectorEnv, obs: np.ndarray, config: Config, rng: np.random.Generator) -> tuple:
    """One trajectory: (steps, envs) arrays, with what the rule said as the action. And the observation after it."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("obs", "next", "action", "reward", "ended", "cut")}
    for _ in range(config.steps):
        said = rule(obs)
        done = np.where(rng.random(config.envs) < config.noise, rng.integers(0, 2, config.envs), said)
        after, reward, terminated, truncated, info = envs.step(done)
        final = after.copy()
        for env in np.flatnonzero(terminated | truncated):
            final[env] = info["final_obs"][env]  # what the step led to; `after` is the next episode's start
        for name, value in zip(columns, (obs, final, said, reward, terminated, truncated), strict=True):
            columns[name].append(value)
        obs = after
    stacked = {name: np.stack(values) for name, values in columns.items()}
    trajectory = sw.Trajectory(
        max_episode_length=500,
        model_weights_id="rule_0",
        actions=stacked["action"],
        rewards=stacked["reward"].astype(np.float32),
        terminations=stacked["ended"],
        truncations=stacked["cut"],
        curr_obs={"state": stacked["obs"]},
        next_obs={"state": stacked["next"]},
    )
    return trajectory, obs


def record(config: Config, pause_s: float = 0.0) -> None:
    """Records until there are enough trajectories, however many are there already."""
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", config.envs, vectorization_mode="sync", vector_kwargs=same_step)
    with sw.TrajectoryReplayBuffer(config.out / "buffer") as buffer:
        rng = np.random.default_rng((config.seed, len(buffer)))
        obs, _ = envs.reset(seed=config.seed + 1000 * len(buffer))
        while len(buffer) < config.trajectories:
            trajectory, obs = play(envs, obs, config, rng)
            buffer.add(trajectory)
            if len(buffer) % config.checkpoint_every == 0:
                buffer.save(config.out / "checkpoint")
            time.sleep(pause_s)
    envs.close()


def record_and_be_killed(config: Config) -> None:
    """Lets another process record, and kills it when it is half-way."""
    arguments = ["--out", config.out, "--trajectories", config.trajectories, "--seed", config.seed, "--record"]
    recorder = subprocess.Popen([sys.executable, __file__, *map(str, arguments)])
    folder = config.out / "buffer"
    while recorder.poll() is None and len(list(folder.glob("trajectory_*.safetensors"))) < config.trajectories // 2:
        time.sleep(0.002)
    recorder.send_signal(signal.SIGKILL)
    recorder.wait()


# ---- learning --------------------------------------------------------------------------------------------------------


def clone(config: Config) -> tuple[nn.Module, float, float]:
    """Learns what the rule said. Returns the network, its agreement with the rule, and the share read from files."""
    torch.manual_seed(config.seed)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    with sw.TrajectoryReplayBuffer(config.out / "buffer", cache=5, device="cpu", seed=config.seed) as buffer:
        for _ in range(config.updates):
            batch = buffer.sample(config.batch_size)
            logits = policy(batch["curr_obs"]["state"])
            loss = nn.functional.cross_entropy(logits, batch["actions"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        batch = buffer.sample(2_000)
        agreement = (policy(batch["curr_obs"]["state"]).argmax(-1) == batch["actions"]).float().mean().item()
        stats = buffer.stats()
    return policy, agreement, stats["cache_misses"] / (stats["cache_hits"] + stats["cache_misses"])


def evaluate(policy: nn.Module, seed: int, episodes: int = 20) -> float:
    """The mean return of greedy episodes, played side by side."""
    envs = gym.make_vec("CartPole-v1", episodes, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    alive, total = np.ones(episodes, bool), 0.0
    with torch.inference_mode():
        while alive.any():
            obs, reward, terminated, truncated, _ = envs.step(policy(torch.from_numpy(obs)).argmax(-1).numpy())
            total += float(reward[alive].sum())
            alive &= ~(terminated | truncated)
    return total / episodes


def count(folder: Path) -> int:
    """How many trajectories a folder holds, every one of them read and checked."""
    if not folder.exists():
        return 0
    with sw.open(folder) as buffer:
        return len(buffer)


def run(config: Config) -> Result:
    record_and_be_killed(config)
    killed_with, checkpoint_with = count(config.out / "buffer"), count(config.out / "checkpoint")
    print(f"killed: {killed_with} whole trajectories in the folder, {checkpoint_with} in the last checkpoint")
    record(config)
    recorded = count(config.out / "buffer")
    print(f"went on: {recorded} trajectories")
    policy, agreement, from_files = clone(config)
    print(f"cloned: agrees with the rule on {agreement:.1%}; {from_files:.0%} of the transitions were read from files")
    greedy_return = evaluate(policy, config.seed + 1)
    print(f"greedy return over 20 episodes: {greedy_return:.0f}")
    return Result(killed_with, checkpoint_with, recorded, from_files, agreement, greedy_return)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=Config.trajectories)
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument("--out", type=Path, default=Config.out)
    parser.add_argument("--record", action="store_true", help="record only: what the example lets another process do")
    options = parser.parse_args()
    if options.trajectories < 1:
        parser.error(f"--trajectories must be at least 1, got {options.trajectories}")
    config = Config(out=options.out, trajectories=options.trajectories, seed=options.seed)
    if options.record:
        record(config, pause_s=0.01)
    else:
        run(config)


if __name__ == "__main__":
    main()
