"""`POST /v1/chat/completions`, as OpenAI and vLLM have it; messages go through the tokenizer's chat template."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..answer import Answer
from ..ongoing import Piece
from .fields import Fields, read_fields
from .job import Asked, Backend, Job, until_gone
from .refusal import Refusal
from .settings import read_settings, takes_usage
from .shapes import GONE, events, finish, new_id, spans, token_text, usage
from .text import TextStream
from .tool_calls import ToolText

__all__ = ["ChatRoute"]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "add_special_tokens": (False,),
    "modalities": (["text"],),
    "reasoning_effort": ("medium",),  # what OpenAI takes where nothing is said
    "verbosity": ("medium",),
}
# What `apply_chat_template` of transformers reads besides the template's own names. A template of the request would be
# a program that a client runs here.
_NO_NAMES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# None of these changes what a model of ours answers.
_DROPPED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
)


class ChatRoute:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, request: Request) -> Response:
        call = _Call(self._backend, await read_fields(request, self._backend.max_body_bytes))
        job = Job(self._backend, request, call.number, call.asked, has_pieces=call.is_stream)
        if call.is_stream:
            return await events(request, call.chunks(job))
        answers = await until_gone(request, job.answers())
        if answers is None:
            return GONE
        choices = [call.choice(at, answer) for at, answer in enumerate(answers)]
        counted = usage(len(call.prompt), sum(len(answer.tokens) for answer in answers))
        return JSONResponse(call.envelope("chat.completion", choices, counted) | call.of_prompt())


class _Call:
    def __init__(self, backend: Backend, fields: Fields) -> None:
        self._backend = backend
        self._created = int(time.time())
        self.number = f"chatcmpl-{new_id()}"
        backend.check_name(fields.take("model", str))
        messages = _read_messages(fields)
        tools = fields.take_list("tools", dict)
        choice = fields.take_any("tool_choice")
        if choice not in (None, "none", "auto"):
            raise fields.refusal(
                "tool_choice", f'{json.dumps(choice)[:80]} is not supported, expected "auto" or "none"'
            )
        self._has_tools = bool(tools) and choice != "none"
        names = fields.take("chat_template_kwargs", dict, {})
        if wrong := sorted(_NO_NAMES.intersection(names)):
            raise fields.refusal("chat_template_kwargs", f'"{wrong[0]}" is not a name of the template\'s own')
        add_prompt = fields.take("add_generation_prompt", bool, True)
        self.prompt = _render(backend, messages, tools if self._has_tools else None, add_prompt, names)
        self.is_stream = fields.take("stream", bool, False)
        self.has_usage = takes_usage(fields)
        self._has_logprobs = fields.take("logprobs", bool, False)
        self._has_ids = fields.take("return_token_ids", bool, False)
        self._has_names = fields.take("return_tokens_as_token_ids", bool, False)
        settings = read_settings(fields, max_tokens=fields.take("max_completion_tokens", int))
        fields.take_neutral(_NEUTRAL)
        fields.drop(_DROPPED)
        fields.end()
        self._stop_ids = settings.names["stop_ids"]
        sampling = settings.sampling(len(self.prompt), backend.context, backend.max_tokens)
        self.asked = Asked(self.prompt, sampling, messages, tools).times(settings.n)

    def envelope(
        self, kind: str, choices: list[dict[str, Any]], counted: dict[str, int] | None = None
    ) -> dict[str, Any]:
        return {
            "id": self.number,
            "object": kind,
            "created": self._created,
            "model": self._backend.name,
            "choices": choices,
            "usage": counted,
        }

    def of_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt} if self._has_ids else {}

    def choice(self, at: int, answer: Answer) -> dict[str, Any]:
        text = TextStream(self._backend.tokenizer).push(answer.tokens, answer.stop, answer.matched)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        ended = finish(answer.stop, answer.matched, self._stop_ids)
        if self._has_tools:
            held = ToolText()
            shown = held.push(text)
            rest, calls = held.end()
            if calls:
                message |= {"content": shown or None, "tool_calls": calls}
                ended["finish_reason"] = "tool_calls" if answer.stop == "stop" else answer.stop
            else:
                message["content"] = shown + rest
        return {"index": at, "message": message, **self._of_tokens(answer, answer.versions), **ended}

    def _of_tokens(self, piece: Answer | Piece, versions: list[int]) -> dict[str, Any]:
        found: dict[str, Any] = {"logprobs": None}
        if self._has_logprobs:
            entries = []
            for token, score in zip(piece.tokens, piece.logprobs, strict=True):
                text = token_text(self._backend, token, self._has_names)
                entries.append({"token": text, "logprob": score, "bytes": list(text.encode()), "top_logprobs": []})
            found["logprobs"] = {"content": entries, "refusal": None}
        if self._has_ids:
            found |= {"token_ids": piece.tokens, "weight_versions": spans(versions)}
        return found

    async def chunks(self, job: Job) -> AsyncGenerator[dict[str, Any], None]:
        texts = [TextStream(self._backend.tokenizer, one.sampling.stop) for one in self.asked]
        tools = [ToolText() for _ in self.asked]
        versions: list[list[int]] = [[] for _ in self.asked]
        begun: set[int] = set()
        async with aclosing(job.pieces()) as pieces:
            async for at, piece in pieces:
                versions[at] += piece.versions
                delta: dict[str, Any] = {"content": texts[at].push(piece.tokens, piece.stop, piece.matched)}
                ended = finish(piece.stop, piece.matched, self._stop_ids)
                if self._has_tools:
                    delta["content"] = tools[at].push(delta["content"])
                    if piece.stop is not None:
                        rest, calls = tools[at].end()
                        delta["content"] += rest
                        if calls:
                            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
                            ended["finish_reason"] = "tool_calls" if piece.stop == "stop" else piece.stop
                of_prompt = {} if begun else self.of_prompt()
                if at not in begun:
                    delta["role"] = "assistant"
                    begun.add(at)
                choice = {"index": at, "delta": delta, **self._of_tokens(piece, versions[at]), **ended}
                yield self.envelope("chat.completion.chunk", [choice]) | of_prompt
        if self.has_usage:
            counted = usage(len(self.prompt), sum(map(len, versions)))
            yield self.envelope("chat.completion.chunk", [], counted)


def _read_messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.take_list("messages", dict)
    if not given:
        raise fields.refusal("messages", "expected at least one message")
    found = []
    for at, message in enumerate(given):
        if not isinstance(message.get("role"), str):
            raise fields.refusal(f"messages[{at}].role", "expected a string")
        found.append({**message, "content": _read_content(fields, at, message.get("content"))})
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise fields.refusal(f"messages[{at}].tool_calls", "expected a list")
            found[-1]["tool_calls"] = [_with_object(one) for one in calls]
    return found


def _read_content(fields: Fields, at: int, content: Any) -> str:
    """Templates take a text. Parts of text are joined; null, which comes with calls of tools, is an empty text."""
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise fields.refusal(f"messages[{at}].content[{number}]", "expected a part of type text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, (str, type(None))):
        raise fields.refusal(f"messages[{at}].content", "expected a string, a list of parts or null")
    return content or ""


def _with_object(call: Any) -> Any:
    """OpenAI sends arguments as JSON text; templates take the object."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        said = call["function"].get("arguments")
        try:
            return {**call, "function": {**call["function"], "arguments": json.loads(said)}}
        except (ValueError, TypeError, RecursionError):
            return call
    return call


def _render(
    backend: Backend, messages: list[dict[str, Any]], tools: Any, add_prompt: bool, names: Mapping[str, Any]
) -> list[int]:
    if backend.tokenizer is None:
        raise Refusal("messages: chat needs a tokenizer, which this server has none of; use /inference/v1/generate")
    own = {"tools": tools, "add_generation_prompt": add_prompt, "tokenize": False}
    try:
        text = backend.tokenizer.apply_chat_template(messages, **names, **own)
    except Exception as error:  # a tokenizer of transformers has classes of its own
        raise Refusal(f"messages: {error}", param="messages") from None
    return list(backend.tokenizer.encode(text, add_special_tokens=False))
