"""A model that has learnt a task in part: what reinforcement learning starts from in `async_sync.py`.

    python benchmarks/llm/warm_start.py --seconds 60 --out FOLDER

Supervised training on right answers to fresh random lists. Writes a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sharpwave as sw
from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.learner import Learner, OptimizerConfig
from sharpwave.llm.model import ModelConfig, Transformer, save_model
from sharpwave.llm.objectives import SFT
from sharpwave.llm.tasks import Task, load_task
from sharpwave.llm.tasks.sums import reward

SIZES: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.05,
}  # fmt: skip


def new_model(task: Task, **changes: Any) -> Transformer:
    sizes = {**SIZES, "vocab_size": task.vocabulary, "max_position_embeddings": task.context, "other": {}, **changes}
    return Transformer(ModelConfig(**sizes)).fill_randomly(0)


def right_answers(task: Task, random: np.random.Generator, tokens: int, options: dict[str, Any]) -> sw.SequenceSample:
    """Fresh lists with their answers, about so many tokens."""
    ids: list[np.ndarray[Any, Any]] = []
    masks: list[np.ndarray[Any, Any]] = []
    (mark,) = task.tokenizer.encode(">")
    (zero,) = task.tokenizer.encode("0")
    while sum(map(len, ids)) < tokens:
        length = int(
            np.clip(round(options["median"] * np.exp(options["sigma"] * random.normal())), 4, options["longest"])
        )
        drawn = random.integers(10, size=length)
        ids.append(np.concatenate([drawn + zero, [mark], np.cumsum(drawn) % 10 + zero, [1]]))
        masks.append(np.arange(len(ids[-1])) > length)
    lens = [[len(one)] for one in ids]
    data = {"input_ids": np.concatenate(ids), "loss_mask": np.concatenate(masks)}
    return sw.SequenceSample([str(at) for at in range(len(ids))], dict.fromkeys(data, lens), data)


@torch.no_grad()
def score(task: Task, model: Transformer, slots: int, temperature: float = 0.0) -> float:
    """The mean reward of held-out items."""
    engine = Engine(model, slots=slots, context=task.context)
    items = [task.held_out[name] for name in task.held_out.ids]
    made = []
    for item in items:
        prompt = task.tokenizer.encode(item["prompt"])
        most = min(task.sampling.max_tokens, task.context - len(prompt))
        made += engine.submit(
            prompt, Sampling(temperature=temperature, max_tokens=most, stop_ids=task.sampling.stop_ids)
        )
    engine.run()
    return float(np.mean([reward(i, task.tokenizer.decode(one.tokens)) for i, one in zip(items, made, strict=True)]))


def train(task: Task, options: dict[str, Any], given: argparse.Namespace) -> Transformer:
    model = new_model(task, **json.loads(given.model)).to(given.device)
    settings = OptimizerConfig(learning_rate=given.rate, warmup_steps=50)
    learner = Learner(model, SFT(), optimizer=settings, row_tokens=given.row_tokens, rows=given.rows)
    random = np.random.default_rng(0)
    learner.step(right_answers(task, random, given.tokens, options))  # compiles
    began = told = time.perf_counter()
    steps, seen = 0, 0
    while (spent := time.perf_counter() - began) < given.seconds:
        # Short lists first: what to look at is learnt from them, and longer ones follow.
        grown = min(1.0, 1.25 * spent / given.seconds)
        now = {**options, "median": math.exp(math.log(6) + grown * (math.log(options["median"]) - math.log(6)))}
        rate = given.rate * min(1.0, 4 * (1 - spent / given.seconds))
        learner.config = dataclasses.replace(settings, learning_rate=rate)
        report = learner.step(right_answers(task, random, given.tokens, now))
        steps, seen = steps + 1, seen + report.tokens
        if time.perf_counter() - told > given.every:
            copy = Transformer(model.config).to(given.device, torch.bfloat16 if given.device == "cuda" else None).eval()
            copy.load_state_dict(model.state_dict())
            save(copy, given)  # before an engine packs its weights
            now = time.perf_counter()
            print(f"{now - began:6.1f} s, step {steps}, {seen:,} tokens, loss {report.loss:.4f}, held out "
                  f"{score(task, copy, given.slots):.3f}, sampled {score(task, copy, given.slots, 1.0):.3f} "
                  f"({time.perf_counter() - now:.1f} s)", flush=True)  # fmt: skip
            told = time.perf_counter()
            began += told - now
    return model


def save(model: Transformer, given: argparse.Namespace) -> None:
    """At each score, too: a command that is cut off leaves what was learnt until then."""
    if given.out is not None:
        save_model(model.to(torch.bfloat16), given.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between scores")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--median", type=float, default=64)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--longest", type=int, default=900)
    parser.add_argument("--row-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=65_536, help="of a step, about")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--model", default="{}", help="changes of the sizes, as JSON")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    options = {"median": given.median, "sigma": given.sigma, "longest": given.longest}
    model = train(load_task("sums", **options, held_out=given.held_out, count=1), options, given)
    save(model, given)


if __name__ == "__main__":
    sys.exit(main())
