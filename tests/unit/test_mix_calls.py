"""Mix from the outside: what is refused, what a batch has, who waits, what becomes of the rows when a call fails."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from contract.device_place import HAS_GPU, PLACES, device_of, here, on_device
from numbered import filled, make, row, rows
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle

torch = pytest.importorskip("torch")


def two(first: Any = None, second: Any = None, count: int = 8) -> tuple[sw.ReplayBuffer, sw.ReplayBuffer]:
    """Buffers with the rows 0, 1, ... and 100, 101, ..."""
    one, other = make(20, **(first or {})), make(30, **{"seed": 1, **(second or {})})
    for number in range(count):
        one.add(**row(number))
        other.add(**row(number + 100))
    return one, other


def numbers(batch: dict[str, Any]) -> list[int]:
    return [int(value) for value in batch["reward"]]


def check_sources(batch: dict[str, Any]) -> None:
    assert (batch["reward"] >= 100).tolist() == (batch["source"] == 1).tolist()
    assert (batch["obs"] == batch["reward"][:, None]).all()


# ---- the constructor -------------------------------------------------------------------------------------------------


def of(**options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(8, **({} if "schema" in options else {"obs_shape": (2,)}), **options)


def with_field(name: str) -> sw.ReplayBuffer:
    return of(schema={"obs": sw.Field((2,)), "action": sw.Field(), name: sw.Field()})


REFUSED: list[tuple[Any, str]] = [
    (lambda: {}, "buffers: expected a dict of buffers and their shares, got {}"),
    (lambda: 3, "buffers: expected a dict of buffers and their shares, got 3"),
    (lambda: "ab", "buffers: expected a dict of buffers and their shares, got 'ab'"),
    (lambda: [of(), of()], "buffers: expected ReplayBuffers with their shares, got <ReplayBuffer"),
    (lambda: [("a", 1.0)], "buffers: expected ReplayBuffers with their shares, got str as number 0"),
    (lambda: [(buf := of(), 0.5), (buf, 0.5)], "buffers: number 1 is there already; give it one share"),
    (lambda: {of(): 0.5, of(): "x"}, "share of buffer 1: expected a number, 0 to 1e+15, got 'x'"),
    (lambda: {of(): 0.5, of(): -0.5}, "share of buffer 1: expected a number, 0 to 1e+15, got -0.5"),
    (lambda: {of(): 1, of(): 0}, "share of buffer 1: expected a number above 0, got 0; leave the buffer out"),
    (lambda: {of(): 3, of(): 1}, "shares: expected numbers that sum to 1, got a sum of 4; give 0.75, 0.25"),
    (
        lambda: {of(): 0.5, sw.ReplayBuffer(8, obs_shape=(3,)): 0.5},
        "field 'obs': buffer 0 has float32 of shape (2,), buffer 1 has float32 of shape (3,); give both the same "
        "schema=",
    ),
    (
        lambda: {of(): 0.5, of(action_dtype="int64"): 0.5},
        "field 'action': buffer 0 has float32 of shape (), buffer 1 has int64 of shape (); give both the same schema=",
    ),
    (
        lambda: {of(): 0.5, with_field("goal"): 0.5},
        "field 'goal': buffer 0 has no such field, buffer 1 has float32 of shape (); give both the same schema=",
    ),
    (
        lambda: {of(): 0.5, of(view=sw.Transitions(n_step=3)): 0.5},
        "field 'discount': buffer 0 has no such field, buffer 1 has float32 of shape (); give both the same view=",
    ),
    (
        lambda: {of(): 0.5, with_field("source"): 0.5},
        "field 'source': ",
    ),
    (
        lambda: {
            of(sampler=sw.Prioritized(normalize="batch")): 0.5,
            of(): 0.25,
            of(sampler=sw.Prioritized(normalize="none")): 0.25,
        },
        "sampler: weights are normalised over the whole batch, but buffer 0 has normalize='batch' and buffer 2 'none'",
    ),
]


@pytest.mark.parametrize(("buffers", "message"), REFUSED)
def test_what_cannot_be_mixed_is_refused_by_name(buffers: Any, message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        sw.Mix(buffers())
    assert str(caught.value).startswith(f"Mix(): {message}")


def test_field_named_source_in_all_buffers_is_refused_too() -> None:
    with pytest.raises(SchemaError, match="field 'source': batches have the numbers of the buffers there"):
        sw.Mix({with_field("source"): 0.5, with_field("source"): 0.5})


def test_ragged_fields_of_two_forms_are_refused() -> None:
    def ragged(form: Any) -> sw.ReplayBuffer:
        return of(schema={"obs": sw.Field((3,), ragged=form)})

    with pytest.raises(SchemaError, match=r"field 'obs': buffer 0 has .*ragged=True, buffer 1 has .*ragged='padded'"):
        sw.Mix({ragged(True): 0.5, ragged("padded"): 0.5})


def test_closed_buffer_is_refused() -> None:
    one, other = two()
    other.close()
    with pytest.raises(ClosedError, match="buffer 1 is closed"):
        sw.Mix({one: 0.5, other: 0.5})


def test_pairs_are_taken_too_and_one_buffer_is_enough() -> None:
    one, other = two()
    assert sw.Mix([(one, 0.25), (other, 0.75)]).sample(8)["source"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert sw.Mix({one: 1}).sample(3)["source"].tolist() == [0, 0, 0]
    thirds = sw.Mix([(one, 1 / 3), (other, 1 - 1 / 3)])
    assert thirds.shares == pytest.approx((1 / 3, 2 / 3))
    assert thirds.buffers == (one, other)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_counts_carry_what_rounding_leaves_over() -> None:
    one, other = two()
    mix = sw.Mix({one: 0.3, other: 0.7})
    counts = [int((mix.sample(5)["source"] == 0).sum()) for _ in range(40)]
    assert sum(counts) == 60
    assert set(counts) == {1, 2}
    assert mix.stats()["rows_by_buffer"] == [60, 140]


def test_buffer_without_a_row_in_a_batch_is_left_alone() -> None:
    one = filled(8)
    empty = make(10)
    mix = sw.Mix({one: 0.9, empty: 0.1})
    assert mix.sample(4)["source"].tolist() == [0] * 4
    with pytest.raises(NotReady, match=r"sample\(\): buffer 1 \(memory\): the buffer is empty; add rows first"):
        mix.sample(20)


def test_out_is_filled_in_place() -> None:
    one, other = two({"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.5, other: 0.5})
    batch = mix.sample(6)
    kept = dict(batch)
    for _ in range(5):
        assert mix.sample(6, out=batch) is batch
        assert all(batch[name] is kept[name] for name in kept)
        check_sources(batch)
    assert sorted(batch) == sorted(kept)
    tensors = mix.sample(6, device="cpu")
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    assert mix.sample(6, out=tensors, device="cpu") is tensors
    check_sources({name: value.numpy() for name, value in tensors.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros((5, 2), np.float32)}, r"out\['obs'\]: expected float32 array of shape \(6, 2\)"),
        ({"weights": np.zeros(6)}, r"out\['weights'\]: expected float32 array of shape \(6,\)"),
        ({"source": np.zeros(6, np.int32)}, r"out\['source'\]: expected int64 array of shape \(6,\), got int32 array"),
        ({"source": None}, r"out\['source'\]: expected int64 array of shape \(6,\), got NoneType"),
    ],
)
def test_out_that_does_not_fit_is_refused_before_anything_is_drawn(change: Any, message: str) -> None:
    one, other = two({"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.5, other: 0.5})
    batch = mix.sample(6)
    before = [buffer.stats()["sample_calls"] for buffer in (one, other)]
    with pytest.raises(SchemaError, match=message):
        mix.sample(6, out=batch | change)
    assert [buffer.stats()["sample_calls"] for buffer in (one, other)] == before


def nested(number: int, **options: Any) -> sw.ReplayBuffer:
    fields = {
        "obs": {"image": sw.Field((2, 2), "uint8", stack=2), "pair": (sw.Field(()), sw.Field((3,), "int64"))},
        "action": sw.Field((), "int64"),
    }
    buffer = sw.ReplayBuffer(40, schema=fields, num_envs=1, seed=number, **options)
    for step in range(20):
        name = 100 * number + step
        obs, after = (
            {"image": np.full((1, 2, 2), n % 256), "pair": (np.full(1, n), np.full((1, 3), n))}
            for n in (name, name + 1)
        )
        buffer.add(obs=obs, action=[name], reward=[name], done=[step % 7 == 6], next_obs=after)
    return buffer


VIEWS: dict[str, Any] = {
    "one step": sw.Transitions(),
    "three steps": sw.Transitions(n_step=3, gamma=0.5),
    "windows": sw.Windows(3, burn_in=1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("next_obs", ["stored", "derived"])
def test_a_mix_has_the_examples_of_its_buffers(view: str, next_obs: Any) -> None:
    """The same seeds: each part of a mixed batch is what its buffer alone would have drawn."""
    samplers = sw.Prioritized(), sw.Uniform()
    mixed, alone = (
        [nested(i, view=VIEWS[view], next_obs=next_obs, sampler=sampler) for i, sampler in enumerate(samplers)]
        for _ in range(2)
    )
    mix = sw.Mix({mixed[0]: 0.25, mixed[1]: 0.75})
    for size in (8, 12):
        batch = mix.sample(size)
        parts = [buffer.sample(count) for buffer, count in zip(alone, (size // 4, size - size // 4), strict=True)]
        assert (batch["indices"] & (2**50 - 1)).tolist() == np.concatenate([p["indices"] for p in parts]).tolist()

        def same(value: Any, *others: Any) -> None:
            if isinstance(value, (dict, tuple)):
                for key in value if isinstance(value, dict) else range(len(value)):
                    same(value[key], *(other[key] for other in others))
            else:
                assert np.array_equal(value, np.concatenate(others))

        for name in parts[1]:
            if name != "indices":
                same(batch[name], *(part[name] for part in parts))
        extra = {"weights", "probabilities", "source"}
        assert set(batch) == set(parts[1]) | extra


def test_priorities_of_windows_take_one_error_a_place() -> None:
    buffers = [nested(i, view=VIEWS["windows"], sampler=sw.Prioritized()) for i in range(2)]
    twins = [nested(i, view=VIEWS["windows"], sampler=sw.Prioritized()) for i in range(2)]
    mix = sw.Mix({buffers[0]: 0.5, buffers[1]: 0.5})
    batch = mix.sample(8)
    errors = np.random.default_rng(0).normal(size=batch["mask"].shape)
    result = mix.update_priorities(batch["indices"], errors, batch["mask"])
    assert result == {"applied": 8, "stale": 0, "skipped": 0}
    for i, twin in enumerate(twins):
        part = slice(4 * i, 4 * i + 4)
        alone = twin.sample(4)
        twin.update_priorities(alone["indices"], errors[part], alone["mask"])
    again = [twin.sample(4) for twin in twins]
    assert np.concatenate([part["probabilities"] for part in again]) / 2 == pytest.approx(
        mix.sample(8)["probabilities"]
    )
    with pytest.raises(SchemaError, match=r"give mask=batch\['mask'\] with them"):
        mix.update_priorities(batch["indices"], errors)


def goals(number: int, view: Any) -> sw.ReplayBuffer:
    fields = {"obs": {"achieved_goal": sw.Field((1,)), "desired_goal": sw.Field((1,))}, "action": sw.Field(())}
    buffer = sw.ReplayBuffer(40, schema=fields, num_envs=1, seed=number, view=view)
    for step in range(20):
        obs, after = (
            {"achieved_goal": np.full((1, 1), n), "desired_goal": np.full((1, 1), 99.0)} for n in (step, step + 1.0)
        )
        buffer.add(obs=obs, action=[0.0], reward=[-1.0], done=[step % 5 == 4], next_obs=after)
    return buffer


def reached(achieved: Any, desired: Any) -> Any:
    return -(achieved != desired).any(axis=1).astype(np.float32)


def test_hindsight_of_one_buffer_leaves_the_others_as_they_are() -> None:
    online = goals(0, sw.Transitions(hindsight=sw.Hindsight("future", 0.8, reached)))
    mix = sw.Mix({goals(1, sw.Transitions()): 0.5, online: 0.5})
    batch = mix.sample(40)
    assert not batch["relabelled"][:20].any()
    assert batch["relabelled"][20:].any()
    assert (batch["obs"]["desired_goal"][:20] == 99).all()
    assert (batch["obs"]["desired_goal"][batch["relabelled"]] != 99).all()


def test_error_of_a_hindsight_function_gives_the_other_rows_back() -> None:
    def failing(achieved: Any, desired: Any) -> Any:
        raise KeyError("my reward")

    queue = goals(0, sw.Transitions())
    first = sw.ReplayBuffer(40, schema=queue.schema, num_envs=1, sampler=sw.Fifo(), pace=sw.Pace.queue(40), seed=0)
    for batch in queue.rows():
        first.add(**{name: batch[name] for name in ("obs", "action", "reward", "next_obs", "done")})
    mix = sw.Mix({first: 0.5, goals(1, sw.Transitions(hindsight=sw.Hindsight("future", 0.8, failing))): 0.5})
    with pytest.raises(KeyError, match="my reward"):
        mix.sample(10)
    assert first.stats()["pace_samples"] == 0
    assert len(first.sample(20, timeout=0)["indices"]) == 20


@pytest.mark.parametrize("form", [True, "padded"])
def test_ragged_fields_are_joined(form: Any) -> None:
    def ragged(number: int) -> sw.ReplayBuffer:
        fields = {"obs": {"words": sw.Field((5,), "int64", ragged=form)}, "action": sw.Field(())}
        buffer = sw.ReplayBuffer(30, schema=fields, next_obs=None, seed=number)
        for step in range(12):
            length = step % 5 + 1
            buffer.add(obs={"words": np.full(length, 100 * number + step)}, action=0.0, reward=length, done=False)
        return buffer

    mix = sw.Mix({ragged(0): 0.5, ragged(1): 0.5})
    batch = mix.sample(9)
    order = np.random.default_rng(0).permutation(9)
    for got in (batch, mix.get(batch["indices"][order])):
        words = got["obs"]["words"]
        for i in range(9):
            if form is True:
                mine = words["values"][words["offsets"][i] : words["offsets"][i + 1]]
            else:
                mine = words["values"][i][words["mask"][i]]
            assert len(mine) == got["reward"][i]
            assert (mine // 100 == got["source"][i]).all()
            assert len(set(mine.tolist())) == 1
    with pytest.raises(SchemaError, match="the lengths of a ragged field differ"):
        mix.sample(9, out=batch)


def test_get_of_nothing_is_an_empty_batch() -> None:
    one, other = two()
    batch = sw.Mix({one: 0.5, other: 0.5}).get([])
    assert batch["obs"].shape == (0, 2)
    assert batch["source"].shape == (0,)


# ---- handles ---------------------------------------------------------------------------------------------------------


def test_handles_of_a_mix_are_rows_of_no_buffer() -> None:
    one, other = two({"sampler": sw.Prioritized()}, {"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.5, other: 0.5})
    batch = mix.sample(8)
    for buffer in (one, other):
        assert buffer.update_priorities(batch["indices"], np.ones(8)) == {"applied": 0, "stale": 8}
        for handle in batch["indices"]:
            with pytest.raises(StaleHandle):
                buffer.get([handle])


@pytest.mark.parametrize("place", PLACES)
def test_handles_of_a_mix_are_rows_of_no_buffer_on_a_device(place: str) -> None:
    device = device_of(place)
    one, other = (on_device(8, device=device, obs_shape=(2,), sampler=sw.Prioritized(), seed=i) for i in range(2))
    for buffer in (one, other):
        buffer.add(**rows(range(8)))
    batch = sw.Mix({one: 0.5, other: 0.5}).sample(8)
    assert batch["indices"].device.type == torch.device(device).type
    for buffer in (one, other):
        done = buffer.update_priorities(batch["indices"], torch.ones(8, device=device))
        assert (int(done["applied"]), int(done["stale"])) == (0, 8)
        with pytest.raises(StaleHandle):
            buffer.get(batch["indices"])


def test_handles_that_are_not_of_the_mix_are_stale() -> None:
    one, other = two({"sampler": sw.Prioritized()}, {"sampler": sw.Prioritized()})
    third = filled(8, sampler=sw.Prioritized())
    small, large = sw.Mix({one: 0.5, other: 0.5}), sw.Mix({one: 0.25, other: 0.25, third: 0.5})
    plain, foreign = one.sample(4)["indices"], large.sample(8)["indices"][-1:]
    for handles in (plain, foreign, [-1], [2**62]):
        count = len(handles)
        assert small.update_priorities(handles, np.ones(count)) == {"applied": 0, "stale": count, "skipped": 0}
        with pytest.raises(StaleHandle, match=rf"get\(\): {int(handles[0])} is no handle of this mix"):
            small.get(handles)


def test_rows_that_were_overwritten_are_counted_and_named() -> None:
    one, other = two({"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.5, other: 0.5})
    batch = mix.sample(8)
    for number in range(20):
        one.add(**row(number))
    assert mix.update_priorities(batch["indices"], np.ones(8)) == {"applied": 0, "stale": 4, "skipped": 4}
    with pytest.raises(StaleHandle, match=r"get\(\): buffer 0 \(memory\): row \d+ is not in the buffer"):
        mix.get(batch["indices"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_priorities_are_all_checked_before_any_is_applied(bad: float) -> None:
    one, other = two({"sampler": sw.Prioritized()}, {"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.5, other: 0.5})
    batch = mix.sample(8)
    values = np.full(8, 9.0)
    values[-1] = bad
    with pytest.raises(SchemaError, match=r"update_priorities\(\): priorities"):
        mix.update_priorities(batch["indices"], values)
    assert one.stats()["updates_applied"] == other.stats()["updates_applied"] == 0
    with pytest.raises(SchemaError, match=r"update_priorities\(\): priorities"):
        mix.update_priorities(batch["indices"], values[:3])
    with pytest.raises(SchemaError, match="mask: expected with Windows"):
        mix.update_priorities(batch["indices"], np.ones(8), np.ones(8, bool))


def test_updates_need_a_buffer_with_priorities() -> None:
    one, other = two()
    mix = sw.Mix({one: 0.5, other: 0.5})
    with pytest.raises(SchemaError, match=r"no buffer has priorities; give one of them sampler=Prioritized\(\)"):
        mix.update_priorities(mix.sample(4)["indices"], np.ones(4))


def test_updates_take_tensors_and_lists_and_are_awaited() -> None:
    one, other = two({"sampler": sw.Prioritized()}, {"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.5, other: 0.5})
    batch = mix.sample(8, device="cpu")
    done = {"applied": 8, "stale": 0, "skipped": 0}
    assert mix.update_priorities(batch["indices"], torch.ones(8, requires_grad=True)) == done
    assert mix.update_priorities(batch["indices"].tolist(), [1.0] * 8) == done
    assert asyncio.run(mix.update_priorities_async(batch["indices"], np.ones(8), timeout=1)) == done


def test_values_written_back_reach_the_rows_of_each_buffer() -> None:
    schema = {"obs": sw.Field((2,)), "action": sw.Field((), mutable=True)}
    one, other = (sw.ReplayBuffer(20, schema=schema, seed=seed) for seed in (0, 1))
    for buffer in (one, other):
        buffer.add(**rows(range(8)))
    mix = sw.Mix({one: 0.5, other: 0.5})
    handles = np.unique(mix.sample(12)["indices"])[::-1]
    count = len(handles)
    values = np.arange(count) + 100.0
    assert mix.write(handles, action=values) == {"applied": count, "stale": 0}
    np.testing.assert_array_equal(mix.get(handles)["action"], values)
    # Of any shape; -1 is no row.
    shaped = np.stack([handles, np.full(count, -1)], axis=1)
    assert mix.write(shaped, action=np.stack([values + 1, values], axis=1)) == {"applied": count, "stale": 0}
    np.testing.assert_array_equal(mix.get(handles)["action"], values + 1)
    assert asyncio.run(mix.write_async(handles, action=torch.zeros(count), timeout=5)) == {"applied": count, "stale": 0}

    with pytest.raises(SchemaError, match=rf"write\(\): field 'action': expected .* \({count},\), got shape \(2,\)"):
        mix.write(handles, action=values[:2])
    with pytest.raises(StaleHandle, match="1 of the indices are not handles of a mixed batch"):
        mix.write([*handles, 7], action=[*values, 9.0])
    assert mix.write([*handles, 7], stale="skip", action=[*values, 9.0]) == {"applied": count, "stale": 1}
    other.clear()
    mine = handles[handles >> 50 == 1]  # rows of the first buffer
    before = mix.get(mine)["action"]
    with pytest.raises(StaleHandle, match=r"buffer 1 \(memory\)"):
        mix.write(handles, action=values + 7)
    np.testing.assert_array_equal(mix.get(mine)["action"], before)


# ---- waiting ---------------------------------------------------------------------------------------------------------


def queues(first: int, second: int) -> tuple[sw.ReplayBuffer, sw.ReplayBuffer]:
    options: dict[str, Any] = {"sampler": sw.Fifo(), "pace": sw.Pace.queue(20), "num_envs": 1}
    one, other = make(20, **options), make(30, **options)
    for buffer, numbers in ((one, range(first)), (other, range(100, 100 + second))):
        if numbers:
            buffer.add(**rows(numbers))
    return one, other


def test_buffer_that_is_not_ready_is_named_and_nothing_is_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = queues(8, 2)
    mix = sw.Mix({one: 0.5, other: 0.5})
    for timeout in (0, 0.01):
        with pytest.raises(NotReady) as caught:
            mix.sample(8, timeout=timeout)
        text = str(caught.value)
        assert text.startswith(
            "sample(): buffer 1 (memory): sampling waits: 2 inserts x 1 - 0 samples - 4 < min_diff 0"
        )
        assert text.endswith(f"timeout={timeout}" if timeout else "timeout=0")
    with monkeypatch.context() as alone:  # tests before this one may have left threads
        alone.setattr(threading, "enumerate", lambda: [threading.current_thread()])
        with pytest.raises(NotReady, match=r"buffer 1 .*this thread is the only one and waits for itself: add first"):
            mix.sample(8)
    assert [buffer.stats()["pace_samples"] for buffer in (one, other)] == [0, 0]
    assert mix.stats()["rows_by_buffer"] == [0, 0]
    other.add(**rows([102, 103]))
    assert numbers(mix.sample(8, timeout=0)) == [0, 1, 2, 3, 100, 101, 102, 103]  # the same rows: they were given back


def test_call_waits_until_every_buffer_is_ready() -> None:
    one, other = queues(2, 2)
    mix = sw.Mix({one: 0.5, other: 0.5})
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(mix.sample(8, timeout=HANG_S)))
    thread.start()
    one.add(**rows([2, 3]))
    thread.join(0.1)
    assert thread.is_alive()
    assert numbers(one.sample(2, timeout=0)) == [0, 1]  # nothing is reserved in the buffer that was ready
    one.add(**rows([4, 5]))
    other.add(**rows([102, 103]))
    thread.join(HANG_S)
    assert numbers(got[0]) == [2, 3, 4, 5, 100, 101, 102, 103]


def test_mixes_in_opposite_order_do_not_wait_for_each_other() -> None:
    one, other = queues(0, 0)
    got: list[list[int]] = [[], []]

    def learn(mix: sw.Mix, into: list[int]) -> None:
        for _ in range(25):
            into += numbers(mix.sample(8, timeout=HANG_S))

    mixes = sw.Mix([(one, 0.5), (other, 0.5)]), sw.Mix([(other, 0.5), (one, 0.5)])
    learners = [threading.Thread(target=learn, args=pair) for pair in zip(mixes, got, strict=True)]
    for thread in learners:
        thread.start()
    for number in range(200):
        one.add(**rows([number]), timeout=HANG_S)
        other.add(**rows([1000 + number]), timeout=HANG_S)
    for thread in learners:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert sorted(got[0] + got[1]) == [*range(200), *range(1000, 1200)]  # each row once


def test_buffers_with_a_pace_and_without_mix() -> None:
    paced = make(20, pace=sw.Pace.min_size(4), num_envs=1)
    plain = filled(8)
    mix = sw.Mix({plain: 0.5, paced: 0.5})
    with pytest.raises(NotReady, match=r"buffer 1 .*sampling waits: 0 rows < min_size 4"):
        mix.sample(4, timeout=0)
    paced.add(**rows(range(4)))
    assert len(mix.sample(4, timeout=0)["indices"]) == 4


def test_batch_that_the_pace_of_a_buffer_never_allows_names_it() -> None:
    one, other = queues(8, 8)
    mix = sw.Mix({one: 0.5, other: 0.5})
    with pytest.raises(SchemaError, match=r"sample\(\): buffer 0 \(memory\): batch_size: expected at most capacity=20"):
        mix.sample(60)
    with pytest.raises(SchemaError, match="batch_size"):
        mix.sample(0)


def test_newest_rows_need_their_place_in_every_batch() -> None:
    one, other = two({"sampler": sw.Uniform(newest=3)})
    mix = sw.Mix({one: 0.3, other: 0.7})
    with pytest.raises(SchemaError, match=r"batch_size: buffer 0 \(memory\) has newest=3, and its share of 9 rows may"):
        mix.sample(9)
    assert numbers(mix.sample(10))[:3] == [7, 6, 5]


def test_event_loop_continues_while_a_mix_waits() -> None:
    one, other = queues(1, 1)
    mix = sw.Mix({one: 0.5, other: 0.5})

    async def run() -> Any:
        waiting = asyncio.create_task(mix.sample_async(4, timeout=HANG_S))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await other.add_async(**rows([101]))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await one.add_async(**rows([1]))
        batch = await waiting
        with pytest.raises(NotReady, match="buffer"):
            await mix.sample_async(4, timeout=0.05)
        return batch

    assert numbers(asyncio.run(run())) == [0, 1, 100, 101]


def test_event_loop_is_told_at_once_that_a_buffer_is_empty() -> None:
    mix = sw.Mix({filled(8): 0.5, make(8): 0.5})
    with pytest.raises(NotReady, match=r"buffer 1 \(memory\): the buffer is empty"):
        asyncio.run(mix.sample_async(4))


# ---- iterators -------------------------------------------------------------------------------------------------------


def closing(made: Any, count: int) -> Iterator[Any]:
    yield from itertools.islice(made, count)
    made.close()


@pytest.mark.parametrize("verb", ["batches", "stream"])
def test_iterators_give_what_sample_gives(verb: str) -> None:
    mixes = [sw.Mix(dict(zip(two({"sampler": sw.Prioritized()}), (0.3, 0.7), strict=True))) for _ in range(2)]
    for batch in closing(getattr(mixes[0], verb)(5, prefetch=3), 8):
        plain = mixes[1].sample(5)
        assert all(np.array_equal(batch[name], plain[name]) for name in plain)
    assert mixes[0].stats()["rows_by_buffer"] == mixes[1].stats()["rows_by_buffer"]


def test_iterator_gives_back_what_it_did_not_return() -> None:
    one, other = queues(12, 12)
    mix = sw.Mix({one: 0.5, other: 0.5})
    made = mix.batches(4, prefetch=3)
    assert numbers(next(made)) == [0, 1, 100, 101]
    made.close()  # type: ignore[attr-defined]
    assert [buffer.stats()["pace_samples"] for buffer in (one, other)] == [2, 2]
    assert mix.stats()["rows_by_buffer"] == [2, 2]
    assert numbers(mix.sample(4, timeout=0)) == [2, 3, 102, 103]


def test_map_changes_mixed_batches_and_its_error_gives_them_back() -> None:
    one, other = queues(12, 12)
    mix = sw.Mix({one: 0.5, other: 0.5})
    count = itertools.count()

    def change(batch: Any) -> Any:
        if next(count) == 1:
            batch["indices"][:] = 0
            raise KeyError("mine")
        return {"reward": -batch["reward"]}

    made = mix.batches(4, map=change)
    assert next(made)["reward"].tolist() == [0, -1, -100, -101]
    with pytest.raises(KeyError, match="mine"):
        next(made)
    assert numbers(mix.sample(4, timeout=0)) == [2, 3, 102, 103]
    with pytest.raises(SchemaError, match=r"stream\(\): map: expected a function of a batch"):
        mix.stream(4, map=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("and_host", [False, True])
def test_iterators_and_tensors_of_rows_on_a_device(place: str, and_host: bool) -> None:
    device = device_of(place)
    one = on_device(8, device=device, obs_shape=(2,), seed=0)
    other = make(8) if and_host else on_device(8, device=device, obs_shape=(2,), seed=1)
    one.add(**rows(range(8)))
    other.add(**rows(range(100, 108)))
    mix = sw.Mix({one: 0.5, other: 0.5})
    assert mix.device == one.device
    made = mix.stream(6, map=lambda batch: batch | {"reward": batch["reward"] * 1})
    batch = next(made)
    check_sources(here(batch))
    assert batch["source"].device == one.device
    out = mix.sample(6)
    kept = dict(out)
    assert mix.sample(6, out=out) is out
    assert all(out[name] is kept[name] for name in kept)
    check_sources(here(out))
    with pytest.raises(SchemaError, match="out: 'obs': expected"):
        mix.sample(4, out=out)
    assert mix.stats()["rows_by_buffer"] == [9, 9]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("and_device", [False, True])
def test_parts_of_the_host_are_transferred_ahead(and_device: bool) -> None:
    prioritized = make(20, sampler=sw.Prioritized(alpha=1.0, beta=0.5), num_envs=1)
    prioritized.add(**rows(range(12)), priority=np.arange(1.0, 13))
    _, queue = queues(0, 12)
    shares: list[Any] = [(prioritized, 0.5), (queue, 0.5)]
    if and_device:
        third = on_device(20, device="cuda", obs_shape=(2,), seed=3)
        third.add(**rows(range(200, 212)))
        shares = [(prioritized, 0.5), (queue, 0.25), (third, 0.25)]
    mix = sw.Mix(shares)
    made = mix.stream(8, device="cuda", prefetch=2)
    for _ in range(2):
        batch = next(made)
        assert batch["obs"].is_cuda
        on_host = here(batch)
        name = on_host["reward"].astype(int)
        assert (name // 100 == on_host["source"]).all()
        raw = np.where(on_host["source"] == 0, (12 * (name % 100 + 1) / 78) ** -0.5, 1)
        assert on_host["weights"] == pytest.approx(raw / raw.max(), rel=1e-4)
    made.close()  # type: ignore[attr-defined]
    assert queue.stats()["pace_samples"] == mix.stats()["rows_by_buffer"][1]


def test_buffers_for_different_devices_are_refused() -> None:
    one, other = filled(4, device="cpu"), filled(4, device="cpu")
    assert isinstance(sw.Mix({one: 0.5, filled(4): 0.5}).sample(4)["obs"], torch.Tensor)
    object.__setattr__(other, "_device", "cuda:1")  # as on a machine with two GPUs
    with pytest.raises(SchemaError, match="device: buffer 0 is for cpu, buffer 1 for cuda:1; give both the same"):
        sw.Mix({one: 0.5, other: 0.5})


# ---- facts and life --------------------------------------------------------------------------------------------------


def test_facts() -> None:
    one, other = two()
    mix = sw.Mix({one: 0.25, other: 0.75})
    assert (len(mix), mix.capacity, mix.shares) == (16, 50, (0.25, 0.75))
    mix.sample(8)
    stats = mix.stats()
    assert (stats["size"], stats["sample_calls"], stats["rows_sampled"]) == (16, 1, 8)
    assert stats["shares"] == [0.25, 0.75]
    assert stats["buffers"][1]["capacity"] == 30
    assert repr(mix).startswith("<Mix: 0.25 of <ReplayBuffer in memory: 8 of 20 rows")
    with pytest.raises(AttributeError, match="cannot be set"):
        mix.shares = (0.5, 0.5)  # type: ignore[misc]


def test_close_leaves_the_buffers_open() -> None:
    one, other = two()
    with sw.Mix({one: 0.5, other: 0.5}) as mix:
        handles = mix.sample(4)["indices"]
    mix.close()
    assert repr(mix) == "<Mix: closed>"
    for late in (
        lambda: mix.sample(4),
        lambda: mix.batches(4),
        lambda: mix.stream(4),
        lambda: mix.get(handles),
        lambda: mix.update_priorities(handles, np.ones(4)),
        lambda: mix.stats(),
        lambda: len(mix),
        lambda: pickle.dumps(mix),
    ):
        with pytest.raises(ClosedError, match="the mix is closed"):
            late()
    assert len(one.sample(4)["indices"]) == 4


def test_closed_buffer_is_named() -> None:
    one, other = two()
    mix = sw.Mix({one: 0.5, other: 0.5})
    other.close()
    with pytest.raises(ClosedError, match=r"sample\(\): buffer 1 \(memory\): the buffer is closed"):
        mix.sample(4)
    assert len(one.sample(4)["indices"]) == 4


def test_mix_of_shared_buffers_is_pickled_as_their_addresses(tmp_path: Any) -> None:
    buffers = [
        sw.ReplayBuffer(10, obs_shape=(2,), storage=f"file://{tmp_path / name}.sw", seed=0) for name in ("a", "b")
    ]
    for number, buffer in enumerate(buffers):
        buffer.add(**rows(range(100 * number, 100 * number + 4)))
    mix = sw.Mix(zip(buffers, (0.25, 0.75), strict=True))
    again = pickle.loads(pickle.dumps(mix))
    assert again.shares == mix.shares
    check_sources(again.sample(8))
    for buffer in (*buffers, *again.buffers):
        buffer.close()
    with pytest.raises(TypeError, match="a buffer in memory belongs to one process"):
        pickle.dumps(sw.Mix({filled(4): 1.0}))


def test_threads_sample_and_update_at_once() -> None:
    one, other = two({"sampler": sw.Prioritized()}, {"sampler": sw.Prioritized()})
    mix = sw.Mix({one: 0.3, other: 0.7})
    errors: list[BaseException] = []

    def learn() -> None:
        try:
            for _ in range(100):
                batch = mix.sample(7)
                check_sources(batch)
                mix.update_priorities(batch["indices"], batch["reward"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert mix.stats()["rows_by_buffer"] == [630, 1470]
