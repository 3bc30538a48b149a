"""Times calls with the values that environments and learners pass: other dtypes, strided arrays, lists, torch tensors.

    python benchmarks/bench_inputs.py                # about two minutes
    python benchmarks/bench_inputs.py --quick

The forms of one call are timed in turn in one process; the limit is the form that needs no conversion.
Stable-Baselines3's RolloutBuffer stands beside ours where it is installed. Writes `results/inputs.json`.
"""

from __future__ import annotations

import importlib.metadata
import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness.contest import print_case
from harness.program import Run, add_rounds, parse, parser
from harness.worker import Operation, batch_priorities, updating

import sharpwave as sw

TITLE = "obs f32(17), action f32(6), reward, next_obs f32(17), done"
ROWS = 1_000_000
ENVIRONMENTS = (8, 64, 512, 4096)
BATCH, UPDATES, STEPS, ROLLOUT_ENVS = 32, 256, 2048, 8

Summary = dict[str, float]


def filled(rows: int, **options: Any) -> sw.ReplayBuffer:
    """Full, so that no later call touches a page first."""
    buffer = sw.ReplayBuffer(rows, obs_shape=(17,), action_shape=(6,), seed=0, **options)
    stream, count = np.random.default_rng(0), 10_000
    obs = stream.standard_normal((count, 17), np.float32)
    for _ in range(0, rows, count):
        buffer.add(obs, obs[:, :6], obs[:, 0], obs, np.zeros(count, bool))
    return buffer


def repeated(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Operation:
    def run(calls: int) -> None:
        for _ in range(calls):
            call(*args, **kwargs)

    return Operation(run)


def adding(add: Callable[..., Any], row: tuple[Any, ...]) -> Operation:
    obs, action, reward, next_obs, done = row

    def run(calls: int) -> None:
        for _ in range(calls):
            add(obs, action, reward, next_obs, done)

    return Operation(run)


def add_forms(rows: int) -> dict[str, Operation]:
    """One row in each of the forms in which it may come."""
    stream = np.random.default_rng(1)
    obs, action, next_obs = (stream.standard_normal(n, np.float32) for n in (17, 6, 17))
    wide = tuple(array.astype(np.float64) for array in (obs, action, next_obs))
    spaced = tuple(np.repeat(array, 2)[::2] for array in (obs, action, next_obs))
    swapped = tuple(array.astype(array.dtype.newbyteorder()) for array in (obs, action, next_obs))
    fixed = tuple(array.copy() for array in (obs, action, next_obs))
    for array in fixed:
        array.flags.writeable = False
    lists = tuple(array.tolist() for array in (obs, action, next_obs))
    tensors = tuple(map(torch.from_numpy, (obs, action, next_obs)))
    reward, done = 1.5, False
    forms: dict[str, tuple[Any, ...]] = {
        "plain": (obs, action, reward, next_obs, done),
        "int reward": (obs, action, 1, next_obs, done),
        "done=0": (obs, action, reward, next_obs, 0),
        "NumPy scalar reward": (obs, action, np.float64(reward), next_obs, done),
        "strided": (spaced[0], spaced[1], reward, spaced[2], done),
        "float64 obs": (wide[0], action, reward, next_obs, done),
        "float64": (wide[0], wide[1], reward, wide[2], done),
        "the other byte order": (swapped[0], swapped[1], reward, swapped[2], done),
        "read-only": (fixed[0], fixed[1], reward, fixed[2], done),
        "lists": (lists[0], lists[1], reward, lists[2], done),
        "tensors": (tensors[0], tensors[1], torch.tensor(reward), tensors[2], torch.tensor(done)),
    }
    add = filled(rows).add

    def by_name(calls: int) -> None:
        for _ in range(calls):
            add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    return {name: adding(add, values) for name, values in forms.items()} | {"keyword": Operation(by_name)}


def vector_adds(rows: int, count: int) -> dict[str, Operation]:
    add, made = filled(rows).add, {}
    for name in ("float32", "float64"):
        values = np.random.default_rng(2).standard_normal((count, 17)).astype(name)
        action, reward, done = np.ascontiguousarray(values[:, :6]), values[:, 0].copy(), np.zeros(count, bool)
        made[name] = adding(add, (values, action, reward, values, done))
    return made


def updates(rows: int) -> dict[str, Operation]:
    buffer = filled(rows, sampler=sw.Prioritized())
    values = batch_priorities(UPDATES)
    made = {"arrays": updating(lambda: buffer.sample(UPDATES)["indices"], buffer.update_priorities, values)}
    made["tensors"] = updating(
        lambda: torch.from_numpy(buffer.sample(UPDATES)["indices"]),
        buffer.update_priorities,
        [torch.from_numpy(part) for part in values],
    )
    return made


def samples(rows: int) -> dict[str, Operation]:
    buffer = filled(rows)
    return {
        "plain": repeated(buffer.sample, BATCH),
        "out=": repeated(buffer.sample, BATCH, out=buffer.sample(BATCH)),
        'device="cpu"': repeated(buffer.sample, BATCH, device="cpu"),
        'device="cpu", out=': repeated(buffer.sample, BATCH, device="cpu", out=buffer.sample(BATCH, device="cpu")),
    }


def rollouts() -> dict[str, Operation]:
    """Whole rollouts; a call is one step."""
    stream, envs = np.random.default_rng(3), ROLLOUT_ENVS
    obs, actions = stream.standard_normal((envs, 17), np.float32), stream.standard_normal((envs, 6), np.float32)
    numbers, dones = stream.standard_normal(envs, np.float32), np.zeros(envs, bool)

    def steps(add: Callable[[], Any], clear: Callable[[], Any]) -> Operation:
        def run(calls: int) -> None:
            for call in range(calls):
                if call % STEPS == 0:
                    clear()
                add()

        return Operation(run)

    made = {}
    for name, read in (("NumPy", lambda array: array), ("tensors", torch.from_numpy)):
        roll = sw.RolloutBuffer(
            envs, STEPS, obs_shape=(17,), action_shape=(6,), device=None if name == "NumPy" else "cpu"
        )
        step = {
            "observations": read(obs),
            "actions": read(actions),
            "rewards": read(numbers),
            "dones": read(dones),
            "values": read(numbers),
            "log_probs": read(numbers),
        }
        made[name] = steps(lambda roll=roll, step=step: roll.add(**step), roll.clear)
    try:
        from gymnasium.spaces import Box
        from stable_baselines3.common.buffers import RolloutBuffer
    except ImportError:
        return made
    spaces = Box(-1, 1, (17,), np.float32), Box(-1, 1, (6,), np.float32)
    theirs = RolloutBuffer(STEPS, *spaces, device="cpu", n_envs=envs)
    values, log_probs = torch.from_numpy(numbers)[:, None], torch.from_numpy(numbers)
    made["Stable-Baselines3"] = steps(lambda: theirs.add(obs, actions, numbers, dones, values, log_probs), theirs.reset)
    return made


def time_in_turn(operations: dict[str, Operation], rounds: int, burst_s: float) -> dict[str, Summary]:
    """As harness.contest does it for processes: in each round a short burst of every form, in an order drawn anew."""
    calls, bursts = {}, {name: [] for name in operations}
    for name, operation in operations.items():
        operation.run_timed(8)  # the first call makes what later ones use
        calls[name] = 1
        while (elapsed := operation.run_timed(calls[name])) < burst_s * 1e9 / 4:
            calls[name] *= 2
        calls[name] = max(1, int(calls[name] * burst_s * 1e9 / elapsed))
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(operations), len(operations)):
            bursts[name].append(operations[name].run_timed(calls[name]) / calls[name])
    return {
        name: {
            "min_ns": min(times),
            "median_ns": statistics.median(times),
            "bursts": len(times),
            "calls_per_burst": calls[name],
        }
        for name, times in bursts.items()
    }


def main() -> None:
    made = parser(__doc__)
    add_rounds(made)
    run = Run(parse(made))
    options = run.options
    rows = options.rows or ROWS
    cases: dict[str, Callable[[], dict[str, Operation]]] = {"add_1": lambda: add_forms(rows)}
    for count in ENVIRONMENTS:
        cases[f"add_{count}"] = lambda count=count: vector_adds(rows, count)
    cases |= {f"update_{UPDATES}": lambda: updates(rows), f"sample_{BATCH}": lambda: samples(rows)}
    cases[f"rollout_add_{ROLLOUT_ENVS}"] = rollouts
    measured = {}
    for case, prepare in cases.items():
        measured[case] = time_in_turn(prepare(), options.rounds, options.burst_ms / 1e3)
        if case.startswith("rollout") and "Stable-Baselines3" not in measured[case]:
            run.left_out.say(case, "Stable-Baselines3 is not installed")
        print_case(f"inputs {case}", measured[case])
    versions = {name: importlib.metadata.version(name) for name in ("sharpwave", "numpy", "torch")}
    facts = {"title": TITLE, "capacity": rows, "versions": versions}
    run.save("inputs", workloads={"inputs": facts | {"cases": measured}})


if __name__ == "__main__":
    main()
