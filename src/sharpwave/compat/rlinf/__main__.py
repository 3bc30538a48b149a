"""RLinf's test of a buffer: ``python -m sharpwave.compat.rlinf --load-path PATH`` loads it, samples once and prints
names and shapes. Nothing is changed."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sharpwave.compat.rlinf import TrajectoryReplayBuffer
from sharpwave.errors import SharpwaveError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sharpwave.compat.rlinf", description=__doc__)
    parser.add_argument("--load-path", required=True, help="a checkpoint or a folder of trajectories")
    parser.add_argument("--num-chunks", type=int, default=4)
    parser.add_argument("--sample-window-size", type=int, default=10)
    parser.add_argument("--cache-size", type=int, default=5)
    parser.add_argument("--enable-cache", action="store_true")
    parser.add_argument("--allow-pickle", action="store_true", help="trust pkl files")
    options = parser.parse_args()
    try:
        # In memory only: this also works for a folder that another process has open.
        buffer = TrajectoryReplayBuffer(
            sample_window_size=options.sample_window_size,
            save_trajectories=False,
            as_upstream=True,
            allow_pickle=options.allow_pickle,
        )
        buffer.load_checkpoint(options.load_path)
        batch = buffer.sample(options.num_chunks)
    except (SharpwaveError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{buffer.size} trajectories, {buffer.total_samples} transitions")
    _print("", batch)
    return 0


def _print(path: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _print(f"{path}/{key}" if path else key, part)
    else:
        print(f"{path}: {tuple(value.shape)} {value.dtype}")


if __name__ == "__main__":
    sys.exit(main())
