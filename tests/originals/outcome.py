"""What a runner of another project's own tests reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["Outcome", "read_junit", "table"]


@dataclass
class Outcome:
    """One file of the other project's tests, or one comparison of its code on its own classes and on ours."""

    file: str
    passed: int
    failed: int
    skipped: int = 0
    notes: list[str] = field(default_factory=list)


def read_junit(file: str, report: Path) -> Outcome:
    """The counts of a ``pytest --junitxml`` report; a failure's first line becomes a note.

    A report that is missing or empty counts as one failure: tests that did not run have not passed.
    """
    if not report.exists():
        return Outcome(file, 0, 1, notes=["pytest wrote no report"])
    outcome = Outcome(file, 0, 0)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        wrong = [one for one in case if one.tag in ("failure", "error")]
        if wrong:
            outcome.failed += 1
            outcome.notes.append(f"{case.get('name')}: {(wrong[0].get('message') or '').splitlines()[:1]}")
        elif any(one.tag == "skipped" for one in case):
            outcome.skipped += 1
        else:
            outcome.passed += 1
    if not outcome.passed + outcome.failed + outcome.skipped:
        return Outcome(file, 0, 1, notes=["no test was collected"])
    return outcome


def table(groups: Iterable[tuple[str, list[Outcome]]]) -> str:
    """One line a file, one total a project."""
    lines = [("project", "file", "passed", "failed", "skipped")]
    notes = []
    for project, outcomes in groups:
        for one in outcomes:
            lines.append((project, one.file, str(one.passed), str(one.failed), str(one.skipped)))
            notes += [f"{project}: {one.file}: {note}" for note in one.notes]
        sums = (sum(getattr(one, what) for one in outcomes) for what in ("passed", "failed", "skipped"))
        lines.append((project, "total", *map(str, sums)))
    widths = [max(len(line[at]) for line in lines) for at in range(5)]
    text = [
        "  ".join(cell.rjust(width) if at > 1 else cell.ljust(width) for at, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join([*text, *notes])
