"""What outlives a server's desk or a client's socket, and keys that are unknown for a moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import HANG_S, until
from service.server_child import ServerChild

pytest.importorskip("zmq")

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, StorageError
from sharpwave.service import keys as keys_module
from sharpwave.service.keys import make_key
from sharpwave.service.message import Verb

# Of a buffer in memory, the samples of a client are views of the message that brought them.
OUTLIVES = """
import gc
import numpy as np
import sharpwave as sw
flow = sw.Dataflow([sw.Consumer("train", {"x"}, batch_size=2)])
seq = sw.SequenceBuffer(2, flow=flow)
server = sw.serve({"seq": seq}, "tcp://127.0.0.1:0")
with sw.open(server.address + "/seq") as remote:
    remote.put(sw.SequenceSample(["a", "b"], {"x": [9000, 9000]}, {"x": np.arange(18000)}))
server.close()
del server, remote
gc.collect()
junk = [bytearray(b"\\xff" * size) for size in range(16, 6000, 8) for _ in range(4)]
with seq.get("train", batch_size=2) as lease:
    assert int(lease.batch["x"].sum()) == sum(range(18000))
del lease, seq
gc.collect()
print("alive")
"""


def row(number: int) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], False


def test_what_a_client_put_outlives_the_server_that_took_it() -> None:
    done = subprocess.run([sys.executable, "-c", OUTLIVES], capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "alive\n", done.stderr


# ---- sockets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def waits() -> Iterator[Any]:
    """A buffer of another thread's server, of which a sample waits."""
    table = sw.ReplayBuffer(100, obs_shape=(2,), sampler=sw.Fifo(), pace=sw.Pace.queue(4), seed=0)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0") as server, sw.open(f"{server.address}/it") as buffer:
        yield server, buffer
    table.close()


def later(server: Any, call: Any) -> threading.Thread:
    """Does it once a call waits at the server."""

    def run() -> None:
        until(lambda: server.stats()["waiting"])
        call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_handler_of_a_signal_may_close_the_buffer_whose_call_it_interrupts(waits: Any) -> None:
    server, buffer = waits
    before = signal.signal(signal.SIGUSR1, lambda *_: buffer.close())
    thread = later(server, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        with pytest.raises(ClosedError, match="the buffer is closed"):
            buffer.sample(4, timeout=HANG_S)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_channel_that_another_thread_closes_ends_its_call(waits: Any) -> None:
    server, buffer = waits
    thread = later(server, buffer._rows.session.channel().close)
    with pytest.raises(ClosedError, match="closed"):
        buffer.sample(4, timeout=HANG_S)
    thread.join()


def new_buffer() -> Any:
    return sw.ReplayBuffer(100, obs_shape=(2,), seed=0)


def test_a_call_ends_at_its_deadline_among_signals() -> None:
    server = ServerChild(new_buffer)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        buffer = sw.open(server.address)
        buffer.add(*row(1))
        server.pause()
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with pytest.raises(NotReady, match="did not answer"):
            buffer.sample(4, timeout=0.5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        server.kill()
    with pytest.raises(NotReady):
        buffer.sample(4, timeout=0)
    buffer.close()


# ---- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_key(tmp_path / "keys", "all", ("read", "write", "admin"))
    return tmp_path / "keys"


@pytest.fixture
def server(folder: Path) -> Iterator[Any]:
    table = sw.ReplayBuffer(100, obs_shape=(2,), seed=0)
    with sw.serve({"it": table}, "tcp://127.0.0.1:0", keys=folder, client_timeout=1000) as server:
        yield server
    table.close()


def test_a_key_that_is_unknown_for_a_moment_makes_no_call_of_other_messages(
    server: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sw.open(f"{server.address}/it", keys=folder / "all.key") as buffer:
        buffer.add(*row(1))
        with monkeypatch.context() as patch:
            # As without free descriptors; the file itself stays as it is.
            patch.setattr(keys_module, "read_clients", lambda *_: (_ for _ in ()).throw(OSError("no descriptors")))
            os.utime(folder / "clients.list")
            with pytest.raises(StorageError, match="cannot be read"):
                buffer.add(*row(2))
        session = buffer._rows.session
        # The first message after it is a beat, which has no number.
        channel = session.new_channel()
        channel._wire.send(None, session.version, Verb.BEAT, 0, 0, session.number, channel.number, 0, 0, 0, 0, 0)
        buffer.add(*row(3), timeout=HANG_S)
        (client,) = server.stats()["clients"].values()
        assert client["open_calls"] == 0
        assert client["roles"] == ["admin", "read", "write"]
        assert buffer.sample(64)["action"].max() == 3


@pytest.mark.parametrize("time", [-10, 0])
def test_a_list_of_keys_with_an_old_date_is_read(server: Any, folder: Path, time: int) -> None:
    with sw.open(f"{server.address}/it", keys=folder / "all.key") as buffer:
        os.utime(folder / "clients.list", (time, time))
        buffer.add(*row(1), timeout=HANG_S)
    assert "failure" not in server.stats()["refused"]


def test_a_list_of_keys_that_is_no_text_admits_nobody(server: Any, folder: Path) -> None:
    from sharpwave import _core

    path = folder / "clients.list"
    with sw.open(f"{server.address}/it", keys=folder / "all.key") as buffer:
        buffer.add(*row(1))
        text = path.read_bytes().rpartition(b"check = ")[0] + b"client = \xff\n"
        path.write_bytes(text + f"check = {_core.crc32c(text):08x}\n".encode())
        with pytest.raises(StorageError, match="cannot be read"):
            buffer.add(*row(2))
