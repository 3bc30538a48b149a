"""Asynchronous against synchronous training of the same system: wall time to the same reward on held-out items.

    python benchmarks/llm/warm_start.py --out WARM                      # what both start from
    python benchmarks/llm/async_sync.py --warm WARM --goal 0.6          # running sums, lengths log-normal with sigma 1
    python benchmarks/llm/async_sync.py --quick                         # random weights, few steps: does it run?

A run is `sharpwave train sums` in one process. The two differ in `max_staleness` and in the number of slots, and each
has the best of those that `--sweep` tried. Evaluation runs beside training in both. Time counts from the first item,
when compiled code and graphs are ready. A version counts as scored when its evaluation began.
Writes `results/llm_async.json`, with the cost model of a step: generating takes a + b * slots a token, training T.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpwave.llm.experiment import Experiment
from sharpwave.llm.log import EVENTS, SPANS, STEPS, RunLog, read_lines
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder

RESULTS = Path(__file__).parents[1] / "results"
ITEMS, GROUP = 32, 8  # of a batch, and answers to each


def experiment_of(given: argparse.Namespace, slots: int, max_staleness: int, seed: int) -> Experiment:
    every = given.every_sync if max_staleness == 0 else given.every_async
    model: dict[str, Any] = {"path": str(given.warm)} if given.warm else {}
    return Experiment(
        task="sums", task_options={"median": given.median, "longest": given.longest, "held_out": given.held_out},
        steps=10**9, batch=ITEMS, group=GROUP, max_staleness=max_staleness, seed=seed,
        concurrent=(max_staleness + 1) * ITEMS, slots=slots, save_every=10**9, model=model,
        sampling={"temperature": given.temperature},
        evaluation={"every": every, "concurrent": given.held_out, "goal": given.goal, "temperature": None},
        learner={
            "learning_rate": given.rate, "warmup_steps": given.warmup, "rows": given.rows,
            "row_tokens": given.row_tokens, "device": given.device,
            "method": given.method, "clip": given.clip,
        },
    )  # fmt: skip


class _Log(RunLog):
    """Says when the first item starts."""

    at_start: Callable[[], object] | None = None

    def __call__(self, event: str, **about: Any) -> None:
        super().__call__(event, **about)
        if event == "start" and self.at_start is not None:
            self.at_start, call = None, self.at_start
            call()


def run(given: argparse.Namespace, slots: int, max_staleness: int, seed: int, seconds: float) -> dict[str, Any]:
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as place:
        said = experiment_of(given, slots, max_staleness, seed).to_json()
        folder = RunFolder.create(Path(place) / "run", Experiment.read(said))
        log = _Log(folder.logs)
        local = LocalRun(folder, log)

        async def main() -> Any:
            loop = asyncio.get_running_loop()
            log.at_start = lambda: loop.call_later(seconds, local.stop)
            return await local.run()

        result = asyncio.run(main())
        log.close()
        return {
            "slots": slots, "max_staleness": max_staleness, "seed": seed,
            **told(folder.logs, seconds), "idle": result.idle, "took_s": result.took_s,
        }  # fmt: skip


def told(logs: Path, seconds: float) -> dict[str, Any]:
    """Curve, rates and costs of a run, from its logs. Time 0 is the first item's start."""
    events, steps, spans = (read_lines(logs / name) for name in (EVENTS, STEPS, SPANS))
    began = next(line["s"] for line in events if line["event"] == "start")
    ended = min(began + seconds, max([line["s"] for line in steps], default=began + seconds))
    made = [line for line in steps if line["s"] <= ended]
    warm = made[len(made) // 10 :]
    lengths = sum(line["tokens_made"] for line in warm)
    took = (warm[-1]["s"] - warm[0]["s"]) / max(1, len(warm) - 1) if len(warm) > 1 else 0.0
    return {
        "curve": [[round(line["began_s"] - began, 3), round(line["reward"], 4)] for line in events
                  if line["event"] == "score"],
        "rewards": [round(float(np.mean([line["reward"] for line in made[at : at + 10]])), 4)
                    for at in range(0, len(made), 10)],
        "steps": len(made),
        "batch_answers": ITEMS * GROUP,
        "step_s": took,
        "train_s": statistics.median(line["train_s"] for line in warm) if warm else None,
        "waited_s": statistics.median(line["waited_s"] for line in warm) if warm else None,
        "made_tokens_per_s": lengths / max(1e-9, len(warm) * took),
        "mean_length": lengths / max(1, len(warm) * ITEMS * GROUP),
        "staleness": float(np.mean([line["staleness"] for line in warm])) if warm else None,
        "staleness_max": max((line["staleness_max"] for line in warm), default=None),
        "stale_tokens": sum(line.get("stale_tokens", 0) for line in made),
        "decode": decode_cost([one for one in spans if one["who"].startswith("generator") and one["s"] <= ended]),
    }  # fmt: skip


def decode_cost(spans: list[dict[str, Any]]) -> dict[str, float]:
    """Least squares of a + b * busy slots over the spans of the engine's timeline, weighted by their steps."""
    rows = [(one["slots"], one["took_s"] / one["steps"], one["steps"]) for one in spans if one["steps"] > 20]
    if len(rows) < 2:
        return {}
    busy, each, weight = np.array(rows).T
    design = np.stack([np.ones_like(busy), busy], 1) * np.sqrt(weight)[:, None]
    (a, b), *_ = np.linalg.lstsq(design, each * np.sqrt(weight), rcond=None)
    return {"a_s": float(a), "b_s": float(b), "mean_step_s": float(np.average(each, weights=weight)),
            "mean_slots": float(np.average(busy, weights=weight))}  # fmt: skip


def reached_s(curve: list[list[float]], goal: float) -> float | None:
    """When the first version with this reward was published."""
    return next((at for at, reward in curve if reward >= goal), None)


def show(one: dict[str, Any], goal: float | None) -> str:
    who = "sync" if one["max_staleness"] == 0 else f"async {one['max_staleness']}"
    last = one["curve"][-1] if one["curve"] else None
    reached = None if goal is None else reached_s(one["curve"], goal)
    return (
        f"{who}, {one['slots']} slots, seed {one['seed']}: {one['steps']} steps of {1e3 * one['step_s']:.0f} ms "
        f"(training {1e3 * (one['train_s'] or 0):.0f}, waiting {1e3 * (one['waited_s'] or 0):.0f}), "
        f"{one['made_tokens_per_s']:,.0f} tokens/s, staleness {one['staleness'] or 0:.2f} to {one['staleness_max']}, "
        f"last {last}, goal at {reached}, decode {one['decode']}, idle {one['idle']}"
    )


def pairs(text: str) -> list[tuple[int, int]]:
    return [(int(slots), int(lag)) for slots, _, lag in (one.partition(":") for one in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=Path, help="the folder of the model that both start from")
    parser.add_argument("--goal", type=float, help="held-out reward at which a run ends")
    parser.add_argument("--cases", type=pairs, default="256:0,512:4", help="slots:max_staleness of each contender")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=90, help="of a run, at most")
    parser.add_argument("--sweep", type=pairs, default=(), help="cases of which each has one short run, to choose from")
    parser.add_argument("--sweep-seconds", type=float, default=12)
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate")
    parser.add_argument("--temperature", type=float, default=2.5, help="of answers, in training and evaluation")
    parser.add_argument("--warmup", type=int, default=5, help="steps until the learning rate is reached")
    parser.add_argument("--method", default="decoupled")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--median", type=float, default=64)
    parser.add_argument("--longest", type=int, default=900)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--every-sync", type=int, default=5, help="versions between two scores")
    parser.add_argument("--every-async", type=int, default=25)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--switch-interval", type=float, help="of Python's threads, in seconds")
    parser.add_argument("--quick", action="store_true", help="random weights, seconds on a CPU; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.seconds, given.cases = [0], 8.0, [(64, 0), (64, 2)]
        given.median, given.longest, given.held_out, given.row_tokens, given.rows = 6, 24, 16, 256, 8
    if given.switch_interval:
        sys.setswitchinterval(given.switch_interval)
    sweep = []
    for slots, lag in given.sweep or []:
        sweep.append(run(given, slots, lag, 0, given.sweep_seconds))
        print("sweep:", show(sweep[-1], given.goal), flush=True)
    runs = []
    for seed in given.seeds:
        for slots, lag in given.cases:
            runs.append(run(given, slots, lag, seed, given.seconds))
            print(show(runs[-1], given.goal), flush=True)
            document = {
                "machine": {"gpu": torch.cuda.get_device_name() if given.device == "cuda" else None,
                            "torch": torch.__version__, "at": time.strftime("%Y-%m-%d")},
                "settings": {name: value for name, value in vars(given).items() if name not in ("results", "warm")},
                "sweep": sweep, "runs": runs,
            }  # fmt: skip
            if not given.quick:
                given.results.mkdir(parents=True, exist_ok=True)
                (given.results / "llm_async.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
