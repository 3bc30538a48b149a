"""Times SequenceBuffer: its calls by capacity, many getters, the journal; and the stream, against JSON of lists.

    python benchmarks/bench_sequences.py            # all, about two minutes
    python benchmarks/bench_sequences.py --quick

`scan` stands for what AReaL's buffer does: arrays as long as the capacity, looked through in every call. It is written
here from the description of that buffer, in NumPy, without its locks and checks, so it is rather too fast. All take
turns, call by call. Prints tables; writes `results/sequences.json`.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing as mp
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import zmq
from harness.program import Run, parse, parser
from harness.results import Document
from tables import sequences

import sharpwave as sw
from sharpwave.service.stream import Puller, Pusher

BATCH, TOKENS, BEHIND = 256, 64, 4096  # samples a call, tokens a sample, samples that wait for somebody else
CAPACITIES = (10**4, 10**5, 10**6, 10**7)
CALLS = ("put", "get", "amend")
KEYS = {"ids": "i8", "ref": "f4", "rewards": "f4"}
GETTERS = 64
ITEM, LENGTH = 16, 2048  # of the stream: samples an item, tokens a sample


def make(names: list[str], key: str, length: int = TOKENS) -> list[sw.SequenceSample]:
    data = np.zeros(length, KEYS[key])
    return [sw.SequenceSample([name], {key: [length]}, {key: data}) for name in names]


class Ours:
    """Three consumers: a reference and a reward model, and the trainer that waits for both."""

    def __init__(self, capacity: int, **options: Any) -> None:
        flow = sw.Dataflow(
            [
                sw.Consumer("ref", {"ids"}, {"ref"}, BATCH),
                sw.Consumer("reward", {"ids"}, {"rewards"}, BATCH),
                sw.Consumer("train", set(KEYS), batch_size=BATCH),
            ]
        )
        self.seq = sw.SequenceBuffer(capacity, flow=flow, **options)
        self.seq.put(make([f"old{at}" for at in range(BEHIND)], "rewards"))

    def put(self, samples: list[sw.SequenceSample]) -> Any:
        return self.seq.put(samples)

    def get(self, name: str) -> tuple[Any, list[str]]:
        self.lease = self.seq.get(name, timeout=0)
        return self.lease.handles, self.lease.batch.ids

    def amend(self, handles: Any, samples: list[sw.SequenceSample]) -> None:
        self.seq.amend(handles, samples)

    def done(self) -> None:
        self.lease.ack()


class Scan:
    """Arrays as long as the capacity: a flag a slot and state, a flag a slot and key, a flag a slot and consumer."""

    needs: ClassVar[dict[str, list[str]]] = {"ref": ["ids"], "reward": ["ids"], "train": list(KEYS)}

    def __init__(self, capacity: int) -> None:
        self.states = {name: np.zeros(capacity, bool) for name in ("put", "amended", "read", "idle")}
        self.empty = np.ones(capacity, bool)
        self.birth = np.zeros(capacity, np.int64)
        self.keys = {key: np.zeros(capacity, bool) for key in KEYS}
        self.over = {name: np.zeros(capacity, bool) for name in self.needs}
        self.entries: dict[int, dict[str, Any]] = {}
        self.put(make([f"old{at}" for at in range(BEHIND)], "rewards"))

    def check(self) -> None:
        held = sum(int(flags.sum()) for flags in self.states.values())
        if held + int(self.empty.sum()) != len(self.empty):
            raise RuntimeError("the scan's flags do not add up")

    def put(self, samples: list[sw.SequenceSample]) -> Any:
        self.check()
        slots = np.where(self.empty)[0][: len(samples)]
        self.empty[slots] = False
        self.states["idle"][slots] = True
        self.birth[slots] = time.monotonic_ns() + np.arange(len(slots))
        for slot, sample in zip(slots.tolist(), samples, strict=True):
            self.entries[slot] = {"samples": [sample], "left": len(self.needs)}
            for key in sample.keys:
                self.keys[key][slot] = True
        return slots

    def get(self, name: str) -> tuple[Any, list[str]]:
        self.check()
        ready = (self.states["idle"] | self.states["read"]) & ~self.over[name]
        for key in self.needs[name]:
            ready &= self.keys[key]
        found = np.where(ready)[0]
        slots = found[np.argsort(self.birth[found])[:BATCH]]
        self.over[name][slots] = True
        ids = [self.entries[slot]["samples"][0].ids[0] for slot in slots.tolist()]
        gather = [sample for slot in slots.tolist() for sample in self.entries[slot]["samples"]]
        for key in self.needs[name]:
            np.concatenate([sample[key] for sample in gather if key in sample])
        for slot in slots.tolist():
            self.entries[slot]["left"] -= 1
            if not self.entries[slot]["left"]:
                del self.entries[slot]
                self.empty[slot], self.states["idle"][slot] = True, False
                for flags in (*self.keys.values(), *self.over.values()):
                    flags[slot] = False
        return slots, ids

    def amend(self, slots: Any, samples: list[sw.SequenceSample]) -> None:
        self.check()
        for slot, sample in zip(slots.tolist(), samples, strict=True):
            self.entries[slot]["samples"].append(sample)
            for key in sample.keys:
                self.keys[key][slot] = True

    def done(self) -> None:
        """At once."""


def step(buffer: Any, number: int, times: dict[str, list[float]]) -> None:
    """One training step: what comes in, what both models add, what the trainer takes."""

    def clock(name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    samples = make([f"{number}-{at}" for at in range(BATCH)], "ids")
    clock("put", buffer.put, samples)
    for name, key in (("ref", "ref"), ("reward", "rewards")):
        handles, ids = clock("get", buffer.get, name)
        made = make(ids, key)
        clock("amend", buffer.amend, handles, made)
        clock("ack", buffer.done)
    clock("get", buffer.get, "train")
    clock("ack", buffer.done)


def by_turns(buffers: dict[str, Any], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians and minima of each one's calls."""
    times: dict[str, dict[str, list[float]]] = {label: {} for label in buffers}
    for number in range(rounds + 3):
        if number == 3:
            times = {label: {} for label in buffers}  # the first rounds warm up
        for label, buffer in buffers.items():
            gc.collect(0)
            step(buffer, number, times[label])
    return {
        label: {call: {"median_ns": 1e9 * statistics.median(s), "min_ns": 1e9 * min(s)} for call, s in calls.items()}
        for label, calls in times.items()
    }


def capacities(rounds: int, quick: bool) -> Document:
    sizes = CAPACITIES[:2] if quick else CAPACITIES
    buffers: dict[str, Any] = {f"sharpwave {size}": Ours(size) for size in sizes}
    buffers |= {f"scan {size}": Scan(size) for size in sizes}
    return by_turns(buffers, rounds)


def journals(rounds: int, folder: Path) -> Document:
    buffers = {
        "off": Ours(10**5),
        "on": Ours(10**5, journal=folder / "on"),
        "waits for the disk": Ours(10**5, journal=folder / "sync", sync=True),
    }
    return by_turns(buffers, rounds)


def summary(times: list[float]) -> Document:
    return {"median_ns": 1e9 * statistics.median(times), "min_ns": 1e9 * min(times), "bursts": len(times)}


def building(rounds: int) -> Document:
    """256 samples one by one, and as one sample of 256 data, which `put` takes as well."""
    names = [str(at) for at in range(BATCH)]
    data = np.zeros(BATCH * TOKENS, KEYS["ids"])
    calls: dict[str, Callable[[], Any]] = {
        "building 256 samples": lambda: make(names, "ids"),
        "one sample of 256 data": lambda: sw.SequenceSample(names, {"ids": [TOKENS] * BATCH}, {"ids": data}),
    }
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(4 * rounds):
        for label, call in calls.items():
            gc.collect(0)
            start = time.perf_counter()
            call()
            times[label].append(time.perf_counter() - start)
    return {label: summary(of) for label, of in times.items()}


def touch_free_memory(folder: Path) -> None:
    """Writes and removes a file of as many bytes as ``long_puts`` writes, and more.

    A virtual machine gets a page from its host when it first writes to it, which takes several times as long as the
    write itself. Without this, the contender that happens to get such pages pays for them."""
    raw = bytes(64 << 20)
    file = os.open(folder / "touched", os.O_CREAT | os.O_RDWR)
    for piece in range(32):
        os.pwrite(file, raw, piece * len(raw))
    os.close(file)
    os.unlink(folder / "touched")


def long_puts(rounds: int, folder: Path) -> Document:
    """A put of 256 x 2,048 tokens with the journal, beside writing as many bytes from one buffer; both wait for the
    disk, or neither. The samples leave after each put, so that memory stays the same."""
    found: Document = {}
    touch_free_memory(folder)
    for label, sync in (("on", False), ("waits for the disk", True)):
        flow = sw.Dataflow([sw.Consumer("train", {"ids"}, batch_size=BATCH)])
        seq = sw.SequenceBuffer(10**5, flow=flow, journal=folder / f"long {label}", sync=sync)
        file = os.open(folder / f"bytes {label}", os.O_CREAT | os.O_RDWR)
        times: dict[str, list[float]] = {
            "journal put 256 x 2,048 tokens": [],
            "journal put of one sample of 256 data": [],
            "writing the bytes": [],
        }
        at, raw = 0, b""
        for number in range(rounds + 3):
            samples = make([f"{number}-{place}" for place in range(BATCH)], "ids", LENGTH)
            together = sw.SequenceSample.gather(samples)
            gc.collect(0)
            size = seq.stats()["journal_bytes"]
            took = []
            for put in (samples, together):
                start = time.perf_counter()
                seq.put(put)
                took.append(time.perf_counter() - start)
                raw = raw or bytes(seq.stats()["journal_bytes"] - size)
                seq.clear()
            start = time.perf_counter()
            os.pwrite(file, raw, at)
            if sync:
                os.fdatasync(file)
            took.append(time.perf_counter() - start)
            at += len(raw)
            if number >= 3:  # the first rounds warm up
                for of, seconds in zip(times.values(), took, strict=True):
                    of.append(seconds)
        seq.close()
        os.close(file)
        found[label] = {call: summary(of) for call, of in times.items()} | {"record_bytes": len(raw)}
    return found


def putters(rounds: int, folder: Path) -> Document:
    """Puts a second of 1 and 8 threads at once, 16 samples a put, each waiting for the disk: they share its waits."""
    found: dict[str, float] = {}
    for turn in range(3):
        for many in (1, 8):
            flow = sw.Dataflow([sw.Consumer("train", {"ids"}, batch_size=BATCH)])
            seq = sw.SequenceBuffer(10**6, flow=flow, journal=folder / f"putters {turn} {many}", sync=True)
            made = [
                [make([f"{who}-{turn}-{at}" for at in range(16)], "ids") for turn in range(rounds)]
                for who in range(many)
            ]
            workers = [threading.Thread(target=lambda mine=mine, s=seq: [s.put(one) for one in mine]) for mine in made]
            start = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            found[f"threads {many}"] = max(
                found.get(f"threads {many}", 0), many * rounds / (time.perf_counter() - start)
            )
            seq.close()
    return found


def getters(rounds: int) -> Document:
    """Batches of 4 to 64 getters at once, in one event loop and in threads; and to one alone."""
    found: dict[str, float] = {}
    batches = 16 * rounds

    def fill() -> sw.SequenceBuffer:
        return sw.SequenceBuffer(10**6, flow=sw.Dataflow([sw.Consumer("train", {"ids"}, batch_size=4)]))

    def puts() -> list[list[sw.SequenceSample]]:
        return [make([f"{turn}-{at}" for at in range(4 * 16)], "ids") for turn in range(batches // 16)]

    async def take(seq: sw.SequenceBuffer, count: int) -> None:
        for _ in range(count):
            (await seq.get_async("train")).ack()

    async def crowd(seq: sw.SequenceBuffer, many: int, made: list[list[sw.SequenceSample]]) -> None:
        tasks = [asyncio.create_task(take(seq, batches // many)) for _ in range(many)]
        for samples in made:
            await seq.put_async(samples)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    for many in (1, GETTERS):
        seq, made = fill(), puts()
        start = time.perf_counter()
        asyncio.run(crowd(seq, many, made))
        found[f"coroutines {many}"] = 4 * (batches // many) * many / (time.perf_counter() - start)
        seq, made = fill(), puts()
        workers = [
            threading.Thread(target=lambda s=seq, m=many: [s.get("train").ack() for _ in range(batches // m)])
            for _ in range(many)
        ]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for samples in made:
            seq.put(samples)
        for worker in workers:
            worker.join()
        found[f"threads {many}"] = 4 * (batches // many) * many / (time.perf_counter() - start)
    return found


# ---- the stream ------------------------------------------------------------------------------------------------------


def item(number: int) -> sw.SequenceSample:
    stream = np.random.default_rng(0)
    names = [f"{number}-{at}" for at in range(ITEM)]
    data = {
        "ids": stream.integers(0, 150_000, ITEM * LENGTH),
        "log_probs": stream.normal(size=ITEM * LENGTH).astype(np.float32),
    }
    return sw.SequenceSample(names, {key: [LENGTH] * ITEM for key in data}, data)


def push(form: str, address: str, count: int) -> None:
    made = item(0)
    if form == "safetensors":
        with Pusher(address) as pusher:
            for _ in range(count):
                pusher.push(made)
        return
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(16)
    socket.connect(address)
    for _ in range(count):
        socket.send(orjson.dumps(made.to_json()))
    socket.close(linger=20_000)
    context.term()


def streams(count: int) -> Document:
    found = {}
    context = mp.get_context("spawn")
    for form in ("safetensors", "lists in JSON"):
        reads: Callable[[], Any]
        if form == "safetensors":
            puller = Puller()
            address, reads, end = puller.address, partial(puller.pull, 60), puller.close
        else:
            place = zmq.Context()
            socket = place.socket(zmq.PULL)
            socket.set_hwm(16)
            socket.setsockopt(zmq.RCVTIMEO, 60_000)
            address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            reads = lambda s=socket: sw.SequenceSample.from_json(orjson.loads(s.recv()))  # noqa: E731
            end = lambda p=place: p.destroy(linger=0)  # noqa: E731
        turns = count if form == "safetensors" else max(4, count // 20)
        worker = context.Process(target=push, args=(form, address, turns + 1))
        worker.start()
        first = reads()  # the process has started
        if first != item(0):
            raise RuntimeError(f"{form}: what came is not what was sent")
        start = time.perf_counter()
        for _ in range(turns):
            reads()
        seconds = time.perf_counter() - start
        worker.join()
        end()
        found[form] = {"samples_s": turns * ITEM / seconds, "bytes_s": turns * first.nbytes / seconds}
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=40, help="training steps of each")
    options = parse(made)
    rounds = 8 if options.quick else options.rounds
    run = Run(options)
    with tempfile.TemporaryDirectory() as folder:
        measured = {
            "capacities": capacities(rounds, options.quick),
            "journal": journals(rounds, Path(folder)),
            "building": building(rounds),
            "long_puts": long_puts(rounds, Path(folder)),
            "putters": putters(rounds, Path(folder)),
            "getters": getters(8 * rounds),
            "stream": streams(20 * rounds),
        }
    print(sequences(measured))
    run.save("sequences", **measured)


if __name__ == "__main__":
    main()
