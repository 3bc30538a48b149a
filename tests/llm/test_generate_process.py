"""`sharpwave generate serve` as a process: what it prints, how it ends, and what is there after a kill."""

import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest
import torch
from patience import HANG_S
from served import ENDLESS, GENERATE, tiny

from sharpwave.llm.model import save_model, small_tokenizer
from sharpwave.llm.weights import Weights

pytest.importorskip("typer")

from sharpwave.tools.generate_process import GeneratorOptions, run_generator
from sharpwave.tools.process_life import BadStart


@contextmanager
def serving(folder, *words):
    """A server's process and its address, which is its first line."""
    command = [sys.executable, "-m", "sharpwave", "generate", "serve", str(folder), "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().strip()
            if not address:
                raise AssertionError(process.communicate(timeout=HANG_S)[1])
            yield process, address
        finally:
            process.kill()


@pytest.fixture
def weights(tmp_path):
    small_tokenizer(tmp_path / "tokenizer")
    made = Weights(tmp_path / "weights", companions=tmp_path / "tokenizer")
    made.publish(tiny(), 3)
    return made


def body(count, ids=(5, 6, 7)):
    settings = {"max_tokens": count, "ignore_eos": True, "seed": 1, "logprobs": 0}
    return {"token_ids": list(ids), "sampling_params": settings, "stream": True}


def choices_of(lines):
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))["choices"][0]


def read_and_kill(process, lines):
    """Reads a stream, and kills its server after some tokens. Returns the tokens and the last spans of versions."""
    tokens, versions = [], []
    try:
        for choice in choices_of(lines):
            tokens += choice["token_ids"]
            versions = choice["weight_versions"]
            if len(tokens) > 10 and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(HANG_S)
    except httpx.TransportError:
        return tokens, versions
    raise AssertionError("the stream has ended as if nothing had happened")


def test_a_server_killed_in_mid_answer_comes_back_at_the_newest_version(weights):
    """What the client has is a prefix of the answer with its versions, so another server can go on with it."""
    with serving(weights.folder) as (process, address):
        with httpx.stream("POST", f"{address}{GENERATE}", json=body(ENDLESS), timeout=HANG_S) as answer:
            tokens, versions = read_and_kill(process, answer.iter_lines())
        assert versions == [{"version": "3", "start": 0, "end": len(tokens)}]
    weights.publish(tiny(seed=1), 4)
    weights.publish(tiny(seed=2), 8)
    with serving(weights.folder) as (_, address):
        assert httpx.get(f"{address}/weight_info", timeout=HANG_S).json() == {"weight_version": "8"}
        with httpx.stream("POST", f"{address}{GENERATE}", json=body(20, [5, 6, 7, *tokens]), timeout=HANG_S) as answer:
            rest = list(choices_of(answer.iter_lines()))
        assert sum(len(one["token_ids"]) for one in rest) == 20
        assert rest[-1]["weight_versions"] == [{"version": "8", "start": 0, "end": 20}]


def test_a_signal_ends_it_in_order(weights, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("0123456789abcdef\n")
    key_file.chmod(0o600)
    headers = {"authorization": "Bearer 0123456789abcdef"}
    with serving(weights.folder, "--key-file", key_file, "--name", "policy", "--drain", "0.5") as (process, address):
        with httpx.Client(base_url=address, headers=headers, timeout=HANG_S) as client:
            assert httpx.get(f"{address}/v1/models", timeout=HANG_S).status_code == 401
            assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
            given = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "model": "policy"}
            assert client.post("/v1/chat/completions", json=given).json()["usage"]["prompt_tokens"] > 2
            with client.stream("POST", GENERATE, json=body(ENDLESS)) as answer:
                choices = choices_of(answer.iter_lines())
                first = next(choices)
                process.send_signal(signal.SIGTERM)
                rest = list(choices)
        assert process.wait(HANG_S) == 0
        assert process.stdout.read() == process.stderr.read() == ""
    assert first["finish_reason"] is None
    assert rest[-1]["finish_reason"] in ("abort", "length")


def test_a_start_that_fails_exits_with_code_2(tmp_path):
    command = [sys.executable, "-m", "sharpwave", "generate", "serve", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"sharpwave: StorageError: {tmp_path} has neither config.json nor a published version\n"


def options(folder, **changes):
    given = {"host": "127.0.0.1", "port": 0, "key_file": None, "name": None, "slots": 2, "context": None, "chunk": 64}
    return GeneratorOptions(folder, **{**given, "dtype": None, "device": "cpu", "seed": 0, "drain_s": 0.0, **changes})


def test_wrong_options_are_told_before_it_listens(weights, tmp_path):
    save_model(tiny(), tmp_path / "checkpoint")
    readable = tmp_path / "key"
    readable.write_text("0123456789abcdef")
    readable.chmod(0o644)
    no_text = tmp_path / "no-text"
    no_text.write_bytes(b"\xff" * 16)
    no_text.chmod(0o600)
    Weights(tmp_path / "bare").publish(dict(tiny().weights()), 1)
    config = json.loads((tmp_path / "checkpoint/config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(
        json.dumps({**config, "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    for folder, changes, words in [
        (tmp_path / "missing", {}, "has neither config.json nor a published version"),
        (tmp_path / "bare", {}, "has no config.json; publish() a model"),
        (tmp_path / "other", {}, "gpt2"),
        (tmp_path / "checkpoint", {"dtype": "int8"}, "--dtype int8, expected float32, bfloat16, float16"),
        (tmp_path / "checkpoint", {"context": 9000}, "context=9000, but the model's max_position_embeddings is 8192"),
        (tmp_path / "checkpoint", {"key_file": readable}, "can be read by other users; chmod 600 it"),
        (tmp_path / "checkpoint", {"key_file": tmp_path / "no"}, "FileNotFoundError"),
        (
            tmp_path / "checkpoint",
            {"host": "0.0.0.0"},
            "is reached from other machines; give --key-file",
        ),
        (tmp_path / "checkpoint", {"device": "toaster"}, "device: expected cpu, cuda or cuda:1, got 'toaster'"),
        (tmp_path / "checkpoint", {"key_file": no_text}, "is no text"),
    ]:
        with pytest.raises(BadStart) as raised:
            run_generator(options(folder, context=changes.pop("context", 64), **changes))
        assert words in str(raised.value)
    assert not (tmp_path / "missing").exists()


def test_a_port_in_use_is_told_with_the_option(tmp_path):
    save_model(tiny(), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadStart, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*; give another --port"):
            run_generator(options(tmp_path, context=64, port=port))


def test_a_prompt_that_does_not_fit_is_told_with_the_option(weights):
    with serving(weights.folder, "--context", "64") as (_, address):
        answer = httpx.post(f"{address}{GENERATE}", json={**body(100), "stream": False}, timeout=HANG_S)
        assert answer.status_code == 400
        assert "shorten the prompt, lower max_tokens or raise --context" in answer.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("manifest.json", b"{}", "manifest.json is damaged: KeyError('version'); expected an object with version"),
        ("manifest.json", b'"x"', "manifest.json is damaged"),
        ("manifest.json", b"\xff", "manifest.json is damaged"),
        ("manifest.json", b'{"version": -4}', "version: expected a whole number"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "chat_template is 5, expected a text"),
        ("tokenizer_config.json", b'{"chat_template": [{"x": 1}]}', "chat_template is [{'x': 1}], expected a text"),
        ("tokenizer_config.json", b'{"chat_template": [5]}', "chat_template is [5], expected a text"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is damaged"),
        ("chat_template.json", b"\xff", "chat_template.json is damaged"),
    ],
)
def test_a_damaged_file_is_told_before_it_listens(tmp_path, name, content, words):
    save_model(tiny(), tmp_path)
    small_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadStart) as raised:
        run_generator(options(tmp_path, context=64))
    assert words in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_torch_was_not_built_for_is_told(tmp_path):
    save_model(tiny(), tmp_path)
    with pytest.raises(BadStart, match="device: 'cuda' is not there: torch finds no GPU; give --device cpu"):
        run_generator(options(tmp_path, context=64, device="cuda"))
