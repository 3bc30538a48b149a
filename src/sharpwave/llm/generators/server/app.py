"""The application: routes, who may call them, and errors as objects."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ....errors import SharpwaveError
from .chat_route import ChatRoute
from .completions_route import CompletionsRoute
from .job import Backend
from .refusal import Refusal, refused
from .tokens_route import TokensRoute

__all__ = ["bearer", "build_app", "is_key", "openai_routes", "tokens_routes"]


def openai_routes(backend: Backend) -> list[Route]:
    began = int(time.time())

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_entry(backend, backend.name, began)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        backend.check_name(name)
        return JSONResponse(_entry(backend, name, began))

    return [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", CompletionsRoute(backend).__call__, methods=["POST"]),
        Route("/v1/chat/completions", ChatRoute(backend).__call__, methods=["POST"]),
    ]


def _entry(backend: Backend, name: str, began: int) -> dict[str, Any]:
    said = {"id": name, "object": "model", "created": began, "owned_by": "sharpwave"}
    return {**said, "max_model_len": backend.context}


def tokens_routes(backend: Backend) -> list[Route]:
    return [Route("/inference/v1/generate", TokensRoute(backend).__call__, methods=["POST"])]


def build_app(routes: Sequence[Route], check: Callable[[Request], None], health: Callable[[], Awaitable[Any]]) -> Any:
    """An ASGI application. `check` raises `Refusal` for a caller who may not; `/health` is open to all."""

    async def tell_health(request: Request) -> Response:
        await health()
        return Response()

    app = Starlette(
        routes=[Route("/health", tell_health), *routes],
        exception_handlers={Refusal: _refuse, SharpwaveError: _fail, HTTPException: _miss},
    )

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            try:
                check(Request(scope))
            except Refusal as error:
                await refused(error)(scope, receive, send)
                return
        await app(scope, receive, send)

    return guarded


def is_key(request: Request, key: str) -> bool:
    """Whether the request carries the key. The time that the comparison takes does not depend on it."""
    given = bearer(request)
    return given is not None and hmac.compare_digest(given.encode(), key.encode())


def bearer(request: Request) -> str | None:
    """The bearer token of a request."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else None


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return refused(error)


async def _fail(request: Request, error: Exception) -> Response:
    assert isinstance(error, SharpwaveError)
    return refused(Refusal.of(error))


async def _miss(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refused(Refusal(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))
