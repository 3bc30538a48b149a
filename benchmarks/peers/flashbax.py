"""flashbax item buffer on JAX's CPU backend: pure functions, compiled, with the state donated."""

from __future__ import annotations

from itertools import cycle, islice

import flashbax
import jax
import jax.numpy as jnp
from harness.worker import Contender, Operation
from harness.workloads import FIELDS, Columns, Workload


def on_device(columns: Columns) -> dict[str, jax.Array]:
    return {name: jnp.asarray(values) for name, values in columns.items()}


class Flashbax(Contender):
    packages = ("flashbax", "jax")
    note = "compiled beforehand; inputs prebuilt as JAX arrays; each call waits for its result"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        # The timed calls donate the state, so it lives here and nowhere else.
        self.state = self.make().init({name: x[0] for name, x in on_device(workload.columns(2)).items()})
        add = jax.jit(self.make().add, donate_argnums=0)
        for chunk in workload.chunks(capacity):
            self.state = add(self.state, on_device(chunk))
        jax.block_until_ready(self.state)

    def make(self, sample_batch_size: int = 1, add_batches: bool = True):
        return flashbax.make_item_buffer(
            max_length=self.capacity,
            min_length=1,
            sample_batch_size=sample_batch_size,
            add_batches=add_batches,
        )

    def adding(self, batches: list[dict[str, jax.Array]], add_batches: bool) -> Operation:
        add, endless = jax.jit(self.make(add_batches=add_batches).add, donate_argnums=0), cycle(batches)

        def run(calls: int) -> None:
            for batch in islice(endless, calls):
                self.state = jax.block_until_ready(add(self.state, batch))

        return Operation(run)

    def add_one(self) -> dict[str, Operation]:
        steps = [on_device(dict(zip(FIELDS, row, strict=True))) for row in self.workload.rows()]
        return {"": self.adding(steps, add_batches=False)}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {"": self.adding([on_device(self.workload.columns(count))], add_batches=True)}

    def sample(self, count: int) -> dict[str, Operation]:
        draw = self.make(sample_batch_size=count).sample
        key = jax.random.PRNGKey(0)

        @jax.jit
        def sample(state, key):
            key, used = jax.random.split(key)
            return draw(state, used), key

        def run(calls: int) -> None:
            nonlocal key
            for _ in range(calls):
                _batch, key = jax.block_until_ready(sample(self.state, key))

        return {"": Operation(run)}


CONTENDER = Flashbax
