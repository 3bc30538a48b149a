"""sharpwave.compat.areal: upstream's names give upstream's answers, and none of its defects."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw
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


def fields(x: areal.SequenceSample) -> dict[str, Any]:
    return {one.name: getattr(x, one.name) for one in dataclasses.fields(x)}


def test_sample_takes_upstreams_positions_and_is_a_dataclass() -> None:
    keys, shapes, dtypes = {"a"}, {"a": (2,)}, {"a": torch.float32}
    one = areal.SequenceSample(keys, shapes, dtypes, ["x"], {"a": [[3]]}, {"a": torch.ones(3, 2)}, {"m": [1]})
    assert dataclasses.is_dataclass(one)
    assert list(fields(one)) == ["keys", "trailing_shapes", "dtypes", "ids", "seqlens", "data", "metadata"]
    assert dataclasses.replace(one, ids=["y"]).ids == ["y"]
    plain = dataclasses.asdict(one)
    assert (plain["seqlens"], plain["metadata"], plain["dtypes"]) == ({"a": [[3]]}, {"m": [1]}, dtypes)
    plain["metadata"]["m"] = [9]
    assert one.metadata == {"m": [1]}, "asdict() is a copy"
    assert pickle.loads(pickle.dumps(one)) == one


def test_keys_that_differ_are_a_key_error_as_upstream() -> None:
    for given in ({"keys": {"b"}}, {"dtypes": {"b": torch.int64}}, {"trailing_shapes": {}}, {"data": {}}):
        with pytest.raises(KeyError, match="expected the keys"):
            areal.SequenceSample(**{"ids": ["x"], "seqlens": {"a": [[1]]}, **given})  # type: ignore[arg-type]


def test_lengths_may_be_tensors_and_arrays() -> None:
    for lens in ([torch.tensor([2, 1]), torch.tensor([3])], [[torch.tensor(2), np.int32(1)], np.array([3])]):
        one = areal.SequenceSample(ids=["x", "y"], seqlens={"a": lens}, data={"a": torch.arange(6)})
        assert one.seqlens == {"a": [[2, 1], [3]]}
        assert all(type(n) is int for row in one.seqlens["a"] for n in row)
    for bad in (torch.tensor([1.5]), torch.tensor([True]), [torch.tensor(-1)]):
        with pytest.raises(SchemaError, match="whole numbers"):
            areal.SequenceSample(ids=["x"], seqlens={"a": [bad]})


def test_a_sample_may_have_no_data_at_all() -> None:
    none = areal.SequenceSample(ids=[], seqlens={"a": []}, data={"a": torch.zeros(0)}, metadata={"m": []})
    assert (none.bs, none.unpack(), none.seqlens, none.metadata) == (0, [], {"a": []}, {"m": []})
    assert areal.SequenceSample.from_json_compatible(json.loads(json.dumps(none.as_json_compatible()))) == none
    with pytest.raises(SchemaError, match="at least one"):
        sw.SequenceSample([], {"a": []})


def test_data_and_metadata_can_be_set() -> None:
    one = batch([3, 2])
    one.data = {key: values.double() for key, values in (one.data or {}).items()}
    assert one.dtypes["rewards"] == torch.float64
    one.metadata = {"score": [1, 2]}
    assert one.unpack()[1].metadata == {"score": [2]}
    for wrong in ({"rewards": torch.ones(2)}, {key: torch.ones(1) for key in one.keys}):
        with pytest.raises(SchemaError):
            one.data = wrong
    with pytest.raises(SchemaError, match="a list of 2"):
        one.metadata = {"score": [1]}
    assert (one.dtypes["rewards"], one.metadata) == (torch.float64, {"score": [1, 2]}), "nothing has changed"
    one.data = None
    assert (one.data, one.metadata, one == one.meta()) == (None, {"score": [1, 2]}, True)
    assert one.cpu() is one


def test_greedy_keys_have_one_value_each() -> None:
    names = ("greedy_rewards", "greedy_seq_no_eos_mask")
    one = areal.SequenceSample.from_default([[4], [2]], ["a", "b"], {name: torch.zeros(2) for name in names})
    assert one.seqlens == {name: [[1], [1]] for name in names}
    for wrong in ([[4, 1], [2]], [4.0, 2], [True, 2]):
        with pytest.raises(SchemaError, match="one length a datum"):
            areal.SequenceSample.from_default(wrong, ["a", "b"], {"rewards": torch.zeros(2)})


def test_json_names_its_keys() -> None:
    document = batch([2]).as_json_compatible()
    assert sorted(document["keys"]) == ["packed_input_ids", "packed_logprobs", "rewards"]
    with pytest.raises(KeyError, match="from_json_compatible"):
        areal.SequenceSample.from_json_compatible({**document, "keys": ["rewards"]})


def test_split_goes_by_the_key_with_the_most_tokens_or_by_your_lengths() -> None:
    whole = batch([5, 3, 8, 2])
    assert whole._get_split_key() == "packed_input_ids"
    parts, forward, backward = whole.split_with_lengths(areal.MicroBatchSpec(n_mbs=2), lens=[1, 1, 1, 1])
    assert [part.bs for part in parts] == [2, 2]
    assert [one for part in parts for one in part.ids] == [whole.ids[at] for at in forward]
    assert areal.SequenceSample.reorder(areal.SequenceSample.gather(parts), backward) == whole

    @dataclass
    class Theirs:  # upstream's own class of specifications
        n_mbs: int = 2
        max_tokens_per_mb: int = 10

    assert [sum(map(sum, part.seqlens["packed_input_ids"])) for part in whole.split(Theirs())[0]] == [8, 10]
    with pytest.raises(SchemaError, match="expected 4, one a datum"):
        whole.split_with_lengths(Theirs(), [1, 1])
    with pytest.raises(RuntimeError):
        whole.split_with_lengths(Theirs(n_mbs=5), [1, 1, 1, 1])


def test_outputs_are_reordered_by_upstreams_argument_names() -> None:
    back = areal.SequenceSample.reorder_output(
        torch.arange(6),
        expected_seqlens=[[2], [1], [3]],
        forward_indices=[2, 0, 1],
        backward_indices=np.array([1, 2, 0]),
    )
    assert back.tolist() == [3, 4, 5, 0, 1, 2]


def test_one_seed_shuffles_one_way() -> None:
    whole = batch([5, 3, 8, 2, 7, 4])
    one, same = (areal.SequenceSample.shuffled(whole, seed=3) for _ in range(2))
    assert one == same
    assert sorted(one.ids) == whole.ids != one.ids
    order = np.arange(6)
    np.random.RandomState(3).shuffle(order)
    assert one.ids == [whole.ids[at] for at in order], "the order that upstream makes of this seed"
    assert {tuple(areal.SequenceSample.shuffled(whole).ids) for _ in range(30)} != {tuple(whole.ids)}


def test_checks_stay_on_where_upstream_leaves_them_out() -> None:
    with areal.SequenceSample.disable_validation(), pytest.raises(SchemaError):
        areal.SequenceSample(ids=["x", "x"], seqlens={})


RANKS = """
import sys
import torch
import torch.distributed as dist
from sharpwave.compat import areal

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
lens = [[9, 9, 9, 9], [2, 2, 2, 2]][rank]
one = areal.SequenceSample.from_default(lens, list("abcd"), {"input_ids": torch.arange(sum(lens))})
print(len(one.synced_data_parallel_split(areal.MicroBatchSpec(max_tokens_per_mb=10))))
few = one if rank else areal.SequenceSample.gather(one.unpack()[:1])
try:
    few.synced_data_parallel_split(areal.MicroBatchSpec(n_mbs=2))
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_ranks_agree_on_the_count_of_micro_batches(tmp_path: Path) -> None:
    assert len(batch([4, 4]).synced_data_parallel_split(areal.MicroBatchSpec(n_mbs=2))) == 2, "one process, one rank"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert [lines[0] for lines in said] == ["4", "4"], "the second rank alone would make one"
    assert "at least 2 items" in said[0][1]
    assert "another rank" in said[1][1]


def test_calls_have_upstreams_positions_names_and_hashes() -> None:
    impl = object()
    call = areal.MFCDef(
        "gen", 4, areal.ModelInterfaceType.GENERATE, impl, "actor", ["p"], {"p": "q"}, ["r"], {"r": "s"}
    )
    assert (call.input_keys, call.input_key_remap) == (("p",), {"p": "q"})
    assert (call.output_keys, call.output_key_remap) == (("r",), {"r": "s"})
    assert (call.model_name, call.role) == (areal.ModelName("actor", 0), "actor")
    assert (repr(call), hash(call)) == ("MFCDef[gen]", hash("gen"))
    assert call.mb_spec == areal.MicroBatchSpec()
    assert {call: 1}[call] == 1


def test_names_and_interfaces_equal_upstreams_of_the_same_values() -> None:
    theirs = dataclasses.make_dataclass("ModelName", ["role", "replica_id"], frozen=True, order=True)
    assert areal.ModelName("actor", 1) == theirs("actor", 1)
    assert {theirs("actor", 1): "found"}[areal.ModelName("actor", 1)] == "found"
    assert areal.ModelName("actor", 1) != theirs("actor", 0)
    assert areal.ModelName("actor", 1) != ("actor", 1)
    mixed = [theirs("b", 0), areal.ModelName("a", 1), theirs("a", 0)]
    assert [(one.role, one.replica_id) for one in sorted(mixed)] == [("a", 0), ("a", 1), ("b", 0)]
    kinds = enum.Enum("ModelInterfaceType", {"TRAIN_STEP": "train_step", "GENERATE": "generate"})
    assert kinds["TRAIN_STEP"] == areal.ModelInterfaceType.TRAIN_STEP != kinds["GENERATE"]
    assert areal.ModelInterfaceType.TRAIN_STEP in {kinds["TRAIN_STEP"]}
    assert areal.ModelInterfaceType.TRAIN_STEP != "train_step"


def test_hooks_are_kept_where_they_belong() -> None:
    call = areal.MFCDef("train", 1)
    give, offload = areal.ParamReallocHook(target=areal.ModelName("actor", 0)), areal.OffloadHook()
    call.add_pre_hook(give)
    call.add_post_hook(offload)
    assert (call._pre_hooks, call._post_hooks, give.eta) == ([give], [offload], 1.0)
    both = areal.ParamReallocHook(areal.ModelName("a", 0), areal.ModelName("b", 0))
    for add, wrong in ((call.add_pre_hook, offload), (call.add_pre_hook, both), (call.add_post_hook, "offload")):
        with pytest.raises(ValueError, match="hook"):
            add(wrong)
    assert (call._pre_hooks, call._post_hooks) == ([give], [offload])


def test_graph_is_a_networkx_graph_and_is_drawn(tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx")
    pytest.importorskip("matplotlib")
    gen = areal.MFCDef("gen", 2, model_name="actor", input_keys=("p",), output_keys=("ids", "logp"))
    rew = areal.MFCDef("rew", 2, model_name="reward", input_keys=("ids",), output_keys=("r",))
    train = areal.MFCDef("train", 2, model_name=areal.ModelName("actor", 1), input_keys=("ids", "logp", "r"))
    graph = areal.build_graph([gen, rew, train], verbose=True, graph_path=str(tmp_path / "flow.png"))
    assert isinstance(graph, networkx.DiGraph)
    assert (tmp_path / "flow.png").stat().st_size > 1000
    assert [list(level) for level in networkx.topological_generations(graph)] == [["gen"], ["rew"], ["train"]]
    assert graph.edges["gen", "train"]["keys"] == ["ids", "logp"]
    assert graph.nodes["rew"]["object"] is rew
    assert gen.data_producers == {"ids": gen.model_name, "logp": gen.model_name, "r": rew.model_name}
    assert gen.data_consumers["ids"] == [rew.model_name, train.model_name]
    assert (gen.is_dst_of_model_role, rew.is_dst_of_model_role, train.is_dst_of_model_role) == (False, True, True)
    copy = pickle.loads(pickle.dumps(gen))
    assert (copy == gen, [one.name for one in copy.all_successors()]) == (True, ["rew", "train"])
    loop = areal.MFCDef("loop", 1, input_keys=("r",), output_keys=("p",))
    with pytest.raises(SchemaError, match="circle"):
        areal.build_graph([gen, rew, loop])
    assert gen._G is graph, "a graph that is refused changes no call"


def test_only_the_graph_needs_networkx() -> None:
    code = (
        "import sys; sys.modules['networkx'] = None\n"
        "from sharpwave.compat import areal\n"
        "call = areal.MFCDef('train', 1, input_keys=('a',))\n"
        "areal.AsyncIOSequenceBuffer([call], 4)\n"
        "try: areal.build_graph([call])\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install networkx" in done.stdout


def test_the_lock_is_a_condition_that_every_change_notifies() -> None:
    async def run() -> None:
        call = areal.MFCDef("train", 2, input_keys=("a", "b"))
        buffer = areal.AsyncIOSequenceBuffer([call], max_size=10)
        assert isinstance(buffer.lock, asyncio.Condition)

        async def reach(size: int) -> None:
            async with buffer.lock:
                await asyncio.wait_for(buffer.lock.wait_for(lambda: buffer.size == size), 10)

        full = asyncio.create_task(reach(2))
        await asyncio.sleep(0)
        slots = await buffer.put_batch([sample(0), sample(1)])
        await full
        getter, empty = asyncio.create_task(buffer.get_batch_for_rpc(call)), asyncio.create_task(reach(0))
        await asyncio.sleep(0)
        await buffer.amend_batch(slots, [sample(0, "b"), sample(1, "b")])
        assert (await getter)[1].ids == ["0", "1"]
        await empty

    asyncio.run(run())


def test_a_get_that_is_cancelled_at_the_lock_takes_nothing() -> None:
    async def run() -> None:
        call = areal.MFCDef("train", 1, input_keys=("a",))
        buffer = areal.AsyncIOSequenceBuffer([call], max_size=10)
        await buffer.put_batch([sample(0)])
        async with buffer.lock:
            getter = asyncio.create_task(buffer.get_batch_for_rpc(call))
            for _ in range(5):
                await asyncio.sleep(0)
            getter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getter
        assert (await buffer.get_batch_for_rpc(call))[1].ids == ["0"]

    asyncio.run(run())


def test_projects_are_reached_from_the_package() -> None:
    code = (
        "import sys, sharpwave as sw\n"
        "assert 'sharpwave.compat.areal' not in sys.modules\n"
        "print(sw.compat.areal.SequenceSample.__module__, sorted({'apexrl', 'areal', 'rlinf'} - set(dir(sw.compat))))\n"
        "sw.compat.nothing\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "sharpwave.compat.areal.data []"
    assert "no attribute 'nothing'; it has apexrl, areal, replay_buffer, rlinf" in done.stderr


def test_calls_know_their_graph() -> None:
    infer, train = calls()
    with pytest.raises(SchemaError, match="build_graph"):
        _ = infer.is_src
    areal.build_graph([infer, train])
    assert (infer.is_src, infer.is_dst, train.is_src, train.is_dst) == (True, False, False, True)
    assert (infer.children, train.parents, infer.all_successors()) == ([train], [infer], [train])
    assert infer.data_producers == {"b": infer.model_name}
    assert train.data_consumers["a"] == [infer.model_name, train.model_name]
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


@dataclass
class Args:
    """What AReaL's configuration says of names."""

    experiment_name: str = "e"
    trial_name: str = "t"


@dataclass
class Utility:
    dp_rank: int = 0
    world_size: int = 1


def test_pushers_find_their_pullers_by_name(tmp_path: Path) -> None:
    assert areal.grouping(5, 2) == {0: [0, 1, 4], 1: [2, 3]}
    made: list[Any] = []
    maker = threading.Thread(
        target=lambda: made.extend(areal.NameResolvingZmqPusher("e", "t", i, 5, 2, root=tmp_path) for i in range(5))
    )
    maker.start()
    pullers = [areal.NameResolvingZmqPuller(Args(), i, root=tmp_path) for i in range(2)]
    maker.join(HANG_S)
    for at, pusher in enumerate(made):
        pusher.push(at)
    assert sorted(pullers[0].pull(60_000) for _ in range(3)) == [0, 1, 4]
    assert sorted(pullers[1].pull(60_000) for _ in range(2)) == [2, 3]
    for end in made:
        end.close()
    with areal.NameResolvingZmqPusher("e", "t", 2, 4, root=tmp_path) as found:  # it counts the pullers that are there
        assert found.port == pullers[1].port
    for end in pullers:
        end.close()
    with pytest.raises(NotReady, match=r"has the pullers \[\]"):
        areal.NameResolvingZmqPusher("e", "t", 0, 5, root=tmp_path, timeout=0.1)
    with pytest.raises(SchemaError, match="pusher_index"):
        areal.NameResolvingZmqPusher("e", "t", 5, 5, root=tmp_path)


def test_the_folder_of_names_may_come_from_the_environment(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SHARPWAVE_STREAM_ROOT", str(tmp_path))
    with areal.NameResolvingZmqPuller(Args("one", "two"), 0) as puller:
        assert (tmp_path / "one" / "two" / "puller0").read_text() == f"127.0.0.1:{puller.port}"
        with areal.NameResolvingZmqPusher("one", "two", 0, 1) as pusher:
            pusher.push(5)
            assert puller.pull(60_000) == 5
    assert not (tmp_path / "one" / "two" / "puller0").exists()


def test_a_context_that_fails_raises_its_own_exception() -> None:
    def fail() -> None:
        with areal.ZMQJsonPusher("127.0.0.1", 1) as pusher:
            pusher.push("never taken")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_dataset_drains_and_holds_back(tmp_path: Path) -> None:
    data = areal.PullerStreamDataset(Utility(), Args(), [range(1), range(1)], root=tmp_path)
    pusher = areal.NameResolvingZmqPusher("e", "t", 0, 1, root=tmp_path, hwm=2)
    assert (len(data), data[0], data.data_queue.empty()) == (2, [], True)
    pushed: list[int] = []

    def push() -> None:
        for at in range(10):
            one = areal.SequenceSample(ids=[at], seqlens={"a": [1]}, data={"a": torch.tensor([at])})
            pusher.push([one.as_json_compatible()])
            pushed.append(at)

    worker = threading.Thread(target=push)
    worker.start()
    time.sleep(0.4)
    assert len(pushed) <= 6, "two in the queue, one held, two not taken, one waiting"
    got: list[areal.SequenceSample] = []

    def have_eight() -> bool:
        got.extend(data[len(got)])
        return len(got) >= 8

    until(have_eight)
    worker.join(HANG_S)
    pusher.close()
    got += data.close()
    assert all(type(one) is areal.SequenceSample for one in got)
    assert [one.ids for one in got] == [[str(at)] for at in range(10)], "what was acknowledged is not lost on close"
    with pytest.raises(RuntimeError, match="it was stopped"):
        _ = data[0]


def test_dataset_tells_of_a_message_that_is_no_sample(tmp_path: Path) -> None:
    data = areal.PullerStreamDataset(Utility(), Args(), [range(4)], root=tmp_path)
    with areal.NameResolvingZmqPusher("e", "t", 0, 1, root=tmp_path) as pusher:
        pusher.push([{"ids": ["a"]}])
    data.worker_thread.join(HANG_S)
    with pytest.raises(RuntimeError, match=r"not alive: SchemaError.*from_json"):
        _ = data[0]
    assert not (tmp_path / "e" / "t" / "puller0").exists(), "pushers do not wait for it"


def test_descriptions_of_data_sets_need_areal(tmp_path: Path) -> None:
    @dataclass
    class Described:
        type_: str = "prompt"

    with pytest.raises(ImportError, match="realhf is not installed"):
        areal.PullerStreamDataset(Utility(), Args(), [Described()], root=tmp_path)
