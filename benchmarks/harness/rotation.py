"""The driver's side of a contest between crowds: every one gets a slice of time in its turn."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from harness import machine, results
from harness.contest import ContenderError, LeftOut, Player
from harness.workloads import Workload

SHARED_MEMORY = Path("/dev/shm")
ENDING_LIMIT_S = 5.0
MEMORY_SHARE = 1.6  # of the bytes of a crowd's rows: trees, copies on the way, interpreters


class Crowd(Player):
    """A contender with all its processes. When it is closed, none of them is left, nor anything in shared memory."""

    module: ClassVar[str] = "harness.crowd"
    has_session: ClassVar[bool] = True

    def __init__(self, contender: str, form: str) -> None:
        self._token = f"sharpwave-bench-{os.getpid()}-{contender}-{form}"
        self._folder = tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True)
        try:
            super().__init__(contender, form, self._token, TMPDIR=self._folder.name)
        except BaseException:
            self._folder.cleanup()
            raise
        self._segments: set[Path] = set()

    def fill(self, workload: Workload, capacity: int) -> dict[str, object]:
        about = self.ask("fill", workload=workload.name, capacity=capacity)
        self._segments |= segments_of(self._process.pid)
        return about

    def close(self) -> None:
        # Some give their segments names of their own, and lose them when they are killed.
        self._segments |= segments_of(self._process.pid)
        super().close()
        end_session(self._process.pid)
        for left in {*self._segments, *SHARED_MEMORY.glob(f"*{self._token}*")}:
            left.unlink(missing_ok=True)
        self._folder.cleanup()


def segments_of(process: int) -> set[Path]:
    """Files in shared memory that a process has mapped."""
    with suppress(OSError):
        names = (line.split(maxsplit=5)[-1] for line in Path(f"/proc/{process}/maps").read_text().splitlines())
        return {Path(name) for name in names if name.startswith(f"{SHARED_MEMORY}/") and " (deleted)" not in name}
    return set()


def session_members(session: int) -> Iterator[int]:
    """Processes of a session that are not just waiting to be reaped."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # After the name, which is in brackets and may hold anything: state, parent, group, session.
            state, _parent, _group, member_of, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(member_of) == session and state != "Z":
                yield int(folder.name)


def end_session(session: int) -> None:
    """End what is left of a session. Asked first: Python's resource tracker removes what those who went left behind."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + ENDING_LIMIT_S
        for process in session_members(session):
            with suppress(ProcessLookupError):
                os.kill(process, how)
        while any(session_members(session)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return


@dataclass(frozen=True)
class Slices:
    """How a rotation is run: so many rounds, each slice of `slice_s` seconds after `warm_s` that do not count."""

    rounds: int
    slice_s: float
    warm_s: float


@dataclass(frozen=True)
class Case:
    """Who works at once, and on how many rows a call."""

    writers: int
    rows: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.rows}_{self.writers}"


Summary = dict[str, dict[str, float]]


def summarize(slices: list[dict[str, float]]) -> Summary:
    """Median, least and most of each figure over the slices."""
    names = dict.fromkeys(name for figures in slices for name in figures)
    measured = {name: [figures[name] for figures in slices if name in figures] for name in names}
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in measured.items()
    }


def run_case(case: Case, crowds: dict[str, Crowd], how: Slices, left_out: LeftOut, title: str) -> dict[str, Summary]:
    """One slice for every crowd in each round, in an order drawn anew; one that fails is left out from then on."""
    arguments = {"writers": case.writers, "rows": case.rows, "batch": case.batch}
    measured: dict[str, list[dict[str, float]]] = {}

    def ask(label: str, *request: str, **more: float) -> dict[str, float] | None:
        try:
            return crowds[label].ask(*request, **arguments, **more)
        except ContenderError as reason:
            left_out.say(f"{label}, {title}", reason)
            del measured[label], crowds[label]
            return None

    for label in list(crowds):
        measured[label] = []
        ask(label, "gather")
    order = random.Random(0)
    for _ in range(how.rounds):
        for label in order.sample(list(crowds), len(crowds)):
            if figures := ask(label, "run", warm_s=how.warm_s, slice_s=how.slice_s):
                measured[label].append(figures)
    return {label: summarize(slices) for label, slices in measured.items() if slices}


def run_rotation(
    form: str,
    contenders: tuple[str, ...],
    cases: dict[Case, Slices],
    workload: Workload,
    capacity: int,
    left_out: LeftOut,
) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, Summary]]]:
    """All cases of one form: what each contender says about itself, and a summary for each case and contender."""
    needed = int(MEMORY_SHARE * len(contenders) * capacity * workload.row_bytes)
    if needed > machine.available_bytes():
        left_out.say(form, f"all contenders at once need {results.size(needed)}; lower --rows or name fewer")
        return {}, {}
    about, measured = {}, {}
    with ExitStack() as stack:
        crowds: dict[str, Crowd] = {}
        for contender in contenders:
            print(f"{form}: filling {contender}", flush=True)
            try:
                crowd = Crowd(contender, form)
                stack.callback(crowd.close)
                about[contender] = crowd.fill(workload, capacity)
            except ContenderError as reason:
                left_out.say(f"{contender}, {form}", reason)
                continue
            crowds[contender] = crowd
        for case, how in cases.items():
            title = f"{form}, {case.rows} rows an add, {case.writers} writers"
            measured[case.name] = run_case(case, crowds, how, left_out, title)
            print_case(title, measured[case.name])
    return about, measured


def print_case(title: str, summaries: dict[str, Summary]) -> None:
    print(title)
    for label, figures in sorted(summaries.items(), key=lambda item: -item[1]["inserts_per_s"]["median"]):
        rates = [
            f"{results.amount(figures[name]['median']):>8} {name.partition('_')[0]}/s"
            f" (p50 {results.duration(figures[f'{verb}_p50_ns']['median'])},"
            f" p99 {results.duration(figures[f'{verb}_p99_ns']['median'])})"
            for name, verb in (("inserts_per_s", "add"), ("samples_per_s", "sample"))
            if f"{verb}_p50_ns" in figures
        ]
        print(f"    {label:12}{'  '.join(rates)}", flush=True)
