"""What SGLang 0.5.23 answered, shortened: requests are checked by their keys, answers are given as they came.

Recorded from a real server (2-layer Llama, random weights, on a CPU). Numbers of times are left out.
"""

from __future__ import annotations

from typing import Any

PROMPT = [5, 6, 14, 7, 8, 18]

WHOLE: dict[str, Any] = {
    "text": "(6n",
    "output_ids": [19, 10, 38],
    "meta_info": {
        "id": "15bf",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "default",
        "weight_versions": [{"version": "default", "start": 0, "end": 3}],
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-4.1327, 19, None], [-4.0386, 10, None], [-4.1641, 38, None]],
        "output_token_logprobs_length": 3,
    },
}

SCORED: dict[str, Any] = {
    "text": "(",
    "output_ids": [19],
    "meta_info": {
        "id": "16c0",
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": 3,
        "completion_tokens": 1,
        "input_token_logprobs": [[None, 5, None], [-4.31, 6, None], [-4.52, 14, None]],
        "output_token_logprobs": [[-4.1, 19, None]],
    },
}

UPDATED = {
    "success": True,
    "message": "Succeeded to update model weights. Weight version updated to 1.",
    "num_paused_requests": 0,
}
NOT_UPDATED = {"success": False, "message": "Failed to get weights iterator: no such folder", "num_paused_requests": 0}
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
MODEL = {"model_path": "m", "weight_version": "default", "is_generation": True}
REFUSED = {"error": {"message": "The input_ids [99999] is out of the vocabulary"}}


def streamed(whole: dict[str, Any], *, is_incremental: bool) -> list[dict[str, Any]]:
    """The events of an answer, one for each token: all tokens so far, or the new one only."""
    events = []
    count = len(whole["output_ids"])
    for made in range(1, count + 1):
        part = slice(made - 1 if is_incremental else 0, made)
        told = {
            **whole["meta_info"],
            "completion_tokens": made,
            "output_token_logprobs": whole["meta_info"]["output_token_logprobs"][part],
            "weight_versions": _cut(whole["meta_info"]["weight_versions"], made),
        }
        if made < count:
            told["finish_reason"] = None
        events.append({"text": "", "output_ids": whole["output_ids"][part], "meta_info": told})
    return events


def _cut(spans: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return [{**span, "end": min(span["end"], count)} for span in spans if span["start"] < count]


def ended(
    whole: dict[str, Any], reason: dict[str, Any], spans: list[tuple[str, int, int]] | None = None
) -> dict[str, Any]:
    """The same answer with another end, or with other versions."""
    told = {**whole["meta_info"], "finish_reason": reason}
    if spans is not None:
        told["weight_versions"] = [{"version": name, "start": start, "end": end} for name, start, end in spans]
    return {**whole, "meta_info": told}
