"""Tokens a second of the engine against transformers' continuous batching and `generate`, on the same weights.

    python benchmarks/llm/bench_generation.py [--quick] [--limit SECONDS] [--results FOLDER]

All contenders answer the same prompts with the same lengths (log-normal, sigma 1), in turn within one run, with the
same number of sequences side by side. `generate` takes the requests in batches, in their order, and each batch goes on
until its longest answer ends: lengths are not known before. Only tokens that were asked for count. Writes
`results/llm_generation.json` after each round.

transformers runs in two ways each, because which one is faster depends on the device and the model: continuous batching
without and with CUDA graphs, `generate` without and with a compiled forward pass over a static cache.

A contender that fails, or that needs more than `--limit` seconds to get ready or for one run, is left out with the
reason, and the others go on. Before the limit it prints the stacks of its threads.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import workload
from workload import DEVICE, DTYPE, MODELS

from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.model import load_model, save_model

# Read when transformers is imported, which happens later, in the processes of its contenders. Without them it looks for
# attention kernels on a server, and waits where there is no network.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

PROMPT = 32
LIMIT = 150.0  # seconds; about half of it is for compiling
# Sequences side by side, requests, median and most tokens of an answer.
SIZES = {
    "3.4M": ((256, 256, 64, 992),),
    "0.5B": ((256, 256, 64, 300),),
    "quick": ((8, 24, 12, 100),),
}
BLOCK = 256  # tokens of a block of transformers' paged cache, its default


class Requests:
    """Prompts and how long each answer is."""

    def __init__(self, name: str, count: int, median: int, most: int) -> None:
        self.lengths = workload.lengths(count, median, most)
        self.prompts = workload.prompts(count, PROMPT, MODELS[name]["vocab_size"])
        self.tokens = sum(self.lengths)


def ours(folder: Path, batch: int, requests: Requests) -> Callable[[], None]:
    model = load_model(folder, dtype=DTYPE, device=DEVICE).eval()
    engine = Engine(model, slots=batch, context=PROMPT + max(requests.lengths), chunk=256)

    def run() -> None:
        made = [
            engine.submit(prompt, Sampling(max_tokens=size, ignore_eos=True))[0]
            for prompt, size in zip(requests.prompts, requests.lengths, strict=True)
        ]
        engine.run()
        assert [len(one.tokens) for one in made] == requests.lengths

    return run


def theirs(folder: Path) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()


def without_cudnn_attention() -> None:
    """For contenders whose attention has a new shape at each step.

    From cuDNN 9.15 on, PyTorch prefers cuDNN's attention on an H100 or H200. It builds a plan for each shape, which
    takes tens of milliseconds. PyTorch's other kernels take any shape at once.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def by_generate(folder: Path, batch: int, requests: Requests, *, is_compiled: bool = False) -> Callable[[], None]:
    """Compiled, it is transformers' own compilation for a static cache: a decode step is one CUDA graph."""
    from transformers import GenerationConfig

    model = theirs(folder)
    # Without an id for the end of a text: all answers of a batch have the length of its longest.
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    if is_compiled:
        settings["cache_implementation"] = "static"
        # One size for all batches, else a longer one compiles anew; a multiple of 16, else masks are not aligned.
        model._previous_max_cache_length = math.ceil((PROMPT + max(requests.lengths)) / 16) * 16
    else:
        without_cudnn_attention()
    model.generation_config = GenerationConfig(**settings)

    @torch.no_grad()
    def run() -> None:
        for first in range(0, len(requests.prompts), batch):
            given = torch.tensor(requests.prompts[first : first + batch], device=DEVICE)
            most = max(requests.lengths[first : first + batch])
            made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=most)
            assert made.shape == (len(given), PROMPT + most), made.shape

    return run


def by_continuous_batching(
    folder: Path, batch: int, requests: Requests, *, has_graphs: bool = False
) -> Callable[[], None]:
    """With a package of flash attention it takes that one, else PyTorch's attention over all sequences with a mask.

    Its own choice is CUDA graphs with flash attention and none with a mask. For graphs, steps are padded to a few
    shapes; finer ones than the defaults (64 and 16,384) suit these lengths.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = theirs(folder)
    settings: dict[str, Any] = {}
    if has_graphs:
        settings = {"use_cuda_graph": True, "q_padding_interval_size": 32, "kv_padding_interval_size": 2048}
    else:
        without_cudnn_attention()
    # All sequences at full length fit beside the 15% of blocks that its scheduler keeps free. Left to itself it takes
    # nine tenths of the device's memory, for a mask above all. Prompts are shorter than a block: none can be shared.
    per_sequence = math.ceil((PROMPT + max(requests.lengths)) / BLOCK)
    config = ContinuousBatchingConfig(
        block_size=BLOCK,
        num_blocks=math.ceil(batch * per_sequence / 0.85) + 1,
        max_batch_tokens=max(2048, batch),
        max_requests_per_batch=batch,
        allow_block_sharing=False,
        **settings,
    )
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=config,
    )
    resolved = manager.continuous_batching_config
    chosen = f"graphs {resolved.use_cuda_graph}, asynchronous {resolved.use_async_batching}"
    say(f"transformers, continuous batching: {model.config._attn_implementation}, {chosen}")
    # Without `manager.warmup()`: it draws from the logits of a cache that was never written, and a NaN among them makes
    # every later call of the device fail. Graphs are captured in the first run, which does not count.
    manager.start()

    def run() -> None:
        for prompt, size in zip(requests.prompts, requests.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=size)
        left, tokens = len(requests.prompts), 0
        while left:
            made = manager.get_result(timeout=1)
            if made is None:
                if not manager.is_running():
                    raise RuntimeError("the thread of transformers' continuous batching has ended")
            elif made.is_finished():
                assert made.error is None, made.error
                left, tokens = left - 1, tokens + len(made.generated_tokens)
        assert tokens == requests.tokens, (tokens, requests.tokens)

    return run


CONTENDERS: dict[str, Callable[[Path, int, Requests], Callable[[], None]]] = {
    "sharpwave": ours,
    "transformers, continuous batching": by_continuous_batching,
    "transformers, continuous batching, CUDA graphs": partial(by_continuous_batching, has_graphs=True),
    "transformers, generate": by_generate,
    "transformers, generate, compiled": partial(by_generate, is_compiled=True),
}


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", flush=True)


def contend(
    label: str, folder: Path, batch: int, requests: Requests, limit: float, until: float, pipe: Connection
) -> None:
    """A contender's process: gets ready, runs once, and then once for each message. Sends how long each run took."""
    faulthandler.dump_traceback_later(max(1.0, 0.9 * (until - time.monotonic())))
    if DEVICE == "cpu":  # else the threads of all contenders wait for each other busily
        torch.set_num_threads(1)
    try:
        say(f"{label}: getting ready")
        call = CONTENDERS[label](folder, batch, requests)
        say(f"{label}: first run")
        while True:
            workload.settle()
            began = time.perf_counter_ns()
            call()
            workload.settle()
            took = time.perf_counter_ns() - began
            faulthandler.cancel_dump_traceback_later()
            pipe.send(took)
            pipe.recv()
            faulthandler.dump_traceback_later(0.9 * limit)
    except EOFError:  # the benchmark has ended
        pass
    except Exception as error:  # another version, or it does not run on this device
        pipe.send(f"{type(error).__name__}: {error}"[:300])


class Contender:
    """A contender in a process of its own.

    A call that hangs inside of CUDA or a compiler can be ended with its process only. Each process keeps its graphs and
    compiled code, so contenders still run in turn, and they get ready side by side, before anything is measured.
    """

    def __init__(self, *given: Any) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, other = spawning.Pipe()
        self._process = spawning.Process(target=contend, args=(*given, other))
        self._process.start()
        other.close()  # so that the end of the process is the end of the pipe

    def again(self) -> None:
        with contextlib.suppress(OSError):  # it died: `took` says so
            self._pipe.send(None)

    def took(self, limit: float) -> int:
        """Nanoseconds of the run that goes on."""
        if not self._pipe.poll(limit):
            raise TimeoutError("no answer within the limit")
        try:
            said: int | str = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise RuntimeError(f"its process ended with exit code {self._process.exitcode}") from None
        if isinstance(said, str):
            raise RuntimeError(said)
        return said

    def end(self) -> None:
        """Kills it: it has nothing to save, and a thread of transformers or of CUDA may hang."""
        self._process.kill()
        self._process.join(30)


def contest(
    name: str, batch: int, count: int, median: int, most: int, rounds: int, limit: float
) -> Iterator[dict[str, Any]]:
    """What is known after each round: a later one may take minutes, or hang."""
    requests, left_out = Requests(name, count, median, most), []
    say(f"{name}, {batch} side by side, {count} answers of {min(requests.lengths)} to {max(requests.lengths)} tokens")
    model = workload.our_model(name)
    times: dict[str, list[int]] = {}
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        save_model(model, folder)
        contenders: dict[str, Contender] = {}
        until = time.monotonic() + limit
        for label in CONTENDERS:
            contenders[label] = Contender(label, folder, batch, requests, limit, until)
            ends.callback(contenders[label].end)

        def took(label: str, seconds: float) -> int | None:
            try:
                return contenders[label].took(seconds)
            except (RuntimeError, TimeoutError) as error:
                if label == "sharpwave":
                    raise
                reason = f"{error}: {limit:.0f} s" if isinstance(error, TimeoutError) else str(error)
                say(f"{label}: left out: {reason}")
                left_out.append({"who": f"{label}, {name}", "reason": reason})
                contenders.pop(label).end()
                times.pop(label, None)
                return None

        for label in list(contenders):
            first = took(label, max(0.0, until - time.monotonic()))
            if first is not None:
                say(f"{label}: the first run took {first / 1e9:.1f} s")
                times[label] = []
        order = random.Random(0)
        about = {
            "model": name,
            "parameters": sum(one.numel() for one in model.parameters()),
            "batch": batch,
            "requests": count,
            "mean_length": requests.tokens / count,
            "longest": max(requests.lengths),
            "tokens": requests.tokens,
        }
        for _ in range(rounds):
            for label in order.sample(list(contenders), len(contenders)):
                contenders[label].again()
                one = took(label, limit)
                if one is not None:
                    say(f"{label}: {one / 1e9:.2f} s, {requests.tokens / one * 1e9:,.0f} tokens/s")
                    times[label].append(one)
            cases = {
                label: {"min_ns": min(some), "median_ns": statistics.median(some), "bursts": len(some)}
                for label, some in times.items()
            }
            yield {**about, "cases": cases, "left_out": left_out}


def show(made: dict[str, Any]) -> None:
    for label, case in made["cases"].items():
        print(f"    {label:48}{made['tokens'] / case['min_ns'] * 1e9:14,.0f} tokens/s")
    for line in made["left_out"]:
        print(f"    left out: {line['who']}: {line['reason']}")


def main() -> None:
    given = workload.options(__doc__, limit=LIMIT)
    given.rounds = given.rounds or 2
    contests: dict[Any, dict[str, Any]] = {}
    for name in given.models:
        for size in SIZES[name]:
            for made in contest(name, *size, given.rounds, given.limit):
                contests[name, size] = made
                left_out = [line for one in contests.values() for line in one["left_out"]]
                shown = [{key: value for key, value in one.items() if key != "left_out"} for one in contests.values()]
                workload.save("llm_generation", {"contests": shown, "left_out": left_out}, given)
            show(contests[name, size])


if __name__ == "__main__":
    main()
