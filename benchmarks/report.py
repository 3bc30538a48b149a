"""Writes the measured tables into the documents, and the plots into docs/img.

    python benchmarks/report.py

A table goes between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`, a single figure between the same within a line;
everything else in a document is left alone. Nothing is measured here and no figure is typed in: the source is
`results/*.json` alone. Results of a busy machine are not published; `--root` takes a copy of the documents for a look.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import llm_tables
import plots
import tables
from goals import GOALS, Documents, all_goals
from harness import results
from harness.environments import BENCHMARKS
from harness.machine import MOST_LOAD

DOCUMENTS = ("README.md", "docs/performance.md", "docs/decisions", "docs/how-to/choose-an-objective.md")
# Documents whose table has their name.
TABLES = (
    "memory",
    "scaling",
    "windows",
    "masked",
    "training",
    "inputs",
    "overheads",
    "compression",
    "snapshot",
    "open",
    "sequences",
    "service",
    "trajectories",
    "gpu_returns",
    "gpu_replay",
)
LLM_TABLES = ("objectives", "llm_generation", "llm_decode", "gpu_learner", "llm_async", "llm_methods")
MARKED = re.compile(r"(<!-- bench:(?P<name>\w+) -->)(?P<line>\n?).*?(<!-- /bench:(?P=name) -->)", re.DOTALL)


def measured_tables(documents: Documents) -> Iterator[tuple[str, str]]:
    """Name and Markdown of each table for which there are results."""
    verdicts = all_goals(documents)
    yield "goals", tables.goals(verdicts)
    yield "wins", tables.wins(documents, verdicts)
    if documents["replay"]:
        yield "headline", tables.headline(documents)
    if any(documents[name] for name in tables.FEATURES):
        yield "features", tables.features(documents)
    for name in ("replay", *tables.FEATURES, "pace", "write", "processes", "returns"):
        if document := documents[name]:
            for contest, workload in document["workloads"].items():
                yield contest, tables.contest(workload, document)
            if document.get("memory"):
                yield f"{name}_memory", tables.footprints(document)
    for module, names in ((tables, TABLES), (llm_tables, LLM_TABLES)):
        for name in names:
            if document := documents[name]:
                yield name, getattr(module, name)(document)
    if gpu := documents["gpu_replay"]:
        yield "gpu_direct", tables.gpu_direct(gpu)
    if processes := documents["processes"]:
        for form in processes["crowds"]:
            yield f"processes_{form}", tables.crowds(form, processes)
    if engine := documents["engine"]:
        yield "seed_targets", tables.seed_targets(engine)


def fill_in(text: str, written: dict[str, str]) -> tuple[str, list[str]]:
    """The document with its marked places filled, and the names that have no results yet."""
    missing = []

    def fill(match: re.Match[str]) -> str:
        if match["name"] not in written:
            missing.append(match["name"])
            return match[0]
        return f"{match[1]}{match['line']}{written[match['name']]}{match['line']}{match[4]}"

    return MARKED.sub(fill, text), missing


def draw_plots(documents: Documents, folder: Path) -> None:
    if (replay := documents["replay"]) and "w1" in replay["workloads"]:
        plots.headline(replay, folder / "headline.png")
    for name in ("memory", "scaling", "windows", "compression", "processes"):
        if document := documents[name]:
            getattr(plots, name)(document, folder / f"{name}.png")
    if panels := plots.feature_panels(documents):
        plots.features(panels, folder / "features.png")


def pages(root: Path) -> Iterator[Path]:
    for name in DOCUMENTS:
        path = root / name
        if path.is_dir():
            yield from sorted(path.glob("*.md"))
        elif path.exists():
            yield path
        else:
            print(f"{name}: not there, left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=BENCHMARKS.parent, help="where README.md and docs/ are")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="the folder to read from")
    options = parser.parse_args()
    root = options.root
    documents = {name: results.load(name, options.results) for name in GOALS}
    busy = {name: one["machine"]["load_at_start"] for name, one in documents.items() if one and tables.is_busy(one)}
    if busy and root.resolve() == BENCHMARKS.parent:
        told = ", ".join(f"{name} ({load:.2f})" for name, load in busy.items())
        sys.exit(f"not published, measured at a load above {MOST_LOAD}: {told}; run these again on an idle machine")
    written = dict(measured_tables(documents))
    placed = set()
    for path in pages(root):
        name = path.relative_to(root)
        before = path.read_text()
        text, missing = fill_in(before, written)
        here = {match["name"] for match in MARKED.finditer(before)}
        if here:
            path.write_text(text)
            print(f"{name}: {'no results for ' + ', '.join(missing) if missing else 'all marked places filled'}")
        placed |= here
    if unplaced := sorted(set(written) - placed):
        print(f"no document has a place for: {', '.join(unplaced)}")
    draw_plots(documents, root / "docs" / "img")
    print(f"\n{written['goals']}")


if __name__ == "__main__":
    main()
