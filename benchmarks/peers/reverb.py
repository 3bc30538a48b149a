"""Reverb: a server in this process, the legacy writer for adds, `TrajectoryDataset` for samples."""

from __future__ import annotations

import os
from itertools import cycle, islice

# Before the import, which reads them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import reverb
import tensorflow as tf
from harness.worker import Contender, Operation
from harness.workloads import Workload

TABLE = "replay"
MOST_ROWS = 200_000
ITEMS_IN_FLIGHT = 256
DATASET_WORKERS, SAMPLES_IN_FLIGHT, BATCHES_AHEAD = 4, 64, 2


class Reverb(Contender):
    packages = ("dm-reverb", "tensorflow", "numpy")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        rows = min(capacity, MOST_ROWS)
        if rows < capacity:
            self.note = f"{rows:,} rows instead of {capacity:,}, to bound the time that it takes to fill"
        signature = {
            name: tf.TensorSpec((1, *shape), tf.as_dtype(dtype))
            for name, (shape, dtype) in workload.field_specs.items()
        }
        table = reverb.Table(
            TABLE,
            sampler=reverb.selectors.Uniform(),
            remover=reverb.selectors.Fifo(),
            max_size=rows,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=signature,
        )
        self.server = reverb.Server([table])
        self.client = self.server.localhost_client()
        # Faster here than the trajectory writer: a flat step goes out as one chunk, not one per column.
        self.writer = self.client.writer(max_sequence_length=1, chunk_length=1, max_in_flight_items=ITEMS_IN_FLIGHT)
        # Scalars need the table's dtypes: Reverb checks them and converts nothing.
        self.steps = [
            {name: dtype.type(value) if shape == () else value for (name, (shape, dtype)), value in named}
            for named in (zip(workload.field_specs.items(), row, strict=True) for row in workload.rows())
        ]
        self.adding(1).run(rows)
        self.writer.flush()

    def adding(self, count: int) -> Operation:
        steps, writer = cycle(self.steps), self.writer

        def add(calls: int) -> None:
            for step in islice(steps, calls * count):
                writer.append(step)
                writer.create_item(TABLE, num_timesteps=1, priority=1.0)

        # A writer that may run ahead of its server is timed only when it is as far ahead as it may be.
        return Operation(add, warm_calls=2 * ITEMS_IN_FLIGHT // count + 1)

    def add_one(self) -> dict[str, Operation]:
        return {"": self.adding(1)}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {"": self.adding(count)}

    def sample(self, count: int) -> dict[str, Operation]:
        dataset = reverb.TrajectoryDataset.from_table_signature(
            f"localhost:{self.server.port}",
            TABLE,
            max_in_flight_samples_per_worker=SAMPLES_IN_FLIGHT,
            num_workers_per_iterator=DATASET_WORKERS,
        )
        batches = iter(dataset.batch(count, drop_remainder=True).prefetch(BATCHES_AHEAD))

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = next(batches)

        ready = BATCHES_AHEAD + 1 + DATASET_WORKERS * SAMPLES_IN_FLIGHT // count
        return {"": Operation(sample, warm_calls=ready + 1)}


CONTENDER = Reverb
