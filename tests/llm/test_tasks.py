"""The tasks: exact rewards, items that are equal for equal seeds, and held-out items that are no others."""

import asyncio
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpwave.errors import SchemaError
from sharpwave.llm.agent import Generate
from sharpwave.llm.characters import Characters
from sharpwave.llm.generators import Answer
from sharpwave.llm.tasks import TASKS, load_task
from sharpwave.llm.tasks.word_problems import final_number

SMALL = {"sort": {"count": 50}, "sums": {"count": 50}, "guess": {"count": 50}, "math": {"count": 50}}


class Scripted:
    """A generator that says what a function of the text so far says."""

    def __init__(self, tokenizer, answer):
        self._tokenizer, self._answer = tokenizer, answer

    async def generate(self, ids, sampling=None):
        tokens = self._tokenizer.encode(self._answer(self._tokenizer.decode(ids)))[: sampling.max_tokens]
        return Answer(tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop")


def play(task, item, answer):
    generate = Generate(Scripted(task.tokenizer, answer), task.tokenizer, task.sampling)
    return asyncio.run(task.agent(item, generate))


def all_of(items):
    return [items[name] for name in items.ids]


@pytest.mark.parametrize("name", TASKS)
def test_items_depend_on_the_seed_alone_and_held_out_ones_are_others(name):
    first, again, other = (load_task(name, **SMALL[name], held_out=5, seed=seed) for seed in (1, 1, 2))
    assert all_of(first.items) == all_of(again.items)
    assert all_of(first.items) != all_of(other.items)
    assert len(first.held_out) == 5

    def about(items):
        return {(item["prompt"], item.get("secret")) for item in all_of(items)}

    for mine, yours in ((first, first), (first, other), (other, first)):
        assert not about(mine.items) & about(yours.held_out)


@pytest.mark.parametrize("name", TASKS)
def test_every_prompt_and_answer_fits_into_the_context(name):
    task = load_task(name, **SMALL[name])
    for item in all_of(task.items):
        tokens = task.tokenizer.encode(item["prompt"])
        assert 0 < len(tokens) + task.sampling.max_tokens <= task.context or name == "guess"
        assert max(tokens) < task.vocabulary
        assert task.tokenizer.decode(tokens) == item["prompt"]


def test_sorting_counts_places():
    task = load_task("sort", count=20)
    for item in all_of(task.items):
        assert item["answer"] == "".join(sorted(item["prompt"][:-1]))
        right = item["answer"]
        assert play(task, item, lambda _, said=right: said).reward == 1.0
        assert play(task, item, lambda _, said=right + "9": said).reward == 0.8
        assert play(task, item, lambda _, said=right[:2]: said).reward == 0.5


@pytest.mark.parametrize("shape", [{}, {"median": 8, "longest": 40, "sigma": 0.5}])
def test_running_sums_have_log_normal_lengths(shape):
    task = load_task("sums", count=1000, **shape)
    lengths = np.array([len(item["answer"]) for item in all_of(task.items)])
    longest = shape.get("longest", 900)
    assert 4 <= lengths.min() <= lengths.max() <= longest
    assert np.median(lengths) == pytest.approx(shape.get("median", 64), rel=0.15)
    if not shape:
        assert np.log(lengths).std() == pytest.approx(1.0, rel=0.1)
        assert lengths.max() / lengths.mean() > 6  # the long tail
    item = all_of(task.items)[0]
    total, wanted = 0, ""
    for digit in item["prompt"][:-1]:
        total = (total + int(digit)) % 10
        wanted += str(total)
    assert item["answer"] == wanted
    assert play(task, item, lambda _: wanted).reward == 1.0


def bisect(text):
    """The best player: reads the whole game and halves what is left."""
    lines = text.split("\n")
    low, high = map(int, lines[0][:-1].split("-"))
    for guess, said in zip(lines[1::2], lines[2::2], strict=False):
        low, high = (low, int(guess) - 1) if said == "<" else (int(guess) + 1, high)
    return f"{(low + high) // 2}\n"


def test_the_guessing_game_is_won_by_halving_and_lost_by_babble():
    task = load_task("guess", highest=100, turns=7, count=300)
    numbers = {item["secret"] for item in all_of(task.items)}
    assert len(numbers) > 80  # a number that was never right in training would never be guessed in a held-out range
    rewards = []
    for item in all_of(task.items):
        episode = play(task, item, bisect)
        assert len(episode.tokens) <= task.context
        assert episode.reward > 0
        rewards.append(episode.reward)
        assert episode.reward == pytest.approx(1 - (episode.answers - 1) / 7)
    assert max(rewards) > min(rewards)
    babble = play(task, item, lambda _: "??\n")
    assert (babble.reward, babble.answers) == (0.0, 7)
    assert task.tokenizer.decode(babble.tokens).endswith("!\n??\n")
    # Only what the model said is learnt from.
    assert sum(babble.is_made) == 7 * 3


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("12 - 5 = 7\n#### 7", 7),
        ("#### -1,234.50", Fraction("-1234.5")),
        ("#### 7 apples, not 8", 7),
        ("so $1,200 in all", 1200),
        (r"thus \boxed{3/4}, as 5 said", Fraction(3, 4)),
        ("1/0", None),
        ("", None),
        ("no number", None),
        ("9" * 500, None),
    ],
)
def test_the_checker_finds_the_final_number(text, number):
    assert final_number(text) == number


@given(st.text(max_size=200))
def test_the_checker_takes_any_text(text):
    found = final_number(text)
    assert found is None or isinstance(found, Fraction)


def test_word_problems_have_the_answers_they_say():
    task = load_task("math", count=100)
    for item in all_of(task.items):
        work, _, result = item["answer"].partition(" = ")
        assert eval(work) == int(result.split("\n")[0]) == final_number(item["answer"])
        assert play(task, item, lambda _, said=item["answer"]: said).reward == 1.0
        assert play(task, item, lambda _: "-77").reward == 0.0


def test_word_problems_come_from_a_file_in_gsm8ks_format(tmp_path):
    lines = [
        {"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"} for n in range(3)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = load_task("math", path=tmp_path / "train.jsonl", held_out_path=tmp_path / "train.jsonl")
    assert len(task.items) == 3
    assert play(task, task.items["2"], lambda _: "it must be 3").reward == 1.0
    (tmp_path / "bad.jsonl").write_text('{"question": "What?", "answer": "none"}\n')
    with pytest.raises(SchemaError, match="item 1: expected a question, and an answer with a number"):
        load_task("math", path=tmp_path / "bad.jsonl", held_out_path=tmp_path / "train.jsonl")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "srot",
            {},
            "task: expected one of sort, sums, guess, math, or module:function, got 'srot'; did you mean 'sort'?",
        ),
        ("sort", {"digit": 3}, "task 'sort': unknown key 'digit'; did you mean 'digits'?; it has digits, count"),
        (
            "sort",
            {"digits": 2, "count": 1000},
            "count: expected at most about 94, the different items there are, got 1000",
        ),
        ("sums", {"median": 5000}, "median: expected a number, 4 to 900, got 5000"),
        ("guess", {"highest": 7}, "task 'guess': highest: expected a whole number, 8 to 1000000, got 7"),
        ("math", {"path": "x"}, "expected both path and held_out_path, or none of them"),
    ],
)
def test_what_a_task_cannot_do_names_the_key(name, options, said):
    with pytest.raises(SchemaError) as error:
        load_task(name, **options)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("has_no_seed", "the function has no argument 'seed'; give it one: seed=0"),
        ("items_are_a_list", "Task(), 'sort': items: expected Items, got [{'prompt': '12>'}]; give Items([...])"),
        ("sampling_is_a_dict", "sampling: expected a Sampling, got {'max_tokens': 3}"),
        ("NO_FUNCTION", "failing_tasks has no function 'NO_FUNCTION'"),
        ("takes_al", "failing_tasks has no function 'takes_al'; did you mean 'takes_all'?"),
    ],
)
def test_a_task_of_your_own_that_is_none_is_told(name, said):
    with pytest.raises(SchemaError) as error:
        load_task(f"failing_tasks:{name}", seed=0)
    assert said in str(error.value)


def test_a_task_of_your_own_may_take_any_arguments():
    assert len(load_task("failing_tasks:takes_all", seed=3).items) == 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import not_there_at_all", "No module named 'not_there_at_all' (imported by my_task)"),
        ("raise RuntimeError('no data')", "my_task cannot be imported: RuntimeError: no data (my_task.py:1)"),
        ("def make(:", "my_task cannot be imported: SyntaxError: invalid syntax (my_task.py, line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told(tmp_path, monkeypatch, text, said):
    (tmp_path / "my_task.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SchemaError) as error:
        load_task("my_task:make")
    assert said in str(error.value)


def test_a_character_that_the_alphabet_lacks_is_told():
    with pytest.raises(SchemaError, match="'x' in '12x' is none of '0123'"):
        Characters("0123").encode("12x")


def test_the_smallest_guessing_game_has_items_on_both_sides():
    task = load_task("guess", highest=8, count=20, held_out=1)
    assert (len(task.items.ids), len(task.held_out.ids)) == (20, 1)
