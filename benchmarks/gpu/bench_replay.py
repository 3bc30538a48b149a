"""Times replay on a GPU against what people write with torch, and batches from the host's memory against a gather on
the CPU and a pinned copy; feeds a DQN and says how long it waited.

    python benchmarks/gpu/bench_replay.py [--results FOLDER]

Everybody is timed in turn within one run. On the device by events around many calls: what counts is how long a call
keeps the device or the host busy, whichever is longer, as in training. Batches from the host by the wall, 32 in a
row. Writes `results/gpu_replay.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import captured, contest, copy_bandwidth, machine

import sharpwave as sw

CAPACITY = 1_000_000
SIZES = (256, 4096, 65536)
OBS, ACTIONS = 17, 6
ALPHA, BETA, EPS = 0.6, 0.4, 1e-6
FRAMES = 100_000  # transitions with images, on the host: more than its caches hold
IMAGE = (4, 84, 84)
LINK_BYTES = 256 << 20


class Fields:
    """Replay as it is written by hand: a tensor a field, an index each."""

    def __init__(self) -> None:
        stream = torch.Generator("cuda").manual_seed(0)
        self.fields = {
            "obs": torch.randn(CAPACITY, OBS, generator=stream, device="cuda"),
            "action": torch.randn(CAPACITY, ACTIONS, generator=stream, device="cuda"),
            "reward": torch.randn(CAPACITY, generator=stream, device="cuda"),
            "next_obs": torch.randn(CAPACITY, OBS, generator=stream, device="cuda"),
            "done": torch.rand(CAPACITY, generator=stream, device="cuda") < 0.01,
        }
        self.masses = (torch.rand(CAPACITY, generator=stream, device="cuda") + EPS) ** ALPHA

    def sample(self, size: int) -> dict[str, torch.Tensor]:
        index = torch.randint(0, CAPACITY, (size,), device="cuda")
        return {name: field[index] for name, field in self.fields.items()} | {"indices": index}

    def sample_by_priority(self, size: int) -> dict[str, torch.Tensor]:
        """Stratified, by a running sum in float64: in float32 a million masses lose the small ones."""
        upto = torch.cumsum(self.masses, 0, dtype=torch.float64)
        total = upto[-1]
        targets = (
            (torch.arange(size, device="cuda") + torch.rand(size, device="cuda", dtype=torch.float64)) / size * total
        )
        index = torch.searchsorted(upto, targets).clamp_(max=CAPACITY - 1)
        chances = self.masses[index] / total
        weights = (chances * CAPACITY) ** -BETA
        batch = {name: field[index] for name, field in self.fields.items()}
        return batch | {"indices": index, "probabilities": chances, "weights": weights / weights.max()}

    def update(self, index: torch.Tensor, errors: torch.Tensor) -> None:
        self.masses[index] = (errors.abs() + EPS) ** ALPHA

    def add(self, at: int, rows: dict[str, torch.Tensor]) -> None:
        place = (torch.arange(len(rows["reward"]), device="cuda") + at) % CAPACITY
        for name, field in self.fields.items():
            field[place] = rows[name]


def device_buffer(fields: Fields, sampler: Any = None) -> Any:
    buffer: Any = sw.ReplayBuffer(
        CAPACITY, obs_shape=(OBS,), action_shape=(ACTIONS,), device="cuda", sampler=sampler, seed=0
    )
    for first in range(0, CAPACITY, 100_000):
        buffer.add(**{name: field[first : first + 100_000] for name, field in fields.fields.items()})
    return buffer


def is_same(batch: dict[str, torch.Tensor], fields: Fields, span: int) -> None:
    at = batch["indices"] % span
    for name, field in fields.fields.items():
        assert torch.equal(batch[name], field[at]), name


def uniform_cases(fields: Fields) -> list[dict[str, Any]]:
    buffer = device_buffer(fields)
    done = []
    for size in SIZES:
        is_same(buffer.sample(size), fields, buffer._rows.table.span)
        out = buffer.sample(size)
        graph = captured(lambda size=size: buffer.sample(size))
        cases = contest(
            {
                "torch, a field at a time": lambda size=size: fields.sample(size),
                "sharpwave": lambda size=size: buffer.sample(size),
                "sharpwave, out=": lambda size=size, out=out: buffer.sample(size, out=out),
                "sharpwave, as a CUDA graph": graph.replay,
            }
        )
        moved = size * 2 * sum(f[0].numel() * f.element_size() for f in fields.fields.values())
        done.append({"size": size, "bytes": moved, "cases": cases})
    return done


def priority_cases(fields: Fields) -> list[dict[str, Any]]:
    buffer = device_buffer(fields, sw.Prioritized(alpha=ALPHA, beta=BETA, eps=EPS))
    for first in range(0, CAPACITY, 100_000):
        serials = torch.arange(first, first + 100_000, device="cuda")
        buffer.update_priorities(serials, fields.masses[first : first + 100_000] ** (1 / ALPHA) - EPS)
    fields.masses.copy_(buffer._rows.table.priorities[buffer._rows.table.padded :][:CAPACITY])
    total = fields.masses.sum(dtype=torch.float64)
    done = []
    for size in SIZES:
        batch = buffer.sample(size)
        is_same(batch, fields, buffer._rows.table.span)
        wanted = fields.masses[batch["indices"] % buffer._rows.table.span].double() / total
        assert torch.allclose(batch["probabilities"], wanted, rtol=1e-9), size
        errors = torch.rand(size, device="cuda")
        index = batch["indices"].clone()
        graph = captured(lambda size=size: buffer.sample(size))
        draw = contest(
            {
                "torch, cumsum and searchsorted": lambda size=size: fields.sample_by_priority(size),
                "sharpwave": lambda size=size: buffer.sample(size),
                "sharpwave, as a CUDA graph": graph.replay,
            }
        )
        update = contest(
            {
                "torch, into the masses": lambda index=index, errors=errors: fields.update(index, errors),
                "sharpwave, with the sums": lambda i=index, e=errors: buffer.update_priorities(i, e),
            }
        )
        done.append({"size": size, "cases": draw, "update": update})
    return done


def add_cases(fields: Fields) -> list[dict[str, Any]]:
    plain, by_priority = device_buffer(fields), device_buffer(fields, sw.Prioritized())
    done = []
    for size in (64, 4096):
        rows = {name: field[:size].clone() for name, field in fields.fields.items()}
        cases = contest(
            {
                "torch, a field at a time": lambda rows=rows: fields.add(0, rows),
                "sharpwave": lambda rows=rows: plain.add(**rows),
                "sharpwave, by priority": lambda rows=rows: by_priority.add(**rows),
            }
        )
        done.append({"size": size, "cases": cases})
    return done


# ---- from the host ---------------------------------------------------------------------------------------------------


def walls(calls: dict[str, Callable[[], object]], rounds: int = 25, each: int = 32) -> dict[str, dict[str, float]]:
    """Milliseconds by the wall, one call after the other, all contenders in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for call in calls.values():
        for _ in range(5):
            call()
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            for _ in range(each):
                calls[name]()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter_ns() - begin) / each)
    return {
        name: {"min_ns": min(took), "median_ns": statistics.median(took), "bursts": len(took)}
        for name, took in times.items()
    }


def image_buffer() -> sw.ReplayBuffer:
    schema = {"obs": sw.Field(IMAGE, "uint8"), "action": sw.Field((), "int64")}
    buffer = sw.ReplayBuffer(FRAMES, schema=schema, seed=0)
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (2, 1000, *IMAGE), dtype=torch.uint8, generator=stream)
    for first in range(0, FRAMES, 1000):
        obs, after = images ^ (first // 1000)
        action = torch.randint(0, 6, (1000,), generator=stream)
        buffer.add(
            obs.numpy(), action.numpy(), torch.randn(1000).numpy(), after.numpy(), (torch.rand(1000) < 0.01).numpy()
        )
    return buffer


def link_bandwidth() -> float:
    source = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty_like(source, device="cuda")
    took = []
    for _ in range(15):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begin)
    return LINK_BYTES / min(took)


def stacked_buffer() -> sw.ReplayBuffer:
    """The same images as frames, four of which make an observation."""
    schema = {"obs": sw.Field(IMAGE[1:], "uint8", stack=IMAGE[0]), "action": sw.Field((), "int64")}
    buffer = sw.ReplayBuffer(FRAMES, schema=schema, next_obs="derived", num_envs=1, seed=0)
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (1001, *IMAGE[1:]), dtype=torch.uint8, generator=stream).numpy()
    for first in range(0, FRAMES, 1000):
        now = images ^ (first // 1000)
        action = torch.randint(0, 6, (1000,), generator=stream).numpy()
        ended = torch.arange(1000) % 500 == 499
        buffer.add(now[:-1], action, torch.randn(1000).numpy(), now[1:], ended.numpy())
    return buffer


class PinnedGather:
    """What people write: the fields as tensors on the host, gathered into pinned ones, copied."""

    def __init__(self, buffer: sw.ReplayBuffer, size: int) -> None:
        self.size, self.host, self.stage = size, {}, {}
        rows = next(buffer.rows(FRAMES))
        for name in ("obs", "action", "reward", "next_obs", "done"):
            self.host[name] = torch.from_numpy(rows[name])

    def send(self, name: str, index: torch.Tensor, field: torch.Tensor) -> torch.Tensor:
        if name not in self.stage:
            shape = (len(index), *field.shape[1:])
            self.stage[name] = torch.empty(shape, dtype=field.dtype, pin_memory=True)
        torch.index_select(field, 0, index, out=self.stage[name])
        return self.stage[name].to("cuda", non_blocking=True)

    def rows(self) -> object:
        index = torch.randint(0, FRAMES, (self.size,))
        batch = {name: self.send(name, index, field) for name, field in self.host.items()}
        torch.cuda.synchronize()  # before the stage is written to again
        return batch

    def rows_by_one_thread(self) -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.rows()
        finally:
            torch.set_num_threads(threads)


class StackedGather(PinnedGather):
    """The same for frames: the last of each stack is kept, and the others are those before it. (Where an episode begins
    they are wrong; to look would take time.)"""

    def __init__(self, buffer: sw.ReplayBuffer, size: int) -> None:
        super().__init__(buffer, size)
        self.frames = self.host.pop("obs")[:, -1].contiguous()
        del self.host["next_obs"]

    def two_stacks(self) -> object:
        return self._with(self._stacks)

    def each_frame_once(self) -> object:
        return self._with(self._once)

    def _with(self, images: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> object:
        index = torch.randint(4, FRAMES - 1, (self.size,))
        batch = {name: self.send(name, index, field) for name, field in self.host.items()}
        batch |= images(index)
        torch.cuda.synchronize()
        return batch

    def _stacks(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        near = index[:, None] + torch.arange(-3, 1)
        obs, after = (
            self.send(name, at.flatten(), self.frames) for name, at in (("obs", near), ("next_obs", near + 1))
        )
        return {"obs": obs.view(-1, *IMAGE), "next_obs": after.view(-1, *IMAGE)}

    def _once(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both observations are views of five frames."""
        near = index[:, None] + torch.arange(-3, 2)
        five = self.send("frames", near.flatten(), self.frames).view(-1, 5, *IMAGE[1:])
        return {"obs": five[:, :4], "next_obs": five[:, 1:]}


def direct_cases(
    buffer: sw.ReplayBuffer, rivals: dict[str, Callable[[], object]], crossing: int, link: float
) -> dict[str, Any]:
    """``crossing``: bytes of images that must cross the link for a row."""
    size = 256
    begin = time.perf_counter()
    batch = buffer.sample(size, device="cuda")
    registering = time.perf_counter() - begin
    rows = buffer.get(batch["indices"])
    for name in ("obs", "next_obs", "action", "reward", "done"):
        assert torch.equal(batch[name].cpu(), torch.from_numpy(rows[name])), name
    feed = buffer.stats()["feeds"]["cuda"]
    assert feed["way"] == "direct", feed
    stream = buffer.stream(size, device="cuda", prefetch=2)
    staged = buffer._rows._feeds["cuda"]
    ticket = staged.feed.begin(size, None, False)  # one batch, named once and fetched again and again
    cases = walls(
        {
            **rivals,
            "sharpwave, engine gather and pinned copy": lambda: staged._stage(size, None),
            "sharpwave, sample(device=)": lambda: buffer.sample(size, device="cuda"),
            "sharpwave, stream(device=)": lambda: next(stream),
            "sharpwave, the kernel alone": lambda: staged.feed.fetch(ticket),
        }
    )
    others = 8 + 4 + 1
    made = size * (2 * math.prod(IMAGE) + others)
    return {
        "size": size,
        "bytes": made,
        "crossing_bytes": size * (crossing + others),
        "link_bytes_per_s": link,
        "cases": cases,
        "registering_s": registering,
        "registered_bytes": feed["registered_bytes"],
    }


def network() -> torch.nn.Module:
    from torch import nn

    convolutions = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))


def dqn(buffer: sw.ReplayBuffer, steps: int = 280) -> dict[str, Any]:
    """Updates of a DQN on batches from the stream, and the same on one batch that is there: the difference is what the
    feeding costs. Eager, where the host is busy with launches, and as a CUDA graph, where it is not."""
    torch.manual_seed(0)
    online, target = network().cuda(), network().cuda()
    optimizer = torch.optim.Adam(online.parameters(), 1e-4, capturable=True)
    stream = buffer.stream(256, device="cuda", prefetch=2)
    still = {name: tensor.clone() for name, tensor in next(stream).items()}

    def update(batch: dict[str, Any]) -> None:
        with torch.no_grad():
            best = target(batch["next_obs"].float() / 255).amax(1)
            goal = batch["reward"] + 0.99 * best * ~batch["done"]
        chosen = online(batch["obs"].float() / 255).gather(1, batch["action"][:, None])[:, 0]
        loss = torch.nn.functional.smooth_l1_loss(chosen, goal)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()

    for _ in range(20):
        update(next(stream))
    graph = captured(lambda: update(still))

    def replay(batch: dict[str, Any]) -> None:
        for name, tensor in still.items():
            tensor.copy_(batch[name])
        graph.replay()

    other = {name: tensor.clone() for name, tensor in next(stream).items()}
    result: dict[str, Any] = {"batch": 256}
    for name, learn in (("eager", update), ("graph", replay)):
        times: dict[str, list[float]] = {"fed": [], "alone": [], "in_next": []}
        for _ in range(7):
            torch.cuda.synchronize()
            begin, inside = time.perf_counter(), 0.0
            for _ in range(steps // 7):
                before = time.perf_counter()
                batch = next(stream)
                inside += time.perf_counter() - before
                learn(batch)
            torch.cuda.synchronize()
            times["fed"].append((time.perf_counter() - begin) / (steps // 7))
            times["in_next"].append(inside / (steps // 7))
            begin = time.perf_counter()
            for _ in range(steps // 7):
                learn(other)
            torch.cuda.synchronize()
            times["alone"].append((time.perf_counter() - begin) / (steps // 7))
        fed, alone = statistics.median(times["fed"]), statistics.median(times["alone"])
        result[name] = {
            "update_with_stream_s": fed,
            "update_on_one_batch_s": alone,
            "waiting_share": max(0.0, 1 - alone / fed),
            "host_in_next_s": statistics.median(times["in_next"]),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parent.parent / "results")
    folder = parser.parse_args().results
    link = link_bandwidth()
    stacks = stacked_buffer()
    gather = StackedGather(stacks, 256)
    rivals = {
        "torch, gather and pinned copy": gather.two_stacks,
        "torch, each frame once, views on the device": gather.each_frame_once,
    }
    stacked = direct_cases(stacks, rivals, 5 * math.prod(IMAGE[1:]), link)
    stacks.close()
    images = image_buffer()
    rows = PinnedGather(images, 256)
    rivals = {
        "torch, gather and pinned copy": rows.rows,
        "torch, the same with one thread": rows.rows_by_one_thread,
    }
    direct = direct_cases(images, rivals, 2 * math.prod(IMAGE), link) | {"dqn": dqn(images)}
    del rows, rivals
    images.close()
    fields = Fields()
    document = {
        "machine": machine(),
        "settings": {"capacity": CAPACITY, "obs": OBS, "actions": ACTIONS, "frames": FRAMES},
        "left_out": [],
        "copy_bytes_per_s": copy_bandwidth(),
        "uniform": uniform_cases(fields),
        "priority": priority_cases(fields),
        "add": add_cases(fields),
        "direct": direct,
        "stacked": stacked,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_replay.json").write_text(json.dumps(document, indent=1) + "\n")
    for kind in ("uniform", "priority", "add"):
        for case in document[kind]:
            for name, took in {**case["cases"], **case.get("update", {})}.items():
                print(
                    f"{kind} {case['size']}: {name}: {took['median_ns'] / 1e3:.1f} us (min {took['min_ns'] / 1e3:.1f})"
                )
    for title, case in (("rows of images", direct), ("rows with stacks of frames", stacked)):
        for name, took in case["cases"].items():
            share = case["crossing_bytes"] / took["median_ns"] * 1e9 / link
            print(f"256 {title}: {name}: {took['median_ns'] / 1e3:.0f} us, {share:.0%} of the link")
    print(
        f"link {link / 1e9:.1f} GB/s; registering {direct['registered_bytes'] >> 20} MiB took "
        f"{direct['registering_s']:.2f} s"
    )
    for name in ("eager", "graph"):
        feed = direct["dqn"][name]
        print(
            f"DQN, 256 images, {name}: {feed['update_with_stream_s'] * 1e3:.2f} ms an update with stream(), "
            f"{feed['update_on_one_batch_s'] * 1e3:.2f} ms on one batch: waiting for data {feed['waiting_share']:.1%}; "
            f"host in next() {feed['host_in_next_s'] * 1e6:.0f} us"
        )


if __name__ == "__main__":
    main()
