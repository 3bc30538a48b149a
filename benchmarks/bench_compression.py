"""Bytes kept against the time of `sample(256)`, on frames that real environments have rendered.

    python benchmarks/bench_compression.py                   # CartPole, Pong and Breakout; some minutes
    python benchmarks/bench_compression.py --quick --film cartpole

The frames are rendered once, in the environment `frames` of setup_peers.py, and kept there.
Writes `results/compression.json`.
"""

from __future__ import annotations

import subprocess

from harness import footage
from harness.contest import Contest
from harness.environments import NotInstalledError
from harness.program import Run, contest_parser, parse
from harness.workloads import FILMED

FORMS = ("plain", "lz4", "zstd", "stacked", "stacked_lz4", "stacked_zstd")
ENTRANTS = {f"sharpwave@{form}": form for form in FORMS}
CASES = ("sample_256", "add_1")


def main() -> None:
    parser = contest_parser(__doc__)
    parser.add_argument("--film", choices=footage.ENVIRONMENTS, help="only this environment's frames")
    run = Run(parse(parser))
    workloads, memory = {}, {}
    for name, workload in FILMED.items():
        if run.options.film not in (None, name):
            continue
        try:
            footage.render(name)
        except (NotInstalledError, subprocess.CalledProcessError) as reason:
            run.left_out.say(name, reason)
            continue
        if measured := run.contest(Contest(name, workload, ENTRANTS, CASES)):
            workloads[name] = measured
            memory[name] = run.memory(ENTRANTS, workload)
    run.save("compression", workloads=workloads, memory=memory)


if __name__ == "__main__":
    main()
