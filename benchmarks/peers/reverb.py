"""Reverb: a server in this process, the legacy writer for adds, `TrajectoryDataset` for samples."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, islice
from typing import Any

# Before the import, which reads them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import reverb
import tensorflow as tf
from harness.footage import STACK
from harness.worker import ALPHA, Contender, Operation, batch_priorities, random_priorities, updating
from harness.workloads import WORKLOADS, Row, Workload

TABLE = "replay"
MOST_ROWS = 200_000
ITEMS_IN_FLIGHT = 256
DATASET_WORKERS, SAMPLES_IN_FLIGHT, BATCHES_AHEAD = 4, 64, 2


def open_writer(client: reverb.Client) -> reverb.Writer:
    # Faster here than the trajectory writer: a flat step goes out as one chunk, not one per column.
    return client.writer(max_sequence_length=1, chunk_length=1, max_in_flight_items=ITEMS_IN_FLIGHT)


def batches(port: int, count: int) -> Iterator[Any]:
    dataset = reverb.TrajectoryDataset.from_table_signature(
        f"localhost:{port}",
        TABLE,
        max_in_flight_samples_per_worker=SAMPLES_IN_FLIGHT,
        num_workers_per_iterator=DATASET_WORKERS,
    )
    return iter(dataset.batch(count, drop_remainder=True).prefetch(BATCHES_AHEAD))


class Reverb(Contender):
    packages = ("dm-reverb", "tensorflow", "numpy")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        rows = min(capacity, MOST_ROWS)
        if rows < capacity:
            few = f"{rows:,} rows instead of {capacity:,}, to bound the time that it takes to fill"
            self.note = "; ".join(filter(None, (self.note, few)))
        self.serve(rows)
        # Scalars need the table's dtypes: Reverb checks them and converts nothing.
        self.pool = [self.step(row) for row in workload.rows()]
        self.open_writer()
        self.adding(1, [self.step(row) for row in workload.rows(min(rows, workload.chunk_rows))]).run(rows)
        self.writer.flush()

    def table(self, rows: int) -> reverb.Table:
        return reverb.Table(
            TABLE,
            sampler=self.selector(),
            remover=reverb.selectors.Fifo(),
            max_size=rows,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=self.signature(),
        )

    def serve(self, rows: int) -> None:
        self.server = reverb.Server([self.table(rows)])
        self.client = self.server.localhost_client()

    def selector(self) -> Any:
        return reverb.selectors.Uniform()

    def signature(self) -> dict[str, tf.TensorSpec]:
        specs = self.workload.field_specs
        return {name: tf.TensorSpec((1, *shape), tf.as_dtype(dtype)) for name, (shape, dtype) in specs.items()}

    def step(self, row: Row) -> dict[str, Any]:
        named = zip(self.workload.field_specs.items(), row, strict=True)
        return {name: dtype.type(value) if shape == () else value for (name, (shape, dtype)), value in named}

    def open_writer(self) -> None:
        self.writer = open_writer(self.client)

    def priorities(self) -> Iterator[float]:
        """Of the rows that are added."""
        return cycle([1.0])

    def adding(self, count: int, pool: list[dict[str, Any]] | None = None) -> Operation:
        writer, steps = self.writer, zip(cycle(pool or self.pool), self.priorities(), strict=False)

        def add(calls: int) -> None:
            for step, priority in islice(steps, calls * count):
                writer.append(step)
                writer.create_item(TABLE, num_timesteps=1, priority=priority)

        # A writer that may run ahead of its server is timed only when it is as far ahead as it may be.
        return Operation(add, warm_calls=2 * ITEMS_IN_FLIGHT // count + 1)

    def add_one(self) -> dict[str, Operation]:
        return {"": self.adding(1)}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {"": self.adding(count)}

    def batches(self, count: int) -> Iterator[Any]:
        return batches(self.server.port, count)

    def sample(self, count: int) -> dict[str, Operation]:
        drawn = self.batches(count)

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = next(drawn)

        ready = BATCHES_AHEAD + 1 + DATASET_WORKERS * SAMPLES_IN_FLIGHT // count
        return {"": Operation(sample, warm_calls=ready + 1, least_calls=4 * ready)}


class Prioritized(Reverb):
    note = "batches carry probabilities, the weights are left to the user"

    def selector(self) -> Any:
        return reverb.selectors.Prioritized(ALPHA)

    def priorities(self) -> Iterator[float]:
        return cycle(random_priorities(self.workload.chunk_rows).tolist())

    def update(self, count: int) -> dict[str, Operation]:
        drawn, client = self.batches(count), self.client
        priorities = [values.tolist() for values in batch_priorities(count)]

        def mutate(keys: list[int], values: list[float]) -> None:
            client.mutate_priorities(TABLE, dict(zip(keys, values, strict=True)))

        return {"": updating(lambda: next(drawn).info.key.numpy().tolist(), mutate, priorities)}


class Stacked(Reverb):
    note = "each frame once, as trajectories of neighbouring frames; compressed chunks"

    def signature(self) -> dict[str, tf.TensorSpec]:
        specs = super().signature()
        obs = tf.TensorSpec(self.workload.obs_shape, tf.as_dtype(self.workload.obs_dtype))
        return specs | {"obs": obs, "next_obs": obs}

    def step(self, row: Row) -> dict[str, Any]:
        whole = super().step(row)
        return {"frame": whole.pop("next_obs")[-1].copy(), **{name: x for name, x in whole.items() if name != "obs"}}

    def open_writer(self) -> None:
        self.writer = self.client.trajectory_writer(num_keep_alive_refs=STACK + 1)

    def adding(self, count: int, pool: list[dict[str, Any]] | None = None) -> Operation:
        writer, steps = self.writer, cycle(pool or self.pool)
        added = 0

        def add(calls: int) -> None:
            nonlocal added
            for step in islice(steps, calls * count):
                writer.append(step)
                if writer.episode_steps > STACK:
                    past = writer.history
                    frames, now = past["frame"], {name: past[name][-1:] for name in ("action", "reward", "done")}
                    whole = {"obs": frames[-STACK - 1 : -1], "next_obs": frames[-STACK:], **now}
                    writer.create_item(TABLE, priority=1.0, trajectory=whole)
                added += 1
                if step["done"]:
                    writer.end_episode()
                elif added % (ITEMS_IN_FLIGHT // 4) == 0:
                    # Without it the writer keeps everything that the server has not taken yet.
                    writer.flush(block_until_num_items=ITEMS_IN_FLIGHT // 4)

        return Operation(add, warm_calls=2 * ITEMS_IN_FLIGHT // count + 1)


def serve_alone(workload: str, rows: int, pipe: Any) -> None:
    served = Reverb()
    served.workload = WORKLOADS[workload]
    served.serve(rows)
    pipe.send(served.server.port)
    with suppress(EOFError):
        pipe.recv()  # until the client's process ends
    served.server.stop()


class Served(Reverb):
    """A client of a server in a process of its own: with an answer in every call, and ahead of its server."""

    note = "one call after the other: `Client.sample`, and a writer's `flush` after every row"

    def serve(self, rows: int) -> None:
        processes = mp.get_context("spawn")
        self.pipe, theirs = processes.Pipe()
        processes.Process(target=serve_alone, args=(self.workload.name, rows, theirs), daemon=True).start()
        theirs.close()
        self.port = self.pipe.recv()
        self.client = reverb.Client(f"localhost:{self.port}")

    def batches(self, count: int) -> Iterator[Any]:
        return batches(self.port, count)

    def sample(self, count: int) -> dict[str, Operation]:
        client = self.client

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = list(client.sample(TABLE, num_samples=count, emit_timesteps=False))

        return {"ahead": super().sample(count)[""], "": Operation(sample)}

    def add_one(self) -> dict[str, Operation]:
        writer, steps = self.client.writer(max_sequence_length=1, chunk_length=1), cycle(self.pool)

        def add(calls: int) -> None:
            for step in islice(steps, calls):
                writer.append(step)
                writer.create_item(TABLE, num_timesteps=1, priority=1.0)
                writer.flush()

        return {"ahead": self.adding(1), "": Operation(add)}


FORMS = {"plain": Reverb, "prioritized": Prioritized, "stacked": Stacked, "served": Served}
