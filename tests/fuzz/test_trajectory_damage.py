"""Damaged folders of trajectories are right or told: never wrong rows, never a silent loss, never a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

COUNT = int(os.environ.get("SHARPWAVE_DAMAGED", "5000" if os.environ.get("SHARPWAVE_SOAK") else "60"))


def test_damaged_folders_are_right_or_told(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("trajectory_damage.py"))
    seen = Counter[str]()
    for first in range(0, COUNT, 500):
        folder = tmp_path / str(first)
        folder.mkdir()
        count = min(500, COUNT - first)
        command = [sys.executable, program, str(folder), str(first), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1_200)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
        seen.update(json.loads(done.stdout))
    print(dict(seen))
    assert seen.total() == COUNT
    assert seen["told"] > COUNT // 4
