"""Views: what the rows drawn become. They are settings: plain data that a file can carry, but for hindsight's
functions, which a file names and whoever opens it gives again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from .checks import number, one_of, set_once, whole
from .errors import SchemaError
from .schema import Schema

__all__ = ["Hindsight", "Transitions", "View", "Windows"]

Array = np.ndarray[Any, Any]


class Transitions:
    """One row and what followed it are one example: what was seen, done and got, and what came next.

    With ``n_step`` > 1 the reward is the sum of up to n discounted rewards. It stops at the end of the episode and at
    the newest row, and ``batch["discount"]`` tells what remains: gamma ** steps. ``next_obs`` and ``done`` are those
    after the last step, so a target is ``reward + discount * (1 - done) * value(next_obs)``.

    Args:
        n_step: Most steps of an example.
        gamma: Discount of one step.
        hindsight: Gives examples the goals that were reached later; see ``Hindsight``.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), view=sw.Transitions(n_step=3, gamma=0.99))
    """

    __slots__ = ("gamma", "hindsight", "n_step")
    __setattr__ = set_once

    def __init__(self, n_step: int = 1, gamma: float = 0.99, hindsight: Hindsight | None = None) -> None:
        self.n_step = whole("Transitions()", "n_step", n_step, 1, 10_000)
        self.gamma = number("Transitions()", "gamma", gamma, 0, 1)
        if hindsight is not None and not isinstance(hindsight, Hindsight):
            raise SchemaError(f"Transitions(): hindsight: expected Hindsight() or None, got {hindsight!r}")
        self.hindsight = hindsight

    def to_plain(self) -> dict[str, Any]:
        hindsight = None if self.hindsight is None else self.hindsight.to_plain()
        return {"kind": "Transitions", "n_step": self.n_step, "gamma": self.gamma, "hindsight": hindsight}

    def __repr__(self) -> str:
        rest = "" if self.hindsight is None else f", hindsight={self.hindsight}"
        return f"Transitions(n_step={self.n_step}, gamma={self.gamma}{rest})"


class Windows:
    """Runs of rows, for recurrent agents and world models: arrays of shape (examples, places, ...).

    The row drawn is the first that is learnt from. Up to ``burn_in`` rows before it come first, to warm up a recurrent
    state; ``length`` rows are learnt from; ``bootstrap`` rows after them serve targets. A window begins with the oldest
    row that there is, so a recurrent state that was stored as a field is right at place 0; what is missing is missing
    at the end, where the last row is repeated. Batches carry ``"mask"`` (learn from this place), ``"valid"`` (this
    place is a row of the window) and ``"first"`` (an episode starts here).

    Args:
        length: Rows to learn from.
        burn_in: Most rows before them.
        stride: Only every so-manieth step of an episode is drawn.
        bootstrap: Most rows after them.
        end: ``"pad"`` lets any row start a window, and an episode's end cuts it short. ``"stop"`` draws windows that
            fit whole, and one from each finished episode that is too short. ``"cross"`` goes on into the next episode.
        start: ``"uniform"`` over all starts, or ``"episode"``: over episodes, then over the starts of one.
        priority_eta: Share of the largest error in a window's priority; the rest is the mean (R2D2).

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100_000, obs_shape=(4,), view=sw.Windows(40, burn_in=20, stride=20))
    """

    __slots__ = ("bootstrap", "burn_in", "end", "length", "priority_eta", "start", "stride")
    __setattr__ = set_once

    def __init__(
        self,
        length: int,
        *,
        burn_in: int = 0,
        stride: int = 1,
        bootstrap: int = 0,
        end: Literal["pad", "stop", "cross"] = "pad",
        start: Literal["uniform", "episode"] = "uniform",
        priority_eta: float = 0.9,
    ) -> None:
        where = "Windows()"
        self.length = whole(where, "length", length, 1, 1_000_000)
        self.burn_in = whole(where, "burn_in", burn_in, 0, 1_000_000)
        self.stride = whole(where, "stride", stride, 1, 1_000_000)
        self.bootstrap = whole(where, "bootstrap", bootstrap, 0, 1_000_000)
        self.end: str = one_of(where, "end", end, ("pad", "stop", "cross"))
        self.start: str = one_of(where, "start", start, ("uniform", "episode"))
        self.priority_eta = number(where, "priority_eta", priority_eta, 0, 1)

    @property
    def places(self) -> int:
        """Rows of a window, with those that may be missing."""
        return self.burn_in + self.length + self.bootstrap

    def mix(self, where: str, errors: Any, mask: Any) -> Array:
        """One priority a window: eta times the largest error that was learnt from, and the rest times their mean."""
        shape = tuple(np.shape(errors))
        if mask is None:
            raise SchemaError(
                f"{where}: got errors of shape {shape}; give mask=batch['mask'] with them, or one a window"
            )
        learnt = np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask)
        if learnt.shape != shape or learnt.dtype != bool:
            raise SchemaError(f"{where}: mask: expected bool of shape {shape}, got {learnt.dtype} of {learnt.shape}")
        counts = learnt.sum(axis=1)
        if not counts.all():
            raise SchemaError(f"{where}: mask: expected a True in every window, got none in window {counts.argmin()}")
        raw = errors.detach().cpu() if hasattr(errors, "detach") else errors
        sizes = np.where(learnt, np.abs(np.asarray(raw, np.float64)), 0.0)
        mixed: Array = self.priority_eta * sizes.max(axis=1) + (1 - self.priority_eta) * sizes.sum(axis=1) / counts
        return mixed

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Windows", **{name: getattr(self, name) for name in self.__slots__}}

    def __repr__(self) -> str:
        defaults = {"burn_in": 0, "stride": 1, "bootstrap": 0, "end": "pad", "start": "uniform", "priority_eta": 0.9}
        rest = "".join(
            f", {name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        )
        return f"Windows({self.length}{rest})"


class Hindsight:
    """Examples whose goal is replaced by one that the same episode reached: hindsight experience replay.

    Only finished episodes are drawn. Nothing is written back: the same row gets another goal next time.

    Args:
        strategy: Which step's outcome becomes the goal: ``"future"`` this one or any after it, ``"final"`` the last,
            ``"episode"`` any.
        ratio: Share of examples that get a new goal; 0.8 is four to one.
        reward: ``reward(achieved, desired)`` for arrays of goals, one row an example: what was achieved after the step,
            and the new goal.
        terminated: The same arguments, truth values out: where a goal that is reached ends the episode. None keeps
            ``done`` as it is stored.
        goal: Turns what was achieved into a goal, where the two differ.
        achieved, desired: Their names in the observation.

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

    def leaf(self, schema: Schema) -> int:
        """Which of the schema's leaves is what was achieved after a step; refuses a schema without goals."""
        by_name = dict(schema.leaves)
        for part in ("obs", "next_obs"):
            for name in (self.achieved, self.desired):
                if f"{part}/{name}" not in by_name:
                    there = ", ".join(name for name in by_name if name.startswith(part)) or f"no {part}"
                    raise SchemaError(
                        f"ReplayBuffer(): hindsight: expected field '{part}/{name}', got {there}; give obs as a dict "
                        "with the goals, and next_obs='stored' or 'derived'"
                    )
        achieved, desired = (by_name[f"obs/{name}"] for name in (self.achieved, self.desired))
        if achieved.ragged or desired.ragged:
            raise SchemaError("ReplayBuffer(): hindsight: goals have one shape; a ragged field has not")
        if self.goal is None and (achieved.shape, achieved.stack) != (desired.shape, desired.stack):
            raise SchemaError(
                f"ReplayBuffer(): hindsight: '{self.achieved}' is {achieved} and '{self.desired}' {desired}; give "
                "goal=, a function from the one to the other"
            )
        if by_name["reward"].shape != ():
            raise SchemaError(f"ReplayBuffer(): hindsight: reward: expected shape (), got {by_name['reward'].shape}")
        return [name for name, _ in schema.leaves].index(f"next_obs/{self.achieved}")

    def puts_as_is(self, schema: Schema) -> bool:
        """Whether what was achieved is the new goal byte for byte: then the engine puts it in its place."""
        by_name = dict(schema.leaves)
        dtypes = {by_name[f"obs/{name}"].dtype for name in (self.achieved, self.desired)}
        return self.goal is None and len(dtypes) == 1

    def relabel(
        self,
        batch: dict[str, Any],
        n_step: int,
        gamma: float,
        goals: Array,
        after: Array | None,
        steps: Array | None,
        placed: bool,
    ) -> None:
        """Puts new goals into a batch, and what follows from them: rewards, ends, discounts.

        Args:
            goals: What was achieved at the step chosen for each example.
            placed: Whether they stand in the batch already.
            after: What was achieved after each of an example's steps, of which there are ``steps``; n_step > 1 only.
        """
        rows = np.flatnonzero(batch["relabelled"])
        if len(rows) == 0:
            return
        desired = goals[rows]
        if self.goal is not None:
            desired = np.asarray(self.goal(desired))
        for part in () if placed else ("obs", "next_obs"):
            place = batch[part][self.desired]
            if desired.shape != (len(rows), *place.shape[1:]):
                raise SchemaError(
                    f"sample(): hindsight: goal(): expected shape {(len(rows), *place.shape[1:])}, got {desired.shape}"
                )
            place[rows] = desired
        if after is None or steps is None:
            achieved = batch["next_obs"][self.achieved][rows]
            batch["reward"][rows] = self._call("reward", achieved, desired)
            if self.terminated is not None:
                batch["done"][rows] = self._call("terminated", achieved, desired)
            return
        counts = steps[rows]
        taken = np.arange(n_step) < counts[:, None]
        each = after[rows][taken], np.repeat(desired, counts, axis=0)
        rewards = np.zeros(taken.shape)
        rewards[taken] = self._call("reward", *each)
        if self.terminated is not None:
            ends = np.zeros(taken.shape, bool)
            ends[taken] = self._call("terminated", *each)
            done = ends.any(axis=1)
            counts = np.where(done, ends.argmax(axis=1) + 1, counts)  # nothing counts after the first one
            rewards[np.arange(n_step) >= counts[:, None]] = 0
            batch["done"][rows] = done
            batch["discount"][rows] = gamma**counts
        batch["reward"][rows] = rewards @ gamma ** np.arange(n_step)

    def _call(self, name: str, achieved: Array, desired: Array) -> Array:
        result = getattr(self, name)(achieved, desired)
        values = np.asarray(result.detach().cpu() if hasattr(result, "detach") else result)
        if values.shape != (len(achieved),) or values.dtype.kind not in "biuf":
            raise SchemaError(
                f"sample(): hindsight: {name}(): expected one number an example, shape {(len(achieved),)}, got "
                f"{values.dtype} of shape {values.shape}"
            )
        return values

    def to_plain(self) -> dict[str, Any]:
        functions = {name: _name_of(getattr(self, name)) for name in ("reward", "terminated", "goal")}
        plain = {"strategy": self.strategy, "ratio": self.ratio, "achieved": self.achieved, "desired": self.desired}
        return {**plain, **functions}

    def __repr__(self) -> str:
        return f"Hindsight({self.strategy!r}, {self.ratio}, {_name_of(self.reward)})"


View = Transitions | Windows


def view_from_plain(plain: dict[str, Any], given: View | None = None) -> View:
    """The view that a file tells of. One with functions in it must be given again, and be the same but for them."""
    if given is not None:
        if given.to_plain() != plain:
            raise SchemaError(f"open(): view: expected the one that the buffer was made with, {plain}, got {given!r}")
        return given
    options = {name: value for name, value in plain.items() if name != "kind"}
    if plain["kind"] == "Windows":
        return Windows(**options)
    if plain["kind"] != "Transitions":
        raise ValueError(plain["kind"])
    if options.get("hindsight") is not None:
        raise SchemaError(
            f"open(): the buffer's view has functions in it ({options['hindsight']['reward']}): give view= again"
        )
    return Transitions(**options)


def _name_of(function: Any) -> str | None:
    if function is None:
        return None
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
