"""A SequenceBuffer of another process, over tcp:// and ipc://: every verb, its errors, and what a kill leaves."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, pause, until
from service.sequence_server import Server, new_endpoint

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.service.stream import Pusher

pytest.importorskip("zmq")
TRANSPORTS = ("tcp", "ipc")


def sample(names: Any, key: str = "x", value: int = 0) -> sw.SequenceSample:
    """A datum for each name; for each letter of a word."""
    names = list(names)
    lens = [2 + at for at in range(len(names))]
    return sw.SequenceSample(names, {key: lens}, {key: np.arange(value, value + sum(lens))})


class Pair:
    """A server in another process, and its client here."""

    def __init__(self, transport: str, **options: Any) -> None:
        self.server = Server(new_endpoint(transport), **options)
        self.seq = sw.open(self.server.table)

    def close(self) -> None:
        self.seq.close()
        self.server.close()


@pytest.fixture(params=TRANSPORTS)
def make(request: Any) -> Iterator[Any]:
    pairs: list[Pair] = []

    def made(**options: Any) -> Pair:
        pairs.append(Pair(request.param, **options))
        return pairs[-1]

    yield made
    for pair in pairs:
        pair.close()


def advance(seq: Any, count: int = 2) -> None:
    """Makes so many samples complete for the trainer."""
    lease = seq.get("ref", batch_size=count, timeout=HANG_S)
    lease.ack(sample(lease.batch.ids, "y"))


# ---- verbs -----------------------------------------------------------------------------------------------------------


def test_samples_gain_keys_and_leave(make: Any) -> None:
    seq = make().seq
    handles = seq.put(sample("abc"))
    assert (handles.dtype, handles.shape) == (np.int64, (3,))
    assert (len(seq), seq.ids()) == (3, ["a", "b", "c"])
    assert [int(handle) in seq for handle in handles] == [True] * 3
    assert 7 not in seq
    assert "a" not in seq
    with seq.get("ref", timeout=HANG_S) as lease:
        assert (lease.batch, lease.consumer, lease.versions) == (sample("abc").split([2, 1])[0], "ref", [None, None])
        assert lease.handles.tolist() == handles[:2].tolist()
        seq.amend(lease.handles, sample(lease.batch.ids, "y"))
    lease = seq.get("train", timeout=HANG_S)
    assert lease.batch.keys == {"x", "y"}
    lease.ack()
    assert (seq.ids(), seq.used_ids, seq.stats()["trained"]) == (["c"], ["a", "b"], 2)
    assert handles[0] not in seq


def test_an_acknowledgement_brings_what_was_made(make: Any) -> None:
    seq = make().seq
    seq.put(sample("ab"))
    lease = seq.get("ref", timeout=HANG_S)
    for wrong, words in ((sample("ab"), "'a' lacks y, which 'ref' makes"), ([], "one for each of those leased")):
        with pytest.raises(SchemaError, match=words):
            lease.ack(wrong)
    lease.ack(sample("ab", "y"))
    assert seq.stats()["consumers"]["ref"]["ready"] == 0
    assert seq.get("train", timeout=0).batch.keys == {"x", "y"}


def test_batches_are_views_of_the_frame_that_came(make: Any) -> None:
    seq = make().seq
    big = sw.SequenceSample(["a"], {"x": [1 << 20]}, {"x": np.arange(1 << 20)})
    seq.put([big, sw.SequenceSample(["b"], {"x": [3]}, {"x": np.arange(3)})])
    values = seq.get("ref", timeout=HANG_S).batch["x"]
    assert values.tolist() == [*range(1 << 20), 0, 1, 2]
    assert values.flags.writeable
    assert not values.flags.owndata
    assert values.base is not None


@pytest.mark.parametrize("kind", ["numpy", "torch", "described"])
def test_kinds_of_values_arrive_as_they_were(make: Any, kind: str) -> None:
    seq = make().seq
    torch = pytest.importorskip("torch")
    data: Any = {"numpy": np.ones(5, np.float16), "torch": torch.ones(5, dtype=torch.bfloat16), "described": None}[kind]
    one = sw.SequenceSample(
        ["a", "b"],
        {"x": [[1, 2], [2]]},
        None if data is None else {"x": data},
        trailing_shapes={"x": ()},
        dtypes={"x": np.float32 if data is None else data.dtype},
        metadata={"group": ["g", None], "score": [0.5, 2]},
    )
    seq.put(one)
    assert seq.get("ref", timeout=HANG_S).batch == one


def test_ids_may_come_twice_in_a_batch_where_the_buffer_allows_them(make: Any) -> None:
    seq = make(duplicate_ids=True).seq
    seq.put([sample("a"), sample("a", value=7)])
    lease = seq.get("ref", timeout=HANG_S)
    assert (lease.batch.ids, lease.batch["x"].tolist()) == (["a", "a"], [0, 1, 7, 8])


def test_leases_are_released_renewed_and_expire(make: Any) -> None:
    seq = make(lease_timeout=0.5).seq
    seq.put(sample("ab"))
    lease = seq.get("ref", timeout=HANG_S, owner="me")
    lease.renew()
    lease.release()
    lease.release()
    with pytest.raises(StaleHandle, match=r"ack\(\)"):
        lease.ack()
    with pytest.raises(StaleHandle, match=r"renew\(\)"):
        lease.renew()
    lease = seq.get("ref", timeout=HANG_S, owner="me")
    assert seq.release("nobody") == 0
    assert seq.release("me") == 2
    lease = seq.get("ref", timeout=HANG_S)
    again = seq.get("ref", timeout=HANG_S)  # when the first has expired
    assert again.handles.tolist() == lease.handles.tolist()
    with pytest.raises(StaleHandle, match=r"the lease of 2 samples for 'ref' is over: it expired"):
        lease.ack()
    assert seq.stats()["expired"] == 2


def test_versions_admission_and_staleness(make: Any) -> None:
    pair = make(max_staleness=1)
    seq, other = pair.seq, sw.open(pair.server.table)
    seq.put(sample("ab"), version=[0, 1])
    seq.set_version(1)
    assert seq.version == 1
    with pytest.raises(SchemaError, match=r"set_version\(\): expected 1 or more, got 0"):
        seq.set_version(0)
    gate, second = seq.admission(2, 5), other.admission(2, 5)
    assert gate.capacity() == second.capacity() == 4  # (1 + 1 + 1) * 2 - 2
    assert gate.start(3)
    assert (gate.running, second.capacity()) == (3, 1), "gates of all clients count together"
    assert not second.start(2)
    assert second.start(1)
    with pytest.raises(SchemaError, match="at most 3"):
        gate.finish(4)
    gate.finish(3)
    assert second.capacity() == 3
    gate.start(2)
    seq.close()  # a client that is gone runs nothing
    until(lambda: second.capacity() == 3)
    other.set_version(3)
    assert (other.ids(), other.stats()["staleness"]) == ([], {})
    assert other.stats()["evicted"] == 2
    other.close()


def test_recovery_verbs(make: Any, tmp_path: Path) -> None:
    pair = make(journal=str(tmp_path / "journal"), folder=str(tmp_path))
    seq = pair.seq
    seq.put(sample("abc"))
    advance(seq)
    seq.get("train", timeout=HANG_S).ack()
    seq.checkpoint("one")
    assert seq.wanted(["a", "c", "d"]) == ["a", "d"]
    seq.mark_used(["z"])
    assert (seq.used_ids, seq.wanted(["z"]), seq.wanted(["z"])) == (["z"], [], ["z"])
    seq.flush()
    seq.save("copy")
    assert sw.open(tmp_path / "copy").ids() == ["c"]
    with pytest.raises(StorageError, match="in the server's folder"):
        seq.save("/elsewhere/copy")
    with pytest.raises(SchemaError, match=r"checkpoint\(\): name"):
        seq.checkpoint(3)
    seq.clear()
    assert len(seq) == 0
    assert "0 of 2 samples ready" in seq.explain("train")


def test_every_awaited_verb(make: Any, tmp_path: Path) -> None:
    seq = make(journal=str(tmp_path / "journal"), folder=str(tmp_path)).seq

    async def work() -> None:
        waiting = [asyncio.create_task(seq.get_async("ref", batch_size=1)) for _ in range(12)]
        await asyncio.sleep(0.05)
        handles = await seq.put_async([sample([str(at)]) for at in range(12)])  # not behind twelve that wait
        leases = await asyncio.gather(*waiting)
        assert sorted(int(lease.handles[0]) for lease in leases) == handles.tolist()
        for lease in leases:
            await seq.amend_async(lease.handles, sample(lease.batch.ids, "y"))
            async with lease:
                pass
        async with await seq.get_async("train") as lease:
            assert len(lease) == 2
        with pytest.raises(ZeroDivisionError):
            async with await seq.get_async("train"):
                raise ZeroDivisionError
        lease = await seq.get_async("train")
        await lease.ack_async()
        await seq.set_version_async(3)
        await seq.checkpoint_async("here")
        await seq.flush_async()
        await seq.save_async("saved")
        await seq.clear_async()

    asyncio.run(work())
    assert (seq.version, len(seq), len(sw.open(tmp_path / "saved"))) == (3, 0, 8)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_buffer(make: Any) -> None:
    seq = make(capacity=2).seq
    seq.put(sample("ab"))
    local = sw.SequenceBuffer(2, flow=seq.flow)
    local.put(sample("ab"))
    calls: dict[Any, Any] = {
        "no room": lambda buffer: buffer.put(sample("c"), timeout=0),
        "never fits": lambda buffer: buffer.put(sample("cde")),
        "wrong version": lambda buffer: buffer.put(sample("c"), version="seven"),
        "wrong births": lambda buffer: buffer.put(sample("c"), births=[1, 2]),
        "no samples": lambda buffer: buffer.put([3]),
        "no consumer": lambda buffer: buffer.get("nobody"),
        "no count": lambda buffer: buffer.get("ref", batch_size=0),
        "no truth": lambda buffer: buffer.get("ref", partial=3),
        "no owner": lambda buffer: buffer.get("ref", owner=3),
        "no text": lambda buffer: buffer.release(3),
        "no timeout": lambda buffer: buffer.get("ref", timeout="long"),
        "no handles": lambda buffer: buffer.amend([0.5], sample("a")),
        "fewer": lambda buffer: buffer.amend([0], sample("ab")),
        "no such consumer": lambda buffer: buffer.explain("nobody"),
        "no ids": lambda buffer: buffer.wanted(3),
        "no journal": lambda buffer: buffer.checkpoint("a"),
        "no gate": lambda buffer: buffer.admission(2),
    }
    for name, call in calls.items():
        with pytest.raises(Exception) as here:  # noqa: PT011 (which one is what is compared)
            call(local)
        with pytest.raises(Exception) as there:  # noqa: PT011
            call(seq)
        assert (type(there.value), str(there.value)) == (type(here.value), str(here.value)), name
    assert seq.ids() == ["a", "b"]
    with pytest.raises(StaleHandle, match="the sample of handle 12345 has left"):
        seq.amend([12345], sample("a"))
    (handle,) = seq.get("ref", batch_size=1, timeout=HANG_S).handles
    with pytest.raises(SchemaError, match=f"handle {handle}: expected the id 'a', got 'b'"):
        seq.amend([handle], sample("b"))


def test_waits_end_at_their_deadlines(make: Any) -> None:
    pair = make(capacity=2)
    seq = pair.seq
    seq.put(sample("ab"))
    for seconds in (0, 0.2):
        begun = time.monotonic()
        with pytest.raises(BufferFull, match="no room for 1 samples"):
            seq.put(sample("c"), timeout=seconds)
        with pytest.raises(NotReady, match="'train': 0 of 2 samples ready"):
            seq.get("train", timeout=seconds)
        assert time.monotonic() - begun >= 2 * seconds
    assert len(seq.get("ref", batch_size=2, timeout=0.1, partial=True)) == 2
    assert pair.server.stats()["waiting_puts"] == 0


def test_a_batch_above_the_limit_of_a_message_is_told_and_given_back(make: Any) -> None:
    seq = make(limits={"message_bytes": 1 << 20}).seq
    for name in "ab":
        seq.put(sw.SequenceSample([name], {"x": [100_000]}, {"x": np.arange(100_000)}))
    with pytest.raises(SchemaError, match="give a smaller batch_size"):
        seq.get("ref", timeout=HANG_S)
    assert len(seq.get("ref", batch_size=1, timeout=HANG_S)) == 1
    assert seq.stats()["leased"] == 1
    with pytest.raises(StorageError, match="takes at most 1048576"):
        seq.put(sw.SequenceSample(["c"], {"x": [200_000]}, {"x": np.arange(200_000)}))


def test_calls_that_wait_take_bounded_memory(make: Any) -> None:
    pair = make(capacity=1, limits={"waiting_bytes": 5 << 20})
    seq = pair.seq
    seq.put(sample("a"))
    big = [sw.SequenceSample([str(at)], {"x": [1 << 18]}, {"x": np.arange(1 << 18)}) for at in range(3)]
    errors: list[Exception] = []

    def put(one: sw.SequenceSample) -> None:
        try:
            seq.put(one, timeout=HANG_S)
        except StorageError as error:
            errors.append(error)

    threads = [threading.Thread(target=put, args=(one,)) for one in big]
    for thread in threads:
        thread.start()
    until(lambda: len(errors) == 1)  # two of 2 MiB wait
    assert "waiting_bytes" in str(errors[0])
    for _ in range(3):
        advance(seq, 1)
        seq.get("train", batch_size=1, timeout=HANG_S).ack()
    for thread in threads:
        thread.join(HANG_S)
    assert len(errors) == 1


def test_closed_clients_and_closed_buffers(make: Any) -> None:
    pair = make()
    pair.seq.put(sample("ab"))
    lease = pair.seq.get("ref", timeout=HANG_S)
    again = pickle.loads(pickle.dumps(pair.seq))
    assert again.ids() == ["a", "b"]
    pair.seq.close()
    pair.seq.close()
    lease.release()
    with pytest.raises(ClosedError, match=r"ack\(\): the buffer is closed"):
        lease.ack()
    assert repr(pair.seq).endswith("/seq: closed>")
    assert len(again.get("ref", timeout=HANG_S)) == 2, "its leases came back at once"
    assert f"{pair.server.table}: 2 of 100 samples, consumers ref, train>" in repr(again)
    again.close()


def test_options_of_open_that_it_lacks_are_refused(make: Any) -> None:
    table = make().server.table
    for wrong in ({"view": sw.Transitions()}, {"device": "cpu"}, {"recover": True}):
        with pytest.raises(SchemaError, match=next(iter(wrong))):
            sw.open(table, **wrong)


def test_roles_of_keys(tmp_path: Path) -> None:
    """A generator that may only write, a trainer that may only read, and neither may clear."""
    from sharpwave.service.keys import make_key

    keys = {role: make_key(tmp_path / "keys", role, [role]) for role in ("read", "write", "admin")}
    flow = sw.Dataflow([sw.Consumer("ref", {"x"}, {"y"}, 2), sw.Consumer("train", {"x", "y"}, batch_size=2)])
    seq = sw.SequenceBuffer(2, flow=flow, max_staleness=2)
    with sw.serve({"seq": seq}, "tcp://127.0.0.1:0", keys=tmp_path / "keys") as server:
        reader, writer, admin = (sw.open(f"{server.address}/seq", keys=key) for key in keys.values())
        handles = writer.put(sample("ab"), version=0)
        assert writer.admission(2).start(1)
        assert "? of 2 samples" in repr(writer)
        with reader.get("ref", timeout=HANG_S) as lease:
            writer.amend(handles, sample("ab", "y"))
            assert len(lease) == 2
        for client, call in (
            (writer, lambda: writer.get("ref", timeout=0)),
            (reader, lambda: reader.put(sample("c"))),
            (reader, lambda: reader.amend(handles, sample("ab", "y"))),
            (reader, lambda: lease.ack(sample("ab", "y"))),
            (reader, reader.clear),
            (writer, lambda: writer.save(tmp_path / "copy")),
            (writer, lambda: writer.stats()),
        ):
            with pytest.raises(StorageError, match="needs the role"):
                call()
            assert client is not admin

        async def give_up() -> None:
            task = asyncio.create_task(writer.put_async(sample("c"), version=0))
            while seq.stats()["waiting_puts"] == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(give_up())
        until(lambda: seq.stats()["waiting_puts"] == 0)
        admin.save(tmp_path / "copy")
        admin.clear()
        assert (len(seq), len(sw.open(tmp_path / "copy"))) == (0, 2)
        for client in (reader, writer, admin):
            client.close()


# ---- calls that are given up -----------------------------------------------------------------------------------------


def test_an_awaited_get_that_is_cancelled_takes_nothing(make: Any) -> None:
    pair = make()

    async def work() -> None:
        task = asyncio.create_task(pair.seq.get_async("ref"))
        while pair.server.stats()["consumers"]["ref"]["waiting"] == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    until(lambda: pair.server.stats()["consumers"]["ref"]["waiting"] == 0)
    pair.seq.put(sample("ab"))
    assert len(pair.seq.get("ref", timeout=HANG_S)) == 2


def test_an_awaited_put_that_is_cancelled_puts_nothing(make: Any) -> None:
    pair = make(capacity=1)
    pair.seq.put(sample("a"))

    async def work() -> None:
        task = asyncio.create_task(pair.seq.put_async(sample("b")))
        while pair.server.stats()["waiting_puts"] == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    until(lambda: pair.server.stats()["waiting_puts"] == 0)
    pair.seq.clear()
    pair.seq.put(sample("c"), timeout=HANG_S)
    assert pair.seq.ids() == ["c"]


INTERRUPTED = """
import signal, sys, threading, time, sharpwave as sw
seq = sw.open(sys.argv[1])
def interrupt():
    while seq.stats()["consumers"]["ref"]["waiting"] == 0:
        time.sleep(0.01)
    signal.raise_signal(signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    seq.get("ref")
except KeyboardInterrupt:
    print("interrupted", seq.version, flush=True)  # the channel of this thread goes on
while seq.stats()["consumers"]["ref"]["waiting"]:
    time.sleep(0.01)
print("nothing waits", flush=True)
"""


def test_an_interrupt_ends_a_get_here_and_at_the_server(make: Any) -> None:
    pair = make()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, pair.server.table], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.stdout.split("\n")[:2] == ["interrupted 0", "nothing waits"], done.stderr


# ---- dead clients ----------------------------------------------------------------------------------------------------

HOLDER = """
import sys, threading, sharpwave as sw, numpy as np
seq = sw.open(sys.argv[1])
lease = seq.get("ref", timeout=60)
threading.Thread(target=lambda: seq.get("ref"), daemon=True).start()
late = sw.SequenceSample(["late"], {"x": [1]}, {"x": np.arange(1)})
threading.Thread(target=lambda: seq.put(late), daemon=True).start()
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_what_a_dead_client_held_returns_and_its_calls_end(make: Any, how: str) -> None:
    pair = make(capacity=2, client_timeout=1.0)
    pair.seq.put(sample("ab"))
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, pair.server.table], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "has it\n"
    until(lambda: pair.server.stats()["waiting_puts"] == 1)
    until(lambda: pair.server.stats()["consumers"]["ref"]["waiting"] == 1)
    child.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    lease = pair.seq.get("ref", timeout=HANG_S)
    assert lease.batch.ids == ["a", "b"]
    told = pair.server.stats()
    assert (told["waiting_puts"], told["consumers"]["ref"]["waiting"], told["clients"]) == (0, 0, 1)
    lease.ack()
    child.kill()
    child.communicate()
    pair.seq.clear()
    pair.seq.put(sample("c"), timeout=0)
    assert pair.seq.ids() == ["c"], "its put was not made after its death"


def test_a_client_that_was_taken_for_dead_goes_on_and_its_leases_are_stale(make: Any) -> None:
    pair = make(client_timeout=0.5)
    code = """
import os, signal, sys, sharpwave as sw
seq = sw.open(sys.argv[1])
lease = seq.get("ref", timeout=60)
print("has it", flush=True)
sys.stdin.readline()
try:
    lease.ack()
except sw.errors.StaleHandle as error:
    print(error, flush=True)
print(seq.ids(), flush=True)
"""
    pair.seq.put(sample("ab"))
    child = subprocess.Popen(
        [sys.executable, "-c", code, pair.server.table], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "has it\n"
    child.send_signal(signal.SIGSTOP)
    lease = pair.seq.get("ref", timeout=HANG_S)
    child.send_signal(signal.SIGCONT)
    told, _ = child.communicate("\n", timeout=HANG_S)
    assert "ack(): the lease is over: the server was restarted, or took this client for dead" in told
    assert told.endswith("['a', 'b']\n")
    lease.ack()


def test_a_server_that_was_stopped_does_not_take_its_clients_for_dead(make: Any) -> None:
    pair = make(client_timeout=0.5)
    pair.seq.put(sample("ab"))
    lease = pair.seq.get("ref", timeout=HANG_S)
    for _ in range(3):
        pause(pair.server.process.pid)
        time.sleep(1.0)
        pair.server.process.send_signal(signal.SIGCONT)
        assert pair.seq.ids() == ["a", "b"]
    lease.ack(sample("ab", "y"))


def test_a_forked_child_is_a_client_of_its_own(make: Any) -> None:
    pair = make()
    pair.seq.put(sample("ab"))
    child = os.fork()
    if child == 0:
        try:
            pair.seq.put(sample("c"))
            lease = pair.seq.get("ref", timeout=HANG_S)
            os._exit(0 if len(lease) == 2 else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert pair.seq.ids() == ["a", "b", "c"]
    assert len(pair.seq.get("ref", timeout=HANG_S)) == 2, "the child's lease returned with it"


# ---- killed servers --------------------------------------------------------------------------------------------------


def test_leases_and_handles_of_a_server_that_was_restarted_are_stale(make: Any) -> None:
    pair = make()
    handles = pair.seq.put(sample("ab"))
    lease = pair.seq.get("ref", timeout=HANG_S)
    pair.server.restart()
    pair.seq.put(sample("cd"))  # the new server's first handles
    with pytest.raises(StaleHandle):
        lease.ack()
    with pytest.raises(StaleHandle):
        lease.renew()
    with pytest.raises(StaleHandle):
        pair.seq.amend(handles, sample("ab", "y"))
    assert handles[0] not in pair.seq
    lease.release()
    assert pair.seq.ids() == ["c", "d"]


def test_with_a_journal_handles_outlive_the_server_and_leases_do_not(make: Any, tmp_path: Path) -> None:
    pair = make(journal=str(tmp_path / "journal"))
    handles = pair.seq.put(sample("ab"))
    lease = pair.seq.get("ref", timeout=HANG_S)
    pair.server.restart()
    with pytest.raises(StaleHandle):
        lease.ack()
    pair.seq.amend(handles, sample("ab", "y"))
    assert len(pair.seq.get("train", timeout=HANG_S)) == 2


def test_a_call_without_a_server_ends_at_its_deadline_and_one_that_waits_goes_on(make: Any, tmp_path: Path) -> None:
    pair = make(journal=str(tmp_path / "journal"))
    pair.seq.put(sample("a"))
    pair.server.kill()
    with pytest.raises(NotReady, match="did not answer"):
        pair.seq.get("ref", timeout=0.2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pair.seq.get("ref")))
    thread.start()
    pair.server.start()
    pair.seq.put(sample("b"))
    thread.join(HANG_S)
    assert found[0].batch.ids == ["a", "b"]


def test_every_acknowledged_put_is_there_once_after_kills_of_the_server(make: Any, tmp_path: Path) -> None:
    """Duplicate ids are allowed: nothing but its origin keeps a put that is sent again from being made twice."""
    pair = make(journal=str(tmp_path / "journal"), duplicate_ids=True, capacity=100_000)
    stop = threading.Event()
    handles: dict[str, int] = {}

    def put(worker: int) -> None:
        client = sw.open(pair.server.table)
        count = 0
        while not stop.is_set():
            name = f"{worker}.{count}"
            handles[name] = int(client.put(sample([name]))[0])
            count += 1
        client.close()

    threads = [threading.Thread(target=put, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        before = len(handles)
        until(lambda before=before: len(handles) > before + 50)
        pair.server.restart()
    stop.set()
    for thread in threads:
        thread.join(HANG_S)
    ids = pair.seq.ids()
    assert sorted(ids) == sorted(handles), "each once"
    assert len(set(handles.values())) == len(handles)
    pair.server.close()
    seq = sw.SequenceBuffer(100_000, flow=pair.seq.flow, journal=tmp_path / "journal", duplicate_ids=True)
    for name, handle in handles.items():
        assert seq._store.index.entries[handle].sample.ids == [name]
    seq.close()


def test_puts_go_on_at_the_next_server_after_one_that_closes_in_order(make: Any, tmp_path: Path) -> None:
    """Closed again and again while clients put: each is made once, and none is told of it."""
    pair = make(journal=str(tmp_path / "journal"), duplicate_ids=True, capacity=100_000)
    stop = threading.Event()
    made: list[str] = []

    def put(worker: int) -> None:
        client = sw.open(pair.server.table)
        for count in itertools.count():
            if stop.is_set():
                return client.close()
            client.put([sample([f"{worker}.{count}"])])
            made.append(f"{worker}.{count}")

    threads = [threading.Thread(target=put, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = len(made)
        until(lambda before=before: len(made) > before + 30)
        pair.server.close()
        pair.server.start()
    stop.set()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(pair.seq.ids()) == sorted(made)


def test_a_pusher_with_a_window_puts_in_order_and_once_over_kills_of_the_server(make: Any, tmp_path: Path) -> None:
    pair = make(journal=str(tmp_path / "journal"), duplicate_ids=True, capacity=100_000)
    expected = [str(at) for at in range(600)]
    with Pusher(pair.server.address, table="seq", window=32) as pusher:
        for at, name in enumerate(expected):
            pusher.push(sample([name]), timeout=HANG_S)
            if at in (200, 400):
                pair.server.restart()
        pusher.flush(HANG_S)
    assert pair.seq.ids() == expected


def test_a_pusher_is_told_of_a_sample_that_is_refused_and_goes_on(make: Any) -> None:
    pair = make()
    pair.seq.put(sample("b"))
    pusher = Pusher(pair.server.address, table="seq")
    for name in "abc":
        pusher.push(sample(name))
    with pytest.raises(SchemaError, match=r"refused, and lost: put\(\): id 'b': held already"):
        pusher.flush(HANG_S)
    pusher.push(sample("d"), version=3)
    pusher.close()
    assert pair.seq.ids() == ["b", "a", "c", "d"]
    with pytest.raises(SchemaError, match="expected a SequenceSample, got dict"):
        Pusher(pair.server.address, table="seq").push({})
    lost = Pusher(pair.server.address, table="nothing")
    with pytest.raises(StorageError, match="has no table 'nothing'"):
        until(lambda: lost.flush(0))


@pytest.mark.parametrize(
    ("verb", "args", "words"),
    [
        (
            "put",
            {"samples": np.zeros(9, np.uint8), "version": None, "births": None, "key": "a", "origin": (1, 1)},
            "samples",
        ),
        ("put", {"samples": "text", "version": None, "births": None, "key": "a", "origin": (1, 1)}, "array of bytes"),
        ("clear", {"origin": (1, 2)}, "origin"),
        ("clear", {"origin": "one"}, "origin"),
        ("clear", {}, "origin"),
        ("ack", {"key": 7, "origin": (1, 1)}, "key"),
        ("renew", {"key": "x" * 65}, "key"),
        ("admit", {"batch_size": 0, "max_concurrent": None, "key": "a", "running": 0, "count": 0}, "needs"),
        ("nothing", {}, "no verb 'nothing'"),
    ],
)
def test_calls_that_make_no_sense_are_refused(make: Any, verb: str, args: dict[str, Any], words: str) -> None:
    seq = make().seq
    seq.put(sample("ab"))
    inside = seq._sequences
    with pytest.raises(SchemaError, match=words):
        inside._session.call(inside._table, verb, args)
    assert seq.ids() == ["a", "b"]


def test_a_key_of_a_lease_cannot_be_given_again(make: Any) -> None:
    """Else the first lease would be forgotten, and would not return with its client."""
    pair = make()
    pair.seq.put(sample("abcd"))
    inside = pair.seq._sequences
    args = {"consumer": "ref", "batch_size": None, "partial": False, "owner": None, "key": "mine"}
    inside._session.call(inside._table, "get", args)
    with pytest.raises(SchemaError, match="got 'mine' again"):
        inside._session.call(inside._table, "get", args)
    assert pair.server.stats()["leased"] == 2
    pair.seq.close()
    until(lambda: pair.server.stats()["leased"] == 0)


def test_every_acknowledgement_is_made_once_over_kills_of_the_server(make: Any, tmp_path: Path) -> None:
    """A trainer that is told that its ack is made, or that its lease is gone: each sample is used once."""
    pair = make(journal=str(tmp_path / "journal"), capacity=100_000)
    seq = pair.seq
    count = 400
    for at in range(0, count, 50):
        seq.put([sample([str(name)]) for name in range(at, at + 50)])
    while seq.stats()["consumers"]["ref"]["ready"]:
        advance(seq, 50)
    trained: list[str] = []

    def train() -> None:
        while len(trained) < count:
            try:
                lease = seq.get("train", timeout=5)
                lease.ack()
            except StaleHandle:
                continue
            except NotReady:
                if not seq.ids():
                    return
                continue
            trained.extend(lease.batch.ids)

    thread = threading.Thread(target=train)
    thread.start()
    for kills in range(1, 4):
        until(lambda kills=kills: len(trained) > 80 * kills or not thread.is_alive())
        pair.server.restart()
    thread.join(HANG_S)
    assert sorted(seq.used_ids, key=int) == [str(at) for at in range(count)]
    assert len(set(trained)) == len(trained)
    assert set(trained) == set(seq.used_ids), "no acknowledgement that was made is told as a stale lease"
