"""Runs from a model folder of the user: its tokenizer and chat template are those that the task and the learner use."""

import asyncio
import dataclasses
import json

import pytest

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm import ChatTokenizer, Experiment, LocalRun, RunFolder, RunLog, load_task, save_model, small_model
from sharpwave.llm.parts import make_model

tokenizers = pytest.importorskip("tokenizers")

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>"
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 256}


def make_folder(path, template=None, beginning=False):
    """A model with random weights, and a tokenizer whose tokens are pieces of words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([load_task("math", count=50).items[str(at)]["prompt"] for at in range(50)], trainer)
    if beginning:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    save_model(small_model(vocab_size=made.get_vocab_size(), **SIZES), path)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def experiment_of(task, path, **settings):
    small = {"steps": 1, "batch": 2, "group": 2, "slots": 4, "skip_no_signal": False, "evaluation": {"every": 1}}
    return Experiment.read({**small, "task": task, "model": {"path": str(path)}, **settings})


def echo(*, seed=0, tokenizer=None):
    """A task of a user that takes the tokenizer of the model."""
    task = load_task("sort", digits=2, count=20, held_out=2, seed=seed)
    if tokenizer is None:
        return task
    assert isinstance(tokenizer, ChatTokenizer)
    size, ends = tokenizer.size, tokenizer.end_ids
    sampling = dataclasses.replace(task.sampling, stop_ids=ends)
    return dataclasses.replace(task, tokenizer=tokenizer, vocabulary=size, context=32, sampling=sampling)


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat", "plain"])
def test_math_asks_in_the_words_of_the_model(template, tmp_path):
    folder = make_folder(tmp_path / "model", template, beginning=template is None)
    experiment = experiment_of("math", folder, task_options={"count": 40, "held_out": 4, "max_tokens": 8})
    task = experiment.load_task()
    prompt = task.items["0"]["prompt"]
    begins, ends = ("<|user|>", "the number.</s><|assistant|>") if template else ("<s>Question: ", "Answer: ")
    assert prompt.startswith(begins)
    assert prompt.endswith(ends)
    theirs = ChatTokenizer.read(folder)
    ids = task.tokenizer.encode(prompt)
    assert ids == theirs.encode(prompt, add_special_tokens=False), "what it begins with is there once"
    assert len(ids) < len(prompt) / 2
    assert task.sampling.stop_ids == (theirs.encode("</s>", add_special_tokens=False)[0],)
    prompts = [side[name]["prompt"] for side in (task.items, task.held_out) for name in side.ids]
    assert task.context == 8 + max(len(task.tokenizer.encode(one)) for one in prompts)
    assert make_model(experiment, task).config.vocab_size == task.vocabulary


def test_what_a_run_publishes_is_a_folder_with_the_tokenizer(tmp_path):
    folder = make_folder(tmp_path / "model", TEMPLATE)
    experiment = experiment_of("math", folder, task_options={"count": 40, "held_out": 4, "max_tokens": 4})
    run = RunFolder.create(tmp_path / "run", experiment)
    log = RunLog(run.logs)
    assert asyncio.run(LocalRun(run, log).run()).step == 1
    log.close()
    for made in (run.weights().latest().path, run.evaluation / "best"):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (made / name).read_bytes() == (folder / name).read_bytes()
        assert ChatTokenizer.read(made).has_template


def test_a_task_with_another_tokenizer_than_the_model_is_refused(tmp_path):
    experiment = experiment_of("sort", make_folder(tmp_path / "model"), task_options={"digits": 2, "count": 20})
    with pytest.raises(SchemaError, match=r"another tokenizer; give the task's function an argument tokenizer="):
        make_model(experiment, experiment.load_task())
    (tmp_path / "model" / "tokenizer.json").unlink()  # as in a folder that such a run has published
    make_model(experiment, experiment.load_task())


def test_a_task_of_your_own_is_given_the_tokenizer_of_the_model(tmp_path):
    folder = make_folder(tmp_path / "model", beginning=True)
    experiment = experiment_of(f"{__name__}:echo", folder)
    task, theirs = experiment.load_task(), ChatTokenizer.read(folder)
    assert theirs.encode("12>") == theirs.encode("<s>", add_special_tokens=False) + task.tokenizer.encode("12>")
    make_model(experiment, task)
    random_weights = Experiment.read({**experiment.to_json(), "model": SIZES})
    assert random_weights.load_task().tokenizer.encode("12>") != task.tokenizer.encode("12>")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(StorageError, match=r"has no tokenizer\.json"):
        experiment.load_task()


def test_tasks_have_as_many_items_as_there_are():
    task = load_task("sort", digits=3)
    assert 800 < len(task.items) < 1000
    assert 90 < len(task.held_out) < 120
    assert len(load_task("sort", digits=3, count=17).items) == 17
    with pytest.raises(
        SchemaError, match=r"count: expected at most about \d+, the different items there are, got 4096"
    ):
        load_task("sort", digits=3, count=4096)
