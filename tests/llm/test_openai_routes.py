"""Completions and chat of our server: texts, streams, log-probabilities, token ids."""

import pytest
from served import TEMPLATE, post, refusal, served, stream, tokenizer

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators.server.text import TextStream
from sharpwave.llm.generators.server.tool_calls import ToolText
from sharpwave.llm.model import small_tokenizer
from sharpwave.llm.tokenizer import ChatTokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def text_of(tokens):
    return tokenizer().decode(tokens, skip_special_tokens=True)


def test_a_completion_takes_a_text_or_tokens_or_many_of_them():
    async def main(client, generator):
        common = {"max_tokens": 5, "seed": 1, "ignore_eos": True, "return_token_ids": True}
        ids = tokenizer().encode("12 + 30 =")
        for prompt, count in [("12 + 30 =", 1), (ids, 1), (["12 + 30 =", "x"], 2), ([ids, [5]], 2)]:
            choices = (await post(client, COMPLETIONS, {"prompt": prompt, **common, "n": 2}))["choices"]
            assert [one["index"] for one in choices] == list(range(2 * count))
            assert choices[0]["prompt_token_ids"] == choices[1]["prompt_token_ids"] == ids
            for one in choices:
                assert one["text"] == text_of(one["token_ids"])
                assert one["weight_versions"] == [{"version": "0", "start": 0, "end": 5}]
        found = await post(client, COMPLETIONS, {"prompt": "x"})
        assert found["usage"]["completion_tokens"] <= 16
        assert "token_ids" not in found["choices"][0]
        for prompt in ([], "", [[]], [5, "x"], {"a": 1}, None):
            assert "prompt: expected" in await refusal(client, COMPLETIONS, {"prompt": prompt})

    served(main)


def test_prompts_times_n_are_limited():
    async def main(client, generator):
        words = await refusal(client, COMPLETIONS, {"prompt": [[5]] * 64, "n": 17})
        assert words == "n: 17 answers to each of 64 prompts, expected at most 1024 in all; send several requests"
        assert generator.engine.waiting == generator.engine.running == 0
        found = await post(client, COMPLETIONS, {"prompt": [[5]] * 64, "n": 16, "max_tokens": 1})
        assert len(found["choices"]) == 1024

    served(main)


def test_names_of_openai_that_change_no_token_are_accepted_and_others_refused():
    async def main(client, generator):
        common = {"max_tokens": 2, "messages": HI}
        harmless = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "medium", "user": "me"}
        harmless |= {"prediction": {"type": "content", "content": "x"}, "reasoning_effort": "medium"}
        harmless |= {"audio": None, "web_search_options": None, "later": None, "logprobs": None, "tools": None}
        await post(client, CHAT, {**common, **harmless})
        await post(client, COMPLETIONS, {"prompt": "x", "max_tokens": 2, "suffix": None, "later": None})
        for name, value in [
            ("verbosity", "low"),
            ("reasoning_effort", "high"),
            ("audio", {"voice": "x"}),
            ("functions", []),
            ("tool_choice", "required"),
            ("top_logprobs", 2),
            ("response_format", {"type": "json_object"}),
            ("moderation", {"model": "x"}),
        ]:
            assert (await refusal(client, CHAT, {**common, name: value})).startswith(f"{name}: ")

    served(main)


def test_a_model_is_told_by_its_name():
    async def main(client, generator):
        (listed,) = (await client.get("/v1/models")).json()["data"]
        found = await client.get("/v1/models/some/policy")
        assert found.json() == listed
        assert listed["id"] == "some/policy"
        answer = await client.get("/v1/models/other")
        assert answer.status_code == 404
        assert "'other' is not served here, expected 'some/policy'" in answer.json()["error"]["message"]

    served(main, name="some/policy")


def test_messages_that_are_wrong_are_refused():
    async def main(client, generator):
        for message, words in [
            ({"role": 5}, "messages[0].role: expected a string"),
            ({"role": "user", "content": 5}, "messages[0].content: expected a string"),
            ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls: expected a list"),
            ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls: expected a list"),
            ({"role": "assistant", "tool_calls": [5]}, "the template refuses these messages"),
        ]:
            assert words in await refusal(client, CHAT, {"messages": [message]})
        long = {"role": "user", "content": "x" * 9000}
        assert "leaves no room in a context of 8100" in await refusal(client, CHAT, {"messages": [long]})

    served(main)


def test_names_for_the_template_are_given_to_it():
    template = TEMPLATE + "{% if thinking %}<think>{% endif %}"

    async def main(client, generator):
        counts = []
        for names in ({}, {"thinking": True}):
            given = {"messages": HI, "max_tokens": 1, "chat_template_kwargs": names, "return_token_ids": True}
            counts.append(text_of((await post(client, CHAT, given))["prompt_token_ids"]))
        plain, thinking = counts
        assert thinking == plain + "<think>"
        for name in ("tokenize", "chat_template", "messages", "tools"):
            given = {"messages": HI, "chat_template_kwargs": {name: "{{ 1 }}"}}
            assert f'chat_template_kwargs: "{name}" is not a name' in await refusal(client, CHAT, given)

    served(main, tokenizer=ChatTokenizer(small_tokenizer(), template))


def test_log_probabilities_of_a_completion_and_of_its_prompt():
    async def main(client, generator):
        given = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
        given |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        (choice,) = (await post(client, COMPLETIONS, given))["choices"]
        scores = await generator.score([5, 6, 7, *choice["token_ids"]])
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores[2:], abs=1e-4)
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["prompt_logprobs"][0] is None
        assert choice["prompt_logprobs"][2]["7"]["logprob"] == pytest.approx(scores[1], abs=1e-4)
        (choice,) = (
            await post(client, CHAT, {"messages": HI, "max_tokens": 4, "logprobs": True, "return_token_ids": True})
        )["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])

    served(main)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_has_the_text_of_the_whole_answer(path):
    async def main(client, generator):
        given = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HI}
        given |= {"max_tokens": 120, "seed": 5, "n": 2, "ignore_eos": True, "return_token_ids": True}
        whole = await post(client, path, given)
        chunks = await stream(client, path, given)
        for at, wanted in enumerate(whole["choices"]):
            own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == at]
            texts = [one["text"] if path == COMPLETIONS else one["delta"]["content"] for one in own]
            assert "".join(texts) == (wanted["text"] if path == COMPLETIONS else wanted["message"]["content"])
            assert [token for one in own for token in one["token_ids"]] == wanted["token_ids"]
            assert own[-1]["weight_versions"] == wanted["weight_versions"]
        # A stop string is cut off, whole or in pieces.
        text = text_of(whole["choices"][0]["token_ids"])
        stop = next(text[at : at + 3] for at in range(20, len(text)) if "\ufffd" not in text[at : at + 3])
        given |= {"stop": [stop], "n": 1}
        (cut,) = (await post(client, path, given))["choices"]
        assert cut["stop_reason"] == stop
        said = cut["text"] if path == COMPLETIONS else cut["message"]["content"]
        assert said == text[: text.index(stop)]
        pieces = [chunk["choices"][0] for chunk in await stream(client, path, given)]
        assert "".join(one["text"] if path == COMPLETIONS else one["delta"]["content"] for one in pieces) == said

    served(main)


def test_a_server_without_a_tokenizer_takes_tokens_only():
    async def main(client, generator):
        (choice,) = (await post(client, COMPLETIONS, {"prompt": [5, 6], "logprobs": 0, "max_tokens": 2}))["choices"]
        assert choice["logprobs"]["tokens"][0].startswith("token_id:")
        assert "give token ids" in await refusal(client, COMPLETIONS, {"prompt": "hi"})
        assert "chat needs a tokenizer" in await refusal(client, CHAT, {"messages": HI})
        given = {"token_ids": [5], "output_mode": "text"}
        assert 'output_mode: "text", expected "tokens"' in await refusal(client, "/inference/v1/generate", given)

    served(main, tokenizer=None)


def test_a_tokenizer_without_a_template_is_told():
    async def main(client, generator):
        assert "has no chat template" in await refusal(client, CHAT, {"messages": HI})

    served(main, tokenizer=ChatTokenizer(small_tokenizer()))


def test_the_template_is_read_from_a_folder_and_its_refusal_is_told(tmp_path):
    small_tokenizer(tmp_path)
    read = ChatTokenizer.read(tmp_path)
    assert read.apply_chat_template(HI) == "<bos>user\nhi<eos>\n<bos>assistant\n"
    assert read.encode("<bos>hi")[0] == 1
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no ' + bos_token) }}")
    with pytest.raises(SchemaError, match="the template refuses these messages: no <bos>"):
        ChatTokenizer.read(tmp_path).apply_chat_template(HI)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(SchemaError, match="unsafe"):
        ChatTokenizer.read(tmp_path).apply_chat_template(HI)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(SchemaError, match="the chat template is wrong"):
        ChatTokenizer.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StorageError, match=r"tokenizer\.json is damaged"):
        ChatTokenizer.read(tmp_path)
    with pytest.raises(StorageError, match=r"has no tokenizer\.json"):
        ChatTokenizer.read(tmp_path / "missing")


def test_text_in_pieces_is_the_text_of_all_tokens():
    text = "Grüße: 你好, 🌊!"
    ids = tokenizer().encode(text)
    for size in (1, 2, 3, len(ids)):
        made = TextStream(tokenizer())
        pieces = [made.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) + made.push([], "length") == text
    made = TextStream(tokenizer(), ["!!", "END"])
    pieces = [made.push([token]) for token in tokenizer().encode("a!bEN")]
    assert "".join(pieces) == "a!b"
    assert made.push(tokenizer().encode("D!"), "stop", "END") == ""


def test_a_text_that_only_begins_like_a_call_is_shown():
    made = ToolText()
    assert [made.push(piece) for piece in ("a <", "b", "<tool", "_calls>", "<tool_c")] == [
        "a ",
        "<b",
        "",
        "<tool_calls>",
        "",
    ]
    assert made.end() == ("<tool_c", [])
