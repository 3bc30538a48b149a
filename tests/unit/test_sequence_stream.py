"""The push/pull stream between real processes: in order, each once, nothing acknowledged is lost."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.service.stream import Puller, Pusher, grouping

zmq = pytest.importorskip("zmq")

FLOW = sw.Dataflow([sw.Consumer("train", {"x"}, batch_size=1)])


def sample(name: Any, length: int = 3) -> sw.SequenceSample:
    return sw.SequenceSample([str(name)], {"x": [length]}, {"x": np.full(length, int(name))})


PUSHER = """
import sys, numpy as np, sharpwave as sw
from sharpwave.service.stream import Pusher
address, number, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with Pusher(address, window=8) as pusher:
    for at in range(count):
        name = str(1000 * number + at)
        pusher.push(sw.SequenceSample([name], {"x": [3]}, {"x": np.full(3, int(name))}))
"""


def start(code: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("senders", "receivers"), [(5, 2), (4, 4), (7, 3), (1, 1)])
def test_grouping_serves_every_sender_once(senders: int, receivers: int) -> None:
    groups = grouping(senders, receivers)
    assert sorted(one for served in groups.values() for one in served) == list(range(senders))
    sizes = [len(served) for served in groups.values()]
    assert max(sizes) - min(sizes) <= 1
    with pytest.raises(SchemaError, match="at least as many"):
        grouping(1, 2)


def test_many_processes_push_and_each_one_s_order_is_kept() -> None:
    with Puller() as puller:
        workers = [start(PUSHER, puller.address, number, 40) for number in range(4)]
        names = [int(puller.pull(2 * HANG_S).ids[0]) for _ in range(160)]
        for worker in workers:
            # The last acknowledgement went out with the last pull.
            assert worker.wait(HANG_S) == 0
    for number in range(4):
        assert [name % 1000 for name in names if name // 1000 == number] == list(range(40))


def test_a_full_buffer_stops_the_pushers() -> None:
    seq = sw.SequenceBuffer(3, flow=FLOW)
    with Puller() as puller:
        pusher = Pusher(puller.address, window=2)
        for at in range(2):
            pusher.push(sample(at))
        assert [puller.pull_into(seq, timeout=HANG_S) for _ in range(2)] == [1, 1]
        pusher.push(sample(2))
        puller.pull_into(seq, timeout=HANG_S)
        for at in range(3, 5):
            pusher.push(sample(at))
        with pytest.raises(sw.errors.BufferFull):
            seq.put(sample(99), timeout=0)
        with pytest.raises(NotReady, match="2 items wait at"):
            pusher.push(sample(5), timeout=0.1)
        assert pusher.unacknowledged == 2
        with seq.get("train", timeout=0):
            pass
        assert puller.pull_into(seq, timeout=HANG_S) == 1
        pusher.push(sample(5), timeout=HANG_S)
        with pytest.raises(NotReady):
            pusher.close(timeout=0.1)
    assert seq.ids() == ["1", "2", "3"]


def test_what_a_closed_buffer_does_not_take_is_not_acknowledged() -> None:
    seq = sw.SequenceBuffer(1, flow=FLOW)
    seq.put(sample(7))
    with Puller() as puller, Pusher(puller.address) as pusher:
        pusher.push(sample(8))
        waiter = threading.Thread(target=lambda: seq.get("train").ack())
        closed = sw.SequenceBuffer(1, flow=FLOW)
        closed.close()
        with pytest.raises(ClosedError):
            puller.pull_into(closed, timeout=HANG_S)
        assert pusher.unacknowledged == 1
        waiter.start()
        sender = threading.Thread(target=lambda: pusher.flush(HANG_S))
        sender.start()  # sends again
        assert puller.pull_into(seq, timeout=HANG_S) == 1
        sender.join(HANG_S)
        waiter.join(HANG_S)
        assert (seq.ids(), pusher.unacknowledged) == (["8"], 0)


def test_ids_that_are_held_are_not_put_again() -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, max_staleness=3)
    with Puller() as puller:
        pusher = Pusher(puller.address)
        many = sw.SequenceSample(["1", "2"], {"x": [1, 1]}, {"x": np.array([1, 2])}, metadata={"version": [0, 0]})
        pusher.push(many)
        assert puller.pull_into(seq, timeout=HANG_S) == 2
        more = sw.SequenceSample(["2", "3"], {"x": [1, 1]}, {"x": np.array([2, 3])}, metadata={"version": [0, 2]})
        pusher.push(more)
        assert puller.pull_into(seq, timeout=HANG_S) == 1
        assert (seq.ids(), seq.stats()["staleness"]) == (["1", "2", "3"], {0: 2, -2: 1})
        pusher.push({"no": "sample"})
        with pytest.raises(SchemaError, match="got dict"):
            puller.pull_into(seq, timeout=HANG_S)
        with pytest.raises(SchemaError, match=r"pushed before is refused, and lost: .*got dict"):
            pusher.close()


def test_a_sample_that_the_buffer_refuses_is_told_to_its_pusher_and_the_next_one_goes_on() -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW)
    seq.put(sample(1))
    with Puller() as puller:
        pusher = Pusher(puller.address)
        wrong = sw.SequenceSample(["2"], {"x": [1]}, {"x": np.zeros(1, np.float32)})
        for one in (wrong, sample(3), sample(4)):
            pusher.push(one)
        with pytest.raises(SchemaError, match="expected int64"):
            puller.pull_into(seq, timeout=HANG_S)
        assert [puller.pull_into(seq, timeout=HANG_S) for _ in range(2)] == [1, 1]
        with pytest.raises(SchemaError, match=r"refused, and lost: put.*expected int64"):
            pusher.flush(HANG_S)
        pusher.push(sample(5))
        assert puller.pull_into(seq, timeout=HANG_S) == 1
        pusher.close(HANG_S)
    assert seq.ids() == ["1", "3", "4", "5"]


def test_a_pusher_that_is_started_again_under_its_name_is_not_taken_for_the_one_before() -> None:
    with Puller() as puller:
        for start_at in (0, 10):
            with Pusher(puller.address, name="generator") as pusher:
                for at in range(4):
                    pusher.push(start_at + at)
                assert [puller.pull(HANG_S) for _ in range(4)] == [start_at + at for at in range(4)]


KILLED = """
import sys
from sharpwave.service.stream import Pusher
pusher = Pusher(sys.argv[1], name="generator", window=8)
for at in range(8):
    pusher.push(f"{sys.argv[2]}.{at}")
    if at == 3:
        pusher.flush()
        print("four are acknowledged", flush=True)
pusher.flush()
"""


def test_a_killed_pusher_loses_nothing_that_was_acknowledged_and_its_successor_begins_anew() -> None:
    with Puller() as puller:
        taken = []
        for turn in range(2):
            child = start(KILLED, puller.address, turn)
            while f"{turn}.3" not in taken:  # the one before may have pushed more than it told
                taken.append(puller.pull(HANG_S))
            assert child.stdout is not None
            assert child.stdout.readline()
            child.kill()
            child.wait()
        taken = [one for one in taken if int(one[2:]) < 4]
        assert taken == [f"{turn}.{at}" for turn in range(2) for at in range(4)]


IDLE = """
import resource, sys, time
from sharpwave.service.stream import Puller
puller = Puller()
print(puller.address, flush=True)
sys.stdin.readline()
with open("/proc/self/status") as status:
    print(next(line for line in status if line.startswith("VmHWM")).split()[1], puller.refused, flush=True)
"""


def test_strangers_cannot_fill_the_memory_of_an_idle_puller() -> None:
    """Bytes that are none of the protocol, and pushes that nobody takes."""
    with subprocess.Popen(
        [sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        address = child.stdout.readline().strip()
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(address)
        for _ in range(400):
            stranger.send(bytes(1 << 20))
        pushers = [Pusher(address, window=40) for _ in range(4)]
        for pusher in pushers:
            for _ in range(40):
                pusher.push("x" * (1 << 20))
        until(lambda: all(pusher._open > 0 for pusher in pushers))
        stranger.close(linger=60_000)
        context.term()  # all of it has arrived
        child.stdin.write("\n")
        child.stdin.flush()
        kilobytes, refused = map(int, child.stdout.readline().split())
        for pusher in pushers:
            with pytest.raises(NotReady):
                pusher.close(0)
        child.kill()
    assert refused > 0
    assert kilobytes < 200 * 1024, "the puller has no more than what is under way"


RECEIVER = """
import sys, sharpwave as sw
from sharpwave.service.stream import Puller
flow = sw.Dataflow([sw.Consumer("train", {"x"}, batch_size=1)])
seq = sw.SequenceBuffer(10_000, flow=flow, journal=sys.argv[2])
with Puller(sys.argv[1]) as puller:
    print("ready", flush=True)
    while True:
        try:
            puller.pull_into(seq, timeout=600)
        except sw.errors.NotReady:
            break
"""


def free_address() -> str:
    """A place of this machine that stays free: of its own address, which no program's outgoing connections take."""
    host = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
    with socket.socket() as one:
        one.bind((host, 0))
        return f"tcp://{host}:{one.getsockname()[1]}"


def test_a_puller_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    """Two pushers, a receiver that dies again and again: every sample is in its journal, each once."""
    address, journal = free_address(), tmp_path / "journal"
    slow = PUSHER.replace("pusher.push(", "import time; time.sleep(0.004); pusher.push(").replace(
        "window=8)", "window=8)"
    )
    receiver = start(RECEIVER, address, journal)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    pushers = [start(slow, address, number, 150) for number in range(2)]
    for at in range(4):
        time.sleep(0.15 + 0.1 * at)
        receiver.send_signal(signal.SIGKILL)
        receiver.wait()
        receiver = start(RECEIVER, address, journal)
        assert receiver.stdout is not None
        receiver.stdout.readline()
    for pusher in pushers:
        assert pusher.wait(2 * HANG_S) == 0, "everything was acknowledged"
    receiver.send_signal(signal.SIGKILL)
    receiver.wait()
    seq = sw.SequenceBuffer(10_000, flow=FLOW, journal=journal)
    expected = [str(1000 * number + at) for number in range(2) for at in range(150)]
    assert sorted(seq.ids(), key=int) == sorted(expected, key=int)
    with seq.get("train", timeout=0) as lease:
        assert lease.batch["x"].tolist() == [int(lease.batch.ids[0])] * 3


def test_a_puller_that_is_closed_loses_nothing() -> None:
    """Closed in order, and made again at the same place: what was not taken comes there."""
    address = free_address()
    puller = Puller(address)
    with Pusher(address, window=20) as pusher:
        for at in range(20):
            pusher.push(at)
        taken = [puller.pull(HANG_S) for _ in range(3)]
        puller.close()
        with Puller(address) as puller:
            while taken[-1] != 19:  # in order; items whose acknowledgement did not arrive come again
                taken.append(puller.pull(HANG_S))
            pusher.flush(HANG_S)
    assert list(dict.fromkeys(taken)) == list(range(20))


def test_close_tells_what_nobody_took() -> None:
    pusher = Pusher(free_address())
    pusher.push(sample(1))
    with pytest.raises(NotReady, match="1 items wait"):
        pusher.close(timeout=0.1)
    with pytest.raises(ClosedError):
        pusher.push(sample(2))
    pusher.close()


def test_foreign_bytes_are_counted_and_passed_over() -> None:
    with Puller() as puller:
        context = zmq.Context()
        foreign = context.socket(zmq.DEALER)
        foreign.connect(puller.address)
        for frames in (
            [b"x"],
            [b"", b""],
            [bytes(17), b"\xff" * 40],
            [bytes(16) + b"\x01"],
            [bytes(16) + b"\x01", b"[" * 10**5],
        ):
            foreign.send_multipart(frames)
        with Pusher(puller.address) as pusher:
            pusher.push(sample(5))
            names = []
            while not names:
                names = puller.pull(5).ids
            assert names == ["5"]
        with pytest.raises(NotReady):
            puller.pull(0.1)
        assert puller.refused == 5
        context.destroy(linger=0)


def test_addresses_that_do_not_work_say_so() -> None:
    with Puller() as puller, pytest.raises(StorageError, match="in use"):
        Puller(puller.address)
    for kind in (Puller, Pusher):
        with pytest.raises(StorageError):
            kind("nowhere")


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5555", "tcp://eth0:1", "udp://127.0.0.1:1"]
)
def test_puller_listens_to_this_machine_alone(address: str) -> None:
    with pytest.raises(StorageError, match="on the loopback"):
        Puller(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://127.8.9.1:0"])
def test_loopback_has_more_than_one_name(address: str) -> None:
    with Puller(address) as puller:
        assert puller.address.startswith("tcp://127.")
