"""What the benchmarks publish: nothing from a busy machine, and every line that somebody else wins."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MACHINE = {
    "cpu": "c",
    "cores": 2,
    "memory_gib": 8.0,
    "huge_pages": "madvise",
    "kernel": "6",
    "python": "3",
    "date": "2026-01-01",
}


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from harness import machine, program

    monkeypatch.setattr(program, "tune_allocator", lambda: None)
    return machine, program


def options(**given):
    return argparse.Namespace(**{"quick": False, "results": None, **given})


def times(**least):
    return {label: {"min_ns": ns, "median_ns": ns, "bursts": 1} for label, ns in least.items()}


def contest(load, **least):
    workload = {"title": "t", "row_bytes": 1, "capacity": 1, "contenders": {}, "cases": {"add_1": times(**least)}}
    machine = {**MACHINE, "load_at_start": load}
    return {"machine": machine, "settings": {"quick": False}, "workloads": {"w1": workload}, "left_out": []}


def test_a_run_on_a_busy_machine_is_refused_before_anything_is_measured(harness, monkeypatch):
    machine, program = harness
    monkeypatch.setattr(machine, "settled_load", lambda: 0.9)
    with pytest.raises(SystemExit, match="nothing is published from a busy machine"):
        program.Run(options())


def test_a_run_on_a_busy_machine_goes_elsewhere_and_says_so(harness, monkeypatch, tmp_path):
    machine, program = harness
    monkeypatch.setattr(machine, "busy_cores", lambda: 0.9)
    program.Run(options(results=tmp_path)).save("x")
    assert json.loads((tmp_path / "x.json").read_text())["machine"]["load_at_start"] == 0.9


def test_a_quick_run_is_not_published(harness):
    with pytest.raises(SystemExit, match="a quick run is not published"):
        harness[1].Run(options(quick=True, results=BENCHMARKS / "results"))


def test_the_load_is_that_of_running_programs(harness):
    machine, _ = harness
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert machine.busy_cores(1.0) > machine.MOST_LOAD
    finally:
        loop.kill()
        loop.wait()


def test_the_report_refuses_results_of_a_busy_machine_and_leaves_the_documents_alone(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "replay.json").write_text(json.dumps(contest(0.9, sharpwave=1.0, rlox=2.0)))
    before = (ROOT / "README.md").read_text()
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "report.py", "--results", tmp_path], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "not published, measured at a load above 0.5: replay (0.90)" in ran.stderr
    assert (ROOT / "README.md").read_text() == before


def test_a_figure_within_a_line_is_filled_in(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    text = "An add takes <!-- bench:a -->old<!-- /bench:a --> more.\n<!-- bench:b -->\nold\n<!-- /bench:b -->\n"
    filled, missing = report.fill_in(text, {"a": "1.3x", "b": "| 1 |"})
    assert filled == text.replace("-->old<", "-->1.3x<").replace("\nold\n", "\n| 1 |\n")
    assert not missing


def test_everybody_who_is_faster_is_listed(harness):
    import tables

    documents = {
        "replay": contest(
            0.0, **{"sharpwave": 3.0, "sharpwave/keyword": 4.0, "rlox": 1.0, "numpy_ring": 2.0, "sb3": 9.0}
        )
    }
    (line,) = tables.wins(documents, []).splitlines()
    assert line == (
        "- add 1 row, small rows: Sharpwave 3.00 ns; faster: rlox 1.00 ns (3.00x), NumPy ring 2.00 ns (1.50x)."
    )


def test_who_needs_less_memory_is_listed(harness):
    import tables

    point = {"rows": 10, "raw_bytes": 100, "beyond_raw": 0.0}
    curves = {"sharpwave": [{**point, "resident_bytes": 110}], "cpprb": [{**point, "resident_bytes": 100}]}
    documents = {"memory": {"workloads": {"w1": curves}, "left_out": []}}
    (line,) = tables.wins(documents, []).splitlines()
    assert line == "- memory, small rows, 10: Sharpwave 11.0 B a row; less: cpprb 10.0 B (1.10x)."


def test_yardsticks_and_our_own_other_forms_win_nothing(harness):
    import tables

    documents = {"replay": contest(0.0, **{"sharpwave": 3.0, "c_limit": 1.0, "sharpwave@uniform": 1.0})}
    assert tables.wins(documents, []) == "- In this run nobody was faster in any case, and every goal held."
