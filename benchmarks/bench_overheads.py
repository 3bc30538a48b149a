"""Times what surrounds the engine: the import, `collect`, the adapter's `add` for Stable-Baselines3, `stats()`, reading
all rows, the first draw after many rows, and minibatches of a rollout.

    python benchmarks/bench_overheads.py            # about a minute
    python benchmarks/bench_overheads.py --quick

Beside each stands what a user would write or use instead: `collect` beside a loop written by hand, the adapter beside
the buffer of Stable-Baselines3, `rows()` beside slices of arrays, minibatches beside `index_select`. All take turns,
burst by burst; compare minima. The import is that of a new process which has imported NumPy already, with its bytecode
cached. Writes `results/overheads.json`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import results
from harness.program import Run, parse, parser
from harness.results import Document

import sharpwave as sw

STEPS = 1_000  # of collect, a burst
ADDS = 500  # of the adapter, a burst
IMPORTS = {
    "import sharpwave": "import sharpwave",
    "and every public name": "from sharpwave import *",
    "asyncio, for comparison": "import asyncio",
}


def by_turns(calls: dict[str, Callable[[], Any]], rounds: int, count: int) -> dict[str, Document]:
    """Nanoseconds of one of the ``count`` steps that each call makes."""
    times: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(rounds + 1):  # the first round warms up
        for label, call in calls.items():
            begun = time.perf_counter_ns()
            call()
            if turn:
                times[label].append((time.perf_counter_ns() - begun) / count)
    return {label: summary(of) for label, of in times.items()}


def summary(times: list[float]) -> Document:
    return {"min_ns": min(times), "median_ns": statistics.median(times), "bursts": len(times)}


# ---- import ----------------------------------------------------------------------------------------------------------


def imports(rounds: int) -> dict[str, Document]:
    """In new processes, beyond NumPy."""
    times: dict[str, list[float]] = {label: [] for label in IMPORTS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        for turn in range(rounds + 1):  # the first round writes the bytecode
            for label, statement in IMPORTS.items():
                code = f"import numpy, time\nbegun = time.perf_counter_ns()\n{statement}\n"
                code += "print(time.perf_counter_ns() - begun)"
                done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
                if turn:
                    times[label].append(float(done.stdout))
    return {label: summary(of) for label, of in times.items()}


# ---- collect ---------------------------------------------------------------------------------------------------------


class Trivial:
    """An environment that costs next to nothing: two observations in turn, episodes of 200 steps.

    Args:
        is_fresh: Whether it returns a new array at every step, as nearly all environments do, or one that it keeps.
    """

    def __init__(self, is_fresh: bool) -> None:
        self._is_fresh = is_fresh
        from gymnasium import spaces

        self.observation_space, self.action_space = spaces.Box(-1, 1, (4,)), spaces.Discrete(2)
        self._obs = [np.zeros(4, np.float32), np.ones(4, np.float32)]
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._obs[0], {}

    def step(self, action: Any) -> Any:
        self._step += 1
        obs = self._obs[self._step & 1]
        return obs.copy() if self._is_fresh else obs, 1.0, False, self._step == 200, {}


def by_hand(env: Any, policy: Callable[[Any], Any], buffer: sw.ReplayBuffer, steps: int, copies: bool) -> None:
    obs, _ = env.reset()
    with buffer.writer() as writer:
        for _ in range(steps):
            action = policy(obs)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            if copies:
                next_obs = next_obs.copy()
            writer.add(
                obs=obs,
                action=action,
                reward=reward,
                next_obs=next_obs,
                terminated=terminated,
                truncated=truncated,
            )
            obs = env.reset()[0] if terminated or truncated else next_obs


def collecting(env: Any, rounds: int) -> dict[str, Document]:
    buffer = sw.ReplayBuffer.for_env(env, 100_000)

    def policy(obs: Any) -> int:
        return int(obs[2] > 0)

    calls = {
        "sw.collect": lambda: list(sw.collect(env, policy, buffer, STEPS)),
        "loop by hand": lambda: by_hand(env, policy, buffer, STEPS, copies=False),
        # As collect does where an environment may return the same array at every step.
        "loop by hand that copies observations": lambda: by_hand(env, policy, buffer, STEPS, copies=True),
    }
    return by_turns(calls, rounds, STEPS)


# ---- Stable-Baselines3 -----------------------------------------------------------------------------------------------


def adding(envs: int, is_discrete: bool, rounds: int) -> dict[str, Document]:
    from gymnasium import spaces
    from stable_baselines3.common import buffers

    from sharpwave.adapters import sb3

    observations = spaces.Box(-1, 1, (17,))
    actions: Any = spaces.Discrete(4) if is_discrete else spaces.Box(-1, 1, (6,))
    obs = np.zeros((envs, 17), np.float32)
    action = np.zeros(envs, np.int64) if is_discrete else np.zeros((envs, 6), np.float32)
    row = obs, obs + 1, action, np.zeros(envs, np.float32), np.zeros(envs, bool), [{} for _ in range(envs)]
    made = {
        "sharpwave.adapters.sb3": sb3.ReplayBuffer(100_000, observations, actions, "cpu", n_envs=envs),
        "stable_baselines3": buffers.ReplayBuffer(100_000, observations, actions, "cpu", n_envs=envs),
    }

    def adds(buffer: Any) -> Callable[[], None]:
        def run() -> None:
            for _ in range(ADDS):
                buffer.add(*row)

        return run

    return by_turns({label: adds(buffer) for label, buffer in made.items()}, rounds, ADDS)


# ---- stats() ---------------------------------------------------------------------------------------------------------


def fill(buffer: sw.ReplayBuffer) -> sw.ReplayBuffer:
    count = 1_000
    ones = np.ones((count, 17), np.float32)
    for _ in range(buffer.capacity // count):
        buffer.add(ones, ones[:, :6], np.zeros(count, np.float32), ones, np.zeros(count, bool))
    return buffer


def counting(rounds: int, rows: int) -> dict[str, Document]:
    buffer = fill(sw.ReplayBuffer(rows, obs_shape=(17,), action_shape=(6,), seed=0))
    begun = time.perf_counter_ns()
    buffer.stats()
    first = float(time.perf_counter_ns() - begun)

    def some() -> None:
        for _ in range(100):
            buffer.stats()

    # One behind the other: the kernel's count leaves the caches cold.
    return {
        "first stats()": summary([first]),
        **by_turns({"stats()": some}, rounds, 100),
        **by_turns({"stats(huge_pages=True)": lambda: buffer.stats(huge_pages=True)}, rounds, 1),
    }


# ---- all rows, and the first draw ------------------------------------------------------------------------------------


def reading(rounds: int, rows: int) -> dict[str, Document]:
    buffer = fill(sw.ReplayBuffer(rows, obs_shape=(17,), action_shape=(6,), seed=0))
    arrays = [np.ones((rows, *shape), dtype) for shape, dtype in (
        ((17,), "f4"), ((6,), "f4"), ((), "f4"), ((17,), "f4"), ((), "?"),
    )]  # fmt: skip

    def by_hand() -> None:
        for start in range(0, rows, 4096):
            [array[start : start + 4096].copy() for array in arrays]

    def ours() -> None:
        for _ in buffer.rows(batch_size=4096):
            pass

    return by_turns({"sw.ReplayBuffer.rows()": ours, "slices of arrays, copied": by_hand}, max(3, rounds // 4), 1)


def first_draws(rounds: int, rows: int) -> dict[str, Document]:
    """All rows are new since the draw before; the very first one also gets its memory from the system."""
    kinds: dict[str, dict[str, Any]] = {
        "prioritized": {"sampler": sw.Prioritized()},
        "windows of 80 steps": {"view": sw.Windows(80), "num_envs": 1},
    }
    found = {}
    for label, options in kinds.items():
        buffer = sw.ReplayBuffer(rows, obs_shape=(17,), action_shape=(6,), seed=0, **options)
        times = []
        for _ in range(max(3, rounds // 4)):
            fill(buffer)
            begun = time.perf_counter_ns()
            buffer.sample(64)
            times.append(float(time.perf_counter_ns() - begun))
        found |= {f"{label}, in a new buffer": summary(times[:1]), label: summary(times[1:])}
    return found


def minibatches(rounds: int) -> dict[str, Document]:
    """One epoch of 8 minibatches out of 128 steps of 64 environments."""
    import torch

    torch.set_num_threads(1)
    rollout = sw.RolloutBuffer(64, 128, obs_shape=(48,), action_shape=(6,), device="cpu")
    one = torch.zeros(64)
    for _ in range(128):
        rollout.add(
            observations=torch.zeros(64, 48), actions=torch.zeros(64, 6), rewards=one, dones=one, values=one,
            log_probs=one,
        )  # fmt: skip
    rollout.compute_returns_and_advantages(last_values=one)
    tensors = [torch.as_tensor(values) for values in rollout.all().values() if values is not None]

    def by_hand() -> None:
        for part in torch.randperm(64 * 128).chunk(8):
            [tensor.index_select(0, part) for tensor in tensors]

    def ours() -> None:
        for _ in rollout.minibatches(num_minibatches=8, epochs=1):
            pass

    return by_turns({"sw.RolloutBuffer.minibatches": ours, "index_select": by_hand}, rounds, 8)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=40, help="bursts of each")
    options = parse(made)
    run, workloads = Run(options), {}

    def measure(name: str, title: str, call: Callable[[], dict[str, Document]]) -> None:
        try:
            cases = call()
        except ImportError as reason:
            run.left_out.say(name, reason)
            return
        workloads[name] = {"title": title, "cases": cases}
        print(title, flush=True)
        for label, times in cases.items():
            print(f"    {label:40}{results.duration(times['min_ns']):>10}  "
                  f"median {results.duration(times['median_ns'])}")  # fmt: skip

    def cart_pole() -> dict[str, Document]:
        import gymnasium

        return collecting(gymnasium.make("CartPole-v1"), options.rounds)

    measure("import", "import in a new process, beyond NumPy", lambda: imports(max(3, options.rounds // 2)))
    measure(
        "collect_trivial",
        "collect, a step of a trivial environment",
        lambda: collecting(Trivial(is_fresh=True), options.rounds),
    )
    measure(
        "collect_kept",
        "collect, a step of a trivial environment that returns arrays which it keeps",
        lambda: collecting(Trivial(is_fresh=False), options.rounds),
    )
    measure("collect_cart_pole", "collect, a step of CartPole-v1", cart_pole)
    for envs, is_discrete in ((1, False), (1, True), (8, False)):
        kind = "discrete" if is_discrete else "continuous"
        title = f"add of Stable-Baselines3's buffers, {envs} environment{'s' if envs > 1 else ''}, {kind} actions"
        measure(f"sb3_{kind}_{envs}", title, lambda e=envs, d=is_discrete: adding(e, d, options.rounds))
    rows = 100_000 if options.quick else 1_000_000
    measure("stats", f"stats() of a buffer with {rows:,} rows", lambda: counting(options.rounds, rows))
    measure("rows", f"all of {rows:,} rows in batches of 4,096", lambda: reading(options.rounds, rows))
    measure("first_draw", f"first draw after {rows:,} rows were added", lambda: first_draws(options.rounds, rows))
    measure("minibatches", "a minibatch of 1,024 rows, tensors", lambda: minibatches(options.rounds))
    run.save("overheads", workloads=workloads)


if __name__ == "__main__":
    main()
