"""Calls of tools in an answer's text, in the form of Qwen and Hermes: <tool_call>{"name", "arguments"}</tool_call>."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

__all__ = ["ToolText"]

_BEGIN = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ToolText:
    """Text that may end in calls of tools. From the first call on it is held back to the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> str:
        """The part of the text that is certainly no call."""
        self._held += text
        cut = self._held.find(_BEGIN)
        if cut < 0:  # the end may be a part of the mark
            sizes = range(min(len(_BEGIN) - 1, len(self._held)), 0, -1)
            cut = len(self._held) - next((size for size in sizes if _BEGIN.startswith(self._held[-size:])), 0)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the text, and the calls. A call that cannot be read stays text."""
        calls = []
        for found in _CALL.finditer(self._held):
            try:
                said = json.loads(found[1])
                function = {"name": str(said["name"]), "arguments": json.dumps(said.get("arguments", {}))}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return self._held, []
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        return ("" if calls else self._held), calls
