"""Lists and dicts that a sample hands out: equal to plain ones, and they say so when they are written to.

A sample gives views of what it holds. A write into a plain copy would be lost without a word.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import SchemaError

__all__ = ["FrozenDict", "FrozenList"]


class FrozenList(list[Any]):
    """A list that cannot be written to. Copies are plain lists."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise SchemaError(
            "a sample's list is not changed in place; take list(...) of it, and make another sample of that"
        )

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse

    def __reduce__(self) -> Any:
        return list, (list(self),)


class FrozenDict(dict[str, Any]):
    """A dict that cannot be written to. Copies are plain dicts."""

    def __init__(self, values: Any = (), what: str = "sample") -> None:
        super().__init__(values)
        self._what = what

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise SchemaError(
            f"{self._what}: a sample is never changed; update() makes one that has other keys or metadata besides"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
