"""TrajectoryReplayBuffer beside its model: whatever is added, reopened and loaded, every row drawn is the model's."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_model import Model, leaves

import sharpwave as sw

COUNTER = itertools.count()


def make(rng: np.random.Generator, steps: int, envs: int, flag_epochs: int, value_epochs: int) -> sw.Trajectory:
    def numbers(rows: int, *shape: int) -> Any:
        return rng.standard_normal((rows, envs, *shape)).astype(np.float32)

    return sw.Trajectory(
        int(rng.integers(100)),
        f"w_{rng.integers(3)}",
        actions=numbers(steps, 2),
        rewards=numbers(steps),
        dones=rng.random((steps + flag_epochs, envs)) < 0.5,
        prev_values=numbers(steps + value_epochs, 1),
        curr_obs={
            "deep": {"image": rng.integers(0, 255, (steps, envs, 3), dtype=np.uint8)},
            "state": numbers(steps, 4),
        },
    )


def check_batch(batch: dict[str, Any], model: Model) -> None:
    places = zip(batch["trajectory_id"], batch["step"], batch["env"], strict=True)
    fields = {"/".join(path): array for path, array in leaves(batch)}
    for position, (number, step, env) in enumerate(places):
        row = model.row(int(number), int(step), int(env))
        assert fields.keys() == row.keys() | {"trajectory_id"}
        for name, value in row.items():
            assert np.array_equal(fields[name][position], value), name


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3), st.sampled_from([1, 2, 4, 6]), st.integers(1, 3)),
        st.tuples(st.just("sample"), st.integers(1, 20)),
        st.tuples(st.just("window"), st.integers(0, 4)),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("checkpoint")),
        st.tuples(st.just("load")),
        st.tuples(st.just("empty_cache")),
        st.tuples(st.just("clear")),
        st.tuples(st.just("flush")),
    ),
    max_size=25,
)


@settings(max_examples=2000 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 60)
@given(
    script=actions,
    format=st.sampled_from(["pt", "safetensors", "pkl"]),
    cache=st.integers(0, 3),
    window=st.integers(0, 4),
    most=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 1000),
)
def test_buffer_does_as_its_model(
    tmp_path_factory: Any, script: list[Any], format: str, cache: int, window: int, most: int | None, seed: int
) -> None:
    folder = Path(tmp_path_factory.mktemp(f"model{next(COUNTER)}"))
    rng = np.random.default_rng(seed)

    def build() -> sw.TrajectoryReplayBuffer:
        return sw.TrajectoryReplayBuffer(
            folder / "live",
            cache=cache,
            format=format,
            recent=model.window or None,
            capacity=most,
            allow_pickle=True,
        )

    model = Model(window, most)
    buffer = build()
    saved: tuple[list[Any], int] | None = None
    expected = None  # the batch that must follow the checkpoint
    try:
        for name, *given_values in script:
            if name == "add":
                count, steps, envs = given_values
                added = []
                for _ in range(count):
                    divisors = [number for number in range(1, steps + 1) if steps % number == 0]
                    epochs = [int(rng.choice([0, *divisors])) for _ in range(2)]
                    added.append(make(rng, steps, envs, *epochs))
                buffer.add(added)
                model.add(added)
            elif name == "sample":
                there = sum(len(rows) for _, rows in model.sampleable())
                if there:
                    check_batch(buffer.sample(min(given_values[0], there)), model)
                with pytest.raises(sw.errors.NotReady):
                    buffer.sample(there + 1)
            elif name == "window":
                model.window = given_values[0]
                buffer.recent = model.window or None
            elif name == "reopen":
                buffer.close()
                buffer = build()
            elif name == "checkpoint":
                buffer.save(folder / "checkpoint")
                saved, expected = (list(model.held), model.next_id), None
                if model.sampleable():
                    expected = model.window, buffer.sample(5 if len(model.sampleable()[-1][1]) >= 5 else 1)
            elif name == "load" and saved is not None:
                buffer.load(folder / "checkpoint")
                model.held = list(saved[0])  # ids go on: those of what is set aside are not given again
                if expected is not None and expected[0] == model.window:
                    again = buffer.sample(len(expected[1]["rewards"]))
                    for (path, one), (_, other) in zip(leaves(expected[1]), leaves(again), strict=True):
                        assert np.array_equal(one, other), path
            elif name == "empty_cache":
                buffer._store.empty_cache("test")
            elif name == "clear":
                buffer.clear()
                model.clear()
            elif name == "flush":
                buffer.flush()
                listed = {path.name.split("_")[1] for path in (folder / "live").glob("trajectory_*_*")}
                assert listed >= {str(number) for number, _ in model.held}
                if saved is None:
                    assert len(listed) == len(model.held), "what was dropped has no file"
            assert len(buffer) == len(model.held)
            assert buffer.stats()["transitions"] == model.total
    finally:
        buffer.close()
        shutil.rmtree(folder)
