"""The specification of a SequenceBuffer, slow and obvious: a list of samples that every call reads from end to end.

No clock, no waiting: a get that cannot be served now says so by None. Samples are ids and sets of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sharpwave import Dataflow


@dataclass(eq=False)
class Held:
    id: str
    handle: int
    birth: int
    version: int
    tokens: dict[str, int]  # by key
    group: str = ""
    uses: dict[str, int] = field(default_factory=dict)
    leased: set[str] = field(default_factory=set)
    condemned: bool = False


@dataclass(eq=False)
class Out:
    """A lease."""

    consumer: str
    members: list[Held]
    owner: str | None


class Model:
    def __init__(self, flow: Dataflow, capacity: int, max_tokens: int | None, max_staleness: int | None) -> None:
        self.flow, self.capacity, self.max_tokens, self.max_staleness = flow, capacity, max_tokens, max_staleness
        self.held: list[Held] = []  # in the order of puts
        self.leases: list[Out] = []
        self.used: list[str] = []
        self.version = 0
        self.next = 0
        self.evicted = 0

    # ---- verbs

    def put(
        self, samples: list[tuple[str, dict[str, int], str]], version: int, births: list[int] | None
    ) -> str | list[int]:
        """Handles, or the reason why not."""
        names = [name for name, _, _ in samples]
        tokens = sum(max(keys.values()) for _, keys, _ in samples)
        if len(self.held) + len(samples) > self.capacity:
            return "full"
        if self.max_tokens is not None and self.tokens() + tokens > self.max_tokens:
            return "full"
        if len(set(names)) < len(names) or set(names) & {one.id for one in self.held}:
            return "duplicate"
        handles = []
        for at, (name, keys, group) in enumerate(samples):
            birth = self.next + 1 if births is None else births[at]
            self.held.append(Held(name, self.next, birth, version, dict(keys), group))
            handles.append(self.next)
            self.next += 1
        self._evict()
        return handles

    def amend(self, handles: list[int], key: str, tokens: int) -> bool:
        if not set(handles) <= {one.handle for one in self.held}:
            return False
        for one in self.held:
            if one.handle in handles:
                one.tokens[key] = tokens
        return True

    def get(self, consumer: str, count: int, partial: bool, owner: str | None) -> Out | None:
        found = self.ready(consumer)
        size = self.flow[consumer].group_size
        if size is not None:
            groups = self.groups(consumer)[: count // size]
            found = [one for group in groups for one in group]
            enough = len(groups) == count // size
        else:
            found = found[:count]
            enough = len(found) == count
        if not enough and not (partial and found):
            return None
        for one in found:
            one.leased.add(consumer)
        out = Out(consumer, found, owner)
        self.leases.append(out)
        return out

    def end(self, out: Out, done: bool) -> None:
        self.leases.remove(out)
        for one in out.members:
            one.leased.discard(out.consumer)
            if done:
                one.uses[out.consumer] = one.uses.get(out.consumer, 0) + 1
        for one in [one for one in self.held if not one.leased]:
            if all(self.is_done(one, consumer.name) for consumer in self.flow):
                self.held.remove(one)
        for one in out.members:
            if one not in self.held:
                self.used.append(one.id)
        self._evict()

    def release(self, owner: str) -> None:
        for out in [out for out in self.leases if out.owner == owner]:
            self.end(out, False)

    def clear(self) -> None:
        self.held, self.leases = [], []

    def restart(self) -> None:
        for out in list(self.leases):
            self.end(out, False)

    def set_version(self, version: int) -> None:
        self.version = version
        self._evict()

    # ---- questions

    def is_done(self, one: Held, consumer: str) -> bool:
        return one.uses.get(consumer, 0) >= self.flow[consumer].reuse

    def outstanding(self, consumer: str) -> list[Held]:
        """Still to be handed out, oldest birth first, put order for ties."""
        rest = [
            one
            for one in self.held
            if not self.is_done(one, consumer) and consumer not in one.leased and not one.condemned
        ]
        return sorted(rest, key=lambda one: (one.birth, one.handle))

    def ready(self, consumer: str) -> list[Held]:
        seen = self.outstanding(consumer)[: self.flow[consumer].window]
        return [one for one in seen if self.flow[consumer].inputs <= set(one.tokens)]

    def groups(self, consumer: str) -> list[list[Held]]:
        """Whole groups of those that are ready. (In these tests no group has more members than its size.)"""
        size = self.flow[consumer].group_size
        by_name: dict[str, list[Held]] = {}
        for one in self.ready(consumer):
            by_name.setdefault(one.group, []).append(one)
        return [members for members in by_name.values() if len(members) == size]

    def tokens(self) -> int:
        return sum(max(one.tokens.values()) for one in self.held)

    def _evict(self) -> None:
        if self.max_staleness is None:
            return
        for one in list(self.held):
            if one.version < self.version - self.max_staleness:
                one.condemned = True
                if not one.leased:
                    self.held.remove(one)
                    self.evicted += 1
