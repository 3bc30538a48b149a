"""Times GAE on a GPU against the loop that people write, and a whole rollout as a CUDA graph.

    python benchmarks/gpu/bench_returns.py [--results FOLDER]

Everybody is timed in turn within one run, by events on the device around many calls: what counts is how long a call
keeps the device or the host busy, whichever is longer, as in training. Writes `results/gpu_returns.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from timing import ROUNDS, SLICE_US, captured, contest, copy_bandwidth, machine

import sharpwave as sw

SIZES = ((24, 4096), (128, 1024), (32, 65536))
GAMMA, LAMBDA = 0.99, 0.95


def textbook_loop(rewards: Any, values: Any, dones: Any, last_values: Any) -> tuple[Any, Any]:
    """The formula, a step at a time: a dozen launches each."""
    advantages, carry = torch.zeros_like(rewards), torch.zeros_like(last_values)
    for t in reversed(range(len(rewards))):
        following = last_values if t + 1 == len(rewards) else values[t + 1]
        alive = 1 - dones[t]
        delta = rewards[t] + GAMMA * following * alive - values[t]
        carry = delta + GAMMA * LAMBDA * alive * carry
        advantages[t] = carry
    return advantages, advantages + values


def rollout(steps: int, envs: int) -> dict[str, torch.Tensor]:
    stream = torch.Generator("cuda").manual_seed(0)
    shape = {"size": (steps, envs), "generator": stream, "device": "cuda"}
    return {
        "rewards": torch.randn(**shape),
        "values": torch.randn(**shape),
        "dones": (torch.rand(**shape) < 0.02).float(),
        "last_values": torch.randn(envs, generator=stream, device="cuda"),
    }


def filled(data: dict[str, torch.Tensor]) -> sw.RolloutBuffer:
    steps, envs = data["rewards"].shape
    buffer = sw.RolloutBuffer(envs, steps, obs_shape=(1,), device="cuda")
    zeros = torch.zeros(envs, 1, device="cuda")
    for t in range(steps):
        row = {name: data[name][t] for name in ("rewards", "values", "dones")}
        buffer.add(observations=zeros, actions=zeros[:, 0], log_probs=zeros[:, 0], **row)
    return buffer


def gae_case(steps: int, envs: int) -> dict[str, Any]:
    data = rollout(steps, envs)
    buffer = filled(data)
    last = data["last_values"]

    def compute() -> None:
        buffer.compute_returns_and_advantages(last, GAMMA, LAMBDA)

    compute()
    want, _ = textbook_loop(**data)
    ours, _ = sw.returns.gae(**data, gamma=GAMMA, gae_lambda=LAMBDA)
    error = max(float((got - want).abs().max()) for got in (buffer.advantages, ours))
    assert error < 1e-4, error
    graph = captured(compute)
    loop_graph = captured(lambda: textbook_loop(**data))
    cases = contest(
        {
            "loop": lambda: textbook_loop(**data),
            "loop, as a CUDA graph": loop_graph.replay,
            "sharpwave, returns.gae": lambda: sw.returns.gae(**data, gamma=GAMMA, gae_lambda=LAMBDA),
            "sharpwave, RolloutBuffer": compute,
            "sharpwave, RolloutBuffer as a CUDA graph": graph.replay,
        }
    )
    # Rewards, values and flags are read once, advantages and returns written once.
    moved = steps * envs * (4 + 4 + 1 + 4 + 4) + envs * 4
    return {"steps": steps, "envs": envs, "bytes": moved, "error": error, "cases": cases}


def cycle_case(steps: int, envs: int, obs: int, actions: int) -> dict[str, Any]:
    """A whole rollout: every add and the returns, eager and as one graph; equal in every bit."""
    data = rollout(steps, envs)
    stream = torch.Generator("cuda").manual_seed(1)
    seen = torch.randn(steps, envs, obs, generator=stream, device="cuda")
    done = torch.randn(steps, envs, actions, generator=stream, device="cuda")
    log_probs = torch.randn(steps, envs, generator=stream, device="cuda")
    buffer = sw.RolloutBuffer(envs, steps, obs_shape=(obs,), device="cuda", seed=0)

    def cycle() -> None:
        buffer.clear()
        for t in range(steps):
            row = {name: data[name][t] for name in ("rewards", "values", "dones")}
            buffer.add(observations=seen[t], actions=done[t], log_probs=log_probs[t], **row)
        buffer.compute_returns_and_advantages(data["last_values"], GAMMA, LAMBDA)

    cycle()
    graph = captured(cycle)
    for tensor in (data["rewards"], data["values"], data["last_values"], seen):
        tensor.normal_(generator=stream)
    graph.replay()
    replayed = {name: tensor.clone() for name, tensor in buffer.all().items() if tensor is not None}
    buffer.clear()
    cycle()
    for name, tensor in buffer.all().items():
        assert tensor is None or torch.equal(tensor, replayed[name]), name

    def learn() -> None:
        for _ in buffer.minibatches(4, epochs=5):
            pass

    cases = contest({"eager": cycle, "as a CUDA graph": graph.replay})
    cases |= contest({"5 epochs of 4 minibatches": learn})
    return {"steps": steps, "envs": envs, "obs": obs, "actions": actions, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent.parent / "results")
    folder = parser.parse_args().results
    document = {
        "machine": machine(),
        "settings": {"rounds": ROUNDS, "slice_ms": SLICE_US / 1e3},
        "left_out": [],
        "copy_bytes_per_s": copy_bandwidth(),
        "gae": [gae_case(steps, envs) for steps, envs in SIZES],
        "cycle": cycle_case(24, 4096, 48, 12),
    }
    for case in document["gae"]:
        print(f"{case['steps']} x {case['envs']}")
        for name, times in case["cases"].items():
            share = case["bytes"] / times["min_ns"] * 1e9 / document["copy_bytes_per_s"]
            print(
                f"    {name:44}{times['min_ns'] / 1e3:10.1f} us  median {times['median_ns'] / 1e3:10.1f}  {share:6.1%}"
            )
    for name, times in document["cycle"]["cases"].items():
        print(f"cycle: {name:37}{times['min_ns'] / 1e3:10.1f} us  median {times['median_ns'] / 1e3:10.1f}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_returns.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
