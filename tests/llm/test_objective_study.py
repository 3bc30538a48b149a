"""The objective study runs, and its members are apart from each other."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
torch.set_num_threads(1)


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "llm"))
    import objectives

    yield objectives
    del sys.modules["objectives"]


def test_members_train_apart_and_a_lag_of_zero_is_sync(study):
    setting = study.Setting(steps=2, lag=0, prompts=4, group=2, minibatches=2, supervised=2, evaluations=1)
    members = [study.Member(o, 1e-2, 0.02, 1e-3, seed) for o in study.OBJECTIVES for seed in (0, 1)]
    made = study.Study(members, setting, "cpu")
    start = made.start()
    crowd = study.Crowd(dict(start), torch.full((8,), 1e-3), torch.full((8,), 1e-2))
    ids, behaviour, advantages = made.batch(start, 8)
    # The same data for all members: without a lag the objectives are one, and seeds stay apart.
    ids, behaviour, advantages = (column[:1].expand(8, -1, -1) for column in (ids, behaviour, advantages))
    behaviour = made.logprobs(start, ids).detach()
    made.update(crowd, [ids, behaviour, behaviour, advantages], torch.full((8,), 0.02), 1.0)
    weights = torch.cat([weight.flatten(1) for weight in crowd.state.values()], 1)
    assert all(torch.allclose(weights[at], weights[at % 2], atol=1e-6) for at in range(8))
    assert not torch.allclose(weights[0], weights[1], atol=1e-3)
    assert not torch.equal(weights[0], torch.cat([weight.flatten(1) for weight in start.values()], 1)[0])


def test_a_short_run_gives_a_line_for_each_cell(study, monkeypatch):
    setting = study.Setting(steps=3, lag=1, prompts=16, group=4, minibatches=2, supervised=2, evaluations=3, warmup=1)
    members = [study.Member(o, *cell, 0) for o in study.OBJECTIVES for cell in study.BOLD]
    document = study.Study(members, setting, "cpu").run(say=lambda *_, **__: None)
    for one in document["members"]:  # the data of lagging members are of older weights, those of sync are not
        assert (one["drift"] > 1e-5) == (one["objective"] != "sync")
    cells = study.summary(document["members"])
    assert [cell["is_bold"] for cell in cells] == [True] * 3
    assert all({*study.OBJECTIVES} <= set(cell) for cell in cells)
    assert len((*study.BOLD, *study.OTHERS)) == len({*study.BOLD, *study.OTHERS}) >= 18
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import llm_tables

    document |= {"cells": cells, "machine": {"device": "d", "torch": "t"}, "settings": {**vars(setting), "seeds": 1}}
    assert llm_tables.objectives(document).count("\n| **") == 3
