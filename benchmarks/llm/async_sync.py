"""Asynchronous against synchronous training of the same system: wall time to the same reward on held-out items.

    python benchmarks/llm/warm_start.py --out WARM                      # what both start from
    python benchmarks/llm/async_sync.py --warm WARM --goal 0.6          # running sums, lengths log-normal with sigma 1
    python benchmarks/llm/async_sync.py --quick                         # random weights, few steps: does it run?

A run is `sharpwave train sums`. The two differ in `max_staleness` and in the number of slots, and each has the best of
those that `--sweep` tried. Time counts from the first item, when compiled code and graphs are ready. While a run goes
on, a version is set aside now and then; all of them are scored on the held-out items after the run has ended, so that
scoring takes no time from training. The goal is reached where the line between two scored versions crosses it.
All answers to an item are as long as its list, so a batch has as many different lengths as items. Writes
`results/llm_async.json` after each run, with the cost model of a step: generating takes a + b * slots a token, training
T. A run that fails is told and left out. `--earlier` goes on from results of earlier calls.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpwave.llm.experiment import Experiment
from sharpwave.llm.generators import Engine
from sharpwave.llm.log import EVENTS, SPANS, STEPS, RunLog, read_lines
from sharpwave.llm.parts import make_engine, make_model
from sharpwave.llm.permits import derive_seed
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder
from sharpwave.llm.tasks.sums import reward
from sharpwave.llm.weights import Weights

RESULTS = Path(__file__).parents[1] / "results"
# Settings in which results of one table may differ.
FREE = ("cases", "seeds", "seconds", "sweep", "sweep_seconds", "switch_interval", "earlier", "results", "warm", "quick")


def experiment_of(given: argparse.Namespace, slots: int, max_staleness: int, seed: int) -> Experiment:
    model: dict[str, Any] = {"path": str(given.warm)} if given.warm else {}
    return Experiment(
        task="sums", task_options={"median": given.median, "longest": given.longest, "held_out": given.held_out},
        steps=10**9, batch=given.items, group=given.group, max_staleness=max_staleness, seed=seed,
        agent_workers=given.agent_workers, concurrent=-(-(max_staleness + 1) * given.items // given.agent_workers),
        slots=slots, save_every=10**9, model=model,
        sampling={"temperature": given.temperature},
        evaluation={"every": 0},
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


def run(
    given: argparse.Namespace, slots: int, max_staleness: int, seed: int, seconds: float, scores: Scores | None
) -> dict[str, Any]:
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as place:
        said = experiment_of(given, slots, max_staleness, seed).to_json()
        folder = RunFolder.create(Path(place) / "run", Experiment.read(said))
        log = _Log(folder.logs)
        local = LocalRun(folder, log)
        aside = _Aside(folder.weights(), Path(place) / "aside", seconds / given.scores)

        async def main() -> Any:
            loop = asyncio.get_running_loop()

            def start() -> None:
                loop.call_later(seconds, local.stop)
                aside.start()

            log.at_start = start
            return await local.run()

        result = asyncio.run(main())
        aside.end()
        log.close()
        facts = told(folder.logs, seconds, given.items * given.group)
        scored = [[round(at, 3), round(scores(path), 4)] for at, path in aside.kept] if scores else []
        return {
            "slots": slots, "max_staleness": max_staleness, "seed": seed, "seconds": seconds, "mps": has_mps(), **facts,
            "reached_s": reached_s(scored, given.goal), "curve": scored, "idle": result.idle, "took_s": result.took_s,
        }  # fmt: skip


def has_mps() -> bool:
    """Whether `on_device.sh` has started NVIDIA's service that lets processes share a device."""
    return bool(os.environ.get("MPS"))


class _Aside(threading.Thread):
    """Keeps a version every so many seconds, with the time at which it was published, by second names of its files."""

    def __init__(self, weights: Weights, place: Path, every_s: float) -> None:
        super().__init__(daemon=True)
        self._weights, self._place, self._every_s = weights, place, every_s
        self._has_ended = threading.Event()
        self.kept: list[tuple[float, Path]] = []

    def run(self) -> None:
        began, last, due = time.monotonic(), -1, 0.0
        while not self._has_ended.wait(0.005):
            found = self._weights.latest()
            at = time.monotonic() - began
            if found is None or found.version <= last or at < due:
                continue
            place = self._place / f"{found.version}"
            try:
                shutil.copytree(found.path, place, copy_function=os.link)
            except (OSError, shutil.Error):  # removed meanwhile: there is a newer one
                shutil.rmtree(place, ignore_errors=True)
                continue
            last, due = found.version, due + self._every_s
            self.kept.append((at, place))

    def end(self) -> None:
        self._has_ended.set()
        self.join()


class Scores:
    """The mean reward of a version on the held-out items, each answered once with a seed of its own.

    One engine serves all runs: its graphs are captured once.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._experiment = experiment_of(given, given.held_out, 0, 0)
        self._task = self._experiment.load_task()
        self._engine: Engine | None = None

    def __call__(self, path: Path) -> float:
        task = self._task
        if self._engine is None:
            said = Experiment.read({**self._experiment.to_json(), "model": {"path": str(path)}})
            model = make_model(said, task)
            self._engine = make_engine(said, task, model, 0, slots=min(512, len(task.held_out.ids)))
        else:
            self._engine.update(path, self._engine.version + 1)
        items = [task.held_out[name] for name in task.held_out.ids]
        made = []
        for name, item in zip(task.held_out.ids, items, strict=True):
            sampling = task.sampling.seeded(derive_seed("evaluation", name))
            made += self._engine.submit(task.tokenizer.encode(item["prompt"]), sampling)
        self._engine.run()
        return float(
            np.mean([reward(i, task.tokenizer.decode(one.tokens)) for i, one in zip(items, made, strict=True)])
        )


def told(logs: Path, seconds: float, answers: int) -> dict[str, Any]:
    """Rates and costs of a run, from its logs. Time 0 is the first item's start."""
    events, steps, spans = (read_lines(logs / name) for name in (EVENTS, STEPS, SPANS))
    began = next(line["s"] for line in events if line["event"] == "start")
    ended = min(began + seconds, max([line["s"] for line in steps], default=began + seconds))
    made = [line for line in steps if line["s"] <= ended]
    warm = made[len(made) // 10 :]
    lengths = sum(line["tokens_made"] for line in warm)
    took = (warm[-1]["s"] - warm[0]["s"]) / max(1, len(warm) - 1) if len(warm) > 1 else 0.0
    return {
        "rewards": [round(float(np.mean([line["reward"] for line in made[at : at + 10]])), 4)
                    for at in range(0, len(made), 10)],
        "steps": len(made),
        "batch_answers": answers,
        "step_s": took,
        "train_s": statistics.median(line["train_s"] for line in warm) if warm else None,
        "waited_s": statistics.median(line["waited_s"] for line in warm) if warm else None,
        "publish_s": statistics.median([one["took_s"] for one in spans if one["what"] == "publish"] or [0.0]),
        "made_tokens_per_s": lengths / max(1e-9, len(warm) * took),
        "mean_length": lengths / max(1, len(warm) * answers),
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


def reached_s(curve: list[list[float]], goal: float | None) -> float | None:
    """When the line between two scored versions first crosses the goal."""
    if goal is None:
        return None
    for (before, low), (at, high) in itertools.pairwise(curve):
        if high >= goal:
            return at if low >= goal else before + (at - before) * (goal - low) / (high - low)
    return None


def show(one: dict[str, Any]) -> str:
    who = "sync" if one["max_staleness"] == 0 else f"async {one['max_staleness']}"
    last = one["curve"][-1] if one["curve"] else None
    return (
        f"{who}, {one['slots']} slots, seed {one['seed']}: {one['steps']} steps of {1e3 * one['step_s']:.0f} ms "
        f"(training {1e3 * (one['train_s'] or 0):.0f}, "
        f"publishing {1e3 * one['publish_s']:.0f}, waiting {1e3 * (one['waited_s'] or 0):.0f}), "
        f"{one['made_tokens_per_s']:,.0f} tokens/s, staleness {one['staleness'] or 0:.2f} to {one['staleness_max']}, "
        f"last {last}, goal at {one['reached_s']}, decode {one['decode']}, idle {one['idle']}"
    )


def cases(text: str) -> list[tuple[int, int, float | None]]:
    """`slots:max_staleness` or `slots:max_staleness:seconds`, several of them with commas."""
    parts = [one.split(":") for one in text.split(",")]
    return [(int(one[0]), int(one[1]), float(one[2]) if len(one) > 2 else None) for one in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warm", type=Path, help="the folder of the model that both start from")
    parser.add_argument("--goal", type=float, help="held-out reward that both are to reach")
    parser.add_argument(
        "--cases", type=cases, default="256:0:40,512:4:16", help="slots:max_staleness[:seconds] of each contender"
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=60, help="of a run")
    parser.add_argument("--sweep", type=cases, default=(), help="cases of which each has one short run, to choose from")
    parser.add_argument("--sweep-seconds", type=float, default=8)
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="results whose runs are not made again")
    parser.add_argument("--items", type=int, default=64, help="of a batch")
    parser.add_argument("--agent-workers", type=int, default=4, help="processes in which agents run")
    parser.add_argument("--group", type=int, default=4, help="answers to each item")
    parser.add_argument("--rate", type=float, default=5e-5, help="learning rate")
    parser.add_argument("--temperature", type=float, default=2.2, help="of answers, in training and evaluation")
    parser.add_argument("--warmup", type=int, default=5, help="steps until the learning rate is reached")
    parser.add_argument("--method", default="decoupled")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--median", type=float, default=64)
    parser.add_argument("--longest", type=int, default=900)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--scores", type=int, default=16, help="versions of a run that are scored")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--switch-interval", type=float, help="of Python's threads, in seconds")
    parser.add_argument("--quick", action="store_true", help="random weights, seconds on a CPU; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.seconds, given.cases = [0], 8.0, [(64, 0, None), (64, 2, 6.0)]
        given.median, given.longest, given.held_out, given.row_tokens, given.rows = 6, 24, 16, 256, 8
        given.items, given.group = 32, 8
    if given.switch_interval:
        sys.setswitchinterval(given.switch_interval)
    scores = Scores(given)
    sweep, runs = earlier(given)
    has_failed = False
    todo = [(sweep, slots, lag, 0, seconds or given.sweep_seconds) for slots, lag, seconds in given.sweep]
    todo += [(runs, slots, lag, seed, seconds or given.seconds)
             for seed in given.seeds for slots, lag, seconds in given.cases]  # fmt: skip
    for made, slots, lag, seed, seconds in todo:
        key = (slots, lag, seed, has_mps())
        if any((one["slots"], one["max_staleness"], one["seed"], one["mps"]) == key for one in made):
            continue
        try:
            made.append(run(given, slots, lag, seed, seconds, scores if made is runs else None))
        except Exception:
            traceback.print_exc()
            has_failed = True
            continue
        print("" if made is runs else "sweep: ", show(made[-1]), sep="", flush=True)
        save(given, sweep, runs)
    sys.exit(has_failed)


def earlier(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The sweep and the runs of earlier calls, which were made with the same settings."""
    sweep: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for path in given.earlier:
        document = json.loads(path.read_text())
        said = document["settings"]
        free = FREE if document["runs"] else (*FREE, "goal")  # a sweep is not scored
        for name in set(vars(given)) - set(free):
            if said[name] != getattr(given, name):
                raise SystemExit(f"--earlier: {path} was made with {name}={said[name]}, not {getattr(given, name)}")
        for known, more in ((sweep, document["sweep"]), (runs, document["runs"])):
            known += [one for one in more if one not in known]
    return sweep, runs


def save(given: argparse.Namespace, sweep: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    """After each run: a later one may fail, or be cut off."""
    if given.quick:
        return
    document = {
        "machine": {"gpu": torch.cuda.get_device_name() if given.device == "cuda" else None,
                    "torch": torch.__version__, "at": time.strftime("%Y-%m-%d")},
        "settings": {name: value for name, value in vars(given).items() if name not in ("results", "warm", "earlier")},
        "sweep": sweep, "runs": runs,
    }  # fmt: skip
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "llm_async.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
