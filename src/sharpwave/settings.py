"""What the engine is built with: a sampler, a view and a pace as plain numbers. See core/batches/batch_maker.h."""

from __future__ import annotations

from typing import Any

from .errors import SchemaError
from .pace import Pace
from .sampling import Fifo, Lifo, Prioritized, Recent, Sampler, Shuffle, Uniform
from .schema import Schema
from .views import View, Windows

__all__ = ["check_together", "engine_settings", "index_columns"]

_NOTHING, _ROWS, _END = range(3)  # StartRule::Needs of core/sampling/starts.h
_ORDERS = {Uniform: 0, Prioritized: 0, Recent: 1, Shuffle: 2, Fifo: 3, Lifo: 4}  # Order of core/sampling/row_index.h
_CONSTANT = 2  # NewRows


def check_together(where: str, sampler: Sampler, view: View) -> None:
    """Refuses the pairs that have no meaning."""
    if isinstance(view, Windows) and view.start == "episode" and not isinstance(sampler, Uniform):
        raise SchemaError(
            f"{where}: Windows(start='episode') says how likely each start is, and so does {type(sampler).__name__}; "
            "give sampler=Uniform(), or start='uniform'"
        )


def engine_settings(schema: Schema, sampler: Sampler, view: View, pace: Pace | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "n_step": 1,
        "gamma": 1.0,
        "newest": getattr(sampler, "newest", 0),
        "index": _index(sampler, view),
        "windows": None,
        "goals": None,
        "pace": None if pace is None else tuple(map(float, pace.numbers())),
    }
    if isinstance(view, Windows):
        settings["windows"] = view.length, view.burn_in, view.bootstrap, view.end == "cross"
        return settings
    settings |= {"n_step": view.n_step, "gamma": view.gamma}
    if view.hindsight is not None:
        strategy = ("future", "final", "episode").index(view.hindsight.strategy)
        names = [name for name, _ in schema.leaves]
        hindsight = view.hindsight
        parts = ("obs", "next_obs") if hindsight.puts_as_is(schema) else ()
        desired = [names.index(f"{part}/{hindsight.desired}") for part in parts]
        settings["goals"] = strategy, hindsight.ratio, hindsight.leaf(schema), desired
    return settings


def index_columns(sampler: Sampler, view: View) -> tuple[bool, float, float, float, float, bool, bool] | None:
    """What a table keeps for the index: None for none."""
    index = _index(sampler, view)
    if index is None:
        return None
    by_priority = isinstance(sampler, Prioritized)
    numbers = sampler.numbers() if isinstance(sampler, Prioritized) else (1.0, 0.0, 0.0, 0.0)
    counts_steps = index["needs"] != _NOTHING or index["stride"] != 1 or index["per_episode"]
    return (by_priority, *numbers, counts_steps, index["max_reads"] > 1)


def _index(sampler: Sampler, view: View) -> dict[str, Any] | None:
    starts = {"needs": _NOTHING, "length": 1, "stride": 1, "across": False, "per_episode": False}
    if isinstance(view, Windows):
        starts |= {
            "needs": _NOTHING if view.end == "pad" else _ROWS,
            "length": view.length,
            "stride": view.stride,
            "across": view.end == "cross",
            "per_episode": view.start == "episode",
        }
    elif view.hindsight is not None:
        starts["needs"] = _END
    any_row = starts["needs"] == _NOTHING and starts["stride"] == 1 and not starts["per_episode"]
    if isinstance(sampler, Uniform) and sampler.max_reads is None and any_row:
        return None
    index = {
        "eps": 0.0,
        "rank_based": False,
        "stratified": False,
        "normalize": 2,
        "mix": 0.0,
        "new_rows": _CONSTANT,
        "new_priority": 0.0 if isinstance(sampler, Shuffle) else 1.0,  # an epoch gives its rows mass when it begins
        "order": _ORDERS[type(sampler)],
        "recent": getattr(sampler, "n", 0),
        "max_reads": sampler.max_reads or 0,
        **starts,
    }
    if isinstance(sampler, Prioritized):
        index |= {
            "eps": sampler.eps,
            "rank_based": sampler.rank_based,
            "stratified": sampler.stratified,
            "normalize": ("batch", "buffer", "none").index(sampler.normalize),
            "mix": sampler.mix,
            "new_rows": {"live_max": 0, "running_max": 1}.get(str(sampler.new_rows), _CONSTANT),
            "new_priority": sampler.new_rows if isinstance(sampler.new_rows, float) else 1.0,
        }
    return index
