"""Samplers: which rows are drawn, and in what order. They are plain settings, so a file can store them."""

from __future__ import annotations

import math
from typing import Any, Literal

from .checks import number, one_of, set_once, truth, whole
from .errors import SchemaError

__all__ = ["Fifo", "Lifo", "Linear", "Prioritized", "Recent", "Sampler", "Shuffle", "Uniform"]


class Linear:
    """A number that goes from ``start`` to ``end`` in equal steps over ``steps`` calls of ``sample``, then stays there.

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
        newest: This many examples at the start of a batch are the newest rows, newest first (combined experience
            replay).
        max_reads: A row is no longer drawn after this many draws; None for no limit.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), sampler=sw.Uniform(newest=1))
    """

    __slots__ = ("max_reads", "newest")
    __setattr__ = set_once

    def __init__(self, *, newest: int = 0, max_reads: int | None = None) -> None:
        self.newest = whole("Uniform()", "newest", newest, 0)
        self.max_reads = _read_max_reads("Uniform()", max_reads)

    def __repr__(self) -> str:
        return f"Uniform({_options(self, newest=0, max_reads=None)})"


class Prioritized:
    """Rows with larger priorities are drawn more often; batches carry the importance weights that correct for this.

    A row is drawn with probability P = (priority + eps) ** alpha, divided by the sum of that over all rows. Its weight
    is (rows * P) ** -beta. Draws are with replacement. ``update_priorities`` gives rows new priorities.

    Args:
        alpha: 0 draws uniformly, 1 in proportion to priorities. ``buf.tune(alpha=...)`` changes it for all rows.
        beta: How much of the bias the weights correct; 1 corrects all of it. A number or a ``Linear``.
        eps: Added to every priority, so that a row with priority 0 can still be drawn.
        rank_based: P is proportional to (1 / rank) ** alpha instead; the largest priority has rank 1. Outliers matter
            less. The ranks are sorted again when a sixteenth of the rows has changed; until then newer rows count as
            rank 1.
        stratified: One draw from each of n equal parts of the total priority. False: n independent draws.
        normalize: ``"batch"`` divides weights by the largest of the batch, ``"buffer"`` by the largest weight that any
            row of the buffer could have, ``"none"`` not at all.
        mix: Share of draws that are uniform over all rows and ignore priorities.
        new_rows: Priority of rows added without ``priority=``: ``"live_max"`` the largest in the buffer,
            ``"running_max"`` the largest ever seen (at least 1), or a number.
        newest: This many examples at the start of a batch are the newest rows, with weight 1 (combined experience
            replay).
        max_reads: A row is no longer drawn after this many draws; None for no limit.

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

    def __repr__(self) -> str:
        rest = _options(self, newest=0, max_reads=None)
        return f"Recent({self.n}{rest and ', '}{rest})"


class Shuffle:
    """Every row once per epoch, in random order.

    The rows of an epoch are fixed when it begins; rows added later belong to the next epoch. A batch that is larger
    than the rest of an epoch is filled up from the next one.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Shuffle())
    """

    __slots__ = ("max_reads",)
    __setattr__ = set_once

    def __init__(self, *, max_reads: int | None = None, newest: int = 0) -> None:
        self.max_reads = _read_max_reads("Shuffle()", max_reads)
        _refuse_newest("Shuffle()", newest)

    def __repr__(self) -> str:
        return f"Shuffle({_options(self, max_reads=None)})"


class Fifo:
    """Oldest first: a queue. A row is no longer drawn after ``max_reads`` draws; None for no limit.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Fifo(), pace=sw.Pace.queue(1000))
    """

    __slots__ = ("max_reads",)
    __setattr__ = set_once

    def __init__(self, *, max_reads: int | None = 1, newest: int = 0) -> None:
        self.max_reads = _read_max_reads("Fifo()", max_reads)
        _refuse_newest("Fifo()", newest)

    def __repr__(self) -> str:
        return f"Fifo({_options(self, max_reads=1)})"


class Lifo:
    """Newest first: a stack. A row is no longer drawn after ``max_reads`` draws; None for no limit.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Lifo())
    """

    __slots__ = ("max_reads",)
    __setattr__ = set_once

    def __init__(self, *, max_reads: int | None = 1, newest: int = 0) -> None:
        self.max_reads = _read_max_reads("Lifo()", max_reads)
        _refuse_newest("Lifo()", newest)

    def __repr__(self) -> str:
        return f"Lifo({_options(self, max_reads=1)})"


Sampler = Uniform | Prioritized | Recent | Shuffle | Fifo | Lifo
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Uniform, Prioritized, Recent, Shuffle, Fifo, Lifo)}


def sampler_to_plain(sampler: Sampler) -> dict[str, Any]:
    """A sampler as JSON can store it."""
    kind, cls = next((name, cls) for name, cls in KINDS.items() if isinstance(sampler, cls))
    plain = {"kind": kind} | {name: getattr(sampler, name) for name in cls.__slots__}
    if isinstance(plain.get("beta"), Linear):
        plain["beta"] = [plain["beta"].start, plain["beta"].end, plain["beta"].steps]
    return plain


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


def exponents(sampler: Sampler) -> tuple[float, float, float, float]:
    """Alpha, and beta as (start, end, steps). The table stores them, because ``tune`` may change them."""
    if not isinstance(sampler, Prioritized):
        return 1.0, 0.0, 0.0, 0.0
    return (sampler.alpha, *beta_numbers(sampler.beta))


def beta_numbers(beta: float | Linear) -> tuple[float, float, float]:
    if isinstance(beta, Linear):
        return beta.start, beta.end, float(beta.steps)
    return beta, beta, 0.0


def _read_max_reads(where: str, value: Any) -> int | None:
    return None if value is None else whole(where, "max_reads", value, 1, 2**32 - 1)


def _refuse_newest(where: str, newest: Any) -> None:
    if newest != 0:
        raise SchemaError(f"{where}: newest: the order of draws is fixed; expected 0, got {newest!r}")


def _options(sampler: Any, **defaults: Any) -> str:
    return ", ".join(
        f"{name}={getattr(sampler, name)!r}" for name, value in defaults.items() if getattr(sampler, name) != value
    )
