"""Language models: the transformer, its weights in versions, and generation. Needs the extra ``[llm]``.

Nothing here is imported by ``import sharpwave``. See docs/rooms/llm.md.
"""

try:
    import safetensors  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"sharpwave.llm needs {error.name}; pip install sharpwave[llm]", name=error.name
    ) from error
