"""SGLang's protocol, by recorded answers: the parser, and the client against a server that plays them back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sglang_exchanges as recorded
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators import Sampling
from sharpwave.llm.generators.partial import Partial
from sharpwave.llm.generators.remote import Gone, Refused
from sharpwave.llm.generators.server.http_server import HttpServer
from sharpwave.llm.generators.sglang import SGLangClient, parameters, read_event, read_scores, sglang_server

LENGTH = {"type": "length", "length": 3}


def read(events: list[dict[str, Any]]) -> Partial:
    part = Partial()
    for event in events:
        read_event(event, part, 0, lambda text: 0 if text == "default" else int(text))
    return part


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_stream_has_the_tokens_of_the_whole_answer(is_incremental: bool) -> None:
    part = read(recorded.streamed(recorded.WHOLE, is_incremental=is_incremental))
    assert part == read([recorded.WHOLE])
    assert part == Partial([19, 10, 38], [-4.1327, -4.0386, -4.1641], [0, 0, 0], "length", None)


def test_spans_are_the_versions_of_the_tokens_not_the_version_at_the_end() -> None:
    whole = recorded.ended(recorded.WHOLE, LENGTH, [("4", 0, 2), ("7", 2, 3)])
    assert read([whole]).versions == [4, 4, 7]
    assert read(recorded.streamed(whole, is_incremental=True)).versions == [4, 4, 7]


@pytest.mark.parametrize("spans", [[("4", 0, 1), ("7", 2, 3)], [("4", 0, 2), ("7", 1, 3)], [("4", 0, 2)]])
def test_spans_that_do_not_tile_the_answer_are_not_believed(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(Gone, match="weight_versions"):
        read([recorded.ended(recorded.WHOLE, LENGTH, spans)])


def test_ends_of_answers() -> None:
    stopped = read([recorded.ended(recorded.WHOLE, {"type": "stop", "matched": 38})])
    assert (stopped.stop, stopped.matched) == ("stop", 38)
    aborted = read([recorded.ended(recorded.WHOLE, {"type": "abort", "message": "Aborted"})])
    assert (aborted.stop, aborted.tokens) == ("abort", [19, 10, 38])
    wrong = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}
    with pytest.raises(Refused, match="too long"):
        read([recorded.ended(recorded.WHOLE, wrong)])
    with pytest.raises(Gone, match="out of memory"):
        read([recorded.ended(recorded.WHOLE, {"type": "abort", "message": "out of memory", "status_code": 503})])


def test_an_answer_whose_logprobs_are_of_other_tokens_is_not_believed() -> None:
    told = {**recorded.WHOLE["meta_info"], "output_token_logprobs": [[-4.1, 19, None], [-4.0, 11, None]]}
    with pytest.raises(Gone, match="3 tokens and 2 log-probabilities"):
        read([{**recorded.WHOLE, "meta_info": told}])


def test_scores_leave_out_the_first_token() -> None:
    assert read_scores(recorded.SCORED, [5, 6, 14]) == [-4.31, -4.52]
    with pytest.raises(Gone, match="expected those of 2"):
        read_scores(recorded.SCORED, [5, 6])


def test_settings_by_the_names_of_sglang() -> None:
    with pytest.raises(SchemaError, match="ignores stop ids"):
        parameters(Sampling(stop_ids=(4,), ignore_eos=True))
    given = Sampling(max_tokens=9, temperature=0.5, seed=3, stop_ids=(4,), stop=("x",))
    assert parameters(given) == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": -1,
        "stop_token_ids": [4],
        "ignore_eos": False,
        "stop": ["x"],
        "sampling_seed": 3,
    }
    for filters in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        with pytest.raises(SchemaError, match="not of the distribution that is sampled from"):
            parameters(Sampling(**filters))


def test_the_command_has_what_the_client_needs() -> None:
    command = sglang_server("m", "--tp", "2", key="a-key").command
    assert "--incremental-streaming-output" in command
    assert command[-4:] == ["--api-key", "a-key", "--tp", "2"]
    with pytest.raises(SchemaError, match="--port"):
        sglang_server("m", "--port", "1")


class Playback:
    """Answers as recorded, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.update: tuple[dict[str, Any], int] = (recorded.UPDATED, 200)
        self.is_held = False
        self.released = asyncio.Event()

    def app(self) -> Starlette:
        plain = {
            "/health": None,
            "/server_info": {"context_length": 512},
            "/model_info": recorded.MODEL,
            "/pause_generation": recorded.PAUSED,
            "/continue_generation": recorded.CONTINUED,
        }
        routes = [Route(path, self.plain(answer), methods=["GET", "POST"]) for path, answer in plain.items()]
        routes += [
            Route("/update_weights_from_disk", self.updated, methods=["POST"]),
            Route("/abort_request", self.aborted, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def note(self, request: Request) -> Any:
        body = await request.body()
        found = json.loads(body) if body else None
        if request.method == "POST":
            self.asked.append((request.url.path, found))
        assert request.headers["authorization"] == "Bearer a-key"
        return found

    def plain(self, answer: Any) -> Callable[[Request], Awaitable[Response]]:
        async def reply(request: Request) -> Response:
            await self.note(request)
            return Response() if answer is None else JSONResponse(answer)

        return reply

    async def updated(self, request: Request) -> Response:
        await self.note(request)
        return JSONResponse(self.update[0], self.update[1])

    async def aborted(self, request: Request) -> Response:
        await self.note(request)
        self.released.set()
        return Response()

    async def generate(self, request: Request) -> Response:
        body = await self.note(request)
        if 99999 in body["input_ids"]:
            return JSONResponse(recorded.REFUSED, 400)
        if not body.get("stream"):
            return JSONResponse(recorded.SCORED)
        events = recorded.streamed(recorded.WHOLE, is_incremental=True)

        async def lines() -> Any:
            yield f"data: {json.dumps(events[0])}\n\n"
            if self.is_held:
                await self.released.wait()
                end = recorded.ended(events[0], {"type": "abort", "message": "Aborted"})
                yield f"data: {json.dumps({**end, 'output_ids': [], 'meta_info': self.without_new(end)})}\n\n"
            else:
                for event in events[1:]:
                    yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    @staticmethod
    def without_new(event: dict[str, Any]) -> dict[str, Any]:
        return {**event["meta_info"], "output_token_logprobs": []}


async def play(work: Callable[[Playback, SGLangClient], Awaitable[None]]) -> None:
    playback = Playback()

    async def nothing() -> None:
        pass

    server = HttpServer(playback.app(), "127.0.0.1", 0, nothing)
    await server.start()
    client = SGLangClient(server.address, key="a-key")
    try:
        await work(playback, client)
    finally:
        await client.close()
        await server.close()


def test_a_request_and_scores_over_http() -> None:
    async def work(playback: Playback, client: SGLangClient) -> None:
        answer = await client.generate(recorded.PROMPT, Sampling(max_tokens=3))
        assert (answer.tokens, answer.versions, answer.stop) == ([19, 10, 38], [0, 0, 0], "length")
        path, body = playback.asked[-1]
        assert path == "/generate"
        assert body["input_ids"] == recorded.PROMPT
        assert body["return_logprob"] is True
        assert await client.score([5, 6, 14]) == [-4.31, -4.52]
        assert playback.asked[-1][1]["logprob_start_len"] == 0
        with pytest.raises(SchemaError, match="out of the vocabulary"):
            await client.generate([99999], Sampling(max_tokens=3))
        with pytest.raises(SchemaError, match="--enable-deterministic-inference"):
            await client.generate([5], Sampling(max_tokens=3, seed=1))
        with pytest.raises(SchemaError, match="512"):
            await client.generate([5] * 510, Sampling(max_tokens=3))
        assert (await client.health()).version == 0

    asyncio.run(play(work))


@pytest.mark.parametrize(("kv", "mode", "is_flushed"), [("keep", "in_place", False), ("recompute", "retract", True)])
def test_an_update_pauses_swaps_and_goes_on(kv: Any, mode: str, is_flushed: bool) -> None:
    async def work(playback: Playback, client: SGLangClient) -> None:
        await client.update("/weights/one", 1, kv=kv)
        paths = [path for path, _ in playback.asked]
        assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert playback.asked[0][1] == {"mode": mode}
        body = playback.asked[1][1]
        assert (body["model_path"], body["weight_version"]) == ("/weights/one", "1")
        assert body["flush_cache"] is is_flushed
        assert body["abort_all_requests"] is False
        playback.update = (recorded.NOT_UPDATED, 400)
        with pytest.raises(StorageError, match="no such folder"):
            await client.update("/weights/two", 2, kv=kv)
        assert playback.asked[-1][0] == "/continue_generation"

    asyncio.run(play(work))


def test_ids_that_sglang_would_die_of_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 40}))
    monkeypatch.setitem(recorded.MODEL, "model_path", str(tmp_path))

    async def work(playback: Playback, client: SGLangClient) -> None:
        with pytest.raises(SchemaError, match=r"ids\[1\]=40, expected 0 to 39"):
            await client.generate([39, 40], Sampling(max_tokens=3))
        client.vocabulary = 50
        assert len((await client.generate([39, 40], Sampling(max_tokens=3))).tokens) == 3

    asyncio.run(play(work))


def test_abort_names_the_request() -> None:
    async def work(playback: Playback, client: SGLangClient) -> None:
        playback.is_held = True
        task = asyncio.ensure_future(client.generate(recorded.PROMPT, Sampling(max_tokens=3)))
        while not any(path == "/generate" for path, _ in playback.asked):
            await asyncio.sleep(0.005)
        rid = next(body["rid"] for path, body in playback.asked if path == "/generate")
        assert await client.abort() == 1
        answer = await task
        assert (answer.tokens, answer.stop) == ([19], "abort")
        assert ("/abort_request", {"rid": rid}) in playback.asked

    asyncio.run(play(work))
