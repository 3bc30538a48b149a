"""Ape-X on one host: actor processes fill one prioritized buffer in shared memory, a learner draws from it.

    python examples/apex.py --actors 2 --seed 0

The learner makes the buffer; each actor opens it by its address and adds what it lives through. A pace makes the two
sides wait for each other, so on every machine a row is learnt from as often. Weights go the other way through a file
that is replaced whole. An actor may be killed at any instruction (try `kill -9`): another one takes its place. What
stays behind if the learner itself is killed so, `sharpwave ls` shows and `sharpwave rm` removes.
"""

import argparse
import contextlib
import multiprocessing as mp
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import sharpwave as sw
from sharpwave.errors import NotReady

OBS_SCALE = np.array([1.0, 1.0, 10.0, 1.0], np.float32)  # position, speed, angle, turning speed; 0.2 rad is a fall


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve CartPole-v1 in well under a minute on two cores."""

    actors: int = 2
    steps: int = 60_000  # of all actors together, at most
    seed: int = 0
    stop_return: float = 495.0  # an evaluation that reaches it, over 50 greedy episodes, ends the run
    batch_size: int = 64
    replay_ratio: float = 16.0  # how often a row is learnt from
    learning_starts: int = 500


class Policy:
    """The network as its users see it: NumPy does for a few observations, and an actor without torch starts at once."""

    def __init__(self, weights: list[np.ndarray]) -> None:
        self.weights = weights

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Returns the action of the highest value for each observation."""
        *hidden, last, last_bias = self.weights
        out = obs * OBS_SCALE
        for matrix, bias in zip(hidden[::2], hidden[1::2], strict=True):
            out = np.maximum(out @ matrix.T + bias, 0)
        return (out @ last.T + last_bias).argmax(axis=-1)

    def publish(self, path: Path) -> None:
        """Replaces the file in one step: who reads it has old weights or new ones, whoever is killed meanwhile."""
        np.savez(path.with_suffix(".new.npz"), *self.weights)
        path.with_suffix(".new.npz").replace(path)

    @classmethod
    def load(cls, path: Path) -> "Policy":
        with np.load(path) as arrays:
            return cls([arrays[name] for name in arrays.files])


def act(address: str, weights: Path, actor: int, epsilon: float, seed: int, scores: Any) -> None:
    """Acts until it is told to end, in a process of its own: newest weights, own epsilon, own writer."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the buffer is closed on the way out
    rng = np.random.default_rng(seed)
    score = np.frombuffer(scores).reshape(-1, 2)[actor]  # steps and mean return; nobody else writes them
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    recent: deque[float] = deque(maxlen=20)
    version = 0
    with sw.open(address) as buffer:
        obs, _ = env.reset(seed=seed)
        for step in range(sys.maxsize):
            if step % 20 == 0 and (written := weights.stat().st_mtime_ns) != version:
                policy, version = Policy.load(weights), written
            action = int(rng.integers(2) if rng.random() < epsilon else policy.act(obs))
            next_obs, _, terminated, truncated, info = env.step(action)
            # -1 for a fall instead of CartPole's 1 a step ranks policies alike, and few rows tell something. An actor
            # that waits a minute for its turn has lost its learner, and ends.
            buffer.add(obs, action, -float(terminated), next_obs, terminated, truncated=truncated, timeout=60)
            obs = next_obs
            score[0] += 1
            if terminated or truncated:
                recent.append(float(info["episode"]["r"]))
                score[1] = statistics.fmean(recent)
                obs, _ = env.reset()


class Actors:
    """The actor processes: started, replaced when they die, ended together."""

    def __init__(self, config: Config, address: str, weights: Path) -> None:
        self.config, self.address, self.weights = config, address, weights
        self.context = mp.get_context("spawn")
        self.scores = self.context.RawArray("d", 2 * config.actors)  # no lock: who is killed could hold it for ever
        self.running: list[Any] = [None] * config.actors
        self.replaced = 0

    def mend(self) -> None:
        """Starts every actor that is not there: all of them at first, later those that died."""
        for actor, process in enumerate(self.running):
            if process is not None and process.is_alive():
                continue
            if process is not None:
                self.replaced += 1
                print(f"actor {actor}: process {process.pid} died ({process.exitcode}), another takes its place")
            if self.replaced > 10 * len(self.running):
                raise RuntimeError("actors die again and again")
            epsilon = 0.4 ** (1 + 7 * actor / max(1, len(self.running) - 1))  # Ape-X's ladder: from much to hardly any
            seed = self.config.seed + 1_000 * actor + 1_000_000 * self.replaced
            arguments = (self.address, self.weights, actor, epsilon, seed, self.scores)
            process = self.context.Process(target=act, args=arguments, daemon=True)
            # Ctrl-C reaches every process of a terminal. Actors pass it over: the learner ends them.
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            process.start()
            self.running[actor] = process
            signal.signal(signal.SIGINT, handler)
            print(f"actor {actor}: process {process.pid}, epsilon {epsilon:.4f}", flush=True)

    def report(self) -> None:
        """Prints a line for each."""
        for actor, (steps, mean) in enumerate(np.frombuffer(self.scores).reshape(-1, 2)):
            print(f"    actor {actor}: {steps:7,.0f} steps, return {mean:5.1f} over 20 episodes", flush=True)

    def stop(self) -> None:
        """Ends them all: by asking, and by force where one does not hear."""
        started = [process for process in self.running if process is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(10)
            process.kill()  # does nothing to one that has ended


def evaluate(policy: Policy, seed: int, episodes: int) -> float:
    """Returns the mean return of greedy episodes, played side by side; a seed fixes their starts."""
    envs = gym.make_vec("CartPole-v1", episodes, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    alive, total = np.ones(episodes, bool), 0.0
    while alive.any():
        obs, reward, terminated, truncated, _ = envs.step(policy.act(obs))
        total += float(reward[alive].sum())
        alive &= ~(terminated | truncated)
    return total / episodes


def learn(config: Config, buffer: sw.ReplayBuffer, actors: Actors) -> Policy:
    """Learns until an evaluation is good enough or the actors have done their steps; returns the best policy."""
    import torch  # not above: the actors import this module too
    from torch import nn

    torch.set_num_threads(1)  # the actors want the other cores
    torch.manual_seed(config.seed)
    online, target = (
        nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2)
    )
    for parameter in online[-1].parameters():
        nn.init.zeros_(parameter)  # right wherever no fall is near
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    scale = torch.from_numpy(OBS_SCALE)

    def as_policy(network: nn.Module) -> Policy:
        return Policy([parameter.detach().numpy().copy() for parameter in network.parameters()])

    best, policy, updates = 0.0, as_policy(online), 0
    policy.publish(actors.weights)
    told, last = time.monotonic(), buffer.stats()
    while best < config.stop_return and last["rows_added"] < config.steps:
        actors.mend()
        try:
            batch = buffer.sample(config.batch_size, device="cpu", timeout=1)
        except NotReady:  # it is the actors' turn: look after them
            continue
        obs, next_obs = batch["obs"] * scale, batch["next_obs"] * scale
        with torch.no_grad():  # double DQN: the online network picks the next action, the target one values it
            next_value = target(next_obs).gather(1, online(next_obs).argmax(dim=1, keepdim=True)).squeeze(1)
            goal = batch["reward"] + batch["discount"] * next_value * ~batch["done"]
        errors = goal - online(obs).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        optimizer.zero_grad()
        (batch["weights"] * errors.square()).mean().backward()
        optimizer.step()
        buffer.update_priorities(batch["indices"], errors.detach())
        with torch.no_grad():
            for old, new in zip(target.parameters(), online.parameters(), strict=True):
                old.lerp_(new, 0.05)
        updates += 1
        if updates % 25 == 0:
            as_policy(online).publish(actors.weights)
        if updates % 250 == 0 and (value := evaluate(as_policy(target), 1_000_000, 50)) >= best:
            best, policy = value, as_policy(target)
        if updates % 500 == 0 or best >= config.stop_return:
            stats, now = buffer.stats(), time.monotonic()
            added, sampled = ((stats[count] - last[count]) / (now - told) for count in ("rows_added", "rows_sampled"))
            print(f"{stats['rows_added']:,} steps, {added:,.0f}/s, samples {sampled:,.0f}/s, best return {best:.1f}")
            actors.report()
            told, last = now, stats
    return policy


def train(config: Config) -> Policy:
    """Trains one agent from what several processes live through; these and the buffer end with it, however it ends."""
    address = f"shm://apex-{os.getpid()}"
    with contextlib.ExitStack() as ends:
        buffer = sw.ReplayBuffer.for_env(
            gym.make("CartPole-v1"),
            capacity=100_000,
            sampler=sw.Prioritized(alpha=0.6, beta=0.4),
            view=sw.Transitions(n_step=3, gamma=0.99),
            pace=sw.Pace.samples_per_insert(config.replay_ratio, config.learning_starts, error=16 * config.batch_size),
            storage=address,
            seed=config.seed,
        )
        ends.callback(buffer.close, unlink=True)
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="apex-"))
        actors = Actors(config, address, Path(folder) / "weights.npz")
        ends.callback(actors.stop)
        return learn(config, buffer, actors)


def main() -> None:
    """Trains from the command line."""
    parser = argparse.ArgumentParser(description="Ape-X on CartPole-v1: several actors, one learner, one buffer.")
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    config = Config(**vars(parser.parse_args()))
    if min(config.actors, config.steps) < 1:
        parser.error("--actors and --steps must be at least 1")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("ended; the actors and the buffer are gone"))
    began = time.monotonic()
    policy = train(config)
    value = evaluate(policy, 2_000_000, 20)  # other starts than those that chose the policy
    print(f"greedy return over 20 episodes: {value:.1f}, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
