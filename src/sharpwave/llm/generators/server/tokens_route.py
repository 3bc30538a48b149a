"""`POST /inference/v1/generate`: tokens in, tokens out, as vLLM has it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .fields import Fields, read_fields
from .job import Asked, Backend, Job, until_gone
from .refusal import Refusal
from .settings import DEFAULT_TOKENS, read_settings, takes_logprobs, takes_prompt_logprobs, takes_usage
from .shapes import GONE, events, finish, new_id, prompt_logprobs, spans, usage
from .text import TextStream

__all__ = ["TokensRoute"]


class TokensRoute:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, request: Request) -> Response:
        fields = await read_fields(request, self._backend.max_body_bytes)
        call = _Call(self._backend, fields)
        scores = await self._backend.score(call.prompt) if call.is_scored else None
        job = Job(self._backend, request, call.number, call.asked, has_pieces=call.is_stream)
        if call.is_stream:
            return await events(request, call.chunks(job))
        answers = await until_gone(request, job.answers())
        if answers is None:
            return GONE
        choices = []
        for at, answer in enumerate(answers):
            text = call.text(answer.tokens, answer.stop, answer.matched) if call.has_text else None
            choices.append(call.choice(at, answer, answer.versions, text))
        total = sum(len(answer.tokens) for answer in answers)
        return JSONResponse(
            {
                "request_id": call.number,
                "model": self._backend.name,
                "created": int(time.time()),
                "choices": choices,
                "usage": usage(len(call.prompt), total),
                "prompt_logprobs": None if scores is None else prompt_logprobs(self._backend, call.prompt, scores),
                "prompt_token_ids": call.prompt if call.has_prompt else None,
                "output_mode": "text" if call.has_text else "tokens",
            }
        )


class _Call:
    """The body of a request."""

    def __init__(self, backend: Backend, fields: Fields) -> None:
        self._backend = backend
        self.prompt: list[int] = fields.take_list("token_ids", int) or []
        if not self.prompt:
            raise Refusal("token_ids: expected at least one token id", param="token_ids")
        self.number = f"generate-tokens-{fields.take('request_id', str) or new_id()}"
        self.has_prompt = fields.take("return_token_ids", bool, False)
        self.is_stream = fields.take("stream", bool, False)
        self.has_usage = takes_usage(fields)
        mode = fields.take("output_mode", str, "tokens")
        if mode not in ("tokens", "text") or (mode == "text" and backend.tokenizer is None):
            possible = '"tokens"' if backend.tokenizer is None else '"tokens" or "text"'
            raise fields.refusal("output_mode", f'"{mode}", expected {possible}')
        self.has_text = mode == "text"
        backend.check_name(fields.take("model", str))
        fields.take_neutral({"priority": (0,)})
        fields.drop(["cache_salt"])  # keys and values of other weights are never used here
        within = fields.take_object("sampling_params")
        self.has_logprobs = takes_logprobs(within)
        self.is_scored = takes_prompt_logprobs(within)
        settings = read_settings(within, max_tokens=DEFAULT_TOKENS)
        within.end()
        fields.end()
        self._stop_ids = settings.names["stop_ids"]
        sampling = settings.sampling(len(self.prompt), backend.context)
        self.asked = Asked(self.prompt, sampling).times(settings.n)

    def text(self, tokens: Sequence[int], stop: str, matched: int | str | None) -> str:
        return TextStream(self._backend.tokenizer).push(tokens, stop, matched)

    def choice(self, at: int, piece: Any, versions: Sequence[int], text: str | None) -> dict[str, Any]:
        """Of a whole answer or of a piece. `versions` are those of all tokens so far."""
        found = {"index": at, **finish(piece.stop, piece.matched, self._stop_ids), "token_ids": piece.tokens}
        found["weight_versions"] = spans(versions)
        found["logprobs"] = None
        if self.has_logprobs:
            pairs = zip(piece.tokens, piece.logprobs, strict=True)
            entries = [{"token_id": token, "logprob": score, "rank": None} for token, score in pairs]
            found["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]} for entry in entries]}
        return found if text is None else {**found, "text": text}

    async def chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        versions: list[list[int]] = [[] for _ in self.asked]
        texts = [TextStream(self._backend.tokenizer, one.sampling.stop) for one in self.asked]
        is_first = True
        async with aclosing(job.pieces()) as pieces:
            async for at, piece in pieces:
                versions[at] += piece.versions
                text = texts[at].push(piece.tokens, piece.stop, piece.matched) if self.has_text else None
                chunk: dict[str, Any] = {
                    "request_id": self.number,
                    "choices": [self.choice(at, piece, versions[at], text)],
                }
                if is_first and self.has_prompt:
                    chunk["prompt_token_ids"] = self.prompt
                is_first = False
                yield chunk
        if self.has_usage:
            counted = usage(len(self.prompt), sum(len(one) for one in versions))
            yield {"request_id": self.number, "choices": [], "usage": counted}
