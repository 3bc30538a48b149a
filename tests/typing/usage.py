"""How a typed program uses the package; test_typing.py has mypy read it. Nothing here is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import assert_type

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError, SharpwaveError
from sharpwave.rows.host import Writer

buffer = sw.ReplayBuffer(
    1000,
    schema={
        "obs": {"image": sw.Field((64, 64, 3), "uint8"), "pair": (sw.Field(3), sw.Field())},
        "action": sw.Field((7,)),
    },
    next_obs=None,
    sampler=sw.Uniform(),
    view=sw.Transitions(),
    storage="shm://typed",
    exist="replace",
    num_envs=4,
    writers=8,
    seed=0,
)
short = sw.ReplayBuffer(1000, obs_shape=(17,), obs_dtype="float32", action_shape=6, action_dtype=float)

assert_type(buffer, sw.ReplayBuffer)
assert_type(buffer.capacity, int)
assert_type(buffer.is_full, bool)
assert_type(buffer.num_envs, int | None)
assert_type(len(buffer), int)
assert_type(buffer.stats(), dict[str, Any])
assert_type(buffer.sample(32), dict[str, Any])
assert_type(buffer.sample(32, out=buffer.sample(32), device="cpu"), dict[str, Any])
assert_type(buffer.get([1, 2]), dict[str, Any])
assert_type(buffer.rows(), Iterator[dict[str, Any]])
assert_type(buffer.writer(), Writer)
assert_type(buffer.batches(32, prefetch=2), Iterator[dict[str, Any]])
assert_type(buffer.update_priorities([1], [0.5]), dict[str, Any])  # tensors where the rows are on a GPU
assert_type(buffer.pace, sw.Pace | None)
assert_type(next(sw.collect(object(), lambda obs: 0, buffer, 100)), dict[str, Any])
assert_type(next(sw.collect(object(), lambda obs: (0, {"logp": 0.0}), buffer, None, every=4)), dict[str, Any])
assert_type(next(buffer.stream(32, map=lambda batch: batch | {"half": 0.5})), dict[str, Any])
mix = sw.Mix({buffer: 0.5, short: 0.5})
assert_type(mix, sw.Mix)
assert_type(sw.Mix([(buffer, 0.5), (short, 0.5)]).sample(32), dict[str, Any])
assert_type(mix.buffers, tuple[sw.ReplayBuffer, ...])
assert_type(mix.batches(32), Iterator[dict[str, Any]])
sequences = sw.ReplayBuffer(
    1000,
    obs_shape=(4,),
    sampler=sw.Recent(100, newest=1),
    view=sw.Windows(8, burn_in=2, end="stop"),
    pace=sw.Pace.queue(10),
)
goals = sw.Transitions(3, 0.99, hindsight=sw.Hindsight("final", 0.5, lambda achieved, desired: achieved[:, 0]))
sw.Windows(8, end="never")  # type: ignore[arg-type]
opened: sw.ReplayBuffer = sw.open("file://x")  # which face it is, the file says
teacher: sw.DistillationBuffer = sw.open(Path("x"))
assert_type(teacher.sample(4), dict[str, Any])
assert_type(next(teacher.steps()), dict[str, Any])
assert_type(sw.RolloutBuffer(4, 8, obs_shape=(3,)).is_full, bool)
assert_type(sw.RolloutBuffer(4, 8, obs_shape=(3,)).all(), dict[str, Any])
assert_type(sw.RolloutBuffer(4, 8, obs_shape=(3,)).stats(), dict[str, Any])
sw.RolloutBuffer(4, 8, obs_shape=(3,), autoreset="never")  # type: ignore[arg-type]
assert_type(sw.ReplayBuffer.for_env(object(), 100), sw.ReplayBuffer)
assert_type(sw.Field((2,)).shape, tuple[int, ...])
assert_type(sw.__version__, str)

buffer.add(obs=1, action=2, reward=3.0, terminated=False, truncated=True)
buffer.save(Path("x"))
with buffer as entered, entered.writer() as writer:
    assert_type(entered, sw.ReplayBuffer)
    writer.add(1, 2, 3)
try:
    buffer.sample(1)
except (NotReady, SchemaError) as error:
    problem: SharpwaveError = error

# What must not pass: mypy reports an ignore that silences nothing.
sw.ReplayBuffer("1000", obs_shape=(1,))  # type: ignore[arg-type]
sw.ReplayBuffer(1000, obs_shape=(1,), exist="overwrite")  # type: ignore[arg-type]
sw.ReplayBuffer(1000, obs_shape=(1,), next_obs="deduced")  # type: ignore[arg-type]
sw.ReplayBuffer(1000, (1,))  # type: ignore[call-arg]
buffer.sample("32")  # type: ignore[arg-type]
buffer.sample(32, buffer.sample(32))  # type: ignore[call-arg]
buffer.capacity = 5  # type: ignore[misc]
buffer.unknown()  # type: ignore[attr-defined]
sw.open(5)  # type: ignore[arg-type]

flow = sw.Dataflow([sw.Consumer("train", inputs={"input_ids"}, batch_size=2, window=4, reuse=2)])
llm_buffer = sw.SequenceBuffer(1000, flow=flow, max_tokens=10_000, max_staleness=4, stale="mask", journal=Path("j"))
answers = sw.SequenceSample(["a", "b"], {"input_ids": [3, 2]}, {"input_ids": None}, metadata={"task": ["x", "y"]})
handles = llm_buffer.put(answers, version=7, timeout=None)
llm_buffer.amend(handles, [answers, answers])
with llm_buffer.get("train", timeout=1.5, partial=True, owner="me") as lease:
    assert_type(lease.batch, sw.SequenceSample)
    assert_type(lease.batch.split_by_tokens(max_tokens=8), tuple[list[sw.SequenceSample], list[int], list[int]])
assert_type(llm_buffer.explain("train"), str)
llm_buffer.mark_used(["a"])
llm_buffer.save(Path("saved"))
llm_buffer.flush()
llm_buffer.clear()
assert_type(llm_buffer.stats(), dict[str, Any])
assert_type(llm_buffer.wanted(["a"]), list[str])
assert_type(llm_buffer.admission(batch_size=64).start(2), bool)
