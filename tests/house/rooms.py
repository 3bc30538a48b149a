"""Which room of the code may use which: the includes of core/ and bindings/, the imports of src/sharpwave.

    python tests/house/rooms.py             # check; needs no build
    python tests/house/rooms.py --graph     # the graph as text
    python tests/house/rooms.py --mermaid   # the graph for the docs, without edges that follow from others

A room is a folder of core/, the folder bindings/, or a package or module directly under src/sharpwave. The layers below
declare the order: a room may use every room of a lower layer and no other, so a cycle cannot be declared.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CPP", "KNOWN", "PYTHON", "Graph", "Known", "Order", "Use", "check", "import_graph", "include_graph"]


@dataclass(frozen=True)
class Order:
    """Rooms in layers, the lowest first. Rooms of one layer do not see each other."""

    layers: tuple[tuple[str, ...], ...]
    used_only_by: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def layer(self, room: str) -> int | None:
        return next((number for number, rooms in enumerate(self.layers) if room in rooms), None)

    def lower(self, room: str) -> list[str]:
        """The rooms that `room` may use."""
        below = self.layers[: self.layer(room)]
        return [other for rooms in below for other in rooms if room in self.used_only_by.get(other, (room,))]


CPP = Order(
    layers=(
        ("base", "python", "blosc2", "zmq"),
        ("schema", "returns", "trajectories", "wire"),
        ("storage",),
        ("table",),
        ("sampling", "views"),
        ("batches",),
        ("face",),  # core/include: what a C++ program includes; core/buffer: what is behind it
        ("bindings", "net"),
    ),
    used_only_by={
        "python": ("bindings",),  # Python.h, nanobind and NumPy: the engine is also a C++ library
        "blosc2": ("table",),  # one codec; the library is built with or without it
        "zmq": ("net",),  # buffers of servers; the library is built with or without it
    },
)

PYTHON = Order(
    layers=(
        ("engine", "errors", "process"),  # engine: the compiled module _core
        ("checks",),
        ("address", "pace", "sampling", "schema"),
        ("arrays", "views"),  # both read schemas
        ("settings",),  # sampler, view, pace and schema as the engine takes them
        ("files",),
        ("device", "sequences", "trajectories"),
        ("returns", "rows"),  # on the GPU they call device
        ("service",),  # holds what is behind faces, and stands behind them at the client
        ("buffers",),
        ("collect", "llm"),
        ("face",),  # what `import sharpwave` brings
        ("adapters", "compat"),
        ("tools",),  # the command line uses adapters
        ("__main__",),
    )
)

# Folders and modules whose room is not named after them. compat/__init__.py and adapters/__init__.py are imported with
# the package, so they may use nothing that their modules use.
_CPP_NAMES = {"core/include": "face", "core/buffer": "face"}
_PYTHON_NAMES = {
    "__init__.py": "face",
    "adapters/__init__.py": "face",
    "compat/__init__.py": "face",
    "_core": "engine",
}
_LIBRARIES = {"Python.h": "python", "nanobind/": "python", "numpy/": "python", "blosc2": "blosc2", "zmq.h": "zmq"}


@dataclass(frozen=True)
class Known:
    """A use against the order that waits to be mended. It is an error once the file does not need it any more."""

    file: str
    target: str
    reason: str


KNOWN: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Use:
    """One include or import that crosses from room to room."""

    file: str
    line: int
    source: str
    target: str
    name: str
    kind: str  # "include", "import", "import in a function" or "import for types"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Graph:
    order: Order
    rooms: dict[str, str] = field(default_factory=dict)  # room: its first file
    uses: list[Use] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def targets(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {room: set() for room in self.rooms}
        for use in self.uses:
            found.setdefault(use.source, set()).add(use.target)
        return found

    def way(self, start: str, end: str) -> list[str]:
        """Rooms from start to end, each using the next; empty where there is no such way."""
        targets, ways = self.targets(), [[start]]
        seen = {start}
        for way in ways:
            if way[-1] == end:
                return way
            for room in sorted(targets.get(way[-1], set()) - seen):
                seen.add(room)
                ways.append([*way, room])
        return []


_INCLUDE = re.compile(r'\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def _cpp_room(root: Path, path: Path) -> str:
    parts = path.relative_to(root).parts
    return parts[0] if parts[0] == "bindings" else _CPP_NAMES.get("/".join(parts[:2]), parts[1])


def _included(root: Path, path: Path, name: str) -> str | None:
    """The room of an included file; None for headers of the compiler and the system."""
    for folder in (path.parent, root / "core", root / "core/include", root / "bindings"):
        if (folder / name).is_file():
            return _cpp_room(root, (folder / name).resolve())
    return next((room for start, room in _LIBRARIES.items() if name.startswith(start)), None)


def include_graph(root: Path, order: Order = CPP) -> Graph:
    graph = Graph(order)
    root = root.resolve()
    for path in sorted(path for top in ("core", "bindings") for path in (root / top).rglob("*")):
        if path.suffix not in (".h", ".cpp", ".inc"):
            continue
        file, source = path.relative_to(root).as_posix(), _cpp_room(root, path)
        graph.rooms.setdefault(source, file)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if not (match := _INCLUDE.match(line)):
                continue
            name = match[1] or match[2]
            target = _included(root, path, name)
            if target is None and match[1]:
                graph.problems.append(f'{file}:{number}: "{name}" is no file of core/ or bindings/')
            elif target is not None and target != source:
                graph.uses.append(Use(file, number, source, target, name, "include"))
    return graph


def _python_room(place: str) -> str:
    """The room of a file or module, given by its path under src/sharpwave."""
    return _PYTHON_NAMES.get(place, place.partition("/")[0].removesuffix(".py"))


def _imports(tree: ast.AST, kind: str = "import") -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, kind
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _imports(node, "import in a function")
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(ast.Module(node.body, []), "import for types")
            yield from _imports(ast.Module(node.orelse, []), kind)
        else:
            yield from _imports(node, kind)


def _imported(package: Path, path: Path, node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """The rooms that one statement imports from, each with the first dotted name."""

    def place(parts: list[str]) -> str | None:
        """Path of a module under the package; None where there is no such module."""
        if parts == ["_core"]:
            return "_core"
        folder = package.joinpath(*parts)
        if folder.is_dir():
            return "/".join([*parts, "__init__.py"])
        return "/".join(parts) + ".py" if parts and folder.with_suffix(".py").is_file() else None

    if isinstance(node, ast.Import):
        names = [alias.name.split(".") for alias in node.names]
        named = [(name[1:], ".".join(name)) for name in names if name[0] == "sharpwave"]
    else:
        if node.level:
            here = list(path.relative_to(package).parent.parts)
            start = here[: len(here) + 1 - node.level] + (node.module.split(".") if node.module else [])
        elif node.module and node.module.split(".")[0] == "sharpwave":
            start = node.module.split(".")[1:]
        else:
            return {}
        # `from .files import replace_file` names a function, `from ..trajectories import files` a module.
        modules = [[*start, alias.name] for alias in node.names]
        named = [(name if place(name) else start, ".".join(["sharpwave", *name])) for name in modules]
    rooms: dict[str, str] = {}
    for parts, name in named:
        rooms.setdefault(_python_room(place(parts) or "/".join(parts)), name)
    return rooms


def import_graph(root: Path, order: Order = PYTHON) -> Graph:
    graph = Graph(order)
    package = root.resolve() / "src/sharpwave"
    for path in sorted(package.rglob("*.py")):
        file, source = (
            f"src/sharpwave/{path.relative_to(package).as_posix()}",
            _python_room(str(path.relative_to(package))),
        )
        graph.rooms.setdefault(source, file)
        for node, kind in _imports(ast.parse(path.read_text())):
            for target, name in _imported(package, path, node).items():
                if target != source:
                    graph.uses.append(Use(file, node.lineno, source, target, name, kind))
    return graph


def _forbidden(graph: Graph, use: Use) -> str:
    lower = ", ".join(graph.order.lower(use.source)) or "no other room"
    back = graph.way(use.target, use.source)
    cycle = f" It makes a cycle: {' -> '.join([use.source, *back])}." if back else ""
    return (
        f"{use}: {use.source} may not use {use.target} ({use.kind} of {use.name}); it may use {lower}.{cycle} "
        "Move the code to a higher room, or change the layers in tests/house/rooms.py"
    )


def check(graphs: Iterable[Graph], known: Iterable[Known] = KNOWN) -> list[str]:
    """What is wrong, one sentence each; empty where all holds."""
    problems, waiting = [], {(entry.file, entry.target): False for entry in known}
    for graph in graphs:
        problems += graph.problems
        for room, file in graph.rooms.items():
            if graph.order.layer(room) is None:
                problems.append(f"{file}: the room {room!r} has no layer; give it one in tests/house/rooms.py")
        for use in graph.uses:
            if graph.order.layer(use.source) is None or use.target in graph.order.lower(use.source):
                continue
            if (use.file, use.target) in waiting:
                waiting[use.file, use.target] = True
            else:
                problems.append(_forbidden(graph, use))
    for (file, target), needed in waiting.items():
        if not needed:
            problems.append(f"{file}: does not use {target} any more; take it out of KNOWN in tests/house/rooms.py")
    return problems


def _as_text(graph: Graph) -> str:
    lines = []
    for room in (room for rooms in graph.order.layers for room in rooms if room in graph.rooms):
        lines.append(f"{room}")
        for target in (target for rooms in graph.order.layers for target in rooms):
            kinds = Counter(use.kind for use in graph.uses if (use.source, use.target) == (room, target))
            if kinds:
                lines.append(f"    {target}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return "\n".join(lines)


def _as_mermaid(graph: Graph) -> str:
    targets = graph.targets()
    waiting = {(entry.file, entry.target) for entry in KNOWN}
    exceptions = {(use.source, use.target) for use in graph.uses if (use.file, use.target) in waiting}
    straight = {room: {to for to in found if (room, to) not in exceptions} for room, found in targets.items()}

    def reached(room: str) -> set[str]:
        return set().union(*({to} | reached(to) for to in straight.get(room, ())))

    lines = ["graph TD"]
    for room, found in straight.items():
        implied = set().union(*(reached(to) for to in found))
        lines += [f"    {room} --> {to}" for to in sorted(found - implied)]
    lines += [f"    {room} -. to be mended .-> {to}" for room, to in sorted(exceptions)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the includes and imports between the rooms of the code.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="the repository")
    parser.add_argument("--graph", action="store_true", help="print the graph as text")
    parser.add_argument("--mermaid", action="store_true", help="print the graph as Mermaid, without implied edges")
    chosen = parser.parse_args()
    graphs = {"C++": include_graph(chosen.root), "Python": import_graph(chosen.root)}
    problems = check(graphs.values())
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    for name, graph in graphs.items():
        if chosen.graph:
            print(f"# {name}\n{_as_text(graph)}\n")
        if chosen.mermaid:
            print(f"{name}:\n\n```mermaid\n{_as_mermaid(graph)}\n```\n")
    if not (chosen.graph or chosen.mermaid):
        counts = ", ".join(
            f"{len(graph.uses)} uses between {len(graph.rooms)} {name} rooms" for name, graph in graphs.items()
        )
        print(f"{counts}; {len(KNOWN)} known exceptions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
