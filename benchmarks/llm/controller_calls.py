"""Time of a call to the controller of a run, from another process.

    python benchmarks/llm/controller_calls.py                # some seconds; prints medians and 99th percentiles

`stats`: a call that changes nothing. `start, reject`: two calls of an agent. `finish`: a sample of 1 MB, which is in
the journal when the call returns; beside it the same `finish` at a controller in this process. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.llm.clock import WallClock
from sharpwave.llm.controller import Controller
from sharpwave.llm.items import Items
from sharpwave.llm.launchers.controller_client import ControllerClient
from sharpwave.llm.launchers.controller_server import ControllerServer
from sharpwave.llm.permits import Permit
from sharpwave.llm.rules import Rules
from sharpwave.llm.run_folder import RunFolder

TOKENS = 50_000  # in two answers, 21 bytes a token: 1 MB
ITEMS = 100_000


def sample_of(permit: Permit) -> sw.SequenceSample:
    data = {
        "input_ids": np.arange(TOKENS), "loss_mask": np.ones(TOKENS, bool), "logprobs": np.zeros(TOKENS, np.float32),
        "versions": np.zeros(TOKENS, np.int64), "rewards": np.array([1.0, 0.0], np.float32),
    }  # fmt: skip
    lens = {**{key: [[TOKENS // 2] * 2] for key in data}, "rewards": [[1, 1]]}
    return sw.SequenceSample([permit.key], lens, data)


async def time_calls(call: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


async def time_finish(controller: Any, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        permit = await controller.start("agent")
        sample = sample_of(permit)
        taken += await time_calls(lambda permit=permit, sample=sample: controller.finish(permit, sample), 1)
    return taken


async def measure(folder: str, count: int) -> dict[str, dict[str, float]]:
    """In the process of the client."""
    client = ControllerClient(RunFolder(folder), "agent")

    async def start_and_reject() -> None:
        permit = await client.start("agent")
        assert permit is not None
        await client.reject(permit, "")

    await time_calls(client.stats, 20)
    found = {
        "stats": await time_calls(client.stats, count),
        "start, reject": await time_calls(start_and_reject, count),
        "finish": await time_finish(client, count // 10),
    }
    await client.close()
    return {name: summary(taken) for name, taken in found.items()}


def summary(taken: list[float]) -> dict[str, float]:
    return {"median_ms": round(float(np.median(taken)), 3), "p99_ms": round(float(np.percentile(taken, 99)), 3)}


async def serve(place: str, count: int) -> dict[str, Any]:
    folder = Path(place)
    (folder / "addresses").mkdir()
    items, rules = Items([{"id": str(number)} for number in range(ITEMS)]), Rules(ITEMS, epochs=1)
    alone = Controller(items, rules, WallClock(), journal=folder / "alone")
    here = {"finish, in this process": summary(await time_finish(alone, count // 10))}
    alone.close()
    server = ControllerServer(items, rules, journal=folder / "journal")
    RunFolder(folder).register("controller", {"address": await server.start()})
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", place, "--count", str(count), stdout=subprocess.PIPE
    )
    output, _ = await client.communicate()
    await server.close()
    return {**json.loads(output), **here}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(asyncio.run(measure(given.client, given.count))))
        return
    with tempfile.TemporaryDirectory(prefix="sharpwave-calls-") as place:
        print(json.dumps(asyncio.run(serve(place, given.count)), indent=2))


if __name__ == "__main__":
    main()
