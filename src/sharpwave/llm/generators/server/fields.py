"""`Fields`: the JSON object of a request, read name by name; a name that is not asked for is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from .refusal import Refusal

__all__ = ["Fields", "read_fields"]

_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
# An escape of half a character. Without its other half it is a string that no encoder and no tokenizer takes.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Fields:
    """Names of a JSON object. Every read is checked, and `end` refuses the rest. Any name that is null is not there."""

    def __init__(self, given: Mapping[str, Any], place: str = "") -> None:
        self._left = {name: value for name, value in given.items() if value is not None}
        self._place = place

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return default
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
            raise self.refusal(name, f"{_shown(value)}, expected {_NAMES[kind]}")
        return value

    def need(self, name: str, kind: type) -> Any:
        value = self.take(name, kind)
        if value is None:
            raise self.refusal(name, f"is missing, expected {_NAMES[kind]}")
        return value

    def take_any(self, name: str) -> Any:
        return self._left.pop(name, None)

    def take_list(self, name: str, kind: type, *, single: bool = False) -> list[Any] | None:
        """A list of one kind; where `single`, also one such value."""
        value = self._left.get(name)
        if single and isinstance(value, kind):
            return [self.take(name, kind)]
        found: list[Any] | None = self.take(name, list)
        if found is None:
            return None
        for at, one in enumerate(found):
            if not isinstance(one, kind) or (kind is not bool and isinstance(one, bool)):
                raise self.refusal(f"{name}[{at}]", f"{_shown(one)}, expected {_NAMES[kind]}")
        return found

    def take_object(self, name: str) -> Fields:
        return Fields(self.take(name, dict, {}), f"{self._place}{name}.")

    def take_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Settings that other servers have: accepted where they change nothing."""
        for name, values in neutral.items():
            value = self._left.pop(name, None)
            if value is not None and not any(value == one and type(value) is type(one) for one in values):
                expected = " or ".join(_shown(one) for one in values) or "null"
                raise self.refusal(name, f"{_shown(value)} is not supported, expected {expected}")

    def drop(self, names: Iterable[str]) -> None:
        """Names that cannot change the answer."""
        for name in names:
            self._left.pop(name, None)

    def end(self) -> None:
        for name in self._left:
            raise self.refusal(name, "is not known to this server")

    def refusal(self, name: str, problem: str) -> Refusal:
        return Refusal(f"{self._place}{name}: {problem}", param=f"{self._place}{name}")


async def read_fields(request: Request, limit_bytes: int) -> Fields:
    """The body of a request, which must be a JSON object of at most so many bytes. An empty body is an empty object."""
    said = request.headers.get("content-length", "")
    pieces, size = [], int(said) if said.isdecimal() else 0
    if size <= limit_bytes:
        size = 0
        try:
            async for piece in request.stream():
                size += len(piece)
                if size > limit_bytes:
                    break
                pieces.append(piece)
        except ClientDisconnect:
            raise Refusal("the client has left", status=400) from None
    if size > limit_bytes:
        raise Refusal(f"a body of more than {limit_bytes:,} bytes; raise max_body_bytes", status=413)
    try:
        text = b"".join(pieces).decode("utf-8-sig")
        found = json.loads(text or "{}")
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise Refusal(f"the body has text that is not valid Unicode: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(f"the body is {_shown(found)}, expected a JSON object")
    return Fields(found)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
