"""Our engine as an HTTP server. Needs starlette and uvicorn, of the extra ``[llm]``."""

from .generator_server import GeneratorServer

__all__ = ["GeneratorServer"]
