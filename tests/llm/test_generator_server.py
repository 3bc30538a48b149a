"""Our HTTP server: tokens in and out, control, and requests that are wrong."""

import asyncio
import json

import httpx
import pytest
from served import ENDLESS, GENERATE, client_of, local, post, refusal, served, stream, tiny, until_async

from sharpwave.errors import NotReady, SchemaError, StorageError
from sharpwave.llm.generators import Sampling
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.generators.vllm import VLLMClient
from sharpwave.llm.model import save_model


def body(count=20, ids=(5, 6, 7), **settings):
    return {"token_ids": list(ids), "sampling_params": {"max_tokens": count, "ignore_eos": True, **settings}}


async def begun(client, generator, given, count=1):
    """A task that waits for an answer, when the generator has made some tokens of it."""
    task = asyncio.create_task(client.post(GENERATE, json=given))
    await until_async(lambda: generator.engine.running == count, "the begin of the answer")
    steps = generator.engine._steps
    await until_async(lambda: generator.engine._steps > steps + 2)
    return task


def test_an_answer_has_tokens_log_probabilities_and_spans_of_versions():
    async def main(client, generator):
        given = {**body(20, seed=4, logprobs=0, prompt_logprobs=0), "return_token_ids": True, "request_id": "mine"}
        found = await post(client, GENERATE, given)
        sampling = Sampling(max_tokens=20, seed=4, ignore_eos=True)
        wanted = await generator.generate([5, 6, 7], sampling)
        (choice,) = found["choices"]
        assert choice["token_ids"] == wanted.tokens
        assert [one["token_id"] for one in choice["logprobs"]["content"]] == wanted.tokens
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(wanted.logprobs, abs=1e-4)
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 20}]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert found["request_id"] == "generate-tokens-mine"
        assert found["prompt_token_ids"] == [5, 6, 7]
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
        scores = await generator.score([5, 6, 7])
        assert found["prompt_logprobs"][0] is None
        assert [one[str(i)]["logprob"] for i, one in zip((6, 7), found["prompt_logprobs"][1:], strict=True)] == scores
        assert (await post(client, GENERATE, body(3)))["choices"][0]["logprobs"] is None

    served(main)


def test_a_stream_gives_the_same_answer_in_pieces():
    async def main(client, generator):
        given = {**body(60, seed=4, logprobs=0, n=2), "return_token_ids": True}
        whole = await post(client, GENERATE, given)
        chunks = await stream(client, GENERATE, {**given, "stream_options": {"include_usage": True}})
        assert chunks[0]["prompt_token_ids"] == [5, 6, 7]
        assert chunks.pop()["usage"] == whole["usage"]
        assert len(chunks) > 4
        for at, wanted in enumerate(whole["choices"]):
            own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == at]
            assert [token for one in own for token in one["token_ids"]] == wanted["token_ids"]
            assert own[-1]["weight_versions"] == wanted["weight_versions"]
            assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]

    served(main)


def test_stop_reasons_are_those_of_the_request():
    async def main(client, generator):
        free = (await post(client, GENERATE, body(30, seed=1)))["choices"][0]["token_ids"]
        (choice,) = (await post(client, GENERATE, body(30, seed=1, stop_token_ids=[free[9]])))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", free[9])
        assert choice["token_ids"] == free[: free.index(free[9]) + 1]
        text = generator.engine._tokenizer.decode(free[5:7])
        (choice,) = (await post(client, GENERATE, body(30, seed=1, stop=text)))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text)
        # Without max_tokens there are 16, as vLLM has it. A model's own end of text has no stop reason.
        given = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 1, "ignore_eos": True}}
        (choice,) = (await post(client, GENERATE, given))["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 16)
        given["sampling_params"] = {"seed": 1, "temperature": 5.0, "max_tokens": 4000}
        (choice,) = (await post(client, GENERATE, given))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", None, 2)
        assert len(choice["token_ids"]) > 16

    served(main)


@pytest.mark.parametrize("is_flushed", [True, False])
def test_new_weights_from_disk_go_into_answers_on_their_way(tmp_path, is_flushed):
    save_model(tiny(seed=1), tmp_path / "new")

    async def main(client, generator):
        task = await begun(client, generator, body(ENDLESS))
        given = {"model_path": str(tmp_path / "new"), "weight_version": "3", "flush_cache": is_flushed}
        found = await post(client, "/update_weights_from_disk", given)
        assert found["success"] is True
        assert not task.done()
        assert "updated to 3" in found["message"]
        assert (await client.get("/weight_info")).json() == {"weight_version": "3"}
        steps = generator.engine._steps
        await until_async(lambda: generator.engine._steps > steps + 20)
        assert await post(client, "/abort_requests", {}) == {"status": "aborted", "aborted": 1}
        (choice,) = (await task).json()["choices"]
        assert choice["finish_reason"] == "abort"
        old, new = choice["weight_versions"]
        assert (old["version"], old["start"], new["version"], new["start"]) == ("0", 0, "3", old["end"])
        assert new["end"] == len(choice["token_ids"])

    served(main)


def test_an_update_may_end_all_answers(tmp_path):
    save_model(tiny(seed=1), tmp_path / "new")

    async def main(client, generator):
        task = await begun(client, generator, body(ENDLESS))
        given = {"model_path": str(tmp_path / "new"), "weight_version": 3, "abort_all_requests": True}
        await post(client, "/update_weights_from_disk", given)
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"
        assert generator.engine.running == 0

    served(main)


def test_a_refused_update_changes_nothing(tmp_path):
    async def main(client, generator):
        before = await generator.score([5, 6, 7])
        save_model(tiny(hidden_size=64), tmp_path / "wide")
        for path, version, words in [
            (tmp_path / "missing", 1, "expected a Hugging Face folder"),
            ("x" * 5000, 1, "xxx"),
            (tmp_path / "wide", 1, "has shape"),
            (tmp_path / "wide", 0, "has shape"),
        ]:
            given = {"model_path": str(path), "weight_version": version}
            found = await post(client, "/update_weights_from_disk", given, 400)
            assert found["success"] is False
            assert words in found["message"]
        for given, words in [
            ({"weight_version": "1"}, "model_path: is missing"),
            ({"model_path": "x"}, "weight_version: None, expected a number"),
            ({"model_path": "x", "weight_version": "new"}, "weight_version: 'new'"),
            ({"model_path": "x", "weight_version": "9" * 5000}, "... (str), expected a number above the version"),
            ({"model_path": "x", "weight_version": 1, "load_format": "pt"}, 'load_format: "pt" is not supported'),
        ]:
            assert words in await refusal(client, "/update_weights_from_disk", given)
        assert "comes with its weights" in await refusal(client, "/update_weight_version", {"new_version": "7"})
        assert await generator.score([5, 6, 7]) == before
        assert (await client.get("/weight_info")).json() == {"weight_version": "0"}
        assert (await post(client, GENERATE, body(3)))["choices"][0]["finish_reason"] == "length"

    served(main)


def test_an_update_of_an_engine_that_is_gone_is_no_refusal_of_the_weights(tmp_path):
    save_model(tiny(seed=1), tmp_path)

    async def main(client, generator):
        remote = VLLMClient(str(client.base_url), patience_s=0.1)
        await remote.health()
        await generator.close()
        given = {"model_path": str(tmp_path), "weight_version": 1}
        assert "was closed" in await refusal(client, "/update_weights_from_disk", given, 503)
        with pytest.raises(NotReady, match="was closed"):
            await remote.update(tmp_path, 1)
        await remote.close()

    served(main)


def test_requests_in_a_pause_wait_and_answers_are_kept():
    async def main(client, generator):
        running = await begun(client, generator, {**body(ENDLESS), "request_id": "a"})
        for _ in range(2):
            assert await post(client, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        steps = generator.engine._steps
        late = asyncio.create_task(client.post(GENERATE, json=body(3)))
        await until_async(lambda: len(generator._held) == 1)
        assert generator.engine._steps == steps
        assert not running.done()
        for _ in range(2):
            assert await post(client, "/resume") == {"status": "resumed"}
        assert (await late).json()["choices"][0]["finish_reason"] == "length"
        await post(client, "/abort_requests", {"request_ids": ["generate-tokens-a"]})
        (choice,) = (await running).json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert len(choice["token_ids"]) > 3
        assert (await client.get("/is_paused")).json() == {"is_paused": False}

    served(main)


def test_the_default_pause_aborts():
    async def main(client, generator):
        running = await begun(client, generator, body(ENDLESS))
        await post(client, "/pause")
        (choice,) = (await running).json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert "expected abort, wait or keep" in await refusal(client, "/pause?mode=later", None)
        assert "clear_cache: 'perhaps'" in await refusal(client, "/pause?clear_cache=perhaps", None)
        assert "speed: is not known" in await refusal(client, "/pause?speed=1", None)

    served(main)


def test_one_answer_is_aborted_by_its_id():
    async def main(client, generator):
        first = await begun(client, generator, {**body(ENDLESS), "request_id": "a"})
        second = await begun(client, generator, {**body(ENDLESS), "request_id": "b"}, count=2)
        for names, count in [([], 0), (["unknown"], 0), (["unknown", "a", "a", "generate-tokens-a"], 1)]:
            found = await post(client, "/abort_requests", {"request_ids": names})
            assert found == {"status": "aborted", "aborted": count}
        assert (await first).json()["choices"][0]["finish_reason"] == "abort"
        assert not second.done()
        assert generator.engine.running == 1
        assert await post(client, "/abort_requests") == {"status": "aborted", "aborted": 1}
        assert (await second).json()["choices"][0]["finish_reason"] == "abort"

    served(main)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_answer(is_stream):
    async def main(client, generator):
        async with client_of(client.base_url) as other:
            given = {**body(ENDLESS, n=2), "stream": is_stream}
            task = await begun(other, generator, given, count=2)
            task.cancel()
        await until_async(lambda: generator.engine.running == 0, "the end of the answers")
        assert generator.engine._steps < ENDLESS

    served(main)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_in_a_pause_is_forgotten(is_stream):
    async def main(client, generator):
        await post(client, "/pause?mode=keep")
        async with client_of(client.base_url) as other:
            task = asyncio.create_task(other.post(GENERATE, json={**body(ENDLESS), "stream": is_stream}))
            await until_async(lambda: generator._held)
            task.cancel()
        await until_async(lambda: not generator._ongoing, "the end of the answer")
        assert not generator._held

    served(main)


def test_wrong_requests_are_refused_with_what_was_expected():
    async def main(client, generator):
        for change, words in [
            ({"token_ids": []}, "token_ids: expected at least one token id"),
            ({"token_ids": "5"}, 'token_ids: "5", expected a list'),
            ({"token_ids": [5, True]}, "token_ids[1]: true, expected an integer"),
            ({"token_ids": [5, 2**70]}, "expected token ids"),
            ({"token_ids": [5, 259]}, "ids[1]=259, expected 0 to 258"),
            ({"token_ids": [5] * 8200}, "need 8220 places, context=8100"),
            ({"tokens": [5]}, "tokens: is not known to this server"),
            ({"output_mode": "sound"}, 'output_mode: "sound", expected "tokens" or "text"'),
            ({"priority": 3}, "priority: 3 is not supported, expected 0"),
        ]:
            assert words in await refusal(client, GENERATE, {**body(20), **change})
        for settings, words in [
            ({"top_q": 0.5}, "sampling_params.top_q: is not known to this server"),
            ({"temperature": -1}, "temperature=-1, expected a number from 0"),
            ({"temperature": "hot"}, 'sampling_params.temperature: "hot", expected a number'),
            ({"max_tokens": 0}, "max_tokens=0, expected an integer"),
            ({"top_k": 2**63}, "top_k=9223372036854775808, expected an integer from 0 to 2**31 - 1"),
            ({"temperature": float("nan")}, "temperature=nan, expected a number"),
            ({"seed": -1}, "seed=-1, expected"),
            ({"stop": ["x"] * 65}, "sampling_params.stop: 65 strings, expected at most 64"),
            ({"n": 0}, "sampling_params.n: 0, expected 1 to 1024"),
            ({"stop": [3]}, "sampling_params.stop[0]: 3, expected a string"),
            ({"logprobs": 5}, "sampling_params.logprobs: 5 is not supported"),
            ({"min_tokens": 5}, "sampling_params.min_tokens: 5 is not supported, expected 0"),
            ({"repetition_penalty": 1.2}, "repetition_penalty: 1.2 is not supported"),
        ]:
            assert words in await refusal(client, GENERATE, {"token_ids": [5], "sampling_params": settings})
        assert "'other' is not served here" in await refusal(client, GENERATE, {**body(3), "model": "other"}, 404)
        accepted = {"min_tokens": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "detokenize": False, "top_k": -1}
        await post(client, GENERATE, {**body(3, **accepted), "model": "sharpwave", "cache_salt": "v1", "priority": 0})
        assert generator.engine.running == generator.engine.waiting == 0

    served(main)


def test_bodies_that_are_no_json_object_or_too_large_are_refused():
    async def main(client, generator):
        for content, status, words in [
            (b"{", 400, "not JSON"),
            (b"\xff\xfe", 400, "not valid Unicode"),
            (b'{"token_ids": [5], "request_id": "\xed\xa0\x80"}', 400, "not valid Unicode"),
            (b"[" * 100_000, 400, "not JSON"),
            (b"[5]", 400, "the body is [5], expected a JSON object"),
            (json.dumps({"token_ids": [5] * 100_000}).encode(), 413, "more than 200,000 bytes"),
        ]:
            answer = await client.post(GENERATE, content=content)
            assert answer.status_code == status
            assert words in answer.json()["error"]["message"]

        async def pieces():
            for _ in range(300):
                yield b" " * 1000

        assert (await client.post(GENERATE, content=pieces())).status_code == 413
        assert (await client.get("/nothing")).json()["error"]["type"] == "NotFoundError"
        assert (await client.get(GENERATE)).status_code == 405

    served(main, max_body_bytes=200_000)


def test_text_with_half_a_character_is_refused_wherever_it_stands():
    async def main(client, generator):
        half, hi = "\ud800", {"role": "user", "content": "hi"}
        for path, given in [
            (GENERATE, {**body(3), "request_id": half}),
            (GENERATE, {**body(3), half: 1}),
            (GENERATE, body(3, stop=[half])),
            ("/v1/completions", {"prompt": f"x{half}"}),
            ("/v1/chat/completions", {"messages": [{**hi, "content": half}]}),
            ("/update_weights_from_disk", {"model_path": half, "weight_version": 1}),
        ]:
            assert "not valid Unicode" in await refusal(client, path, given)
        given = {"messages": [{**hi, "content": "\U0001f30a"}], "max_tokens": 2}  # a whole one has two escapes
        assert (await post(client, "/v1/chat/completions", given))["usage"]["completion_tokens"] <= 2

    served(main)


def test_a_step_that_fails_is_told_as_an_error():
    async def main(client, generator):
        def failing(hidden):
            raise RuntimeError("the device is full")

        generator.engine.model.logits = failing
        assert "the device is full" in await refusal(client, GENERATE, body(3), 503)
        assert "the device is full" in await refusal(client, GENERATE, {**body(3), "stream": True}, 503)
        assert (await client.get("/health")).status_code == 200

    served(main)


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event():
    async def main(client, generator):
        logits, calls = generator.engine.model.logits, 0

        def failing(hidden):
            nonlocal calls
            calls += 1
            if calls > 5:
                raise RuntimeError("the device is full")
            return logits(hidden)

        generator.engine.model.logits = failing
        chunks = await stream(client, GENERATE, body(20))
        assert "the device is full" in chunks[-1]["error"]["message"]
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-1]) == 5

    served(main)


def test_a_key_opens_everything_but_health():
    key = "0123456789abcdef"

    async def main(client, generator):
        assert (await client.get("/health")).status_code == 200
        for headers in ({}, {"authorization": "Bearer 0123456789abcdeX"}, {"authorization": key}):
            answer = await client.get("/weight_info", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "UnauthorizedError"
        right = {"authorization": f"Bearer {key}", "origin": "http://example.com"}
        assert (await client.get("/weight_info", headers=right)).status_code == 200

    served(main, key=key)


def test_without_a_key_pages_in_a_browser_are_refused():
    async def main(client, generator):
        answer = await client.post("/pause", headers={"origin": "http://example.com"})
        assert answer.status_code == 403
        assert not generator.is_paused

    served(main)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "0.0.0.0"}, "host='0.0.0.0' is reached from other machines; give key="),
        ({"host": "example.com"}, "give key="),
        ({"key": "short"}, "key= has 5 characters, expected at least 16"),
        ({"port": 70000}, "port=70000"),
    ],
)
def test_a_server_beyond_this_machine_needs_a_key(given, words):
    async def main():
        async with local() as generator:
            GeneratorServer(generator, **given)

    with pytest.raises(SchemaError, match=words.replace("(", r"\(")):
        asyncio.run(main())


def test_a_port_in_use_is_told():
    async def main():
        async with local() as generator, GeneratorServer(generator) as server:
            GeneratorServer(generator, port=int(server.address.rpartition(":")[2]))

    with pytest.raises(StorageError, match=r"cannot listen on 127\.0\.0\.1:"):
        asyncio.run(main())


def test_close_gives_running_requests_their_time_and_then_their_tokens():
    async def main():
        async with local() as generator:
            server = await GeneratorServer(generator).start()
            async with client_of(server.address) as client:
                task = await begun(client, generator, body(ENDLESS))
                short = asyncio.create_task(client.post(GENERATE, json=body(40)))
                await until_async(lambda: generator.engine.running == 2 or short.done())
                await server.close(0.5)
                assert (await task).json()["choices"][0]["finish_reason"] == "abort"
                assert (await short).json()["choices"][0]["finish_reason"] in ("length", "abort")
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health")

    asyncio.run(main())


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_start_that_is_cancelled_leaves_no_server(turns):
    """`async with` closes only what it has entered."""

    async def main():
        async with local() as generator:
            answer = asyncio.ensure_future(generator.generate([1, 2], Sampling(max_tokens=ENDLESS, ignore_eos=True)))
            server = GeneratorServer(generator)
            starting = asyncio.ensure_future(server.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            assert starting.cancelled()
            with pytest.raises(httpx.ConnectError):
                async with client_of(server.address) as client:
                    await client.get("/health")
            assert not answer.done()  # of another user of the generator
            answer.cancel()
            await asyncio.wait([answer])
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
