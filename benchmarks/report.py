"""Writes the measured tables into the documents, and the plots into docs/img.

    python benchmarks/report.py

A table goes between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; everything else in a document is left
alone. Nothing is measured here and no figure is typed in: the source is `results/*.json` alone.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import plots
import tables
from goals import all_goals
from harness import results
from harness.contest import BENCHMARKS

DOCUMENTS = ("README.md", "docs/performance.md")
MARKED = re.compile(r"(<!-- bench:(?P<name>\w+) -->\n).*?(<!-- /bench:(?P=name) -->)", re.DOTALL)


def measured_tables() -> Iterator[tuple[str, str]]:
    """Name and Markdown of each table for which there are results."""
    replay, memory, scaling, engine = map(results.load, ("replay", "memory", "scaling", "engine"))
    verdicts = all_goals(replay, memory, scaling)
    yield "goals", tables.goals(verdicts)
    if replay:
        yield "headline", tables.headline(replay)
        yield "wins", tables.wins(replay, verdicts)
        for name, workload in replay["workloads"].items():
            yield name, tables.contest(workload, replay)
    if memory:
        yield "memory", tables.memory(memory)
    if scaling:
        yield "scaling", tables.scaling(scaling)
    if engine:
        yield "seed_targets", tables.seed_targets(engine)


def fill_in(text: str, written: dict[str, str]) -> tuple[str, list[str]]:
    """The document with its marked places filled, and the names that have no results yet."""
    missing = []

    def fill(match: re.Match[str]) -> str:
        if match["name"] not in written:
            missing.append(match["name"])
            return match[0]
        return f"{match[1]}{written[match['name']]}\n{match[3]}"

    return MARKED.sub(fill, text), missing


def draw_plots(folder: Path) -> None:
    replay, memory, scaling = map(results.load, ("replay", "memory", "scaling"))
    if replay and "w1" in replay["workloads"]:
        plots.headline(replay, folder / "headline.png")
    if memory:
        plots.memory(memory, folder / "memory.png")
    if scaling:
        plots.scaling(scaling, folder / "scaling.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=BENCHMARKS.parent, help="where README.md and docs/ are")
    root = parser.parse_args().root
    written = dict(measured_tables())
    placed = set()
    for name in DOCUMENTS:
        path = root / name
        if not path.exists():
            print(f"{name}: not there, left out")
            continue
        before = path.read_text()
        text, missing = fill_in(before, written)
        path.write_text(text)
        placed |= {match["name"] for match in MARKED.finditer(before)}
        print(f"{name}: {'no results for ' + ', '.join(missing) if missing else 'all marked places filled'}")
    if unplaced := sorted(set(written) - placed):
        print(f"no document has a place for: {', '.join(unplaced)}")
    draw_plots(root / "docs" / "img")
    print(f"\n{written['goals']}")


if __name__ == "__main__":
    main()
