"""Parts of answers that several routes share: usage, version spans, log-probabilities, events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ....errors import SharpwaveError
from .job import Backend, until_gone
from .refusal import Refusal

__all__ = ["GONE", "events", "finish", "new_id", "prompt_logprobs", "spans", "token_text", "usage"]

GONE = Response(status_code=499)  # the client has left, so it is not read


def new_id() -> str:
    return uuid.uuid4().hex


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


def spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of equal versions over the indexes of the answer's tokens."""
    found: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if found and found[-1]["version"] == str(version):
            found[-1]["end"] = at + 1
        else:
            found.append({"version": str(version), "start": at, "end": at + 1})
    return found


def finish(stop: str | None, matched: int | str | None, stop_ids: Sequence[int]) -> dict[str, Any]:
    """`stop_reason` is a stop string or one of the request's stop ids; null for the model's own end of text."""
    said = matched if isinstance(matched, str) or matched in stop_ids else None
    return {"finish_reason": stop, "stop_reason": said}


def token_text(backend: Backend, token: int, as_id: bool) -> str:
    if as_id or backend.tokenizer is None:
        return f"token_id:{token}"
    return str(backend.tokenizer.decode([token], skip_special_tokens=False))


def prompt_logprobs(backend: Backend, prompt: Sequence[int], scores: Sequence[float]) -> list[Any]:
    """As vLLM gives them. There is no rank: it would need a search through the vocabulary for each token."""
    found: list[Any] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        text = None if backend.tokenizer is None else token_text(backend, token, False)
        found.append({str(token): {"logprob": score, "rank": None, "decoded_token": text}})
    return found


async def events(request: Request, chunks: AsyncGenerator[dict[str, Any], None]) -> Response:
    """Server-sent events. The first chunk is awaited here, so that an error before it has a status of its own."""
    first = await until_gone(request, _first(chunks))
    if first is None:
        return GONE

    async def lines() -> AsyncIterator[str]:
        try:
            yield _line(first)
            async for chunk in chunks:
                yield _line(chunk)
        except SharpwaveError as error:
            yield _line(Refusal.of(error).body())
        finally:
            await chunks.aclose()
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def _first(chunks: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    return await anext(chunks)


def _line(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
