"""Makes the virtual environments that the peers live in, and the one that renders frames.

    python benchmarks/setup_peers.py              # all
    python benchmarks/setup_peers.py torch jax    # only these

They go under $SHARPWAVE_PEERS, or benchmarks/.venvs. An environment that exists is left as it is: delete its
folder to make it anew. A peer that cannot be installed is left out of the benchmark, which says so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from harness.environments import BENCHMARKS, environment

# Each inner tuple is one `pip install`, in this order. torch comes first and pinned: resolved as somebody's
# dependency it may bring gigabytes of CUDA libraries along.
TORCH = ("torch==2.13.0",)
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "torch": (TORCH, ("stable-baselines3", "cpprb", "torchrl", "skrl", "rlox")),
    "tianshou": (TORCH, ("tianshou",)),
    "jax": (("flashbax",),),
    "reverb": (("dm-reverb[tensorflow]",),),
    "ray": (("ray", "numpy"),),
    # No peer: here the frames for bench_compression.py are rendered.
    "frames": (("gymnasium[classic-control]", "ale-py", "opencv-python-headless"),),
}
# What is run in an environment once it is made; a failure costs one contender, not the environment.
MENDS = {"torch": "harness.mend_torchrl"}


def make(name: str, folder: Path, python: str) -> bool:
    """Create one environment; True when every step worked."""
    if (folder / "ready").exists():
        print(f"{name}: exists")
        return True
    print(f"{name}: making {folder}", flush=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps = [[python, "-m", "venv", str(folder)], *([*pip, *packages] for packages in ENVIRONMENTS[name])]
    for step in steps:
        if subprocess.run(step).returncode:
            print(f"{name}: failed at: {' '.join(step)}")
            return False
    if name in MENDS and subprocess.run([str(folder / "bin" / "python"), "-m", MENDS[name]], cwd=BENCHMARKS).returncode:
        print(f"{name}: {MENDS[name]} failed; what it mends is left out of the benchmarks")
    (folder / "ready").touch()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--python", default=sys.executable, help="Reverb's wheels want Python 3.11 or older")
    options = parser.parse_args()
    if unknown := set(options.environments) - set(ENVIRONMENTS):
        parser.error(f"no environment {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    made = [make(name, environment(name), options.python) for name in options.environments or ENVIRONMENTS]
    sys.exit(0 if all(made) else 1)


if __name__ == "__main__":
    main()
