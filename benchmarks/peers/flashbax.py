"""flashbax on JAX's CPU backend: pure functions, compiled, with the state donated."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
from harness.worker import (
    ALPHA,
    UPDATES_A_GROUP,
    WINDOW_STEPS,
    Contender,
    Operation,
    batch_priorities,
    random_priorities,
)
from harness.workloads import FIELDS, Columns, Workload


def on_device(columns: Columns) -> dict[str, jax.Array]:
    return {name: jnp.asarray(values) for name, values in columns.items()}


class Flashbax(Contender):
    packages = ("flashbax", "jax")
    note = "compiled beforehand; inputs prebuilt as JAX arrays; each call waits for its result"
    fields = FIELDS

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        # The timed calls donate the state, so it lives here and nowhere else.
        self.state = self.make().init({name: x[0] for name, x in self.on_device(workload.columns(2)).items()})
        add = jax.jit(self.make(many=True).add, donate_argnums=0)
        for chunk in workload.chunks(capacity):
            self.state = add(self.state, self.on_device(chunk))
        jax.block_until_ready(self.state)

    def make(self, sample_batch_size: int = 1, many: bool = False) -> Any:
        return flashbax.make_item_buffer(
            max_length=self.capacity, min_length=1, sample_batch_size=sample_batch_size, add_batches=many
        )

    def on_device(self, columns: Columns) -> dict[str, jax.Array]:
        return on_device({name: columns[name] for name in self.fields})

    def rows(self) -> list[dict[str, jax.Array]]:
        return [self.on_device(dict(zip(FIELDS, row, strict=True))) for row in self.workload.rows()]

    def adding(self, batches: list[dict[str, jax.Array]], many: bool) -> Operation:
        add, endless = jax.jit(self.make(many=many).add, donate_argnums=0), cycle(batches)

        def run(calls: int) -> None:
            for batch in islice(endless, calls):
                self.state = jax.block_until_ready(add(self.state, batch))

        return Operation(run)

    def add_one(self) -> dict[str, Operation]:
        return {"": self.adding(self.rows(), many=False)}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {"": self.adding([self.on_device(self.workload.columns(count))], many=True)}

    def drawing(self, count: int) -> Any:
        draw = self.make(sample_batch_size=count).sample

        @jax.jit
        def sample(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            key, used = jax.random.split(key)
            return draw(state, used), key

        return sample

    def sample(self, count: int) -> dict[str, Operation]:
        sample, key = self.drawing(count), jax.random.PRNGKey(0)

        def run(calls: int) -> None:
            nonlocal key
            for _ in range(calls):
                _batch, key = jax.block_until_ready(sample(self.state, key))

        return {"": Operation(run)}


class Prioritized(Flashbax):
    note = f"{Flashbax.note}; batches carry probabilities, the weights are left to the user"

    def fill(self, workload: Workload, capacity: int) -> None:
        super().fill(workload, capacity)
        self.set_priorities = jax.jit(self.make().set_priorities, donate_argnums=0)
        chunk = workload.chunk_rows
        priorities = jnp.asarray(random_priorities(capacity))
        for start in range(0, capacity, chunk):
            rows = jnp.arange(start, min(start + chunk, capacity))
            self.state = self.set_priorities(self.state, rows, priorities[rows])
        jax.block_until_ready(self.state)

    def make(self, sample_batch_size: int = 1, many: bool = False) -> Any:
        return flashbax.make_prioritised_item_buffer(
            max_length=self.capacity,
            min_length=1,
            sample_batch_size=sample_batch_size,
            add_batches=many,
            priority_exponent=ALPHA,
            device="cpu",
        )

    def update(self, count: int) -> dict[str, Operation]:
        sample, key = self.drawing(count), jax.random.PRNGKey(0)
        drawn: list[jax.Array] = []
        endless = cycle([jnp.asarray(values) for values in batch_priorities(count)])

        def before(calls: int) -> None:
            nonlocal key
            drawn.clear()
            for _ in range(calls):
                batch, key = sample(self.state, key)
                drawn.append(jax.block_until_ready(batch.indices))

        def run(_calls: int) -> None:
            for indices, priorities in zip(drawn, endless, strict=False):
                self.state = jax.block_until_ready(self.set_priorities(self.state, indices, priorities))

        return {"": Operation(run, before=before, group=UPDATES_A_GROUP)}

    def learn(self, count: int) -> dict[str, Operation]:
        add, sample = jax.jit(self.make().add, donate_argnums=0), self.drawing(count)
        key, priorities = jax.random.PRNGKey(0), [jnp.asarray(values) for values in batch_priorities(count)]
        steps = zip(cycle(self.rows()), cycle(priorities), strict=False)

        def learn(calls: int) -> None:
            nonlocal key
            for row, values in islice(steps, calls):
                state = add(self.state, row)
                batch, key = sample(state, key)
                self.state = jax.block_until_ready(self.set_priorities(state, batch.indices, values))

        return {"": Operation(learn)}


class Derived(Flashbax):
    note = f"{Flashbax.note}; the flat buffer, which keeps each stack once"
    fields = tuple(name for name in FIELDS if name != "next_obs")

    def make(self, sample_batch_size: int = 1, many: bool = False) -> Any:
        return flashbax.make_flat_buffer(
            max_length=self.capacity, min_length=2, sample_batch_size=sample_batch_size, add_sequences=many
        )


class Windows(Flashbax):
    note = f"{Flashbax.note}; the trajectory buffer, whose windows go on across the ends of episodes"

    def make(self, sample_batch_size: int = 1, many: bool = False) -> Any:
        del many
        return flashbax.make_trajectory_buffer(
            add_batch_size=1,
            sample_batch_size=sample_batch_size,
            sample_sequence_length=WINDOW_STEPS,
            period=1,
            min_length_time_axis=WINDOW_STEPS,
            max_length_time_axis=self.capacity,
        )

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        self.state = self.make().init({name: x[0] for name, x in self.on_device(workload.columns(2)).items()})
        add = jax.jit(self.make().add, donate_argnums=0)
        for chunk in workload.chunks(capacity):
            steps = {name: values[None] for name, values in self.on_device(chunk).items()}
            self.state = add(self.state, steps)
        jax.block_until_ready(self.state)

    def add_one(self) -> dict[str, Operation]:
        return {}


FORMS = {"plain": Flashbax, "prioritized": Prioritized, "derived": Derived, "stop": Windows}
