"""sharpwave.compat.areal: upstream's names give upstream's answers, and none of its defects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

from sharpwave.compat import areal
from sharpwave.errors import NotReady, SchemaError, StaleHandle

torch = pytest.importorskip("torch")
pytest.importorskip("zmq")


def sample(name: Any, key: str = "a", length: int = 2, meta: bool = False) -> areal.SequenceSample:
    made = areal.SequenceSample(
        keys={key}, trailing_shapes={key: ()}, dtypes={key: torch.int64}, ids=[name],
        seqlens={key: [[length]]}, data={key: torch.arange(length)}, metadata={},
    )  # fmt: skip
    return made.meta() if meta else made


def calls(n: int = 2) -> list[areal.MFCDef]:
    infer = areal.MFCDef("inf", n, areal.ModelInterfaceType.INFERENCE, input_keys=("a",), output_keys=("b",))
    return [infer, areal.MFCDef("train", n, areal.ModelInterfaceType.TRAIN_STEP, input_keys=("a", "b"))]


@pytest.mark.parametrize("meta", [False, True], ids=["with values", "described"])
def test_slots_sizes_and_orders_are_upstreams(meta: bool) -> None:
    async def run() -> None:
        infer, train = rpcs = calls()
        buffer = areal.AsyncIOSequenceBuffer(rpcs, max_size=10)
        assert (buffer.max_size, buffer.size, buffer.n_rpcs, buffer.rpcs) == (10, 0, 2, rpcs)
        assert (await buffer.put_batch([sample(i, meta=meta) for i in range(3)])).tolist() == [0, 1, 2]
        slots, batch = await buffer.get_batch_for_rpc(infer)
        assert (slots.tolist(), batch.ids, batch.bs, buffer.size) == ([0, 1], ["0", "1"], 2, 3)
        assert isinstance(batch, areal.SequenceSample)
        buffer._assert_valid_indicator()
        await buffer.amend_batch(slots[::-1], [sample(name, "b", meta=meta) for name in batch.ids[::-1]])
        slots, batch = await buffer.get_batch_for_rpc(train)
        assert (slots.tolist(), batch.keys, buffer.size) == ([0, 1], {"a", "b"}, 1)
        assert (await buffer.put_batch([sample(i, meta=meta) for i in range(3, 6)])).tolist() == [0, 1, 3]
        states = buffer.states()
        assert states["_is_idle"].tolist() == [True] * 4 + [False] * 6
        assert (states["_is_empty"] != states["_is_idle"]).all()
        buffer._assert_valid_indicator()

    asyncio.run(run())


def test_full_buffer_is_unchanged_and_empty_puts_are_nothing() -> None:
    async def run() -> None:
        buffer = areal.AsyncIOSequenceBuffer(calls(), max_size=2)
        await buffer.put_batch([sample(0)])
        with pytest.raises(areal.BufferFull):
            await buffer.put_batch([sample(1), sample(2)])
        assert buffer.size == 1
        assert (await buffer.put_batch([sample(1)])).tolist() == [1]
        empty = await buffer.put_batch([])
        assert (empty.dtype, empty.shape) == (np.int64, (0,))
        assert buffer.put_batch_synced([]).shape == (0,)

    asyncio.run(run())


def test_birth_times_order_batches() -> None:
    async def run() -> None:
        infer, _ = rpcs = calls(4)
        buffer = areal.AsyncIOSequenceBuffer(rpcs, max_size=10)
        await buffer.put_batch([sample(i) for i in range(4)], birth_times=[40, 30, 20, 10])
        assert (await buffer.get_batch_for_rpc(infer))[1].ids == ["3", "2", "1", "0"]
        await buffer.put_batch([sample(i) for i in range(4, 8)], birth_times=[7])
        assert (await buffer.get_batch_for_rpc(infer))[1].ids == ["4", "5", "6", "7"]
        for bad in ([1, 2], [0]):
            with pytest.raises(ValueError, match="births"):
                await buffer.put_batch([sample(8)], birth_times=bad)
        buffer._assert_valid_indicator()

    asyncio.run(run())


def test_three_getters_and_one_put_of_three() -> None:
    async def run() -> list[str]:
        call = areal.MFCDef("train", 1, input_keys=("a",))
        buffer = areal.AsyncIOSequenceBuffer([call], max_size=10)
        getters = [asyncio.create_task(buffer.get_batch_for_rpc(call)) for _ in range(3)]
        await asyncio.sleep(0.01)
        buffer.put_batch_synced([sample(i) for i in range(3)])
        found = await asyncio.wait_for(asyncio.gather(*getters), 5)
        return [batch.ids[0] for _, batch in found]

    assert sorted(asyncio.run(run())) == ["0", "1", "2"]


def test_a_late_amend_meets_neither_an_empty_slot_nor_its_next_tenant() -> None:
    async def run() -> None:
        call = areal.MFCDef("train", 1, input_keys=("a",))
        buffer = areal.AsyncIOSequenceBuffer([call], max_size=1)
        await buffer.put_batch([sample("old")])
        slots, _ = await buffer.get_batch_for_rpc(call)
        with pytest.raises(StaleHandle):
            await asyncio.wait_for(buffer.amend_batch(slots, [sample("old", "b")]), 1)
        await buffer.put_batch([sample("new")])
        with pytest.raises(StaleHandle):
            await asyncio.wait_for(buffer.amend_batch(slots, [sample("old", "b")]), 1)
        assert (await buffer.get_batch_for_rpc(call))[1].keys == {"a"}
        buffer._assert_valid_indicator()

    asyncio.run(run())


def test_wrong_names_and_graphs_are_refused() -> None:
    async def run() -> None:
        buffer = areal.AsyncIOSequenceBuffer(calls(), max_size=2)
        with pytest.raises(ValueError, match="nobody"):
            await buffer.get_batch_for_rpc(areal.MFCDef("nobody", 1))
        with pytest.raises(ValueError, match="one datum each"):
            await buffer.put_batch([areal.SequenceSample(ids=["a", "b"], seqlens={"a": [1, 1]})])

    asyncio.run(run())
    for bad in ([], [areal.MFCDef("a", 1), areal.MFCDef("a", 1)]):
        with pytest.raises(ValueError, match="Dataflow"):
            areal.AsyncIOSequenceBuffer(bad, max_size=2)


def test_the_lock_keeps_puts_waiting_and_duplicates_are_legal() -> None:
    async def run() -> None:
        call = areal.MFCDef("train", 2, input_keys=("a",))
        buffer = areal.AsyncIOSequenceBuffer([call], max_size=4)
        async with buffer.lock:
            put = asyncio.create_task(buffer.put_batch([sample(0), sample(0)]))
            await asyncio.sleep(0.01)
            assert buffer.size == 0
        await put
        assert (await buffer.get_batch_for_rpc(call))[1].ids == ["0", "0"]

    asyncio.run(run())


def test_many_coroutines_and_three_queued_puts_keep_every_invariant() -> None:
    async def run() -> None:
        infer, train = rpcs = calls(4)
        buffer = areal.AsyncIOSequenceBuffer(rpcs, max_size=200)
        async with buffer.lock:
            puts = [buffer.put_batch([sample(f"{p}-{i}") for i in range(20)]) for p in range(4)]
            tasks = [asyncio.create_task(put) for put in puts]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        seen: list[str] = []

        async def work() -> None:
            slots, batch = await buffer.get_batch_for_rpc(infer)
            await asyncio.sleep(0)
            await buffer.amend_batch(slots, [sample(name, "b") for name in batch.ids])

        async def learn() -> None:
            seen.extend((await buffer.get_batch_for_rpc(train))[1].ids)

        await asyncio.gather(*(job() for _ in range(20) for job in (work, learn)))
        assert sorted(seen) == sorted(f"{p}-{i}" for p in range(4) for i in range(20))
        assert buffer.size == 0
        buffer._assert_valid_indicator()

    asyncio.run(run())


# ---- samples and graph -----------------------------------------------------------------------------------------------


def batch(lens: list[int]) -> areal.SequenceSample:
    data = {
        "packed_input_ids": torch.arange(sum(lens)),
        "packed_logprobs": torch.arange(sum(lens) - len(lens)).float(),
        "rewards": torch.arange(len(lens)).float(),
    }
    return areal.SequenceSample.from_default(lens, [f"s{i}" for i in range(len(lens))], data)


def test_from_default_knows_the_names() -> None:
    one = batch([5, 3])
    assert one.seqlens == {"packed_input_ids": [[5], [3]], "packed_logprobs": [[4], [2]], "rewards": [[1], [1]]}
    with pytest.raises(NotImplementedError):
        areal.SequenceSample.from_default([1], ["a"], {"whatever": torch.zeros(1)})


@pytest.mark.parametrize(("n_mbs", "cap"), [(1, 10**12), (3, 10**12), (2, 12), (8, 10**12)])
def test_micro_batches_can_be_put_back_in_order(n_mbs: int, cap: int) -> None:
    whole = batch([5, 3, 8, 2, 7, 4, 6, 1])
    parts, forward, backward = whole.split(areal.MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=cap))
    assert len(parts) >= n_mbs
    assert all(isinstance(part, areal.SequenceSample) for part in parts)
    joined = areal.SequenceSample.gather(parts)
    assert joined.ids == [whole.ids[at] for at in forward]
    assert joined.reorder(backward.tolist()) == whole
    for key in ("packed_input_ids", "packed_logprobs", "rewards"):
        back = areal.SequenceSample.reorder_output(joined[key], whole.seqlens[key], forward, backward)
        assert torch.equal(back, whole[key])
    with pytest.raises(RuntimeError):
        whole.split(areal.MicroBatchSpec(n_mbs=9))
    with pytest.raises(RuntimeError):
        areal.ffd_allocate([5, 12], 10, 1)


def test_split_with_spec_and_in_place_changes() -> None:
    whole = batch([5, 3, 8])
    parts = whole.split_with_spec(areal.SequenceSplitSpec(sizes=[1, 2]))
    assert [part.bs for part in parts] == [1, 2]
    assert areal.SequenceSample.gather(parts) == whole
    assert areal.SequenceSplitSpec(partitions=[(0, 1), (1, 3)]).sizes == [1, 2]
    for bad in ([(0, 1), (2, 3)], [(0, 0)]):
        with pytest.raises(ValueError, match="contiguous"):
            areal.SequenceSplitSpec(partitions=bad)
    document = json.loads(json.dumps(whole.as_json_compatible()))
    assert areal.SequenceSample.from_json_compatible(document) == whole
    whole.update_(areal.SequenceSample(ids=whole.ids, seqlens={"x": [1, 1, 1]}, data={"x": torch.ones(3)}))
    whole.remap_keys_({"x": "y", "absent": "z"})
    assert whole.keys == {"packed_input_ids", "packed_logprobs", "rewards", "y"}
    assert whole.to_device("cpu") is whole
    with pytest.raises(ValueError, match="ids"):
        whole.update_(batch([1]))


def test_calls_know_their_graph() -> None:
    infer, train = calls()
    with pytest.raises(SchemaError, match="build_graph"):
        _ = infer.is_src
    areal.build_graph([infer, train])
    assert (infer.is_src, infer.is_dst, train.is_src, train.is_dst) == (True, False, False, True)
    assert (infer.children, train.parents, infer.all_successors()) == ([train], [infer], [train])
    assert infer.data_producers == {"b": infer}
    assert train.data_consumers["a"] == [infer, train]
    assert (infer.is_inference(), train.is_train(), train.is_generate()) == (True, True, False)
    assert pickle.loads(pickle.dumps(infer)).children[0].name == "train"


# ---- the stream ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Any:
    puller = areal.ZMQJsonPuller("127.0.0.1", 0, default_timeout_ms=300)
    pusher = areal.ZMQJsonPusher("127.0.0.1", puller.port)
    yield pusher, puller
    for end in (pusher, puller):
        with contextlib.suppress(NotReady):
            end.close(0.2) if end is pusher else end.close()


def test_items_come_in_order(pair: Any) -> None:
    pusher, puller = pair
    for at in range(100):
        pusher.push({"at": at, "list": [1.5, None, "x"]})
    assert [puller.pull(60_000)["at"] for _ in range(100)] == list(range(100))
    one = batch([2, 3])
    pusher.push(one)
    assert puller.pull(60_000) == one


def test_waits_end_with_upstreams_exception(pair: Any) -> None:
    _, puller = pair
    for wait, least, words in ((0, 0.0, "0ms"), (50, 0.04, "50ms"), (None, 0.29, "300ms")):
        start = time.monotonic()
        with pytest.raises(queue.Empty, match=words):
            puller.pull(timeout_ms=wait)
        assert least <= time.monotonic() - start < HANG_S
    assert puller.default_timeout_ms == 300


def test_what_json_lacks_is_a_type_error(pair: Any) -> None:
    pusher, puller = pair
    for bad in (b"bytes", {1, 2}, object()):
        with pytest.raises(TypeError, match="not JSON-serializable"):
            pusher.push(bad)
    pusher.push("after")
    assert puller.pull(60_000) == "after"


def test_pushers_find_their_pullers_by_name(tmp_path: Path) -> None:
    assert areal.grouping(5, 2) == {0: [0, 1, 4], 1: [2, 3]}
    made: list[Any] = []
    maker = threading.Thread(
        target=lambda: made.extend(areal.NameResolvingZmqPusher("e", "t", i, 5, 2, root=tmp_path) for i in range(5))
    )
    maker.start()
    pullers = [areal.NameResolvingZmqPuller("e", "t", i, root=tmp_path) for i in range(2)]
    maker.join(HANG_S)
    for at, pusher in enumerate(made):
        pusher.push(at)
    assert sorted(pullers[0].pull(60_000) for _ in range(3)) == [0, 1, 4]
    assert sorted(pullers[1].pull(60_000) for _ in range(2)) == [2, 3]
    for end in (*made, *pullers):
        end.close()
    with pytest.raises(NotReady):
        areal.NameResolvingZmqPusher("e", "t", 0, 5, 2, root=tmp_path, timeout=0.1)


def test_dataset_drains_holds_back_and_tells_of_its_death() -> None:
    puller = areal.ZMQJsonPuller("127.0.0.1", 0)
    data = areal.PullerStreamDataset(puller, dataset_size=7, queue_size=2)
    pusher = areal.ZMQJsonPusher("127.0.0.1", puller.port, hwm=2)
    assert (len(data), data[0]) == (7, [])
    pushed: list[int] = []

    def push() -> None:
        for at in range(10):
            pusher.push(at)
            pushed.append(at)

    worker = threading.Thread(target=push)
    worker.start()
    time.sleep(0.4)
    assert len(pushed) <= 6, "two in the queue, one held, two not taken, one waiting"
    got: list[int] = []

    def have_eight() -> bool:
        got.extend(data[len(got)])
        return len(got) >= 8

    until(have_eight)
    worker.join(HANG_S)
    pusher.close()
    got += data.close()
    assert got == list(range(10)), "what was acknowledged is not lost on close"

    broken = areal.PullerStreamDataset(areal.ZMQJsonPuller("127.0.0.1", 0), 1)
    broken._puller._puller._is_open = False  # as if somebody closed it under the thread
    broken._thread.join(HANG_S)
    with pytest.raises(RuntimeError, match="thread died"):
        _ = broken[0]
    broken._puller._puller._is_open = True
    broken._puller.close()
