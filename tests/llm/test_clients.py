"""Servers as child processes, and clients whose servers refuse, fail to start, or come back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from patience import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.llm.generators import Engine, LocalGenerator, Sampling
from sharpwave.llm.generators.launch import ServerProcess
from sharpwave.llm.generators.partial import Partial
from sharpwave.llm.generators.server import GeneratorServer
from sharpwave.llm.generators.server.http_server import HttpServer
from sharpwave.llm.generators.vllm import VLLMClient, vllm_server
from sharpwave.llm.model import small_model

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
        for server, local in zip(servers, locals_, strict=True):
            await server.close()
            await local.close()

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
