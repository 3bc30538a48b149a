"""Who waits for whom in a run, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["State", "explain"]


@dataclass(frozen=True)
class State:
    """What a controller knows of one instant. Items are `running` at agents, then `held` in the buffer."""

    limit: int  # items that may be started and not trained
    batch: int
    running: int
    longest_s: float  # since the oldest running item began
    slowest: str  # its owner
    owners: int  # agent workers that run items or wait for permits
    starters: int  # calls that wait for a permit
    held: int
    ready: int  # for the learner
    leased: int  # by the learner
    learner_s: float  # since the learner took its batch
    takers: int  # calls that wait for a batch
    max_running: int | None
    has_next: bool
    why_over: str | None  # a sentence; None where the run goes on
    lacking: str  # of the samples that are held and not ready: the buffer's words


def explain(state: State) -> str:
    if state.why_over is not None:
        return f"The run is over. {state.why_over}"
    if state.leased:
        who = "The learner trains"
        since = f" on {_count(state.leased, 'item')}, since {state.learner_s:.1f} s"
        return f"{who}{since}; {_agents(state)}."
    if state.takers:
        return f"The learner waits for {_missing(state)}."
    return f"No learner asks for a batch ({state.ready} of {state.batch} items are ready); {_agents(state)}."


def _missing(state: State) -> str:
    """Why there is no batch."""
    short = state.batch - state.ready
    if state.held - state.ready >= short:
        return f"{_count(short, 'item')} that other consumers are to complete: {state.lacking}"
    what = f"{_count(short, 'more item')} ({state.ready} of {state.batch} are ready)"
    if state.running:
        oldest = f"the oldest since {state.longest_s:.1f} s at {state.slowest!r}"
        return f"{what}, and {_running(state)}, {oldest}"
    if not state.owners:
        return f"{what}, but no agent worker is there; start one"
    return f"{what}, and {_agents(state)}"


def _agents(state: State) -> str:
    used = state.running + state.held
    if not state.owners:
        return "no agent worker is there"
    if not state.starters:
        return _running(state)
    waiting = f"{_count(state.starters, 'call')} of agent workers {'waits' if state.starters == 1 else 'wait'}"
    if used >= state.limit:
        return (
            f"{waiting} for the learner: {used} items are started and not trained, the most that "
            f"max_staleness allows ({state.running} run, {state.held} are in the buffer)"
        )
    if state.max_running is not None and state.running >= state.max_running:
        return f"{waiting} for other agents: max_running={state.max_running} items run"
    if not state.has_next:
        return f"{waiting}, because all items are started; those of dead agents would come again"
    return f"{waiting} for their turn"


def _running(state: State) -> str:
    verb = "runs" if state.running == 1 else "run"
    return f"{_count(state.running, 'item')} {verb} at {_count(state.owners, 'agent worker')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
