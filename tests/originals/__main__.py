"""``python -m tests.originals --areal PATH --rlinf PATH --apexrl PATH``: runs the projects whose paths are given."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from .outcome import Outcome, table

PROJECTS = ("areal", "rlinf", "apexrl")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.originals", description=__doc__)
    for name in PROJECTS:
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"a checkout of {name}")
    given = {name: path for name, path in vars(parser.parse_args()).items() if path is not None}
    if not given:
        parser.error("expected at least one of " + ", ".join(f"--{name}" for name in PROJECTS))
    for name, path in given.items():
        if not path.is_dir():
            parser.error(f"--{name}: expected the folder of a checkout, got {path}")
    groups: list[tuple[str, list[Outcome]]] = []
    for name, path in given.items():
        runner = importlib.import_module(f"{__package__}.{name}")
        groups.append((name, runner.run(path.resolve())))
    print(table(groups))
    left = [name for name in PROJECTS if name not in given]
    if left:
        print("not given, so not run: " + ", ".join(left))
    return 1 if any(one.failed for _, outcomes in groups for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
