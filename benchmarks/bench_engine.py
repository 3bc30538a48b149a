"""Times the engine from C++, without Python: runs `bench_engine` and keeps where it was measured.

    python benchmarks/bench_engine.py                        # what `make bench` compiled
    python benchmarks/bench_engine.py path/to/bench_engine

Writes `results/engine.json`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from harness.environments import BENCHMARKS
from harness.program import Run, parse, parser


def main() -> None:
    made = parser(__doc__)
    compiled = BENCHMARKS.parent / "build" / "cpp" / "bench" / "bench_engine"
    made.add_argument("program", type=Path, nargs="?", default=compiled, help="bench_engine.cpp, compiled")
    run = Run(parse(made))
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "engine.json"
        subprocess.run([run.options.program, written], check=True)
        run.save("engine", lines=json.loads(written.read_text()))


if __name__ == "__main__":
    main()
