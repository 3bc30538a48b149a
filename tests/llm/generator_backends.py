"""Every generator that the conformance suite runs over, and what each of them promises.

A back end that cannot run here stands in the list with its reason. `make test` runs those in process and our server;
`make backends` also runs real vLLM, whose program is given by SHARPWAVE_VLLM, and real SGLang: SHARPWAVE_SGLANG is the
Python of an environment that `get_sglang.sh` has made.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sharpwave.llm.generators import Engine, Generator
from sharpwave.llm.generators.client import Client
from sharpwave.llm.generators.sglang import SGLangClient, sglang_server
from sharpwave.llm.generators.vllm import VLLMClient, sharpwave_server, vllm_server
from sharpwave.llm.model import load_model, save_model, small_model, small_tokenizer

CONTEXT = 640
_VLLM, _SGLANG = os.environ.get("SHARPWAVE_VLLM", ""), os.environ.get("SHARPWAVE_SGLANG", "")


class Weights:
    """Folders with weights that differ much. Version v is in folder v % 3."""

    def __init__(self, place: Path) -> None:
        self.folders, self.models = [], []
        for number in range(3):
            # Heads of 32: vLLM's attention on a CPU has no smaller ones.
            model = small_model("qwen3", seed=number, head_dim=32, max_position_embeddings=1024)
            with torch.no_grad():
                model.lm_head.weight[2] *= 4  # the end of text is often likely: the tests wait for it
            folder = place / f"weights-{number}"
            save_model(model, folder)
            small_tokenizer(folder)
            self.folders.append(folder)
            self.models.append(model)

    def folder(self, version: int) -> Path:
        return self.folders[version % 3]

    def model(self, version: int) -> Any:
        return self.models[version % 3]


@dataclass(frozen=True)
class BackEnd:
    """How a generator is opened for `count` servers, and what it does beyond what all of them do.

    `lacks` has a reason for each ability that it has not: "seed" (same seed, same answer), "stop strings", "both
    ends" (stop ids beside ignore_eos), "filters" (top_k, top_p, min_p), "pause" (calls of its own for it), "processes"
    (servers that can be killed), "checks of weights" (values and dtypes of those that can be read).
    """

    name: str
    open: Callable[[Weights, Path, int], Generator | Awaitable[Generator]]
    lacks: dict[str, str] = field(default_factory=dict)
    missing: str = ""  # why it cannot run here


def make_engine(folder: str) -> tuple[Engine, Callable[[], None]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    return Engine(load_model(folder), slots=8, context=CONTEXT, tokenizer=tokenizer), lambda: None


def _open_local(weights: Weights, place: Path, count: int) -> Generator:
    from sharpwave.llm.generators import LocalGenerator

    return LocalGenerator(make_engine(str(weights.folder(0)))[0])


async def _open_process(weights: Weights, place: Path, count: int) -> Generator:
    from sharpwave.llm.generators.process import ProcessGenerator

    return await ProcessGenerator.start("generator_backends:make_engine", folder=str(weights.folder(0)))


def _open_transformers(weights: Weights, place: Path, count: int) -> Generator:
    from transformers import AutoModelForCausalLM

    from sharpwave.llm.generators.hf import HFGenerator

    model = AutoModelForCausalLM.from_pretrained(weights.folder(0), dtype=torch.float32)
    return HFGenerator(model, blocks=8 * CONTEXT // 16, context=CONTEXT)


def _open_own_server(weights: Weights, place: Path, count: int) -> Generator:
    arguments = ["--slots", "8", "--context", str(CONTEXT)]
    logs = [place / f"own-{number}.log" for number in range(count)]
    return VLLMClient([sharpwave_server(weights.folder(0), *arguments, log=log) for log in logs])


def _open_vllm(weights: Weights, place: Path, count: int) -> Generator:
    arguments = ["--dtype", "float32", "--max-num-seqs", "16", "--enforce-eager", "--served-model-name", "m"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": "",
    }
    servers = [
        vllm_server(
            weights.folder(0),
            "--max-model-len",
            str(CONTEXT),
            *arguments,
            program=_VLLM,
            env=env,
            log=place / f"vllm-{number}.log",
        )
        for number in range(count)
    ]
    return VLLMClient(servers)


def _open_sglang(weights: Weights, place: Path, count: int) -> Generator:
    arguments = (
        "--device cpu --dtype float32 --disable-cuda-graph --attention-backend torch_native --max-total-tokens 8192 "
    )
    arguments += "--sampling-backend pytorch --disable-overlap-schedule --mem-fraction-static 0.1 --context-length"
    env = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    logs = [place / f"sglang-{number}.log" for number in range(count)]
    given = [*arguments.split(), str(CONTEXT)]
    return SGLangClient([sglang_server(weights.folder(0), *given, program=_SGLANG, env=env, log=log) for log in logs])


IN_PROCESS = "it runs in this process"
CHILD = "the generator ends with it: tests/llm/test_process_generator.py"
BACK_ENDS = [
    BackEnd("ours, in process", _open_local, {"processes": IN_PROCESS}),
    BackEnd(
        "ours, child process",
        _open_process,
        {"pause": "no pause of its own", "processes": CHILD},
    ),
    BackEnd("ours, over HTTP", _open_own_server),
    BackEnd(
        "transformers, in process",
        _open_transformers,
        {
            "seed": "no seed for single requests",
            "stop strings": "no stop strings",
            "pause": "no pause of its own",
            "processes": IN_PROCESS,
        },
        missing="" if importlib.util.find_spec("transformers") else "transformers is not installed",
    ),
    BackEnd(
        "SGLang",
        _open_sglang,
        {
            "filters": "no top_k, top_p, min_p",
            "seed": "seeds need --enable-deterministic-inference",
            "both ends": "no stop ids beside ignore_eos",
            "checks of weights": "it takes NaN",
        },
        missing="" if _SGLANG else "`make backends` runs it: SHARPWAVE_SGLANG is not set",
    ),
    BackEnd(
        "vLLM",
        _open_vllm,
        {"checks of weights": "it takes NaN"},
        missing="" if _VLLM else "`make backends` runs it: SHARPWAVE_VLLM is not set",
    ),
]


async def tokens_of_vllm(generator: Generator) -> float:
    """Tokens that vLLM says it has made."""
    assert isinstance(generator, VLLMClient)
    text = await generator.servers[0].ask("GET", "/metrics")
    return sum(float(count) for count in re.findall(r"^vllm:generation_tokens_total\S* (\S+)", text, re.MULTILINE))


@contextlib.asynccontextmanager
async def paused(generator: Generator, mode: str = "keep") -> Any:
    """Generation stands still, by a pause that the generator did not ask for."""
    await _pause(generator, mode)
    try:
        yield
    finally:
        await _resume(generator)


async def _pause(generator: Any, mode: str) -> None:
    if not isinstance(generator, Client):
        await generator.pause(mode)
        return
    for server in generator.servers:
        if isinstance(generator, SGLangClient):
            await server.ask("POST", "/pause_generation", {"mode": "in_place" if mode == "keep" else mode})
        else:
            await server.ask("POST", "/pause", query={"mode": mode})


async def _resume(generator: Any) -> None:
    if not isinstance(generator, Client):
        await generator.resume()
        return
    for server in generator.servers:
        if isinstance(generator, SGLangClient):
            await server.ask("POST", "/continue_generation", {})
        else:
            await server.ask("POST", "/resume")
