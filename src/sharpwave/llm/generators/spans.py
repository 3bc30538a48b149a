"""Versions of an answer's tokens as servers send them: runs of equal versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .remote import Gone

__all__ = ["versions_of"]


def versions_of(spans: Sequence[dict[str, Any]], count: int, number: Callable[[Any], int]) -> list[int]:
    """A version for each of `count` tokens. `number` makes one of a span's text.

    Raises:
        Gone: The spans leave gaps, overlap, or are of another count.
    """
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions) or span["end"] < span["start"]:
            raise Gone(f"weight_versions {spans} leave gaps or overlap")
        versions += [number(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise Gone(f"weight_versions {spans} cover {len(versions)} tokens, the answer has {count}")
    return versions
