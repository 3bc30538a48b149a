"""A learner in a child process: what it trains, publishes and saves, and how its errors arrive."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.llm.cut import Cut
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.log import RunLog
from sharpwave.llm.parts import make_learner
from sharpwave.llm.process_learner import ProcessLearner
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def folder_of(tmp_path, **changes):
    settings = {"task": "sort", "model": SMALL, "batch": 4, "group": 2, "steps": 5, **changes}
    return RunFolder.create(tmp_path / "run", Experiment.read(settings))


def batch_of(seed=0, count=4):
    random = np.random.default_rng(seed)
    lens = [[7, 6]] * count
    total = 13 * count
    data = {
        "input_ids": random.integers(3, 10, total),
        "loss_mask": np.tile(np.arange(13) % 7 > 2, count),
        "logprobs": np.full(total, -1.0, np.float32),
        "versions": np.zeros(total, np.int64),
        "rewards": random.random(2 * count).astype(np.float32),
    }
    return sw.SequenceSample(
        [str(at) for at in range(count)], {**dict.fromkeys(data, lens), "rewards": [[1, 1]] * count}, data
    )


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


async def train(folder):
    with contextlib.closing(RunLog(folder.logs)) as log:
        return await LocalRun(folder, log).run()


def test_it_trains_publishes_and_saves_as_a_learner_in_this_process(tmp_path):
    folder = folder_of(tmp_path)
    experiment, task = folder.experiment(), folder.experiment().load_task()
    here = make_learner(experiment, task, folder)

    async def main():
        child = await ProcessLearner.start(folder)
        assert child.said is None
        for seed in range(3):
            told, expected = await child.train(batch_of(seed)), here.train_now(batch_of(seed))
            assert told == pytest.approx(expected, rel=1e-4)
        assert [await child.publish(), await child.publish()] == [0, 1]
        cut = Cut("m3", 3, 1, {"any": 1})
        await child.save(cut)
        await child.close()
        again = await ProcessLearner.start(folder)
        assert again.said == cut.to_json()
        assert await again.publish() == 2
        await again.close()

    run(main())
    published = folder.weights().latest().read()
    for name, tensor in here.policy.model.weights():
        np.testing.assert_allclose(published[name], tensor.detach(), rtol=1e-3, atol=1e-5)


def test_errors_have_their_class_and_the_learner_goes_on(tmp_path):
    async def main():
        child = await ProcessLearner.start(folder_of(tmp_path))
        with pytest.raises(SchemaError, match="the batch lacks"):
            await child.train(sw.SequenceSample(["a"], {"input_ids": [3]}, {"input_ids": np.arange(3)}))
        assert (await child.train(batch_of()))["step"] == 1
        await child.close()
        with pytest.raises(ClosedError, match="the learner was closed"):
            await child.publish()

    run(main())


def test_what_the_start_raises_is_raised_here(tmp_path):
    with pytest.raises(SchemaError, match="clip: expected"):
        run(ProcessLearner.start(folder_of(tmp_path, learner={"clip": -1.0})))


def test_a_place_that_cannot_be_written_is_told_as_such(tmp_path):
    async def main():
        folder = folder_of(tmp_path)
        child = await ProcessLearner.start(folder)
        place = folder.weights().folder
        for left in place.iterdir():
            left.unlink()
        place.rmdir()
        place.write_text("in the way")
        with pytest.raises(StorageError):
            await child.publish()
        await child.close()

    run(main())


def test_ctrl_c_in_a_terminal_does_not_end_it(tmp_path):
    async def main():
        child = await ProcessLearner.start(folder_of(tmp_path))
        assert os.getpgid(child.pid) != os.getpgid(0)  # a terminal signals the group of its program
        await child.close()

    run(main())


def test_a_run_whose_learner_is_killed_ends_with_its_reason(tmp_path, monkeypatch):
    """On a GPU a run has this learner; here the CPU's run is given it."""
    learners = []

    async def start_learner(folder, *_):
        learners.append(await ProcessLearner.start(folder))
        return learners[-1]

    monkeypatch.setattr("sharpwave.llm.run.start_learner", start_learner)
    folder = folder_of(tmp_path, steps=10**6, slots=8, concurrent=8, save_every=1)

    async def main():
        going = asyncio.ensure_future(train(folder))
        deadline = time.monotonic() + 60
        while folder.checkpoints().latest() is None or not (folder.logs / "steps.jsonl").exists():
            assert time.monotonic() < deadline
            assert not going.done()
            await asyncio.sleep(0.05)
        os.kill(learners[-1].pid, signal.SIGKILL)
        with pytest.raises(NotReady, match="the process of the learner has ended"):
            await going

    run(main())


def test_a_run_goes_on_from_the_checkpoint_of_its_child(tmp_path, monkeypatch):
    async def start_learner(folder, *_):
        return await ProcessLearner.start(folder)

    monkeypatch.setattr("sharpwave.llm.run.start_learner", start_learner)
    folder = folder_of(tmp_path, steps=2, slots=8, concurrent=8, save_every=1)
    assert run(train(folder)).step == 2
    said = Path(folder.path / "experiment.json").read_text().replace('"steps": 2', '"steps": 4')
    (folder.path / "experiment.json").write_text(said)
    result = run(train(folder))
    assert (result.step, result.trained) == (4, 16)
