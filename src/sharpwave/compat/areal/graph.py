"""``MFCDef``: a model function call, which is a Consumer with what AReaL wants to know besides."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sharpwave as sw

__all__ = ["MFCDef", "ModelInterfaceType", "build_graph"]


class ModelInterfaceType(enum.Enum):
    GENERATE = "generate"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"
    INFERENCE = "inference"


@dataclass
class MFCDef:
    """Upstream's fields. The graph's answers (``is_src``, ``children``, ...) need ``build_graph`` before."""

    name: str
    n_seqs: int
    interface_type: ModelInterfaceType = ModelInterfaceType.INFERENCE
    interface_impl: Any = None
    model_name: Any = None
    input_keys: Iterable[str] = ()
    output_keys: Iterable[str] = ()
    input_key_remap: dict[str, str] = field(default_factory=dict)
    output_key_remap: dict[str, str] = field(default_factory=dict)
    mb_spec: Any = None
    min_n_seqs_per_pass: float = 1
    log_return_value: bool = False
    model_type: Any = None
    model_path: Any = None
    _flow: Any = field(default=None, repr=False, compare=False)
    _nodes: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.input_keys, self.output_keys = tuple(self.input_keys), tuple(self.output_keys)
        if self._interface() not in {kind.value for kind in ModelInterfaceType}:
            kinds = ", ".join(kind.name for kind in ModelInterfaceType)
            raise sw.errors.SchemaError(
                f"MFCDef({self.name!r}): interface_type: expected one of {kinds}, got {self.interface_type!r}"
            )

    def _interface(self) -> Any:
        """By value: upstream's enum is another class with the same values."""
        return getattr(self.interface_type, "value", self.interface_type)

    def to_consumer(self) -> sw.Consumer:
        return sw.Consumer(self.name, self.input_keys, self.output_keys, self.n_seqs)

    @property
    def role(self) -> Any:
        """The first half of ``model_name``, where that has two."""
        return getattr(self.model_name, "role", self.model_name)

    def is_generate(self) -> bool:
        return bool(self._interface() == ModelInterfaceType.GENERATE.value)

    def is_train(self) -> bool:
        return bool(self._interface() == ModelInterfaceType.TRAIN_STEP.value)

    def is_inference(self) -> bool:
        return bool(self._interface() == ModelInterfaceType.INFERENCE.value)

    @property
    def is_src(self) -> bool:
        return not self._graph().parents(self.name)

    @property
    def is_dst(self) -> bool:
        return not self._graph().children(self.name)

    @property
    def parents(self) -> list[MFCDef]:
        return [self._nodes[name] for name in self._graph().parents(self.name)]

    @property
    def children(self) -> list[MFCDef]:
        return [self._nodes[name] for name in self._graph().children(self.name)]

    def all_successors(self) -> list[MFCDef]:
        return [self._nodes[name] for name in self._graph().successors(self.name)]

    @property
    def data_producers(self) -> dict[str, MFCDef]:
        return {key: self._nodes[name] for key, name in self._graph().producers.items()}

    @property
    def data_consumers(self) -> dict[str, list[MFCDef]]:
        flow = self._graph()
        return {key: [self._nodes[one.name] for one in flow if key in one.inputs] for key in flow.keys}

    def _graph(self) -> sw.Dataflow:
        if self._flow is None:
            raise sw.errors.SchemaError(f"MFCDef({self.name!r}): in no graph yet; call build_graph() with all of them")
        return self._flow  # type: ignore[no-any-return]


def build_graph(nodes: Iterable[MFCDef]) -> sw.Dataflow:
    """The graph of these calls, which each of them knows from now on.

    Raises:
        SchemaError: A name twice, a key made twice (upstream: the last one wins), a circle (upstream: not looked for).
    """
    listed = list(nodes)
    flow = sw.Dataflow([node.to_consumer() for node in listed])
    by_name = {node.name: node for node in listed}
    for node in listed:
        node._flow, node._nodes = flow, by_name
    return flow
