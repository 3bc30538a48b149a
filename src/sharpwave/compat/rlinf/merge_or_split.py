"""RLinf's tool: ``python -m sharpwave.compat.rlinf.merge_or_split --source-path A --save-path B [--split-count N]
[--copy]``. Merges the ``rank_*`` folders of A, or splits off its first N trajectories; moves unless told to copy.
Ranks come in the order of their names, as upstream has it; ``sharpwave merge`` takes them by number."""

from __future__ import annotations

import argparse
import sys

from sharpwave.errors import SharpwaveError
from sharpwave.trajectories.ranks import merge, split


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sharpwave.compat.rlinf.merge_or_split", description=__doc__)
    parser.add_argument("--source-path", default=".")
    parser.add_argument("--save-path", required=True)
    parser.add_argument("--split-count", type=int)
    parser.add_argument("--copy", action="store_true", help="leave the source as it is")
    parser.add_argument("--allow-pickle", action="store_true", help="trust pkl files")
    options = parser.parse_args()
    how = {"copy": options.copy, "allow_pickle": options.allow_pickle, "legacy": True}
    try:
        if options.split_count is None:
            plan = merge(options.source_path, options.save_path, order="string", **how)
        else:
            plan = split(options.source_path, options.save_path, options.split_count, **how)
    except (SharpwaveError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{len(plan.index.entries)} trajectories in {options.save_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
