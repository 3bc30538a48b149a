"""One decoder-only transformer of the Llama and Qwen family, and the Hugging Face folders it is read from.

from sharpwave.llm.model import load_model, save_model, small_model

model = load_model("Qwen3-0.6B")            # a folder with config.json and *.safetensors
logits = model(ids)                         # [batch, time, vocabulary]
"""

from .cache import KVCache
from .config import ModelConfig, Rope
from .folder import check_state, load_model, load_state, read_state, save_model, write_state
from .small import small_model, small_tokenizer
from .transformer import Transformer
from .value import ValueModel

__all__ = [
    "KVCache",
    "ModelConfig",
    "Rope",
    "Transformer",
    "ValueModel",
    "check_state",
    "load_model",
    "load_state",
    "read_state",
    "save_model",
    "small_model",
    "small_tokenizer",
    "write_state",
]
