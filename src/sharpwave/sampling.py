"""Samplers: which rows are drawn, and in what order. They are settings: plain data that a file can carry."""

from __future__ import annotations

import math
from typing import Any, Literal

from .checks import number, one_of, set_once, truth, whole
from .errors import SchemaError

__all__ = ["Fifo", "Lifo", "Linear", "Prioritized", "Recent", "Sampler", "Shuffle", "Uniform"]


class Linear:
    """A number that goes from ``start`` to ``end`` over ``steps`` calls of ``sample``, and stays there.

    Example:
        >>> import sharpwave as sw
        >>> sw.Prioritized(beta=sw.Linear(0.4, 1.0, 100_000))
        Prioritized(alpha=0.6, beta=Linear(0.4, 1.0, 100000))
    """

    __slots__ = ("end", "start", "steps")
    __setattr__ = set_once

    def __init__(self, start: float, end: float, steps: int) -> None:
        self.start = number("Linear()", "start", start, -math.inf, math.inf)
        self.end = number("Linear()", "end", end, -math.inf, math.inf)
        self.steps = whole("Linear()", "steps", steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Linear) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Linear({self.start}, {self.end}, {self.steps})"


class Uniform:
    """Every row that may start an example is equally likely; draws are with replacement.

    Args:
        newest: The first so many of a batch are the newest rows, newest first (combined experience replay).
        max_reads: A row is no longer drawn after so many times; None: it always may be.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), sampler=sw.Uniform(newest=1))
    """

    __slots__ = ("max_reads", "newest")
    __setattr__ = set_once

    def __init__(self, *, newest: int = 0, max_reads: int | None = None) -> None:
        self.newest = whole("Uniform()", "newest", newest, 0)
        self.max_reads = _read_max_reads("Uniform()", max_reads)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Uniform", "newest": self.newest, "max_reads": self.max_reads}

    def __repr__(self) -> str:
        return f"Uniform({_options(self, newest=0, max_reads=None)})"


class Prioritized:
    """Rows are drawn the more often, the larger their priority; batches carry the weights that correct for it.

    A row is drawn with probability P = (priority + eps) ** alpha, divided by the sum of that over all rows. Its weight
    is (rows * P) ** -beta. Draws are with replacement. ``update_priorities`` gives rows new priorities.

    Args:
        alpha: 0 draws uniformly, 1 in proportion to priorities. ``buf.tune(alpha=...)`` changes it exactly.
        beta: How much of the bias the weights take away; 1 is all. A number or a ``Linear``.
        eps: Added to every priority, so that a row whose error was 0 is drawn again.
        rank_based: P goes by (1 / rank) ** alpha instead, the largest priority being rank 1. Outliers matter less. The
            order is refreshed when a sixteenth of the rows has changed; newer rows count as first until then.
        stratified: One draw from each of n equal parts of the mass. False: n independent draws.
        normalize: ``"batch"`` divides weights by the largest of the batch, ``"buffer"`` by the largest that any row
            could have, ``"none"`` not at all.
        mix: Share of draws that are uniform over all rows, whatever their priority.
        new_rows: Priority of rows that bring none (``add(priority=...)``): ``"live_max"`` the largest in the buffer,
            ``"running_max"`` the largest ever seen (at least 1), or a number.
        newest: The first so many of a batch are the newest rows, with weight 1 (combined experience replay).
        max_reads: A row is no longer drawn after so many times; None: it always may be.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Prioritized(alpha=0.6, beta=0.4))
    """

    __slots__ = (
        "alpha",
        "beta",
        "eps",
        "max_reads",
        "mix",
        "new_rows",
        "newest",
        "normalize",
        "rank_based",
        "stratified",
    )
    __setattr__ = set_once

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | Linear = 0.4,
        *,
        eps: float = 1e-6,
        rank_based: bool = False,
        stratified: bool = True,
        normalize: Literal["batch", "buffer", "none"] = "batch",
        mix: float = 0.0,
        new_rows: Literal["live_max", "running_max"] | float = "live_max",
        newest: int = 0,
        max_reads: int | None = None,
    ) -> None:
        where = "Prioritized()"
        self.newest = whole(where, "newest", newest, 0)
        self.max_reads = _read_max_reads(where, max_reads)
        self.alpha = number(where, "alpha", alpha, 0, 1)
        self.beta = read_beta(where, beta)
        self.eps = number(where, "eps", eps, 0, 1e30)
        self.mix = number(where, "mix", mix, 0, 1)
        self.rank_based = truth(where, "rank_based", rank_based)
        self.stratified = truth(where, "stratified", stratified)
        self.normalize: str = one_of(where, "normalize", normalize, ("batch", "buffer", "none"))
        if isinstance(new_rows, str):
            self.new_rows: str | float = one_of(where, "new_rows", new_rows, ("live_max", "running_max"))
        else:
            self.new_rows = number(where, "new_rows", new_rows, 0, 1e30)

    def to_plain(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__}
        if isinstance(self.beta, Linear):
            plain["beta"] = [self.beta.start, self.beta.end, self.beta.steps]
        return {"kind": "Prioritized", **plain}

    def numbers(self) -> tuple[float, float, float, float]:
        """Alpha, and beta as (start, end, steps): what the table keeps, because it may change."""
        return (self.alpha, *beta_numbers(self.beta))

    def __repr__(self) -> str:
        rest = _options(
            self,
            eps=1e-6,
            rank_based=False,
            stratified=True,
            normalize="batch",
            mix=0.0,
            new_rows="live_max",
            newest=0,
            max_reads=None,
        )
        return f"Prioritized(alpha={self.alpha}, beta={self.beta}{rest and ', '}{rest})"


class Recent:
    """Uniform over the ``n`` newest rows that may start an example, with replacement.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Recent(100))
    """

    __slots__ = ("max_reads", "n", "newest")
    __setattr__ = set_once

    def __init__(self, n: int, *, newest: int = 0, max_reads: int | None = None) -> None:
        self.n = whole("Recent()", "n", n)
        self.newest = whole("Recent()", "newest", newest, 0)
        self.max_reads = _read_max_reads("Recent()", max_reads)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Recent", "n": self.n, "newest": self.newest, "max_reads": self.max_reads}

    def __repr__(self) -> str:
        rest = _options(self, newest=0, max_reads=None)
        return f"Recent({self.n}{rest and ', '}{rest})"


class Shuffle:
    """Every row once an epoch, in random order.

    An epoch is frozen when it begins: rows added later wait for the next one. A batch that needs more than an epoch has
    left takes that and goes on with the next.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Shuffle())
    """

    __slots__ = ("max_reads",)
    __setattr__ = set_once

    def __init__(self, *, max_reads: int | None = None, newest: int = 0) -> None:
        self.max_reads = _read_max_reads("Shuffle()", max_reads)
        _refuse_newest("Shuffle()", newest)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Shuffle", "max_reads": self.max_reads}

    def __repr__(self) -> str:
        return f"Shuffle({_options(self, max_reads=None)})"


class Fifo:
    """Oldest first: a queue. A row leaves after ``max_reads`` reads; None never lets it.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Fifo(), pace=sw.Pace.queue(1000))
    """

    __slots__ = ("max_reads",)
    __setattr__ = set_once

    def __init__(self, *, max_reads: int | None = 1, newest: int = 0) -> None:
        self.max_reads = _read_max_reads("Fifo()", max_reads)
        _refuse_newest("Fifo()", newest)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Fifo", "max_reads": self.max_reads}

    def __repr__(self) -> str:
        return f"Fifo({_options(self, max_reads=1)})"


class Lifo:
    """Newest first: a stack. A row leaves after ``max_reads`` reads; None never lets it.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Lifo())
    """

    __slots__ = ("max_reads",)
    __setattr__ = set_once

    def __init__(self, *, max_reads: int | None = 1, newest: int = 0) -> None:
        self.max_reads = _read_max_reads("Lifo()", max_reads)
        _refuse_newest("Lifo()", newest)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Lifo", "max_reads": self.max_reads}

    def __repr__(self) -> str:
        return f"Lifo({_options(self, max_reads=1)})"


Sampler = Uniform | Prioritized | Recent | Shuffle | Fifo | Lifo
KINDS: dict[str, type] = {kind.__name__: kind for kind in (Uniform, Prioritized, Recent, Shuffle, Fifo, Lifo)}


def sampler_from_plain(plain: dict[str, Any]) -> Sampler:
    options = {name: value for name, value in plain.items() if name != "kind"}
    if isinstance(options.get("beta"), list):
        options["beta"] = Linear(*options["beta"])
    sampler: Sampler = KINDS[plain["kind"]](**options)
    return sampler


def read_alpha(where: str, value: Any) -> float:
    return number(where, "alpha", value, 0, 1)


def read_beta(where: str, value: Any) -> float | Linear:
    if isinstance(value, Linear):
        for name, part in (("beta.start", value.start), ("beta.end", value.end)):
            number(where, name, part, 0, 1)
        return value
    return number(where, "beta", value, 0, 1)


def beta_numbers(beta: float | Linear) -> tuple[float, float, float]:
    if isinstance(beta, Linear):
        return beta.start, beta.end, float(beta.steps)
    return beta, beta, 0.0


def _read_max_reads(where: str, value: Any) -> int | None:
    return None if value is None else whole(where, "max_reads", value, 1, 2**32 - 1)


def _refuse_newest(where: str, newest: Any) -> None:
    if newest != 0:
        raise SchemaError(f"{where}: newest: it says itself which rows come when; expected 0, got {newest!r}")


def _options(sampler: Any, **defaults: Any) -> str:
    return ", ".join(
        f"{name}={getattr(sampler, name)!r}" for name, value in defaults.items() if getattr(sampler, name) != value
    )
