"""`SGLangClient`: servers that speak SGLang's protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import SchemaError
from .client import Client
from .launch import ServerProcess
from .partial import Partial
from .remote import Gone, Refused, Remote
from .sampling import Sampling
from .spans import versions_of

__all__ = ["SGLangClient", "sglang_server"]

_ALL_TOKENS = -1  # top_k


class SGLangClient(Client):
    """A generator behind SGLang servers. See `Client` for the arguments.

    Log-probabilities are those after the temperature. SGLang does not apply top_k, top_p and min_p to them, so requests
    with these settings are refused. For temperature 0 they are the model's own.

    SGLang dies of a token id that its model does not have. The client refuses such ids where it can read the model's
    folder; elsewhere give `vocabulary`.

    A server that is started with --incremental-streaming-output sends each token once. Without it, each event repeats
    the whole answer, and long answers cost much. `sglang_server` sets it.
    """

    async def _meet(self, server: Remote) -> None:
        await server.ask("GET", "/health", within_s=10.0)
        told = await server.ask("GET", "/server_info")
        if not isinstance(told, dict):
            raise Refused(f"{server.address}/server_info: {str(told)[:200]}, expected the settings of SGLang")
        server.kind, server.limit = "sglang", told.get("context_length") or None
        server.has_seeds = bool(told.get("enable_deterministic_inference"))
        server.vocabulary = _vocabulary_of((await server.ask("GET", "/model_info")).get("model_path"))
        if server.is_held:  # it could not be reached to end the pause of an update
            await self._resume(server)

    async def _version(self, server: Remote) -> int:
        return self._number((await server.ask("GET", "/model_info")).get("weight_version"))

    async def _ask(self, server: Remote, name: str, ids: list[int], sampling: Sampling, part: Partial) -> None:
        if sampling.seed is not None and not server.has_seeds:
            raise SchemaError(
                f"Sampling(seed={sampling.seed}): {server.address} ignores seeds; start SGLang with "
                "--enable-deterministic-inference, or leave it out"
            )
        body = {
            "input_ids": ids,
            "rid": name,
            "stream": True,
            "sampling_params": parameters(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            # Keys and values that other weights made must not be used for this prompt.
            "extra_key": f"version {server.version}",
        }
        async for event in server.chunks("/generate", body):
            read_event(event, part, self._first_version if server.version is None else server.version, self._number)
        if part.stop is None:
            raise Gone(f"{server.address}/generate: the answer broke off")

    async def _score(self, server: Remote, ids: list[int]) -> list[float]:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": f"version {server.version}",
        }
        answer = await server.ask("POST", "/generate", body, within_s=600.0)
        return read_scores(answer, ids)

    async def _put(self, server: Remote, path: str, version: int, kv: str) -> None:
        # "in_place" goes on over the old keys and values; "retract" puts requests back into the queue.
        server.is_held = True
        await server.ask("POST", "/pause_generation", {"mode": "in_place" if kv == "keep" else "retract"})
        try:
            body = {
                "model_path": path,
                "weight_version": str(version),
                "flush_cache": kv == "recompute",  # it fails while requests hold the cache
                "abort_all_requests": False,
            }
            answer = await server.ask("POST", "/update_weights_from_disk", body, within_s=600.0)
            if not answer.get("success"):
                raise Refused(f"{server.address}/update_weights_from_disk: {answer.get('message')}")
            server.version = version
        finally:
            await self._resume(server)

    @staticmethod
    async def _resume(server: Remote) -> None:
        await server.ask("POST", "/continue_generation", {})
        server.is_held = False

    async def _abort(self, server: Remote, names: list[str]) -> None:
        for name in names:
            await server.ask("POST", "/abort_request", {"rid": name})


def _vocabulary_of(folder: str | None) -> int | None:
    """Of the model in a folder; None where it is not visible here."""
    try:
        config = json.loads((Path(folder or "") / "config.json").read_text())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def parameters(sampling: Sampling) -> dict[str, Any]:
    """The settings as SGLang names them."""
    filters = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    for name, is_set in filters.items():
        if is_set and sampling.temperature > 0:
            raise SchemaError(
                f"Sampling({name}={getattr(sampling, name)}): SGLang's log-probabilities are those before {name}, "
                "not of the distribution that is sampled from; leave it out, or use another server"
            )
    if sampling.ignore_eos and sampling.stop_ids:
        raise SchemaError(
            f"Sampling(ignore_eos=True, stop_ids={sampling.stop_ids}): SGLang then ignores stop ids, too; leave one out"
        )
    found: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": _ALL_TOKENS,
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        found["sampling_seed"] = sampling.seed
    return found


def read_event(event: dict[str, Any], part: Partial, version: int, number: Any) -> None:
    """Adds what an event of a stream, or a whole answer, has that `part` lacks."""
    told = event["meta_info"]
    tokens, entries = event.get("output_ids") or [], told.get("output_token_logprobs") or []
    count = told.get("completion_tokens", len(tokens))
    had = len(part.tokens)
    # Events repeat the whole answer, or have only what is new: then they are shorter than the count.
    tokens = tokens[had:] if len(tokens) == count else tokens
    entries = entries[had:] if len(entries) == count else entries
    if (
        had + len(tokens) != count
        or len(entries) != len(tokens)
        or any(entry[1] != token for entry, token in zip(entries, tokens, strict=True))
    ):
        raise Gone(f"/generate: {len(tokens)} tokens and {len(entries)} log-probabilities after {had}, of {count}")
    part.add(tokens, [float(entry[0]) for entry in entries], version)
    spans = told.get("weight_versions")
    if spans:
        part.versions = versions_of(spans, count, number)
    _read_end(told.get("finish_reason"), part)


def _read_end(reason: dict[str, Any] | None, part: Partial) -> None:
    if reason is None:
        return
    code = reason.get("status_code")
    if reason["type"] == "abort" and code is not None and int(code) >= 400:
        said = f"/generate: {code}: {reason.get('message')}"
        raise Gone(said, int(code)) if int(code) >= 500 else Refused(said)
    part.stop, part.matched = reason["type"], reason.get("matched")


def read_scores(answer: dict[str, Any], ids: list[int]) -> list[float]:
    entries = answer["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != ids:
        raise Gone(f"/generate: log-probabilities of {len(entries)} tokens, expected those of {len(ids)}")
    return [float(entry[0]) for entry in entries[1:]]


def sglang_server(
    folder: str | Path,
    *arguments: str,
    program: str | Path = "python",
    key: str | None = None,
    env: dict[str, str] | None = None,
    log: str | Path | None = None,
    ready_s: float = 600.0,
) -> ServerProcess:
    """SGLang as a child process, with the settings that `SGLangClient` needs.

    Args:
        folder: The model's Hugging Face folder.
        *arguments: More of `sglang.launch_server`, e.g. "--tp", "2".
        program: The Python that has SGLang, e.g. of another environment.
        key: The API key that it asks for; give the client the same.
        env: Added to the environment.
        log: A file for its output.
        ready_s: A start that takes longer has failed.
    """
    if any(one.split("=")[0] in ("--host", "--port", "--model-path", "--api-key") for one in arguments):
        raise SchemaError(f"sglang_server(): {arguments} set what sglang_server sets; expected other settings")
    command = [str(program), "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1"]
    command += ["--port", "{port}", "--incremental-streaming-output"]
    command += [*(() if key is None else ("--api-key", key)), *arguments]
    # Log-probabilities before the temperature are not of the distribution that is sampled from.
    given = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", **(env or {})}
    return ServerProcess(command, env=given, log=log, ready_s=ready_s)
