"""Servers and clients that are killed at random instants: what was acknowledged is there once, and no call is late.

    python tests/service/sweep.py --rounds 1000 --seed 1

Each round kills (SIGKILL) the server, a client or both, and starts them again; the server goes on with what is on the
disk. Between the kills servers are told to end (SIGTERM). Some clients reach the server through a proxy that cuts and
delays their connections. The tables are of rows (`sweep_rows.py`), of sequences (`sweep_sequences.py`) and of
trajectories (`sweep_trajectories.py`), in turn. Clients add items with known contents and note in a file of their own
what was acknowledged.
Every 25 rounds the table is read: each acknowledged item is there exactly once, none is torn, those of a client are in
its order, leases have returned, and no call took longer than its timeout plus one second, not counting the time for
which the machine's load left the client without a processor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sweep_rows import RowTable
from sweep_sequences import SequenceTable
from sweep_table import LATEST, SweepTable, kills_of
from sweep_trajectories import TrajectoryTable

KINDS: tuple[type[SweepTable], ...] = RowTable, SequenceTable, RowTable, TrajectoryTable
ROUNDS_OF_A_TABLE = 25


def run(
    rounds: int,
    seed: int,
    tell: Any = lambda counts: None,
    kinds: tuple[type[SweepTable], ...] = KINDS,
    rounds_of_a_table: int = ROUNDS_OF_A_TABLE,
) -> Counter[str]:
    """Runs so many kills; returns what was counted, or raises AssertionError with the seed."""
    total: Counter[str] = Counter()
    base = os.environ.get("SHARPWAVE_SWEEP_FOLDER")
    each = itertools.cycle(kinds)
    while (done := kills_of(total)) < rounds:
        with tempfile.TemporaryDirectory(prefix="sharpwave-sweep-", dir=base) as folder:
            table = next(each)(Path(folder), seed + done)
            try:
                while table.kills < min(rounds_of_a_table, rounds - done):
                    table.round()
                time.sleep(0.5)  # so that what came after the last kill is looked at as well
                table.check_clients()
                table.end()
                table.check()
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed + done}, {table.kind}, after {sum(table.counts.values())} events: {error}"
                ) from error
            finally:
                table.end()
            latest = {name: max(total[name], table.counts.pop(name, 0)) for name in LATEST}
            total.update(table.counts)
            total.update({name: latest[name] - total[name] for name in LATEST})
            tell(total)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1_000, help="how many kills")
    parser.add_argument("--kind", choices=sorted({kind.kind for kind in KINDS}), help="of tables; all, unless told")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    begun = time.monotonic()
    kinds = tuple(kind for kind in KINDS if chosen.kind in (None, kind.kind))
    counts = run(chosen.rounds, chosen.seed, lambda total: print(json.dumps(total), flush=True), kinds)
    print(f"{chosen.rounds} kills in {time.monotonic() - begun:.0f} s: {json.dumps(counts, indent=2)}")


if __name__ == "__main__":
    sys.exit(main())
