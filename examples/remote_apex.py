"""Ape-X on several machines: a server holds a prioritized buffer, actors add to it, a learner draws from it.

    sharpwave keys new learner && sharpwave keys new actor                 # on the server; copy the .key files
    python examples/remote_apex.py server --at tcp://0.0.0.0:7001 --keys ~/.config/sharpwave/keys --folder run
    python examples/remote_apex.py actor --at tcp://server:7001 --keys actor.key --number 0 --of 2
    python examples/remote_apex.py learner --at tcp://server:7001 --keys learner.key

On one machine leave `--keys` out and use tcp://127.0.0.1:7001. The network's weights go the other way through a second
table of the same server: the learner adds them as a row, an actor draws the newest row. Each command may be killed and
started again; the others wait for it. Give the server a `--folder`: its tables are files there, so that a server that
is started again still has them.
"""

import argparse
import signal
import statistics
import sys
import time
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np

import sharpwave as sw
from sharpwave.errors import NotReady

OBS_SCALE = np.array([1.0, 1.0, 10.0, 1.0], np.float32)  # position, speed, angle, turning speed; 0.2 rad is a fall
SHAPES = [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)]  # weights and biases of the network
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


class Policy:
    """The network for actors: NumPy is enough for one observation."""

    def __init__(self, flat: np.ndarray) -> None:
        ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
        self.weights = [part.reshape(shape) for part, shape in zip(np.split(flat, ends), SHAPES, strict=True)]

    def act(self, obs: np.ndarray) -> np.ndarray:
        """Returns the action of the highest value for each observation."""
        *hidden, last, last_bias = self.weights
        out = obs * OBS_SCALE
        for matrix, bias in zip(hidden[::2], hidden[1::2], strict=True):
            out = np.maximum(out @ matrix.T + bias, 0)
        return (out @ last.T + last_bias).argmax(axis=-1)


def run_server(at: str, keys: str | None, folder: str | None, replay_ratio: float) -> None:
    """Serves the two tables until Ctrl-C."""
    places = [None if folder is None else f"file://{folder}/{name}.sw" for name in ("replay", "weights")]
    replay = sw.ReplayBuffer.for_env(
        gym.make("CartPole-v1"),
        capacity=100_000,
        sampler=sw.Prioritized(alpha=0.6, beta=0.4),
        view=sw.Transitions(n_step=3, gamma=0.99),
        # On every machine a row is learnt from as often: actors and the learner wait for each other.
        pace=sw.Pace.samples_per_insert(replay_ratio, 500, error=1024),
        storage=places[0],
        exist="attach",
        seed=0,
    )
    weights = sw.ReplayBuffer(
        8,
        schema={"obs": sw.Field((SIZE,))},
        next_obs=None,
        sampler=sw.Recent(1),
        pace=sw.Pace.min_size(1),  # an actor waits for the first weights
        storage=places[1],
        exist="attach",
        seed=0,
    )
    with replay, weights, sw.serve({"replay": replay, "weights": weights}, at, keys=keys) as server:
        print(f"serving at {server.address}", flush=True)
        while True:
            time.sleep(10)
            stats = replay.stats()
            clients = len(server.stats()["clients"])
            print(
                f"{stats['rows_added']:,} rows added, {stats['rows_sampled']:,} sampled, {clients} clients", flush=True
            )


def run_actor(at: str, keys: str | None, number: int, of: int, seed: int, steps: int) -> None:
    """Acts with the newest weights and an epsilon of its own."""
    epsilon = 0.4 ** (1 + 7 * number / max(1, of - 1))  # Ape-X's ladder: from much to hardly any
    rng = np.random.default_rng([seed, number])
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    recent: deque[float] = deque(maxlen=20)
    with open_table(at, "replay", keys) as replay, open_table(at, "weights", keys) as weights:
        policy = Policy(weights.sample(1)["obs"][0])
        print(f"actor {number}: epsilon {epsilon:.4f}", flush=True)
        # Rows go out without a wait for each answer; the server still takes each once.
        writer = replay.writer(window=64)
        obs, _ = env.reset(seed=seed + 1_000 * number)
        for step in range(1, steps + 1):
            if step % 100 == 0:
                policy = Policy(weights.sample(1)["obs"][0])
            action = int(rng.integers(2) if rng.random() < epsilon else policy.act(obs))
            next_obs, _, terminated, truncated, info = env.step(action)
            # -1 for a fall instead of CartPole's 1 a step ranks policies alike, and few rows tell something.
            writer.add(obs, action, -float(terminated), next_obs, terminated, truncated=truncated)
            obs = next_obs
            if terminated or truncated:
                recent.append(float(info["episode"]["r"]))
                obs, _ = env.reset()
            if step % 1_000 == 0 and recent:
                print(f"actor {number}: {step:,} steps, return {statistics.fmean(recent):.1f}", flush=True)
        writer.close()


def run_learner(at: str, keys: str | None, seed: int, updates: int, stop_return: float) -> None:
    """Learns until an evaluation reaches `stop_return`, or for so many updates."""
    import torch  # not above: servers and actors do without it
    from torch import nn

    torch.manual_seed(seed)
    online, target = (
        nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2)
    )
    for parameter in online[-1].parameters():
        nn.init.zeros_(parameter)  # right wherever no fall is near
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    scale = torch.from_numpy(OBS_SCALE)

    def flat(network: nn.Module) -> np.ndarray:
        return np.concatenate([parameter.detach().numpy().ravel() for parameter in network.parameters()])

    with open_table(at, "replay", keys) as replay, open_table(at, "weights", keys) as weights:
        weights.add(obs=flat(online), reward=0.0, done=False)
        best = 0.0
        for update in range(1, updates + 1):
            batch = sample(replay)
            obs, next_obs = batch["obs"] * scale, batch["next_obs"] * scale
            with torch.no_grad():  # double DQN: the online network picks the next action, the target one values it
                next_value = target(next_obs).gather(1, online(next_obs).argmax(dim=1, keepdim=True)).squeeze(1)
                goal = batch["reward"] + batch["discount"] * next_value * ~batch["done"]
            errors = goal - online(obs).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
            optimizer.zero_grad()
            (batch["weights"] * errors.square()).mean().backward()
            optimizer.step()
            replay.update_priorities(batch["indices"], errors.detach())
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.lerp_(new, 0.05)
            if update % 25 == 0:
                weights.add(obs=flat(online), reward=0.0, done=False)
            if update % 250 == 0:
                best = max(best, evaluate(Policy(flat(target)), 1_000_000, 50))
                print(f"{update:,} updates, best return {best:.1f}", flush=True)
            if best >= stop_return:
                break
        print(f"greedy return over 20 episodes: {evaluate(Policy(flat(target)), 2_000_000, 20):.1f}", flush=True)


def sample(replay: sw.ReplayBuffer) -> dict[str, Any]:
    """A batch. It waits for the actors and says so: a learner without actors would otherwise be silent."""
    while True:
        try:
            return replay.sample(64, device="cpu", timeout=10)
        except NotReady as error:
            print(f"waiting: {error}", flush=True)


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


def open_table(at: str, name: str, keys: str | None) -> Any:
    """Opens a table of the server; waits a minute for a server that is not there yet."""
    return sw.open(f"{at}/{name}", keys=keys, wait=True, timeout=60)


def main() -> None:
    """Runs one of the three commands."""
    parser = argparse.ArgumentParser(description="Ape-X on CartPole-v1, between machines.")
    commands = parser.add_subparsers(dest="command", required=True)
    server, actor, learner = (commands.add_parser(name) for name in ("server", "actor", "learner"))
    for command in (server, actor, learner):
        command.add_argument("--at", default="tcp://127.0.0.1:7001", help="the server's address")
    server.add_argument("--keys", help="the folder that 'sharpwave keys new' made")
    server.add_argument("--folder", help="for the tables' files: rows and weights outlive the server")
    server.add_argument("--replay-ratio", type=float, default=16.0, help="how often a row is learnt from")
    for command in (actor, learner):
        command.add_argument("--keys", help="this client's file NAME.key")
        command.add_argument("--seed", type=int, default=0)
    actor.add_argument("--number", type=int, default=0, help="which actor this is, from 0")
    actor.add_argument("--of", type=int, default=2, help="how many actors there are")
    actor.add_argument("--steps", type=int, default=10**9)
    learner.add_argument("--updates", type=int, default=20_000)
    learner.add_argument("--stop-return", type=float, default=495.0)
    options = vars(parser.parse_args())
    run = {"server": run_server, "actor": run_actor, "learner": run_learner}[options.pop("command")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that what is open is closed
    try:
        run(**options)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
