"""Episodes, agents and their workers: what a sample is made of, and agents that go wrong."""

import asyncio
import json
import re

import numpy as np
import pytest
from simulated_system import Letters

from sharpwave.errors import NotReady, SchemaError
from sharpwave.llm.agent import Generate, describe_error, several_turns, single_turn
from sharpwave.llm.agent_worker import AgentWorker
from sharpwave.llm.controller import Controller
from sharpwave.llm.episode import Episode, to_sample
from sharpwave.llm.events import EventLog
from sharpwave.llm.generators import Answer, Sampling
from sharpwave.llm.generators.protocol import Health
from sharpwave.llm.items import Items
from sharpwave.llm.rules import Rules
from sharpwave.llm.simulation import simulate


class Echo:
    """A generator that says the prompt again, in letters; it remembers what it was asked."""

    def __init__(self, version=0):
        self.version, self.asked = version, []

    async def generate(self, ids, sampling=None):
        self.asked.append((list(ids), sampling))
        count = min(len(ids), sampling.max_tokens)
        return Answer(list(ids[:count]), [-0.5] * count, [self.version] * count, "stop")

    async def health(self):
        return Health(self.version, 0, 0)


def test_tokens_from_outside_have_no_loss_and_the_version_of_the_next_answer():
    episode = Episode([1, 2])
    episode.take(Answer([3, 4], [-0.1, -0.2], [5, 6], "stop"))
    episode.tell([9, 9])
    episode.take(Answer([7], [-0.3], [8], "stop"))
    episode.tell([9])
    episode.reward = 1.0
    sample = to_sample("0/a", [episode, episode])
    assert sample.ids == ["0/a"]
    assert sample.seqlens["input_ids"] == [[8, 8]]
    assert sample["input_ids"].tolist() == [1, 2, 3, 4, 9, 9, 7, 9] * 2
    assert sample["loss_mask"].tolist() == [False, False, True, True, False, False, True, False] * 2
    assert sample["versions"].tolist() == [5, 5, 5, 6, 8, 8, 8, 8] * 2
    assert np.allclose(sample["logprobs"], [0, 0, -0.1, -0.2, 0, 0, -0.3, 0] * 2)
    assert sample["rewards"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), "1", True])
def test_an_episode_needs_a_finite_reward(reward):
    episode = Episode([1], reward=reward)
    with pytest.raises(SchemaError, match="no token of the model"):
        to_sample("0/a", [episode])
    episode.take(Answer([1], [0.0], [0], "stop"))
    with pytest.raises(SchemaError, match="reward: expected a finite number"):
        to_sample("0/a", [episode])


def test_answers_that_cannot_be_trained_on_are_refused():
    episode = Episode([1])
    with pytest.raises(SchemaError, match="ended by 'abort'"):
        episode.take(Answer([1], [0.0], [0], "abort"))
    episode.take(Answer([1], [0.0], [4], "stop"))
    with pytest.raises(SchemaError, match="begins with version 3, after one of version 4"):
        episode.take(Answer([1], [0.0], [3], "stop"))


def test_every_answer_has_a_seed_of_its_own_and_changes_of_the_sampling():
    async def main(clock):
        echo = Echo()
        generate = Generate(echo, Letters(), Sampling(max_tokens=3, temperature=0.5), seed=7)
        episode = Episode([65, 66])
        await generate(episode)
        await generate(episode, max_tokens=1)
        again = Episode([65, 66])
        await Generate(echo, Letters(), seed=7)(again)
        return [sampling for _, sampling in echo.asked]

    first, second, again = simulate(main)
    assert first.seed == again.seed != second.seed
    assert (first.max_tokens, second.max_tokens, second.temperature) == (3, 1, 0.5)


def test_one_turn_and_several():
    async def main(clock):
        generate = Generate(Echo(), Letters(), Sampling(max_tokens=100))
        one = await single_turn(lambda item, text: len(text) / 4)({"prompt": "ab"}, generate)

        async def tool(item, text, turn):
            return f"{turn}", 0.5 if turn == 2 else None

        three = await several_turns(tool, turns=5)({"prompt": "a"}, generate)
        late = await several_turns(tool, turns=2, late=-1.0)({"prompt": "a"}, generate)
        return one, three, late

    one, three, late = simulate(main)
    assert (one.reward, one.tokens) == (0.5, [97, 98, 97, 98])
    assert (three.reward, three.answers, late.reward, late.answers) == (0.5, 3, -1.0, 2)
    assert Letters().decode(three.tokens[:3]) == "aa0"


@pytest.mark.parametrize("agent", [single_turn(lambda item, text: 1.0), several_turns(lambda *_: ("", 1.0), turns=1)])
def test_an_item_without_the_prompt_is_told_with_its_keys(agent):
    async def main(clock):
        return await agent({"id": "a", "question": "1+1"}, Generate(Echo(), Letters()))

    with pytest.raises(SchemaError, match=r"_turns?\(\): the item has no key 'prompt', it has id, question; give p"):
        simulate(main)


def test_an_error_is_told_with_the_place_in_the_user_s_code():
    def describe(call, skip=0):
        """`skip`: calls whose frames are left out."""
        try:
            call()
        except Exception as error:
            frames = error.__traceback__
            for _ in range(skip):
                frames = frames.tb_next
            return describe_error(error.with_traceback(frames))

    here = r"\(test_agent_workers\.py:\d+\)$"
    assert re.search(here, describe(lambda: json.loads("{")))  # raised by the standard library
    assert re.search(here, describe(lambda: Sampling(max_tokens=0)))
    assert describe(lambda: Sampling(max_tokens=0), skip=2).endswith("an integer of at least 1, below 2**53")
    assert re.search(r"\(decoder\.py:\d+\)$", describe(lambda: json.loads("{"), skip=2))


def run_worker(agent, items=4, generator=None, log=None, **options):
    """One worker, and a learner that takes whatever comes; what the controller counted."""

    async def main(clock):
        events = EventLog(clock)
        # Every version may train on tokens of version 0: the generator gets no weights.
        rules = Rules(batch=1, max_staleness=items, epochs=1, skip_no_signal=False)
        controller = Controller(Items([{"id": n, "prompt": "ab"} for n in range(items)]), rules, clock, log=events)
        worker = AgentWorker(
            "worker",
            controller,
            generator or Echo(),
            agent,
            tokenizer=Letters(),
            clock=clock,
            **{"group": 2, **options},
        )

        async def learn():
            while (lease := await controller.take("learner")) is not None:
                await controller.trained(lease, controller.version + 1)

        await asyncio.gather(worker.run(), learn())
        controller.close()
        return worker, controller.position.outcomes, [json.loads(line) for line in events.lines]

    return simulate(main)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (lambda item, generate: 3, "agent: expected an async function, got one that returns 3"),
        (
            single_turn(lambda item, text: text == "ab"),
            "expected a finite number, got True for 'ab'; give it as float(...)",
        ),
        (
            several_turns(lambda item, text, turn: None, turns=2),
            "expected a text and a reward (None goes on), got None",
        ),
        (
            several_turns(lambda item, text, turn: "so", turns=2),
            "expected a text and a reward (None goes on), got 'so'",
        ),
    ],
)
def test_agents_and_rewards_of_a_wrong_kind_are_told(agent, said):
    with pytest.raises(NotReady) as error:
        run_worker(agent, items=1, tries=1)
    assert said in str(error.value)


@pytest.mark.parametrize("fault", ["raises", "nan", "no episode", "no answer"])
def test_an_item_whose_agent_fails_every_time_is_rejected_and_the_others_are_trained(fault):
    async def agent(item, generate):
        episode = Episode(generate.encode(item["prompt"]))
        if item["id"] == 1 and fault == "no answer":
            episode.reward = 1.0
            return episode
        await generate(episode)
        episode.reward = 1.0
        if item["id"] == 1:
            if fault == "raises":
                raise KeyError("nothing here")
            if fault == "no episode":
                return None
            episode.reward = float("nan")
        return episode

    worker, outcomes, events = run_worker(agent, tries=3)
    assert (outcomes["trained"], outcomes["rejected"]) == (3, 1)
    assert worker.failures >= 3
    [why] = [event["why"] for event in events if event["event"] == "why"]
    assert "3 tries failed, the last by " in why
    if fault == "raises":
        assert "KeyError: 'nothing here' (test_agent_workers.py:" in why
    if fault == "no episode":
        assert "agent: expected it to return an Episode, or a list of them, got None" in why


def test_a_fault_that_passes_costs_a_try_and_nothing_else():
    seen = set()

    async def agent(item, generate):
        episode = Episode(generate.encode(item["prompt"]))
        await generate(episode)
        if item["id"] not in seen:
            seen.add(item["id"])
            raise RuntimeError("the first time")
        episode.reward = 1.0
        return episode

    worker, outcomes, _ = run_worker(agent)
    assert (outcomes["trained"], outcomes["rejected"], worker.failures) == (4, 0, 4)


def test_a_generator_that_is_away_is_waited_for():
    class Away(Echo):
        async def generate(self, ids, sampling=None):
            if len(self.asked) < 5:
                self.asked.append(None)
                raise NotReady("away")
            return await super().generate(ids, sampling)

    worker, outcomes, _ = run_worker(single_turn(lambda item, text: 1.0), generator=Away(), tries=1)
    assert (outcomes["trained"], worker.failures) == (4, 0)


# ---- items -----------------------------------------------------------------------------------------------------------


def test_items_come_from_lists_and_jsonl_files(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text('{"id": "a", "x": 1}\n\n{"id": "b", "x": 2}\n')
    items = Items(path)
    assert (items.ids, items["b"]["x"], len(items)) == (["a", "b"], 2, 2)
    assert Items([{"x": 5}, {"x": 6}])["1"] == {"x": 6}
    assert Items([{"n": "q"}], id_key="n").ids == ["q"]
    assert Items(path).fingerprint == items.fingerprint != Items([{"id": "b"}, {"id": "a"}]).fingerprint


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([], "expected at least one item"),
        ([{"id": 1}, {"id": "1"}], "2 items have the id '1'"),
        ([5], "item 0: expected a dict, got int"),
        (iter([{}]), "expected a sequence of dicts or a path"),
    ],
)
def test_items_that_are_none_are_refused(source, said):
    with pytest.raises(SchemaError, match=said):
        Items(source)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "items.jsonl").write_text('{"id": "a"}\n{"id": \n')
    with pytest.raises(SchemaError, match="line 2: expected a JSON object"):
        Items(tmp_path / "items.jsonl")
    with pytest.raises(OSError, match="cannot be read"):
        Items(tmp_path / "none.jsonl")


def test_a_folder_of_datasets_is_read_or_the_package_is_named(tmp_path):
    try:
        import datasets
    except ImportError:
        with pytest.raises(ImportError, match="pip install datasets"):
            Items(tmp_path)
        return
    datasets.Dataset.from_list([{"id": "a", "x": 1}, {"id": "b", "x": 2}]).save_to_disk(str(tmp_path / "folder"))
    assert Items(tmp_path / "folder")["b"]["x"] == 2
