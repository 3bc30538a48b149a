"""Tokens a second of the engine against transformers' continuous batching and `generate`, on the same weights.

    python benchmarks/llm/bench_generation.py [--quick] [--results FOLDER]

Everybody answers the same prompts with the same lengths (log-normal, sigma 1), in turn within one run, with the same
number of sequences side by side. `generate` takes the requests in batches, in their order, and each batch goes on until
its longest answer ends: lengths are not known before. Only tokens that were asked for count. Writes
`results/llm_generation.json`.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import workload
from workload import DEVICE, DTYPE, MODELS

from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.model import save_model

PROMPT = 32
# Sequences side by side, requests, median and most tokens of an answer.
SIZES = {
    "3.4M": ((256, 256, 64, 992),),
    "0.5B": ((256, 256, 64, 300),),
    "quick": ((8, 24, 12, 100),),
}


class Requests:
    """Prompts and how long each answer is."""

    def __init__(self, name: str, count: int, median: int, most: int) -> None:
        self.lengths = workload.lengths(count, median, most)
        self.prompts = workload.prompts(count, PROMPT, MODELS[name]["vocab_size"])
        self.tokens = sum(self.lengths)


def ours(name: str, batch: int, requests: Requests) -> Callable[[], None]:
    engine = Engine(workload.our_model(name), slots=batch, context=PROMPT + max(requests.lengths), chunk=256)

    def run() -> None:
        made = [
            engine.submit(prompt, Sampling(max_tokens=size, ignore_eos=True))[0]
            for prompt, size in zip(requests.prompts, requests.lengths, strict=True)
        ]
        engine.run()
        assert [len(one.tokens) for one in made] == requests.lengths

    return run


def theirs(folder: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # else it looks for kernels in a hub, and waits where there is no network
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()
    model.generation_config = transformers.GenerationConfig(do_sample=True, top_k=0, pad_token_id=0)
    return model


def by_generate(folder: Path, batch: int, requests: Requests, ends: ExitStack) -> Callable[[], None]:
    model = theirs(folder)
    del ends

    @torch.no_grad()
    def run() -> None:
        for first in range(0, len(requests.prompts), batch):
            given = torch.tensor(requests.prompts[first : first + batch], device=DEVICE)
            most = max(requests.lengths[first : first + batch])
            made = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=most, min_new_tokens=most
            )
            assert made.shape[1] == PROMPT + most

    return run


def by_continuous_batching(folder: Path, batch: int, requests: Requests, ends: ExitStack) -> Callable[[], None]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = theirs(folder)
    generation = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    wanted = {"max_requests_per_batch": batch, "max_memory_percent": 0.3}
    config = ContinuousBatchingConfig(**{key: value for key, value in wanted.items() if key in known})
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    ends.callback(manager.stop, block=True, timeout=60)

    def run() -> None:
        for prompt, size in zip(requests.prompts, requests.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=size)
        left, tokens = len(requests.prompts), 0
        while left:
            made = manager.get_result(timeout=60)
            if made is None:
                raise RuntimeError("transformers' continuous batching gave nothing for 60 s")
            if made.is_finished():
                assert made.error is None, made.error
                left, tokens = left - 1, tokens + len(made.generated_tokens)
        assert tokens == requests.tokens, (tokens, requests.tokens)

    return run


def contest(name: str, batch: int, count: int, median: int, most: int, rounds: int) -> dict[str, Any]:
    requests, left_out = Requests(name, count, median, most), []
    with ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        save_model(workload.our_model(name), folder)
        calls = {"sharpwave": ours(name, batch, requests)}
        calls["sharpwave"]()
        for label, make in (
            ("transformers, continuous batching", by_continuous_batching),
            ("transformers, generate", by_generate),
        ):
            try:
                call = make(Path(folder), batch, requests, ends)
                began = time.perf_counter()
                call()
                print(f"    {label}: the first run took {time.perf_counter() - began:.1f} s", flush=True)
                calls[label] = call
            except Exception as error:  # another version, or it does not run on this device
                left_out.append({"who": f"{label}, {name}", "reason": f"{type(error).__name__}: {error}"[:300]})
        cases = workload.in_turn(calls, rounds, is_warm=True)
    workload.free()
    print(f"{name}, {batch} side by side, {count} answers of {min(requests.lengths)} to {max(requests.lengths)} tokens")
    for label, took in cases.items():
        print(f"    {label:36}{requests.tokens / took['min_ns'] * 1e9:14,.0f} tokens/s")
    for line in left_out:
        print(f"    left out: {line['who']}: {line['reason']}")
    return {
        "model": name,
        "parameters": sum(one.numel() for one in workload.our_model(name).parameters()),
        "batch": batch,
        "requests": count,
        "mean_length": requests.tokens / count,
        "longest": max(requests.lengths),
        "tokens": requests.tokens,
        "cases": cases,
        "left_out": left_out,
    }


def main() -> None:
    given = workload.options(__doc__)
    given.rounds = given.rounds or 2
    made: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for name in given.models:
        for size in SIZES[name]:
            made.append(contest(name, *size, given.rounds))
            left_out += made[-1].pop("left_out")
            workload.save("llm_generation", {"contests": made, "left_out": left_out}, given)  # one may take minutes


if __name__ == "__main__":
    main()
