"""Hugging Face folders: config.json, safetensors shards with their index, and the tokenizer's files beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...checks import told
from ...errors import SchemaError, StorageError
from ..manifest import MANIFEST, check_files
from .config import DTYPES, ModelConfig
from .transformer import Transformer

__all__ = [
    "check_companions",
    "check_config",
    "check_folder",
    "check_state",
    "copy_companions",
    "is_finite",
    "load_model",
    "load_state",
    "read_state",
    "save_model",
    "write_state",
]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# The files that make a folder usable besides config and weights: tokenizer, chat template, generation settings.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_FLOATS = {name: getattr(torch, name) for name in DTYPES}
# What changes log-probabilities where names and shapes of tensors are equal.
_NUMBERS = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope",
)


def load_model(
    folder: str | Path, *, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """Reads a model from a Hugging Face folder. `dtype=None` takes the one of config.json.

    Raises:
        SchemaError: The architecture, an option, or a tensor's name, shape or dtype is not what the model has.
        StorageError: A file is missing or damaged, or not what was published.
    """
    config = ModelConfig.read(folder)
    wanted = _FLOATS.get(str(config.dtype if dtype is None else dtype).removeprefix("torch."))
    if wanted is None:
        raise SchemaError(f"load_model(): dtype={told(dtype)}, expected {', '.join(_FLOATS)}")
    with torch.device("meta"):
        model = Transformer(config)
    state = read_state(folder)
    check_state(model, state, f"load_model({str(folder)!r})")
    # On the meta device parameters have no memory; they become the tensors that were read.
    names = [name for name, _ in model.named_parameters()]
    ready = {name: state[name].to(device=device, dtype=wanted) for name in names}
    model.load_state_dict(ready, assign=True)
    model.to(device)
    return model.requires_grad_(True)


def save_model(
    model: Transformer, folder: str | Path, *, companions: str | Path | None = None, shard_bytes: int = 5 << 30
) -> None:
    """Writes a Hugging Face folder that transformers, vLLM and SGLang open.

    Args:
        model: The model.
        folder: Made where it is missing.
        companions: A folder whose tokenizer files, chat template and generation settings are copied.
        shard_bytes: Files are not larger than this, unless a single tensor is.
    """
    folder = Path(folder)
    if companions is not None:
        check_companions(companions)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.replace(dtype=str(model.dtype).removeprefix("torch."))
    write_state(dict(model.weights()), folder, shard_bytes=shard_bytes)
    if companions is not None:
        copy_companions(companions, folder)
    (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")


def check_companions(source: str | Path) -> Path:
    """Raises StorageError unless it is a folder."""
    if not Path(source).is_dir():
        raise StorageError(f"companions={str(source)!r} is no folder; give one with the tokenizer's files, or None")
    return Path(source)


def copy_companions(source: str | Path, folder: str | Path) -> None:
    for name in COMPANIONS:
        if (Path(source) / name).is_file() and Path(source).resolve() != Path(folder).resolve():
            shutil.copyfile(Path(source) / name, Path(folder) / name)


def write_state(state: Mapping[str, Tensor], folder: Path, *, shard_bytes: int = 5 << 30) -> list[str]:
    """Writes tensors as safetensors: one file, or shards with an index. Returns the files' names."""
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in state.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= tensor.nbytes
    count = len(shards)
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [_SINGLE]
    # Aside first: where the disk is full, the folder keeps what it had.
    try:
        for name, shard in zip(names, shards, strict=True):
            save_file(_apart(shard), folder / f"{name}.new", metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        for name in names:
            (folder / f"{name}.new").unlink(missing_ok=True)
        raise StorageError(f"{folder} cannot be written: {error}") from error
    for old in [*folder.glob("model*.safetensors"), *folder.glob(_INDEX), *folder.glob(MANIFEST)]:
        old.unlink()  # an index of an earlier save would hide the new files, and its manifest has other checksums
    for name in names:
        (folder / f"{name}.new").rename(folder / name)
    if count == 1:
        return names
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    text = {"metadata": {"total_size": sum(tensor.nbytes for tensor in state.values())}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(text, indent=2) + "\n")
    return [*names, _INDEX]


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors that share memory with another one, for instance a tied head: safetensors refuses them."""
    made, end = dict(tensors), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if tensor.nbytes and tensor.data_ptr() < end:
            made[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return made


def read_state(folder: str | Path, *, check: bool = True) -> dict[str, Tensor]:
    """Reads every tensor of a folder's safetensors files.

    The files of a folder with a manifest, which `Weights.publish` writes, are compared with it: sizes always, checksums
    where `check` is true.

    Raises:
        StorageError: A file is missing, damaged or not what was published, or a shard lacks a tensor that the index
            promises.
    """
    folder, state = Path(folder), dict[str, Tensor]()
    check_files(folder, [path.name for path, _ in _shards(folder)], check)
    for file, names in _files(folder):
        for name in names:
            state[name] = file.get_tensor(name)
    return state


def check_folder(folder: str | Path) -> None:
    """Raises StorageError where `read_state` would. Reads the files' headers, not the tensors."""
    for _ in _files(Path(folder)):
        pass


def _files(folder: Path) -> Iterator[tuple[Any, list[str]]]:
    """Each file, open, with the names of its tensors."""
    for path, promised in _shards(folder):
        with _opened(path) as file:
            found = set(file.keys())
            missing = sorted(set(promised) - found)
            if missing:
                raise StorageError(f"{path} lacks {_some(missing)}, which {_INDEX} promises")
            yield file, sorted(found)


def _shards(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The files with the tensors that each must have. All must be there before the first is read."""
    index = folder / _INDEX
    # Not Path.is_file, which raises where a path is too long.
    if not os.path.isfile(index):
        if not os.path.isfile(folder / _SINGLE):
            raise StorageError(f"{folder} has neither {_SINGLE} nor {_INDEX}; expected a Hugging Face folder")
        return iter([(folder / _SINGLE, [])])
    try:
        places = json.loads(index.read_text())["weight_map"]
        names = sorted(set(places.values()))
        is_outside = any(Path(name).name != name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{index} is damaged: {error!r}; expected an object with weight_map") from error
    except OSError as error:
        raise StorageError(f"{index} cannot be read: {error.strerror}") from error
    if is_outside:
        raise StorageError(f"{index} names a file outside its folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise StorageError(f"{folder} lacks {_some(missing)}, {len(missing)} of the {len(names)} shards in {_INDEX}")
    return iter([(folder / name, [key for key, place in places.items() if place == name]) for name in names])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except StorageError:  # an OSError, too
        raise
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{path} is damaged or missing: {error}") from error


def check_state(model: Transformer, state: Mapping[str, Tensor], where: str) -> None:
    """Raises SchemaError unless `state` has every weight of the model, in its shape, as floating point numbers."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise SchemaError(f"{where}: expected tensors by name, got {told(state)}")
    expected = dict(model.named_parameters())
    missing = [name for name in expected if name not in state]
    if missing:
        raise SchemaError(f"{where}: {_some(missing)} missing; the model has {len(expected)} tensors")
    # Tied models are often saved with their head; older ones with their frequencies.
    spare = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    unknown = [n for n in state if n not in expected and n not in spare and not n.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise SchemaError(f"{where}: the model has no {_some(unknown)}; is config.json of another model?")
    for name, parameter in expected.items():
        given = state[name]
        if not isinstance(given, Tensor):
            raise SchemaError(f"{where}: {name} is {type(given).__name__}, expected a tensor")
        if given.shape != parameter.shape:
            raise SchemaError(f"{where}: {name} has shape {tuple(given.shape)}, expected {tuple(parameter.shape)}")
        if given.dtype not in _FLOATS.values():
            raise SchemaError(f"{where}: {name} has dtype {given.dtype}, expected float32, bfloat16 or float16")


def is_finite(tensor: Tensor) -> Tensor:
    """Whether no number is NaN or infinite, on the tensor's device.

    On a CPU the least and the largest tell, as NaN is both: that reads as fast as memory gives, where `isfinite` takes
    many times as long in bfloat16. On a GPU it would be twice as many kernels.
    """
    flat = tensor.detach()
    if flat.device.type == "cpu" and flat.numel():
        flat = torch.stack(torch.aminmax(flat))
    return torch.isfinite(flat).all()


def check_config(config: ModelConfig, folder: str | Path, where: str) -> None:
    """Raises SchemaError where a folder's weights are of a model that computes with other numbers.

    Names and shapes of its tensors may be equal. A folder without config.json says nothing about that.
    """
    if not os.path.isfile(Path(folder) / "config.json"):  # not Path.is_file, which raises where a path is too long
        return
    theirs = ModelConfig.read(folder)
    names = [*_NUMBERS, "max_position_embeddings"] if config.rope.scaling in ("dynamic", "yarn") else _NUMBERS
    for name in names:
        ours, other = getattr(config, name), getattr(theirs, name)
        if ours != other:
            raise SchemaError(f"{where}: {Path(folder) / 'config.json'} has {name}={other!r}, the model has {ours!r}")


@torch.no_grad()
def load_state(model: Transformer, state: Mapping[str, Tensor], where: str = "load_state()") -> None:
    """Copies weights into a model in place, after every one was checked. Values are converted to the model's dtype."""
    check_state(model, state, where)
    for name, parameter in model.named_parameters():
        parameter.copy_(state[name], non_blocking=True)
    if model.device.type == "cuda":
        torch.cuda.current_stream(model.device).synchronize()  # a step may run on another stream


def _some(names: Iterable[str]) -> str:
    first, *rest = names
    return first + (f" and {len(rest)} more" if rest else "")
