"""Sampling settings by the names of vLLM and OpenAI."""

from __future__ import annotations

from typing import Any, NamedTuple

from ....errors import SchemaError
from ..sampling import Sampling
from .fields import Fields
from .refusal import Refusal

__all__ = [
    "DEFAULT_TOKENS",
    "MOST_ANSWERS",
    "Settings",
    "read_settings",
    "takes_logprobs",
    "takes_prompt_logprobs",
    "takes_usage",
]

DEFAULT_TOKENS = 16  # of completions, as OpenAI and vLLM have it
MOST_ANSWERS = 1024  # of one request
_MOST_STOPS = 64  # each is looked for after each token
# Other servers have these; the answer is the same as without them for these values alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True, False),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "best_of": (1,),
    "structured_outputs": (),
}


class Settings(NamedTuple):
    """How answers are drawn. `max_tokens` None: as many as fit."""

    names: dict[str, Any]  # of Sampling
    n: int
    max_tokens: int | None

    def sampling(self, prompt_tokens: int, context: int | None, most: int = Sampling.max_tokens) -> Sampling:
        """`most`: tokens of an answer where neither the request nor a context says it."""
        if self.max_tokens is not None:
            most = self.max_tokens
        elif context is not None:
            most = context - prompt_tokens
            if most < 1:
                raise Refusal(f"a prompt of {prompt_tokens} tokens leaves no room in a context of {context}")
        try:
            return Sampling(max_tokens=most, **self.names)
        except SchemaError as error:
            raise Refusal(str(error)) from None


def read_settings(fields: Fields, *, max_tokens: int | None = None) -> Settings:
    """Takes the settings out of a request. `max_tokens` is for requests that do not say it; None: as many as fit."""
    names: dict[str, Any] = {}
    for name, kind in (("temperature", float), ("top_p", float), ("min_p", float), ("seed", int), ("top_k", int)):
        if (value := fields.take(name, kind)) is not None:
            names[name] = value
    if names.get("top_k") == -1:
        names["top_k"] = 0
    names["ignore_eos"] = fields.take("ignore_eos", bool, False)
    names["stop"] = tuple(fields.take_list("stop", str, single=True) or ())
    if len(names["stop"]) > _MOST_STOPS:
        raise fields.refusal("stop", f"{len(names['stop'])} strings, expected at most {_MOST_STOPS}")
    names["stop_ids"] = tuple(fields.take_list("stop_token_ids", int) or ())
    n = fields.take("n", int, 1)
    if not 1 <= n <= MOST_ANSWERS:
        raise fields.refusal("n", f"{n}, expected 1 to {MOST_ANSWERS}")
    most = fields.take("max_tokens", int, max_tokens)
    fields.take_neutral(_NEUTRAL)
    settings = Settings(names, n, most)
    settings.sampling(0, None)  # refuses wrong values
    return settings


def takes_logprobs(fields: Fields) -> bool:
    return _is_own_token(fields, "logprobs")


def takes_prompt_logprobs(fields: Fields) -> bool:
    return _is_own_token(fields, "prompt_logprobs")


def _is_own_token(fields: Fields, name: str) -> bool:
    count: int | None = fields.take(name, int)
    if count not in (None, 0):
        raise fields.refusal(name, f"{count} is not supported, expected 0: that of the token itself")
    return count == 0


def takes_usage(fields: Fields) -> bool:
    """Whether a stream ends with the counts of tokens."""
    options = fields.take_object("stream_options")
    has_usage: bool = options.take("include_usage", bool, False)
    options.take_neutral({"continuous_usage_stats": (False,), "include_obfuscation": (False,)})
    options.end()
    return has_usage
