"""`HFGenerator` with architectures that ours lacks, and its refusals. The conformance suite has one of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S
from safetensors.torch import load_file, save_file

from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.llm.generators import Sampling
from sharpwave.llm.generators.hf import HFGenerator

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
MADE: dict[str, Callable[[], Any]] = {
    # Experts are one tensor each in a folder, and one tensor together in the model.
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_key_value_heads=2, num_local_experts=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    # Its head has another name in a folder.
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    # Eager attention, and one tensor for embedding and head.
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, **HEADS),
}
LONG = Sampling(max_tokens=60, ignore_eos=True)


def made(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(MADE[name]()).float().eval()


def scores_of(model: Any, ids: list[int]) -> list[float]:
    tokens = torch.tensor([ids])
    with torch.no_grad():
        logs = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logs.gather(1, tokens[0, 1:, None])[:, 0].tolist()


def run(main: Callable[[Any], Any], model: Any) -> None:
    async def bounded() -> None:
        generator = HFGenerator(model, blocks=64)
        try:
            await asyncio.wait_for(main(generator), HANG_S)
        finally:
            await generator.close()

    asyncio.run(bounded())


@pytest.mark.parametrize("name", list(MADE))
def test_other_architectures_generate_score_and_take_what_transformers_saves(name: str, tmp_path: Path) -> None:
    new = made(name, 1)
    new.save_pretrained(tmp_path)

    async def main(generator: Any) -> None:
        for version, reference in ((0, made(name, 0)), (1, new)):
            if version == 1:
                await generator.update(tmp_path, 1)
            expected = scores_of(reference, [5, 6, 7])
            assert await generator.score([5, 6, 7]) == pytest.approx(expected, abs=1e-4)
            tasks = [asyncio.create_task(generator.generate([5, 6, 7], LONG)) for _ in range(3)]
            while not all(task.done() for task in tasks):  # while answers are made, too
                assert await generator.score([5, 6, 7]) == pytest.approx(expected, abs=1e-4)
            for answer in [await task for task in tasks]:
                assert answer.versions == [version] * LONG.max_tokens
                expected_answer = scores_of(reference, [5, 6, 7, *answer.tokens])[2:]
                assert answer.logprobs == pytest.approx(expected_answer, abs=1e-3)

    run(main, made(name, 0))


def test_a_folder_of_other_names_that_is_wrong_leaves_the_old_weights(tmp_path: Path) -> None:
    made("mixtral", 1).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    right = load_file(file)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    assert name in right
    changes: list[tuple[dict[str, Any], str]] = [
        ({name: right[name] * torch.nan}, "gate_up_proj has values that are NaN"),
        ({name: right[name].to(torch.int8)}, f"{name} has dtype torch.int8, expected float32"),
        ({"model.norm.weight": torch.zeros(7)}, r"model.norm.weight has shape \(7,\), expected \(32,\)"),
        ({"other": right[name].clone()}, "the model has no other"),
        ({name: None}, r"update\(\): "),
    ]

    async def main(generator: Any) -> None:
        before = await generator.score([5, 6, 7])
        for change, words in changes:
            save_file({key: one for key, one in {**right, **change}.items() if one is not None}, file)
            with pytest.raises(SchemaError, match=words):
                await generator.update(tmp_path, 1)
        assert await generator.score([5, 6, 7]) == before
        save_file(right, file)
        await generator.update(tmp_path, 1)

    run(main, made("mixtral", 0))


def test_values_that_the_dtype_of_the_model_does_not_hold_are_refused(tmp_path: Path) -> None:
    model = made("gemma2", 0)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.norm.weight": torch.full([32], 1e6)}, file)

    async def main(generator: Any) -> None:
        with pytest.raises(SchemaError, match=r"norm.* infinite as torch\.float16"):
            await generator.update(tmp_path, 1)

    run(main, model.half())


@pytest.mark.parametrize("name", ["gemma2", "gpt-neox"])
def test_weights_of_a_model_that_computes_with_other_numbers_are_refused(name: str, tmp_path: Path) -> None:
    other = made(name, 2)
    other.save_pretrained(tmp_path / "good")
    other.config.update({"rms_norm_eps" if name == "gemma2" else "layer_norm_eps": 0.5})
    other.save_pretrained(tmp_path / "eps")
    other = made(name, 2)
    rope = {**other.config.rope_parameters, "rope_theta": 7.0}
    other.config.update({"rope_parameters": rope})
    other.save_pretrained(tmp_path / "rope")
    (tmp_path / "rope" / "damaged").mkdir()
    (tmp_path / "rope" / "damaged" / "config.json").write_text("{")
    model = made(name, 1)
    before = scores_of(model, [1, 2, 3, 4])

    async def main(generator: HFGenerator) -> None:
        for folder, said in (("eps", "_eps=0.5, the model has"), ("rope", "rope_parameters=.*7.0.*, the model has")):
            with pytest.raises(SchemaError, match=said):
                await generator.update(tmp_path / folder, 1)
        with pytest.raises(StorageError, match=r"config\.json cannot be read"):
            await generator.update(tmp_path / "rope" / "damaged", 1)
        assert await generator.score([1, 2, 3, 4]) == pytest.approx(before, abs=1e-5)
        await generator.update(tmp_path / "good", 1)
        assert (await generator.health()).version == 1

    run(main, model)


def test_settings_that_are_wrong_are_refused() -> None:
    model = made("gpt-neox", 0)
    for given, words in [
        ({"blocks": 8.5}, "blocks: expected a whole number, at least 1, got 8.5"),
        ({"blocks": "8"}, "blocks: expected a whole number"),
        ({"blocks": 8, "page": 3}, "page: expected a whole number, at least 4, got 3"),
        ({"blocks": 8, "context": 0}, "context: expected a whole number, at least 1, got 0"),
        ({"blocks": 8, "context": 16.5}, "context: expected a whole number"),
        ({"blocks": 8, "page": 8, "context": 65}, "context=65, expected at most 64, what model and blocks can"),
        ({"blocks": 64, "context": 129}, "context=129, expected at most 128, what model and blocks can"),
    ]:
        with pytest.raises(SchemaError, match=words):
            HFGenerator(model, **given)  # type: ignore[arg-type]


def test_calls_after_close_are_refused(tmp_path: Path) -> None:
    async def main(generator: Any) -> None:
        await generator.close()
        for call in (generator.generate([5], LONG), generator.score([5, 6]), generator.update(tmp_path, 1)):
            with pytest.raises(ClosedError):
                await call

    run(main, made("gpt-neox", 0))


def test_calls_after_a_pass_that_failed_are_refused_at_once(tmp_path: Path) -> None:
    model = made("gpt-neox", 0)
    model.save_pretrained(tmp_path)

    async def main(generator: Any) -> None:
        await generator.generate([5, 6], LONG)

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("the device is gone")

        model.forward = fail
        with pytest.raises(NotReady, match="the device is gone"):
            await generator.generate([5, 6], LONG)
        with pytest.raises(NotReady, match="batching ended"):  # its thread may still be ending
            await asyncio.wait_for(generator.generate([5, 6], LONG), HANG_S)
        while generator._batches[False].is_running():
            await asyncio.sleep(0.002)
        for work in (
            lambda: generator.generate([5], LONG),
            lambda: generator.score([5, 6]),
            lambda: generator.update(tmp_path, 1),
            generator.health,
        ):
            with pytest.raises(NotReady, match="batching ended: the device is gone"):
                await asyncio.wait_for(work(), HANG_S)
        assert not generator._calls

    run(main, model)
