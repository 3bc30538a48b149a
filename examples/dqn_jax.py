"""Double DQN on CartPole-v1 in plain JAX: the network, Adam and the update are functions, the batches come by DLPack.

    python examples/dqn_jax.py --steps 15000 --seed 0

The buffer appears on three lines: `ReplayBuffer.for_env` makes it, `add` stores a transition, and `to_jax(sample(...))`
gives what the compiled update takes. (Batches this small are copied; those from 16 KiB an array on are not.)
"""

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import sharpwave as sw
from sharpwave.adapters.jax import to_jax

OBS_SCALE = np.array([1.0, 1.0, 10.0, 1.0], np.float32)  # position, speed, angle, turning speed; 0.2 rad is a fall
Params = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve CartPole-v1 in about twenty seconds on one CPU core."""

    steps: int = 15_000
    seed: int = 0
    capacity: int = 100_000
    batch_size: int = 128
    learning_starts: int = 500
    learn_every: int = 2  # environment steps per gradient step
    learning_rate: float = 1e-3
    gamma: float = 0.99
    target_rate: float = 0.05  # share of the online weights that moves into the target at a gradient step
    epsilon_final: float = 0.05
    epsilon_steps: int = 3_000  # steps over which epsilon falls from 1 to epsilon_final
    evaluate_every: int = 500


@dataclass
class Result:
    """What a run leaves behind: the best-evaluated weights, their curve and the buffer."""

    params: Params
    buffer: sw.ReplayBuffer
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, mean of 100 greedy episodes)
    greedy_return: float = 0.0  # of 100 other episodes, with the best weights
    loss: float = float("nan")  # of the last gradient step before an evaluation
    wall_s: float = 0.0


# ---- network and optimizer -------------------------------------------------------------------------------------------


def init(key: jax.Array, sizes: tuple[int, ...] = (4, 128, 128, 2)) -> Params:
    """Returns weights and biases; the last layer starts at 0, so do all values."""
    params = []
    for i, (rows, columns) in enumerate(itertools.pairwise(sizes)):
        key, part = jax.random.split(key)
        scale = 0.0 if i == len(sizes) - 2 else (2 / rows) ** 0.5
        params.append((scale * jax.random.normal(part, (rows, columns)), jnp.zeros(columns)))
    return params


def q_values(params: Params, obs: Any) -> jax.Array:
    """Returns the values of both actions, as (..., 2)."""
    hidden = obs * OBS_SCALE
    for weights, bias in params[:-1]:
        hidden = jax.nn.relu(hidden @ weights + bias)
    weights, bias = params[-1]
    return hidden @ weights + bias


@jax.jit
def act(params: Params, obs: Any) -> jax.Array:
    """Returns the action of the highest value for each observation."""
    return q_values(params, obs).argmax(-1)


def td_errors(params: Params, target: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns double DQN's errors: the online network picks the next action, the target one values it."""
    choice = q_values(params, batch["next_obs"]).argmax(-1, keepdims=True)
    next_value = jnp.take_along_axis(q_values(target, batch["next_obs"]), choice, -1)[:, 0]
    # `reward` sums up to three rewards and `discount` is gamma to the power of their number. `done` is True only where
    # the pole fell; at the time limit the next state still has its value.
    goal = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * next_value * ~batch["done"])
    return goal - jnp.take_along_axis(q_values(params, batch["obs"]), batch["action"][:, None], -1)[:, 0]


@partial(jax.jit, static_argnums=5)
def update(
    params: Params,
    target: Params,
    moments: tuple[Params, Params],
    count: int,
    batch: dict[str, jax.Array],
    config: Config,
) -> tuple[Params, Params, tuple[Params, Params], jax.Array]:
    """Takes one step of Adam and moves the target; returns both networks, the moments and the loss."""
    loss, gradient = jax.value_and_grad(lambda now: jnp.square(td_errors(now, target, batch)).mean())(params)
    mean = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, moments[0], gradient)
    square = jax.tree.map(lambda old, new: 0.999 * old + 0.001 * new**2, moments[1], gradient)
    rate = config.learning_rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    target = jax.tree.map(lambda old, new: old + config.target_rate * (new - old), target, params)
    return params, target, (mean, square), loss


# ---- training --------------------------------------------------------------------------------------------------------


def evaluate(params: Params, seed: int) -> float:
    """Returns the mean return of 100 greedy episodes, played side by side; a seed fixes their starts."""
    envs = gym.make_vec("CartPole-v1", 100, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    alive, total = np.ones(100, bool), 0.0
    while alive.any():
        obs, reward, terminated, truncated, _ = envs.step(np.asarray(act(params, obs)))
        total += float(reward[alive].sum())
        alive &= ~(terminated | truncated)
    envs.close()
    return total / 100


def train(config: Config, progress: Callable[[int, Result], None] = lambda step, result: None) -> Result:
    """Trains one agent; the same config gives the same result.

    Args:
        config: The run's settings.
        progress: Called after each evaluation with the step and the result so far.

    Returns:
        The best-evaluated weights with their learning curve and the buffer.
    """
    rng = np.random.default_rng(config.seed)
    env = gym.make("CartPole-v1")
    buffer = sw.ReplayBuffer.for_env(
        env,
        config.capacity,
        schema={"action": sw.Field((), "int32")},  # JAX's whole numbers; the space's own are int64
        view=sw.Transitions(n_step=3, gamma=config.gamma),
        seed=config.seed,
    )
    params = target = init(jax.random.key(config.seed))
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, count = (zeros, zeros), 0
    result = Result(params, buffer)
    began = time.perf_counter()

    obs, _ = env.reset(seed=config.seed)
    for step in range(1, config.steps + 1):
        epsilon = 1.0 + min(1.0, step / config.epsilon_steps) * (config.epsilon_final - 1.0)
        action = int(rng.integers(2) if rng.random() < epsilon else act(params, obs))
        next_obs, _, terminated, truncated, _ = env.step(action)
        # -1 for a fall instead of CartPole's 1 a step ranks policies alike.
        fall = -float(terminated)
        # next_obs is where the action led, also at an episode's end: reset() comes after.
        buffer.add(obs=obs, action=action, reward=fall, next_obs=next_obs, terminated=terminated, truncated=truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs

        if step >= config.learning_starts and step % config.learn_every == 0:
            batch = to_jax(buffer.sample(config.batch_size))
            del batch["indices"]  # serials of 64 bits, for update_priorities
            count += 1
            params, target, moments, loss = update(params, target, moments, count, batch, config)

        if step % config.evaluate_every == 0 or step == config.steps:
            # The target network is evaluated and kept: it averages the online one over its last steps.
            mean_return = evaluate(target, seed=1_000_000)
            result.evaluations.append((step, mean_return))
            result.loss = float(loss) if count else result.loss
            if mean_return == max(value for _, value in result.evaluations):  # of equals the later has learnt more
                result.params = target
            progress(step, result)

    result.wall_s = time.perf_counter() - began
    # Other starts than those that chose the best weights: the number reported is not the one selected on.
    result.greedy_return = evaluate(result.params, seed=2_000_000)
    env.close()
    return result


def main() -> None:
    """Trains from the command line and reports."""
    parser = argparse.ArgumentParser(description="Double DQN on CartPole-v1 in plain JAX.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps")
    parser.add_argument("--seed", type=int, default=Config.seed, help="fixes environment, network and draws")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    jax.config.update("jax_platforms", "cpu")  # networks this small lose more to a GPU's launches than they gain

    def report(step: int, now: Result) -> None:
        print(f"step {step:>6,}  greedy return {now.evaluations[-1][1]:6.1f}  loss {now.loss:8.5f}", flush=True)

    result = train(Config(steps=options.steps, seed=options.seed), report)
    print(f"greedy return over 100 episodes: {result.greedy_return:.1f}, trained in {result.wall_s:.0f} s")


if __name__ == "__main__":
    main()
