"""`GeneratorServer`: a generator of this process for other processes, over HTTP."""

from __future__ import annotations

import ipaddress
from typing import Any

from starlette.requests import Request

from ....errors import SchemaError
from ..local import LocalGenerator
from .app import build_app, is_key, openai_routes, tokens_routes
from .control import Control
from .http_server import HttpServer
from .job import Asked, Backend, Running
from .refusal import Refusal

__all__ = ["GeneratorServer"]

_LEAST_KEY = 16  # characters


class GeneratorServer:
    """Speaks vLLM's token protocol and control calls, OpenAI's completions and chat, and SGLang's update from disk.

    Args:
        generator: The engine in this process. `close` of the server leaves it open.
        tokenizer: A `ChatTokenizer`, or one of transformers; None: token ids only.
        host: Addresses other than this machine's own need a key.
        port: 0 for any free one.
        key: Every call but `/health` must have it as its bearer token.
        name: Of the model, in `/v1/models` and answers.
        max_body_bytes: Larger requests are refused.

    Example:
        >>> import asyncio, httpx
        >>> from sharpwave.llm.generators import Engine, LocalGenerator
        >>> from sharpwave.llm.model import small_model
        >>> async def main():
        ...     async with LocalGenerator(Engine(small_model(), context=64)) as generator:
        ...         async with GeneratorServer(generator) as server, httpx.AsyncClient() as client:
        ...             return (await client.get(f"{server.address}/weight_info")).json()
        >>> asyncio.run(main())
        {'weight_version': '0'}
    """

    def __init__(
        self,
        generator: LocalGenerator,
        tokenizer: Any = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        name: str = "sharpwave",
        max_body_bytes: int = 16 << 20,
    ) -> None:
        _check_place(host, port, key)
        self._key = key

        def begin(request: Request, asked: Asked, has_pieces: bool) -> Running:
            return generator.begin(asked.prompt, asked.sampling, has_pieces=has_pieces)

        backend = Backend(
            begin, generator.score, tokenizer, generator.engine.context, name, max_body_bytes=max_body_bytes
        )
        routes = [*tokens_routes(backend), *openai_routes(backend), *Control(backend, generator).routes()]
        self._server = HttpServer(build_app(routes, self._check, generator.health), host, port, generator.abort)

    @property
    def address(self) -> str:
        """Such as http://127.0.0.1:8000."""
        return self._server.address

    async def start(self) -> GeneratorServer:
        await self._server.start()
        return self

    async def close(self, drain_s: float = 0.0) -> None:
        """Ends in order: running requests have `drain_s` seconds, then they are answered with the tokens they have."""
        await self._server.close(drain_s)

    async def __aenter__(self) -> GeneratorServer:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _check(self, request: Request) -> None:
        if self._key is not None:
            if not is_key(request, self._key):
                raise Refusal("expected the server's key as a bearer token", status=401)
        elif "origin" in request.headers:
            # Any page that a browser on this machine shows could else call a server without a key.
            raise Refusal("a browser's request needs a server with a key", status=403)


def is_local(host: str) -> bool:
    """Whether programs of this machine alone reach a server there."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_place(host: str, port: int, key: str | None) -> None:
    if key is None and not is_local(host):
        raise SchemaError(f"GeneratorServer(): host={host!r} is reached from other machines; give key=")
    if key is not None and (len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise SchemaError(f"GeneratorServer(): key= has {len(key)} characters, expected at least {_LEAST_KEY} of ASCII")
    if not 0 <= port <= 65535:
        raise SchemaError(f"GeneratorServer(): port={port}, expected 0 to 65535")
