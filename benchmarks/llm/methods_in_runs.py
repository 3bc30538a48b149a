"""The methods of `clipped_loss` in whole runs at a large `max_staleness`, beside a synchronous run.

    python benchmarks/llm/methods_in_runs.py            # sorting on a CPU, some minutes a method
    python benchmarks/llm/methods_in_runs.py --quick    # a few steps: does it run?

`objectives.py` holds the age of every answer fixed. Here ages are what a run makes of `max_staleness`; their mean is
told. All runs have the same number of steps, and begin with the same model, which was trained on right answers before.
Rewards are of held-out items at the temperature of training. Writes `results/llm_methods.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sharpwave as sw
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.learner import Learner, OptimizerConfig
from sharpwave.llm.log import EVENTS, STEPS, RunLog, read_lines
from sharpwave.llm.model import save_model, small_model
from sharpwave.llm.objectives import SFT
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder
from sharpwave.llm.tasks import load_task

RESULTS = Path(__file__).parents[1] / "results"
TASK = {"digits": 4, "count": 2000, "held_out": 128}


def warm_model(folder: Path, steps: int) -> None:
    """Trained on right answers to some lists."""
    task, random = load_task("sort", **TASK), np.random.default_rng(0)
    model = small_model(
        seed=0, vocab_size=task.vocabulary, max_position_embeddings=task.context, initializer_range=0.05, other={}
    )
    learner = Learner(model, SFT(), optimizer=OptimizerConfig(learning_rate=3e-3), row_tokens=80, rows=16)
    for _ in range(steps):
        items = [task.items[name] for name in random.choice(list(task.items.ids), 128, replace=False)]
        texts = [[*task.tokenizer.encode(item["prompt"] + item["answer"]), 1] for item in items]
        lens = [[len(one)] for one in texts]
        data = {"input_ids": np.concatenate(texts), "loss_mask": np.concatenate([np.arange(len(t)) > 4 for t in texts])}
        learner.step(sw.SequenceSample([str(at) for at in range(128)], dict.fromkeys(data, lens), data))
    save_model(model, folder)


def run(given: argparse.Namespace, warm: Path, method: str, seed: int) -> dict[str, Any]:
    lag = 0 if method == "sync" else given.max_staleness
    experiment = Experiment(
        task="sort", task_options=TASK, steps=given.steps, batch=16, group=16, max_staleness=lag, seed=seed,
        concurrent=16 * (lag + 1), slots=256, save_every=10**6, model={"path": str(warm)},
        evaluation={"every": max(1, given.steps // 12), "concurrent": 128, "temperature": None},
        learner={
            "method": "decoupled" if method == "sync" else method, "clip": given.clip, "learning_rate": given.rate,
            "minibatches": 4, "row_tokens": 80, "rows": 16,
        },
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder.create(Path(place) / "run", Experiment.read(experiment.to_json()))
        log = RunLog(folder.logs)
        began = time.monotonic()
        result = asyncio.run(LocalRun(folder, log).run())
        log.close()
        steps, events = read_lines(folder.logs / STEPS), read_lines(folder.logs / EVENTS)
    scores = [line["reward"] for line in events if line["event"] == "score"]
    return {
        "method": method, "seed": seed, "took_s": time.monotonic() - began, "steps": result.step, "scores": scores,
        "start": scores[0], "end": statistics.mean(scores[-3:]),
        "staleness": statistics.mean(line["staleness"] for line in steps),
        "clip_share": statistics.mean(line["clip_share"] for line in steps),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="*", default=["sync", "decoupled", "naive", "recompute"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--warm-steps", type=int, default=15, help="of supervised training before")
    parser.add_argument("--max-staleness", type=int, default=8)
    parser.add_argument("--clip", type=float, default=0.005)
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    parser.add_argument("--quick", action="store_true", help="a few steps; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick:
        given.steps, given.warm_steps = 6, 10
    runs = []
    with tempfile.TemporaryDirectory() as place:
        warm = Path(place) / "warm"
        warm_model(warm, given.warm_steps)
        for seed in given.seeds:
            for method in given.methods:
                runs.append(run(given, warm, method, seed))
                one = runs[-1]
                print(
                    f"{method}, seed {seed}: held-out reward {one['start']:.3f} to {one['end']:.3f}, staleness "
                    f"{one['staleness']:.2f}, clipped {one['clip_share']:.1%}, {one['took_s']:.0f} s",
                    flush=True,
                )
    if not given.quick:
        settings = {name: value for name, value in vars(given).items() if name != "results"}
        document = {"machine": {"torch": torch.__version__}, "settings": settings, "runs": runs}
        given.results.mkdir(parents=True, exist_ok=True)
        (given.results / "llm_methods.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
