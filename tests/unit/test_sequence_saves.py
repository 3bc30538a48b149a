"""A SequenceBuffer that is saved, opened, cleared, flushed and closed: the verbs that all buffers share."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.files import Entry, read_journal, write_journal
from sharpwave.sequences.history import BASE, KIND, OPTIONS, PUT, pack_samples

FLOW = sw.Dataflow(
    [
        sw.Consumer("ref", {"a"}, {"b"}, batch_size=2),
        sw.Consumer("train", {"a", "b"}, batch_size=2, reuse=3),
    ]
)


def sample(names: str, key: str = "a", value: int = 0) -> sw.SequenceSample:
    count = len(names)
    data = np.arange(2 * count) + value
    return sw.SequenceSample(list(names), {key: [2] * count}, {key: data}, metadata={"task": list(names)})


def fill(seq: sw.SequenceBuffer) -> None:
    """Samples in every state: new, with further keys, used once, leased, used up."""
    seq.put(sample("abcdef"), version=3)
    seq.set_version(4)
    for _ in range(2):
        with seq.get("ref", timeout=0) as lease:
            seq.amend(lease.handles, sample("".join(lease.batch.ids), "b", 7))
    for _ in range(4):
        seq.get("train", timeout=0).ack()  # a and b, c and d, a and b, c and d
    seq.get("train", timeout=0).ack()  # a and b leave
    seq.get("train", timeout=0)  # c and d are leased
    assert seq.ids() == ["c", "d", "e", "f"]


def state(seq: sw.SequenceBuffer) -> dict[str, Any]:
    """All that a user can see of a buffer; its leases are taken as given back."""
    told = seq.stats()
    seen: dict[str, Any] = {name: told[name] for name in ("size", "capacity", "tokens", "data_bytes", "staleness")}
    seen |= {"ids": seq.ids(), "used": seq.used_ids, "version": seq.version, "flow": list(seq.flow)}
    seen["done"] = {name: one["done"] for name, one in told["consumers"].items()}
    batches = []
    for consumer in seq.flow:
        while True:
            try:
                lease = seq.get(consumer.name, batch_size=1, timeout=0)
            except NotReady:
                break
            values = {key: lease.batch[key].tolist() for key in sorted(lease.batch.keys)}
            batches.append((consumer.name, lease.batch.ids, lease.versions, lease.handles.tolist(), values))
    return {**seen, "batches": batches}


@pytest.mark.parametrize("journal", [True, False])
def test_what_is_saved_is_opened_as_a_copy_and_in_place(tmp_path: Path, journal: bool) -> None:
    options: dict[str, Any] = {"journal": tmp_path / "journal"} if journal else {}
    seq = sw.SequenceBuffer(50, flow=FLOW, max_staleness=9, epoch_size=1000, max_tokens=999, **options)
    fill(seq)
    seq.save(tmp_path / "saved")
    seq.close()
    copy = sw.open(tmp_path / "saved")
    in_place = sw.open(f"file://{tmp_path / 'saved'}")
    assert type(copy) is type(in_place) is sw.SequenceBuffer
    seen = state(copy)
    assert seen == state(in_place)
    assert (seen["ids"], seen["used"], seen["version"], seen["capacity"]) == (list("cdef"), ["a", "b"], 4, 50)
    assert seen["done"] == {"ref": 2, "train": 0}
    assert (copy.max_tokens, copy.max_staleness, seen["flow"]) == (999, 9, list(FLOW))
    ready = [batch for batch in seen["batches"] if batch[0] == "train"]
    assert [batch[1] for batch in ready] == [["c"], ["d"]]
    copy.release("nobody")
    handle = copy.put(sample("g"), version=4)[0]
    assert handle == in_place.put(sample("g"), version=4)[0] == 6, "handles go on"
    copy.close()
    in_place.close()
    again = sw.open(f"file://{tmp_path / 'saved'}")
    assert again.ids() == list("cdefg"), "in place it is a journal; a copy leaves the file alone"


def test_a_third_use_of_a_saved_sample_is_its_last(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(50, flow=FLOW)
    fill(seq)
    seq.save(tmp_path / "saved")
    copy = sw.open(tmp_path / "saved")
    copy.get("train", timeout=0).ack()
    assert (copy.ids(), copy.used_ids) == (["e", "f"], ["a", "b", "c", "d"])


def test_a_journal_is_opened_in_place_and_as_a_copy(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(50, flow=FLOW, journal=tmp_path / "journal", sync=True)
    fill(seq)
    copy = sw.open(tmp_path / "journal")  # while its owner has it open
    with pytest.raises(StorageError, match=r"open\(\): .*has it open"):
        sw.open(f"file://{tmp_path / 'journal'}")
    seq.close()
    again = sw.open(f"file://{tmp_path / 'journal'}")
    assert state(copy) == state(again)
    assert again._store.journal is not None
    assert again._store.journal.sync, "the options are the journal's"
    assert "in memory" in repr(copy)


def test_births_and_many_samples_are_saved(tmp_path: Path) -> None:
    flow = sw.Dataflow([sw.Consumer("train", {"a"})])
    seq = sw.SequenceBuffer(5000, flow=flow)
    one = sw.SequenceSample.gather(
        [sw.SequenceSample([str(at)], {"a": [1]}, {"a": np.array([at])}) for at in range(2500)]
    )
    seq.put(one, births=list(range(2500, 0, -1)))
    seq.save(tmp_path / "saved")
    copy = sw.open(tmp_path / "saved")
    assert copy.ids() == seq.ids()
    assert copy.get("train", batch_size=3, timeout=0).batch.ids == ["2499", "2498", "2497"]
    with pytest.raises(SchemaError, match="do not compare"):
        copy.put(sample("x"))


def test_a_save_waits_for_no_one_and_an_awaited_one_does_not_stop_the_loop(tmp_path: Path) -> None:
    async def run() -> int:
        seq = sw.SequenceBuffer(50, flow=FLOW, journal=tmp_path / "journal")
        await seq.put_async(sample("ab"))
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.ensure_future(count())
        await seq.save_async(tmp_path / "saved")
        await seq.flush_async()
        counting.cancel()
        await seq.clear_async()
        assert len(seq) == 0
        seq.close()
        return turns

    assert asyncio.run(run()) > 0
    assert sw.open(tmp_path / "saved").ids() == ["a", "b"]


@pytest.mark.parametrize("journal", [True, False])
def test_a_save_while_others_put_and_acknowledge_is_one_instant(tmp_path: Path, journal: bool) -> None:
    options: dict[str, Any] = {"journal": tmp_path / "journal"} if journal else {}
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=3)])
    seq = sw.SequenceBuffer(30, flow=flow, **options)

    def produce() -> None:
        with suppress(ClosedError):
            for at in range(10**9):
                seq.put(three(at))

    def three(at: int) -> list[sw.SequenceSample]:
        return [sw.SequenceSample([f"{at}{end}"], {"a": [1]}, {"a": np.array([at])}) for end in "abc"]

    def consume() -> None:
        with suppress(ClosedError):
            while True:
                seq.get("train").ack()

    workers = [threading.Thread(target=work) for work in (produce, consume)]
    for worker in workers:
        worker.start()
    for _ in range(20):
        seq.save(tmp_path / "saved")
        copy = sw.open(tmp_path / "saved")
        names = copy.used_ids + copy.ids()
        assert names == [f"{at}{end}" for at in range(len(names) // 3) for end in "abc"]
    seq.close()
    for worker in workers:
        worker.join(HANG_S)
    assert names, "something was put"


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(50, flow=FLOW, journal=tmp_path / "journal")
    seq.put(sample("ab"))
    seq.save(tmp_path / "saved")
    before = (tmp_path / "saved").read_bytes()
    bad = sw.SequenceBuffer(5, flow=FLOW)
    bad.put(sw.SequenceSample(["c"], {"a": [1]}, {"a": np.ones(1)}, metadata={"x": [object()]}))
    with pytest.raises(SchemaError, match="metadata: expected what JSON holds"):
        bad.save(tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["journal", "saved"], "nothing is left beside it"
    with pytest.raises(StorageError, match="own journal"):
        seq.save(tmp_path / "journal")
    with pytest.raises(StorageError, match="leave out the 'file://'"):
        seq.save(f"file://{tmp_path / 'saved'}")
    with pytest.raises(StorageError, match=r"save\(\): cannot make the folder .*Not a directory"):
        seq.save(tmp_path / "saved" / "no" / "folder")


def test_options_of_open_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(50, flow=FLOW)
    seq.save(tmp_path / "saved")
    wrong: list[dict[str, Any]] = [{"view": sw.Transitions()}, {"device": "cpu"}, {"verify": False}]
    for options in wrong:
        with pytest.raises(SchemaError, match=f"{next(iter(options))}: .*is a SequenceBuffer"):
            sw.open(tmp_path / "saved", **options)


# ---- damaged and hostile files -------------------------------------------------------------------------------------


def test_every_damaged_byte_of_a_saved_file_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(50, flow=FLOW)
    fill(seq)
    seq.save(tmp_path / "saved")
    raw = (tmp_path / "saved").read_bytes()
    expected = state(sw.open(tmp_path / "saved"))
    refused = 0
    for at in range(0, len(raw), 1 if os.environ.get("SHARPWAVE_SOAK") == "1" else 7):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            found = state(sw.open(tmp_path / "damaged"))
        except StorageError:
            refused += 1
        else:
            assert found == expected, f"byte {at}"
    assert refused > len(raw) // 10
    for size in range(0, len(raw), 97):
        (tmp_path / "damaged").write_bytes(raw[:size])
        with pytest.raises(StorageError):
            sw.open(tmp_path / "damaged")


def test_a_damaged_saved_file_is_recovered_with_the_loss_told(tmp_path: Path) -> None:
    flow = sw.Dataflow([sw.Consumer("train", {"a"})])
    seq = sw.SequenceBuffer(5000, flow=flow)
    seq.put([sw.SequenceSample([str(at)], {"a": [1]}, {"a": np.array([at])}) for at in range(2000)])
    seq.save(tmp_path / "saved")
    raw = bytearray((tmp_path / "saved").read_bytes())
    raw[len(raw) // 4] ^= 1
    (tmp_path / "saved").write_bytes(raw)
    for address in (tmp_path / "saved", f"file://{tmp_path / 'saved'}"):
        with pytest.raises(StorageError, match=r"open\(\): .*damaged"):
            sw.open(address)
        with pytest.warns(UserWarning, match=r"open\(\): .*1 records .*are lost") as caught:
            found = sw.open(address, recover=True)
        assert caught[0].filename == __file__
        assert found.ids() == [str(at) for at in range(1024, 2000)]
        assert (found.stats()["lost_records"], found.stats()["lost_bytes"] > 0) == (1, True)
        found.close()


def test_a_journal_that_lost_its_only_record_is_recovered_for_good(tmp_path: Path) -> None:
    sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal").close()
    raw = bytearray((tmp_path / "journal").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "journal").write_bytes(raw)
    with pytest.warns(UserWarning, match="1 records .*are lost"):
        sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", recover=True).close()
    assert sw.open(tmp_path / "journal").capacity == 10
    sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal").close()


def options_with(**changed: Any) -> dict[str, Any]:
    seq = sw.SequenceBuffer(50, flow=FLOW)
    return {**seq._store.options.to_json(), **changed}


CONSUMER = options_with()["flow"][0]


@pytest.mark.parametrize(
    "head",
    [
        {},
        [],
        options_with(capacity=0),
        options_with(capacity=2**70),
        options_with(capacity=True),
        options_with(capacity="50"),
        options_with(capacity=None),
        options_with(max_tokens=-1),
        options_with(max_bytes=1.5),
        options_with(max_staleness="x"),
        options_with(stale="burn"),
        options_with(lease_timeout=float("nan")),
        options_with(watchdog_timeout=-1),
        options_with(duplicate_ids=1),
        options_with(sync="yes"),
        options_with(epoch_size=0),
        options_with(more=1),
        options_with(flow=[]),
        options_with(flow={}),
        options_with(flow=[3]),
        options_with(flow=[CONSUMER, CONSUMER]),
        options_with(flow=[{**CONSUMER, "name": 3}]),
        options_with(flow=[{**CONSUMER, "inputs": "a"}]),
        options_with(flow=[{**CONSUMER, "inputs": [3]}]),
        options_with(flow=[{**CONSUMER, "batch_size": 10**30}]),
        options_with(flow=[{**CONSUMER, "reuse": 0}]),
        options_with(flow=[{**CONSUMER, "window": 1}]),
        options_with(flow=[{**CONSUMER, "group_timeout": 1}]),
        options_with(flow=[{**CONSUMER, "group_size": 3}]),
        options_with(flow=[{**CONSUMER, "more": 3}]),
    ],
)
def test_options_that_no_buffer_wrote_are_a_storage_error(tmp_path: Path, head: Any) -> None:
    write_journal(tmp_path / "saved", KIND, [Entry(OPTIONS, head)])
    for address in (tmp_path / "saved", f"file://{tmp_path / 'saved'}"):
        with pytest.raises(StorageError, match=r"open\(\): .*the record at byte 128"):
            sw.open(address)
    with pytest.raises(StorageError, match=r"SequenceBuffer\(\): journal: .*the record at byte 128"):
        sw.SequenceBuffer(50, flow=FLOW, journal=tmp_path / "saved")


@pytest.mark.parametrize(
    "head",
    [
        {"uses": {"train": [1]}},
        {"uses": {"train": [-1, 0]}},
        {"uses": {"train": [0.5, 0]}},
        {"uses": {"train": 3}},
        {"uses": [3]},
        {"uses": {"strange": [1, 1]}},
        {"serials": [0, 0]},
        {"versions": [0]},
        {"births": [0, 1]},
    ],
)
def test_samples_that_no_buffer_wrote_are_a_storage_error(tmp_path: Path, head: Any) -> None:
    about = {"serials": [0, 1], "births": None, "versions": [0, 0], "uses": {"train": [1, 0]}}
    base = {"used": [], "trained": 0, "version": 0, "next": 2}
    parts = sample("ab").unpack()
    first = [Entry(OPTIONS, options_with()), Entry(BASE, base)]
    write_journal(tmp_path / "saved", KIND, [*first, Entry(PUT, about, pack_samples(parts))])
    assert sw.open(tmp_path / "saved").ids() == ["a", "b"]
    write_journal(tmp_path / "saved", KIND, [*first, Entry(PUT, {**about, **head}, pack_samples(parts))])
    with pytest.raises(StorageError, match=r"open\(\): "):
        sw.open(tmp_path / "saved")


def test_a_journal_without_options_and_one_of_another_kind_are_refused_by_name(tmp_path: Path) -> None:
    write_journal(tmp_path / "old", KIND, [Entry(BASE, {"used": [], "trained": 0, "version": 3, "next": 0})])
    for address in (tmp_path / "old", f"file://{tmp_path / 'old'}"):
        with pytest.raises(StorageError, match=r"options of a SequenceBuffer .*journal=\.\.\."):
            sw.open(address)
    sw.SequenceBuffer(7, flow=FLOW, journal=tmp_path / "old").close()  # which writes them
    again = sw.open(tmp_path / "old")
    assert (again.capacity, again.version) == (7, 3)
    write_journal(tmp_path / "other", "fruit", [])
    with pytest.raises(StorageError, match="expected a journal of sequences, got one of 'fruit'"):
        sw.open(tmp_path / "other")
    write_journal(tmp_path / "twice", KIND, [Entry(OPTIONS, options_with()), Entry(OPTIONS, options_with())])
    with pytest.raises(StorageError, match="first record only"):
        sw.open(tmp_path / "twice")


def test_options_given_to_the_constructor_replace_those_of_the_journal(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")
    seq.put(sample("abcd"))
    seq.checkpoint("one")
    seq.close()
    before = (tmp_path / "journal").stat().st_ino
    sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal").close()
    assert (tmp_path / "journal").stat().st_ino == before, "the same options: nothing is rewritten"
    sw.SequenceBuffer(20, flow=FLOW, journal=tmp_path / "journal").close()
    records = list(read_journal(tmp_path / "journal", KIND))
    assert [record.kind for record in records].count(OPTIONS) == 1
    assert json.loads(records[0].head)["capacity"] == 20
    assert (sw.open(tmp_path / "journal").capacity, sw.open(tmp_path / "journal").ids()) == (20, list("abcd"))
    seq = sw.SequenceBuffer(20, flow=FLOW, journal=tmp_path / "journal", resume="one")
    assert seq.ids() == list("abcd")
    seq.close()
    other = sw.Dataflow([sw.Consumer("else", {"a"})])
    sw.SequenceBuffer(20, flow=other, journal=tmp_path / "journal").close()
    assert [one.name for one in sw.open(tmp_path / "journal").flow] == ["else"]


@pytest.mark.parametrize("group", [[1], (1, 2), {"x": 1}])
def test_a_group_that_is_no_text_or_number_is_refused_and_changes_nothing(tmp_path: Path, group: Any) -> None:
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=2, group_size=2)])
    seq = sw.SequenceBuffer(4, flow=flow, journal=tmp_path / "journal")
    one = sw.SequenceSample(["a"], {"a": [1]}, {"a": np.ones(1)}, metadata={"group": [group]})
    with pytest.raises(SchemaError, match="group of 'a': expected text or a number"):
        seq.put(one)
    assert seq.ids() == []
    seq.close()
    base = {"used": [], "trained": 0, "version": 0, "next": 1}
    about = {"serials": [0], "births": None, "versions": [0]}
    first = [Entry(OPTIONS, seq._store.options.to_json()), Entry(BASE, base)]
    write_journal(tmp_path / "hostile", KIND, [*first, Entry(PUT, about, pack_samples([one]))])
    with pytest.raises(StorageError, match="does not fit this buffer"):
        sw.open(tmp_path / "hostile")


# ---- clear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", [True, False])
def test_clear_drops_samples_ends_leases_and_lets_waiting_puts_go_on(tmp_path: Path, journal: bool) -> None:
    options: dict[str, Any] = {"journal": tmp_path / "journal"} if journal else {}
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=2, window=4), sw.Consumer("log", {"a"})])
    seq = sw.SequenceBuffer(4, flow=flow, lease_timeout=1000, **options)
    handles = seq.put(sample("abcd"))
    lease, other, third = (seq.get(name, timeout=0) for name in ("train", "train", "log"))
    waiting = threading.Thread(target=lambda: seq.put(sample("efgh")))
    waiting.start()
    deadline = time.monotonic() + HANG_S
    while not seq.stats()["waiting_puts"]:
        assert time.monotonic() < deadline
    seq.clear()
    waiting.join(HANG_S)
    assert seq.ids() == list("efgh")
    with pytest.raises(StaleHandle, match="cleared"):
        lease.ack()
    with pytest.raises(StaleHandle, match="cleared"):
        other.renew()
    with pytest.raises(StaleHandle, match="cleared"):
        seq.amend(handles[:1], sample("a", "b"))
    third.release()
    told = seq.stats()
    assert (told["cleared"], told["added"], told["accepted"], told["leases"], told["given_back"]) == (4, 8, 4, 0, 0)
    assert seq.get("train", timeout=0).batch.ids == ["e", "f"]
    assert (seq.used_ids, handles[0] in seq) == ([], False)
    seq.close()
    if journal:
        assert sw.open(tmp_path / "journal").ids() == list("efgh")


def test_a_cleared_buffer_takes_other_shapes_and_births() -> None:
    seq = sw.SequenceBuffer(4, flow=FLOW)
    seq.put(sample("a"))
    seq.clear()
    seq.put(sw.SequenceSample(["a"], {"a": [1]}, {"a": np.zeros((1, 3))}), births=[5])
    assert seq.ids() == ["a"]


def test_resuming_does_not_bring_back_what_was_cleared_and_used_ids_survive_a_rewrite(
    tmp_path: Path, monkeypatch: Any
) -> None:
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=2)])
    seq = sw.SequenceBuffer(10, flow=flow, journal=tmp_path / "journal")
    seq.put(sample("abcd"))
    seq.checkpoint("one")
    seq.get("train", timeout=0).ack()
    seq.clear()
    seq.put(sample("ef"))
    monkeypatch.setattr("sharpwave.sequences.store._SLACK", 0)
    monkeypatch.setattr("sharpwave.sequences.store.Store.is_wasteful", lambda *_: True)
    seq.checkpoint("two")  # rewrites the journal
    seq.close()
    copy = sw.open(tmp_path / "journal")
    assert (copy.ids(), copy.used_ids) == (["e", "f"], ["a", "b"])
    seq = sw.SequenceBuffer(10, flow=flow, journal=tmp_path / "journal", resume="one")
    assert (seq.ids(), seq.used_ids) == (["e", "f"], [])


def test_what_is_cleared_after_a_restart_is_wanted_again(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")
    seq.put(sample("ab"))
    seq.close()
    seq = sw.open(f"file://{tmp_path / 'journal'}")
    seq.clear()
    assert seq.wanted("abc") == ["a", "b", "c"]


# ---- flush, close, repr, waiting -----------------------------------------------------------------------------------


def test_flush_writes_how_much_is_on_the_disk(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")
    seq.put(sample("ab"))

    def synced() -> int:
        return int(struct.unpack_from("<Q", (tmp_path / "journal").read_bytes(), 64)[0])

    assert synced() < (tmp_path / "journal").stat().st_size
    seq.flush()
    assert synced() == (tmp_path / "journal").stat().st_size
    seq.put(sample("cd"))
    raw = (tmp_path / "journal").read_bytes()
    (tmp_path / "cut").write_bytes(raw[: synced() - 1])
    with pytest.raises(StorageError, match="damaged"):
        sw.open(tmp_path / "cut")
    sw.SequenceBuffer(10, flow=FLOW).flush()


def call(seq: sw.SequenceBuffer, name: str, *arguments: Any) -> None:
    result = getattr(seq, name)(*arguments)
    if inspect.isawaitable(result):

        async def run() -> Any:
            return await result

        asyncio.run(run())


def test_after_close_every_verb_but_close_and_repr_is_a_closed_error(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", max_staleness=2)
    seq.put(sample("ab"), version=0)
    lease = seq.get("ref", timeout=0)
    seq.close()
    seq.close()
    given: dict[str, tuple[Any, ...]] = {
        "put": (sample("c"),), "amend": ([0], sample("a", "b")), "get": ("ref",), "release": ("me",),
        "set_version": (1,), "admission": (2,), "checkpoint": ("x",), "mark_used": (["a"],), "wanted": (["a"],),
        "explain": ("ref",), "save": (tmp_path / "saved",), "__contains__": (0,),
    }  # fmt: skip
    kept = {"close", "__exit__", "__repr__", "__init__", "__reduce__", "__setattr__"}
    names = [name for name, value in vars(sw.SequenceBuffer).items() if inspect.isroutine(value) and name not in kept]
    verbs = [name for name in names if name[0] != "_" or name in ("__len__", "__contains__", "__enter__")]
    assert len(verbs) > 25
    for name in verbs:
        arguments = given.get(name.removesuffix("_async"), ())
        with pytest.raises(ClosedError, match="closed"):
            call(seq, name, *arguments)
    for name in ("version", "used_ids"):
        with pytest.raises(ClosedError):
            getattr(seq, name)
    with pytest.raises(ClosedError):
        lease.ack()
    lease.release()
    assert repr(seq) == f"<SequenceBuffer journal {tmp_path / 'journal'}: closed>"


def test_repr_tells_place_and_state(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(1000, flow=FLOW)
    seq.put(sample("abc"))
    assert repr(seq) == "<SequenceBuffer in memory: 3 of 1000 samples, consumers ref, train>"
    with sw.SequenceBuffer(1000, flow=FLOW, journal=tmp_path / "journal") as seq:
        at = f"journal {tmp_path / 'journal'}"
        assert repr(seq) == f"<SequenceBuffer {at}: 0 of 1000 samples, consumers ref, train>"


@pytest.mark.parametrize("awaited", [True, False])
def test_what_can_never_fit_is_refused_at_once(awaited: bool) -> None:
    seq = sw.SequenceBuffer(3, flow=FLOW, max_tokens=20, max_bytes=1000)

    def call(verb: str, *arguments: Any, **options: Any) -> Any:
        if not awaited:
            return getattr(seq, verb)(*arguments, **options)

        async def run() -> Any:
            return await asyncio.wait_for(getattr(seq, f"{verb}_async")(*arguments, **options), HANG_S)

        return asyncio.run(run())

    with pytest.raises(SchemaError, match="4 at once never fit capacity=3"):
        call("put", sample("abcd"))
    with pytest.raises(SchemaError, match="22 at once never fit max_tokens=20"):
        call("put", sw.SequenceSample(["a"], {"a": [22]}, {"a": np.zeros(22, np.int8)}))
    with pytest.raises(SchemaError, match="1600 at once never fit max_bytes=1000"):
        call("put", sw.SequenceSample(["a"], {"a": [2]}, {"a": np.zeros((2, 100))}))
    with pytest.raises(SchemaError, match="4 samples are never ready: capacity=3"):
        call("get", "train", batch_size=4)
    call("put", sample("ab"))
    for timeout in (0, 0.05):
        with pytest.raises(BufferFull, match="2 of 3 samples"):
            call("put", sample("cd"), timeout=timeout)
        with pytest.raises(NotReady, match="2 lack 'b'"):
            call("get", "train", timeout=timeout)


def test_verbs_and_their_awaited_forms_have_the_same_parameters() -> None:
    face = sw.SequenceBuffer
    names = [name for name in vars(face) if name.endswith("_async")]
    assert {"put_async", "get_async", "save_async", "flush_async", "amend_async", "clear_async"} <= set(names)
    for name in names:
        plain, awaited = getattr(face, name.removesuffix("_async")), getattr(face, name)
        assert inspect.signature(plain).parameters == inspect.signature(awaited).parameters, name
    for name in ("put", "get"):
        assert inspect.signature(getattr(face, name)).parameters["timeout"].default is None


def test_an_awaited_put_keeps_its_timeout_while_others_write_the_journal(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sharpwave.sequences.gate._TURN_S", 0.1)

    async def run() -> None:
        seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")
        await seq.put_async(sample("a"))
        with seq._commits._writing:  # another thread writes
            begun = time.monotonic()
            calls = [seq.put_async(sample(name), timeout=0.2) for name in "bc"]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, NotReady)
                assert "journal" in str(result)
            assert time.monotonic() - begun < HANG_S / 2
        assert seq.ids() == ["a"]
        await seq.put_async(sample("d"), timeout=HANG_S)
        assert seq.ids() == ["a", "d"]
        seq.close()

    asyncio.run(run())
