"""Turns a schema, a sampler, a view and a pace into the engine's settings. See core/batches/batch_maker.h."""

from __future__ import annotations

import numpy as np

from ._core import (
    BatchSettings,
    Exponents,
    GoalSettings,
    GoalStrategy,
    IndexSettings,
    IndexSetup,
    NewRows,
    Normalize,
    Order,
    PaceSettings,
    StartNeeds,
    StartRule,
    WindowSettings,
)
from .errors import SchemaError
from .pace import Pace
from .sampling import Fifo, Lifo, Prioritized, Recent, Sampler, Shuffle, Uniform, exponents
from .schema import Schema
from .views import Hindsight, View, Windows

__all__ = ["achieved_leaf", "check_agents", "check_together", "copies_goals", "engine_settings", "index_setup"]

_ORDERS = {
    Uniform: Order.weighted,
    Prioritized: Order.weighted,
    Recent: Order.recent,
    Shuffle: Order.shuffle,
    Fifo: Order.fifo,
    Lifo: Order.lifo,
}


def check_together(where: str, sampler: Sampler, view: View) -> None:
    """Refuses pairs of sampler and view that contradict each other."""
    if isinstance(view, Windows) and view.start == "per_episode" and not isinstance(sampler, Uniform):
        raise SchemaError(
            f"{where}: Windows(start='per_episode') says how likely each start is, and so does "
            f"{type(sampler).__name__}; give sampler=Uniform(), or start='uniform'"
        )


def check_agents(where: str, schema: Schema, n_step: int) -> None:
    """Refuses n-step sums that have no meaning where each agent has its own done."""
    if not schema.by_agent or n_step == 1:
        return
    if not schema.agents:
        raise SchemaError(
            f"{where}: n_step={n_step}: each agent has its own done, so its sum ends by itself: expected a reward for "
            f"each agent, got reward {schema.fields.get('reward')} and done {schema.fields['done']}; give both the "
            "same names, and reward a shape that begins with that of done"
        )
    for done, _ in schema.agents:
        name, field = schema.leaves[done]
        if field.dtype.kind not in "biu" and field.dtype not in (np.float32, np.float64):
            raise SchemaError(f"{where}: field {name!r}: n_step > 1 reads it: expected bool, got {field.dtype}")


def engine_settings(schema: Schema, sampler: Sampler, view: View, pace: Pace | None) -> BatchSettings:
    settings = BatchSettings()
    settings.newest = getattr(sampler, "newest", 0)
    settings.index = _index(sampler, view)
    settings.pace = None if pace is None else PaceSettings(*map(float, pace.numbers.values()))
    settings.n_step, settings.gamma = view.n_step, view.gamma
    if view.n_step > 1:
        settings.agents = schema.agents
    if isinstance(view, Windows):
        settings.windows = WindowSettings(view.length, view.burn_in, view.bootstrap, view.end == "cross")
        return settings
    if view.hindsight is not None:
        names = [name for name, _ in schema.leaves]
        hindsight = view.hindsight
        parts = ("obs", "next_obs") if copies_goals(schema, hindsight) else ()
        desired = [names.index(f"{part}/{hindsight.desired}") for part in parts]
        strategy = GoalStrategy[hindsight.strategy]
        settings.goals = GoalSettings(strategy, hindsight.ratio, achieved_leaf(schema, hindsight), desired)
    return settings


def index_setup(sampler: Sampler, view: View) -> IndexSetup | None:
    """What a table stores for its index; None where it has none."""
    index = _index(sampler, view)
    if index is None:
        return None
    by_priority = isinstance(sampler, Prioritized)
    return IndexSetup(by_priority, Exponents(*exponents(sampler)), not index.starts.is_any, index.max_reads > 1)


def achieved_leaf(schema: Schema, hindsight: Hindsight) -> int:
    """The number of the leaf with the goal achieved after a step; refuses a schema without goals."""
    by_name = dict(schema.leaves)
    for part in ("obs", "next_obs"):
        for name in (hindsight.achieved, hindsight.desired):
            if f"{part}/{name}" not in by_name:
                there = ", ".join(name for name in by_name if name.startswith(part)) or f"no {part}"
                raise SchemaError(
                    f"ReplayBuffer(): hindsight: expected field '{part}/{name}', got {there}; give obs as a dict "
                    "with the goals, and next_obs='stored' or 'derived'"
                )
    achieved, desired = (by_name[f"obs/{name}"] for name in (hindsight.achieved, hindsight.desired))
    if achieved.ragged or desired.ragged:
        raise SchemaError("ReplayBuffer(): hindsight: expected goals of a fixed shape, got a ragged field")
    if hindsight.goal is None and (achieved.shape, achieved.stack) != (desired.shape, desired.stack):
        raise SchemaError(
            f"ReplayBuffer(): hindsight: '{hindsight.achieved}' is {achieved} and '{hindsight.desired}' {desired}; "
            "give goal=, a function from the one to the other"
        )
    if "reward" not in by_name or by_name["reward"].shape != () or schema.by_agent:
        what = "done" if schema.by_agent else "reward"
        raise SchemaError(
            f"ReplayBuffer(): hindsight: {what}: expected Field(()), one number for each row, got {schema.fields[what]}"
        )
    return [name for name, _ in schema.leaves].index(f"next_obs/{hindsight.achieved}")


def copies_goals(schema: Schema, hindsight: Hindsight) -> bool:
    """Whether an achieved goal is a desired goal without conversion: then the engine writes it into the batch."""
    by_name = dict(schema.leaves)
    dtypes = {by_name[f"obs/{name}"].dtype for name in (hindsight.achieved, hindsight.desired)}
    return hindsight.goal is None and len(dtypes) == 1


def _starts(view: View) -> StartRule:
    starts = StartRule()
    if isinstance(view, Windows):
        starts.needs = StartNeeds.nothing if view.end == "pad" else StartNeeds.rows
        starts.length = view.length
        starts.stride = view.stride
        starts.across = view.end == "cross"
        starts.first_rows = view.start == "episode"
        starts.per_episode = view.start == "per_episode"
    elif view.hindsight is not None:
        starts.needs = StartNeeds.end
    return starts


def _index(sampler: Sampler, view: View) -> IndexSettings | None:
    starts = _starts(view)
    if isinstance(sampler, Uniform) and sampler.max_reads is None and starts.is_any:
        return None
    index = IndexSettings()
    index.starts = starts
    index.order = next(order for kind, order in _ORDERS.items() if isinstance(sampler, kind))
    index.recent = getattr(sampler, "n", 0)
    index.max_reads = sampler.max_reads or 0
    if isinstance(sampler, Prioritized):
        index.eps = sampler.eps
        index.rank_based = sampler.rank_based
        index.stratified = sampler.stratified
        index.normalize = Normalize[sampler.normalize]
        index.mix = sampler.mix
        is_constant = isinstance(sampler.new_rows, float)
        index.new_rows = NewRows.constant if is_constant else NewRows[str(sampler.new_rows)]
        index.new_priority = float(sampler.new_rows) if is_constant else 1.0
        return index
    index.eps = 0.0
    index.stratified = False
    index.normalize = Normalize.none
    index.new_rows = NewRows.constant
    index.new_priority = 0.0 if isinstance(sampler, Shuffle) else 1.0  # rows get their mass when an epoch begins
    return index
