"""`Rules`: what a controller decides by."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import number, one_of, truth, whole

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """How much may be started, how old it may be, and what becomes of items that fail.

    Args:
        batch: Items of one training step. An item's group of answers is one sample.
        max_staleness: Most versions between the weights that made a token and those that train on it. 0 is synchronous
            training.
        stale: "mask" trains on the rest of a sample that has tokens which are too old (key `fresh`), and throws it away
            where all of them are; "drop" throws it away for one of them. An item whose sample is thrown away is made
            again.
        epochs: How often each item is trained; None for ever.
        seed: Of the order of items and of all answers.
        shuffle: Whether epochs have random orders.
        skip_no_signal: Whether a group whose rewards are all equal is left out; another item takes its place.
        max_losses: How often the work on an item may be lost, to dead agents or to staleness, before it is rejected.
        max_running: Most items that agents work on at once; None for no other bound than that of staleness.
        owner_timeout_s: An owner that was not heard for so long is lost; None leaves it to the launcher to say so.
        watchdog_s: Waiting calls raise after so long without any progress; None for never.

    Raises:
        SchemaError: A value makes no sense; the message names the key.
    """

    batch: int
    max_staleness: int = 4
    stale: str = "mask"
    epochs: int | None = None
    seed: int = 0
    shuffle: bool = True
    skip_no_signal: bool = True
    max_losses: int = 10
    max_running: int | None = None
    owner_timeout_s: float | None = None
    watchdog_s: float | None = None

    def __post_init__(self) -> None:
        where = "Rules()"
        whole(where, "batch", self.batch)
        whole(where, "max_staleness", self.max_staleness, 0)
        whole(where, "max_losses", self.max_losses, 0)
        whole(where, "seed", self.seed, 0)
        one_of(where, "stale", self.stale, ("mask", "drop"))
        truth(where, "shuffle", self.shuffle)
        truth(where, "skip_no_signal", self.skip_no_signal)
        for name in ("epochs", "max_running"):
            if getattr(self, name) is not None:
                whole(where, name, getattr(self, name))
        for name in ("owner_timeout_s", "watchdog_s"):
            if getattr(self, name) is not None:
                number(where, name, getattr(self, name), 1e-3, 1e9)

    @property
    def limit(self) -> int:
        """Most items that are started and not trained."""
        return (self.max_staleness + 1) * self.batch

    @property
    def is_dropping(self) -> bool:
        return self.stale == "drop"
