"""``map=`` of batches and streams: a function of each batch, in the thread that draws ahead."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from contract.device_place import HAS_GPU, PLACES, device_of, on_device
from numbered import filled, make, rows
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import SchemaError

torch = pytest.importorskip("torch")
Batch = dict[str, Any]


def negated(batch: Batch) -> Batch:
    return {"obs": -batch["obs"], "indices": batch["indices"]}


@pytest.mark.parametrize("verb", ["batches", "stream"])
def test_each_batch_is_what_the_function_makes_of_it(verb: str) -> None:
    one, other = filled(8, seed=3), filled(8, seed=3)
    made = getattr(one, verb)(4, map=negated)
    for _, batch in zip(range(5), made, strict=False):
        plain = other.sample(4)
        assert list(batch) == ["obs", "indices"]
        assert np.array_equal(batch["obs"], -plain["obs"])
        assert np.array_equal(batch["indices"], plain["indices"])
    made.close()


def test_the_thread_that_draws_ahead_calls_it() -> None:
    buffer = filled(8)
    names: list[str] = []

    def noted(batch: Batch) -> Batch:
        names.append(threading.current_thread().name)
        return batch

    made = buffer.batches(4, map=noted)
    next(made)
    made.close()  # type: ignore[attr-defined]
    assert set(names) == {"sharpwave-batches"}


def test_it_works_on_the_next_batch_while_the_caller_learns_from_the_last() -> None:
    buffer = filled(8)
    begun = [threading.Event() for _ in range(3)]
    count = itertools.count()

    def noted(batch: Batch) -> Batch:
        begun[min(next(count), 2)].set()
        return batch

    made = buffer.batches(4, map=noted)
    next(made)
    assert begun[1].wait(HANG_S)  # without another next()
    made.close()  # type: ignore[attr-defined]


def test_batches_that_it_keeps_and_changes_do_not_spoil_later_ones() -> None:
    one, other = filled(8, seed=3), filled(8, seed=3)
    kept: list[Batch] = []

    def spoil(batch: Batch) -> Batch:
        copy = {name: value.copy() for name, value in batch.items()}
        kept.append(batch)
        for value in batch.values():
            value[...] = 0
        batch["indices"].fill(77)
        del batch["reward"]
        return copy

    made = one.batches(4, prefetch=2, map=spoil)
    for _, batch in zip(range(20), made, strict=False):
        plain = other.sample(4)
        assert all(np.array_equal(batch[name], plain[name]) for name in plain)
    made.close()  # type: ignore[attr-defined]
    assert all((batch["indices"] == 77).all() and not batch["obs"].any() for batch in kept)


@pytest.mark.parametrize("spoils", [False, True])
def test_error_reaches_the_caller_ends_the_iterator_and_gives_the_batch_back(spoils: bool) -> None:
    buffer = make(10, pace=sw.Pace.queue(10), sampler=sw.Fifo(), num_envs=1)
    buffer.add(**rows(range(10)))
    count = itertools.count(1)

    def failing(batch: Batch) -> Batch:
        if spoils:
            batch["indices"][:] = 0
        if next(count) == 3:
            raise KeyError("no such image")
        return batch

    made = buffer.batches(2, prefetch=3, map=failing)
    next(made), next(made)
    with pytest.raises(KeyError, match="no such image"):
        next(made)
    with pytest.raises(StopIteration):
        next(made)
    assert buffer.stats()["pace_samples"] == 4
    assert buffer.sample(6, timeout=0)["action"].tolist() == [4, 5, 6, 7, 8, 9]  # nothing is lost
    buffer.close()


def test_result_that_is_no_dict_is_refused_and_the_batch_given_back() -> None:
    buffer = make(10, pace=sw.Pace.queue(10), sampler=sw.Fifo(), num_envs=1)
    buffer.add(**rows(range(10)))

    def in_place(batch: Batch) -> None:
        batch["reward"] *= 2

    with pytest.raises(SchemaError, match=r"batches\(\): map: expected a function that returns a dict, got None"):
        next(buffer.batches(2, map=in_place))  # type: ignore[arg-type]
    assert buffer.stats()["pace_samples"] == 0
    assert buffer.sample(10, timeout=0)["action"].tolist() == list(range(10))


def test_what_is_no_function_is_refused_at_the_call() -> None:
    buffer = filled(8)
    for verb in (buffer.batches, buffer.stream):
        with pytest.raises(SchemaError, match=r"map: expected a function of a batch, got 'flip'"):
            verb(4, map="flip")  # type: ignore[arg-type]


def test_tensors_come_to_it_where_the_batch_is_of_tensors() -> None:
    buffer = filled(8)
    made = buffer.batches(4, device="cpu", map=lambda batch: {"kind": type(batch["obs"]), "indices": batch["indices"]})
    assert next(made)["kind"] is torch.Tensor
    made.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("place", PLACES)
def test_rows_on_a_device(place: str) -> None:
    buffer = on_device(8, device=device_of(place), obs_shape=(3,), seed=0)
    name = np.arange(8, dtype=np.float32)
    obs = np.stack([name] * 3, 1)
    buffer.add(obs, name, name, obs, name < 0)
    made = buffer.batches(4, map=negated)
    assert float(next(made)["obs"].max()) <= 0
    with pytest.raises(SchemaError, match=r"stream\(\): map: expected a function that returns a dict, got None"):
        next(buffer.stream(4, map=lambda batch: None))  # type: ignore[arg-type,return-value]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_on_a_gpu_it_runs_in_the_caller_s_stream() -> None:
    buffer = make(10, pace=sw.Pace.queue(10), sampler=sw.Fifo(), num_envs=1)
    buffer.add(**rows(range(10)))
    seen: list[Any] = []

    def noted(batch: Batch) -> Batch:
        seen.append(torch.cuda.current_stream())
        if len(seen) == 3:
            raise KeyError("no such image")
        return negated(batch)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made = buffer.stream(2, device="cuda", map=noted)
        assert next(made)["obs"].is_cuda
        next(made)
        with pytest.raises(KeyError):
            next(made)
    assert seen == [stream] * 3
    assert buffer.sample(6, timeout=0)["action"].tolist() == [4, 5, 6, 7, 8, 9]


def test_distillation_changes_each_batch_of_an_epoch() -> None:
    buffer = sw.DistillationBuffer(8, obs_shape=(2,), action_shape=(1,), seed=0)
    buffer.add(np.ones((8, 2)), np.ones((8, 1)))
    assert [float(batch["obs"].sum()) for batch in buffer.batches(4, epochs=2, map=negated)] == [-8.0] * 4
    with pytest.raises(SchemaError, match=r"batches\(\): map: expected a function that returns a dict"):
        next(buffer.batches(4, map=lambda batch: batch["obs"]))  # type: ignore[arg-type,return-value]
    with pytest.raises(SchemaError, match=r"batches\(\): map: expected a function of a batch, got 3"):
        buffer.batches(4, map=3)  # type: ignore[arg-type]
