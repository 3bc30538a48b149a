"""Runs the conformance suite and writes its table into the docs: back end by back end, which points hold.

    SHARPWAVE_VLLM=PROGRAM SHARPWAVE_SGLANG=PYTHON python tests/llm/conformance_table.py

`make backends` calls it. The exit code is that of the tests.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from generator_backends import CHILD, IN_PROCESS

_HERE = Path(__file__).parent
PAGE = _HERE.parents[1] / "docs" / "how-to" / "use-vllm-or-sglang.md"
BEGIN, END = "<!-- conformance: written by `make backends` -->", "<!-- /conformance -->"
POINTS = {
    1: "Tokens, log-probabilities and versions have equal length; versions never fall within an answer",
    2: "Log-probabilities are those of a forward pass of the version that made each token, after filters; with "
    '`kv="recompute"` also across a swap',
    3: "`max_tokens`, stop ids, stop strings, end of text, temperature 0, seed",
    4: "Swaps in mid-answer lose and repeat nothing",
    5: "Aborted answers return their tokens, and their places are free",
    6: "Weights that cannot be read leave the old ones; wrong requests are refused",
    7: "Pauses may be repeated; requests wait in them",
    8: "A server that is killed in mid-answer costs no token",
    9: "`score` gives the log-probabilities that generation reported",
}


class Recorder:
    """Outcomes by back end and point: "passed", "failed", or the reason of a skip."""

    def __init__(self) -> None:
        self.found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._places: dict[str, tuple[str, int]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            self._places[item.nodeid] = (item.callspec.params["bench"].name, item.function.point)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            name, point = self._places[report.nodeid]
            reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else report.outcome
            self.found[name][point].append(reason)


def cell(outcomes: list[str]) -> str:
    reasons = sorted({one for one in outcomes if one not in ("passed", "failed")})
    if "failed" in outcomes:
        return "**no**"
    if "passed" not in outcomes:
        return f"– ({'; '.join(reasons)})"
    # A test that is about servers says nothing of a generator that has none.
    reasons = [one for one in reasons if one not in (IN_PROCESS, CHILD)]
    return f"yes, but {'; '.join(reasons)}" if reasons else "yes"


def table(found: dict[str, dict[int, list[str]]]) -> str:
    run = [
        name for name, points in found.items() if any(one in ("passed", "failed") for p in points.values() for one in p)
    ]
    found = {name: found[name] for name in run}  # not those that cannot run here
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for point, text in POINTS.items():
        lines.append(f"| {text} | " + " | ".join(cell(found[name][point]) for name in found) + " |")
    return "\n".join(lines)


def main() -> int:
    recorder = Recorder()
    code = pytest.main(["-p", "no:randomly", "-p", "no:cacheprovider", str(_HERE / "test_conformance.py")], [recorder])
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(recorder.found)}\n{END}{after}")
    print(f"wrote the table of {PAGE.name}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
