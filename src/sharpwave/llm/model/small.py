"""A small random model and a tokenizer of bytes: for tests, examples and machines without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .config import ModelConfig
from .transformer import Transformer

__all__ = ["small_model", "small_tokenizer"]

_SPECIAL = ("<pad>", "<bos>", "<eos>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<bos>' + message['role'] + '\n' + message['content'] + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bos>assistant\n' }}{% endif %}"
)


def small_model(model_type: str = "qwen3", *, seed: int = 0, **changes: Any) -> Transformer:
    """A random model of some 100,000 parameters. `changes` are fields of `ModelConfig`."""
    given: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": 256 + len(_SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        # Wide enough that the logits of an untrained model differ, and sampling can be tested.
        "initializer_range": 0.1,
        "other": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    return Transformer(ModelConfig(**{**given, **changes})).fill_randomly(seed)


def small_tokenizer(folder: str | Path | None = None) -> Any:
    """A `tokenizers.Tokenizer` with one token for each byte, after <pad>, <bos> and <eos> (0, 1, 2).

    Any text becomes ids and comes back unchanged. With `folder` its files are written there, with a chat template, as
    transformers' AutoTokenizer reads them.
    """
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*_SPECIAL, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    if folder is not None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        made.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return made
