"""Checkpoints: bit-equal steps after a restart, one cut with the buffer, and kills in the middle of a save."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from learner_batches import batch_of
from patience import until

import sharpwave as sw
from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.checkpoints import Checkpoints
from sharpwave.llm.learner import Learner, OptimizerConfig
from sharpwave.llm.model import ValueModel, load_model, small_model
from sharpwave.llm.objectives import GRPO, SFT, ValueFit
from sharpwave.llm.stages import training_flow

torch.set_num_threads(1)
FAST = OptimizerConfig(learning_rate=1e-2, warmup_steps=3)


def learner_of(seed=0, objective=None, model=None, **more):
    given = {"row_tokens": 32, "rows": 2, "minibatches": 2, "optimizer": FAST, "seed": seed}
    return Learner(model or small_model(seed=seed), objective or GRPO(), **{**given, **more})


def weights_of(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()])


def test_steps_after_a_restart_are_bit_equal(tmp_path):
    learner, checkpoints = learner_of(), Checkpoints(tmp_path)
    for seed in range(2):
        learner.step(batch_of(seed))
    checkpoints.save({"policy": learner}, step=2, position={"epoch": 1, "at": [3, 4]})
    expected = [learner.step(batch_of(seed)) for seed in (2, 3)]

    again = learner_of(seed=9)  # other weights, another order
    again.step(batch_of(5))
    found = Checkpoints(tmp_path).latest()
    assert (found.step, found.position, found.mark) == (2, {"epoch": 1, "at": [3, 4]}, None)
    found.load({"policy": again})
    assert again.steps == 2
    assert [again.step(batch_of(seed)) for seed in (2, 3)] == expected
    assert torch.equal(weights_of(again), weights_of(learner))


def test_a_checkpoint_before_the_first_step_is_a_start(tmp_path):
    learner, again = learner_of(), learner_of(seed=4)
    checkpoint = Checkpoints(tmp_path).save({"policy": learner}, step=0)
    again.step(batch_of())
    checkpoint.load({"policy": again})
    assert again.step(batch_of()) == learner.step(batch_of())
    assert torch.equal(weights_of(again), weights_of(learner))


def test_policy_and_value_model_are_one_checkpoint(tmp_path):
    def both(seed):
        return {
            "policy": learner_of(seed),
            "values": learner_of(seed, ValueFit(), ValueModel.like(small_model(seed=seed))),
        }

    first, again = both(0), both(7)
    first["values"].step(batch_of(values=0.0))
    checkpoint = Checkpoints(tmp_path).save(first, step=1)
    checkpoint.load(again)
    for name, learner in first.items():
        assert torch.equal(weights_of(learner), weights_of(again[name]))
    with pytest.raises(SchemaError, match=r"has the learners policy, values; expected policy"):
        checkpoint.load({"policy": again["policy"]})


def test_the_folder_of_a_policy_is_a_model_and_nothing_is_pickled(tmp_path):
    learner = learner_of()
    learner.step(batch_of())
    path = Checkpoints(tmp_path).save({"policy": learner}, step=1).path
    model = load_model(path / "policy")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), learner.model.parameters(), strict=True))
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".json", ".safetensors"}
    assert {item.stat().st_mode & 0o077 for item in (tmp_path, path, path / "policy")} <= {0o0, 0o055}
    assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: learner_of(model=small_model(hidden_size=32)), r"another model: its hidden_size is 64, the .* has 32"),
        (lambda: learner_of(model=small_model("llama")), r"another model: its \w+ is .*, the learner's model has"),
        (
            lambda: learner_of(objective=ValueFit(), model=ValueModel.like(small_model())),
            r"is a checkpoint of a Transformer; the learner's model is a ValueModel",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, other, words):
    learner = learner_of()
    learner.step(batch_of())
    checkpoint, stranger = Checkpoints(tmp_path).save({"policy": learner}, step=1), other()
    before = weights_of(stranger)
    with pytest.raises(SchemaError, match=words):
        checkpoint.load({"policy": stranger})
    assert torch.equal(weights_of(stranger), before)
    assert not stranger.optimizer.state


def test_the_last_ones_are_kept_and_the_newest_save_counts(tmp_path):
    learner, checkpoints = learner_of(), Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 8, 5):  # a run that was set back saves a step again
        checkpoints.save({"policy": learner}, step=step, mark=f"m{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002-step-000000000008", "000003-step-000000000005"]
    assert (checkpoints.latest().step, checkpoints.latest().mark) == (5, "m5")
    with pytest.raises(SchemaError, match="position: expected what JSON holds"):
        checkpoints.save({"policy": learner}, step=9, position={1, 2})
    assert checkpoints.latest().step == 5


@pytest.mark.parametrize("file", ["policy/optimizer.safetensors", "policy/model.safetensors"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path, file):
    learner = learner_of()
    learner.step(batch_of())
    checkpoint = Checkpoints(tmp_path).save({"policy": learner}, step=1)
    whole = (checkpoint.path / file).read_bytes()
    (checkpoint.path / file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = weights_of(learner)
    with pytest.raises(StorageError, match="is damaged: its checksum is not the published one"):
        checkpoint.load({"policy": learner})
    (checkpoint.path / "state.json").write_text("{")
    with pytest.raises(StorageError, match=r"state\.json cannot be read"):
        checkpoint.load({"policy": learner})
    assert torch.equal(weights_of(learner), before)


# ---- one cut with the buffer -----------------------------------------------------------------------------------------


def data_of(name):
    return batch_of(int(name), data=2, ids=[f"{name}a", f"{name}b"])


def opened(path, resume=None):
    flow = training_flow(GRPO(), batch_size=2)
    return sw.SequenceBuffer(100, flow=flow, journal=path / "journal", resume=resume)


def train(buffer, learner):
    with buffer.get("train", timeout=0) as lease:
        learner.step(lease.batch)
        return list(lease.batch.ids)


def test_a_restart_trains_again_what_the_saved_weights_have_not_seen(tmp_path):
    learner, checkpoints, buffer = learner_of(), Checkpoints(tmp_path / "saved"), opened(tmp_path)
    for name in "1234":
        buffer.put(data_of(name))
    seen = [train(buffer, learner)]
    checkpoints.save({"policy": learner}, step=1, buffer=buffer)
    seen += [train(buffer, learner), train(buffer, learner)]
    expected = weights_of(learner)
    buffer.close()

    checkpoint, again = checkpoints.latest(), learner_of(seed=3)
    checkpoint.load({"policy": again})
    with opened(tmp_path, checkpoint.mark) as buffer:
        assert buffer.used_ids == seen[0]
        assert [train(buffer, again), train(buffer, again)] == seen[1:]
        assert torch.equal(weights_of(again), expected)
        assert buffer.ids() == ["4a", "4b"]


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_learner_checkpoints import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
learner, checkpoints, buffer = learner_of(), Checkpoints(sys.argv[1] + "/saved"), opened(Path(sys.argv[1]))
for name in "1234":
    buffer.put(data_of(name))
train(buffer, learner)
checkpoints.save({"policy": learner}, step=1, buffer=buffer)
train(buffer, learner)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for step in (2, 3, 4):
    try:
        checkpoints.save({"policy": learner}, step=step, buffer=buffer)
    except StorageError as error:
        print(error)
"""


def python(code, *given):
    code = f"from pathlib import Path\n{code}"
    return [sys.executable, "-c", code, *map(str, given), os.path.dirname(__file__)]


def environment():
    folders = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__)), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}


def test_a_full_disk_leaves_the_checkpoint_before_and_its_mark(tmp_path):
    said = subprocess.run(python(FULL, tmp_path), capture_output=True, text=True, check=True, env=environment())
    lines = said.stdout.splitlines()
    assert len(lines) == 3
    assert all("cannot be written" in line and "File too large" in line for line in lines)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["000000-step-000000000001"]
    checkpoint = Checkpoints(tmp_path / "saved").latest()
    checkpoint.load({"policy": learner_of()})
    # A failed save makes no mark: three of them would have pushed out the one that fits the checkpoint.
    with opened(tmp_path, checkpoint.mark) as buffer:
        assert buffer.used_ids == ["1a", "1b"]


SAVER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_learner_checkpoints import *
checkpoints = Checkpoints(sys.argv[1])
learner = learner_of(objective=SFT(), model=small_model(hidden_size=256), minibatches=1)
step = 0
while True:
    step += 1
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.fill_(step)
    learner.steps = step
    checkpoints.save({"policy": learner}, step=step)
    print(step, flush=True)
"""


def stopped_while_writing(process, folder):
    while True:
        until(lambda: any(folder.glob(".new-*")))
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        if any(folder.glob(".new-*")):
            return
        process.send_signal(signal.SIGCONT)


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path):
    process = subprocess.Popen(python(SAVER, tmp_path), stdout=subprocess.PIPE, env=environment())
    try:
        for _ in range(2):
            last = int(process.stdout.readline())
        stopped_while_writing(process, tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(tmp_path.glob(".new-*"))
    learner, checkpoints = learner_of(objective=SFT(), model=small_model(hidden_size=256)), Checkpoints(tmp_path)
    found = checkpoints.latest()
    assert found.step >= last
    found.load({"policy": learner})
    assert learner.steps == found.step
    assert bool((weights_of(learner) == found.step).all())
    checkpoints.save({"policy": learner}, step=found.step + 1)
    assert not list(tmp_path.glob(".new-*"))


def test_state_json_says_what_it_is_of(tmp_path):
    path = Checkpoints(tmp_path).save({"policy": learner_of()}, step=1, position=7).path
    state = json.loads((path / "state.json").read_text())
    assert state["learners"]["policy"]["config"]["hidden_size"] == 64
    assert state["learners"]["policy"]["optimizer"]["learning_rate"] == 1e-2
