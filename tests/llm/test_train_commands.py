"""``sharpwave train`` and its sisters: what they print, and how they fail."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from patience import HANG_S, until
from run_sweep import SMALL
from typer.testing import CliRunner

from sharpwave.errors import NotReady, SchemaError
from sharpwave.llm.evaluation import Evaluation
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.log import EVENTS, STEPS, read_lines
from sharpwave.llm.run_folder import RunFolder, write_whole
from sharpwave.llm.run_learner import RunLearner
from sharpwave.tools import cli, train_console, train_process

TABLED = ("task_options", "model", "learner", "evaluation")
CHANGES = [f"{name}={json.dumps(SMALL[name])}" for name in SMALL if name not in ("task", "epochs", *TABLED)]
TABLES = [f"{name}.{key}={value}" for name in TABLED[:3] for key, value in SMALL[name].items()]
TINY = [*CHANGES, *TABLES, "evaluation.every=2", "evaluation.goal=none"]


def call(*arguments):
    torch.set_num_threads(1)
    return CliRunner().invoke(cli.build_app(), [str(one) for one in arguments])


def assert_refused_unchanged(out, changes, said):
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    told = call("resume", out, *changes)
    assert isinstance(told.exception, SchemaError)
    assert str(told.exception) == said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_train_status_evaluate_and_resume(tmp_path):
    out = tmp_path / "run"
    told = call("train", "sort", *TINY, "steps=10", "--out", out)
    assert told.exit_code == 0, told.output
    assert "held out" in told.output  # the table's head, and a line at step 10
    assert any(line.split()[:1] == ["10"] for line in told.output.splitlines())
    assert "reward curve:" in told.output
    assert (out / "reward.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((out / "timeline.json").read_text())["traceEvents"]
    said = json.loads(call("status", out, "--json").output)
    assert (said["is_driven"], said["step"], said["trained"]) == (False, 10, 40)
    assert {"held_out", "reward", "entropy", "clip_share"} <= said.keys()
    assert "does not run; go on with: sharpwave resume" in call("status", out).output
    done = "All 10 steps are made; resume with steps=20 trains on."
    assert done in call("status", out).output
    assert_refused_unchanged(out, [], f"resume: {done}")
    assert_refused_unchanged(out, ["steps=9"], "resume: steps=9, and 10 are made; resume with steps=20 trains on.")
    assert "of 4 held-out items, 0 failed" in call("evaluate", out).output
    shown = call("evaluate", out, "--show", 2).output.splitlines()
    assert len(shown) == 3
    assert re.fullmatch(r"0: '\d\d>' -> '.*', reward [\d.]+", shown[0])
    told = call("resume", out, "steps=12")
    assert told.exit_code == 0, told.output
    assert RunFolder(out).cut().step == 12
    keys = [key for line in read_lines(out / "logs" / STEPS) for key in line["keys"]]
    assert len(set(keys)) == len(keys) == 48


def test_a_goal_that_is_not_reached_is_exit_code_3(tmp_path):
    told = call("train", "sort", *TINY, "steps=1", "evaluation.goal=2.0", "--out", tmp_path / "run")
    assert told.exit_code == 3
    assert "goal 2: not reached" in told.output


@pytest.mark.parametrize("processes", [[], ["--processes"]])
def test_a_run_that_has_reached_its_goal_is_resumed_with_another_one_only(tmp_path, processes):
    out = tmp_path / "run"
    more = ["steps=1000", "evaluation.goal=0.0", "learner.kl=0", *processes]
    told = call("train", "sort", *TINY, *more, "--out", out)
    assert told.exit_code == 0
    assert "The goal 0 is reached." in told.output
    assert "stopped" not in told.output
    said = "The goal 0 is reached; resume with evaluation.goal=none trains on."
    assert said in call("status", out).output
    assert RunFolder(out).status()["explain"] == "The run is over. The goal 0 is reached."
    assert_refused_unchanged(out, [], f"resume: {said}")
    step = RunFolder(out).cut().step + 1
    told = call("resume", out, "evaluation.goal=none", f"steps={step}", *processes)
    assert told.exit_code == 0
    assert f"All {step} steps are made." in told.output
    assert RunFolder(out).cut().step == step
    assert RunFolder(out).status()["explain"] == f"The run is over. All {step} steps are made."


def test_a_run_that_fails_leaves_its_reward_curve(tmp_path):
    settings = [change for change in TINY if not change.startswith("task_options")]
    told = call("train", "failing_tasks:answers_fail_after_fifty", *settings, "epochs=none", "--out", tmp_path / "run")
    assert isinstance(told.exception, NotReady)
    assert "nothing was trained" in str(told.exception)
    assert (tmp_path / "run" / "reward.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("processes", [[], ["--processes"]])
def test_status_says_why_a_run_has_failed_until_it_goes_on(tmp_path, processes):
    settings = [change for change in TINY if not change.startswith("task_options")]
    out = tmp_path / "run"
    more = ["epochs=none", "evaluation.every=0", "learner.kl=0", "steps=2"]
    told = call("train", "failing_tasks:no_item_works", *settings, *more, *processes, "--out", out)
    assert isinstance(told.exception, NotReady)
    said = f"The run failed: NotReady: {told.exception}"
    assert "nothing was trained" in said
    assert call("status", out).output.splitlines()[-1] == f"  {said}"
    assert json.loads(call("status", out, "--json").output)["why"] == said
    write_whole(out / "experiment.json", {**RunFolder(out).experiment().to_json(), "task": "failing_tasks:works"})
    assert call("resume", out, *processes).exit_code == 0
    said = "All 2 steps are made; resume with steps=4 trains on."
    assert json.loads(call("status", out, "--json").output)["why"] == said
    assert call("resume", out, "steps=3", *processes).exit_code == 0


def test_status_says_which_error_of_a_part_ended_the_run(tmp_path, monkeypatch):
    def save(self, cut):
        raise KeyError("no such thing")

    monkeypatch.setattr(RunLearner, "save_now", save)
    told = call("train", "sort", *TINY, "steps=2", "--out", tmp_path / "run")
    assert isinstance(told.exception, KeyError)
    assert call("status", tmp_path / "run").output.splitlines()[-1] == "  The run failed: KeyError: 'no such thing'"


def test_a_run_that_has_solved_all_its_items_says_so(tmp_path):
    settings = [change for change in TINY if not change.startswith("task_options")]
    task = "failing_tasks:solved_after_forty_answers"
    more = ["epochs=1000", "skip_no_signal=true", "learner.kl=0", "evaluation.goal=2.0"]
    told = call("train", task, *settings, *more, "--out", tmp_path / "run")
    assert told.exit_code == 3, told.output
    said = (
        "All answers to each item have equal rewards, the last ones 1: nothing is left to learn from. Give other items"
    )
    assert said in told.output
    assert "reward curve:" in told.output
    assert call("status", tmp_path / "run").output.splitlines()[-1].startswith(f"  {said}")
    assert json.loads(call("status", tmp_path / "run", "--json").output)["why"].startswith(said)


def test_held_out_items_that_fail_are_told_with_the_reason(tmp_path):
    tables = [change for change in TINY if not change.startswith("task_options")]
    told = call("train", "failing_tasks:held_out_items_fail", *tables, "steps=2", "--out", tmp_path / "run")
    assert told.exit_code == 0
    said = "2 of 2 episodes of held-out items failed and count as 0, the last by KeyError: 'nothing here' ("
    assert told.output.count(said) == 1
    told = call("evaluate", tmp_path / "run", "--show", 9).output
    assert "2 failed, the last by KeyError: 'nothing here' (" in told
    assert told.startswith("0: failed by KeyError: 'nothing here' (")


def test_evaluate_draws_answers_at_the_temperature_of_the_run_s_evaluation(finished, monkeypatch):
    asked = []

    class Watched(Evaluation):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            asked.append(self._sampling.temperature)

    monkeypatch.setattr(train_process, "Evaluation", Watched)
    for temperature in (0.0, 0.5):
        settings = {**RunFolder(finished).experiment().to_json(), "evaluation": {"temperature": temperature}}
        monkeypatch.setattr(RunFolder, "experiment", lambda self, made=settings: Experiment.read(made))
        assert call("evaluate", finished).exit_code == 0
    assert asked == [0.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "sorts"],
            "expected a file run.toml, or a task: sort, sums, guess, math, or module:function; got 'sorts'",
        ),
        (["train", "nothing.at_all:make"], "task 'nothing.at_all:make': No module named 'nothing'; is its folder in"),
        (["train", "sort", "max_stalenes=0"], "unknown key 'max_stalenes'; did you mean 'max_staleness'?"),
        (["train", "sort", "learner.clp=0.1"], "unknown key 'clp'; did you mean 'learner.clip'?"),
        (["train", "sort", "task_options.digit=3"], "did you mean 'digits'?"),
        (["train", "sort", "batch=0"], "batch: expected a whole number, at least 1, got 0"),
        (["train", "sort", "slots=0"], "slots: expected a whole number, at least 1, got 0"),
        (["train", "sort", "epochs=1", "batch=900"], "batch: expected at most 800, the items of all epochs, got 900"),
        (["train", "sort", "learner.row_tokens=4"], "row_tokens: expected at least 8, the longest episode of the task"),
        (["train", "sort", "model.max_position_embeddings=4"], "max_position_embeddings: expected at least 8"),
        (["train", "sort", "sampling.max_tokens=500"], "sampling: max_tokens: expected less than 8"),
        (["train", "sort", "sampling.stop_ids=3"], "Sampling: stop_ids=3, expected a list of token ids"),
        (["train", "sort", "model.path=nowhere"], "nowhere"),
        (
            ["train", "failing_tasks:raises"],
            "task 'failing_tasks:raises' cannot be loaded: RuntimeError: no data here (",
        ),
        (["train", "failing_tasks:returns_nothing"], "expected a function that returns a Task, got None"),
        (["train", "sort", "group=1"], "group: expected at least 2, got 1: objective 'grpo' compares the answers"),
        (["train", "sort", "model.hidden_size=1000000000"], "the memory is too small for it; lower hidden_size"),
        (["train", "none.toml"], "none.toml cannot be read"),
        (["resume", "nowhere"], "there is no run; start one with: sharpwave train"),
        (["status", "nowhere"], "there is no run"),
        (["stop", "nowhere"], "there is no run"),
    ],
)
def test_errors_come_before_anything_is_made(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    told = call(*arguments)
    assert said in str(told.exception)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    told = call("train", "sort", *TINY, "--out", tmp_path)
    assert str(told.exception) == f"{tmp_path} has files and no run; give another --out, or empty the folder"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_death_is_told_with_what_follows(capsys):
    console = train_console.Console(Experiment(steps=1))
    console.show("died", {"who": "learner", "again": True})
    console.show("died", {"who": "learner", "again": True, "why": "KeyError: 'x'"})
    console.show("died", {"who": "learner", "again": False, "why": "KeyError: 'x'"})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "learner died and is started again",
        "learner died and is started again: KeyError: 'x'",
        "learner died: KeyError: 'x'",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_before_anything_is_made(tmp_path):
    told = call("train", "sort", "learner.device=cuda", "--out", tmp_path / "run")
    assert 'torch finds no GPU; give device="cpu"' in str(told.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.hidden_size=32", "is a checkpoint of another model: its hidden_size is 16, the learner's model has 32"),
        ("task_options.count=30", "the checkpoint is a position in 60 items"),
        ("learner.objective=ppo", "has the learners policy; expected policy, values"),
        ("learner.row_tokens=2", "row_tokens: expected at least 6"),
    ],
)
def test_resume_with_settings_that_do_not_fit_the_checkpoint_leaves_the_run_as_it_was(finished, change, said):
    before = (finished / "experiment.json").read_bytes()
    told = call("resume", finished, "steps=3", change)
    assert said in str(told.exception)
    if "expected at least" not in said:
        assert "A run keeps its model, task, seed and learner.objective" in str(told.exception)
    assert (finished / "experiment.json").read_bytes() == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert call("train", "sort", *TINY, "steps=2", "--out", out).exit_code == 0
    return out


def scores(events):
    return [line for line in read_lines(events) if line["event"] == "score"]


@pytest.mark.parametrize("processes", [[], ["--processes"]])
def test_stop_ends_a_run_of_another_process_with_a_checkpoint(tmp_path, processes):
    out = tmp_path / "run"
    settings = [*TINY, "steps=1000000", "evaluation.every=1000000", "learner.kl=0", *processes]
    command = [sys.executable, "-m", "sharpwave", "train", "sort", *settings, "--out", str(out)]
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        running = subprocess.Popen(
            command, stdout=file, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
    try:
        folder = RunFolder(out)
        until(lambda: running.poll() is not None or bool(read_lines(folder.logs / STEPS)), "the first step")
        until(lambda: running.poll() is not None or bool(folder.status()), "a status")
        events = folder.logs / EVENTS
        until(lambda: running.poll() is not None or bool(scores(events)), "a score")
        assert "runs" in call("status", out).output
        told = call("train", "sort", "--out", out)
        assert "has a run already" in str(told.exception)
        told = call("stop", out, "--timeout", HANG_S)
        assert told.exit_code == 0, told.exception
        _, errors = running.communicate(timeout=HANG_S)
        assert (running.returncode, errors) == (0, "stopping after this step; Ctrl-C again ends at once\n")
    finally:
        if running.poll() is None:
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
    assert folder.cut().step == read_lines(folder.logs / STEPS)[-1]["step"]
    scored, last = scores(events)[-1]["version"], folder.weights().latest().version
    said = printed.read_text()
    assert scored < last
    assert f"mean reward of held-out items (version {scored}; the last is {last})" in said
    assert f"stopped; go on with: sharpwave resume {out}" in said
    assert folder.status()["explain"] == "The run is over. It was stopped."
    assert folder.status()["step"] == folder.cut().step
    assert "no process drives" in str(call("stop", out).exception)
