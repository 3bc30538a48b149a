"""A server of a tiny model in this process, with a client."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
from patience import HANG_S

from sharpwave.llm.generators import Engine, LocalGenerator
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.model import small_model, small_tokenizer
from sharpwave.llm.tokenizer import ChatTokenizer

ENDLESS = 8000  # tokens; no test waits for so many
GENERATE = "/inference/v1/generate"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_hidden_layers": 1}
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<eos>\n{% endfor %}{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def tiny(**changes):
    return small_model(**{**SMALL, "max_position_embeddings": 8192, **changes})


def tokenizer():
    return ChatTokenizer(small_tokenizer(), TEMPLATE)


@contextlib.asynccontextmanager
async def local(model=None, **engine):
    given = {"slots": 4, "context": 8100, "tokenizer": tokenizer(), **engine}
    async with LocalGenerator(Engine(model or tiny(), **given)) as generator:
        yield generator


def served(main, *, engine=None, **server):
    """Runs main(client, generator) against a server of its own."""

    async def bounded():
        async with local(**(engine or {})) as generator:
            given = {"tokenizer": tokenizer(), **server}
            async with GeneratorServer(generator, **given) as running, client_of(running.address) as client:
                return await asyncio.wait_for(main(client, generator), HANG_S)

    return asyncio.run(bounded())


def client_of(address, **given):
    return httpx.AsyncClient(base_url=address, timeout=HANG_S, trust_env=False, **given)


async def post(client, path, body=None, status=200):
    # Not httpx' own encoder: it refuses NaN, which others send.
    content = None if body is None else json.dumps(body)
    answer = await client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.json()


async def refusal(client, path, body, status=400):
    """The message of an error object."""
    error = (await post(client, path, body, status))["error"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


async def stream(client, path, body):
    """The chunks of a stream; the last event must be [DONE]."""
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def until_async(holds, what="what the test waits for"):
    async def look():
        while not holds():
            await asyncio.sleep(0.002)

    try:
        await asyncio.wait_for(look(), HANG_S)
    except asyncio.TimeoutError:
        raise AssertionError(f"{what} did not happen") from None
