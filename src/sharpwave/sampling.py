"""Samplers pick row numbers, views shape them into batches. Both are settings: plain data that a file can carry."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, Literal

from .errors import SchemaError

__all__ = ["Linear", "Prioritized", "Transitions", "Uniform"]


class Linear:
    """A number that goes from ``start`` to ``end`` over ``steps`` calls of ``sample``, and stays there.

    Example:
        >>> import sharpwave as sw
        >>> sw.Prioritized(beta=sw.Linear(0.4, 1.0, 100_000))
        Prioritized(alpha=0.6, beta=Linear(0.4, 1.0, 100000))
    """

    __slots__ = ("end", "start", "steps")

    def __init__(self, start: float, end: float, steps: int) -> None:
        self.start = _number("Linear()", "start", start, -math.inf, math.inf)
        self.end = _number("Linear()", "end", end, -math.inf, math.inf)
        self.steps = _whole("Linear()", "steps", steps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Linear) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Linear({self.start}, {self.end}, {self.steps})"


class Uniform:
    """Every row is equally likely; draws are with replacement.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), sampler=sw.Uniform())
    """

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Uniform"}

    def __repr__(self) -> str:
        return "Uniform()"


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

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), sampler=sw.Prioritized(alpha=0.6, beta=0.4))
    """

    __slots__ = ("alpha", "beta", "eps", "mix", "new_rows", "normalize", "rank_based", "stratified")

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
    ) -> None:
        where = "Prioritized()"
        self.alpha = _number(where, "alpha", alpha, 0, 1)
        self.beta = read_beta(where, beta)
        self.eps = _number(where, "eps", eps, 0, 1e30)
        self.mix = _number(where, "mix", mix, 0, 1)
        self.rank_based = _truth(where, "rank_based", rank_based)
        self.stratified = _truth(where, "stratified", stratified)
        if normalize not in ("batch", "buffer", "none"):
            raise SchemaError(f"{where}: normalize: expected 'batch', 'buffer' or 'none', got {normalize!r}")
        self.normalize = normalize
        if isinstance(new_rows, str):
            if new_rows not in ("live_max", "running_max"):
                raise SchemaError(
                    f"{where}: new_rows: expected 'live_max', 'running_max' or a number, got {new_rows!r}"
                )
            self.new_rows: str | float = new_rows
        else:
            self.new_rows = _number(where, "new_rows", new_rows, 0, 1e30)

    def to_plain(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__slots__}
        if isinstance(self.beta, Linear):
            plain["beta"] = [self.beta.start, self.beta.end, self.beta.steps]
        return {"kind": "Prioritized", **plain}

    def numbers(self) -> tuple[float, float, float, float]:
        """Alpha, and beta as (start, end, steps): what the table keeps, because it may change."""
        return (self.alpha, *beta_numbers(self.beta))

    def __repr__(self) -> str:
        defaults = {"eps": 1e-6, "rank_based": False, "stratified": True, "normalize": "batch", "mix": 0.0}
        defaults["new_rows"] = "live_max"
        rest = "".join(
            f", {name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        )
        return f"Prioritized(alpha={self.alpha}, beta={self.beta}{rest})"


class Transitions:
    """One row and what followed it are one example: what was seen, done and got, and what came next.

    With ``n_step`` > 1 the reward is the sum of up to n discounted rewards. It stops at the end of the episode and at
    the newest row, and ``batch["discount"]`` tells what remains: gamma ** steps. ``next_obs`` and ``done`` are those
    after the last step, so a target is ``reward + discount * (1 - done) * value(next_obs)``.

    Args:
        n_step: Most steps of an example.
        gamma: Discount of one step.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), view=sw.Transitions(n_step=3, gamma=0.99))
    """

    __slots__ = ("gamma", "n_step")

    def __init__(self, n_step: int = 1, gamma: float = 0.99) -> None:
        self.n_step = _whole("Transitions()", "n_step", n_step)
        if self.n_step > 10_000:
            raise SchemaError(f"Transitions(): n_step: expected 1 to 10000, got {n_step!r}")
        self.gamma = _number("Transitions()", "gamma", gamma, 0, 1)

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Transitions", "n_step": self.n_step, "gamma": self.gamma}

    def __repr__(self) -> str:
        return f"Transitions(n_step={self.n_step}, gamma={self.gamma})"


def sampler_from_plain(plain: dict[str, Any]) -> Uniform | Prioritized:
    if plain["kind"] == "Uniform":
        return Uniform()
    if plain["kind"] != "Prioritized":
        raise ValueError(plain["kind"])
    options = {name: plain[name] for name in Prioritized.__slots__}
    if isinstance(options["beta"], list):
        options["beta"] = Linear(*options["beta"])
    return Prioritized(**options)


def view_from_plain(plain: dict[str, Any]) -> Transitions:
    if plain["kind"] != "Transitions":
        raise ValueError(plain["kind"])
    return Transitions(plain.get("n_step", 1), plain.get("gamma", 0.99))


def read_alpha(where: str, value: Any) -> float:
    return _number(where, "alpha", value, 0, 1)


def read_beta(where: str, value: Any) -> float | Linear:
    if isinstance(value, Linear):
        for name, part in (("beta.start", value.start), ("beta.end", value.end)):
            _number(where, name, part, 0, 1)
        return value
    return _number(where, "beta", value, 0, 1)


def beta_numbers(beta: float | Linear) -> tuple[float, float, float]:
    if isinstance(beta, Linear):
        return beta.start, beta.end, float(beta.steps)
    return beta, beta, 0.0


def _number(where: str, name: str, value: Any, least: float, most: float) -> float:
    good = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most:
        bounds = "a finite number" if math.isinf(least) else f"a number, {least:g} to {most:g}"
        raise SchemaError(f"{where}: {name}: expected {bounds}, got {value!r}")
    return float(value)


def _whole(where: str, name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number < 2**53:
        raise SchemaError(f"{where}: {name}: expected a whole number, at least 1, got {value!r}")
    return number


def _truth(where: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SchemaError(f"{where}: {name}: expected True or False, got {value!r}")
    return value
