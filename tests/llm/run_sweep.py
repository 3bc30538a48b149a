"""Kills processes of a real run, over all roles, and checks that every item is trained once.

    python tests/llm/run_sweep.py --kills 100            # prints how long each role took to come back
    python tests/llm/run_sweep.py --kills 10 --roles learner
    python tests/llm/run_sweep.py --stale drop --goal 0.8

The run is `sharpwave train sort --processes` in small. A kill is SIGKILL at a random moment. A role is back when its
new process has said that it is ready; training is back when the next step is in the log. With a goal, the run goes on
after the kills until held-out items have that mean reward.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sharpwave.llm.experiment import Experiment
from sharpwave.llm.launchers.alive import is_alive
from sharpwave.llm.launchers.keeper import Keeper
from sharpwave.llm.launchers.roles import role_names
from sharpwave.llm.log import EVENTS, STEPS, read_lines
from sharpwave.llm.position import Position
from sharpwave.llm.run_folder import RunFolder

HANG_S = 120.0
GOAL_S = 600.0
SMALL = {
    "task": "sort",
    "epochs": 1_000_000,
    "batch": 4,
    "group": 2,
    "max_staleness": 1,
    "concurrent": 4,
    "slots": 8,
    "save_every": 3,
    "skip_no_signal": False,
    "max_losses": 1_000_000,
    "task_options": {"digits": 2, "count": 60, "held_out": 4},
    "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "num_key_value_heads": 1},
    "learner": {"row_tokens": 32, "rows": 2, "kl": 0.01},  # with a process for the reference
    "evaluation": {"every": 4},
}  # fmt: skip


class Sweep:
    """A run that goes on until all kills are done and the goal is reached, and then to its end.

    Args:
        changes: Settings in the place of those of `SMALL`.
        goal: The mean reward that held-out items come to after the kills; None for none.
    """

    def __init__(
        self, folder: Path, kills: int, roles: list[str] | None, seed: int, *,
        changes: dict[str, Any] | None = None, goal: float | None = None,
    ) -> None:  # fmt: skip
        self.experiment = Experiment.read({**SMALL, **(changes or {})})
        self.folder = RunFolder.create(folder, self.experiment)
        self.keeper = Keeper(self.folder)
        self.kills, self.random = kills, random.Random(seed)
        self.roles = roles or role_names(self.experiment)
        self.back: dict[str, list[float]] = {role: [] for role in self.roles}
        self.next_step: dict[str, list[float]] = {role: [] for role in self.roles}
        self.failure: str | None = None
        self.goal, self.done = goal, 0
        self.has_ended = False

    def run(self) -> None:
        killer = threading.Thread(target=self._kill_all, daemon=True)
        killer.start()
        try:
            self.result = self.keeper.run()
        finally:
            self.has_ended = True
            killer.join()
        if self.failure is not None:
            raise AssertionError(self.failure)

    def _kill_all(self) -> None:
        try:
            for number in range(self.kills):
                role = self.roles[number % len(self.roles)]
                self._until(lambda role=role: self._is_ready(role), f"{role} was not ready")
                time.sleep(self.random.random() * 0.3)
                if self._is_over():
                    return
                self._kill(role)
            if self.goal is not None:
                killed = time.time()
                self._until(lambda: self._reward(killed) >= self.goal, f"no reward of {self.goal}", GOAL_S)
            self.keeper.stop()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _kill(self, role: str) -> None:
        found = self.keeper.launcher.process(role)
        if found is None or not is_alive(found):
            return
        steps, began = self._steps(), time.monotonic()
        os.kill(found["pid"], signal.SIGKILL)
        self.done += 1
        self._until(lambda: self._is_ready(role) and self.folder.find(role)["pid"] != found["pid"], f"{role} is gone")
        self.back[role].append(time.monotonic() - began)
        self._until(lambda: self._steps() > steps, f"no step after {role} was killed")
        self.next_step[role].append(time.monotonic() - began)

    def _until(self, holds, what: str, most_s: float = HANG_S) -> None:
        deadline = time.monotonic() + most_s
        while not (self._is_over() or holds()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: {self.folder.status().get('explain')}")
            time.sleep(0.005)

    def _is_ready(self, role: str) -> bool:
        return is_alive(self.folder.find(role)) and self.folder.find(role)["pid"] == (
            self.keeper.launcher.process(role) or {}
        ).get("pid")

    def _is_over(self) -> bool:
        return self.folder.find("outcome") is not None or self.has_ended

    def _steps(self) -> int:
        path = self.folder.logs / STEPS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def rewards(self, since_s: float = 0.0) -> list[float]:
        """Of held-out items, by evaluations that began after a moment."""
        found = [line for line in read_lines(self.folder.logs / EVENTS) if line["event"] == "score"]
        return [line["reward"] for line in found if line["began_s"] >= since_s]

    def _reward(self, since_s: float) -> float:
        time.sleep(0.2)  # the log has many lines
        return max(self.rewards(since_s)[-1:], default=-1.0)

    def check(self) -> None:
        """Every item that is settled by the final checkpoint is in its weights, exactly once."""
        counts = Counter(items_in_weights(self.folder))
        assert not [key for key, count in counts.items() if count > 1], "an item is in the weights twice"
        assert all(line["updates"] for line in read_lines(self.folder.logs / STEPS)), "a step learned nothing"
        said = self.folder.cut().position
        rules = self.experiment.rules
        order = Position(self.experiment.load_task().items, epochs=rules.epochs, seed=rules.seed)._order_of
        begun = {f"{epoch}/{name}" for epoch in range(said["epoch"]) for name in order(epoch)}
        begun |= {f"{said['epoch']}/{name}" for name in order(said["epoch"])[: said["cursor"]]}
        expected = (begun | set(said["ahead"])) - set(said["open"])
        assert set(counts) == expected, (sorted(expected - set(counts))[:5], sorted(set(counts) - expected)[:5])
        assert self.result.trained == len(expected), (self.result, len(expected))


def items_in_weights(folder: RunFolder) -> list[str]:
    """The keys of the steps that led to the final weights: a learner that begins again undoes what it had not saved."""
    begins = {line["version"]: line["step"] for line in read_lines(folder.logs / EVENTS) if line["event"] == "begin"}
    kept: list[tuple[int, list[str]]] = []
    for line in read_lines(folder.logs / STEPS):
        # Versions only grow: the learner that made this one began with the newest version before it.
        for version in [one for one in begins if one < line["version"]]:
            step = begins.pop(version)
            kept = [one for one in kept if one[0] <= step]
        kept.append((line["step"], line["keys"]))
    return [key for _, keys in kept for key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--roles", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stale", choices=("mask", "drop"), default="mask")
    parser.add_argument("--goal", type=float, help="of held-out items, after the kills")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sharpwave-sweep-") as place:
        changes = {"stale": given.stale}
        sweep = Sweep(Path(place) / "run", given.kills, given.roles, given.seed, changes=changes, goal=given.goal)
        began = time.monotonic()
        sweep.run()
        sweep.check()
        print(f"{sweep.done} kills in {time.monotonic() - began:.0f} s, {sweep.keeper.restarts} restarts; "
              f"{sweep.result.trained} items trained once, {sweep.result.step} steps; stale={given.stale}")  # fmt: skip
        if rewards := sweep.rewards():
            print(f"held-out reward: first {rewards[0]:.3f}, last {rewards[-1]:.3f}, best {max(rewards):.3f}")
        for role in sweep.roles:
            both = [sorted(times[role]) for times in (sweep.back, sweep.next_step)]
            if both[0]:
                said = "; ".join(
                    f"{name} median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s"
                    for name, times in zip(("back", "next step"), both, strict=True) if times
                )  # fmt: skip
                print(f"{role:<12} {len(both[0]):>3} kills: {said}")
        if sweep.keeper.restarts > sweep.done:
            print("processes died that were not killed:")
            for path in sorted(sweep.folder.logs.glob("*.txt")):
                print(path.name, path.read_text()[-2000:])
        if sweep.done < given.kills:
            print(json.dumps({"kills": sweep.done, "wanted": given.kills}))
            sys.exit(1)


if __name__ == "__main__":
    main()
