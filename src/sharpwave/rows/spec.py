"""What a table of rows is made from: its fields, how rows are drawn, what a batch is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .. import _core
from ..errors import SchemaError, StorageError
from ..pace import Pace, check_pace
from ..sampling import KINDS, Fifo, Lifo, Prioritized, Sampler, Shuffle, Uniform, sampler_from_plain, sampler_to_plain
from ..schema import Field, Schema
from ..settings import achieved_leaf, check_agents, check_together
from ..views import Hindsight, Transitions, View, Windows, view_from_plain, view_to_plain

__all__ = ["RowSpec"]


@dataclass(frozen=True)
class RowSpec:
    """The same for rows on the host and on a device.

    Args:
        face: Name of the class that wrote the rows; a file is opened by the same one.
        schema: Fields of a row.
        capacity: Rows kept.
        num_envs: Environments that step together, or None.
        writers: How many writers may be open at once.
        seed: Of the draws.
        sampler, view, pace: As of ``ReplayBuffer``.
    """

    face: str
    schema: Schema
    capacity: int
    num_envs: int | None
    writers: int
    seed: int
    sampler: Sampler
    view: View
    pace: Pace | None

    def check(self, where: str) -> None:
        """Refuses what has no meaning on any device."""
        if not isinstance(self.sampler, tuple(KINDS.values())):
            kinds = ", ".join(f"{kind}()" for kind in KINDS)
            raise SchemaError(f"{where}: sampler: expected {kinds}, got {self.sampler!r}")
        if not isinstance(self.view, (Transitions, Windows)):
            raise SchemaError(f"{where}: view: expected Transitions() or Windows(), got {self.view!r}")
        check_together(where, self.sampler, self.view)
        if self.pace is not None and not isinstance(self.pace, Pace):
            raise SchemaError(f"{where}: pace: expected Pace() or None, got {self.pace!r}")
        if self.pace is not None:
            check_pace(where, self.pace, self.capacity)
        check_agents(where, self.schema, self.n_step)
        if self.hindsight is not None:
            achieved_leaf(self.schema, self.hindsight)

    @property
    def n_step(self) -> int:
        return self.view.n_step

    @property
    def least_batch(self) -> int:
        """``newest=`` rows are in every batch."""
        return max(1, getattr(self.sampler, "newest", 0))

    def check_batch(self, where: str, batch_size: int) -> None:
        """As the engine does, where a batch is asked for before it is drawn."""
        if isinstance(self.sampler, (Fifo, Lifo, Shuffle)) and batch_size > self.capacity:
            raise SchemaError(
                f"{where}: batch_size: expected at most capacity={self.capacity}, got {batch_size}: each row is given "
                "once"
            )

    @property
    def hindsight(self) -> Hindsight | None:
        return self.view.hindsight if isinstance(self.view, Transitions) else None

    @property
    def order_reason(self) -> str | None:
        """Why it matters which row follows which; None where it does not."""
        if self.schema.derives_next:
            return "next_obs='derived'"
        if self.schema.needs_order:
            return "stack"
        if isinstance(self.view, Windows):
            return "a window"
        if self.n_step > 1:
            return "n_step"
        return None if self.hindsight is None else "hindsight"

    @property
    def splits_discounts(self) -> bool:
        """Whether the discounts of agents by name are parts of one array."""
        return self.n_step > 1 and self.schema.by_agent and not isinstance(self.schema.fields["done"], Field)

    @property
    def is_prioritized(self) -> bool:
        return isinstance(self.sampler, Prioritized)

    @property
    def settles(self) -> bool:
        """Whether it matters what became of a batch: the pace counts it, or its rows are given once."""
        return self.pace is not None or not isinstance(self.sampler, Uniform) or self.sampler.max_reads is not None

    def batch_tree(self, *, weights: bool, relabelled: bool) -> _core.Tree:
        """The arrays of a batch. The two may be there for the sake of other buffers in the same batch."""
        windows = self.view if isinstance(self.view, Windows) else None
        return self.schema.tree(
            n_step=self.n_step,
            weights=weights,
            relabelled=relabelled,
            truncated=self.view.truncated,
            place_indices=windows is not None and windows.place_indices,
            window=windows.places if windows else 0,
        )

    def to_json(self) -> str:
        """What a file says about its rows besides what the engine knows."""
        return json.dumps(
            {
                "face": self.face,
                "schema": self.schema.to_plain(),
                "num_envs": self.num_envs,
                "sampler": sampler_to_plain(self.sampler),
                "view": view_to_plain(self.view),
                "pace": None if self.pace is None else list(self.pace.numbers.values()),
            }
        )

    @classmethod
    def of_table(cls, table: _core.Table, face: str, view: View | None) -> RowSpec:
        """Read from a table.

        Args:
            table: Any that was written by this package.
            face: The class that opens it.
            view: The functions of its view, which a file cannot hold.
        """
        stats = table.stats()
        spec = cls.of_description(
            table.description, face, view, table.capacity, stats["max_writers"], stats["seed"], table.width
        )
        if [field.name for field in spec.schema.engine_fields()] != table.field_names:
            raise damaged(face)  # the names are in the fields' records too
        return spec

    @classmethod
    def of_description(
        cls, description: str, face: str, view: View | None, capacity: int, writers: int, seed: int, width: int
    ) -> RowSpec:
        """Read from the JSON that ``to_json`` wrote, and the engine's numbers."""
        try:
            plain: dict[str, Any] = json.loads(description)
            spec = cls(
                face=face,
                schema=Schema.from_plain(plain["schema"]),
                capacity=capacity,
                num_envs=plain["num_envs"],
                writers=writers,
                seed=seed,
                sampler=sampler_from_plain(plain["sampler"]),
                view=view_from_plain(plain["view"], view),
                pace=None if plain["pace"] is None else Pace(*plain["pace"]),
            )
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise damaged(face) from None
        if plain.get("face") != face or (spec.num_envs or 1) != width:
            raise StorageError(f"open(): the table was not written by a {face} of the Python package")
        return spec


def damaged(face: str) -> StorageError:
    return StorageError(f"open(): the description is damaged, or not of a {face}")
