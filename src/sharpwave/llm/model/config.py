"""`ModelConfig`: the numbers of a model, as Hugging Face's config.json names them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...checks import told
from ...errors import SchemaError, StorageError

__all__ = ["ARCHITECTURES", "DTYPES", "ModelConfig", "Rope"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DTYPES = ("float32", "bfloat16", "float16")
_TYPES: dict[str, Any] = {"int": int, "bool": bool, "float": (int, float), "str": str}
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_MOST = 2**31 - 1  # of sizes and token ids
# What transformers takes where config.json is silent; the rest of the defaults are ModelConfig's own.
_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
# Read here, or of no effect on the numbers of a forward pass; written anew or left out.
_OWN = {"architectures", "model_type", "dtype", "torch_dtype", "rope_scaling", "rope_parameters", "rope_theta"}
_DROPPED = {
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    "hidden_act",
    "transformers_version",
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the base `theta`, and a scaling by its name in config.json with its numbers."""

    theta: float = 10000.0
    scaling: str = "default"
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, str) or self.scaling not in _SCALINGS:
            raise SchemaError(
                f"config.json: rope scaling {told(self.scaling)} is not supported; expected {_or(_SCALINGS)}"
            )
        # A base of 1 would turn all dimensions alike, and the logarithm of less is no number of dimensions.
        if not _is_number(self.theta) or self.theta <= 1:
            raise SchemaError(f"config.json: rope_theta={told(self.theta)}, expected a number above 1")
        missing = [name for name in _SCALINGS[self.scaling] if self.numbers.get(name) is None]
        if missing:
            raise SchemaError(f"config.json: rope scaling {self.scaling!r} needs {', '.join(missing)}")
        known = {*_SCALINGS[self.scaling], "original_max_position_embeddings"}
        unknown = sorted(set(self.numbers) - (known | set(_YARN) if self.scaling == "yarn" else known))
        if unknown:
            raise SchemaError(f"config.json: rope scaling {self.scaling!r} does not know {', '.join(unknown)}")
        for name, value in self.numbers.items():
            if name == "truncate":
                good, expected = isinstance(value, bool), "true or false"
            elif name == "original_max_position_embeddings":
                good, expected = _is_whole(value, 1), "an integer of at least 1"
            elif name in ("mscale", "mscale_all_dim"):
                good, expected = _is_number(value) and value >= 0, "a number of at least 0"
            else:
                good, expected = _is_number(value) and value > 0, "a number above 0"
            if not good:
                raise SchemaError(f"config.json: rope scaling: {name}={told(value)}, expected {expected}")
        if self.scaling == "llama3" and self.numbers["high_freq_factor"] <= self.numbers["low_freq_factor"]:
            raise SchemaError(
                f"config.json: rope scaling: high_freq_factor={self.numbers['high_freq_factor']}, expected more than "
                f"low_freq_factor={self.numbers['low_freq_factor']}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a model. Names are those of config.json; `other` keeps the keys that the model does not use.

    Example:
        >>> ModelConfig(model_type="qwen3", vocab_size=64, hidden_size=32, intermediate_size=64).head_dim
        8
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 0  # 0: as many as attention heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # Llama: q, k, v and o; Qwen3: likewise. Qwen2 has q, k and v always.
    mlp_bias: bool = False  # Llama only
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str = "float32"
    rope: Rope = field(default_factory=Rope)
    other: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str) or self.model_type not in ARCHITECTURES:
            raise SchemaError(f"ModelConfig: model_type={told(self.model_type)}, expected {_or(ARCHITECTURES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            _positive(name, getattr(self, name))
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise SchemaError(
                    f"ModelConfig: hidden_size={self.hidden_size} is no multiple of "
                    f"num_attention_heads={self.num_attention_heads}; give head_dim="
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for name in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
            _positive(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise SchemaError(
                f"ModelConfig: num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise SchemaError(f"ModelConfig: head_dim={self.head_dim}, expected an even number")
        for name in ("rms_norm_eps", "initializer_range"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise SchemaError(f"ModelConfig: {name}={told(getattr(self, name))}, expected a number of at least 0")
        _as_ids(self.other.get("eos_token_id"))
        if self.dtype not in DTYPES:
            raise SchemaError(f"ModelConfig: dtype={self.dtype!r}, expected {_or(DTYPES)}")
        if self.mlp_bias and self.model_type != "llama":
            raise SchemaError(f"ModelConfig: mlp_bias=True, but {ARCHITECTURES[self.model_type]} has none")
        if self.attention_bias and self.model_type == "qwen2":
            raise SchemaError("ModelConfig: attention_bias=True, but Qwen2ForCausalLM has biases of q, k and v always")

    @property
    def max_context(self) -> int:
        """The tokens of a sequence at most. YaRN extends a `max_position_embeddings` that does not count it yet.

        The other scalings do not: folders with `linear` and `llama3` count it already, and with `dynamic` the angles of
        all tokens depend on the longest sequence of a call, so keys in a cache would have those of another call.
        """
        most = self.max_position_embeddings
        numbers = self.rope.numbers
        if self.rope.scaling != "yarn" or numbers.get("original_max_position_embeddings", most) != most:
            return most
        return max(most, int(most * numbers["factor"]))

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end an answer; empty where config.json names none."""
        return _as_ids(self.other.get("eos_token_id"))

    def replace(self, **changes: Any) -> ModelConfig:
        return replace(self, **changes)

    @classmethod
    def read(cls, folder: str | Path) -> ModelConfig:
        """Reads config.json of a Hugging Face folder, and the ends of text that generation_config.json adds."""
        path = Path(folder) / "config.json"
        with _named(path):
            config = cls.from_json(_read_object(path))
        generation = path.with_name("generation_config.json")
        with _named(generation):
            # Instruction-tuned checkpoints name the end of a turn there, only the end of a document in config.json.
            more = _as_ids(_read_object(generation).get("eos_token_id")) if generation.is_file() else ()
        if set(more) <= set(config.eos_ids):
            return config
        ids = list(dict.fromkeys((*config.eos_ids, *more)))
        return config.replace(other={**config.other, "eos_token_id": ids})

    @classmethod
    def from_json(cls, text: Mapping[str, Any]) -> ModelConfig:
        """Reads the content of a config.json."""
        kind = text.get("model_type")
        named = text.get("architectures") or [ARCHITECTURES.get(str(kind), str(kind))]
        if not isinstance(kind, str) or kind not in ARCHITECTURES or named != [ARCHITECTURES[kind]]:
            shown = ", ".join(map(str, named)) if isinstance(named, list) else told(named)
            raise SchemaError(
                f"config.json: architecture {shown} (model_type {told(kind)}) is not supported; "
                f"expected {_or(ARCHITECTURES.values())}"
            )
        _refuse(text)
        found: dict[str, Any] = {"max_position_embeddings": _MAX_POSITIONS[kind]}
        if kind == "qwen3":
            found["head_dim"] = 128
        names = {item.name: item for item in fields(cls) if item.name not in ("rope", "other", "dtype")}
        for name in names:
            if text.get(name) is not None:
                value = text[name]
                wanted = _TYPES[str(names[name].type)]
                if not isinstance(value, wanted) or (isinstance(value, bool) and names[name].type != "bool"):
                    raise SchemaError(f"config.json: {name}={told(value)}, expected {names[name].type}")
                found[name] = value
        needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in needed if name not in found]
        if missing:
            raise SchemaError(f"config.json: {', '.join(missing)} missing")
        if kind == "qwen2":  # its attention ignores the key
            found.pop("attention_bias", None)
        if kind != "llama":
            found.pop("mlp_bias", None)
        dtype = text.get("dtype") or text.get("torch_dtype") or "float32"
        other = {key: value for key, value in text.items() if key not in {*names, *_OWN, *_DROPPED}}
        return cls(**found, dtype=str(dtype), rope=_read_rope(text), other=other)

    def to_json(self) -> dict[str, Any]:
        """What config.json says of this model; older readers (rope_theta, torch_dtype) understand it too."""
        skipped = {"rope", "other", "dtype"}
        skipped |= {"attention_bias", "mlp_bias"} if self.model_type == "qwen2" else set()
        skipped |= {"mlp_bias"} if self.model_type == "qwen3" else set()
        text = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in skipped}
        text |= {"architectures": [ARCHITECTURES[self.model_type]], "hidden_act": "silu", "torch_dtype": self.dtype}
        text["rope_theta"] = self.rope.theta
        if self.rope.scaling != "default":
            text["rope_scaling"] = {"rope_type": self.rope.scaling, **self.rope.numbers}
        return {**self.other, **text}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file."""
    try:
        yield
    except SchemaError as error:
        raise SchemaError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        text = json.loads(path.read_text())
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}; expected a Hugging Face folder") from error
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"no JSON: {error}") from error
    if not isinstance(text, dict):
        raise SchemaError(f"expected an object, got {type(text).__name__}")
    return text


def _as_ids(given: Any) -> tuple[int, ...]:
    ids = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    # An id that is none would never end an answer, or fail the step in which it is compared.
    if not all(_is_whole(one, 0) for one in ids):
        raise SchemaError(f"config.json: eos_token_id={told(given)}, expected a token id or a list of token ids")
    return ids


def _refuse(text: Mapping[str, Any]) -> None:
    """Options that change the numbers and are not built: refused by name."""
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, list):
        raise SchemaError(f"config.json: layer_types={told(kinds)}, expected a list")
    windowed = any(kind != "full_attention" for kind in kinds)
    if windowed or (text.get("use_sliding_window") and text.get("sliding_window")):
        raise SchemaError(
            f"config.json: sliding_window={told(text.get('sliding_window'))} is not supported; a model whose "
            "use_sliding_window is false, and whose layer_types are all full_attention, is"
        )
    if text.get("hidden_act", "silu") != "silu":
        raise SchemaError(f"config.json: hidden_act={told(text['hidden_act'])}, expected 'silu'")
    if text.get("quantization_config"):
        raise SchemaError("config.json: quantization_config is not supported; use the model's unquantized folder")


def _read_rope(text: Mapping[str, Any]) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    numbers: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = text.get(name)
        if given is not None and not isinstance(given, dict):
            raise SchemaError(f"config.json: {name}={told(given)}, expected an object")
        numbers |= given or {}
    thetas = (numbers.pop("rope_theta", None), text.get("rope_theta"))
    theta = next((one for one in thetas if one is not None), 10000.0)
    kind, older = numbers.pop("rope_type", None), numbers.pop("type", None)
    kind = "default" if kind is None and older is None else older if kind is None else kind
    if numbers.pop("partial_rotary_factor", text.get("partial_rotary_factor") or 1.0) != 1.0:
        raise SchemaError("config.json: partial_rotary_factor is not supported; expected 1.0")
    numbers = {name: value for name, value in numbers.items() if value is not None}
    rope = Rope(theta, kind, numbers)  # refuses unknown names, of the default too
    return Rope(float(theta)) if kind == "default" else replace(rope, theta=float(theta))


def _positive(name: str, value: Any) -> None:
    if not _is_whole(value, 1):
        raise SchemaError(f"ModelConfig: {name}={told(value)}, expected an integer of at least 1, below 2**31")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_number(value: Any) -> bool:
    """A finite one. An int that no float can have is none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _or(names: Any) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
