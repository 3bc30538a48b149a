"""Code written for the `openai` client, run against a session; what is recorded of it."""

import asyncio
import json

import numpy as np
import pytest
from patience import HANG_S
from served import TEMPLATE, client_of, local, tiny, tokenizer, until_async

from sharpwave.llm.generators import Answer, Health, Sampling
from sharpwave.llm.model import save_model, small_tokenizer
from sharpwave.llm.session import Session, SessionServer
from sharpwave.llm.tokenizer import ChatTokenizer

openai = pytest.importorskip("openai")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


CLIENTS = []


def run(main):
    async def with_engine():
        async with local() as generator:
            await main(generator)

    run_alone(with_engine)


def run_alone(main):
    async def bounded():
        try:
            await asyncio.wait_for(main(), HANG_S)
        finally:
            while CLIENTS:
                await CLIENTS.pop().close()

    asyncio.run(bounded())


def client(session, key=None):
    made = openai.AsyncOpenAI(base_url=session.base_url, api_key=key or session.api_key, timeout=HANG_S, max_retries=0)
    CLIENTS.append(made)
    return made


class Scripted:
    """A generator of another kind: it gives whole answers only, those that it was told."""

    def __init__(self, *texts):
        self.texts, self.prompts, self.gate = list(texts), [], asyncio.Event()
        self.gate.set()

    async def generate(self, ids, sampling=None):
        self.prompts.append(list(ids))
        await self.gate.wait()
        tokens = tokenizer().encode(self.texts.pop(0))
        return Answer(tokens, [-0.5] * len(tokens), [3] * len(tokens), "stop", 2)

    async def score(self, ids):
        return [0.0] * (len(ids) - 1)

    async def health(self):
        return Health(3, 0, 0)


def test_several_turns_are_recorded_as_the_model_saw_them():
    async def agent(api):
        """Knows nothing of tokens."""
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "12 + 30 = ?"}]
        for _ in range(3):
            answer = await api.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=10, seed=1)
            assert answer.choices[0].finish_reason in ("stop", "length")
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append(
                {"role": "user", "content": [{"type": "text", "text": "Are "}, {"type": "text", "text": "you sure?"}]}
            )
        return messages

    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            messages = await agent(client(session))
            assert len(session.calls) == 3
            for turn, call in enumerate(session.calls):
                said = [{**one, "content": one["content"]} for one in messages[: 2 + 2 * turn]]
                for one in said:
                    if isinstance(one["content"], list):
                        one["content"] = "Are you sure?"
                text = tokenizer().apply_chat_template(said)
                assert call.prompt == tokenizer().encode(text, add_special_tokens=False)
                assert call.messages == said
                answer = call.answer
                assert tokenizer().decode(answer.tokens, skip_special_tokens=True) == messages[2 + 2 * turn]["content"]
                assert answer.versions == [0] * len(answer.tokens)
                scores = await generator.score(call.prompt + answer.tokens)
                assert np.allclose(scores[len(call.prompt) - 1 :], answer.logprobs, atol=1e-4)
                assert call.sampling.max_tokens == 10

    run(main)


def test_streams_of_a_blocking_client_are_recorded_before_their_end():
    def agent(base_url, api_key, calls):
        with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=HANG_S, max_retries=0) as api:
            return texts_of(api, calls)

    def texts_of(api, calls):
        texts = []
        for kind, given in (
            (api.chat.completions, {"messages": [{"role": "user", "content": "hi"}]}),
            (api.completions, {"prompt": "hi"}),
        ):
            chunks = list(
                kind.create(model="m", max_tokens=30, stream=True, stream_options={"include_usage": True}, **given)
            )
            assert len(calls) == len(texts) + 1
            assert chunks[-1].usage.completion_tokens == len(calls[-1].answer.tokens)
            choices = [chunk.choices[0] for chunk in chunks[:-1]]
            assert choices[-1].finish_reason in ("stop", "length")
            texts.append("".join(one.text if hasattr(one, "text") else one.delta.content or "" for one in choices))
        return texts

    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            texts = await asyncio.to_thread(agent, session.base_url, session.api_key, session.calls)
            found = [tokenizer().decode(one.answer.tokens, skip_special_tokens=True) for one in session.calls]
            assert texts == found
            assert session.calls[1].messages is None
            assert session.calls[1].prompt == tokenizer().encode("hi")

    run(main)


def test_sessions_at_one_server_have_records_of_their_own():
    async def main(generator):
        async with SessionServer(generator, tokenizer()) as server:
            sessions = [server.open() for _ in range(3)]

            async def work(number):
                api = client(sessions[number])
                await asyncio.gather(
                    *(
                        api.completions.create(model="m", prompt=f"{number}", max_tokens=3, n=2)
                        for _ in range(number + 1)
                    )
                )

            await asyncio.gather(*(work(number) for number in range(3)))
            for number, session in enumerate(sessions):
                assert [call.prompt for call in session.calls] == [tokenizer().encode(f"{number}")] * 2 * (number + 1)
            await sessions[0].close()
            for key in (sessions[0].api_key, "sw-wrong"):
                with pytest.raises(openai.AuthenticationError, match="key of an open session"):
                    await client(server, key).models.list()
            assert (await client(sessions[1]).models.list()).data[0].id == "sharpwave"

    run(main)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_caller_who_leaves_is_recorded_with_the_tokens_so_far(is_stream):
    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            headers = {"authorization": f"Bearer {session.api_key}"}
            given = {"prompt": "hi", "max_tokens": 8000, "ignore_eos": True, "stream": is_stream}
            async with client_of(session.base_url, headers=headers) as other:
                task = asyncio.create_task(other.post("/completions", json=given))
                await until_async(lambda: generator.engine._steps > 5)
                task.cancel()
            await until_async(lambda: len(session.calls) == 1, "the record")
            (call,) = session.calls
            assert call.answer.stop == "abort"
            assert 1 <= len(call.answer.tokens) == len(call.answer.logprobs) == len(call.answer.versions) < 8000

    run(main)


def test_an_answer_that_crosses_a_swap_has_both_versions(tmp_path):
    save_model(tiny(seed=1), tmp_path)

    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            api = client(session)
            pieces = await api.completions.create(
                model="m", prompt="hi", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(pieces)
            await generator.update(tmp_path, 5)
            steps = generator.engine._steps
            await until_async(lambda: generator.engine._steps > steps + 3)
            await generator.abort()
            async for _ in pieces:
                pass
            (call,) = session.calls
            assert set(call.answer.versions) == {0, 5}

    run(main)


def test_a_session_that_ends_records_answers_on_their_way():
    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            given = {"model": "m", "prompt": "hi", "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
            task = asyncio.create_task(client(session).completions.create(**given))
            await until_async(lambda: generator.engine._steps > 5)
        assert (await task).choices[0].finish_reason == "abort"
        assert session.calls[0].answer.stop == "abort"
        assert (await generator.health()).running == 0

    run(main)


def test_refused_calls_are_errors_of_the_client_and_not_recorded():
    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            api = client(session)
            said = [{"role": "user", "content": "hi"}]
            for given, words in [
                ({"messages": []}, "messages: expected at least one"),
                ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content: expected a string"),
                ({"messages": said, "temperature": 9e9}, "temperature="),
                ({"messages": said, "response_format": {"type": "json_object"}}, "response_format: "),
                ({"messages": said, "tool_choice": "required", "tools": TOOLS}, "tool_choice: "),
                ({"messages": said, "max_tokens": 9000}, "context=8100"),
                ({"messages": said, "logprobs": True, "top_logprobs": 3}, "top_logprobs: 3 is not supported"),
                ({"messages": said, "extra_body": {"colour": "red"}}, "colour: is not known"),
            ]:
                with pytest.raises(openai.BadRequestError, match=words):
                    await api.chat.completions.create(model="m", **given)
            assert session.calls == []

    run(main)


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_are_called_and_answered_through_the_template(is_stream):
    call = 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
    generator = None

    async def ask(api, messages):
        given = {"model": "m", "messages": messages, "tools": TOOLS}
        if not is_stream:
            choice = (await api.chat.completions.create(**given)).choices[0]
            return choice.finish_reason, choice.message.content, choice.message.tool_calls
        chunks = [chunk.choices[0] async for chunk in await api.chat.completions.create(stream=True, **given)]
        calls = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
        return chunks[-1].finish_reason, "".join(chunk.delta.content or "" for chunk in chunks), calls

    async def main():
        nonlocal generator
        generator = Scripted(call, "It is 42.", "<tool_call>{broken</tool_call>")
        async with Session(generator, tokenizer()) as session:
            api, messages = client(session), [{"role": "user", "content": "12 + 30 = ?"}]
            reason, content, calls = await ask(api, messages)
            assert (reason, content.strip()) == ("tool_calls", "Let me see.")
            assert calls[0].function.name == "add"
            numbers = json.loads(calls[0].function.arguments)
            made = {"name": "add", "arguments": calls[0].function.arguments}
            messages += [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": calls[0].id, "type": "function", "function": made}],
                },
                {"role": "tool", "tool_call_id": calls[0].id, "content": str(numbers["a"] + numbers["b"])},
            ]
            assert await ask(api, messages) == ("stop", "It is 42.", [] if is_stream else None)
            assert (await ask(api, messages))[1] == "<tool_call>{broken</tool_call>"
            seen = tokenizer().decode(generator.prompts[1])
            assert '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 30}}</tool_call>' in seen
            assert "<bos>tool\n42<eos>" in seen
            assert json.dumps(TOOLS) in seen
            assert [one.answer.versions[0] for one in session.calls] == [3, 3, 3]
            assert session.calls[0].tools == TOOLS

    run_alone(main)


def test_with_another_generator_a_call_is_recorded_whole_after_the_caller_has_left():
    async def main():
        generator = Scripted("never read")
        generator.gate.clear()
        async with Session(generator, tokenizer()) as session:
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with client_of(session.base_url, headers=headers) as other:
                task = asyncio.create_task(other.post("/completions", json={"prompt": "hi"}))
                await until_async(lambda: generator.prompts)
                task.cancel()
            generator.gate.set()
            await until_async(lambda: session.calls)
            assert tokenizer().decode(session.calls[0].answer.tokens) == "never read"

    run_alone(main)


def test_a_tokenizer_of_transformers_serves_as_well(tmp_path):
    transformers = pytest.importorskip("transformers")
    small_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), ChatTokenizer.read(tmp_path)

    async def main(generator):
        said = [{"role": "user", "content": "hi"}]
        found = []
        for one in (theirs, ours):
            async with Session(generator, one) as session:
                given = {"model": "m", "messages": said, "max_tokens": 8, "seed": 3}
                answer = await client(session).chat.completions.create(**given)
                found.append((session.calls[0].prompt, answer.choices[0].message.content))
        assert found[0] == found[1]

    run(main)


def test_the_settings_of_a_call_are_those_of_the_request():
    async def main(generator):
        async with Session(generator, tokenizer()) as session:
            await client(session).chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "hi"}],
                max_completion_tokens=5,
                temperature=0.5,
                top_p=0.9,
                stop=["x"],
                seed=7,
                user="me",
                extra_body={"top_k": 3},
            )
            wanted = Sampling(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, stop=("x",), seed=7)
            assert session.calls[0].sampling == wanted

    run(main)
