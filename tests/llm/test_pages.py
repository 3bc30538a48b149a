"""Pages about runs: their tables have every setting and every number that a run has."""

import asyncio
import dataclasses
import re
import types
import typing
from pathlib import Path

import pytest
import torch
from run_sweep import SMALL

from sharpwave.llm.experiment import EvaluationSettings, Experiment
from sharpwave.llm.generators import Sampling
from sharpwave.llm.log import STEPS, RunLog, read_lines
from sharpwave.llm.parts import LearnerSettings, model_keys
from sharpwave.llm.run import LocalRun
from sharpwave.llm.run_folder import RunFolder

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "table", type(None): "none"}
ROW = re.compile(r"^\| `(\w+)` \| ([\w ]+) \| `(.*?)` \| (.+) \|$")
NAMED = re.compile(r"`(\w+)`")


def kind_of(hint):
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [typing.get_origin(one) or one for one in choices]
    return " or ".join("table" if dataclasses.is_dataclass(one) else KINDS[one] for one in plain)


def default_of(field):
    if field.default is dataclasses.MISSING:
        return "{}"
    value = field.default
    if value is None or isinstance(value, str):
        return f'"{"none" if value is None else value}"'
    return str(value).lower()


@pytest.mark.parametrize(
    ("title", "settings"),
    [("`Experiment`", Experiment), ("`evaluation`", EvaluationSettings), ("`learner`", LearnerSettings)],
)
def test_the_reference_has_each_setting_with_its_type_and_default(title, settings):
    _, found, rest = (DOCS / "reference.md").read_text().partition(f"| key of {title} | type | default | meaning |\n")
    assert found
    rows = [ROW.match(line) for line in rest.partition("\n\n")[0].splitlines()[1:]]
    hints = typing.get_type_hints(settings)
    expected = {(one.name, kind_of(hints[one.name]), default_of(one)) for one in dataclasses.fields(settings)}
    assert {row.groups()[:3] for row in rows} == expected
    assert len(rows) == len(expected)


def test_the_reference_has_each_key_of_sampling_and_model():
    text = (DOCS / "reference.md").read_text()
    sampling, _, model = (
        text.partition("The table `sampling` takes")[2].partition("\n\n")[0].partition("The table `model`")
    )
    assert set(NAMED.findall(sampling)) - {"Sampling"} == {one.name for one in dataclasses.fields(Sampling)}
    assert set(NAMED.findall(model)) == set(model_keys())


@pytest.mark.parametrize("learner", [{"kl": 0.1}, {"objective": "ppo"}])
def test_each_number_of_a_step_is_explained(tmp_path, learner):
    torch.set_num_threads(1)
    settings = {**SMALL, "steps": 1, "learner": {**SMALL["learner"], **learner}, "evaluation": {"every": 0}}
    folder = RunFolder.create(tmp_path / "run", Experiment.read(settings))
    log = RunLog(folder.logs)
    asyncio.run(LocalRun(folder, log).run())
    log.close()
    table = (DOCS / "how-to" / "read-the-run.md").read_text().partition("\n## Steps\n")[2].partition("\n## ")[0]
    keys = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = [name for cell in keys for name in NAMED.findall(cell)]
    (line,) = read_lines(folder.logs / STEPS)
    assert line.keys() - set(explained) == set()
    assert len(explained) == len(set(explained))


def test_each_file_of_a_run_is_explained(tmp_path):
    torch.set_num_threads(1)
    settings = {**SMALL, "steps": 2, "evaluation": {"every": 1}}
    folder = RunFolder.create(tmp_path / "run", Experiment.read(settings))
    log = RunLog(folder.logs)
    asyncio.run(LocalRun(folder, log).run())
    log.close()
    page = (DOCS / "how-to" / "read-the-run.md").read_text()
    for path in folder.path.rglob("*"):
        if path.name[0] == ".":
            continue
        name = path.relative_to(folder.path).as_posix()
        if path.parent == folder.path or path.parent == folder.logs:
            assert f"`{name}" in page, name
    assert "`evaluation/best/`" in page
    assert "score.json" in page
    assert (folder.evaluation / "best" / "score.json").is_file()
