"""Language models: the transformer, its weights in versions, and generation. Needs the extra ``[llm]``.

Nothing here is imported by ``import sharpwave``. See docs/rooms/llm.md.
"""
