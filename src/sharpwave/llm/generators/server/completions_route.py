"""`POST /v1/completions`, as OpenAI and vLLM have it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..answer import Answer
from ..ongoing import Piece
from .fields import Fields, read_fields
from .job import Asked, Backend, Job, until_gone
from .refusal import Refusal
from .settings import DEFAULT_TOKENS, MOST_ANSWERS, read_settings, takes_logprobs, takes_prompt_logprobs, takes_usage
from .shapes import GONE, events, finish, new_id, prompt_logprobs, spans, token_text, usage
from .text import TextStream

__all__ = ["CompletionsRoute"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {"echo": (False,), "suffix": (), "response_format": ({"type": "text"},)}
_DROPPED = ("user", "cache_salt", "request_id")


class CompletionsRoute:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, request: Request) -> Response:
        call = _Call(self._backend, await read_fields(request, self._backend.max_body_bytes))
        if call.is_scored:
            call.scores = [await self._backend.score(prompt) for prompt in call.prompts]
        job = Job(self._backend, request, call.number, call.asked, has_pieces=call.is_stream)
        if call.is_stream:
            return await events(request, call.chunks(job))
        answers = await until_gone(request, job.answers())
        if answers is None:
            return GONE
        choices = []
        for at, answer in enumerate(answers):
            text = TextStream(self._backend.tokenizer).push(answer.tokens, answer.stop, answer.matched)
            choices.append(call.choice(at, answer, answer.versions, text, 0) | call.of_prompt(at))
        counted = usage(sum(map(len, call.prompts)), sum(len(answer.tokens) for answer in answers))
        return JSONResponse(call.envelope(choices, counted))


class _Call:
    def __init__(self, backend: Backend, fields: Fields) -> None:
        self._backend = backend
        self._created = int(time.time())
        self.number = f"cmpl-{new_id()}"
        backend.check_name(fields.take("model", str))
        self.prompts = _read_prompts(backend, fields)
        self.is_stream = fields.take("stream", bool, False)
        self.has_usage = takes_usage(fields)
        self._has_logprobs = takes_logprobs(fields)
        self.is_scored = takes_prompt_logprobs(fields)
        if self.is_scored and self.is_stream:
            raise fields.refusal("prompt_logprobs", "is not possible with stream")
        self._has_ids = fields.take("return_token_ids", bool, False)
        self._has_names = fields.take("return_tokens_as_token_ids", bool, False)
        settings = read_settings(fields, max_tokens=DEFAULT_TOKENS)
        fields.take_neutral(_NEUTRAL)
        fields.drop(_DROPPED)
        fields.end()
        self._stop_ids = settings.names["stop_ids"]
        self._n = settings.n
        if len(self.prompts) * settings.n > MOST_ANSWERS:
            problem = f"{settings.n} answers to each of {len(self.prompts)} prompts"
            raise fields.refusal("n", f"{problem}, expected at most {MOST_ANSWERS} in all; send several requests")
        self.scores: list[list[float]] = []
        self.asked: list[Asked] = []
        for prompt in self.prompts:
            self.asked += Asked(prompt, settings.sampling(len(prompt), backend.context)).times(settings.n)

    def envelope(self, choices: list[dict[str, Any]], counted: dict[str, int] | None = None) -> dict[str, Any]:
        return {
            "id": self.number,
            "object": "text_completion",
            "created": self._created,
            "model": self._backend.name,
            "choices": choices,
            "usage": counted,
        }

    def choice(self, at: int, piece: Answer | Piece, versions: list[int], text: str, offset: int) -> dict[str, Any]:
        found = {"index": at, "text": text, "logprobs": None, **finish(piece.stop, piece.matched, self._stop_ids)}
        if self._has_logprobs:
            names = [token_text(self._backend, token, self._has_names) for token in piece.tokens]
            offsets = [offset + sum(map(len, names[:number])) for number in range(len(names))]
            found["logprobs"] = {
                "text_offset": offsets,
                "token_logprobs": piece.logprobs,
                "tokens": names,
                "top_logprobs": None,
            }
        if self._has_ids:
            found |= {"token_ids": piece.tokens, "weight_versions": spans(versions)}
        return found

    def of_prompt(self, at: int) -> dict[str, Any]:
        number = at // self._n
        found: dict[str, Any] = {}
        if self._has_ids:
            found["prompt_token_ids"] = self.prompts[number]
        if self.is_scored:
            found["prompt_logprobs"] = prompt_logprobs(self._backend, self.prompts[number], self.scores[number])
        return found

    async def chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        texts = [TextStream(self._backend.tokenizer, one.sampling.stop) for one in self.asked]
        versions: list[list[int]] = [[] for _ in self.asked]
        sizes = [0] * len(self.asked)
        async with aclosing(job.pieces()) as pieces:
            async for at, piece in pieces:
                is_first = not versions[at]
                versions[at] += piece.versions
                text = texts[at].push(piece.tokens, piece.stop, piece.matched)
                choice = self.choice(at, piece, versions[at], text, sizes[at])
                sizes[at] += len(text)
                yield self.envelope([choice | (self.of_prompt(at) if is_first else {})])
        if self.has_usage:
            yield self.envelope([], usage(sum(map(len, self.prompts)), sum(map(len, versions))))


def _read_prompts(backend: Backend, fields: Fields) -> list[list[int]]:
    """A text, token ids, or a list of either."""
    given = fields.take_any("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and not isinstance(given[0], (str, list))):
        given = [given]
    if not isinstance(given, list) or not given or len(given) > MOST_ANSWERS:
        raise fields.refusal("prompt", f"expected a text, token ids, or 1 to {MOST_ANSWERS} of either")
    found = []
    for one in given:
        if isinstance(one, str):
            if backend.tokenizer is None:
                raise Refusal("prompt: a text needs a tokenizer, which this server has none of; give token ids")
            one = backend.tokenizer.encode(one)
        if not isinstance(one, list) or not one or not all(type(token) is int for token in one):
            raise fields.refusal("prompt", "expected texts that are not empty, or lists of token ids")
        found.append(one)
    return found
