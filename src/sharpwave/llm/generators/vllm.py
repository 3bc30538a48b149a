"""`VLLMClient`: servers that speak vLLM's protocol, vLLM itself and Sharpwave's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ...errors import SchemaError
from .client import Client
from .launch import ServerProcess
from .partial import Partial
from .remote import Gone, Refused, Remote
from .sampling import Sampling
from .spans import versions_of

__all__ = ["VLLMClient", "sharpwave_server", "vllm_server"]

_GENERATE = "/inference/v1/generate"


class VLLMClient(Client):
    """A generator behind vLLM servers, or behind servers of `sharpwave.llm`, which speak the same protocol.

    vLLM has to be started with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and --logprobs-mode processed_logprobs;
    `vllm_server` does that. See `Client` for the arguments.

    Answers are streamed, so the tokens until a server's death are known. vLLM names the versions of tokens in the last
    event only: for an answer whose server died, they are those that this client knew when the tokens arrived.
    """

    async def _meet(self, server: Remote) -> None:
        await server.ask("GET", "/health", within_s=10.0)
        models = await server.ask("GET", "/v1/models")
        try:
            first = models["data"][0]
            server.kind, server.limit = str(first.get("owned_by")), first.get("max_model_len")
            server.folder = first.get("root")
        except (KeyError, IndexError, TypeError) as error:
            raise Refused(f"{server.address}/v1/models: {str(models)[:200]}, expected a model of vLLM") from error
        if server.kind == "vllm":
            await self._check_logprobs(server)
            if server.is_held:  # it could not be reached to end the pause of an update
                await self._resume(server)

    async def _check_logprobs(self, server: Remote) -> None:
        try:
            told = await server.ask("GET", "/server_info", query={"config_format": "json"})
            mode = told["vllm_config"]["model_config"]["logprobs_mode"]
        except (Refused, KeyError, TypeError) as error:
            raise Refused(
                f"{server.address}/server_info does not tell the settings; start vLLM with VLLM_SERVER_DEV_MODE=1: "
                "weights cannot be updated without it"
            ) from error
        # Those before temperature and filters are not of the distribution that was sampled from.
        if mode != "processed_logprobs":
            raise Refused(
                f"{server.address} has logprobs_mode={mode!r}; start vLLM with --logprobs-mode processed_logprobs"
            )

    async def _version(self, server: Remote) -> int:
        return self._number((await server.ask("GET", "/weight_info"))["weight_version"])

    async def _ask(self, server: Remote, name: str, ids: list[int], sampling: Sampling, part: Partial) -> None:
        body = {
            "token_ids": ids,
            "request_id": name,
            "stream": True,
            "sampling_params": _parameters(sampling),
            # Keys and values that other weights made must not be used for this prompt.
            "cache_salt": f"version {server.version}",
        }
        async for event in server.chunks(_GENERATE, body):
            for choice in event.get("choices", ()):
                self._read_choice(choice, part, server)
        if part.stop is None:
            raise Gone(f"{server.address}{_GENERATE}: the answer broke off")

    def _read_choice(self, choice: dict[str, Any], part: Partial, server: Remote) -> None:
        tokens = choice.get("token_ids") or []
        logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
        if len(logprobs) != len(tokens):
            raise Gone(f"{server.address}{_GENERATE}: {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        part.add(tokens, logprobs, self._first_version if server.version is None else server.version)
        part.stop, part.matched = choice.get("finish_reason"), choice.get("stop_reason")
        spans = choice.get("weight_versions")
        if spans:
            part.versions = versions_of(spans, len(part.tokens), self._number)
        if part.stop == "stop" and part.matched is None and part.tokens:
            part.matched = part.tokens[-1]  # vLLM says nothing for the model's own end of text

    async def _score(self, server: Remote, ids: list[int]) -> list[float]:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0}}
        answer = await server.ask("POST", _GENERATE, body, within_s=600.0)
        found = answer["prompt_logprobs"][1:]
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], found, strict=True)]

    async def _put(self, server: Remote, path: str, version: int, kv: str) -> None:
        if server.kind != "vllm":
            body = {"model_path": path, "weight_version": str(version), "flush_cache": kv == "recompute"}
            await server.ask("POST", "/update_weights_from_disk", body, within_s=600.0)
            return
        query = {"mode": "keep", "clear_cache": "true" if kv == "recompute" else "false"}
        server.is_held = True
        await server.ask("POST", "/pause", query=query)
        try:
            await self._reload(server, path)
            await server.ask("POST", "/update_weight_version", {"new_version": str(version)})
            server.version = version  # before it goes on: tokens that arrive from now on are the new version's
        finally:
            await self._resume(server)

    @staticmethod
    async def _resume(server: Remote) -> None:
        await server.ask("POST", "/resume")
        server.is_held = False

    async def _reload(self, server: Remote, path: str) -> None:
        try:
            await self._read_folder(server, path)
        except Gone as error:
            if error.status is None:
                raise
            # vLLM gives up its weights before it looks for the new ones: without these it would die at the next token.
            if server.folder is None:
                raise
            await self._read_folder(server, server.folder)
            raise Refused(str(error)) from error
        server.folder = path

    @staticmethod
    async def _read_folder(server: Remote, path: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await server.ask("POST", "/collective_rpc", body, within_s=600.0)

    async def _abort(self, server: Remote, names: list[str]) -> None:
        # vLLM puts a prefix before the names of its requests.
        every = [form for name in names for form in (name, f"generate-tokens-{name}")]
        await server.ask("POST", "/abort_requests", {"request_ids": every})


def _parameters(sampling: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        found["seed"] = sampling.seed
    return found


def vllm_server(
    folder: str | Path,
    *arguments: str,
    program: str | Path = "vllm",
    key: str | None = None,
    env: dict[str, str] | None = None,
    log: str | Path | None = None,
    ready_s: float = 600.0,
) -> ServerProcess:
    """vLLM as a child process, with the settings that `VLLMClient` needs.

    Args:
        folder: The model's Hugging Face folder.
        *arguments: More of `vllm serve`, e.g. "--tensor-parallel-size", "2".
        program: The program, e.g. of another environment. vLLM need not be installed here.
        key: The API key that it asks for; give the client the same.
        env: Added to the environment.
        log: A file for its output.
        ready_s: A start that takes longer has failed.
    """
    if any(one.split("=")[0] in ("--host", "--port", "--logprobs-mode", "--api-key") for one in arguments):
        raise SchemaError(f"vllm_server(): {arguments} set what vllm_server sets; expected other settings")
    command = [str(program), "serve", str(folder), "--host", "127.0.0.1", "--port", "{port}", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", *arguments]
    given = {"VLLM_SERVER_DEV_MODE": "1", **({} if key is None else {"VLLM_API_KEY": key}), **(env or {})}
    return ServerProcess(command, env=given, log=log, ready_s=ready_s)


def sharpwave_server(
    folder: str | Path, *arguments: str, log: str | Path | None = None, ready_s: float = 600.0
) -> ServerProcess:
    """`sharpwave generate serve` as a child process, for `VLLMClient`.

    Args:
        folder: A Hugging Face folder, or a folder of versions.
        *arguments: More of the command, e.g. "--slots", "64".
        log: A file for its output.
        ready_s: A start that takes longer has failed.
    """
    command = [sys.executable, "-m", "sharpwave", "generate", "serve", str(folder), "--port", "{port}", *arguments]
    return ServerProcess(command, log=log, ready_s=ready_s)
