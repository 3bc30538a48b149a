"""Asynchronous GRPO on a task of your own: a transformer with random weights learns to close brackets.

    python examples/async_grpo.py                  # about a minute on two cores; --steps 40 for a short run
    PYTHONPATH=examples sharpwave train async_grpo:brackets --processes    # the same task, each part a process

"([<" is to be answered by ">])". The model learns from rewards only.
"""

import argparse
import asyncio
import itertools
import random
import tempfile

import torch

from sharpwave.llm import Characters, Experiment, Item, Items, LocalRun, RunFolder, RunLog, Sampling, Task, single_turn

CLOSING = dict(zip("([{<", ")]}>", strict=True))


def reward(item: Item, answer: str) -> float:
    """The share of brackets that are closed in the right order."""
    right = [CLOSING[bracket] for bracket in reversed(item["id"])]
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(right), len(answer))


def brackets(*, depth: int = 4, seed: int = 0) -> Task:
    """All sequences of `depth` opening brackets; one in eight is held out."""
    opened = map("".join, itertools.product(CLOSING, repeat=depth))
    items = [{"id": kinds, "prompt": f"{kinds}|"} for kinds in opened]
    random.Random(seed).shuffle(items)
    held_out, letters = len(items) // 8, Characters("([{<>}])|")
    return Task(
        "brackets", items=Items(items[held_out:]), held_out=Items(items[:held_out]), agent=single_turn(reward),
        tokenizer=letters, vocabulary=letters.size, context=2 * depth + 2,
        sampling=Sampling(max_tokens=depth + 1, stop_ids=(letters.eos,)),
    )  # fmt: skip


def show(event: str, said: dict) -> None:
    if event == "score":
        print(f"version {said['version']}: {said['reward']:.3f} on held-out items", flush=True)
    elif event == "step" and said["step"] % 20 == 0:
        print(f"step {said['step']}: {said['reward']:.3f}, mean staleness {said['staleness']:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="at most; the run ends earlier at its goal")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)  # the learner and the generator share the cores
    experiment = Experiment.read({
        "task": "__main__:brackets", **vars(parser.parse_args()), "batch": 16, "group": 16, "max_staleness": 2,
        "slots": 128, "learner": {"learning_rate": 2e-3, "entropy": 0.03, "row_tokens": 64, "rows": 64},
        "evaluation": {"every": 10, "goal": 0.8},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(place, experiment)
        result = asyncio.run(LocalRun(folder, RunLog(folder.logs, show=show)).run())
    print(f"reward {result.reward:.3f} on held-out items after {result.step} steps, {result.took_s:.0f} s")
