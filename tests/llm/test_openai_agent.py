"""Programs for the `openai` client as agents of a run: what of their calls becomes training data."""

import asyncio
import socket
from urllib.parse import urlsplit

import numpy as np
import pytest
from patience import HANG_S
from served import local, tokenizer

from sharpwave.errors import NotReady, SchemaError
from sharpwave.llm.agent import Generate, play
from sharpwave.llm.agent_worker import AgentWorker
from sharpwave.llm.clock import WallClock
from sharpwave.llm.controller import Controller
from sharpwave.llm.generators import Answer, Sampling
from sharpwave.llm.items import Items
from sharpwave.llm.openai_agent import join, session_agent
from sharpwave.llm.rules import Rules
from sharpwave.llm.session import Call

openai = pytest.importorskip("openai")

RUN = Sampling(max_tokens=10, temperature=0.8, ignore_eos=True)


def client(base_url, api_key):
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=HANG_S, max_retries=0)


def played(program, *, seed=3, item=None, run=RUN):
    """The episodes that an agent of this program makes, and the scores of their tokens by the model."""

    async def main():
        async with local() as generator:
            agent = session_agent(program, tokenizer())
            episodes = await play(agent, item or {}, Generate(generator, tokenizer(), run, seed), "test")
            return episodes, [await generator.score(episode.tokens) for episode in episodes]

    return asyncio.run(asyncio.wait_for(main(), HANG_S))


def test_a_conversation_of_completions_is_one_sequence_with_all_answers():
    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            ids = tokenizer().encode(item["question"])
            for _ in range(3):
                made = await api.completions.create(
                    model="any", prompt=ids, max_tokens=6, temperature=0.1, extra_body={"return_token_ids": True}
                )
                ids = [*ids, *made.choices[0].token_ids, *tokenizer().encode(" and?", add_special_tokens=False)]
        return 0.5

    (episode,), _ = played(program, item={"question": "12 + 30 ="})
    assert (episode.answers, sum(episode.is_made), episode.reward) == (3, 18, 0.5)
    assert episode.is_made[-6:] == [True] * 6, "nothing was answered after the last answer"
    assert episode.versions == [0] * 18


def test_answers_are_drawn_as_the_run_says_and_no_longer_than_it_says():
    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            await api.completions.create(model="any", prompt="12 +", max_tokens=50, temperature=0.1, seed=1)
        return 1.0

    (episode,), (scores,) = played(program)
    assert sum(episode.is_made) == RUN.max_tokens

    async def alone():
        async with local() as generator:
            return await Generate(generator, tokenizer(), RUN, 3).answer(tokenizer().encode("12 +"), 0)

    answer = asyncio.run(alone())
    made = np.array(episode.is_made)
    assert np.array(episode.tokens)[made].tolist() == answer.tokens
    assert np.array(episode.logprobs)[made].tolist() == answer.logprobs
    plain = np.array(scores)[made[1:]]
    assert not np.allclose(plain, answer.logprobs, atol=1e-3), "those of temperature 0.8, not of the model"


def test_an_episode_is_made_again_by_its_seed_and_equal_questions_in_it_have_other_answers():
    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            for _ in range(2):
                await api.chat.completions.create(model="any", messages=[{"role": "user", "content": "Name one."}])
        return 1.0

    (one, two), _ = played(program)
    assert one.tokens[: -RUN.max_tokens] == two.tokens[: -RUN.max_tokens]
    assert one.tokens != two.tokens
    again, _ = played(program)
    assert [episode.tokens for episode in again] == [one.tokens, two.tokens]
    other, _ = played(program, seed=4)
    assert other[0].tokens != one.tokens


def test_a_call_that_does_not_say_its_length_has_that_of_the_run():
    """Also beyond the default of `Sampling`."""

    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            await api.chat.completions.create(model="any", messages=[{"role": "user", "content": "Name one."}])
        return 1.0

    (episode,), _ = played(program, run=Sampling(max_tokens=300, ignore_eos=True))
    assert sum(episode.is_made) == 300


def call(prompt, tokens, stop="stop"):
    return Call(prompt, Answer(tokens, [-0.5] * len(tokens), [1] * len(tokens), stop), Sampling())


def test_calls_go_on_in_the_sequence_that_their_prompt_begins_with():
    calls = [
        call([1, 2], [7, 8]),
        call([1, 2], [9]),  # beside the first
        call([1, 2, 9, 3], [6]),  # goes on with the second
        call([1, 2, 7, 8, 4], [5, 5]),  # goes on with the first
        call([1, 2, 7, 0, 4], [6]),  # its template wrote the first answer in other tokens
        call([1, 2, 7, 8, 4, 5, 5, 3], [4], stop="abort"),  # its client has left
    ]
    episodes = join(calls)
    assert [episode.tokens for episode in episodes] == [[1, 2, 7, 8, 4, 5, 5], [1, 2, 9, 3, 6], [1, 2, 7, 0, 4, 6]]
    assert [episode.answers for episode in episodes] == [2, 2, 1]
    assert [sum(episode.is_made) for episode in episodes] == [4, 2, 1]
    assert join([]) == []


@pytest.mark.parametrize(
    ("reward", "calls", "said"),
    [
        (1.0, 0, "program: expected at least one call that was answered, got none"),
        (float("nan"), 1, "reward: expected a finite number, got nan"),
        ("good", 1, "reward: expected a finite number, got 'good'"),
        (None, 1, "reward: expected a finite number, got None"),
    ],
)
def test_a_program_without_calls_or_reward_is_told(reward, calls, said):
    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            for _ in range(calls):
                await api.completions.create(model="any", prompt="1 +")
        return reward

    with pytest.raises(SchemaError, match=said):
        played(program)


def test_what_the_generator_refuses_is_an_error_of_the_call():
    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            await api.completions.create(model="any", prompt=[5] * 8095)
        return 1.0

    with pytest.raises(openai.BadRequestError, match="context=8100"):
        played(program)


def test_an_episode_that_is_cancelled_ends_its_call_with_an_error_and_others_go_on(caplog):
    asked, told, clients = [], [], []

    async def program(item, base_url, api_key):
        asked.append(item["tokens"])
        api = client(base_url, api_key)
        clients.append(api)
        call = asyncio.ensure_future(api.completions.create(model="any", prompt="1 +", max_tokens=item["tokens"]))
        call.add_done_callback(lambda done: told.append(done.exception()))  # it outlives the episode
        await asyncio.shield(call)
        return 1.0

    async def main():
        async with local() as generator:
            agent = session_agent(program, tokenizer())

            def play_one(tokens):
                run = Sampling(max_tokens=tokens, ignore_eos=True)
                return asyncio.ensure_future(agent({"tokens": tokens}, Generate(generator, tokenizer(), run)))

            endless, other = play_one(8000), play_one(400)
            while (await generator.health()).running < 2:
                await asyncio.sleep(0.001)
            endless.cancel()
            (episode,) = await other
            assert sum(episode.is_made) == 400
            with pytest.raises(asyncio.CancelledError):
                await endless
            while (await generator.health()).running or len(told) < 2:
                await asyncio.sleep(0.001)
            for api in clients:
                await api.close()

    asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert sorted(asked) == [400, 8000]
    (error,) = [one for one in told if one is not None]
    assert isinstance(error, openai.APIStatusError)
    assert "the session was closed before the answer was complete" in str(error)
    assert not caplog.records, "no traceback of the server"


def test_a_run_trains_on_all_sequences_and_its_episodes_share_a_server_that_ends_with_them():
    places = []

    async def program(item, base_url, api_key):
        places.append((urlsplit(base_url).port, api_key))
        number = len(places)
        async with client(base_url, api_key) as api:
            asked = [
                api.chat.completions.create(model="any", messages=[{"role": "user", "content": text}], max_tokens=3)
                for text in ("one", "two")
            ]
            await asyncio.gather(*asked)
        return float(number % 2)

    async def main():
        clock, items = WallClock(), Items([{"id": f"i{place}"} for place in range(4)])
        controller = Controller(items, Rules(batch=4, epochs=1), clock)
        async with local() as generator:
            worker = AgentWorker(
                "agents", controller, generator, session_agent(program, tokenizer()),
                tokenizer=tokenizer(), clock=clock, group=2, sampling=RUN,
            )  # fmt: skip
            working = asyncio.ensure_future(worker.run())
            lease = await controller.take("learner")
            await controller.trained(lease, 1)
            await working
        return lease.batch, worker.failures

    batch, failures = asyncio.run(asyncio.wait_for(main(), HANG_S))
    assert failures == 0
    assert batch.seqlens["rewards"] == [[1] * 4] * 4, "two answers of two sequences each"
    assert int(np.sum(batch["loss_mask"])) == 4 * 4 * 3
    assert len({key for _, key in places}) == 8
    ports = {port for port, _ in places}
    assert len(ports) < 8
    for port in ports:
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=1):
            pass


class Restarted:
    """A generator that is gone for the first calls."""

    def __init__(self, generator, calls):
        self._generator, self.calls = generator, calls
        self.score, self.health = generator.score, generator.health

    async def generate(self, ids, sampling=None):
        self.calls -= 1
        if self.calls >= 0:
            raise NotReady("the generator is being started again")
        return await self._generator.generate(ids, sampling)


def test_a_generator_that_is_gone_for_a_while_costs_no_item_a_try():
    async def program(item, base_url, api_key):
        async with client(base_url, api_key) as api:
            await api.completions.create(model="any", prompt="12 +", max_tokens=3)
        return 1.0

    async def main():
        clock, items = WallClock(), Items([{"id": "a"}])
        controller = Controller(items, Rules(batch=1, epochs=1), clock)
        async with local() as generator:
            worker = AgentWorker(
                "agents", controller, Restarted(generator, 5), session_agent(program, tokenizer()),
                tokenizer=tokenizer(), clock=clock, group=1, tries=2, sampling=RUN,
            )  # fmt: skip
            working = asyncio.ensure_future(worker.run())
            await controller.trained(await controller.take("learner"), 1)
            await working
        return controller.stats()["trained"], worker.failures

    assert asyncio.run(asyncio.wait_for(main(), HANG_S)) == (1, 0)
