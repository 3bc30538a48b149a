"""Our HTTP server as a program of its own, for tests that kill it: own_server.py FOLDER PORT CONTEXT."""

from __future__ import annotations

import asyncio
import sys

import torch
from tokenizers import Tokenizer

from sharpwave.llm.generators import Engine, LocalGenerator
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.model import load_model


async def main(folder: str, port: int, context: int) -> None:
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    engine = Engine(load_model(folder), slots=8, context=context, tokenizer=tokenizer)
    async with LocalGenerator(engine) as generator, GeneratorServer(generator, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
