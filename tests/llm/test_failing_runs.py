"""Whole runs that meet bad input or a full disk: the run goes on without the item, or ends with words that help."""

import asyncio
import errno
import os
import subprocess
import sys

import pytest
import torch
from patience import HANG_S
from run_sweep import SMALL

from sharpwave.errors import NotReady, StorageError
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.full_disk import is_full, tell_full_disk
from sharpwave.llm.launchers.keeper import Keeper
from sharpwave.llm.log import EVENTS, STEPS, RunLog, read_lines
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder, write_whole

TINY = {**SMALL, "epochs": 1, "tries": 1, "task_options": {}, "evaluation": {"every": 0}}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(path, task, **settings):
    return RunFolder.create(path, Experiment.read({**TINY, "task": f"failing_tasks:{task}", **settings}))


def run(folder, processes=False):
    if processes:
        return Keeper(folder).run()
    log = RunLog(folder.logs)
    try:
        return asyncio.run(LocalRun(folder, log).run())
    finally:
        log.close()


# ---- agents and rewards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("every_tenth_item_raises", "KeyError: 'nothing here' (failing_tasks.py:"),
        ("every_tenth_reward_is_nan", "reward: expected a finite number, got nan"),
        ("every_tenth_reward_hangs", "the last by timeout: longer than timeout_s=0.5"),
    ],
)
def test_items_that_fail_are_left_out_and_counted(tmp_path, task, why):
    folder = make(tmp_path / "run", task)
    result = run(folder)
    assert (result.trained, result.rejected) == (18, 2)
    said = [line["why"] for line in read_lines(folder.logs / EVENTS) if line["event"] == "why"]
    assert len(said) == 2
    assert all(why in line for line in said)


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("no_item_works", "KeyError: 'nothing here' (failing_tasks.py:"),
        ("reward_is_missing", "reward reward_functions:nowhere cannot be imported in a process of its own"),
        ("prompts_are_too_long", "raise Task(context=)"),
        ("tokens_are_not_in_the_vocabulary", "expected 0 to 1; raise Task(vocabulary=) or give ids of the task's"),
        (
            "items_have_no_prompt",
            "SchemaError: single_turn(): the item has no key 'prompt', it has id, question; give prompt_key=",
        ),
    ],
)
def test_a_run_in_which_no_item_works_ends_with_the_reason(tmp_path, task, why, processes):
    if processes and task not in ("no_item_works", "prompts_are_too_long"):  # which clients of servers look for
        pytest.skip("agents and controller are the same")
    with pytest.raises(NotReady) as error:
        run(make(tmp_path / "run", task), processes)
    assert "epoch 0 is over and nothing was trained (0 no_signal, 20 rejected so far)" in str(error.value)
    assert "the last item was rejected because 1 tries failed" in str(error.value)
    assert why in str(error.value)


@pytest.mark.parametrize("processes", [False, True])
def test_a_run_that_has_solved_all_its_items_ends_in_order(tmp_path, processes):
    settings = {"epochs": 1_000, "skip_no_signal": True, "save_every": 100, "learner": {"row_tokens": 32, "rows": 2}}
    folder = make(tmp_path / "run", "solved_after_forty_answers", **settings)
    result = run(folder, processes)
    assert result.step > 0
    assert result.why == (
        "All answers to each item have equal rewards, the last ones 1: nothing is left to learn from. Give other "
        "items, a finer reward or skip_no_signal=False."
    )
    assert folder.cut().step == result.step == len(read_lines(folder.logs / STEPS))
    events = read_lines(folder.logs / EVENTS)
    assert [line["why"] for line in events if line["event"] in ("exhausted", "end")] == [result.why] * 2
    write_whole(folder.path / "experiment.json", {**folder.experiment().to_json(), "task": "failing_tasks:solved"})
    again = run(folder, processes)  # is exhausted at once
    assert (again.step, again.trained, again.why) == (result.step, result.trained, result.why)


def test_a_process_that_fails_again_and_again_ends_the_run_with_its_words(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Experiment.read({**TINY, "task": "sort", "steps": 1}))
    run(folder)
    other = Experiment.read({**TINY, "task": "sort", "steps": 3, "model": {**SMALL["model"], "hidden_size": 32}})
    write_whole(folder.path / "experiment.json", other.to_json())
    with pytest.raises(NotReady) as error:
        run(folder, processes=True)
    assert "learner failed 3 times in a row, the last time by SchemaError: load()" in str(error.value)
    assert "is a checkpoint of another model: its hidden_size is 16, the learner's model has 32" in str(error.value)
    assert f"see {folder.logs / 'learner.txt'}" in str(error.value)
    died = [line for line in read_lines(folder.logs / EVENTS) if line["event"] == "died"]
    assert all("another model" in line["why"] for line in died if line["who"] == "learner")
    assert [line["again"] for line in died if line["who"] == "learner"] == [True, True, False]
    assert not list((folder.path / "processes").iterdir())


# ---- a full disk -----------------------------------------------------------------------------------------------------

RUN = """
import os, sys
from test_failing_runs import RunFolder, run, Experiment, StorageError, TINY, write_whole, read_lines, STEPS

os.chdir(sys.argv[1])
settings = {**TINY, "task": "sort", "epochs": 1_000_000}
folder = RunFolder.create("run", Experiment.read(settings))
filler = open("filler", "wb")
filler.write(bytes(1_500_000))  # the run has the rest
filler.flush()
processes = sys.argv[2] == "processes"
for _ in range(1 if processes else 2):  # the second time it is still full
    try:
        run(folder, processes)
    except StorageError as error:
        print(error)
step = folder.cut().step
made = len(read_lines(folder.logs / STEPS))
os.truncate("filler", 0)
write_whole(folder.path / "experiment.json", Experiment.read({**settings, "steps": step + 5}).to_json())
print(step, made, run(folder, processes).step, len(read_lines(folder.logs / STEPS)))
"""


def small_disk(over, kib):
    """Starts a command that sees a file system of so many KiB at a folder, and nobody else does."""
    mount = f'mount -t tmpfs -o size={kib}k tmpfs {over} && exec "$@"'
    around = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "sh", "-c", mount, "sh"]
    try:
        done = subprocess.run([*around, "true"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if done.returncode:
        pytest.skip(f"a file system of our own may not be mounted here: {done.stderr.strip()}")
    return around


@pytest.mark.parametrize("kind", ["one process", "processes"])
def test_a_full_disk_ends_the_run_which_goes_on_after_room_was_made(tmp_path, kind):
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [*small_disk(tmp_path, 2000), sys.executable, "-c", RUN, str(tmp_path), kind]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert done.returncode == 0, done.stderr
    *told, counts = done.stdout.splitlines()
    assert len(told) == (1 if kind == "processes" else 2)
    for line in told:
        assert line.startswith("run: the disk is full (")
        assert line.endswith("Make room, then go on with: sharpwave resume run")
    saved, made, step, lines = map(int, counts.split())
    assert step == saved + 5
    assert lines >= made + 5 > 5  # the lines of before are read, and those after a half written one


def test_errors_of_a_full_disk_are_recognised_wherever_they_come_from(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert is_full(full)
    assert is_full(StorageError(f"save(): folder cannot be written: {full}"))
    assert not is_full(OSError(errno.EACCES, os.strerror(errno.EACCES)))

    def fail_and_fail_again():
        try:
            raise full
        finally:
            raise RuntimeError("while it cleaned up")

    with pytest.raises(StorageError, match="the disk is full") as error, tell_full_disk(tmp_path):
        fail_and_fail_again()
    assert str(tmp_path) in str(error.value)
    with pytest.raises(KeyError), tell_full_disk(tmp_path):
        raise KeyError("another error")


def test_a_line_that_was_left_half_written_costs_no_other_line(tmp_path):
    (tmp_path / STEPS).write_text('{"step": 1}\n{"step": 2, "rew')
    log = RunLog(tmp_path)
    log.step({"step": 2})
    log.close()
    assert [line["step"] for line in read_lines(tmp_path / STEPS)] == [1, 2]
