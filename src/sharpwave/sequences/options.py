"""The options of a SequenceBuffer: checked once, and kept in its journal and in what ``save`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checks import number, one_of, truth, whole
from ..errors import SchemaError
from .dataflow import Consumer, Dataflow

__all__ = ["Options"]

_STALE = ("evict", "mask", "keep")
_CONSUMER = ("name", "inputs", "outputs", "batch_size", "reuse", "window", "group_size", "group_timeout")


@dataclass(frozen=True)
class Options:
    """What the constructor of a SequenceBuffer was given, except for what belongs to one opening (``recover``,
    ``resume``)."""

    flow: Dataflow
    capacity: int
    max_tokens: int | None = None
    max_bytes: int | None = None
    max_staleness: int | None = None
    stale: str = "evict"
    lease_timeout: float | None = None
    watchdog_timeout: float | None = None
    duplicate_ids: bool = False
    epoch_size: int | None = None
    sync: bool = False

    @classmethod
    def read(cls, where: str, **given: Any) -> Options:
        """Raises:
        SchemaError: An option has a value that makes no sense.
        """
        flow = given["flow"]
        if not isinstance(flow, Dataflow):
            raise SchemaError(f"{where}: flow: expected a Dataflow, got {type(flow).__name__}")
        given["capacity"] = whole(where, "capacity", given["capacity"])
        given["stale"] = one_of(where, "stale", given["stale"], _STALE)
        for name, least in (("max_tokens", 1), ("max_bytes", 1), ("max_staleness", 0), ("epoch_size", 1)):
            given[name] = None if given[name] is None else whole(where, name, given[name], least)
        for name in ("lease_timeout", "watchdog_timeout"):
            given[name] = None if given[name] is None else number(where, name, given[name], 1e-3, 1e9)
        for name in ("duplicate_ids", "sync"):
            truth(where, name, given[name])
        return cls(**given)

    @property
    def oldest(self) -> int | None:
        """How many versions behind the present one a sample is thrown away; None keeps everything."""
        return None if self.stale == "keep" else self.max_staleness

    def to_json(self) -> dict[str, Any]:
        consumers = []
        for consumer in self.flow:
            about = {name: getattr(consumer, name) for name in _CONSUMER}
            consumers.append({**about, "inputs": sorted(consumer.inputs), "outputs": sorted(consumer.outputs)})
        return {**self.__dict__, "flow": consumers}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Options:
        """The options that a file holds.

        Raises:
            SchemaError, KeyError, TypeError, ValueError: It is not what ``to_json`` gave.
        """
        _check_names("options", said, tuple(cls.__dataclass_fields__))
        if not isinstance(said["flow"], list):
            raise TypeError(f"flow: expected a list of consumers, got {said['flow']!r:.100}")
        consumers = []
        for about in said["flow"]:
            _check_names("consumer", about, _CONSUMER)
            for what in ("inputs", "outputs"):
                if not isinstance(about[what], list):
                    raise TypeError(f"{what}: expected a list of keys, got {about[what]!r:.100}")
            consumers.append(Consumer(**about))
        return cls.read("options", **{**said, "flow": Dataflow(consumers)})


def _check_names(what: str, said: Any, names: tuple[str, ...]) -> None:
    if not isinstance(said, dict) or set(said) != set(names):
        raise ValueError(f"{what}: expected an object with {', '.join(names)}, got {said!r:.200}")
