"""The configuration of ``sharpwave serve``: a TOML file, or addresses on the command line.

    at = "tcp://127.0.0.1:7001"
    keys = "keys"                          # the folder that `sharpwave keys new` made

    [tables.demonstrations]
    open = "file://demonstrations.sw"

    [tables.replay.create]
    face = "ReplayBuffer"
    capacity = 1_000_000
    obs_shape = [17]
    action_shape = [6]
    storage = "file://replay.sw"
    sampler = { kind = "Prioritized", alpha = 0.6, beta = 0.4 }

Names are those of the constructors' arguments. Paths are relative to the folder of the file.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import sharpwave as sw

from ..errors import SchemaError, StorageError

__all__ = ["ServerConfig", "TableConfig"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_FACES: dict[str, Any] = {
    name: getattr(sw, name)
    for name in ("ReplayBuffer", "DistillationBuffer", "TrajectoryReplayBuffer", "SequenceBuffer")
}
# What a table with `kind =` may be, by the argument it is given to.
_SAMPLERS = {kind.__name__: kind for kind in (sw.Uniform, sw.Prioritized, sw.Shuffle, sw.Fifo, sw.Lifo, sw.Recent)}
_KINDS: dict[str, dict[str, Any]] = {
    "sampler": _SAMPLERS,
    "view": {"Transitions": sw.Transitions, "Windows": sw.Windows},
    "pace": {
        "Pace": sw.Pace,
        "min_size": sw.Pace.min_size,
        "samples_per_insert": sw.Pace.samples_per_insert,
        "queue": sw.Pace.queue,
    },
    "beta": {"Linear": sw.Linear},
}
_FIELDS = ("schema", "teacher", "obs_shape", "action_shape")  # arguments whose tables are fields by name
_PLACES = ("storage", "folder", "journal")  # arguments that are paths or addresses


@dataclass(frozen=True)
class TableConfig:
    """One table: how to open it, or how to make it."""

    where: str
    opens: dict[str, Any] | None = None  # arguments of sw.open
    face: str = ""
    creates: dict[str, Any] = field(default_factory=dict)  # arguments of the face

    def make(self) -> Any:
        """Opens or makes the buffer."""
        try:
            return sw.open(**self.opens) if self.opens is not None else _FACES[self.face](**self.creates)
        except TypeError as error:  # an argument is missing: its face says which
            raise SchemaError(f"{self.where}: {error}") from None
        except sw.errors.SharpwaveError as error:
            raise type(error)(f"{self.where}: {error}") from error


@dataclass(frozen=True)
class ServerConfig:
    """What a server serves, and where."""

    at: str
    tables: dict[str, TableConfig]
    keys: str | None = None
    drain_s: float = 30.0
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of sw.serve

    @classmethod
    def from_addresses(cls, addresses: Iterable[str], at: str, keys: str | None) -> ServerConfig:
        """Buffers that exist: ``ADDRESS``, served under the last part of its name, or ``NAME=ADDRESS``."""
        tables: dict[str, TableConfig] = {}
        for text in addresses:
            name, found, address = text.partition("=")
            if not found or not _NAME.fullmatch(name):
                name, address = Path(text.rpartition("://")[2]).stem, text
            where = f"serve: {text}"
            if not _NAME.fullmatch(name):
                raise SchemaError(f"{where}: expected a name for it; write NAME={address}")
            if name in tables:
                raise SchemaError(f"{where}: two tables have the name {name!r}; write NAME={address}")
            tables[name] = TableConfig(where, opens={"address": address})
        return cls(at, tables, keys)

    @classmethod
    def read(cls, path: Path) -> ServerConfig:
        """Reads a TOML file; every mistake in it is a ``SchemaError`` that names the key."""
        plain = _read_toml(path)
        where = str(path)
        own = ("at", "keys", "drain_s", "client_timeout", "folder", "limits", "tables")
        _check_names(where, plain, own, "a setting of 'sharpwave serve'")
        if not isinstance(plain.get("at"), str):
            raise SchemaError(f'{where}: at: expected an address, as in at = "tcp://127.0.0.1:7001"')
        tables = plain.get("tables")
        if not isinstance(tables, dict) or not tables:
            raise SchemaError(f"{where}: expected at least one table, as in [tables.replay]")
        base = path.absolute().parent
        options: dict[str, Any] = {name: plain[name] for name in ("client_timeout", "limits") if name in plain}
        for name in ("keys", "folder"):
            if name in plain:
                options[name] = _place(f"{where}: {name}", base, plain[name])
        keys = options.pop("keys", None)
        read = {name: _read_table(f"{where}: tables.{name}", base, name, table) for name, table in tables.items()}
        drain_s = plain.get("drain_s", 30.0)
        if isinstance(drain_s, bool) or not isinstance(drain_s, (int, float)) or drain_s < 0:
            raise SchemaError(f"{where}: drain_s: expected seconds, got {drain_s!r}")
        return cls(plain["at"], read, keys, float(drain_s), options)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise StorageError(
            f"{path}: Python 3.10 has no reader of TOML files; pip install tomli, or use Python 3.11"
        ) from None
    try:
        plain: dict[str, Any] = toml.loads(path.read_text(encoding="utf-8"))
        return plain
    except ValueError as error:  # not UTF-8, or not TOML
        raise SchemaError(f"{path}: not TOML: {error}") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None


def _read_table(where: str, base: Path, name: str, plain: Any) -> TableConfig:
    if not _NAME.fullmatch(name):
        raise SchemaError(f"{where}: expected a name of letters, digits, '_', '.', '-', got {name!r}")
    if not isinstance(plain, dict) or ("open" in plain) == ("create" in plain):
        _check_names(where, plain if isinstance(plain, dict) else {}, ("open", "create"), "a key of a table")
        raise SchemaError(f'{where}: expected either open = "ADDRESS" or a table [tables.{name}.create]')
    if "open" in plain:
        options = ("wait", "timeout", "recover", "verify")
        _check_names(where, plain, ("open", *options), "a key of a table with open =")
        opens = {"address": _place(f"{where}.open", base, plain["open"])}
        return TableConfig(where, opens | {option: plain[option] for option in options if option in plain})
    _check_names(where, plain, ("create",), "a key of a table with create")
    create = plain["create"]
    where = f"{where}.create"
    if not isinstance(create, dict):
        raise SchemaError(f"{where}: expected a table of arguments, got {create!r}")
    face = create.get("face")
    if not isinstance(face, str) or face not in _FACES:
        meant = _nearest(str(face), _FACES)
        raise SchemaError(f"{where}.face: expected one of {', '.join(_FACES)}, got {face!r}{meant}")
    given = {key: value for key, value in create.items() if key != "face"}
    arguments = _read_arguments(where, base, face, _FACES[face], given)
    if "storage" in arguments and "exist" in inspect.signature(_FACES[face]).parameters:
        arguments.setdefault("exist", "attach")  # a server that is started again goes on with its rows
    if face == "TrajectoryReplayBuffer":
        arguments.setdefault("folder", None)
    return TableConfig(where, None, face, arguments)


def _read_arguments(where: str, base: Path, name: str, call: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor from plain values; unknown names are refused."""
    _check_names(where, plain, tuple(inspect.signature(call).parameters), f"an argument of {name}")
    return {key: _read_value(f"{where}.{key}", base, key, value) for key, value in plain.items()}


def _read_value(where: str, base: Path, name: str, value: Any) -> Any:
    if name in _PLACES:
        return _place(where, base, value)
    if name == "flow":
        return _read_flow(where, base, value)
    if name in _FIELDS and isinstance(value, dict):
        return {key: _read_field(f"{where}.{key}", base, node) for key, node in value.items()}
    if name == "hindsight" and value is not None:
        raise SchemaError(
            f"{where}: Hindsight has functions in it, which a file cannot hold; make the buffer in Python and serve it "
            "by sw.serve()"
        )
    if isinstance(value, dict):
        if name not in _KINDS:
            raise SchemaError(f"{where}: expected a value, got a table")
        return _read_kind(where, base, _KINDS[name], value)
    return tuple(value) if isinstance(value, list) else value


def _read_kind(where: str, base: Path, kinds: Mapping[str, Any], plain: Mapping[str, Any]) -> Any:
    kind = plain.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        meant = _nearest(str(kind), kinds)
        raise SchemaError(f"{where}.kind: expected {' or '.join(kinds)}, got {kind!r}{meant}")
    given = {key: value for key, value in plain.items() if key != "kind"}
    arguments = _read_arguments(where, base, kind, kinds[kind], given)
    try:
        return kinds[kind](**arguments)
    except TypeError as error:
        raise SchemaError(f"{where}: {error}") from None
    except SchemaError as error:
        raise SchemaError(f"{where}: {error}") from None


def _read_field(where: str, base: Path, plain: Any) -> Any:
    """``{ kind = "Field", shape = [84, 84], dtype = "uint8" }``, or fields by name."""
    if not isinstance(plain, dict):
        raise SchemaError(f'{where}: expected {{ kind = "Field", shape = ..., dtype = ... }} or a table of these')
    if "kind" in plain:
        return _read_kind(where, base, {"Field": sw.Field}, plain)
    return {key: _read_field(f"{where}.{key}", base, node) for key, node in plain.items()}


def _read_flow(where: str, base: Path, plain: Any) -> sw.Dataflow:
    if not isinstance(plain, list) or not all(isinstance(consumer, dict) for consumer in plain):
        raise SchemaError(f"{where}: expected a list of consumers, as in [[{where.rpartition(': ')[2]}]]")
    consumers = []
    for number, given in enumerate(plain):
        place = f"{where}[{number}]"
        arguments = _read_arguments(place, base, "Consumer", sw.Consumer, given)
        try:
            consumers.append(sw.Consumer(**arguments))
        except (TypeError, SchemaError) as error:
            raise SchemaError(f"{place}: {error}") from None
    return sw.Dataflow(consumers)


def _check_names(where: str, plain: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    names = [name for name in known if name != "self"]
    for name in plain:
        if name not in names:
            meant = _nearest(name, names) or f"; expected {', '.join(names)}"
            raise SchemaError(f"{where}: {name!r} is not {what}{meant}")


def _nearest(name: str, known: Iterable[str]) -> str:
    folded = {other.lower(): other for other in known}
    found = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[found[0]]!r}?" if found else ""


def _place(where: str, base: Path, value: Any) -> str:
    """An address or a path, absolute: relative ones are relative to the folder of the configuration."""
    if not isinstance(value, str) or not value:
        raise SchemaError(f"{where}: expected an address or a path, got {value!r}")
    scheme, found, rest = value.rpartition("://")
    if found and scheme != "file":
        return value
    return f"{scheme}{found}{base / Path(rest).expanduser()}"
