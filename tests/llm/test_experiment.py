"""Experiments from TOML: every wrong key and size is an error that names the key that mends it."""

import pytest

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.experiment import Experiment
from sharpwave.llm.generators import Sampling
from sharpwave.llm.parts import make_engine, make_model

TOML = """
task = "sums"
steps = 200
batch = 16
max_staleness = 0
sampling = { temperature = 0.7 }

[task_options]
median = 8
longest = 40

[evaluation]
every = 5

[learner]
clip = 0.2
"""


def test_a_file_and_changes_on_top_of_it(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    run = Experiment.read(tmp_path / "run.toml", ["batch=8", "evaluation.every=3", "stale=drop", "watchdog_s=none"])
    assert (run.task, run.batch, run.stale, run.evaluation.every, run.watchdog_s) == ("sums", 8, "drop", 3, None)
    assert (run.evaluation.concurrent, run.learner) == (32, {"clip": 0.2})
    assert (run.rules.limit, run.rules.is_dropping) == (8, True)
    task = run.load_task()
    assert (task.name, task.context, task.sampling.temperature) == ("sums", 82, 0.7)
    assert Experiment.read(run.to_json()) == run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batchs": 3}, "unknown key 'batchs'; did you mean 'batch'?; known are task, task_options, steps"),
        ({"max_stalenes": 1}, "did you mean 'max_staleness'?"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; known are"),
        ({"evaluation": {"evry": 2}}, "evaluation: unknown key 'evry'; did you mean 'evaluation.every'?"),
        ({"learner": {"lr": 0.1}}, "learner: unknown key 'lr'; did you mean 'learner.learning_rate'?"),
        ({"learner": {"clp": 0.1}}, "learner: unknown key 'clp'; did you mean 'learner.clip'?"),
        ({"model": {"hiden_size": 3}}, "model: unknown key 'hiden_size'; did you mean 'model.hidden_size'?"),
        ({"lr": 0.1}, "Experiment(): unknown key 'lr'; did you mean 'learner.learning_rate'?"),
        ({"learning_rate": 0.1}, "unknown key 'learning_rate'; did you mean 'learner.learning_rate'?"),
        ({"evaluation": {"learning_rat": 1}}, "unknown key 'learning_rat'; did you mean 'learner.learning_rate'?"),
        ({"temperature": 1.0}, "did you mean 'evaluation.temperature' or 'sampling.temperature'?; known are task"),
        ({"learner": {"steps": 4}}, "learner: 'steps' belongs to the top of the file, before the first [table]; on"),
        ({"learner": {"steps": 4}}, "on the command line write steps=, without 'learner'"),
        ({"batch": 0, "steps": None, "learner": {"learning_rte": 1}}, "did you mean 'learner.learning_rate'?"),
        ({"batch": "32"}, "batch: expected a whole number, got '32'"),
        ({"batch": 32.0}, "batch: expected a whole number, got 32.0"),
        ({"shuffle": 1}, "shuffle: expected true or false, got 1"),
        ({"steps": "all"}, "steps: expected a whole number or \"none\", got 'all'"),
        ({"evaluation": {"goal": "no"}}, "evaluation: goal: expected a number or \"none\", got 'no'"),
        ({"sampling": 5}, "sampling: expected a table, got 5"),
        ({"evaluation": 5}, "evaluation: expected a table of settings, got 5"),
        ({"batch": 0}, "batch: expected a whole number, at least 1, got 0"),
        ({"group": 0}, "group: expected a whole number, at least 1, got 0"),
        ({"slots": -1}, "slots: expected a whole number, at least 1, got -1"),
        ({"max_staleness": -1}, "max_staleness: expected a whole number, at least 0, got -1"),
        ({"stale": "keep"}, "stale: expected 'mask' or 'drop', got 'keep'"),
        ({"sampling": {"temprature": 1}}, "sampling: unknown key 'temprature'; did you mean 'sampling.temperature'?"),
        ({"sampling": {"temperature": -1}}, "temperature=-1, expected a number from 0"),
        ({"evaluation": {"temperature": -1}}, "evaluation: temperature: expected a number, 0 to"),
        ({"watchdog_s": 10.0}, "watchdog_s: expected a number, 60 to 1e+09, got 10.0"),
        ({"watchdog_s": 10.0}, "got 10.0; it has to be at least owner_timeout_s: raise it, or lower owner_timeout_s"),
        ({"steps": None}, "the run would never end; give steps or epochs"),
    ],
)
def test_a_wrong_setting_names_the_key(given, said):
    with pytest.raises(SchemaError) as error:
        Experiment.read({"steps": 10, **given})
    assert said in str(error.value)


def test_a_misspelt_key_is_told_before_what_is_missing_because_of_its_table(tmp_path):
    """After `[learner]` in a file, `steps` is a key of that table."""
    path = tmp_path / "run.toml"
    for text, said in [
        ("learning_rte = 1e-3\nsteps = 4", "unknown key 'learning_rte'; did you mean 'learner.learning_rate'?"),
        ("learning_rate = 1e-3\nsteps = 4", "'steps' belongs to the top of the file, before the first [table]"),
    ]:
        path.write_text(f"[learner]\n{text}\n")
        with pytest.raises(SchemaError) as error:
            Experiment.read(path)
        assert f"{path}, learner: {said}" in str(error.value)


def test_none_in_a_file_is_none_where_a_key_may_be_none(tmp_path):
    (tmp_path / "run.toml").write_text('steps = 4\nwatchdog_s = "none"\n[evaluation]\ngoal = "none"\n')
    run = Experiment.read(tmp_path / "run.toml", ["evaluation.temperature='none'"])
    assert (run.watchdog_s, run.evaluation.goal, run.evaluation.temperature) == (None, None, None)
    with pytest.raises(SchemaError, match="batch: expected a whole number, got 'none'"):
        Experiment.read({"steps": 4, "batch": "none"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": "sorts"}, "did you mean 'sort'?"),
        ({"task_options": {"digit": 3}}, "did you mean 'digits'?"),
        (
            {"epochs": 1, "batch": 64, "task_options": {"count": 20}},
            "batch: expected at most 20, the items of all epochs",
        ),
        ({"sampling": {"temperature": 0}}, "sampling: temperature: expected more than 0, got 0"),
    ],
)
def test_settings_that_do_not_fit_the_task_name_the_key(given, said):
    with pytest.raises(SchemaError) as error:
        Experiment.read({"steps": 10, **given}).load_task()
    assert said in str(error.value)


@pytest.mark.parametrize("change", ["batch", "=3", " = 3"])
def test_a_change_without_key_or_value_is_refused(change):
    with pytest.raises(SchemaError, match="expected key=value"):
        Experiment.read({"steps": 1}, [change])


def test_a_file_that_is_missing_or_no_toml(tmp_path):
    with pytest.raises(StorageError, match="cannot be read"):
        Experiment.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("batch = = 3")
    with pytest.raises(SchemaError, match="expected TOML"):
        Experiment.read(tmp_path / "bad.toml")


def test_answers_of_a_run_end_at_stop_strings():
    """A program for the `openai` client may ask for them."""
    experiment = Experiment.read({"task": "sort", "steps": 1, "model": {"hidden_size": 16, "num_hidden_layers": 1}})
    task = experiment.load_task()
    engine = make_engine(experiment, task, make_model(experiment, task), 0, slots=16)
    prompt = task.tokenizer.encode("1")
    made = engine.submit(prompt, Sampling(max_tokens=engine.context - 1, stop=("3", "4"), ignore_eos=True), n=16)
    engine.run()
    stopped = [one.answer for one in made if one.answer.stop == "stop"]
    assert stopped
    for answer in stopped:
        text = task.tokenizer.decode(answer.tokens)
        assert text.endswith(answer.matched)
        assert not set("34") & set(text[:-1])
