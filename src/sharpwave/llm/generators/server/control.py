"""Control of the server: pause, resume, abort, weights. The update has the body of SGLang, the others are vLLM's."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ....checks import told
from ....errors import ClosedError, NotReady, SharpwaveError
from ..local import LocalGenerator
from .fields import Fields, read_fields
from .job import Backend
from .refusal import Refusal

__all__ = ["Control"]

_MOST_DIGITS = 20  # a longer number is no version; Python refuses to read one of thousands of digits
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "load_format": ("auto", "safetensors"),
    "keep_pause": (False,),
    "is_async": (False,),
    "recapture_cuda_graph": (False, True),
    "torch_empty_cache": (False, True),
}


class Control:
    def __init__(self, backend: Backend, generator: LocalGenerator) -> None:
        self._backend, self._generator = backend, generator

    def routes(self) -> list[Route]:
        return [
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/abort_requests", self.abort_requests, methods=["POST"]),
            Route("/weight_info", self.weight_info),
            Route("/update_weight_version", self.update_weight_version, methods=["POST"]),
            Route("/update_weights_from_disk", self.update_weights_from_disk, methods=["POST"]),
        ]

    async def pause(self, request: Request) -> Response:
        given = dict(request.query_params)
        mode, said = given.pop("mode", "abort"), given.pop("clear_cache", "true")
        if mode not in ("abort", "wait", "keep"):
            raise Refusal(f"mode: {mode!r}, expected abort, wait or keep", param="mode")
        if said.lower() not in ("true", "false", "1", "0"):
            raise Refusal(f"clear_cache: {said!r}, expected true or false", param="clear_cache")
        for name in given:
            raise Refusal(f"{name}: is not known to this server", param=name)
        await self._generator.pause(mode, clear_cache=said.lower() in ("true", "1"))  # type: ignore[arg-type]
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await self._generator.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._generator.is_paused})

    async def abort_requests(self, request: Request) -> Response:
        fields = await read_fields(request, self._backend.max_body_bytes)
        wanted = fields.take_list("request_ids", str)
        fields.end()
        if wanted is None:
            return JSONResponse({"status": "aborted", "aborted": await self._generator.abort()})
        # A name as it was given, or as it was answered.
        numbers = {number for name in wanted for number in (name, f"generate-tokens-{name}")}
        jobs = [job for number in numbers for job in self._backend.running.get(number, ())]
        return JSONResponse({"status": "aborted", "aborted": sum([job.abort() for job in jobs])})

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": str(self._generator.engine.version)})

    async def update_weight_version(self, request: Request) -> Response:
        raise Refusal("a version comes with its weights: POST /update_weights_from_disk", param="new_version")

    async def update_weights_from_disk(self, request: Request) -> Response:
        fields = await read_fields(request, self._backend.max_body_bytes)
        path, version = fields.need("model_path", str), _read_version(fields)
        is_flushed = fields.take("flush_cache", bool, True)
        is_aborted = fields.take("abort_all_requests", bool, False)
        fields.take_neutral(_NEUTRAL)
        fields.end()
        try:
            await self._generator.update(path, version, kv="recompute" if is_flushed else "keep")
        except (NotReady, ClosedError):  # nothing is wrong with the weights
            raise
        except (SharpwaveError, OSError) as error:  # a path of the caller may be anything
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        if is_aborted:
            await self._generator.abort()
        message = f"Succeeded to update model weights. Weight version updated to {version}."
        held = (await self._generator.health())[1:] if self._generator.is_paused else (0,)
        return JSONResponse({"success": True, "message": message, "num_paused_requests": sum(held)})


def _read_version(fields: Fields) -> int:
    """An integer, or the text of one. Versions only grow, so they must be numbers."""
    given = fields.take_any("weight_version")
    if isinstance(given, str) and given.isdecimal() and len(given) <= _MOST_DIGITS:
        return int(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    raise fields.refusal("weight_version", f"{told(given)}, expected a number above the version of /weight_info")
