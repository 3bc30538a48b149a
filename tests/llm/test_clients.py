"""Servers as child processes, and clients whose servers refuse, fail to start, or come back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S, until
from served import local, until_async
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.llm.generators import Engine, LocalGenerator, Sampling
from sharpwave.llm.generators.launch import ServerProcess
from sharpwave.llm.generators.mends import Mends
from sharpwave.llm.generators.partial import Partial
from sharpwave.llm.generators.remote import Gone, Refused
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.generators.server.http_server import HttpServer
from sharpwave.llm.generators.vllm import VLLMClient, vllm_server
from sharpwave.llm.model import save_model, small_model
from sharpwave.llm.weights import Weights

# Sleeps, and notes that it was asked to end; a second one does so without ending.
OBEDIENT = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True)\n"
STUBBORN = OBEDIENT.replace("sys.exit(0)", "print('no', flush=True)")
WAIT = "while True: time.sleep(0.05)\n"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def program(text: str, log: Path, **settings: Any) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", text], log=log, **settings)


def test_a_process_is_stopped_by_sigterm_and_by_sigkill_where_it_does_not_obey(tmp_path: Path) -> None:
    for text, said in ((OBEDIENT, "up\n"), (STUBBORN, "up\nno\n")):
        process = program(text + WAIT, tmp_path / "log", grace_s=0.3)
        (tmp_path / "log").unlink(missing_ok=True)
        process.start()
        pid = process.pid
        assert pid is not None
        until(lambda: (tmp_path / "log").read_text() == "up\n")
        process.stop()
        assert not process.is_alive
        assert not is_alive(pid)
        assert (tmp_path / "log").read_text() == said
        process.stop()  # a second time does nothing


def test_a_process_and_its_helpers_end_when_it_is_killed(tmp_path: Path) -> None:
    # vLLM's engine is such a helper: it would keep the memory of a killed server.
    helper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'])"
    text = f"import subprocess, sys, time\nprint({helper}.pid, flush=True)\n"
    process = program(text + WAIT, tmp_path / "log")
    process.start()
    until(lambda: (tmp_path / "log").read_text().endswith("\n"))
    pid = int((tmp_path / "log").read_text())
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    until(lambda: not process.is_alive)
    first = process.pid
    process.start()
    assert process.is_alive
    assert process.pid != first
    process.stop()


@pytest.mark.parametrize("victim", ["parent", "guard"])
def test_a_process_ends_with_its_parent_however_that_ends(tmp_path: Path, victim: str) -> None:
    parent = (
        "import sys, time\nfrom sharpwave.llm.generators.launch import ServerProcess\n"
        f"process = ServerProcess([sys.executable, '-c', {'import time' + chr(10) + WAIT!r}])\n"
        "process.start(); print(process.pid, process._guard.pid, flush=True); time.sleep(999)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid, guard = map(int, started.stdout.readline().split())
        assert is_alive(pid)
        os.kill(started.pid if victim == "parent" else guard, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        started.kill()


TOLD_EARLY = """
popen = guard.subprocess.Popen
def start(*args, **kwargs):
    made = popen(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGTERM)
    return made
guard.subprocess.Popen = start
"""
KILLED_EARLY = """
class Kernel:
    def prctl(self, *_):
        os.kill(os.getppid(), signal.SIGKILL)
        while os.getppid() == first:
            time.sleep(0.001)
first = os.getpid()
guard.ctypes.CDLL = lambda _: Kernel()
"""


@pytest.mark.parametrize("change", [TOLD_EARLY, KILLED_EARLY])
def test_a_guard_that_ends_while_it_starts_the_server_leaves_none(tmp_path: Path, change: str) -> None:
    code = f"import os, signal, sys, time\nfrom sharpwave.llm.generators import guard\n{change}\nsys.exit(guard.main())"
    server = [sys.executable, "-c", f"open({str(tmp_path / 'mark')!r}, 'w')\nimport time\n{WAIT}"]
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code, "5", *server]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as started:
        line = started.communicate(timeout=HANG_S)[0]  # the server has the end of the third one, too
    if change == TOLD_EARLY:
        assert not is_alive(int(line))
        assert started.returncode == 128 + signal.SIGTERM
    else:
        assert not (tmp_path / "mark").exists()


class SlowStart(ServerProcess):
    """It is begun when the test lets it."""

    def __init__(self) -> None:
        super().__init__([sys.executable, "-c", WAIT])
        self.is_asked, self.begins, self.ended = (threading.Event() for _ in range(3))

    def start(self) -> None:
        self.is_asked.set()
        self.begins.wait(HANG_S)
        super().start()
        self.ended.set()


def test_a_client_that_closes_while_a_server_starts_leaves_none() -> None:
    process = SlowStart()

    async def main() -> None:
        client = VLLMClient([process])
        asked = asyncio.ensure_future(client.generate([1, 2]))
        await asyncio.to_thread(process.is_asked.wait, HANG_S)
        asked.cancel()
        closing = asyncio.ensure_future(client.close())
        await asyncio.wait([closing], timeout=0.2)
        process.begins.set()
        await closing
        await asyncio.to_thread(process.ended.wait, HANG_S)

    try:
        asyncio.run(main())
        assert not process.is_alive
    finally:
        process.stop()


def test_a_program_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    async def main(process: ServerProcess) -> None:
        client = VLLMClient(process)
        try:
            await client.health()
        finally:
            await client.close()

    with pytest.raises(NotReady, match="no such option --frob"):
        asyncio.run(main(program("raise SystemExit('no such option --frob')", tmp_path / "log")))
    with pytest.raises(NotReady, match="nowhere/vllm cannot be started"):
        ServerProcess(["/nowhere/vllm"], log=tmp_path / "other").start()
    with pytest.raises(StorageError, match="cannot be written"):
        program("", tmp_path / "missing" / "log").start()


def test_a_start_that_takes_too_long_has_failed_and_the_next_request_tries_another_one(tmp_path: Path) -> None:
    process = program("import os, time; print(os.getpid(), flush=True)\n" + WAIT, tmp_path / "log", ready_s=0.6)

    async def main() -> None:
        client = VLLMClient(process, patience_s=HANG_S)
        try:
            for _ in range(2):
                with pytest.raises(NotReady, match=r"did not answer within 0\.6 s of its start and was ended") as error:
                    await client.generate([1, 2])
                assert "raise ServerProcess(ready_s=)" in str(error.value)
                assert not process.is_alive
        finally:
            await client.close()

    asyncio.run(main())
    pids = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_a_server_that_is_silent_after_its_start_is_not_ended_for_it(tmp_path: Path) -> None:
    """`ready_s` is for its start."""

    async def main() -> None:
        async with local() as generator, GeneratorServer(generator) as server:
            process = program(WAIT.replace("while", "import time\nwhile"), tmp_path / "log", ready_s=0.2)
            client = VLLMClient(process, patience_s=0.4)
            try:
                process.start()
                process.port, port = int(server.address.rpartition(":")[2]), process.port
                await client.health()
                process.port = port
                await asyncio.sleep(0.4)
                with pytest.raises(NotReady, match="no server answered"):
                    await client.generate([1, 2])
                assert process.is_alive
            finally:
                await client.close()

    asyncio.run(main())


def test_the_end_of_a_log_is_read_without_the_rest(tmp_path: Path) -> None:
    process = program("", tmp_path / "log")
    with (tmp_path / "log").open("wb") as file:
        file.truncate(64 << 20)  # without blocks on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + b"no room for the cache\n" * 3)
    tracemalloc.start()
    assert process.tail(2).endswith("log ends with:\nno room for the cache\nno room for the cache")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    (tmp_path / "log").write_text("one line")
    assert process.tail().endswith("log ends with:\none line")


def test_a_machine_on_which_nothing_can_be_started_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("sharpwave.llm.generators.launch.subprocess.Popen", refuse)

    async def main() -> None:
        client = VLLMClient(ServerProcess(["serve"]))
        try:
            with pytest.raises(StorageError, match=r"serve cannot be started: .*Too many open files"):
                await asyncio.wait_for(client.generate([1, 2]), HANG_S)
        finally:
            await client.close()

    asyncio.run(main())


def test_the_command_of_vllm_has_what_the_client_needs() -> None:
    process = vllm_server("m", "--dtype", "float32", key="a-key")
    assert "--enable-scale-out" in process.command
    assert "processed_logprobs" in process.command
    assert process.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert process.env["VLLM_API_KEY"] == "a-key"
    assert "a-key" not in process.command  # other users of the machine see commands
    with pytest.raises(SchemaError, match="--logprobs-mode"):
        vllm_server("m", "--logprobs-mode=raw_logprobs")


def test_the_rest_of_an_answer_has_another_seed_and_fewer_tokens() -> None:
    sampling = Sampling(max_tokens=9, seed=2**63 - 1, top_p=0.5)
    assert Partial().rest(sampling) is sampling
    rests = [Partial([1] * made, [0.0] * made, [0] * made).rest(sampling) for made in range(1, 9)]
    assert [rest.max_tokens for rest in rests] == list(range(8, 0, -1))
    assert len({sampling.seed, *(rest.seed for rest in rests)}) == 9
    assert {rest.top_p for rest in rests} == {0.5}
    assert Partial([1], [0.0], [0]).rest(Sampling(max_tokens=2)).seed is None


def test_addresses_and_keys_that_are_wrong() -> None:
    with pytest.raises(SchemaError, match="expected http://host:port"):
        VLLMClient("localhost:8000")
    with pytest.raises(SchemaError, match="expected at least one address"):
        VLLMClient([])

    async def main() -> None:
        with pytest.raises(NotReady, match=r"no server answered within 0\.1 s: http://127\.0\.0\.1:1"):
            await VLLMClient("http://127.0.0.1:1", patience_s=0.1).generate([5])
        key = "0123456789abcdef"
        async with (
            LocalGenerator(Engine(small_model(), slots=2, context=64)) as local,
            GeneratorServer(local, key=key) as server,
        ):
            # At once, not after the patience for servers that are away.
            with pytest.raises(SchemaError, match="is the key= of the client right"):
                await VLLMClient(server.address, key="another one", patience_s=1e6).generate([5])
            client = VLLMClient(server.address, key=key)
            assert len((await client.generate([5], Sampling(max_tokens=4, ignore_eos=True))).tokens) == 4
            await client.close()
            with pytest.raises(ClosedError):
                await client.generate([5])

    asyncio.run(main())


def test_ids_that_are_no_list_of_tokens_are_refused() -> None:
    async def main() -> None:
        client = VLLMClient("http://127.0.0.1:1")
        unread = (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True))
        for ids in ([[1], [2, 3]], [[1]], "abc", None, [None], [True], [5, -1], [], *unread):
            for call in (client.generate, client.score):
                with pytest.raises(SchemaError, match=rf"{call.__name__}\(\): "):
                    await call(ids)  # type: ignore[arg-type]
        await client.close()

    asyncio.run(main())


def test_sequences_that_do_not_fit_are_told_with_the_call_and_what_mends_it() -> None:
    async def main() -> None:
        async with two_servers() as client:
            assert len(await client.score([5] * 255)) == 254
            with pytest.raises(SchemaError, match=r"score\(\): 256 tokens .*has 256; shorten the sequence"):
                await client.score([5] * 256)
            with pytest.raises(SchemaError, match=r"generate\(\): 250 tokens .*has 256; .*lower max_tokens"):
                await client.generate([5] * 250, Sampling(max_tokens=7))
            client.mends = Mends(context="raise Task(context=)")
            with pytest.raises(SchemaError, match=r"or lower max_tokens, or raise Task\(context=\)$"):
                await client.generate([5] * 250, Sampling(max_tokens=7))
            client.vocabulary = 5
            with pytest.raises(SchemaError, match=r"score\(\): ids\[1\]=5, expected 0 to 4"):
                await client.score([4, 5])

    asyncio.run(main())


@contextlib.asynccontextmanager
async def two_servers(**given: Any) -> AsyncIterator[VLLMClient]:
    """A client that has met both."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for _ in range(2):
            local = await stack.enter_async_context(LocalGenerator(Engine(small_model(), slots=2, context=256)))
            addresses.append((await stack.enter_async_context(GeneratorServer(local))).address)
        client = VLLMClient(addresses, **given)
        stack.push_async_callback(client.close)
        await client.health()
        await until_async(lambda: all(server.is_ready for server in client.servers))
        yield client


SHORT = Sampling(max_tokens=4, ignore_eos=True)


def test_a_server_that_refuses_weights_which_another_takes_waits_for_later_ones(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_model(small_model(seed=seed), tmp_path / str(seed))

    async def main() -> None:
        async with two_servers() as client:
            put, puts = client._put, []

            async def refuse(server: Any, path: str, version: int, kv: str) -> None:
                puts.append((client.servers.index(server), version))
                if server is client.servers[1] and version == 1:
                    raise Refused("no room for them")
                await put(server, path, version, kv)

            client._put = refuse  # type: ignore[method-assign]
            await client.update(tmp_path / "1", 1)
            refused = client.servers[1].behind
            assert refused is not None
            refused.again_at = math.inf  # however long the test takes
            answers = await asyncio.gather(*(client.generate([5], SHORT) for _ in range(4)))
            assert {version for answer in answers for version in answer.versions} == {1}
            assert (await client.health()).version == 1
            assert [server.is_ready for server in client.servers] == [True, False]
            assert "refuses version 1: no room for them" in client._troubles()
            assert puts == [(0, 1), (1, 1)]  # requests do not try it again
            with pytest.raises(SchemaError, match="have 1; versions only grow"):
                await client.update(tmp_path / "1", 1)
            await client.update(tmp_path / "2", 2)
            await until_async(lambda: all(server.is_ready for server in client.servers))
            assert [await client._version(server) for server in client.servers] == [2, 2]

    asyncio.run(main())


def test_weights_that_every_server_refuses_may_be_mended_and_given_again(tmp_path: Path) -> None:
    save_model(small_model(intermediate_size=32), tmp_path / "narrow")
    save_model(small_model(seed=1), tmp_path / "right")

    async def main() -> None:
        async with two_servers() as client:
            for _ in range(2):
                with pytest.raises(StorageError, match=r"refuses version 1: .*has shape.*the old weights stay"):
                    await client.update(tmp_path / "narrow", 1)
                assert all(server.is_ready for server in client.servers)
            assert (await client.generate([5], SHORT)).versions == [0] * 4
            await client.update(tmp_path / "right", 1)
            assert [await client._version(server) for server in client.servers] == [1, 1]

    asyncio.run(main())


def test_weights_that_one_server_refuses_while_the_other_breaks_off_are_forgotten(tmp_path: Path) -> None:
    save_model(small_model(seed=1), tmp_path)

    async def main() -> None:
        async with two_servers() as client:
            put = client._put

            async def fail(server: Any, *given: Any) -> None:
                if server is client.servers[0]:
                    await put(server, *given)  # it has the weights, and its answer is lost
                    raise Gone("the connection broke")
                raise Refused("no room for them")

            client._put = fail  # type: ignore[method-assign]
            with pytest.raises(StorageError, match="refuses version 1: no room for them; the old weights stay"):
                await client.update(tmp_path, 1)
            assert [server.is_ready for server in client.servers] == [False, True]
            client._put = put  # type: ignore[method-assign]
            await until_async(lambda: all(server.is_ready for server in client.servers))
            assert [server.version for server in client.servers] == [1, 0]  # as they say it themselves

    asyncio.run(main())


def test_a_version_that_is_given_again_is_not_taken_for_the_one_that_a_server_got_before(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_model(small_model(seed=seed), tmp_path / str(seed))

    async def main() -> None:
        async with two_servers() as client:
            put = client._put

            async def fail(server: Any, *given: Any) -> None:
                if server is client.servers[0]:
                    await put(server, *given)  # it has the weights, and its answer is lost
                    raise Gone("the connection broke")
                raise Refused("no room for them")

            client._put = fail  # type: ignore[method-assign]
            with pytest.raises(StorageError, match="the old weights stay"):
                await client.update(tmp_path / "1", 1)
            client._put = put  # type: ignore[method-assign]
            await until_async(lambda: all(server.is_ready for server in client.servers))
            catch_up, tries = client._catch_up, []

            async def note(server: Any) -> None:
                try:
                    await catch_up(server)
                finally:
                    tries.append(server)

            client._catch_up = note  # type: ignore[method-assign]
            await client.update(tmp_path / "2", 1)
            await until_async(lambda: client.servers[0] in tries)
            right = await client._score(client.servers[1], [5, 6, 7])
            # The first server refuses a version that it has, so it waits for a later one.
            assert [server.is_ready for server in client.servers] == [False, True]
            await client.update(tmp_path / "1", 2)
            await client.update(tmp_path / "2", 3)
            await until_async(lambda: all(server.is_ready for server in client.servers))
            assert [await client._score(server, [5, 6, 7]) for server in client.servers] == [right, right]

    asyncio.run(main())


def test_a_request_that_servers_fail_again_and_again_ends() -> None:
    """They are well otherwise: they are ready again before it is sent again."""

    async def main() -> None:
        async with two_servers(patience_s=0.3) as client:
            tries = 0

            async def fail(*_: Any) -> None:
                nonlocal tries
                tries += 1
                raise Gone("500: no kernel for this prompt", 500)

            ask, client._ask, client._score = client._ask, fail, fail  # type: ignore[method-assign, assignment]
            for work in (lambda: client.generate([5], SHORT), lambda: client.score([5, 6])):
                tries = 0
                with pytest.raises(NotReady, match=r"failed \d+ times .*no kernel .*; try longer with patience_s="):
                    await asyncio.wait_for(work(), HANG_S)
                assert 5 <= tries <= 8  # later and later, not without a pause

            async def fail_at_first(server: Any, name: str, ids: list[int], sampling: Sampling, part: Partial) -> None:
                nonlocal tries
                tries += 1
                if tries % 4:
                    raise Gone("500: no kernel for this prompt", 500)
                part.add([7], [-1.0], 0)
                raise Gone("the connection broke")

            client._ask, client.patience_s, tries = fail_at_first, 0.0, 0  # type: ignore[method-assign]
            client._patience = lambda _: HANG_S  # type: ignore[method-assign]
            answer = await client.generate([5], replace(SHORT, max_tokens=3))
            assert (answer.tokens, answer.stop, tries) == ([7, 7, 7], "length", 12)  # each token begins the count again
            client._ask = ask  # type: ignore[method-assign]

    asyncio.run(main())


@contextlib.asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[GeneratorServer]:
    async with (
        LocalGenerator(Engine(small_model(), slots=2, context=256)) as local,
        GeneratorServer(local, port=port) as server,
    ):
        yield server


def port_of(server: GeneratorServer) -> int:
    return int(server.address.rpartition(":")[2])


def test_a_server_that_comes_back_after_its_version_was_removed_goes_on_with_the_next_one(tmp_path: Path) -> None:
    async def main() -> None:
        weights = Weights(tmp_path, keep=1)
        async with serving() as server:
            client = VLLMClient(server.address, patience_s=0.2)
            first = weights.publish(small_model(seed=1), 1)
            await client.update(first.path, 1)
        with pytest.raises(NotReady):
            await client.health()  # notices that it is gone
        second = weights.publish(small_model(seed=2), 2)  # the first one is removed
        async with serving(port_of(server)):
            await until_async(lambda: client.servers[0].behind is not None)
            with pytest.raises(NotReady, match=r"refuses version 1: .*expected a Hugging Face folder"):
                await client.generate([5], SHORT)
            client.patience_s = HANG_S
            late = asyncio.create_task(client.generate([5], SHORT))
            await client.update(second.path, 2)
            assert (await late).versions == [2] * 4
            with pytest.raises(SchemaError, match="have 2; versions only grow"):
                await client.update(second.path, 2)
            await client.close()

    asyncio.run(main())


def test_a_server_that_was_started_again_unnoticed_gets_the_newest_weights(tmp_path: Path) -> None:
    save_model(small_model(seed=1), tmp_path)

    async def main() -> None:
        async with serving() as server:
            client = VLLMClient(server.address)
            await client.update(tmp_path, 1)
            assert (await client.generate([5], SHORT)).versions == [1] * 4
        async with serving(port_of(server)):
            first = await client.generate([5], SHORT)  # its tokens tell it
            assert (first.versions, first.stop) == ([0] * 4, "length")
            assert (await client.generate([5], SHORT)).versions == [1] * 4
            await client.close()

    asyncio.run(main())


def test_an_update_without_a_server_is_kept_for_one_that_comes(tmp_path: Path) -> None:
    save_model(small_model(intermediate_size=32), tmp_path / "narrow")
    save_model(small_model(seed=1), tmp_path / "right")

    async def main() -> None:
        async with serving() as server:
            pass
        client = VLLMClient(server.address, patience_s=0.1)
        with pytest.raises(NotReady, match="no server answered"):
            await client.update(tmp_path / "right", 1)
        client.patience_s = HANG_S
        async with serving(port_of(server)):
            assert (await client.generate([5], SHORT)).versions == [1] * 4
            await client.update(tmp_path / "right", 1)  # the same call again
            with pytest.raises(SchemaError, match="versions only grow"):
                await client.update(tmp_path / "right", 1)
        with pytest.raises(NotReady):
            await client.health()  # notices that it is gone
        async with serving(port_of(server)):
            # What it refuses when it comes is not kept: the weights before are given to it.
            with pytest.raises(StorageError, match="refuses version 2"):
                await client.update(tmp_path / "narrow", 2)
            assert (await client.generate([5], SHORT)).versions == [1] * 4
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(5))
def test_a_request_that_is_cancelled_while_a_server_comes_back_ends(turns: int) -> None:
    async def main() -> None:
        client = VLLMClient("http://127.0.0.1:9")
        asked = asyncio.ensure_future(client.generate([1, 2]))
        await asyncio.wait([asked], timeout=0.1)
        client._tell_change()
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked], timeout=HANG_S)
        assert asked.cancelled()
        await client.close()

    asyncio.run(main())


def test_an_abort_reaches_a_request_that_begins_to_wait_while_another_one_comes() -> None:
    async def main() -> None:
        client = VLLMClient("http://127.0.0.1:9", patience_s=1e6)
        first = asyncio.ensure_future(client.generate([1]))
        aborting = asyncio.ensure_future(client.abort())
        second = asyncio.ensure_future(client.generate([2]))  # begins in the same turn of the loop
        assert await asyncio.wait_for(aborting, HANG_S) == 1
        assert (await first).stop == "abort"
        assert not second.done()
        second.cancel()
        await client.close()

    asyncio.run(main())


def test_requests_go_to_the_server_with_the_fewest() -> None:
    async def main() -> None:
        locals_ = [LocalGenerator(Engine(small_model(), slots=4, context=256)) for _ in range(2)]
        servers = [await GeneratorServer(local).start() for local in locals_]
        client = VLLMClient([server.address for server in servers])
        await client.health()
        while not all(server.is_ready for server in client.servers):
            await asyncio.sleep(0.005)
        counts: Counter[str] = Counter()
        ask = client._ask

        async def count(server: Any, *rest: Any) -> None:
            counts[server.address] += 1
            await ask(server, *rest)

        client._ask = count  # type: ignore[method-assign]
        long = Sampling(max_tokens=200, ignore_eos=True)
        answers = await asyncio.gather(*(client.generate([5 + i], long) for i in range(8)))
        assert all(len(answer.tokens) == 200 for answer in answers)
        assert sorted(counts.values()) == [4, 4]
        await client.close()
        for server, behind in zip(servers, locals_, strict=True):
            await server.close()
            await behind.close()

    asyncio.run(main())


def test_a_server_that_comes_back_at_its_address_goes_on_with_the_answer() -> None:
    """Its socket closes in mid-answer, as that of a machine which restarts; another server then listens there."""

    async def main() -> None:
        first = LocalGenerator(Engine(small_model(), slots=2, context=256))
        server = await GeneratorServer(first).start()
        client = VLLMClient(server.address)
        parts: list[Partial] = []
        ask = client._ask

        async def note(*given: Any) -> None:
            parts.append(given[-1])
            await ask(*given)

        client._ask = note  # type: ignore[method-assign]
        task = asyncio.ensure_future(client.generate([5, 6], Sampling(max_tokens=200, ignore_eos=True)))
        while not (parts and parts[0].tokens):
            await asyncio.sleep(0.002)
        await server.close()  # what it has is sent, with "abort": not one that this client asked for
        await first.close()
        async with LocalGenerator(Engine(small_model(), slots=2, context=256)) as second:
            port = int(server.address.rpartition(":")[2])
            async with GeneratorServer(second, port=port):
                answer = await task
                assert (len(answer.tokens), answer.stop) == (200, "length")
                assert len(parts) >= 2
                assert answer.tokens[: len(parts[0].tokens)] == parts[0].tokens
                await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "stop_ids", "size", "stop"),
    [(1, (), 4, "length"), (3, (), 4, "length"), (4, (), 4, "length"), (3, (7,), 3, "stop"), (4, (8,), 4, "stop")],
)
def test_a_server_that_dies_before_it_says_how_an_answer_ended_loses_no_token_and_adds_none(
    sent: int, stop_ids: tuple[int, ...], size: int, stop: str
) -> None:
    async def main() -> None:
        async with serving() as server:
            client = VLLMClient(server.address)
            ask, asked = client._ask, []

            async def break_off(server: Any, name: str, ids: list[int], sampling: Sampling, part: Partial) -> None:
                asked.append((ids, sampling.max_tokens))
                if len(asked) > 1:
                    await ask(server, name, ids, sampling, part)
                    return
                part.add([5, 6, 7, 8][:sent], [-1.0] * sent, 0)
                raise Gone("the connection broke")

            client._ask = break_off  # type: ignore[method-assign]
            answer = await client.generate([9], replace(SHORT, stop_ids=stop_ids))
            assert (len(answer.tokens), answer.stop, answer.matched) == (size, stop, stop_ids[0] if stop_ids else None)
            assert answer.tokens[:sent] == [5, 6, 7, 8][:sent]
            assert asked == [([9], 4), *([([9, *answer.tokens[:sent]], 4 - sent)] if sent < size else [])]
            await client.close()

    asyncio.run(main())


def vllm_like(mode: str | None) -> Starlette:
    """The calls by which vLLM tells what it is."""

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 64, "root": "m"}]})

    async def info(request: Request) -> Response:
        if mode is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"vllm_config": {"model_config": {"logprobs_mode": mode}}})

    async def health(request: Request) -> Response:
        return Response()

    routes = [Route("/health", health), Route("/v1/models", models), Route("/server_info", info)]
    return Starlette(routes=routes)


@pytest.mark.parametrize(
    ("mode", "said"),
    [("raw_logprobs", "--logprobs-mode processed_logprobs"), (None, "VLLM_SERVER_DEV_MODE=1")],
)
def test_a_vllm_whose_settings_would_give_other_logprobs_is_refused(mode: str | None, said: str) -> None:
    async def nothing() -> None:
        pass

    async def main() -> None:
        server = HttpServer(vllm_like(mode), "127.0.0.1", 0, nothing)
        await server.start()
        client = VLLMClient(server.address, patience_s=1e6)
        with pytest.raises(SchemaError, match=said):
            await client.generate([5], Sampling(max_tokens=4))
        await client.close()
        await server.close()

    asyncio.run(main())
