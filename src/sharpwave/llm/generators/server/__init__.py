"""Our engine as an HTTP server. Needs starlette and uvicorn, of the extra ``[llm]``."""

try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ModuleNotFoundError as error:
    name = error.name
    raise ModuleNotFoundError(f"the server needs {name}; pip install sharpwave[llm]", name=name) from error

from .generator_server import GeneratorServer

__all__ = ["GeneratorServer"]
