"""Weights for a model of transformers, read from a folder as transformers reads them, and checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import SchemaError, StorageError
from ..model.folder import is_finite, read_state

__all__ = ["own_tensors", "read_weights"]

# Settings that no tensor's shape shows, by the names that architectures give them.
_NUMBERS = (
    "activation_function",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "num_attention_heads",
    "num_experts_per_tok",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)


def own_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and saved buffers by name. Of names that share a tensor, the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


@torch.no_grad()
def read_weights(model: Any, config: Any, folder: str | Path) -> dict[str, Tensor]:
    """New values for all of `own_tensors`, in their dtypes, on the CPU. The model, which has this config, may run.

    Raises:
        SchemaError: A name, a shape, a dtype or a value is wrong, or the folder is of a model with other settings.
        StorageError: A file is missing or damaged.
    """
    _check_config(config, Path(folder))
    expected = own_tensors(model)
    ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    ignored.append(re.compile(r"rotary_emb\.inv_freq$"))
    given = {
        name: tensor
        for name, tensor in read_state(folder).items()
        if name in expected or not any(one.search(name) for one in ignored)
    }
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for name, tensor in given.items():
        if tensor.dtype not in floats and not (name in expected and tensor.dtype == expected[name].dtype):
            raise SchemaError(f"update(): {name} has dtype {tensor.dtype}, expected float32, bfloat16 or float16")
    shapes = {name: tensor.shape for name, tensor in expected.items()}
    # Many architectures are saved under other names than their parameters have, e.g. with one tensor for each expert.
    state = (
        given if {name: tensor.shape for name, tensor in given.items()} == shapes else _converted(model, config, given)
    )
    ready = {}
    for name, tensor in expected.items():
        ready[name] = state[name].to(tensor.dtype)
        if not bool(is_finite(ready[name])):
            raise SchemaError(
                f"update(): {name} has values that are NaN or infinite as {tensor.dtype}; the old weights stay"
            )
    return ready


def _check_config(config: Any, folder: Path) -> None:
    """A folder without config.json says nothing about that."""
    if not (folder / "config.json").is_file():
        return
    try:
        theirs = type(config).from_pretrained(folder).get_text_config()
    except Exception as error:  # of many classes
        raise StorageError(f"update(): {folder / 'config.json'} cannot be read: {error}") from error
    ours = config.get_text_config()
    for name in _NUMBERS:
        if (has := getattr(ours, name, None)) != (other := getattr(theirs, name, None)):
            raise SchemaError(
                f"update(): {folder / 'config.json'} has {name}={other!r}, the model has {has!r}; the old weights stay"
            )


def _converted(model: Any, config: Any, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a new model into which transformers has loaded these."""
    try:
        with _no_progress_bar():
            made, told = type(model).from_pretrained(
                None,
                config=config,
                state_dict=dict(given),
                # It becomes torch's default dtype in all threads while the model is made.
                dtype=torch.get_default_dtype(),
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # told below
                output_loading_info=True,
            )
    except Exception as error:  # of many classes
        raise SchemaError(f"update(): transformers cannot convert these weights: {error}; the old ones stay") from error
    for name, has, wants in told["mismatched_keys"]:
        raise SchemaError(f"update(): {name} has shape {tuple(has)}, expected {tuple(wants)}")
    if told["missing_keys"]:
        raise SchemaError(f"update(): {_some(told['missing_keys'])} missing; is it a folder of another model?")
    if told["unexpected_keys"]:
        raise SchemaError(
            f"update(): the model has no {_some(told['unexpected_keys'])}; is it a folder of another model?"
        )
    return dict(made.state_dict())


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    is_shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what it would report is raised
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if is_shown:
            logging.enable_progress_bar()


def _some(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return first + (f" and {len(rest)} more" if rest else "")
