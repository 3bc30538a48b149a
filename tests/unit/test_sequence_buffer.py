"""SequenceBuffer, behaviour by behaviour: who gets what, when, and what happens when somebody fails."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle

Sample = sw.SequenceSample


def sample(names: Any, key: str = "a", length: int = 2, **metadata: list[Any]) -> Sample:
    listed = [str(name) for name in names]
    data = np.arange(length * len(listed))
    return Sample(listed, {key: [length] * len(listed)}, {key: data}, metadata=metadata)


def two_step(n: int = 2, capacity: int = 100, **options: Any) -> sw.SequenceBuffer:
    flow = sw.Dataflow([sw.Consumer("inf", {"a"}, {"b"}, n), sw.Consumer("train", {"a", "b"}, batch_size=n)])
    return sw.SequenceBuffer(capacity, flow=flow, **options)


def one_step(n: int = 1, capacity: int = 100, key: str = "a", **options: Any) -> sw.SequenceBuffer:
    consumer = {
        name: options.pop(name) for name in ("reuse", "window", "group_size", "group_timeout") if name in options
    }
    flow = sw.Dataflow([sw.Consumer("train", {key}, batch_size=n, **consumer)])
    return sw.SequenceBuffer(capacity, flow=flow, **options)


def train(seq: sw.SequenceBuffer, **options: Any) -> list[str]:
    with seq.get("train", timeout=0, **options) as lease:
        return lease.batch.ids


class Background:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None

        def work() -> None:
            try:
                self.result = call()
            except BaseException as error:
                self.result = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def wait(self) -> Any:
        self.thread.join(HANG_S)
        assert not self.thread.is_alive(), "still waiting"
        return self.result

    def is_waiting(self) -> bool:
        self.thread.join(0.05)
        return self.thread.is_alive()


async def until_in_loop(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def waiting(seq: sw.SequenceBuffer, consumer: str = "train") -> int:
    return seq.stats()["consumers"][consumer]["waiting"]


# ---- the join --------------------------------------------------------------------------------------------------------


def test_samples_gain_keys_and_leave_when_everybody_is_done() -> None:
    seq = two_step()
    seq.put(sample(range(3)))
    lease = seq.get("inf", timeout=0)
    assert (lease.batch.ids, lease.batch.keys, len(seq)) == (["0", "1"], {"a"}, 3)
    with pytest.raises(NotReady):
        seq.get("train", timeout=0)
    seq.amend(lease.handles, sample(lease.batch.ids, "b"))
    lease.ack()
    assert len(seq) == 3
    with seq.get("train", timeout=0) as both:
        assert (both.batch.ids, both.batch.keys) == (["0", "1"], {"a", "b"})
        assert both.handles.tolist() == lease.handles.tolist()
        assert len(seq) == 3, "in the trainer's hands, not gone"
    assert len(seq) == 1
    assert seq.used_ids == ["0", "1"]


def test_a_getter_waits_for_exactly_its_batch() -> None:
    seq = one_step(3)
    seq.put(sample(range(2)))
    getter = Background(lambda: seq.get("train").batch.ids)
    assert getter.is_waiting()
    seq.put(sample([2, 3]))
    assert getter.wait() == ["0", "1", "2"]
    assert len(seq) == 4


def test_oldest_birth_comes_first_and_put_order_breaks_ties() -> None:
    seq = one_step(4)
    seq.put(sample(range(4)), births=[40, 30, 20, 10])
    assert train(seq) == ["3", "2", "1", "0"]
    seq.put(sample("abc"), births=[7, 7, 7])
    seq.put(sample("d"), births=[7])
    assert train(seq) == ["a", "b", "c", "d"]
    other = one_step(3)
    other.put(sample("xy"))
    other.put(sample("z"))
    assert train(other) == ["x", "y", "z"]


@pytest.mark.parametrize("births", [[0], [-5], [1.5], [True], [1, 2], []])
def test_bad_births_are_refused_at_put(births: Any) -> None:
    seq = one_step()
    with pytest.raises(SchemaError, match="births"):
        seq.put(sample("a"), births=births)
    assert len(seq) == 0


def test_births_and_put_order_do_not_mix() -> None:
    seq = one_step()
    seq.put(sample("a"), births=[1_700_000_000_000])
    with pytest.raises(SchemaError, match="do not compare"):
        seq.put(sample("b"))


def test_full_put_changes_nothing_and_the_next_one_fits() -> None:
    seq = one_step(2, capacity=3)
    seq.put(sample("ab"))
    with pytest.raises(BufferFull, match=r"no room for 2 samples .* 2 of 3 samples are held"):
        seq.put(sample("cd"), timeout=0)
    assert seq.ids() == ["a", "b"]
    seq.put(sample("c"))
    assert train(seq) == ["a", "b"]
    seq.put(sample("de"))
    with pytest.raises(SchemaError, match="never fit capacity=3"):
        seq.put(sample("fghi"))
    handles = seq.put([])
    assert handles.dtype == np.int64
    assert handles.shape == (0,)


def test_capacity_counts_tokens_and_bytes() -> None:
    seq = one_step(1, max_tokens=10)
    seq.put(sample("ab", length=4))
    with pytest.raises(BufferFull, match="8 of 10 tokens"):
        seq.put(sample("c", length=3), timeout=0)
    seq.put(sample("c", length=2))
    seq = one_step(1, max_bytes=8 * 10)
    handles = seq.put(sample("ab", length=4))
    with pytest.raises(BufferFull, match="64 of 80 bytes"):
        seq.put(sample("c", length=3), timeout=0)
    seq.amend(handles, sample("ab", "b", length=100))  # what consumers make is never refused
    assert seq.stats()["data_bytes"] == 8 * (8 + 200)
    assert train(seq) == ["a"]
    assert seq.stats()["data_bytes"] == 8 * 104


def test_put_waits_for_room_in_turn() -> None:
    seq = one_step(1, capacity=2)
    seq.put(sample("ab"))
    first = Background(lambda: seq.put(sample("cd"), timeout=None))
    until(lambda: seq.stats()["waiting_puts"] == 1)
    second = Background(lambda: seq.put(sample("e"), timeout=None))
    until(lambda: seq.stats()["waiting_puts"] == 2)
    train(seq)
    assert first.is_waiting(), "two need two places"
    assert second.is_waiting(), "nobody overtakes"
    with pytest.raises(BufferFull, match="2 puts wait before it"):
        seq.put(sample("f"), timeout=0)
    train(seq)
    assert first.wait().tolist() == [2, 3]
    assert second.is_waiting()
    train(seq)
    second.wait()
    assert seq.ids() == ["d", "e"]


def test_put_that_waits_in_vain_changes_nothing() -> None:
    seq = one_step(1, capacity=1)
    seq.put(sample("a"))
    with pytest.raises(BufferFull):
        seq.put(sample("b"), timeout=0.05)
    assert (seq.ids(), seq.stats()["waiting_puts"]) == (["a"], 0)
    train(seq)
    seq.put(sample("b"))


def test_two_getters_of_one_consumer_share_nothing_and_of_two_may_share_all() -> None:
    flow = sw.Dataflow([sw.Consumer("one", {"a"}, batch_size=2), sw.Consumer("two", {"a"}, batch_size=2)])
    seq = sw.SequenceBuffer(10, flow=flow)
    seq.put(sample(range(4)))
    first, second = seq.get("one", timeout=0), seq.get("one", timeout=0)
    other = seq.get("two", timeout=0)
    assert (first.batch.ids, second.batch.ids, other.batch.ids) == (["0", "1"], ["2", "3"], ["0", "1"])
    with pytest.raises(NotReady):
        seq.get("one", timeout=0)


def test_amend_does_not_disturb_whoever_reads() -> None:
    seq = two_step()
    handles = seq.put(sample("xy"))
    lease = seq.get("inf", timeout=0)
    before = lease.batch["a"].copy()
    seq.amend(handles, sample("xy", "a", length=2).update(sample("xy", "b")))
    assert (lease.batch["a"] == before).all()
    seq.amend(handles[::-1], sample("yx", "b", length=3))
    lease.ack()
    assert seq.get("train", timeout=0).batch.seqlens["b"] == [[3], [3]]


def test_amend_pairs_permuted_handles_and_samples() -> None:
    seq = two_step(3)
    handles = seq.put(sample("xyz"))
    seq.amend(handles[[2, 0, 1]], Sample(["z", "x", "y"], {"b": [1, 1, 1]}, {"b": np.array([30, 10, 20])}))
    assert seq.get("train", timeout=0).batch["b"].tolist() == [10, 20, 30]


def test_one_amend_wakes_both_consumers_that_waited_for_it() -> None:
    flow = sw.Dataflow([sw.Consumer(name, {"a", "b"}, batch_size=2) for name in ("one", "two")])
    seq = sw.SequenceBuffer(10, flow=flow)
    handles = seq.put(sample("xy"))
    getters = [Background(lambda name=name: seq.get(name).batch.ids) for name in ("one", "two")]
    until(lambda: waiting(seq, "one") + waiting(seq, "two") == 2)
    seq.amend(handles, sample("xy", "b"))
    assert [getter.wait() for getter in getters] == [["x", "y"]] * 2


def test_amend_with_wrong_ids_changes_nothing() -> None:
    seq = two_step()
    handles = seq.put(sample("xy"))
    with pytest.raises(SchemaError, match="handle 1: expected the id 'y', got 'z'"):
        seq.amend(handles, sample("xz", "b"))
    with pytest.raises(SchemaError, match="a sample a handle, got 1 for 2"):
        seq.amend(handles, sample("x", "b"))
    with pytest.raises(SchemaError, match="each once"):
        seq.amend(handles[[0, 0]], [sample("x", "b"), sample("x", "b")])
    assert "2 lack 'b'" in seq.explain("train")
    assert seq.get("inf", timeout=0).batch.ids == ["x", "y"]


def test_handles_never_reach_another_sample() -> None:
    seq = one_step(1, capacity=1)
    old = seq.put(sample("a"))
    train(seq)
    new = seq.put(sample("a"))
    with pytest.raises(StaleHandle, match=f"handle {old[0]} has left"):
        seq.amend(old, sample("a", "b"))
    assert new[0] != old[0]
    seq.amend(new, sample("a", "b"))


def test_every_waiting_getter_is_served() -> None:
    seq = one_step(1)
    getters = [Background(lambda: seq.get("train").batch.ids) for _ in range(3)]
    until(lambda: waiting(seq) == 3)
    seq.put(sample("abc"))
    assert sorted(getter.wait()[0] for getter in getters) == ["a", "b", "c"]


def test_a_timeout_leaves_no_claim() -> None:
    seq = one_step(2)
    seq.put(sample("a"))
    with pytest.raises(NotReady, match=r"'train': 1 of 2 samples ready"):
        seq.get("train", timeout=0.03)
    assert waiting(seq) == 0
    seq.put(sample("b"))
    assert train(seq) == ["a", "b"]


def test_partial_batches_come_only_when_the_time_is_up_and_never_empty() -> None:
    seq = one_step(4)
    seq.put(sample("ab"))
    start = time.monotonic()
    with seq.get("train", timeout=0.1, partial=True) as lease:
        assert lease.batch.ids == ["a", "b"]
    assert time.monotonic() - start >= 0.1
    with pytest.raises(NotReady):
        seq.get("train", timeout=0, partial=True)


def test_close_wakes_everybody_with_an_error() -> None:
    seq = one_step(1, capacity=1)
    seq.put(sample("a"))
    lease = seq.get("train", timeout=0)
    getter = Background(lambda: seq.get("train"))
    putter = Background(lambda: seq.put(sample("b"), timeout=None))
    until(lambda: waiting(seq) == 1 and seq.stats()["waiting_puts"] == 1)
    seq.close()
    seq.close()
    assert isinstance(getter.wait(), ClosedError)
    assert isinstance(putter.wait(), ClosedError)
    with pytest.raises(ClosedError, match="not used"):
        lease.ack()
    lease.release()
    with pytest.raises(ClosedError):
        seq.put(sample("c"))


def test_names_inputs_and_extra_keys() -> None:
    with pytest.raises(ValueError, match="expected one of train, got 'nobody'"):
        one_step().get("nobody")
    flow = sw.Dataflow([sw.Consumer("see", batch_size=1)])
    seq = sw.SequenceBuffer(10, flow=flow)
    seq.put(sample("a").update(sample("a", "extra")))
    assert seq.get("see", timeout=0).batch.keys == set()
    with pytest.raises(SchemaError, match="expected a Dataflow"):
        sw.SequenceBuffer(10, flow=[])
    with pytest.raises(TypeError, match="lives in one process"):
        pickle.dumps(seq)


def test_ids_that_are_held_are_refused_unless_allowed() -> None:
    seq = one_step(2)
    seq.put(sample("ab"))
    for again in (["c", "a"], ["d"]):
        names = [*again, "d"] if again == ["d"] else again
        with pytest.raises(SchemaError):
            seq.put([sample([name]) for name in names])
    assert seq.ids() == ["a", "b"]
    train(seq)
    seq.put(sample("a"))
    twice = one_step(2, duplicate_ids=True)
    twice.put([sample("a"), sample("a")])
    assert train(twice) == ["a", "a"]


def test_a_key_keeps_its_dtype_and_shape() -> None:
    seq = two_step()
    handles = seq.put(sample("a"))
    for other in (np.zeros(2, np.float32), np.zeros((2, 3), np.int64), None):
        with pytest.raises(SchemaError, match="key 'a' of 'b': expected int64 of trailing shape"):
            seq.put(Sample(["b"], {"a": [2]}, None if other is None else {"a": other}))
    seq.amend(handles, sample("a", "b"))
    with pytest.raises(SchemaError, match=r"amend\(\): key 'b'"):
        seq.amend(handles, Sample(["a"], {"b": [1]}, {"b": np.zeros(1)}))
    assert len(seq) == 1


def test_samples_may_be_described_only_and_may_be_tensors() -> None:
    torch = pytest.importorskip("torch")
    seq = two_step()
    handles = seq.put(sample("ab").meta())
    seq.amend(handles, sample("ab", "b").meta())
    batch = seq.get("train", timeout=0).batch
    assert batch.data is None
    assert batch.seqlens == {"a": [[2], [2]], "b": [[2], [2]]}
    seq = one_step(2)
    seq.put(Sample(["a", "b"], {"a": [1, 2]}, {"a": torch.arange(3)}))
    assert torch.equal(seq.get("train", timeout=0).batch["a"], torch.arange(3))


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_an_error_gives_the_samples_back_to_their_old_place() -> None:
    seq = one_step(2)
    seq.put(sample(range(4)))
    with pytest.raises(ZeroDivisionError), seq.get("train", timeout=0):
        1 / 0  # noqa: B018
    assert train(seq) == ["0", "1"]
    assert seq.stats()["given_back"] == 2


@pytest.mark.timing  # between get() and ack() of the second lease lies less than its second
def test_expiry_gives_back_and_wakes_whoever_waits() -> None:
    seq = one_step(1, lease_timeout=1)
    seq.put(sample("a"))
    start = time.monotonic()
    lost = seq.get("train", timeout=0)
    with seq.get("train", timeout=HANG_S) as lease:
        assert lease.batch.ids == ["a"]
    assert 1 <= time.monotonic() - start < HANG_S
    with pytest.raises(StaleHandle, match="expired"):
        lost.ack()
    lost.release()
    assert (len(seq), seq.stats()["expired"]) == (0, 1)


@pytest.mark.timing  # twenty times as often as it must be
def test_renewed_leases_live_on() -> None:
    seq = one_step(1, lease_timeout=2)
    seq.put(sample("a"))
    lease, start = seq.get("train", timeout=0), time.monotonic()
    while time.monotonic() < start + 2.5:
        time.sleep(0.1)
        lease.renew()
    assert seq.stats()["expired"] == 0
    lease.ack()
    with pytest.raises(StaleHandle):
        lease.renew()
    with pytest.raises(StaleHandle):
        lease.ack()


def test_an_owner_that_is_gone_gives_everything_back() -> None:
    seq = one_step(1)
    seq.put(sample("abc"))
    for _ in range(2):
        seq.get("train", timeout=0, owner="worker-3")
    kept = seq.get("train", timeout=0, owner="worker-4")
    assert seq.release("worker-3") == 2
    assert train(seq) + train(seq) == ["a", "b"]
    kept.ack()
    assert len(seq) == 0


def test_reuse_hands_out_so_often_and_then_frees() -> None:
    seq = one_step(1, reuse=3)
    seq.put(sample("ab"))
    assert [train(seq)[0] for _ in range(6)] == ["a", "a", "a", "b", "b", "b"]
    assert len(seq) == 0
    seq.put(sample("c"))
    lease = seq.get("train", timeout=0)
    with pytest.raises(NotReady):
        seq.get("train", timeout=0)
    lease.release()
    assert [train(seq)[0] for _ in range(3)] == ["c"] * 3, "what was given back was not used"


def test_an_acknowledgement_may_bring_what_the_consumer_made() -> None:
    seq = two_step()
    seq.put(sample("abc"))
    lease = seq.get("inf")
    before = seq.stats()
    for wrong, words in (
        (sample(["b", "a"], "b"), "expected the id 'a', got 'b'"),
        (sample("a", "b"), "expected one for each of the 2 leased, got 1"),
        (sample("ab", "c"), "'a' lacks b, which 'inf' makes"),
        ("ab", "expected SequenceSamples, got str"),
    ):
        with pytest.raises(SchemaError, match=words):
            lease.ack(wrong)  # type: ignore[arg-type]
    assert {**seq.stats(), "mean_age_s": 0, "max_age_s": 0} == {**before, "mean_age_s": 0, "max_age_s": 0}
    lease.ack(sample("ab", "b"))
    with pytest.raises(StaleHandle):
        lease.ack(sample("ab", "b"))
    assert seq.stats()["consumers"]["inf"]["ready"] == 1
    with seq.get("train", timeout=0) as trained:
        assert trained.batch.ids == ["a", "b"]
        with pytest.raises(SchemaError, match=r"'train' makes no keys; give Consumer\(outputs=\)"):
            trained.ack(sample("ab", "b"))
    assert (seq.ids(), seq.used_ids) == (["c"], ["a", "b"])


def test_the_last_reader_may_still_amend_what_it_has() -> None:
    seq = one_step(1)
    seq.put(sample("a"))
    lease = seq.get("train", timeout=0)
    seq.amend(lease.handles, sample("a", "made"))
    lease.ack()
    with pytest.raises(StaleHandle):
        seq.amend(lease.handles, sample("a", "made"))


# ---- stragglers ------------------------------------------------------------------------------------------------------


def test_strict_order_waits_for_the_straggler() -> None:
    seq = one_step(2, key="b", window=2)
    handles = seq.put(sample(range(4)))
    seq.amend(handles[1:], sample(range(1, 4), "b"))
    with pytest.raises(NotReady, match="2 are complete but not among the oldest window=2"):
        seq.get("train", timeout=0)
    seq.amend(handles[:1], sample([0], "b"))
    assert train(seq) + train(seq) == ["0", "1", "2", "3"]


def test_windowed_order_overtakes_only_within_the_window() -> None:
    seq = one_step(2, key="b", window=3)
    handles = seq.put(sample(range(6)))
    seq.amend(handles[1:], sample(range(1, 6), "b"))
    assert train(seq) == ["1", "2"]
    assert train(seq) == ["3", "4"]
    with pytest.raises(NotReady):
        seq.get("train", timeout=0)
    seq.amend(handles[:1], sample([0], "b"))
    assert train(seq) == ["0", "5"]


def test_groups_come_whole_or_when_their_time_is_up() -> None:
    seq = one_step(4, group_size=2, group_timeout=1000)
    seq.put(sample("abcd", group=["p", "q", "p", "r"]))
    with pytest.raises(NotReady, match="2 wait for the rest of their group of 2"):
        seq.get("train", timeout=0)
    seq.put(sample("e", group=["q"]))
    assert train(seq) == ["a", "c", "b", "e"]
    seq = one_step(4, group_size=2, group_timeout=0.2)
    start = time.monotonic()
    seq.put(sample("dfg", group=["r", "s", "s"]))
    with seq.get("train", timeout=HANG_S) as lease:
        assert lease.batch.ids == ["d", "f", "g"], "r came short of a member"
    assert 0.2 <= time.monotonic() - start < HANG_S
    with pytest.raises(SchemaError, match="expected 'group'"):
        seq.put(sample("x"))
    with pytest.raises(SchemaError, match="multiple of group_size=2"):
        seq.get("train", batch_size=3)


def test_a_group_that_loses_a_member_comes_without_it() -> None:
    seq = one_step(3, group_size=3, max_staleness=1)
    seq.put(sample("abc", group=["p"] * 3), version=[0, 1, 1])
    seq.put(sample("de", group=["q"] * 2), version=[0, 1])
    seq.set_version(2)
    assert seq.ids() == ["b", "c", "e"]
    lease = seq.get("train", timeout=0)
    assert lease.batch.ids == ["b", "c"], "it was whole, and what is gone will not come"
    lease.release()
    assert train(seq) == ["b", "c"]
    with pytest.raises(NotReady, match="1 wait for the rest of their group"):
        seq.get("train", timeout=0)
    seq.put(sample("fg", group=["q"] * 2), version=2)
    assert train(seq) == ["e", "f", "g"]


# ---- staleness -------------------------------------------------------------------------------------------------------


def test_what_becomes_too_old_leaves_before_it_is_drawn() -> None:
    seq = one_step(1, max_staleness=1)
    seq.put(sample("a"), version=0)
    seq.put(sample("b"), version=1)
    seq.set_version(1)
    assert seq.ids() == ["a", "b"]
    seq.set_version(2)
    assert seq.ids() == ["b"]
    assert train(seq) == ["b"]
    assert (seq.stats()["evicted"], seq.stats()["trained"]) == (1, 1)
    seq.put(sample("c"), version=0)
    assert (seq.ids(), seq.stats()["evicted"]) == ([], 2)
    with pytest.raises(SchemaError, match="expected 2 or more, got 1"):
        seq.set_version(1)
    with pytest.raises(SchemaError, match="got none for 'd'"):
        seq.put(sample("d"))


def test_what_is_in_somebodys_hands_is_not_evicted_under_them() -> None:
    seq = two_step(1, max_staleness=0)
    seq.put(sample("ab"), version=0)
    lease, other = seq.get("inf", timeout=0), seq.get("inf", timeout=0)
    seq.set_version(1)
    seq.amend(lease.handles, sample(lease.batch.ids, "b"))
    assert len(seq) == 2
    with pytest.raises(NotReady):
        seq.get("train", timeout=0)
    lease.ack()
    assert len(seq) == 1
    other.release()
    assert (len(seq), seq.stats()["evicted"]) == (0, 2)


def test_tokens_have_versions_and_the_first_counts() -> None:
    seq = one_step(1, max_staleness=1)
    versions = Sample(
        ["a", "b"], {"a": [3, 2], "versions": [3, 2]}, {"a": np.arange(5), "versions": np.array([0, 1, 2, 2, 2])}
    )
    seq.put(versions)
    assert seq.stats()["staleness"] == {0: 1, -2: 1}
    seq.set_version(2)
    assert seq.ids() == ["b"]
    fallen = Sample(["c"], {"versions": [2]}, {"versions": np.array([2, 1])})
    with pytest.raises(SchemaError, match="never fall"):
        seq.put(fallen)
    with pytest.raises(SchemaError, match="one whole number a token"):
        seq.put(Sample(["c"], {"versions": [1]}, {"versions": np.ones(1)}))


def test_stale_tokens_are_masked_where_asked() -> None:
    flow = sw.Dataflow([sw.Consumer("train", {"a", "versions"}, batch_size=2)])
    seq = sw.SequenceBuffer(10, flow=flow, max_staleness=1, stale="mask")
    data = {"a": np.arange(5), "versions": np.array([0, 1, 2, 2, 2])}
    seq.put(Sample(["a", "b"], {"a": [3, 2], "versions": [3, 2]}, data))
    seq.set_version(3)
    batch = seq.get("train", timeout=0).batch
    assert batch["fresh"].tolist() == [False, False, True, True, True]
    assert batch.seqlens["fresh"] == [[3], [2]]
    assert (seq.stats()["stale_tokens"], seq.stats()["stale_samples"]) == (2, 1)
    seq.put(Sample(["c"], {"a": [2], "versions": [2]}, {"a": np.arange(2), "versions": np.array([1, 2])}))
    seq.set_version(4)
    assert (seq.ids(), seq.stats()["evicted"]) == (["a", "b"], 1), "no token of c is fresh; a and b are leased"
    plain = one_step(2, max_staleness=0, stale="mask")
    plain.put(sample("ab"), version=[0, 1])
    plain.set_version(1)
    assert plain.get("train", timeout=0).batch["fresh"].tolist() == [False, True]
    keep = one_step(2, max_staleness=0, stale="keep")
    keep.put(sample("ab"), version=[0, 1])
    keep.set_version(1)
    assert keep.get("train", timeout=0).batch.keys == {"a"}
    assert keep.stats()["stale_samples"] == 1


@pytest.mark.parametrize("eta", [0, 1, 4])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_admission_follows_the_known_bound(eta: int, clients: int) -> None:
    seq = one_step(4, max_staleness=eta, capacity=1000)
    gate = seq.admission(4)
    assert sum(gate.start() for _ in range(4 * clients)) == min(4 * clients, (1 + eta) * 4)
    seq.set_version(1)
    more = sum(gate.start() for _ in range(4 * clients))
    assert min(4 * clients, (1 + eta) * 4) + more == min(8 * clients, (2 + eta) * 4)


def test_admission_counts_what_waits_and_gives_back_what_is_lost() -> None:
    seq = one_step(2, max_staleness=1)
    gate = seq.admission(2, max_concurrent=3)
    assert gate.capacity() == 3
    assert gate.start(3)
    seq.put(sample("abc"), version=0)
    gate.finish(3)
    assert gate.capacity() == 1, "delivered and not trained: still counted"
    train(seq)
    assert gate.capacity() == 1, "trained, but the version is the same"
    assert gate.start()
    gate.finish()  # thrown away
    assert gate.capacity() == 1
    seq.set_version(1)
    assert gate.capacity() == 3
    seq.set_version(2)  # "c" is too old: another may start in its place
    assert (seq.stats()["evicted"], gate.running) == (1, 0)
    assert gate.capacity() == min(3, (1 + 2 + 1) * 2 - 2)
    with pytest.raises(SchemaError, match="those that run"):
        gate.finish()


@pytest.mark.parametrize("version", [0, 5, 10, 50])
def test_admission_is_right_after_a_restart(version: int) -> None:
    seq = one_step(4, max_staleness=2, version=version)
    gate = seq.admission(4)
    assert gate.start(5)
    assert gate.capacity() == 3 * 4 - 5
    with pytest.raises(SchemaError, match="max_staleness"):
        one_step(1).admission(4)


def test_admission_is_exact_under_threads() -> None:
    seq = one_step(4, max_staleness=7)
    gate = seq.admission(4)
    counts: list[int] = []
    workers = [threading.Thread(target=lambda: counts.append(sum(gate.start() for _ in range(20)))) for _ in range(10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sum(counts) == 8 * 4 == gate.running


# ---- insight ---------------------------------------------------------------------------------------------------------


def test_explain_says_what_is_missing_and_who_has_it() -> None:
    seq = two_step(2)
    seq.put(sample("abc"))
    lease = seq.get("inf", timeout=0, owner="ref-0")
    said = seq.explain("train")
    assert "'train': 0 of 2 samples ready; 3 held" in said
    assert "3 lack 'b', which 'inf' makes (1 ready for it, 2 leased to it)" in said
    assert "the oldest, 'a', has waited" in said
    assert "2 are leased by ref-0" in seq.explain("inf")
    lease.ack()
    assert "2 are done with and wait for train" in seq.explain("inf")
    other = one_step(1, key="rewards")
    other.put(sample("a"))
    assert "1 lack 'rewards', which no consumer makes" in other.explain("train")


def test_stats_count_everything() -> None:
    seq = two_step(1)
    seq.put(sample("ab"), version=3)
    lease = seq.get("inf", timeout=0)
    stats = seq.stats()
    assert (stats["size"], stats["tokens"], stats["data_bytes"], stats["leased"], stats["leases"]) == (2, 4, 32, 1, 1)
    assert stats["staleness"] == {-3: 2}
    assert stats["consumers"]["inf"] == {"ready": 1, "taken": 1, "waiting": 0, "done": 0}
    assert 0 <= stats["mean_age_s"] <= stats["max_age_s"] < HANG_S
    lease.ack()
    assert seq.stats()["consumers"]["inf"]["done"] == 1


def test_watchdog_raises_in_everybody_who_waits_when_nothing_moves() -> None:
    seq = one_step(2, capacity=2, watchdog_timeout=0.3)
    start = time.monotonic()
    seq.put(sample("ab"))
    lease = seq.get("train", timeout=0)
    getter = Background(lambda: seq.get("train"))
    putter = Background(lambda: seq.put(sample("c"), timeout=None))
    stuck = [getter.wait(), putter.wait()]
    assert 0.3 <= time.monotonic() - start < HANG_S
    for error in stuck:
        assert isinstance(error, NotReady)
        assert "nothing has moved for watchdog_timeout=0.3 s" in str(error)
        assert "2 are leased by no name" in str(error)
    lease.ack()
    seq.put(sample("cd"))
    assert train(seq) == ["c", "d"]


@pytest.mark.timing  # it moves twenty times as often as it must
def test_watchdog_is_quiet_while_anything_moves() -> None:
    seq = one_step(25, watchdog_timeout=2)
    getter, start = Background(lambda: seq.get("train").batch.ids), time.monotonic()
    names = [str(number) for number in range(25)]
    for name in names:
        time.sleep(0.1)
        seq.put(sample([name]))
    assert getter.wait() == names
    assert time.monotonic() - start > 2


@pytest.mark.parametrize("size", [200, 168, 77])
@pytest.mark.parametrize("batch", [64, 25, 11, 38])
def test_epochs_follow_the_closed_rules(size: int, batch: int) -> None:
    """Ten epochs without a gap: a step ends one when what is left of it is no more than a batch."""
    seq = one_step(batch, capacity=10 * size, epoch_size=size)
    epoch = 0
    for step in range(10 * size // batch):
        rest = size - (step * batch) % size
        seq.put(sample(range(step * batch, (step + 1) * batch), length=1))
        before = seq.used_ids
        train(seq)
        is_last = len(seq.used_ids) < len(before) + batch
        assert is_last == (rest <= batch)
        epoch += is_last
        assert epoch == (step + 1) * batch // size
        assert len(seq.used_ids) == (step + 1) * batch % size


# ---- coroutines and threads ------------------------------------------------------------------------------------------


def test_coroutines_wait_without_stopping_their_loop() -> None:
    async def run() -> list[str]:
        seq = one_step(2, capacity=2)
        getter = asyncio.create_task(seq.get_async("train", timeout=HANG_S))
        await asyncio.sleep(0.02)
        assert not getter.done()
        await seq.put_async(sample("ab"))
        lease = await getter
        putter = asyncio.create_task(seq.put_async(sample("c"), timeout=HANG_S))
        await asyncio.sleep(0.02)
        assert not putter.done()
        await seq.amend_async(lease.handles, sample("ab", "b"))
        lease.ack()
        await putter
        with pytest.raises(NotReady):
            await seq.get_async("train", timeout=0.02)
        return seq.ids()

    assert asyncio.run(run()) == ["c"]


def test_cancelled_coroutines_leave_no_claim() -> None:
    async def run() -> None:
        seq = one_step(2, capacity=2)
        getters = [asyncio.create_task(seq.get_async("train")) for _ in range(2)]
        await until_in_loop(lambda: waiting(seq) == 2)
        seq.put(sample("ab"))  # wakes the first, which is cancelled before it looks
        getters[0].cancel()
        lease = await asyncio.wait_for(getters[1], HANG_S)
        assert lease.batch.ids == ["a", "b"]
        putters = [asyncio.create_task(seq.put_async(sample(name), timeout=None)) for name in "cd"]
        await until_in_loop(lambda: seq.stats()["waiting_puts"] == 2)
        lease.ack()
        putters[0].cancel()
        await asyncio.wait_for(putters[1], HANG_S)
        assert (seq.ids(), seq.stats()["waiting_puts"], waiting(seq)) == (["d"], 0, 0)

    asyncio.run(run())


def test_a_loop_that_was_closed_harms_nobody() -> None:
    seq = one_step(1)
    loop = asyncio.new_event_loop()
    task = loop.create_task(seq.get_async("train"))
    loop.run_until_complete(until_in_loop(lambda: waiting(seq) == 1))
    coroutine = task.get_coro()
    loop.close()
    seq.put(sample("a"))
    assert train(seq) == ["a"]
    with pytest.raises((RuntimeError, StopIteration)):
        coroutine.throw(RuntimeError("gone"))
    task._log_destroy_pending = False  # the loop is closed on purpose


def test_threads_and_coroutines_read_each_sample_once_per_consumer() -> None:
    """Two producers, six readers in three event loops and three threads, a buffer smaller than what goes through it."""
    total, size = 600, 5
    flow = sw.Dataflow(
        [
            sw.Consumer("ref", {"a"}, {"b"}, size),
            sw.Consumer("reward", {"a"}, {"c"}, size),
            sw.Consumer("train", {"a", "b", "c"}, batch_size=size),
        ]
    )
    seq = sw.SequenceBuffer(40, flow=flow, lease_timeout=30)
    seen: dict[str, list[str]] = {"ref": [], "reward": [], "train": []}
    outputs = {"ref": "b", "reward": "c", "train": None}
    left = dict.fromkeys(seen, total)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def claim(name: str) -> bool:
        with lock:
            left[name] -= size
            return left[name] >= 0

    def work(name: str) -> None:
        while claim(name):
            with seq.get(name, timeout=60) as lease:
                if outputs[name]:
                    seq.amend(lease.handles, sample(lease.batch.ids, outputs[name]))
                seen[name] += lease.batch.ids

    async def work_async(name: str) -> None:
        while claim(name):
            lease = await seq.get_async(name, timeout=60)
            if outputs[name]:
                await seq.amend_async(lease.handles, sample(lease.batch.ids, outputs[name]))
            seen[name] += lease.batch.ids
            lease.ack()

    def produce(start: int) -> None:
        for at in range(start, total, 2 * size):
            seq.put(sample(range(at, at + size)), timeout=60)

    async def both(name: str) -> None:
        await asyncio.gather(work_async(name), work_async(name))

    def guarded(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                failures.append(error)

        return run

    jobs: list[Callable[[], Any]] = [lambda: produce(0), lambda: produce(size)]
    for name in seen:
        jobs += [lambda name=name: work(name), lambda name=name: asyncio.run(both(name))]
    workers = [threading.Thread(target=guarded(job)) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(2 * HANG_S)
    assert not failures
    assert not any(worker.is_alive() for worker in workers)
    for name, ids in seen.items():
        assert sorted(ids, key=int) == [str(at) for at in range(total)], name
    assert (len(seq), seq.stats()["tokens"], seq.stats()["leases"]) == (0, 0, 0)


def test_many_getters_and_cancellations_lose_nothing() -> None:
    """64 getters on one consumer; half of them give up at random moments."""

    async def run() -> None:
        seq = one_step(1, capacity=1000)
        stream = np.random.default_rng(0)
        got: list[str] = []

        async def take(seconds: float | None) -> None:
            try:
                lease = await seq.get_async("train", timeout=seconds)
            except NotReady:
                return
            got.extend(lease.batch.ids)
            lease.ack()

        tasks = [asyncio.create_task(take(None if at % 2 else float(stream.random() * 0.05))) for at in range(64)]
        for at in range(32):
            await asyncio.sleep(float(stream.random() * 0.003))
            seq.put(sample([at]))
            victim = tasks[int(stream.integers(64))]
            if int(stream.integers(4)) == 0:
                victim.cancel()
        tasks += [asyncio.create_task(take(0.2)) for _ in range(64)]
        for _ in range(500):
            if len(got) == 32:
                break
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(map(int, got)) == list(range(32))

    asyncio.run(run())
