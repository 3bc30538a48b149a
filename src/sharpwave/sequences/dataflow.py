"""The dataflow of a SequenceBuffer: which consumer reads and makes which keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..checks import number, whole
from ..errors import SchemaError
from .column import read_list

__all__ = ["Consumer", "Dataflow"]


@dataclass(frozen=True, init=False)
class Consumer:
    """Something that takes batches out of the buffer: a reference model, a critic, the trainer.

    Args:
        name: Different from that of every other consumer.
        inputs: The keys that a sample must have before it is handed out; the batch has these.
        outputs: The keys that it adds by ``amend``.
        batch_size: How many samples a batch has.
        reuse: How often each sample is handed out, each time after the last was acknowledged.
        window: Only this many of the oldest outstanding samples may be handed out, so that a late sample is not
            overtaken for ever. ``window=batch_size`` is strict order; None takes any sample that is ready.
        group_size: This many samples with the same ``metadata["group"]`` are handed out together; ``batch_size`` is a
            multiple of it.
        group_timeout: Seconds after which an incomplete group is handed out; None waits for all members.

    Example:
        >>> import sharpwave as sw
        >>> sw.Consumer("ref", inputs={"input_ids"}, outputs={"ref_logprobs"}, batch_size=64).name
        'ref'
    """

    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    batch_size: int
    reuse: int
    window: int | None
    group_size: int | None
    group_timeout: float | None

    def __init__(
        self,
        name: str,
        inputs: Iterable[str] = (),
        outputs: Iterable[str] = (),
        batch_size: int = 1,
        *,
        reuse: int = 1,
        window: int | None = None,
        group_size: int | None = None,
        group_timeout: float | None = None,
    ) -> None:
        where = f"Consumer({name!r})"
        if not isinstance(name, str) or not name:
            raise SchemaError(f"Consumer(): name: expected text, got {name!r}")
        for what, keys in (("inputs", inputs), ("outputs", outputs)):
            if isinstance(keys, str):
                raise SchemaError(f"{where}: {what}: expected a set of keys, got the text {keys!r}; write {{{keys!r}}}")
            listed = read_list(where, what, keys)
            if not all(isinstance(key, str) for key in listed):
                raise SchemaError(f"{where}: {what}: expected a set of keys, got {listed!r:.100}")
            object.__setattr__(self, what, frozenset(listed))
        batch_size = whole(where, "batch_size", batch_size)
        if window is not None:
            window = whole(where, "window", window, batch_size)
        if group_size is not None:
            group_size = whole(where, "group_size", group_size)
            if batch_size % group_size:
                raise SchemaError(
                    f"{where}: batch_size: expected a multiple of group_size={group_size}, got {batch_size}"
                )
            if window is not None:
                raise SchemaError(
                    f"{where}: window= and group_size= exclude each other: a group has no one place in line"
                )
        if group_timeout is not None:
            if group_size is None:
                raise SchemaError(f"{where}: group_timeout= needs group_size=")
            group_timeout = number(where, "group_timeout", group_timeout, 0, 1e9)
        for field, value in (
            ("name", name),
            ("batch_size", batch_size),
            ("reuse", whole(where, "reuse", reuse)),
            ("window", window),
            ("group_size", group_size),
            ("group_timeout", group_timeout),
        ):
            object.__setattr__(self, field, value)


class Dataflow:
    """Consumers, joined by the keys that one makes and another reads.

    Args:
        consumers: At least one; different names; no key made by two of them; no cycle.

    Raises:
        SchemaError: One of these does not hold.

    Example:
        >>> import sharpwave as sw
        >>> flow = sw.Dataflow([
        ...     sw.Consumer("ref", inputs={"input_ids"}, outputs={"ref_logprobs"}, batch_size=64),
        ...     sw.Consumer("train", inputs={"input_ids", "ref_logprobs", "rewards"}, batch_size=64),
        ... ])
        >>> flow.sources, flow.sinks, sorted(flow.given_keys)
        (['ref'], ['train'], ['input_ids', 'rewards'])
    """

    def __init__(self, consumers: Iterable[Consumer]) -> None:
        self.consumers: tuple[Consumer, ...] = tuple(read_list("Dataflow()", "consumers", consumers))
        if not self.consumers:
            raise SchemaError("Dataflow(): expected at least one consumer")
        self._by_name: dict[str, Consumer] = {}
        self.producers: dict[str, str] = {}
        """The consumer that makes a key."""
        for consumer in self.consumers:
            if not isinstance(consumer, Consumer):
                raise SchemaError(f"Dataflow(): expected consumers, got {consumer!r}")
            if consumer.name in self._by_name:
                raise SchemaError(f"Dataflow(): name: expected each once, got {consumer.name!r} twice")
            self._by_name[consumer.name] = consumer
            for key in sorted(consumer.outputs):
                if key in self.producers:
                    raise SchemaError(
                        f"Dataflow(): key {key!r} is made by {self.producers[key]!r} and by {consumer.name!r}; "
                        "rename one of the two"
                    )
                self.producers[key] = consumer.name
        self._order = self._sort()

    def __getitem__(self, name: str) -> Consumer:
        consumer = self._by_name.get(name) if isinstance(name, str) else None
        if consumer is None:
            raise SchemaError(f"expected one of the consumers {', '.join(self._by_name)}, got {name!r}")
        return consumer

    def __iter__(self) -> Iterator[Consumer]:
        return iter(self.consumers)

    def __len__(self) -> int:
        return len(self.consumers)

    @property
    def keys(self) -> frozenset[str]:
        """Every key that a consumer reads."""
        return frozenset(key for consumer in self for key in consumer.inputs)

    @property
    def given_keys(self) -> frozenset[str]:
        """The keys that no consumer makes: ``put`` or ``amend`` has to bring them."""
        return self.keys - set(self.producers)

    @property
    def order(self) -> list[str]:
        """All names, each behind those whose keys it reads."""
        return list(self._order)

    @property
    def edges(self) -> dict[tuple[str, str], frozenset[str]]:
        """The keys that go from one consumer to another."""
        found: dict[tuple[str, str], set[str]] = {}
        for consumer in self:
            for key in consumer.inputs:
                if key in self.producers:
                    found.setdefault((self.producers[key], consumer.name), set()).add(key)
        return {edge: frozenset(keys) for edge, keys in found.items()}

    @property
    def sources(self) -> list[str]:
        """The consumers that read no key of another consumer."""
        return [consumer.name for consumer in self if not self.parents(consumer.name)]

    @property
    def sinks(self) -> list[str]:
        """The consumers whose keys no other consumer reads."""
        return [consumer.name for consumer in self if not self.children(consumer.name)]

    def parents(self, name: str) -> list[str]:
        inputs = self[name].inputs
        return [one.name for one in self if one.outputs & inputs]

    def children(self, name: str) -> list[str]:
        outputs = self[name].outputs
        return [one.name for one in self if one.inputs & outputs]

    def successors(self, name: str) -> list[str]:
        """All consumers that read its keys, directly or through others."""
        found, look = set(), self.children(name)
        while look:
            one = look.pop()
            if one not in found:
                found.add(one)
                look += self.children(one)
        return [other for other in self._order if other in found]

    def _sort(self) -> list[str]:
        waiting = {consumer.name: set(self.parents(consumer.name)) for consumer in self}
        order: list[str] = []
        while waiting:
            free = [name for name, parents in waiting.items() if not parents]
            if not free:
                raise SchemaError(f"Dataflow(): {', '.join(sorted(waiting))} wait for each other's keys in a circle")
            order += free
            waiting = {name: parents - set(free) for name, parents in waiting.items() if name not in free}
        return order
