"""Times whole training steps in torch: how long a step spends in the buffer, and which share of the step that is.

    python benchmarks/bench_training.py                      # all, about three minutes
    python benchmarks/bench_training.py --quick sharpwave numpy_ring

A step adds one row, draws a batch, trains on it and, by priority, gives the batch new priorities. Between two calls of
the buffer the network works, so the caches are as cold as in training. Writes `results/training.json`.
"""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from harness.contest import ContenderError, LeftOut, Player
from harness.program import Run, contest_parser, parse
from harness.results import Document, duration, size
from harness.workloads import CARTPOLE, CONTROL, W1, Workload

CONTENDERS = ("sharpwave", "numpy_ring", "rlox", "sb3", "cpprb", "torchrl")
WITH_PRIORITIES = ("sharpwave", "rlox", "cpprb", "torchrl")
BURST_STEPS_S = 0.06  # of whole steps
ROUNDS, QUICK_ROUNDS = 25, 4


@dataclass(frozen=True)
class Training:
    title: str
    algorithm: str
    workload: Workload
    batch: int
    prioritized: bool = False


TRAININGS = {
    "dqn_4": Training("DQN, CartPole's rows, batches of 64", "dqn", CARTPOLE, 64),
    "dqn_17": Training("DQN, 17 numbers seen, batches of 64", "dqn", CONTROL, 64),
    "per_dqn_17": Training("prioritized DQN, 17 numbers seen, batches of 64", "dqn", CONTROL, 64, prioritized=True),
    "sac": Training("SAC, 17 numbers seen, 6 done, batches of 256", "sac", W1, 256),
}


class TrainerPlayer(Player):
    module: ClassVar[str] = "harness.trainer"


def summary(bursts: list[dict[str, float]]) -> dict[str, float]:
    spent, whole = ([burst[key] for burst in bursts] for key in ("buffer_ns", "step_ns"))
    shares = [one / all_of_it for one, all_of_it in zip(spent, whole, strict=True)]
    return {
        "min_ns": min(spent),
        "median_ns": statistics.median(spent),
        "step_ns": statistics.median(whole),
        "share": statistics.median(shares),
        "bursts": len(bursts),
    }


def measure(training: Training, contenders: list[str], capacity: int, rounds: int, left_out: LeftOut) -> Document:
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        about, steps, bursts = {}, {}, {}
        for label in contenders:
            print(f"{training.title}: filling {label}", flush=True)
            try:
                player = TrainerPlayer(label)
                stack.callback(player.close)
                about[label] = player.ask(
                    "fill",
                    workload=training.workload.name,
                    capacity=capacity,
                    algorithm=training.algorithm,
                    prioritized=training.prioritized,
                    batch=training.batch,
                )
                player.ask("time", steps=8)
                steps[label] = max(4, round(BURST_STEPS_S * 1e9 / player.ask("time", steps=8)["step_ns"]))
            except ContenderError as reason:
                left_out.say(f"{label}, {training.title}", reason)
                continue
            players[label], bursts[label] = player, []
        order = random.Random(0)
        for _ in range(rounds):
            for label in order.sample(list(players), len(players)):
                bursts[label].append(players[label].ask("time", steps=steps[label]))
    return {
        "title": training.title,
        "stored": f"{capacity:,} x ({training.workload.title}), {size(training.workload.row_bytes)} a row",
        "contenders": about,
        "cases": {label: summary(taken) for label, taken in bursts.items()},
    }


def main() -> None:
    made = contest_parser(__doc__)
    made.set_defaults(rounds=ROUNDS)
    run = Run(parse(made))
    options = run.options
    if options.quick:
        options.rounds = QUICK_ROUNDS
    trainings = {}
    for name, training in TRAININGS.items():
        able = WITH_PRIORITIES if training.prioritized else CONTENDERS
        wanted = [label for label in able if not options.contenders or label in options.contenders]
        capacity = options.rows or training.workload.capacity
        trainings[name] = measure(training, wanted, capacity, options.rounds, run.left_out)
        for label, times in sorted(trainings[name]["cases"].items(), key=lambda item: item[1]["min_ns"]):
            least, median = duration(times["min_ns"]), duration(times["median_ns"])
            print(f"    {label:12}{least:>10}  median {median}, {times['share']:.1%} of {duration(times['step_ns'])}")
    run.save("training", trainings=trainings)


if __name__ == "__main__":
    main()
