"""The dicts that ``data`` and ``metadata`` of a sample give: a write goes into the sample, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Stored"]


class Stored(dict[str, Any]):
    """Upstream's attributes are plain dicts of the sample. A write into a copy of them would be lost silently.

    Without ``store`` and ``drop`` it is a dict like any other: copies are.
    """

    def __init__(
        self,
        values: Any = (),
        store: Callable[[str, Any], None] | None = None,
        drop: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(values)
        self._store, self._drop = store, drop

    def __setitem__(self, name: str, values: Any) -> None:
        if self._store is not None:
            self._store(name, values)
        super().__setitem__(name, values)

    def __delitem__(self, name: str) -> None:
        if self._drop is not None:
            self._drop(name)
        super().__delitem__(name)

    def update(self, *others: Any, **values: Any) -> None:
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
