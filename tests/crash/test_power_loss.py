"""The machine loses power: rows whose bytes did not reach the disk are found by their checksums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from fuzz import layout
from patience import HANG_S

import sharpwave as sw

POWER_LOSS = """
import os, sys, numpy as np, sharpwave as sw
buffer = sw.ReplayBuffer(200, obs_shape=(4,), next_obs="derived", sampler=sw.Prioritized(), storage=sys.argv[1],
                         writers=2, seed=0)
for i in range(100): buffer.add(np.full(4, i), 0.0, float(i), np.full(4, i + 1), False)
os._exit(0)
"""


def test_row_lost_by_a_power_failure_takes_only_its_neighbours_along(tmp_path: Path) -> None:
    path = tmp_path / "live.sw"
    subprocess.run([sys.executable, "-c", POWER_LOSS, f"file://{path}"], check=True, timeout=2 * HANG_S)
    whole = bytearray(path.read_bytes())
    regions = layout.regions_of(bytes(whole))
    whole[regions["rows"].offset + 10 * layout.field(bytes(whole), "row_bytes") + 12] ^= 1
    system = next(span for span in layout.COUNTERS if span.name == "system")
    boot_id = regions["counters"].offset + system.offset + 8
    assert whole[boot_id + 8 : boot_id + 9] == b"-"
    whole[boot_id] ^= 1  # the machine was started again: only checksums can be trusted
    path.write_bytes(whole)
    buffer = sw.open(f"file://{path}")
    # Row 10 is lost, and with it the next observation of row 9.
    assert buffer.stats()["rows_lost"] == 2
    held = np.concatenate([batch["reward"] for batch in buffer.rows()]).astype(int).tolist()
    assert held == [*range(9), *range(11, 100)]
    assert len(buffer) == 98
    assert sorted(set(buffer.sample(2000)["reward"].astype(int).tolist())) == held
    buffer.close()
