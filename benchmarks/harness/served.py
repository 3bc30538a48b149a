"""Sharpwave's server in a process of its own: full buffers, behind as many addresses as are asked for."""

from __future__ import annotations

import multiprocessing as mp
from contextlib import ExitStack
from typing import Any

import sharpwave as sw
from harness.workloads import ATARI, W1, Workload

WRITERS = 64  # streams of all clients, with some room


def _full(workload: Workload, rows: int, storage: str | None = None) -> sw.ReplayBuffer:
    schema = {
        "obs": sw.Field(workload.obs_shape, workload.obs_dtype),
        "action": sw.Field(workload.action_shape, workload.action_dtype),
    }
    placed = {} if storage is None else {"storage": storage}
    buffer = sw.ReplayBuffer(rows, schema=schema, seed=0, writers=WRITERS, **placed)
    for chunk in workload.chunks(rows):
        buffer.add(**chunk)
    buffer.sample(1)  # the index takes rows in when somebody draws
    return buffer


def _serve(addresses: list[tuple[str, str | None]], rows: int, image_rows: int, shared: str, pipe: Any) -> None:
    with ExitStack() as stack:
        buffers = {"small": _full(W1, rows), "images": _full(ATARI, image_rows), "shared": _full(W1, rows, shared)}
        stack.callback(buffers["shared"].close, unlink=True)
        servers = [stack.enter_context(sw.serve(buffers, address, keys=keys)) for address, keys in addresses]
        pipe.send([server.address for server in servers])
        pipe.recv()  # until the benchmark is over


class Served:
    """Tables `small`, `images` and `shared`, the last one in shared memory.

    Args:
        addresses: Where it listens, each with the folder of its keys or None.
        shared: The address of the buffer in shared memory.
    """

    def __init__(self, addresses: list[tuple[str, str | None]], rows: int, image_rows: int, shared: str) -> None:
        processes = mp.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        arguments = (addresses, rows, image_rows, shared, theirs)
        self._process = processes.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.addresses: list[str] = self._pipe.recv()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()
