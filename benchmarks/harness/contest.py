"""The driver's side of a contest: starts the entrants, and times them in turn within one run."""

from __future__ import annotations

import json
import os
import random
import re
import select
import statistics
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from harness import machine, results
from harness.environments import BENCHMARKS, NotInstalledError, interpreter
from harness.workloads import Workload

REPLY_LIMIT_S = 300
LOG_BYTES = 1 << 20
MEMORY_SHARE = 1.3  # of the bytes that an entrant needs, generously

# Which environment a contender lives in; None is the interpreter that runs the benchmark. The peers' own
# requirements contradict each other, so no single environment can hold them all.
ENVIRONMENTS: dict[str, str | None] = {
    "sharpwave": None,
    "engine": None,
    "numpy_ring": None,
    "c_limit": None,
    "c_loop": None,
    "empty_loop": None,
    "sb3": "torch",
    "cpprb": "torch",
    "torchrl": "torch",
    "skrl": "torch",
    "rlox": "torch",
    "torch_ring": "torch",
    "apexrl": "torch",
    "tianshou": "tianshou",
    "flashbax": "jax",
    "reverb": "reverb",
    "ray": "ray",
}

# Bytes of a row in a form, over its raw bytes; 1 for those not named.
FORM_SHARES = {"derived": 0.5, "stacked": 0.13, "rainbow": 0.13}


@dataclass(frozen=True)
class Contest:
    """Who meets in what.

    Attributes:
        entrants: The form in which each takes part, by label: a contender, or `contender@what` where one takes
            part more than once.
        cases: The operations timed, as `<verb>_<rows>`.
    """

    name: str
    workload: Workload
    entrants: dict[str, str]
    cases: tuple[str, ...]

    def bytes_needed(self, capacity: int) -> int:
        shares = sum(FORM_SHARES.get(form, 1.0) for form in self.entrants.values())
        return int(MEMORY_SHARE * shares * capacity * self.workload.row_bytes)

    def only(self, contenders: list[str]) -> Contest:
        """The same contest without those who are not named."""
        entrants = {label: form for label, form in self.entrants.items() if contender_of(label) in contenders}
        return replace(self, entrants=entrants)


class ContenderError(RuntimeError):
    """A contender could not start, failed, or did not answer in time."""


def contender_of(label: str) -> str:
    """`cpprb` of `cpprb@derived`, `numpy_ring` of `numpy_ring/take`."""
    return label.partition("/")[0].partition("@")[0]


class Player:
    """A running contender. One request at a time; a contender that does not answer in time is killed.

    Attributes:
        module: What runs in the contender's process.
        has_session: Whether that process leads a session of its own, so that whatever it starts can be found.
    """

    module: ClassVar[str] = "harness.worker"
    has_session: ClassVar[bool] = False

    def __init__(self, contender: str, *arguments: str, **variables: str) -> None:
        try:
            python = interpreter(ENVIRONMENTS[contender])
        except NotInstalledError as reason:
            raise ContenderError(reason) from None
        self._log = os.memfd_create(f"log of {contender}")
        self._process = subprocess.Popen(
            [python, "-m", self.module, contender, *arguments],
            cwd=BENCHMARKS,
            env={**os.environ, **variables},
            start_new_session=self.has_session,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        # For the type checker: both are pipes.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout

    def ask(self, do: str, **arguments: object) -> Any:
        try:
            self._requests.write(json.dumps({"do": do, **arguments}) + "\n")
            self._requests.flush()
        except BrokenPipeError:
            raise ContenderError(f"{do}: process ended; {self._last_words()}") from None
        if not select.select([self._replies], [], [], REPLY_LIMIT_S)[0]:
            self._process.kill()
            raise ContenderError(f"{do}: no answer within {REPLY_LIMIT_S} s")
        line = self._replies.readline()
        if not line:
            raise ContenderError(f"{do}: process ended; {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ContenderError(f"{do}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        with suppress(BrokenPipeError):  # what a dead contender never read is still in the pipe's buffer
            self._requests.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._replies.close()
        os.close(self._log)

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self) -> str:
        lines = os.pread(self._log, LOG_BYTES, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no message"


@dataclass
class Entry:
    """One timed operation of one contender, under the label that it has in the results."""

    label: str
    player: Player
    variant: str
    calls: int
    burst_ns: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {
            "min_ns": min(self.burst_ns),
            "median_ns": statistics.median(self.burst_ns),
            "bursts": len(self.burst_ns),
            "calls_per_burst": self.calls,
        }


class LeftOut:
    """What could not be measured, said when it happens and kept for the results."""

    def __init__(self) -> None:
        self.lines: list[dict[str, str]] = []

    def say(self, who: str, reason: object) -> None:
        # Results are published: of a path only the name is kept.
        text = re.sub(r"(?:/[^/\s'\",:]+)+(/[^/\s'\",:]+)", r"\1", str(reason).splitlines()[0])[:300]
        print(f"left out: {who}: {text}", flush=True)
        self.lines.append({"who": who, "reason": text})


def start(
    label: str, form: str, workload: Workload, capacity: int, left_out: LeftOut
) -> tuple[Player, dict[str, Any]] | None:
    """A filled contender and what it says about itself, or None when it cannot run here."""
    player = None
    try:
        player = Player(contender_of(label), form)
        return player, player.ask("fill", workload=workload.name, capacity=capacity)
    except ContenderError as reason:
        left_out.say(label, reason)
        if player:
            player.close()
        return None


def run_case(
    case: str, players: dict[str, Player], rounds: int, burst_s: float, left_out: LeftOut
) -> dict[str, dict[str, float]]:
    """Time one case for all players in turn; answers with a summary for each label.

    Noise on a machine comes in phases of seconds. Whoever is measured alone meets one phase; here each
    round gives everyone one short burst, so all meet the same ones. The order is drawn anew each round,
    so that nobody always follows the same rival.
    """
    entries: list[Entry] = []
    for name, player in players.items():
        try:
            prepared = player.ask("prepare", case=case, burst_s=burst_s)
        except ContenderError as reason:
            left_out.say(f"{name} {case}", reason)
            continue
        for variant, calls in prepared.items():
            label = f"{name}/{variant}" if variant else name
            if isinstance(calls, str):
                left_out.say(f"{label} {case}", calls)
            else:
                entries.append(Entry(label, player, variant, calls))
    order = random.Random(0)
    for _ in range(rounds):
        for entry in order.sample(entries, len(entries)):
            try:
                entry.burst_ns.append(entry.player.ask("time", variant=entry.variant, calls=entry.calls))
            except ContenderError as reason:
                left_out.say(f"{entry.label} {case}", reason)
                entries = [other for other in entries if other.player is not entry.player]
                break
    return {entry.label: entry.summary() for entry in entries if entry.burst_ns}


def run_contest(
    contest: Contest, capacity: int, rounds: int, burst_s: float, left_out: LeftOut
) -> results.Document | None:
    """All cases of a contest; None where the machine's memory cannot hold the entrants at once."""
    needed = contest.bytes_needed(capacity)
    if needed > machine.available_bytes():
        hint = "lower --rows or name fewer contenders"
        left_out.say(contest.name, f"all contenders at once need {results.size(needed)}; {hint}")
        return None
    with ExitStack() as stack:
        players, about = {}, {}
        for label, form in contest.entrants.items():
            print(f"{contest.name}: filling {label}", flush=True)
            if started := start(label, form, contest.workload, capacity, left_out):
                players[label], about[label] = started
                stack.callback(players[label].close)
        cases = {}
        for case in contest.cases:
            cases[case] = run_case(case, players, rounds, burst_s, left_out)
            print_case(f"{contest.name} {case}", cases[case])
    facts = {"title": contest.workload.title, "row_bytes": contest.workload.row_bytes, "capacity": capacity}
    return facts | {"contenders": about, "cases": cases}


def print_case(title: str, summaries: dict[str, dict[str, float]]) -> None:
    print(title)
    for label, times in sorted(summaries.items(), key=lambda item: item[1]["min_ns"]):
        least, median = results.duration(times["min_ns"]), results.duration(times["median_ns"])
        print(f"    {label:26}{least:>10}  median {median}", flush=True)


def measure_memory(label: str, form: str, workload: Workload, rows: int) -> dict[str, int | float]:
    """Resident memory of a full buffer, in a process of its own."""
    with Player(contender_of(label), form) as player:
        resident = player.ask("measure_memory", workload=workload.name, rows=rows)
    raw = rows * workload.row_bytes
    return {"rows": rows, "raw_bytes": raw, "resident_bytes": resident, "beyond_raw": resident / raw - 1}
