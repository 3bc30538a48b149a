"""AReaL: its own tests of what ``sharpwave.compat.areal`` replaces, and its executor on its buffer and on ours.

Takes a checkout of a revision that still has the package ``realhf``: the parent of 7f03b4b56, which removed it. No GPU
and no Ray is needed; packages that are imported and not used are stood in for (``areal_swap.UNUSED``). With
SHARPWAVE_ORIGINALS=upstream in the environment the tests run on AReaL's own classes, for comparison.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .outcome import Outcome, read_junit

# The first three are the tests of the classes that we replace. The other two run AReaL's data sets and its stream data
# set over them. What else is under realhf/tests needs GPUs, models at a path of its authors, or none of our names.
FILES = (
    "data/test_sequence_gather_split.py",
    "data/test_dfg.py",
    "system/test_push_pull_stream.py",
    "system/test_stream_dataset.py",
    "data/test_load_data.py",
)
ROOT = Path(__file__).parents[2]
OURS = ["sharpwave.compat.areal.buffer", "sharpwave.compat.areal.data", "sharpwave.compat.areal.graph"]
THEIRS = ["realhf.system.buffer", "realhf.api.core.data_api", "realhf.api.core.dfg"]


def run(checkout: Path) -> list[Outcome]:
    if not (checkout / "realhf" / "system" / "buffer.py").exists():
        return [Outcome("realhf", 0, 1, notes=[f"{checkout} has no realhf/: check out the parent of 7f03b4b56"])]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = [_test(checkout, name, Path(folder)) for name in FILES]
        return [*outcomes, _steps(checkout, Path(folder))]


def _python(checkout: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    given = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(checkout), *map(os.path.abspath, given)]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout stays as it is
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the tests of one file need each other's imports, in their order
        "SHARPWAVE_STREAM_ROOT": str(folder / "streams"),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:  # AReaL's own stream threads can keep a process from ending
        return subprocess.CompletedProcess(command, 124, "", "the process did not end in 300 s")


def _test(checkout: Path, name: str, folder: Path) -> Outcome:
    report = folder / (Path(name).stem + ".xml")
    path = checkout / "realhf" / "tests" / name
    done = _python(
        checkout, folder, "-m", "pytest", "-p", "tests.originals.areal_swap", "-p", "no:cacheprovider", "-q",
        "--rootdir", str(checkout), "-c", os.devnull, "--junitxml", str(report), str(path),
    )  # fmt: skip
    outcome = read_junit(f"realhf/tests/{name}", report)
    if done.returncode not in (0, 1):
        outcome.failed = outcome.failed or 1
        outcome.notes.append((done.stderr or done.stdout)[-2000:])
    return outcome


def _steps(checkout: Path, folder: Path) -> Outcome:
    outcome = Outcome("FunctionExecutor over 12 steps, batches equal", 0, 0)
    records: list[Any] = []
    for which, classes in (("upstream", THEIRS), ("ours", OURS)):
        path = folder / f"{which}.json"
        done = _python(checkout, folder, "-m", "tests.originals.areal_steps", which, str(path))
        if done.returncode:
            return Outcome(outcome.file, 0, 12, notes=[f"{which}: {done.stderr[-2000:]}"])
        records.append(json.loads(path.read_text()))
        if records[-1]["classes"] != classes:
            return Outcome(outcome.file, 0, 12, notes=[f"{which}: ran on {records[-1]['classes']}"])
    theirs, ours = records
    for step, (one, two) in enumerate(zip(theirs["steps"], ours["steps"], strict=True)):
        batches = [[batch for batch in record["batches"] if batch["step"] == step] for record in records]
        if batches[0] and batches[0] == batches[1] and one == two:
            outcome.passed += 1
        else:
            outcome.failed += 1
            outcome.notes.append(f"step {step}: the batches or the executor's state differ")
    for what in ("requests", "shares"):
        if sorted(map(str, theirs[what])) != sorted(map(str, ours[what])):
            outcome.failed += 1
            outcome.notes.append(f"the workers' {what} differ")
    outcome.notes.append(f"{len(ours['batches'])} batches: slots, ids, lengths, dtypes and metadata compared")
    return outcome
