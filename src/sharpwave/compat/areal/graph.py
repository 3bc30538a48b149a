"""``MFCDef``: a model function call, and the graph of several of them as a ``networkx.DiGraph``."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import sharpwave as sw
from sharpwave.errors import SchemaError

from .specs import MicroBatchSpec

__all__ = [
    "MFCDef",
    "ModelInterfaceType",
    "ModelName",
    "OffloadHook",
    "ParamReallocHook",
    "build_graph",
    "to_consumer",
]

_log = logging.getLogger("sharpwave.compat.areal")


class ModelInterfaceType(enum.Enum):
    """Equal to upstream's member of the same value: a project that is moved over has both for a while."""

    GENERATE = "generate"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"
    INFERENCE = "inference"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, enum.Enum) and type(other).__name__ == "ModelInterfaceType":
            return bool(other.value == self.value)
        return NotImplemented

    __hash__ = enum.Enum.__hash__  # of the name, as upstream's


@functools.total_ordering
@dataclass(frozen=True, eq=False)
class ModelName:
    """A model's role, and the number of its copy. Equal to upstream's of the same two, also as a key of a dict."""

    role: str
    replica_id: int

    @property
    def name(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        if type(other).__name__ != "ModelName":
            return NotImplemented
        return (self.role, self.replica_id) == (getattr(other, "role", None), getattr(other, "replica_id", None))

    def __lt__(self, other: object) -> bool:
        if type(other).__name__ != "ModelName":
            return NotImplemented
        return (self.role, self.replica_id) < (getattr(other, "role", ""), getattr(other, "replica_id", 0))

    def __hash__(self) -> int:
        return hash((self.role, self.replica_id))


@dataclass
class OffloadHook:
    """After the call, its model's weights go to host memory."""


@dataclass
class ParamReallocHook:
    """Before or after the call, weights go from one model to another: ``target = eta * source + (1 - eta) * target``.

    One of the two is given; the other is the call's own model.
    """

    source: Any = None
    target: Any = None
    eta: float = 1.0


@dataclass
class MFCDef:
    """Upstream's fields, in upstream's order. The graph's answers (``is_src``, ``children``, ...) need ``build_graph``
    before, which is needed for nothing else.

    Equal names have equal hashes, as upstream.
    """

    name: str
    n_seqs: int
    interface_type: Any = ModelInterfaceType.INFERENCE
    interface_impl: Any = None
    model_name: Any = None
    input_keys: Iterable[str] = ()
    input_key_remap: dict[str, str] = field(default_factory=dict)
    output_keys: Iterable[str] = ()
    output_key_remap: dict[str, str] = field(default_factory=dict)
    mb_spec: Any = field(default_factory=MicroBatchSpec)
    min_n_seqs_per_pass: float = 1
    log_return_value: bool = False
    _G: Any = field(default=None, compare=False)
    _pre_hooks: list[Any] = field(default_factory=list)
    _post_hooks: list[Any] = field(default_factory=list)
    model_type: Any = None  # of earlier revisions
    model_path: Any = None

    def __post_init__(self) -> None:
        self.input_keys, self.output_keys = tuple(self.input_keys), tuple(self.output_keys)
        if isinstance(self.model_name, str):
            self.model_name = ModelName(self.model_name, 0)
        if self._interface() not in {kind.value for kind in ModelInterfaceType}:
            kinds = ", ".join(kind.name for kind in ModelInterfaceType)
            raise SchemaError(
                f"MFCDef({self.name!r}): interface_type: expected one of {kinds}, got {self.interface_type!r}"
            )

    def __repr__(self) -> str:
        return f"MFCDef[{self.name}]"

    def __hash__(self) -> int:
        return hash(self.name)

    def _interface(self) -> Any:
        """By value: upstream's enum is another class with the same values."""
        return getattr(self.interface_type, "value", self.interface_type)

    def to_consumer(self) -> sw.Consumer:
        return to_consumer(self)

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

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def add_pre_hook(self, h: Any) -> None:
        """What happens before the call: a ParamReallocHook."""
        if _kind_of_hook(self.name, "add_pre_hook()", h) == "OffloadHook":
            raise SchemaError(
                f"MFCDef({self.name!r}).add_pre_hook(): an OffloadHook comes after a call; add_post_hook()"
            )
        self._pre_hooks.append(h)

    def add_post_hook(self, h: Any) -> None:
        """What happens after the call: a ParamReallocHook or an OffloadHook."""
        _kind_of_hook(self.name, "add_post_hook()", h)
        self._post_hooks.append(h)

    # ---- the graph's answers -----------------------------------------------------------------------------------------

    @property
    def is_src(self) -> bool:
        return not list(self._graph().predecessors(self.name))

    @property
    def is_dst(self) -> bool:
        return not list(self._graph().successors(self.name))

    @property
    def parents(self) -> list[MFCDef]:
        graph = self._graph()
        return [graph.nodes[name]["object"] for name in graph.predecessors(self.name)]

    @property
    def children(self) -> list[MFCDef]:
        graph = self._graph()
        return [graph.nodes[name]["object"] for name in graph.successors(self.name)]

    def all_successors(self) -> list[MFCDef]:
        graph = self._graph()
        after = list(_networkx().dfs_preorder_nodes(graph, self.name))[1:]
        return [graph.nodes[name]["object"] for name in after]

    @property
    def data_producers(self) -> dict[str, Any]:
        """The model name of the call that makes a key."""
        return self._graph().graph["data_producers"]  # type: ignore[no-any-return]

    @property
    def data_consumers(self) -> dict[str, list[Any]]:
        """The model names of the calls that read a key."""
        return self._graph().graph["data_consumers"]  # type: ignore[no-any-return]

    @property
    def is_dst_of_model_role(self) -> bool:
        """Whether no later call has a model of the same role."""
        return all(later.role != self.role for later in self.all_successors())

    def _graph(self) -> Any:
        if self._G is None:
            raise SchemaError(f"MFCDef({self.name!r}): in no graph yet; call build_graph() with all of them")
        return self._G


def to_consumer(rpc: Any) -> sw.Consumer:
    """The Consumer of a model function call, ours or upstream's."""
    return sw.Consumer(rpc.name, tuple(rpc.input_keys), tuple(rpc.output_keys), rpc.n_seqs)


def build_graph(nodes: Iterable[MFCDef], verbose: bool = False, graph_path: str | None = None) -> Any:
    """The graph of these calls, which each of them knows from now on: upstream's callers set ``_G`` themselves.

    Args:
        verbose: Logs the edges to ``sharpwave.compat.areal``.
        graph_path: With ``verbose``: where to write a picture. Needs matplotlib.

    Returns:
        A ``networkx.DiGraph`` by name, with ``object`` in each node and ``keys`` on each edge.

    Raises:
        SchemaError: A name twice, a key made twice (upstream: the last one wins), a circle (upstream: not looked for).
    """
    networkx = _networkx()
    listed = list(nodes)
    sw.Dataflow([to_consumer(node) for node in listed])  # the checks
    graph = networkx.DiGraph()
    graph.add_nodes_from((node.name, {"object": node}) for node in listed)
    producer = {key: node for node in listed for key in node.output_keys}
    readers: dict[str, list[MFCDef]] = {}
    for node in listed:
        for key in node.input_keys:
            readers.setdefault(key, []).append(node)
            if key in producer:
                edge = producer[key].name, node.name
                if not graph.has_edge(*edge):
                    graph.add_edge(*edge, keys=[])
                graph.edges[edge]["keys"].append(key)
    graph.graph["data_producers"] = {key: node.model_name for key, node in producer.items()}
    graph.graph["data_consumers"] = {key: [node.model_name for node in found] for key, found in readers.items()}
    if verbose:
        for start, end, keys in graph.edges(data="keys"):
            _log.info("%s -> %s: %s", start, end, ", ".join(keys))
        if graph_path is not None:
            _draw(networkx, graph, graph_path)
    for node in listed:
        node._G = graph
    return graph


def _draw(networkx: Any, graph: Any, path: str) -> None:
    """One column a level of the graph."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)  # without pyplot, whose figures stay until they are closed
    levels = dict(enumerate(networkx.topological_generations(graph)))
    places = networkx.multipartite_layout(graph, subset_key=levels)
    networkx.draw_networkx(graph, places, ax=figure.add_subplot(), node_size=2500, node_color="lightblue", font_size=9)
    figure.savefig(path)


def _kind_of_hook(name: str, where: str, hook: Any) -> str:
    kind = type(hook).__name__  # by name: upstream's hooks are other classes
    if kind not in ("OffloadHook", "ParamReallocHook"):
        raise SchemaError(f"MFCDef({name!r}).{where}: expected an OffloadHook or a ParamReallocHook, got {hook!r}")
    if kind == "ParamReallocHook" and hook.source is not None and hook.target is not None:
        raise SchemaError(f"MFCDef({name!r}).{where}: expected source= or target=, got both")
    return kind


def _networkx() -> Any:
    try:
        import networkx
    except ImportError:
        raise ImportError("build_graph(): needs networkx; pip install networkx") from None
    return networkx
