"""How calls on a GPU are timed: all contenders in turn within one run, by events on the device around many calls."""

from __future__ import annotations

import datetime
import platform
import random
import statistics
from collections.abc import Callable

import torch
import triton

__all__ = ["ROUNDS", "SLICE_US", "captured", "contest", "copy_bandwidth", "machine"]

ROUNDS = 15
SLICE_US = 30_000
COPY_BYTES = 1 << 30


def machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def device_us(call: Callable[[], object], calls: int) -> float:
    """Microseconds of one of so many calls in a row."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def contest(calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """All in turn, in an order drawn anew each round."""
    for call in calls.values():
        for _ in range(3):
            call()
    counts = {name: max(3, int(SLICE_US / max(device_us(call, 3), 1))) for name, call in calls.items()}
    counts = {name: min(count, 2000) for name, count in counts.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(list(calls), len(calls)):
            times[name].append(device_us(calls[name], counts[name]))
    return {
        name: {"min_ns": min(took) * 1e3, "median_ns": statistics.median(took) * 1e3, "bursts": len(took)}
        for name, took in times.items()
    }


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def copy_bandwidth() -> float:
    """Bytes a second that a plain copy reads and writes together."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    took = min(device_us(lambda: target.copy_(source), 10) for _ in range(7))
    return 2 * COPY_BYTES / took * 1e6
