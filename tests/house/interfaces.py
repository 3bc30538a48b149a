"""The interfaces as text, to be read in a review: the public names with their signatures, and the stub of the engine.

    python tests/house/interfaces.py            # compare the built package with the committed files
    python tests/house/interfaces.py --update   # rewrite tests/house/api.txt and bindings/_core.pyi

api.txt has a line for each name that a user can reach: the names of the package and of its public modules, the members
of public classes, and those of classes that a public call returns. A member that comes from another listed class is not
repeated.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef

__all__ = ["API", "STUB", "api_lines", "built_stub", "difference", "signature_text"]

HERE = Path(__file__).parent
API = HERE / "api.txt"
STUB = HERE.parents[1] / "bindings/_core.pyi"
# Operators that a caller writes without naming the method.
_OPERATORS = frozenset(
    {
        "__aenter__",
        "__aexit__",
        "__aiter__",
        "__anext__",
        "__call__",
        "__contains__",
        "__copy__",
        "__deepcopy__",
        "__delitem__",
        "__enter__",
        "__exit__",
        "__getitem__",
        "__getstate__",
        "__init__",
        "__iter__",
        "__len__",
        "__next__",
        "__reduce__",
        "__setitem__",
        "__setstate__",
    }
)


def _default_text(value: Any) -> str:
    """The default as it is written, without addresses of memory: those differ from run to run."""
    if inspect.isclass(value) or inspect.isroutine(value):
        return str(value.__qualname__)
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _note_text(note: Any) -> str:
    if isinstance(note, ForwardRef):  # the fields of a NamedTuple
        note = note.__forward_arg__
    return note if isinstance(note, str) else inspect.formatannotation(note)


def signature_text(function: Callable[..., Any], *, bound: bool) -> str:
    """Parameters and result; without `self` where `bound`. The same text for every version of Python."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    words, kinds = [], inspect.Parameter
    for number, one in enumerate(parameters):
        before = parameters[number - 1].kind if number else None
        if before is kinds.POSITIONAL_ONLY and one.kind is not kinds.POSITIONAL_ONLY:
            words.append("/")
        if one.kind is kinds.KEYWORD_ONLY and before not in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL):
            words.append("*")
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(one.kind, "")
        note = "" if one.annotation is one.empty else f": {_note_text(one.annotation)}"
        default = "" if one.default is one.empty else f" = {_default_text(one.default)}"
        words.append(f"{star}{one.name}{note}{default if note else default.replace(' ', '', 2)}")
    if parameters and parameters[-1].kind is kinds.POSITIONAL_ONLY:
        words.append("/")
    result = "" if signature.return_annotation is signature.empty else f" -> {_note_text(signature.return_annotation)}"
    return f"({', '.join(words)}){result}"


def _is_ours(one: Any) -> bool:
    return str(getattr(one, "__module__", "")).partition(".")[0] == "sharpwave"


def _public_modules(package: ModuleType) -> Iterator[ModuleType]:
    """The modules that __all__ names and, where those are packages, the modules and packages in them. And `llm`, which
    __all__ leaves out because it needs torch."""
    for name in package.__all__:
        module = getattr(package, name)
        if not isinstance(module, ModuleType):
            continue
        yield module
        for found in pkgutil.iter_modules(getattr(module, "__path__", ())):
            yield importlib.import_module(f"{module.__name__}.{found.name}")
    yield importlib.import_module(f"{package.__name__}.llm")


class _Api:
    def __init__(self, package: ModuleType) -> None:
        self.named: dict[str, Any] = {}
        for module in (package, *_public_modules(package)):
            for name in getattr(module, "__all__", ()):
                if not isinstance(getattr(module, name), ModuleType):
                    self.named[f"{module.__name__}.{name}"] = getattr(module, name)
        # A class with several names is described under the shortest; the others say that they are the same.
        longest_first = sorted(self.named, key=lambda name: (-name.count("."), name))
        self.classes = {self.named[name]: name for name in longest_first if inspect.isclass(self.named[name])}
        self.pending = list(self.classes)

    def lines(self) -> list[str]:
        found = []
        for name, one in self.named.items():
            if inspect.isclass(one):
                if self.classes[one] != name:
                    found.append(f"{name} = {self.classes[one]}")
            elif callable(one):
                found.append(f"{name}{self._signature(one, bound=False)}")
            else:
                found.append(f"{name} = {_default_text(one)}")
        while self.pending:
            found += self._class_lines(self.pending.pop())
        return sorted(found)

    def _signature(self, function: Callable[..., Any], *, bound: bool) -> str:
        function = inspect.unwrap(function)
        try:
            text = signature_text(function, bound=bound)
        except ValueError:  # a function of the engine: bindings/_core.pyi has its signature
            return "(...)"
        self._follow(text.rpartition(" -> ")[2], function)
        return text

    def _follow(self, result: str, function: Callable[..., Any]) -> None:
        """Classes of ours in the result are reached by users, too."""
        for word in re.findall(r"\w+", result):
            one = getattr(function, "__globals__", {}).get(word)
            if inspect.isclass(one) and _is_ours(one) and one not in self.classes:
                self.classes[one] = f"returned {one.__qualname__}"
                self.pending.append(one)

    def _class_lines(self, cls: type) -> Iterator[str]:
        name = self.classes[cls]
        bases = [base.__qualname__ for base in cls.__bases__ if base is not object]
        yield f"{name}: class" + (f" ({', '.join(bases)})" if bases else "")
        for base in cls.__mro__:
            if base is not cls and (base in self.classes or not _is_ours(base)):
                continue
            members = {**dict.fromkeys(inspect.get_annotations(base)), **vars(base)}
            for member in members:
                hidden = member.startswith("_") and member not in _OPERATORS
                made_by_us = member == "__init__" and name.startswith("returned ")
                if not hidden and not made_by_us and self._first(cls, member) is base:
                    yield f"{name}.{self._member(member, base)}"

    @staticmethod
    def _first(cls: type, member: str) -> type:
        return next(base for base in cls.__mro__ if member in vars(base) or member in inspect.get_annotations(base))

    def _member(self, member: str, base: type) -> str:
        value = vars(base).get(member)
        if isinstance(value, (classmethod, staticmethod)):
            signature = self._signature(value.__func__, bound=isinstance(value, classmethod))
            return f"{member}: {type(value).__name__} {signature}"
        if isinstance(value, (property, cached_property)):
            function = value.fget if isinstance(value, property) else value.func
            settable = ", settable" if isinstance(value, property) and value.fset else ""
            return f"{member}: property{self._signature(function, bound=True).removeprefix('()')}{settable}"
        if inspect.iscoroutinefunction(value):
            return f"{member}: async {self._signature(value, bound=True)}"
        if inspect.isroutine(value):
            return f"{member}{self._signature(value, bound=True)}"
        note = inspect.get_annotations(base).get(member)
        return f"{member}: attribute" + (f" {_note_text(note)}" if note else "")


def api_lines(package: ModuleType) -> list[str]:
    return _Api(package).lines()


def built_stub() -> str:
    """The stub that the build made beside the compiled module."""
    from sharpwave import _core

    path = Path(str(_core.__file__)).with_name("_core.pyi")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the build makes it (target _core_stub)")
    return path.read_text()


def difference(committed: Path, built: str) -> str:
    """Empty where the committed file says what was built; else the lines that differ."""
    old = committed.read_text() if committed.is_file() else ""
    names = (f"{committed.name} (committed)", f"{committed.name} (built)")
    return "\n".join(difflib.unified_diff(old.splitlines(), built.splitlines(), *names, lineterm="", n=0))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compares the built package with the committed text of its interfaces."
    )
    parser.add_argument("--update", action="store_true", help="rewrite the committed files")
    update = parser.parse_args().update
    import sharpwave

    bad = False
    for path, built in ((API, "\n".join(api_lines(sharpwave)) + "\n"), (STUB, built_stub())):
        if update:
            path.write_text(built)
        elif lines := difference(path, built):
            bad = True
            print(lines)
    if bad:
        print("if this is meant: make api, and commit the files", file=sys.stderr)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
