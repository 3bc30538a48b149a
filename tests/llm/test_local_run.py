"""A run in one process: it trains, stops, goes on, and tells what it did."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from patience import HANG_S

from sharpwave.errors import NotReady, SchemaError, StorageError
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.log import EVENTS, SPANS, STEPS, RunLog, read_lines
from sharpwave.llm.model import load_model
from sharpwave.llm.parts import LearnerSettings, make_model
from sharpwave.llm.presets import preset
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder
from sharpwave.llm.run_learner import RunLearner
from sharpwave.llm.timeline import idle_shares, write_timeline

TINY = {
    "batch": 4, "group": 4, "concurrent": 4, "slots": 16, "save_every": 2, "steps": 5, "skip_no_signal": False,
    "task_options": {"digits": 2, "count": 60, "held_out": 4},
    "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    "learner": {"row_tokens": 32, "rows": 4}, "evaluation": {"every": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def run(folder, **settings):
    log = RunLog(folder.logs)
    try:
        return asyncio.run(LocalRun(folder, log).run())
    finally:
        log.close()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_trains_each_item_once_within_its_staleness(tmp_path, max_staleness):
    folder = RunFolder.create(tmp_path / "run", Experiment.read({**TINY, "max_staleness": max_staleness}))
    began = time.time()
    result = run(folder)
    assert (result.step, result.trained, result.reached) == (5, 20, True)
    lines = read_lines(folder.logs / STEPS)
    assert json.dumps([line["step"] for line in lines]) == "[1, 2, 3, 4, 5]"
    keys = [key for line in lines for key in line["keys"]]
    assert len(set(keys)) == 20
    for line in lines:  # an answer that others overtook may be older: its tokens are masked, and counted
        late = sum(count for lag, count in line["staleness_histogram"].items() if int(lag) > max_staleness)
        assert line["stale_tokens"] == late
        assert sum(line["staleness_histogram"].values()) == line["tokens_made"] == line["learned_tokens"]
        assert {"reward", "tokens_per_s", "waited_s"} <= line.keys()
        if late < line["learned_tokens"]:  # else there was nothing to learn from
            assert {"entropy", "clip_share", "importance_weight"} <= line.keys()
    assert result.reward is not None  # the newest version was scored at the end
    scores = [line for line in read_lines(folder.logs / EVENTS) if line["event"] == "score"]
    spans = [line for line in read_lines(folder.logs / SPANS) if line["who"] == "evaluation"]
    for score, span in zip(scores, [one for one in spans if one["what"].startswith("version")], strict=True):
        assert began < score["began_s"] < score["ended_s"] < score["s"] + 1e-3  # which is rounded
        assert span["s"] == pytest.approx(score["began_s"], abs=1e-3)
    kept = json.loads((folder.evaluation / "best" / "score.json").read_text())
    assert kept["began_s"] in [score["began_s"] for score in scores]
    assert (folder.evaluation / "best" / "config.json").exists()
    assert folder.status()["explain"]
    trace = json.loads(folder.timeline.read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert rows == {"learner", "generator-0", "evaluation"}
    assert {event["ph"] for event in trace} >= {"M", "X", "b", "e", "C"}
    assert all(0 <= share <= 1 for share in result.idle.values())


def test_kl_holds_the_policy_near_the_model_of_the_beginning(tmp_path):
    def drift(kl):
        learner = {**TINY["learner"], "learning_rate": 5e-3, "kl": kl}
        settings = {**TINY, "steps": 12, "max_staleness": 1, "learner": learner, "evaluation": {"every": 0}}
        folder = RunFolder.create(tmp_path / f"kl-{kl}", Experiment.read(settings))
        run(folder)
        lines = read_lines(folder.logs / STEPS)
        busy = {line["who"] for line in read_lines(folder.logs / SPANS)}
        assert ("reference" in busy) == ("kl" in lines[0]) == (kl > 0)
        experiment = folder.experiment()
        first = make_model(experiment, experiment.load_task()).state_dict()
        last = load_model(folder.weights().latest().path).state_dict()
        return sum(float((last[name] - first[name]).square().sum()) for name in first), lines

    free, _ = drift(0.0)
    held, lines = drift(100.0)
    assert held < free
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-5)  # the policy still is the reference
    assert lines[-1]["kl"] > 0


def test_synchronous_runs_of_one_seed_are_equal(tmp_path):
    """Every draw has a seed of its own, and without staleness each batch is made by the weights before it."""

    def rewards(name):
        settings = {**TINY, "max_staleness": 0, "steps": 3, "evaluation": {"every": 0}}
        folder = RunFolder.create(tmp_path / name, Experiment.read(settings))
        run(folder)
        lines = read_lines(folder.logs / STEPS)
        return [(sorted(line["keys"]), line["reward"]) for line in lines], folder.weights().latest().read()

    (first, weights), (second, again) = rewards("a"), rewards("b")
    assert first == second
    assert all(torch.allclose(weights[name], again[name], atol=1e-5) for name in weights)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    settings = {**TINY, "steps": None, "epochs": 1, "task_options": {"digits": 2, "count": 30, "held_out": 4}}
    experiment = Experiment.read({**settings, "steps": 3})
    folder = RunFolder.create(tmp_path / "run", experiment)
    assert run(folder).trained == 12
    version = folder.weights().latest().version
    (folder.path / "experiment.json").write_text(json.dumps(Experiment.read(settings).to_json()))
    result = run(folder)
    assert result.trained == 30
    keys = [key for line in read_lines(folder.logs / STEPS) for key in line["keys"]]
    assert sorted(keys) == sorted(f"0/{name}" for name in experiment.load_task().items.ids if f"0/{name}" in keys)
    assert len(keys) == 30
    assert folder.weights().latest().version > version


def test_a_run_that_is_stopped_saves_and_ends(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Experiment.read({**TINY, "steps": 1000}))
    log = RunLog(folder.logs)

    async def main():
        local = LocalRun(folder, log)
        running = asyncio.ensure_future(local.run())
        while not log.recent and not running.done():
            await asyncio.sleep(0.01)
        local.stop()
        return await running

    result = asyncio.run(main())
    log.close()
    assert 0 < result.step < 1000
    assert folder.cut().step == result.step


def test_a_goal_ends_the_run(tmp_path):
    settings = {**TINY, "steps": 1000, "evaluation": {"every": 1, "goal": 0.0}}
    result = run(RunFolder.create(tmp_path / "run", Experiment.read(settings)))
    assert result.reached
    assert result.step < 1000


def test_an_error_of_a_part_ends_the_run_with_its_words(tmp_path):
    """An agent worker that cannot hand in ends everything, and leaves no thread behind."""
    folder = RunFolder.create(tmp_path / "run", Experiment.read({**TINY, "steps": 1000, "max_losses": 0}))

    async def main():
        local = LocalRun(folder, RunLog(folder.logs))
        running = asyncio.ensure_future(local.run())
        while local._controller is None and not running.done():
            await asyncio.sleep(0.01)
        local._controller.fail("the disk is full")
        with pytest.raises(NotReady, match="the disk is full"):
            await running

    asyncio.run(main())


def test_a_learner_whose_step_takes_longer_than_owner_timeout_s_is_not_lost(tmp_path, monkeypatch):
    """Each loss of it would count as progress, and the watchdog would not report one that stands still."""
    settings = {**TINY, "evaluation": {"every": 0}, "owner_timeout_s": 1.0, "watchdog_s": 7.0}
    folder, ends = RunFolder.create(tmp_path / "run", Experiment.read(settings)), threading.Event()
    monkeypatch.setattr(RunLearner, "train_now", lambda *_: ends.wait(HANG_S))

    async def main():
        try:
            with pytest.raises(NotReady, match=r"nothing has moved for watchdog_s=7: .* the learner"):
                await asyncio.wait_for(LocalRun(folder, RunLog(folder.logs)).run(), HANG_S)
        finally:
            ends.set()

    asyncio.run(main())
    lost = [line["owner"] for line in read_lines(folder.logs / EVENTS) if line["event"] == "lose"]
    assert "learner" not in lost


def test_a_folder_has_one_run_and_one_driver(tmp_path):
    folder = RunFolder.create(tmp_path / "run", Experiment.read(TINY))
    with pytest.raises(SchemaError, match="has a run already; give another --out, or go on with: sharpwave resume"):
        RunFolder.create(tmp_path / "run", Experiment.read(TINY))
    assert not folder.is_driven
    folder.take()
    assert folder.is_driven
    with pytest.raises(NotReady, match="a process drives this run; end it with: sharpwave stop"):
        RunFolder(tmp_path / "run").take()
    folder.give_back()
    assert not folder.is_driven
    with pytest.raises(StorageError, match="there is no run; start one with: sharpwave train"):
        RunFolder(tmp_path / "none").experiment()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"learner": {"objective": "grop"}}, "objective: expected 'grpo' or 'ppo', got 'grop'"),
        ({"learner": {"learning_rate": -1.0}}, "learning_rate: expected a number"),
        ({"learner": {"device": "cuda"}}, 'torch finds no GPU; give device="cpu"'),
        ({"learner": {"device": "gpu"}}, "device: expected cpu, cuda or cuda:1, got 'gpu'"),
        ({"model": {"vocab_size": 3}}, "the model has 3 tokens, the task 'sort' needs 13"),
        ({"model": {"path": "x", "hidden_size": 3}}, "'hidden_size' is a size of a new model"),
    ],
)
def test_wrong_parts_name_the_key(given, said):
    if "GPU" in said and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    experiment = Experiment.read({**TINY, **given})
    with pytest.raises(SchemaError) as error:  # noqa: PT012 (one of the two says it)
        LearnerSettings.of(experiment)
        make_model(experiment, experiment.load_task())
    assert said in str(error.value)


def test_presets_are_experiments():
    for task in ("sort", "sums", "guess", "math"):
        experiment = Experiment.read(preset(task))
        assert LearnerSettings.of(experiment).row_tokens_for(experiment.load_task()) <= 256
    assert preset("sort")["evaluation"]["goal"] == 0.8
    with pytest.raises(SchemaError, match="did you mean 'sums'"):
        preset("sum")


def test_logs_of_a_killed_process_are_read(tmp_path):
    log = RunLog(tmp_path)
    log.step({"step": 1, "reward": 0.5})
    log("start", key="0/a", owner="x")
    with log.busy("learner", "train"):
        pass
    log.span("learner", "train", 1.0, 2.0)
    log.span("learner", "train", 5.0, 1.0)
    log.close()
    with (tmp_path / STEPS).open("a") as file:
        file.write('{"step": 2, "rew')
    assert [line["step"] for line in read_lines(tmp_path / STEPS)] == [1]
    assert read_lines(tmp_path / EVENTS)[0]["event"] == "start"
    (tmp_path / SPANS).write_text("".join((tmp_path / SPANS).read_text().splitlines(True)[1:]))
    assert idle_shares(tmp_path) == {"learner": pytest.approx(0.4, abs=0.01)}
    assert write_timeline(tmp_path, tmp_path / "trace.json") > 3


def test_a_run_goes_on_in_its_logs_after_a_reboot(tmp_path, monkeypatch):
    log = RunLog(tmp_path)
    log.span("learner", "train", time.monotonic(), 1.0)
    resumed_s = time.time()
    # The machine was started seven seconds ago.
    monkeypatch.setattr("sharpwave.llm.log.time", SimpleNamespace(time=time.time, monotonic=lambda: 7.0))
    log.span("learner", "train", 7.0, 2.0)
    log.span("learner", "train", 13.0, 2.0)
    log("end")
    log.close()
    first, second, third = read_lines(tmp_path / SPANS)
    assert first["s"] <= resumed_s <= second["s"] < third["s"]
    assert second["s"] <= read_lines(tmp_path / EVENTS)[0]["s"] < third["s"]
    assert idle_shares(tmp_path, resumed_s) == {"learner": pytest.approx(0.5, abs=0.01)}
