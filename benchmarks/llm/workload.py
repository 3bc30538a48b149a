"""What the benchmarks of generation share: models of random weights, lengths of answers, and the clock."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharpwave.llm.model import ModelConfig, Transformer

__all__ = [
    "DEVICE",
    "DTYPE",
    "MODELS",
    "copy_bandwidth",
    "free",
    "in_turn",
    "lengths",
    "machine",
    "options",
    "our_model",
    "prompts",
    "save",
    "settle",
]

PUBLISHED = Path(__file__).resolve().parent.parent / "results"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
COPY_BYTES = 1 << 30 if DEVICE == "cuda" else 1 << 26
# The first is what an algorithm is tried on; the second has the sizes of Qwen2.5-0.5B.
MODELS: dict[str, dict[str, Any]] = {
    "3.4M": {
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 1025,
    },
    "0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}
# For a look on a CPU: it says whether the scripts run, and nothing about speed.
MODELS["quick"] = {**MODELS["3.4M"], "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@functools.lru_cache(1)
def our_model(name: str) -> Transformer:
    """The same for all who ask: making random weights takes seconds."""
    model = Transformer(ModelConfig(**MODELS[name], initializer_range=0.05)).fill_randomly(0)
    return model.to(DEVICE, DTYPE).eval()


def lengths(count: int, median: float, most: int, seed: int = 0) -> list[int]:
    """Log-normal with sigma 1, as lengths of answers are in reinforcement learning: a few are ten times the mean."""
    drawn = np.random.default_rng(seed).lognormal(math.log(median), 1.0, count)
    return [int(one) for one in drawn.clip(4, most)]


def prompts(count: int, size: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    drawn: list[list[int]] = np.random.default_rng(seed).integers(3, vocabulary, (count, size)).tolist()
    return drawn


def settle() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def free() -> None:
    """Gives back the memory of what is no longer used: graphs keep theirs until they are collected."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def in_turn(
    calls: dict[str, Callable[[], object]], rounds: int, *, is_warm: bool = False
) -> dict[str, dict[str, float]]:
    """Wall time of each, one after the other in an order drawn anew each round, after one call that does not count."""
    for call in calls.values() if not is_warm else ():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            settle()
            began = time.perf_counter_ns()
            calls[name]()
            settle()
            times[name].append(time.perf_counter_ns() - began)
    return {
        name: {"min_ns": min(took), "median_ns": statistics.median(took), "bursts": len(took)}
        for name, took in times.items()
    }


def copy_bandwidth() -> float:
    """Bytes a second that a plain copy reads and writes together."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    took = in_turn({"copy": lambda: [target.copy_(source) for _ in range(8)]}, 7)["copy"]["min_ns"] / 8
    return 2 * COPY_BYTES / took * 1e9


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(),
    }
    if DEVICE == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    facts["torch"] = torch.__version__
    return facts


def options(description: str | None, *, parts: tuple[str, ...] = (), limit: float | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few requests: a look, not a result")
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), help="unless given: those of the published table")
    parser.add_argument("--results", type=Path, help="the folder to write to; unless quick, the published one")
    if parts:
        parser.add_argument("--parts", nargs="*", choices=parts, default=parts, help="the others stay as they are")
    if limit is not None:
        said = "seconds that a contender may take to get ready, and for each run, before it is left out"
        parser.add_argument("--limit", type=float, default=limit, help=said)
    given = parser.parse_args()
    look = given.quick or DEVICE == "cpu"
    given.results = given.results or (Path(tempfile.gettempdir()) / "sharpwave-look" if look else PUBLISHED)
    if look and given.results.resolve() == PUBLISHED:
        sys.exit("published from a whole run on a GPU only: give another folder with --results")
    given.models = given.models or (["quick"] if given.quick else ["3.4M", "0.5B"])
    return given


def save(name: str, document: dict[str, Any], given: argparse.Namespace) -> None:
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / f"{name}.json"
    settings = {"quick": given.quick, "rounds": given.rounds}
    path.write_text(json.dumps({"machine": machine(), "settings": settings, **document}, indent=1) + "\n")
    print(f"wrote {path}")
