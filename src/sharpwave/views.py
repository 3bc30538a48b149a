"""Views: what a batch is made of. They are plain settings, so a file can store them, except the functions of
``Hindsight``: a file stores their names, and ``open(view=)`` gives the functions again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .checks import number, one_of, set_once, truth, whole
from .errors import SchemaError

__all__ = ["Hindsight", "Transitions", "View", "Windows"]

Array = np.ndarray[Any, Any]


class Transitions:
    """Examples are transitions: observation, action, reward, next observation, done.

    With ``n_step`` > 1 the reward is the sum of up to n discounted rewards. The sum stops at the end of the episode and
    at the newest row; ``batch["discount"]`` is gamma ** (number of rewards summed). ``next_obs`` and ``done`` are those
    after the last step, so a target is ``reward + discount * (1 - done) * value(next_obs)``.

    Args:
        n_step: Largest number of steps in an example.
        gamma: Discount per step.
        hindsight: Replaces goals by goals that were reached later; see ``Hindsight``.
        truncated: Adds ``"truncated"`` to batches: True where the episode was truncated after the last step of the
            example, by ``add(truncated=True)``, or because its writer was closed or died.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), view=sw.Transitions(n_step=3, gamma=0.99))
    """

    __slots__ = ("gamma", "hindsight", "n_step", "truncated")
    __setattr__ = set_once

    def __init__(
        self,
        n_step: int = 1,
        gamma: float = 0.99,
        hindsight: Hindsight | None = None,
        *,
        truncated: bool = False,
    ) -> None:
        self.n_step = whole("Transitions()", "n_step", n_step, 1, 10_000)
        self.gamma = number("Transitions()", "gamma", gamma, 0, 1)
        if hindsight is not None and not isinstance(hindsight, Hindsight):
            raise SchemaError(f"Transitions(): hindsight: expected Hindsight() or None, got {hindsight!r}")
        self.hindsight = hindsight
        self.truncated = truth("Transitions()", "truncated", truncated)

    def __repr__(self) -> str:
        rest = "" if self.hindsight is None else f", hindsight={self.hindsight}"
        rest += ", truncated=True" if self.truncated else ""
        return f"Transitions(n_step={self.n_step}, gamma={self.gamma}{rest})"


class Windows:
    """Consecutive rows, for recurrent agents and world models: arrays of shape (examples, places, ...).

    A window has up to ``burn_in`` rows to warm up a recurrent state, then ``length`` rows to learn from, then up to
    ``bootstrap`` rows for targets. The sampler draws the first row to learn from. The oldest row of a window is at
    place 0, so a recurrent state that was stored as a field belongs to place 0. Where a window has fewer rows than
    places, its last row is repeated at the end. Batches carry ``"mask"`` (learn from this place), ``"valid"`` (this
    place is a row of the window) and ``"first"`` (an episode starts here).

    With ``n_step`` > 1 every place has the n-step example of its row, as ``Transitions(n_step, gamma)`` would make it,
    and ``batch["discount"]`` has one number for each place. The sums may include rows behind the end of the window.

    Args:
        length: Rows to learn from.
        burn_in: Largest number of rows before them.
        stride: Windows start only at steps of an episode that are multiples of ``stride``.
        bootstrap: Largest number of rows after them.
        end: ``"pad"``: any row may start a window, and windows end with their episode. ``"stop"``: only windows that
            fit into their episode, and one from each finished episode that is too short. ``"cross"``: windows continue
            into the next episode.
        start: ``"uniform"``: windows start at all steps, which are equally likely. ``"episode"``: windows start only
            at the first row of an episode. ``"per_episode"``: all episodes are equally likely, then all starts of the
            episode.
        priority_eta: A window's priority is ``priority_eta`` times the largest error plus the rest times the mean
            error (R2D2).
        n_step: Largest number of steps in the example of a place.
        gamma: Discount per step, where ``n_step`` is above 1.
        truncated: Adds ``"truncated"`` to batches, one truth value for each place; see ``Transitions``.
        place_indices: Adds ``"place_indices"`` to batches: the serial of the row at each place, -1 where ``"valid"``
            is False.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100_000, obs_shape=(4,), view=sw.Windows(40, burn_in=20, stride=20))
    """

    __slots__ = (
        "bootstrap",
        "burn_in",
        "end",
        "gamma",
        "length",
        "n_step",
        "place_indices",
        "priority_eta",
        "start",
        "stride",
        "truncated",
    )
    __setattr__ = set_once

    def __init__(
        self,
        length: int,
        *,
        burn_in: int = 0,
        stride: int = 1,
        bootstrap: int = 0,
        end: Literal["pad", "stop", "cross"] = "pad",
        start: Literal["uniform", "episode", "per_episode"] = "uniform",
        priority_eta: float = 0.9,
        n_step: int = 1,
        gamma: float = 0.99,
        truncated: bool = False,
        place_indices: bool = False,
    ) -> None:
        where = "Windows()"
        self.length = whole(where, "length", length, 1, 1_000_000)
        self.burn_in = whole(where, "burn_in", burn_in, 0, 1_000_000)
        self.stride = whole(where, "stride", stride, 1, 1_000_000)
        self.bootstrap = whole(where, "bootstrap", bootstrap, 0, 1_000_000)
        self.end: str = one_of(where, "end", end, ("pad", "stop", "cross"))
        self.start: str = one_of(where, "start", start, ("uniform", "episode", "per_episode"))
        if start == "episode" and stride > 1:
            raise SchemaError(
                f"{where}: stride: expected 1 with start='episode', whose windows start at step 0 only, got {stride}; "
                "leave it out"
            )
        self.priority_eta = number(where, "priority_eta", priority_eta, 0, 1)
        self.n_step = whole(where, "n_step", n_step, 1, 10_000)
        self.gamma = number(where, "gamma", gamma, 0, 1)
        self.truncated = truth(where, "truncated", truncated)
        self.place_indices = truth(where, "place_indices", place_indices)

    @property
    def places(self) -> int:
        """``burn_in + length + bootstrap``: size of the second axis of batches."""
        return self.burn_in + self.length + self.bootstrap

    def __repr__(self) -> str:
        defaults = {"burn_in": 0, "stride": 1, "bootstrap": 0, "end": "pad", "start": "uniform", "priority_eta": 0.9}
        defaults |= {"n_step": 1, "gamma": 0.99, "truncated": False, "place_indices": False}
        rest = "".join(
            f", {name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        )
        return f"Windows({self.length}{rest})"


class Hindsight:
    """Hindsight experience replay: replaces the goal of an example by a goal that the same episode reached.

    Only finished episodes are drawn. Stored rows do not change: the next draw of a row may get another goal.

    Args:
        strategy: The step whose achieved goal becomes the new goal: ``"future"`` this step or a later one, ``"final"``
            the last step of the episode, ``"episode"`` any step of it.
        ratio: Share of examples that get a new goal; 0.8 is four relabelled examples to one original.
        reward: ``reward(achieved, desired)`` returns one reward per example. Both arguments are arrays with one row per
            example: the goal achieved after the step, and the new goal.
        terminated: ``terminated(achieved, desired)`` returns one bool per example: whether the episode ends there. None
            keeps the stored ``done``.
        goal: Converts achieved goals to desired goals, where the two differ.
        achieved, desired: Names of the two goals in the observation.

    Example:
        >>> import sharpwave as sw
        >>> def reward(achieved, desired):
        ...     return -(abs(achieved - desired).max(axis=-1) > 0.05).astype("float32")
        >>> view = sw.Transitions(hindsight=sw.Hindsight("future", 0.8, reward))
    """

    __slots__ = ("achieved", "desired", "goal", "ratio", "reward", "strategy", "terminated")
    __setattr__ = set_once

    def __init__(
        self,
        strategy: Literal["future", "final", "episode"] = "future",
        ratio: float = 0.8,
        reward: Callable[[Array, Array], Any] | None = None,
        *,
        terminated: Callable[[Array, Array], Any] | None = None,
        goal: Callable[[Array], Any] | None = None,
        achieved: str = "achieved_goal",
        desired: str = "desired_goal",
    ) -> None:
        where = "Hindsight()"
        self.strategy: str = one_of(where, "strategy", strategy, ("future", "final", "episode"))
        self.ratio = number(where, "ratio", ratio, 0, 1)
        if not callable(reward):
            raise SchemaError(f"{where}: reward: expected a function of (achieved, desired), got {reward!r}")
        for name, function in (("terminated", terminated), ("goal", goal)):
            if function is not None and not callable(function):
                raise SchemaError(f"{where}: {name}: expected a function or None, got {function!r}")
        for name, value in (("achieved", achieved), ("desired", desired)):
            if not isinstance(value, str):
                raise SchemaError(f"{where}: {name}: expected a name in the observation, got {value!r}")
        self.reward, self.terminated, self.goal = reward, terminated, goal
        self.achieved, self.desired = achieved, desired

    def __repr__(self) -> str:
        return f"Hindsight({self.strategy!r}, {self.ratio}, {_name_of(self.reward)})"


View = Transitions | Windows


def view_to_plain(view: View) -> dict[str, Any]:
    """A view as JSON can store it: functions by name."""
    if isinstance(view, Windows):
        return {"kind": "Windows", **{name: getattr(view, name) for name in Windows.__slots__}}
    hindsight = view.hindsight
    plain = {"kind": "Transitions", "n_step": view.n_step, "gamma": view.gamma, "truncated": view.truncated}
    if hindsight is None:
        return {**plain, "hindsight": None}
    names = {name: getattr(hindsight, name) for name in ("strategy", "ratio", "achieved", "desired")}
    functions = {name: _name_of(getattr(hindsight, name)) for name in ("reward", "terminated", "goal")}
    return {**plain, "hindsight": {**names, **functions}}


def view_from_plain(plain: dict[str, Any], given: View | None = None) -> View:
    """The view that a file stores. A view with functions must be given, and must have the same names and numbers."""
    if given is not None:
        if view_to_plain(given) != plain:
            raise SchemaError(f"open(): view: expected the view of the buffer, {plain}, got {given!r}")
        return given
    options = {name: value for name, value in plain.items() if name != "kind"}
    if plain["kind"] == "Windows":
        return Windows(**options)
    if plain["kind"] != "Transitions":
        raise ValueError(plain["kind"])
    if options.get("hindsight") is not None:
        raise SchemaError(
            f"open(): the view of the buffer has functions ({options['hindsight']['reward']}), which a file cannot "
            "store; give view="
        )
    return Transitions(**options)


def _name_of(function: Any) -> str | None:
    if function is None:
        return None
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
