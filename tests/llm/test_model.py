"""The transformer against transformers' own, in float32 on random weights, with every option and in both directions."""

import itertools
import json

import pytest
import torch

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.model import (
    KVCache,
    ModelConfig,
    Rope,
    load_model,
    load_state,
    save_model,
    small_model,
    small_tokenizer,
)
from sharpwave.llm.model.folder import is_finite

transformers = pytest.importorskip("transformers")

YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OPTIONS = {
    "llama": {},
    "llama, one head a key": {"num_key_value_heads": 4},
    "llama, all heads one key": {"num_key_value_heads": 1},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, wide heads": {"head_dim": 32},
    "llama, eps and theta": {"rms_norm_eps": 1e-2, "rope": Rope(500000.0)},
    "llama, linear": {"rope": Rope(10000.0, "linear", {"factor": 2.0})},
    "llama, dynamic": {"max_position_embeddings": 16, "rope": Rope(10000.0, "dynamic", {"factor": 2.0})},
    "llama, llama3": {"rope": Rope(500000.0, "llama3", LLAMA3)},
    "llama, yarn": {"rope": Rope(10000.0, "yarn", YARN)},
    "qwen2": {},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen2, yarn": {"rope": Rope(1e6, "yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False})},
    "qwen3": {},
    "qwen3, tied": {"tie_word_embeddings": True},
    "qwen3, biases": {"attention_bias": True},
    "qwen3, yarn with mscale": {"rope": Rope(1e6, "yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5})},
    "qwen3, yarn with attention_factor": {"rope": Rope(1e6, "yarn", {**YARN, "attention_factor": 1.3})},
}


def made(name):
    """A model whose every weight matters: norms and biases are random too."""
    changes = {"max_position_embeddings": 128, **OPTIONS[name]}
    model = small_model(name.partition(",")[0], vocab_size=100, **changes)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=source) * 0.3)
    return model


def ids_of(*shape, seed=0):
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(seed))


def differ(ours, theirs):
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_logits_equal_those_of_transformers_on_our_folder(name, tmp_path):
    ours = made(name)
    save_model(ours, tmp_path)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert theirs.dtype == torch.float32
    assert type(theirs).__name__ == json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    ids = ids_of(3, 40)
    assert differ(ours(ids), theirs(ids).logits) < 1e-4

    lengths = torch.tensor([40, 7, 23])
    mask = (torch.arange(40) < lengths[:, None]).long()
    real = mask.bool()
    assert differ(ours(ids, mask)[real], theirs(ids, attention_mask=mask).logits[real]) < 1e-4
    assert ours(ids, mask).isfinite().all()
    left = mask.flip(1)
    positions = (left.cumsum(1) - 1).clamp(min=0)
    theirs_left = theirs(ids, attention_mask=left, position_ids=positions).logits
    assert differ(ours(ids, left)[left.bool()], theirs_left[left.bool()]) < 1e-4


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_a_folder_of_transformers_opens_and_gives_the_same_logits(name, tmp_path):
    ours = made(name)
    save_model(ours, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    again = load_model(tmp_path / "theirs")
    assert again.config.rope == ours.config.rope
    ids = ids_of(2, 40)
    assert differ(again(ids), theirs(ids).logits) < 1e-4


@pytest.mark.parametrize("name", [name for name in OPTIONS if "dynamic" not in name])
@torch.no_grad()
def test_a_cache_gives_the_same_logits_as_a_whole_forward(name):
    model, ids = made(name), ids_of(2, 40)
    whole = model(ids)
    cache = KVCache(model.config, slots=2, context=48)
    where = cache.keys.data_ptr(), cache.values.data_ptr()
    for slot, cuts in enumerate(([0, 13, 20, 30], [0, 30])):
        for begin, end in itertools.pairwise(cuts):
            got = model.extend(
                ids[slot : slot + 1, begin:end], torch.arange(begin, end)[None], cache, slot=slot, length=end
            )
            assert differ(model.logits(got)[0], whole[slot, begin:end]) < 1e-4
    for at in range(30, 40):
        got = model.logits(model.extend(ids[:, at : at + 1], torch.full((2, 1), at), cache, length=at + 1))
        assert differ(got[:, 0], whole[:, at]) < 1e-4
    assert where == (cache.keys.data_ptr(), cache.values.data_ptr())


@torch.no_grad()
def test_an_idle_row_of_a_step_changes_nothing():
    model, ids = made("qwen3"), ids_of(1, 9)
    cache = KVCache(model.config, slots=3, context=16)
    for slot in range(3):
        model.extend(ids[:, :8], torch.arange(8)[None], cache, slot=slot, length=8)
    before = cache.keys[:, :, :, :16].clone()
    got = model.extend(ids[0, 8].expand(3, 1), torch.tensor([[16], [8], [16]]), cache, length=9)
    assert differ(model.logits(got)[1, 0], model(ids)[0, 8]) < 1e-4
    assert torch.equal(cache.keys[:, [0, 2], :, :16], before[:, [0, 2]])


@torch.no_grad()
def test_sequences_packed_into_a_row_do_not_see_each_other():
    model = made("llama")
    a, b = ids_of(1, 11), ids_of(1, 17, seed=1)
    packed = torch.cat([a, b, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 11 + [2] * 17 + [0] * 4])
    got = model(packed, mask)
    assert differ(got[:, :11], model(a)) < 1e-4
    assert differ(got[:, 11:28], model(b)) < 1e-4


def test_gradients_equal_those_of_transformers(tmp_path):
    ours = made("qwen3, tied")
    save_model(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = ids_of(2, 20)
    for model in (ours, theirs):
        logits = model(ids) if model is ours else model(ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    known = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert differ(parameter.grad, known[name].grad) < 1e-4, name


@torch.no_grad()
def test_bfloat16_keeps_the_frequencies_in_float32(tmp_path):
    ours = made("llama")
    save_model(ours.bfloat16(), tmp_path)
    again = load_model(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.model.rotary.frequencies.dtype == torch.float32
    ids = ids_of(1, 60)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.dtype == torch.bfloat16
    assert differ(again(ids).float().log_softmax(-1), theirs(ids).logits.float().log_softmax(-1)) < 5e-2
    assert load_model(tmp_path, dtype="float32").dtype == torch.float32


def test_a_dtype_that_a_model_cannot_have_is_refused(tmp_path):
    save_model(small_model(), tmp_path)
    for dtype in ("foo", "int64", 5, torch.int8, ""):
        with pytest.raises(SchemaError, match=r"load_model\(\): dtype=.*, expected float32, bfloat16, float16"):
            load_model(tmp_path, dtype=dtype)
    assert load_model(tmp_path, dtype=torch.float16).dtype is torch.float16


def test_shards_index_and_tokenizer_survive_a_round_trip(tmp_path):
    ours = small_model()
    small_tokenizer(tmp_path / "from")
    save_model(ours, tmp_path / "to", companions=tmp_path / "from", shard_bytes=50_000)
    shards = sorted(path.name for path in (tmp_path / "to").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(name.endswith(f"-of-{len(shards):05}.safetensors") for name in shards)
    again = load_model(tmp_path / "to")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    assert again.config.eos_ids == (2,)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "to")
    text = "Zwölf Boxkämpfer 🥊\n\x00 tabs\t"
    assert theirs.decode(theirs(text)["input_ids"]) == text
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<bos>user\nhi<eos>\n<bos>assistant\n"
    save_model(again, tmp_path / "to")
    assert sorted(path.name for path in (tmp_path / "to").glob("model*")) == ["model.safetensors"]
    assert (tmp_path / "to/tokenizer.json").exists()


def test_keys_of_config_json_that_the_model_does_not_use_are_kept(tmp_path):
    save_model(small_model(other={"eos_token_id": [2, 7], "my_note": {"a": 1}}), tmp_path)
    again = ModelConfig.read(tmp_path)
    assert again.eos_ids == (2, 7)
    assert again.other["my_note"] == {"a": 1}
    assert ModelConfig.from_json(again.to_json()) == again


def test_the_end_of_a_turn_is_read_from_the_generation_settings(tmp_path):
    save_model(small_model(), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load_model(tmp_path).config.eos_ids == (2, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_model(tmp_path).config.eos_ids == (2,)


def test_rope_scaling_of_older_folders_is_read():
    text = small_model("llama").config.to_json()
    text |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelConfig.from_json(text).rope == Rope(5e5, "linear", {"factor": 2.0})
    (newer := dict(text)).pop("rope_scaling")
    newer["rope_parameters"] = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert ModelConfig.from_json(newer).rope == Rope(5e5, "linear", {"factor": 2.0})


REFUSED = {
    "architecture GPT2LMHeadModel": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
    "sliding_window=4096 is not supported": {"use_sliding_window": True, "sliding_window": 4096},
    "all full_attention": {"layer_types": ["full_attention", "sliding_attention"]},
    "hidden_act='gelu', expected 'silu'": {"hidden_act": "gelu"},
    "quantization_config is not supported": {"quantization_config": {"bits": 4}},
    "rope scaling 'longrope' is not supported; expected default, linear, dynamic, llama3 or yarn": {
        "rope_scaling": {"rope_type": "longrope"}
    },
    "rope scaling 'llama3' needs low_freq_factor": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 9,
        }
    },
    "rope scaling 'linear' does not know beta": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}},
    "num_attention_heads=4 is no multiple of num_key_value_heads=3": {"num_key_value_heads": 3},
    "hidden_size='64', expected int": {"hidden_size": "64"},
    "rope_scaling='linear', expected an object": {"rope_scaling": "linear"},
    "rope_parameters=[1], expected an object": {"rope_parameters": [1]},
    "rope scaling 5 is not supported": {"rope_scaling": {"rope_type": 5}},
    "rope scaling ['linear'] is not supported": {"rope_scaling": {"rope_type": ["linear"]}},
    "rope scaling: factor='2', expected a number above 0": {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
    "rope scaling: factor=0, expected": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    "rope scaling: factor=-2.0, expected": {"rope_scaling": {"rope_type": "yarn", "factor": -2.0}},
    "rope scaling: truncate=0, expected true or false": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 0}
    },
    "rope scaling: original_max_position_embeddings=32.5, expected an integer": {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32.5}
    },
    "high_freq_factor=1.0, expected more than low_freq_factor=1.0": {
        "rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}
    },
    "rope scaling 'default' does not know full_attention": {
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}
    },
    "rope_theta='abc', expected a number above 1": {"rope_theta": "abc"},
    "rope_theta=0, expected a number above 1": {"rope_theta": 0},
    "rope_theta=1000": {"rope_theta": 10**400},
    "layer_types=5, expected a list": {"layer_types": 5},
    "a model whose use_sliding_window is false": {"layer_types": ["full_attention", "chunked_attention"]},
    "(model_type ['qwen2']) is not supported": {"model_type": ["qwen2"]},
    "architecture 5 (model_type 'qwen2') is not supported": {"architectures": 5},
    "rms_norm_eps=-1e-06, expected a number of at least 0": {"rms_norm_eps": -1e-6},
    "rms_norm_eps=nan, expected": {"rms_norm_eps": float("nan")},
    "vocab_size=100000000000, expected an integer of at least 1, below 2**31": {"vocab_size": 10**11},
    "eos_token_id='2', expected a token id or a list of token ids": {"eos_token_id": "2"},
    "eos_token_id=2.5, expected": {"eos_token_id": 2.5},
    "eos_token_id=[2, 'x'], expected": {"eos_token_id": [2, "x"]},
    "eos_token_id=1000000000000000000000000000000, expected": {"eos_token_id": 10**30},
    "partial_rotary_factor is not supported": {"partial_rotary_factor": 0.5},
    "dtype='int8', expected float32, bfloat16 or float16": {"torch_dtype": "int8"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_config_that_cannot_be_computed_is_refused_by_name(message, tmp_path):
    text = {**small_model("qwen2").config.to_json(), **REFUSED[message]}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(SchemaError) as raised:
        load_model(tmp_path)
    assert message in str(raised.value)
    assert str(tmp_path / "config.json") in str(raised.value)


def test_settings_that_are_no_json_are_refused_with_their_file(tmp_path):
    save_model(small_model(), tmp_path)
    for name, text, words in [
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id='2', expected a token id"),
        ("generation_config.json", "[]", "expected an object, got list"),
        ("config.json", "[" * 100_000, "no JSON: maximum recursion depth"),
        ("config.json", "\ud800", "no JSON"),
    ]:
        (tmp_path / name).write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(SchemaError, match=f"{tmp_path / name}: {words}"):
            load_model(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(StorageError, match=r"config.json cannot be read: No such file or directory"):
        load_model(tmp_path)
    save_model(small_model(), tmp_path, shard_bytes=50_000)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match=f"{first.name} is damaged or missing"):
        load_model(tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.raises(StorageError, match=f"{first.name} lacks .* which model.safetensors.index.json promises"):
        load_model(tmp_path)
    first.unlink()
    with pytest.raises(StorageError, match=f"lacks {first.name}, 1 of the"):
        load_model(tmp_path)
    for damaged in ("{}", '{"weight_map": {"a": 5}}', "[" * 100_000):
        (tmp_path / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(StorageError, match="is damaged"):
            load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(StorageError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "manifest.json"])
def test_files_that_cannot_be_read_are_named(name, tmp_path):
    save_model(small_model(), tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("/proc/self/mem")  # a file whose first byte nobody can read, not even root
    with pytest.raises(StorageError, match=f"{tmp_path / name} (cannot be read: Input/output error|is damaged)"):
        load_model(tmp_path)


def test_weights_that_do_not_fit_change_nothing():
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.weights()}
    good = {name: tensor + 1 for name, tensor in model.weights()}
    last = "model.layers.1.mlp.up_proj.weight"
    bad = {
        rf"{last} missing; the model has 25 tensors": {k: v for k, v in good.items() if k != last},
        r"the model has no extra\.weight": {**good, "extra.weight": torch.zeros(1)},
        rf"{last} has shape \(3, 64\), expected \(128, 64\)": {**good, last: torch.zeros(3, 64)},
        rf"{last} has dtype torch.int8, expected float32": {**good, last: torch.zeros(128, 64, dtype=torch.int8)},
    }
    for message, state in bad.items():
        with pytest.raises(SchemaError, match=message):
            load_state(model, state)
        assert all(torch.equal(before[name], tensor) for name, tensor in model.weights())
    load_state(model, good)
    assert all(torch.equal(before[name] + 1, tensor) for name, tensor in model.weights())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(dtype):
    assert is_finite(torch.zeros(0, 3, dtype=dtype))
    for size in (1, 7, 1000, 100_003):
        tensor = torch.randn(size).to(dtype)
        assert is_finite(tensor)
        for at in {0, size // 3, size - 1}:
            for bad in (float("nan"), float("inf"), -float("inf")):
                (changed := tensor.clone())[at] = bad
                assert not is_finite(changed)


def test_shapes_that_disagree_are_refused():
    model = small_model()
    with pytest.raises(SchemaError, match=r"ids of shape \(3,\), expected \[batch, time\]"):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(SchemaError, match=r"mask of shape \(1, 2\), ids of \(1, 3\)"):
        model(torch.tensor([[1, 2, 3]]), torch.ones(1, 2))
