"""Tokens a second that a learner trains on, in packed rows, and the share of the device's bfloat16 rate.

    python benchmarks/llm/learner.py                # a small and a large model on a GPU
    python benchmarks/llm/learner.py --quick        # a tiny model: does it run?

The count of operations of a step is 6 for each parameter of a matrix product (2 forward, 4 backward) and each computed
place, and 6 * layers * heads * head_dim * n for each token of a sequence of n tokens (attention is causal, so half of
12 * ...). Layers that are computed again are not counted twice. Embeddings count only as the head. The device's rate is
measured by a large matrix product in the same run. Writes `results/gpu_learner.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sharpwave as sw
from sharpwave.llm.learner import Learner
from sharpwave.llm.model import ModelConfig, Transformer
from sharpwave.llm.objectives import GRPO

RESULTS = Path(__file__).parents[1] / "results"
MODELS: dict[str, dict[str, Any]] = {
    "3.4M": {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
             "num_attention_heads": 4, "head_dim": 64},
    "0.5B": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4_864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
    "tiny": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2},
}  # fmt: skip


def batch_of(tokens: int, longest: int, vocabulary: int, seed: int) -> sw.SequenceSample:
    """Groups of 8 answers with a long tail of lengths, as many as make about `tokens` tokens."""
    random = np.random.default_rng(seed)
    flat: list[int] = []
    while sum(flat) < tokens:
        flat += np.clip(random.lognormal(np.log(longest / 12), 1.0, 8), 8, longest).astype(int).tolist()
    lens = [flat[at : at + 8] for at in range(0, len(flat), 8)]
    total = sum(flat)
    data = {
        "input_ids": random.integers(0, vocabulary, total),
        "loss_mask": np.concatenate([np.arange(n) >= 4 for n in flat]),
        "logprobs": np.full(total, -np.log(vocabulary), np.float32),
        "rewards": random.random(len(flat)).astype(np.float32),
    }
    seqlens = {**dict.fromkeys(data, lens), "rewards": [[1] * 8] * len(lens)}
    return sw.SequenceSample([str(at) for at in range(len(lens))], seqlens, data)


def operations(config: ModelConfig, places: int, lens: list[int]) -> float:
    inner, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * inner + 2 * shared) + 3 * config.hidden_size * config.intermediate_size
    matrices = config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * inner * sum(n * n for n in lens)
    return 6.0 * matrices * places + attention


def device_rate(device: str, size: int = 8192, rounds: int = 50) -> float:
    """Operations a second of a large product in bfloat16."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        a @ b
    torch.cuda.synchronize()
    return rounds * 2.0 * size**3 / (time.perf_counter() - began)


def measure(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    config = ModelConfig(model_type="qwen3", max_position_embeddings=chosen.row_tokens, **MODELS[name])
    model = Transformer(config).fill_randomly().to(chosen.device)
    learner = Learner(
        model, GRPO(), row_tokens=chosen.row_tokens, rows=chosen.rows, recompute_layers=chosen.recompute_layers
    )
    batches = [batch_of(chosen.tokens, chosen.longest, config.vocab_size, seed) for seed in range(4)]
    for batch in batches[: chosen.warmup]:
        learner.step(batch)
    if chosen.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began, tokens, work, fill = time.perf_counter(), 0, 0.0, []
    for step in range(chosen.steps):
        batch = batches[step % len(batches)]
        report = learner.step(batch)
        lens = [n for row in batch.seqlens["input_ids"] for n in row]
        tokens, work = tokens + report.tokens, work + operations(config, report.tokens, lens)
        fill.append(report.fill)
    took = time.perf_counter() - began
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_s": tokens / took,
        "operations_per_s": work / took,
        "fill": float(np.mean(fill)),
        "step_s": took / chosen.steps,
        "memory_bytes": torch.cuda.max_memory_allocated() if chosen.device == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=("3.4M", "0.5B"))
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4, help="of a pass")
    parser.add_argument("--tokens", type=int, default=131_072, help="of a step, about")
    parser.add_argument("--longest", type=int, default=1024, help="sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--recompute-layers", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.models, chosen.row_tokens, chosen.tokens, chosen.longest = ("tiny",), 256, 2_000, 128
        chosen.steps, chosen.warmup = 2, 1
    rate = device_rate(chosen.device) if chosen.device == "cuda" else None
    cases = [measure(name, chosen) for name in chosen.models]
    for case in cases:
        share = f", {case['operations_per_s'] / rate:.0%} of the device's bfloat16 rate" if rate else ""
        print(
            f"{case['model']} ({case['parameters']:,} parameters): {case['tokens_per_s']:,.0f} tokens/s{share}; "
            f"{case['fill']:.1%} of places filled, {1e3 * case['step_s']:.1f} ms a step"
        )
    if not chosen.quick:
        facts = {"gpu": torch.cuda.get_device_name() if rate else None, "torch": torch.__version__}
        settings = {name: value for name, value in vars(chosen).items() if name != "results"}
        document = {"machine": facts, "settings": settings, "bf16_operations_per_s": rate, "cases": cases}
        chosen.results.mkdir(parents=True, exist_ok=True)
        (chosen.results / "gpu_learner.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
