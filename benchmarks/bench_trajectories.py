"""Times trajectories on disk against RLinf's algorithm in plain torch and a leaner form of it, in one process, in turn.

    python benchmarks/bench_trajectories.py             # a few minutes
    python benchmarks/bench_trajectories.py --quick     # a look, not a result

Both draw the same kind of transitions and give torch tensors; the answers are compared before anything is timed. `add`
is timed alone (the caller's time) and until all files are there. Writes `results/trajectories.json`, prints the table.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tables
import torch
from harness.program import Run, parser
from names import TRAJECTORIES
from peers.plain_trajectories import LeanTrajectories, PlainTrajectories

import sharpwave as sw
from sharpwave.files import write_journal
from sharpwave.trajectories.index import (
    INDEX,
    KIND,
    TrajectoryEntry,
    TrajectoryIndex,
    add_record,
    layouts_record,
    rows_record,
)
from sharpwave.trajectories.layout import Layout
from sharpwave.trajectories.trajectory import Leaf

OBS, ACTION = 64, 7
SHAPES = {"sample_256": (50, 8, 100, 256), "sample_1024": (2, 32, 10_000, 1_024), "sample_256_disk": (50, 8, 100, 256)}
OPENED = 100_000


def make(steps: int, envs: int, number: int) -> dict[str, Any]:
    """A trajectory whose every number tells which row it is of."""
    row = torch.arange(steps * envs, dtype=torch.float32).reshape(steps, envs) + number * steps * envs

    def wide(value: torch.Tensor, size: int) -> torch.Tensor:
        return value[..., None].expand(*value.shape, size).contiguous()

    flags = torch.zeros(steps + 1, envs, 1, dtype=torch.bool)
    return {
        "actions": wide(row, ACTION),
        "rewards": row[..., None].clone(),
        "terminations": flags.clone(),
        "truncations": flags.clone(),
        "dones": flags.clone(),
        "prev_logprobs": wide(row, ACTION),
        "prev_values": torch.cat([row, row[-1:]])[..., None].clone(),
        "curr_obs": {"state": wide(row, OBS)},
        "next_obs": {"state": wide(row + 0.5, OBS)},
    }


def check(batch: dict[str, Any], count: int) -> None:
    row = batch["rewards"]
    assert row.shape == (count, 1)
    assert torch.equal(batch["actions"], row.expand(count, ACTION))
    assert torch.equal(batch["curr_obs"]["state"], row.expand(count, OBS))
    assert torch.equal(batch["next_obs"]["state"], row.expand(count, OBS) + 0.5)
    assert batch["dones"].shape == (count, 1)


def turns(contenders: dict[str, Callable[[], Any]], rounds: int, burst_s: float) -> dict[str, dict[str, float]]:
    """Bursts of calls, in an order that is drawn anew every round; the time of one call."""
    times: dict[str, list[float]] = {label: [] for label in contenders}
    calls = {}
    for label, call in contenders.items():
        call()
        began = time.perf_counter_ns()
        call()
        calls[label] = max(1, round(burst_s * 1e9 / (time.perf_counter_ns() - began)))
    order = random.Random(0)
    for _ in range(rounds):
        for label in order.sample(list(contenders), len(contenders)):
            call, count = contenders[label], calls[label]
            began = time.perf_counter_ns()
            for _ in range(count):
                call()
            times[label].append((time.perf_counter_ns() - began) / count)
    return {label: summary(each) for label, each in times.items()}


def summary(times: list[float]) -> dict[str, float]:
    return {"min_ns": min(times), "median_ns": statistics.median(times), "bursts": len(times)}


def sampling(case: str, folder: Path, rounds: int, burst_s: float, share: float) -> dict[str, dict[str, float]]:
    steps, envs, count, rows = SHAPES[case]
    count = max(10, round(count * share))
    cache = 0 if case.endswith("disk") else count
    plain = PlainTrajectories(folder / "plain", cache, 0)
    lean = LeanTrajectories(folder / "lean", cache, 0)
    ours = sw.TrajectoryReplayBuffer(folder / "ours", cache=cache, format="pt", device="cpu")
    plain.saves_index = lean.saves_index = False  # it takes minutes by itself, and is not what is timed here
    for number in range(count):
        made = make(steps, envs, number)
        plain.add(made)
        lean.add(made)
        ours.add(sw.Trajectory(model_weights_id="w_0", **made))
        if number % 100 == 0:
            plain.flush()
            lean.flush()
    plain.flush()
    lean.flush()
    ours.flush()
    contenders: dict[str, Callable[[], Any]] = {
        "plain torch": lambda: plain.sample(rows),
        "lean torch": lambda: lean.sample(rows),
        "sharpwave": lambda: ours.sample(rows),
    }
    if cache == 0:

        def cold() -> Any:
            ours._store.empty_cache("cold")  # also lets go of every mapped file
            return ours.sample(rows)

        contenders["sharpwave, files mapped anew"] = cold
    for call in contenders.values():
        check(call(), rows)
    gc.disable()
    try:
        return turns(contenders, rounds, burst_s)
    finally:
        gc.enable()
        ours.close()
        plain.pool.shutdown()
        lean.pool.shutdown()


def adding(folder: Path, rounds: int, together: int = 20) -> dict[str, dict[str, dict[str, float]]]:
    """Some adds in a row, then the wait for their files; every time into buffers that have as many trajectories."""
    steps, envs = 50, 8
    given = [make(steps, envs, number) for number in range(together)]
    ready = [sw.Trajectory(model_weights_id="w_0", **made) for made in given]
    plain = PlainTrajectories(folder / "plain", 5, 0)
    lean = LeanTrajectories(folder / "lean", 5, 0)
    ours = sw.TrajectoryReplayBuffer(folder / "ours", format="pt", device="cpu")
    calls: dict[str, tuple[Callable[[int], None], Callable[[], None]]] = {
        "plain torch": (lambda at: plain.add(given[at]), plain.flush),
        "lean torch": (lambda at: lean.add(given[at]), lean.flush),
        "sharpwave": (lambda at: ours.add([ready[at]]), ours.flush),
    }
    alone: dict[str, list[float]] = {label: [] for label in calls}
    saved: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(rounds + 1):
        for label, (add, flush) in calls.items():
            began = time.perf_counter_ns()
            for at in range(together):
                add(at)
            added = time.perf_counter_ns()
            flush()
            if turn:  # the first has imports and threads in it
                alone[label].append((added - began) / together)
                saved[label].append((time.perf_counter_ns() - began) / together)
    ours.close()
    plain.pool.shutdown()
    lean.pool.shutdown()
    return {
        "add": {label: summary(times) for label, times in alone.items()},
        "add_saved": {label: summary(times) for label, times in saved.items()},
    }


def opening(folder: Path, rounds: int, count: int) -> dict[str, dict[str, float]]:
    """The index of a folder that so many adds wrote, one record each; no file of a trajectory is looked at."""
    folder.mkdir()
    leaves = (Leaf(("rewards",), "F32", ()), Leaf(("curr_obs", "state"), "F32", (OBS,)))
    layout = Layout("pt", 50, 8, (0, 0), (64, 1_728), 104_128)

    def records() -> Iterator[Any]:
        yield rows_record(0, leaves)
        yield layouts_record(0, [(0, layout)])
        for number in range(count):
            weights = f"{number // 50:032x}_{number // 50}"
            yield add_record([TrajectoryEntry(number, f"{number:032x}", 50, 8, 0, weights, 0, 0, 104_500, number)])
        yield TrajectoryIndex(next_id=count).state_record()

    write_journal(folder / INDEX, KIND, records())
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        buffer = sw.TrajectoryReplayBuffer(folder, cache=0, device="cpu")
        times.append(time.perf_counter_ns() - began)
        assert len(buffer) == count
        buffer.close()
        del buffer  # its hundred thousand entries go here, not in the next time
    return {"sharpwave": summary([float(took) for took in times])}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--burst-ms", type=float, default=50.0)
    made.add_argument("--folder", type=Path, help="where files are written")
    options = made.parse_args()
    share = 1.0
    if options.quick:
        options.rounds, options.burst_ms, share = 5, 20.0, 1.0
    run = Run(options)
    torch.set_num_threads(1)
    cases: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="sw-", dir=options.folder) as name:
        folder = Path(name)
        for case in SHAPES:
            print(f"trajectories: {TRAJECTORIES[case]}", flush=True)
            cases[case] = sampling(case, folder / case, options.rounds, options.burst_ms / 1e3, share)
        print("trajectories: add", flush=True)
        cases |= adding(folder / "add", options.rounds)
        print("trajectories: open", flush=True)
        cases["open"] = opening(folder / "open", min(options.rounds, 10), OPENED)
    workload = {"title": "trajectories on disk", "contenders": {}, "cases": cases}
    print(tables.trajectory_rows(workload))
    run.save("trajectories", workloads={"trajectories": workload})


if __name__ == "__main__":
    main()
