"""A decode step against the time of its bytes at the speed of a copy, and how long new weights take to go in.

    python benchmarks/llm/bench_decode.py [--quick] [--results FOLDER]

The bytes of a step are the weights and the keys and values of all slots, each read once. `the step alone` is what the
device is busy for; `with its inputs and answers` is what the engine waits for; `engine.step()` has all the host's work.
Weights go in from a folder in /dev/shm as a learner publishes it, from tensors of the host, and from tensors of the
device; `steps wait` is the part of it during which no step can run. Writes `results/llm_decode.json`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import workload
from workload import DEVICE, MODELS

from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.generators.graph_decode import GraphDecode
from sharpwave.llm.generators.likelihood import log_probabilities
from sharpwave.llm.kernels import plain
from sharpwave.llm.model import ModelConfig, Transformer, load_state
from sharpwave.llm.weights import Weights

SLOTS = {"3.4M": (64, 256, 1024), "0.5B": (64, 256), "quick": (4, 8)}


def step_bytes(model: Any, slots: int, length: int) -> int:
    config = model.config
    weights = sum(one.nbytes for one in model.parameters())
    if not config.tie_word_embeddings:  # of the embeddings a step reads its rows only
        weights -= model.model.embed_tokens.weight.nbytes
    places = config.num_hidden_layers * slots * length * config.num_key_value_heads
    return weights + 2 * places * config.head_dim * model.dtype.itemsize


@torch.no_grad()
def step_case(name: str, slots: int, part: float, bandwidth: float, rounds: int) -> dict[str, Any]:
    workload.free()
    model = workload.our_model(name)
    engine = Engine(model, slots=slots, chunk=1024 if DEVICE == "cuda" else 256)
    decode = engine._decode
    if DEVICE == "cpu":  # the same functions without graphs
        decode = GraphDecode(model, engine._cache, engine._sampler, engine.chunk, plain)
    assert isinstance(decode, GraphDecode)
    length = max(1, int(engine.context * part))
    ids, counts = np.full(slots, 5), np.zeros(slots, np.int64)
    places = np.full(slots, length - 1)
    decode.step(ids, places, counts)
    many = 50 if DEVICE == "cuda" else 1
    cases = workload.in_turn(
        {
            "the step alone": lambda: [decode._step() for _ in range(many)],
            "with its inputs and answers": lambda: [decode.step(ids, places, counts) for _ in range(many)],
        },
        rounds,
    )
    for times in cases.values():
        times["min_ns"], times["median_ns"] = times["min_ns"] / many, times["median_ns"] / many
    (prompt,) = workload.prompts(1, max(1, length - 32), MODELS[name]["vocab_size"])
    engine.submit(prompt, Sampling(max_tokens=32, ignore_eos=True), n=slots)  # a group: all slots decode together
    engine.run()
    took = [one.took_ns for one in engine.timeline if one.decoding == slots and not one.prefilled]
    cases["engine.step()"] = {"min_ns": min(took), "median_ns": statistics.median(took), "bursts": len(took)}
    moved = step_bytes(model, slots, length)
    least = moved / bandwidth * 1e9
    print(f"{name}, {slots} slots of {length} tokens: the bytes take {least / 1e3:,.0f} us")
    for label, times in cases.items():
        print(f"    {label:32}{times['min_ns'] / 1e3:12,.0f} us, {times['min_ns'] / least:.2f}x")
    return {"model": name, "slots": slots, "length": length, "bytes": moved, "bytes_ns": least, "cases": cases}


def swap_case(name: str, rounds: int) -> dict[str, Any]:
    engine = Engine(workload.our_model(name), slots=4)
    moved = sum(one.nbytes for one in engine.model.parameters())
    on_device = {key: tensor.clone() for key, tensor in engine.model.weights()}
    on_host = {key: tensor.cpu() for key, tensor in on_device.items()}
    for _ in range(4):
        engine.submit([5, 6, 7], Sampling(max_tokens=engine.context - 3, ignore_eos=True))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        published = Weights(folder).publish(engine.model, 1)
        calls = {
            "from a folder in memory": lambda: engine.update(published, engine.version + 1),
            "from tensors of the host": lambda: engine.update(on_host, engine.version + 1),
            "from tensors of the device": lambda: engine.update(on_device, engine.version + 1),
            "steps wait": lambda: load_state(engine.model, on_device),
        }
        engine.run(3)
        cases = workload.in_turn(calls, rounds)
        began = time.perf_counter()
        engine.run(3)
        print(f"{name}, {moved / 1e6:,.1f} MB of weights; three steps afterwards {time.perf_counter() - began:.4f} s")
    for label, times in cases.items():
        print(f"    {label:32}{times['min_ns'] / 1e6:10,.2f} ms, {moved / times['min_ns']:.2f} GB/s")
    return {"model": name, "bytes": moved, "cases": cases}


def score_case(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """How far the engine's log-probabilities are from those of whole forward passes of the same weights."""
    sizes = {**MODELS[name], "initializer_range": 0.02}  # as models begin: wider ones have logits that none has
    model = Transformer(ModelConfig(**sizes)).fill_randomly(0).to(DEVICE, dtype).eval()
    engine = Engine(model, slots=16, context=min(512, model.config.max_position_embeddings))
    prompts = workload.prompts(32, 40, MODELS[name]["vocab_size"])
    made = [engine.submit(one, Sampling(max_tokens=120, ignore_eos=True))[0] for one in prompts]
    engine.run()
    apart = []
    for one in made:
        whole = np.array([*one.prompt, *one.answer.tokens])
        scores = np.array(list(itertools.chain.from_iterable(log_probabilities(model, whole))))
        apart.append(np.abs(scores[len(one.prompt) - 1 :] - one.answer.logprobs))
    found = np.concatenate(apart)
    said = {"model": name, "dtype": str(dtype).removeprefix("torch."), "tokens": len(found)}
    said |= {"largest": float(found.max()), "mean": float(found.mean()), "above_0.02": float((found > 0.02).mean())}
    print(
        f"{name}, {said['dtype']}: log-probabilities differ by {found.max():.2g} at most, {found.mean():.2g} on "
        f"average, {said['above_0.02']:.2%} by more than 0.02"
    )
    return said


def main() -> None:
    given = workload.options(__doc__, parts=("steps", "swaps", "scores"))
    given.rounds = given.rounds or (3 if given.quick else 15)
    path = given.results / "llm_decode.json"
    made: dict[str, Any] = {}
    if len(given.parts) < 3:  # the others stay
        made = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("machine", "settings")}
    if "steps" in given.parts:
        made["copy_bytes_per_s"] = bandwidth = workload.copy_bandwidth()
        made["steps"] = [
            step_case(name, slots, part, bandwidth, given.rounds)
            for name in given.models
            for slots in SLOTS[name]
            for part in (0.06, 0.95)
        ]
        workload.save("llm_decode", {**made, "left_out": []}, given)
    if "swaps" in given.parts:
        made["swaps"] = [swap_case(name, given.rounds) for name in given.models]
    if "scores" in given.parts:
        narrow = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
        made["scores"] = []
        for name, dtype in itertools.product(given.models, narrow):
            made["scores"].append(score_case(name, dtype))
            workload.save("llm_decode", {**made, "left_out": []}, given)
    workload.save("llm_decode", {**made, "left_out": []}, given)


if __name__ == "__main__":
    main()
