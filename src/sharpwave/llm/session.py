"""`Session`: an OpenAI address and key for code that knows nothing of training; every call is recorded."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .generators.answer import Answer
from .generators.local import LocalGenerator
from .generators.protocol import Responder
from .generators.sampling import Sampling
from .generators.server.app import bearer, build_app, openai_routes
from .generators.server.http_server import HttpServer
from .generators.server.job import Asked, Backend, Running
from .generators.server.refusal import Refusal
from .generators.server.whole import WholeAnswers

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["Call", "Session", "SessionServer"]

_SESSION = "sharpwave.session"  # the key of a request's scope


@dataclass(frozen=True)
class Call:
    """One answer as a learner needs it. `prompt` are the tokens that the model really saw."""

    prompt: list[int]
    answer: Answer
    sampling: Sampling
    messages: list[dict[str, Any]] | None = None  # None for completions
    tools: list[dict[str, Any]] | None = None


class SessionServer:
    """One HTTP server for any number of sessions, in the event loop that starts it.

    Args:
        generator: Makes the answers of sessions that have no other one. `close` leaves it open.
        tokenizer: A `ChatTokenizer`, or one of transformers.
        context: Tokens of prompt and answer, where the generator is not an engine of this process: the length of chat
            answers without max_tokens. None: such answers have at most `max_tokens`.
        max_tokens: The default is that of `Sampling`.
        port: 0 for any free one. It listens on this machine only.
    """

    def __init__(
        self,
        generator: Responder,
        tokenizer: Any,
        *,
        context: int | None = None,
        max_tokens: int = Sampling.max_tokens,
        port: int = 0,
    ) -> None:
        self.generator, self.tokenizer = generator, tokenizer
        if isinstance(generator, LocalGenerator):
            context = generator.engine.context
        self._backend = Backend(
            self._begin, generator.score, tokenizer, context,
            takes_any_name=True, record=self._record, max_tokens=max_tokens,
        )  # fmt: skip
        self._sessions: dict[str, Session] = {}
        app = build_app(openai_routes(self._backend), self._check, generator.health)
        self._server = HttpServer(app, "127.0.0.1", port, self._abort)

    @property
    def base_url(self) -> str:
        return f"{self._server.address}/v1"

    def open(self, generator: Responder | None = None) -> Session:
        """A session with a key of its own.

        Args:
            generator: Makes its answers; None: that of the server.
        """
        return Session(self.generator if generator is None else generator, self.tokenizer, at=self)

    async def start(self) -> SessionServer:
        await self._server.start()
        return self

    async def close(self) -> None:
        """Answers on their way end with the tokens they have, and are recorded."""
        await self._server.close()

    async def __aenter__(self) -> SessionServer:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _abort(self) -> None:
        for jobs in list(self._backend.running.values()):
            for job in list(jobs):
                job.abort()
        for session in self._sessions.values():
            session._cancel()
        await asyncio.gather(*self._backend.tasks, return_exceptions=True)

    def _admit(self, session: Session) -> None:
        self._sessions[session.api_key] = session

    def _dismiss(self, session: Session) -> None:
        self._sessions.pop(session.api_key, None)

    def _check(self, request: Request) -> None:
        # A search in a table: keys are random, so the time that it takes tells nothing of use.
        session = self._sessions.get(bearer(request) or "")
        if session is None:
            raise Refusal("expected the key of an open session as bearer token", status=401)
        request.scope[_SESSION] = session

    def _begin(self, request: Request, asked: Asked, has_pieces: bool) -> Running:
        session: Session = request.scope[_SESSION]
        return session._begin(asked, has_pieces)

    def _record(self, request: Request, asked: Asked, answer: Answer) -> None:
        request.scope[_SESSION].calls.append(Call(asked.prompt, answer, asked.sampling, asked.messages, asked.tools))


class Session:
    """An address and a key for the `openai` client. `calls` has every answer that was given to this key.

    Code that blocks (`openai.OpenAI`) must run in another thread than the event loop, such as by `asyncio.to_thread`.

    Args:
        generator: Makes the answers.
        tokenizer: A `ChatTokenizer`, or one of transformers; that of the server, where there is one.
        at: A server that several sessions share; None: the session has one of its own, which ends with it.

    Example:
        >>> import asyncio, openai
        >>> from sharpwave.llm.generators import Engine, LocalGenerator
        >>> from sharpwave.llm.model import small_model, small_tokenizer
        >>> from sharpwave.llm.tokenizer import ChatTokenizer
        >>> async def main():
        ...     async with LocalGenerator(Engine(small_model(), context=64)) as generator:
        ...         async with Session(generator, ChatTokenizer(small_tokenizer())) as session:
        ...             client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        ...             await client.completions.create(model="any", prompt="12 + 30 =", max_tokens=4)
        ...             return len(session.calls[0].prompt)
        >>> asyncio.run(main())
        9
    """

    def __init__(self, generator: Responder, tokenizer: Any, *, at: SessionServer | None = None) -> None:
        self._is_own = at is None
        self._generator = generator if isinstance(generator, LocalGenerator) else WholeAnswers(generator)
        self._server = SessionServer(generator, tokenizer) if at is None else at
        self.api_key = f"sw-{secrets.token_urlsafe(32)}"
        self.calls: list[Call] = []
        self._server._admit(self)

    @property
    def base_url(self) -> str:
        return self._server.base_url

    async def close(self) -> None:
        """The key is refused from now on; with a server of its own, that ends too."""
        self._server._dismiss(self)
        self._cancel()
        if self._is_own:
            await self._server.close()

    def _begin(self, asked: Asked, has_pieces: bool) -> Running:
        return self._generator.begin(asked.prompt, asked.sampling, has_pieces=has_pieces)

    def _cancel(self) -> None:
        """Ends answers that come whole only: nobody will have their tokens."""
        if isinstance(self._generator, WholeAnswers):
            self._generator.cancel()

    async def __aenter__(self) -> Session:
        if self._is_own:
            await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
