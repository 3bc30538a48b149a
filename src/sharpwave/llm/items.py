"""`Items`: what agents work on, from a list, a JSONL file or a Hugging Face `datasets` folder. Each has an id."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SchemaError, StorageError

__all__ = ["Item", "Items"]

Item = Mapping[str, Any]
_DESCRIBED = 10_000


class Items:
    """Items with ids, in their order.

    Args:
        source: A sequence of dicts, the path of a JSONL file (one object a line), or a folder that `datasets` wrote
            with `save_to_disk`. A sequence is not copied, so it may read from a disk.
        id_key: The key that has an item's id. Items without it are numbered by their place.
        split: Of a folder that has several.

    Raises:
        SchemaError: There are no items, one is not a dict, or two have the same id.
        StorageError: The file cannot be read.

    Example:
        >>> items = Items([{"id": "a", "prompt": "1+1="}, {"id": "b", "prompt": "2+2="}])
        >>> items.ids, items["b"]["prompt"]
        (['a', 'b'], '2+2=')
    """

    def __init__(self, source: Sequence[Item] | str | Path, *, id_key: str = "id", split: str | None = None) -> None:
        self._source = _read(source, split)
        self.ids: list[str] = []
        for place in range(len(self._source)):
            item = self._source[place]
            if not isinstance(item, Mapping):
                raise SchemaError(f"Items(): item {place}: expected a dict, got {type(item).__name__}")
            self.ids.append(str(item.get(id_key, place)))
        if not self.ids:
            raise SchemaError("Items(): expected at least one item, got none")
        self._places = {name: place for place, name in enumerate(self.ids)}
        if len(self._places) < len(self.ids):
            name, count = Counter(self.ids).most_common(1)[0]
            raise SchemaError(
                f"Items(): {count} items have the id {name!r}; give each its own, or name another id_key="
            )

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Item:
        return self._source[self._places[name]]

    @property
    def fingerprint(self) -> str:
        """Differs where the ids or their order differ: a run continues with the data that it began with."""
        crc = 0
        for name in self.ids:
            crc = zlib.crc32(name.encode() + b"\0", crc)
        return f"{len(self.ids)} items, ids {crc:08x}"

    def describe(self) -> str:
        """The fingerprint, and one of what is in the items: for processes that make the same items.

        Of more than 10,000 items it has every second, every third and so on: a look takes a tenth of a second.
        """
        crc = 0
        for name in self.ids[:: -(-len(self.ids) // _DESCRIBED)]:
            crc = zlib.crc32(repr(_described(self[name])).encode(), crc)
        return f"{self.fingerprint}, content {crc:08x}"


def _described(value: Any) -> Any:
    """What has the same text in all processes: of an object of another type only that type."""
    if isinstance(value, Mapping):
        return sorted((repr(_described(key)), _described(held)) for key, held in value.items())
    if isinstance(value, (list, tuple)):
        return [_described(one) for one in value]
    return value if isinstance(value, (str, bytes, int, float, bool, type(None))) else type(value).__name__


def _read(source: Sequence[Item] | str | Path, split: str | None) -> Sequence[Item]:
    if not isinstance(source, (str, Path)):
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise SchemaError(f"Items(): expected a sequence of dicts or a path, got {type(source).__name__}")
        return source
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, split)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"Items(): {path} cannot be read: {error}") from error
    items = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                items.append(json.loads(line))
            except ValueError as error:
                raise SchemaError(f"Items(): {path}, line {number}: expected a JSON object: {error}") from error
    return items


def _read_folder(path: Path, split: str | None) -> Sequence[Item]:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ImportError(f"Items(): {path} is a folder; pip install datasets to read it", name="datasets") from error
    found: Any = load_from_disk(str(path))
    if hasattr(found, "keys"):  # several splits
        if split is None or split not in found:
            raise SchemaError(f"Items(): {path} has the splits {', '.join(found)}; name one by split=, got {split!r}")
        found = found[split]
    return found  # type: ignore[no-any-return]
