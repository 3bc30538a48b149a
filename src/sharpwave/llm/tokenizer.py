"""`ChatTokenizer`: the tokenizer and the chat template of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..errors import SchemaError, StorageError

__all__ = ["ChatTokenizer"]


class ChatTokenizer:
    """Text to tokens and back, and messages to text. A tokenizer of transformers can stand in its place.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        template: The chat template in Jinja; None where there is none.
        names: What the template may name besides messages, such as bos_token.

    Example:
        >>> from sharpwave.llm.model import small_tokenizer
        >>> tokenizer = ChatTokenizer(small_tokenizer())
        >>> tokenizer.decode(tokenizer.encode("12 + 30"))
        '12 + 30'
    """

    def __init__(self, tokenizer: Any, template: str | None = None, names: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = None if template is None else _compiled(template)
        self._names = dict(names or {})

    @classmethod
    def read(cls, folder: str | Path) -> ChatTokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the chat template.

        Raises:
            StorageError: A file is missing or damaged.
        """
        from tokenizers import Tokenizer

        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise StorageError(f"{folder} has no tokenizer.json; expected a Hugging Face folder with a fast tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has no class for it
            raise StorageError(f"{folder}/tokenizer.json is damaged: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        names = {name: _text(value) for name, value in settings.items() if name.endswith("_token") and value}
        return cls(tokenizer, _read_template(folder, settings), names)

    @property
    def size(self) -> int:
        """Tokens that it has, with the added ones."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token that ends a text, as tokenizer_config.json names it; empty where it names none."""
        found = self._tokenizer.token_to_id(self._names.get("eos_token", ""))
        return () if found is None else (int(found),)

    @property
    def beginning(self) -> str:
        """What it puts before a text, such as "<s>"; a chat template writes this itself."""
        return self.decode(self.encode(""))

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = False,
        **names: Any,
    ) -> str:
        """The text of a conversation. `names` are given to the template.

        Raises:
            SchemaError: There is no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        if tokenize:
            raise SchemaError("apply_chat_template(): tokenize=True, expected False; call encode() with the text")
        if self._template is None:
            raise SchemaError(
                "apply_chat_template(): the tokenizer has no chat template; give ChatTokenizer(template=)"
            )
        given = {**self._names, "messages": messages, "tools": tools, **names}
        try:
            return str(self._template.render(add_generation_prompt=add_generation_prompt, **given))
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise SchemaError(f"apply_chat_template(): the template refuses these messages: {error}") from error


def _compiled(template: str) -> Any:
    """As transformers compiles it. A template comes with a downloaded model, so it runs in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    room.filters["tojson"] = as_json
    room.globals["raise_exception"] = refuse
    room.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return room.from_string(template)
    except TemplateError as error:
        raise SchemaError(f"ChatTokenizer(): the chat template is wrong: {error}") from error


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise StorageError(f"{file} is damaged: {error}") from error
    found = _read_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    try:
        chosen = {one["name"]: one["template"] for one in found}.get("default") if isinstance(found, list) else found
    except (KeyError, TypeError):
        chosen = found
    if not isinstance(chosen, (str, type(None))):
        raise StorageError(f"{folder}: chat_template is {str(found)[:80]}, expected a text, or texts with names")
    return chosen


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text())) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{path} is damaged: {error}") from error


def _text(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token)
