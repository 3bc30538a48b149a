"""RolloutBuffer: the steps of one policy in, minibatches with advantages and returns out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import _core, returns
from ..checks import check_settable, number, one_of, random_seed, truth, whole
from ..errors import BufferFull, ClosedError, NotReady, SchemaError, StorageError
from ..files.save_path import save_path
from ..rows.columns import Columns, Place, Torch, place_of, read_names, read_node
from ..rows.pieces import Pieces
from ..rows.rollout_file import COMPUTED, RolloutState, read_rollout, write_rollout
from ..schema import Field

__all__ = ["RolloutBuffer"]

# The names of fields in add(), and in batches.
_BATCH_NAMES = {
    "observations": "observations",
    "privileged_observations": "privileged_observations",
    "actions": "actions",
    "log_probs": "old_log_probs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
}
_FOR_GAE = ("rewards", "values", "dones", "truncated", "final_values", "mask", "advantages", "returns")
_NUMBERS = ("rewards", "values", "log_probs", "advantages", "returns")
_STEP = (
    "observations",
    "privileged_observations",
    "actions",
    "rewards",
    "dones",
    "values",
    "log_probs",
    "truncated",
    "final_values",
    "hidden_states",
)  # the arguments of add()
_OTHERS = {"rewards", "dones", "truncated", "final_values", "mask", "hidden_states"}
# Attributes that close() removes. A verb that reads one of them is then a ClosedError, and add() needs no test of its
# own for it.
_STATE = ("_columns", "_was_over", "_step", "_has_returns", "_changes")


class RolloutBuffer:
    """The last steps of all environments, on the device of the policy.

    Memory is allocated once and reused for every rollout. On a GPU no call waits for the device, except ``save`` and
    ``recurrent_minibatches``, which reads once where episodes ended.

    The arrays are attributes, (num_steps, num_envs, ...), by the names of ``add``, and ``advantages`` and ``returns``.
    Assigning to one (``roll.advantages = normalised``) copies the values into it; later batches have them.

    Args:
        num_envs: Environments that step together.
        num_steps: Steps of a rollout.
        obs_shape: Of one observation: a shape (float32), a ``Field``, or a dict of them.
        device: None keeps NumPy arrays; any device of torch keeps tensors there.
        privileged_obs_shape: Of one observation that only the critic gets: a shape, a ``Field`` or a dict of them.
        action_shape, action_dtype: Of one action; without them the first ``add`` decides.
        hidden_states: Of recurrent networks, by name: shapes or ``Field``s of one environment's state before a step.
        extras: Further fields by name (such as the policy's mean and deviation): ``add`` takes them by that name, and
            batches have them.
        autoreset: What a vector environment does after an episode ends. ``"same_step"``: the same step returns the
            first observation of the next episode, and ``final_values`` are the values of the last observation before
            it. ``"next_step"`` (Gymnasium's default): the step after an end only resets. That row is not a step of the
            policy: it gets no advantage, batches have a ``mask`` that is False there, and the value behind a truncated
            end is the value of that row.
        seed: Of the permutations; None takes one from the system (``stats()["seed"]`` tells it).

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> roll = sw.RolloutBuffer(num_envs=2, num_steps=3, obs_shape=(4,), seed=0)
        >>> for step in range(3):
        ...     roll.add(observations=np.ones((2, 4)), actions=np.zeros(2, int), rewards=np.ones(2), dones=np.zeros(2),
        ...              values=np.zeros(2), log_probs=np.zeros(2))
        >>> roll.compute_returns_and_advantages(last_values=np.zeros(2), gamma=1.0, gae_lambda=1.0)
        >>> roll.returns[:, 0].tolist()
        [3.0, 2.0, 1.0]
        >>> [batch["observations"].shape for batch in roll.minibatches(num_minibatches=2)]
        [(3, 4), (3, 4)]
    """

    _flag_dtype = "bool"  # of dones and truncated, as they are stored
    _privileged_argument = "privileged_obs_shape="  # that declares them; compat.apexrl has another

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        *,
        obs_shape: Any,
        device: Any = None,
        privileged_obs_shape: Any = None,
        action_shape: Any = None,
        action_dtype: Any = None,
        hidden_states: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        autoreset: Literal["same_step", "next_step"] = "same_step",
        seed: int | None = None,
    ) -> None:
        where = "RolloutBuffer()"
        num_envs, num_steps = whole(where, "num_envs", num_envs), whole(where, "num_steps", num_steps)
        autoreset = one_of(where, "autoreset", autoreset, ("same_step", "next_step"))
        seed = random_seed() if seed is None else whole(where, "seed", seed, 0, 2**63 - 1)
        nodes = {"observations": read_node(where, "obs_shape", obs_shape)}
        if privileged_obs_shape is not None:
            nodes["privileged_observations"] = read_node(where, "privileged_obs_shape", privileged_obs_shape)
        if action_dtype is not None and action_shape is None:
            raise SchemaError(
                f"{where}: action_dtype: needs action_shape= as well; without both, the first add decides"
            )
        if action_shape is not None:
            dtype = "float32" if action_dtype is None else action_dtype
            nodes["actions"] = read_node(where, "action_shape", action_shape, dtype)
        extras = read_names(where, "extras", extras)
        for name, node in extras.items():
            if name in {*_BATCH_NAMES, *_BATCH_NAMES.values(), *_OTHERS}:
                raise SchemaError(f"{where}: extras: the name {name!r} is taken; give another")
            nodes[name] = read_node(where, f"extras[{name!r}]", node)
        if hidden_states is not None:
            hidden_states = read_names(where, "hidden_states", hidden_states)
            nodes["hidden_states"] = read_node(where, "hidden_states", hidden_states)
        self._set_up(num_envs, num_steps, autoreset, seed, list(extras), place_of(where, device, seed))
        for name, node in nodes.items():
            self._columns.declare(name, node)
        for name in _NUMBERS:
            self._columns.declare(name, Field())
        self._columns.declare("dones", Field((), self._flag_dtype))
        if autoreset == "next_step":
            self._columns.declare("mask", Field((), "bool"))
            self._was_over = self._place.zeros((num_envs,), np.dtype(bool))

    def _set_up(
        self, num_envs: int, num_steps: int, autoreset: str, seed: int, extras: list[str], place: Place
    ) -> None:
        self._num_envs, self._num_steps, self._autoreset = num_envs, num_steps, autoreset
        self._seed, self._extras, self._place = seed, extras, place
        self._columns = Columns(place, (num_steps, num_envs))
        self._step = 0
        self._has_returns = False
        self._changes = 0  # an iteration over minibatches compares it
        self._rollouts = self._steps_before = 0  # finished rollouts, and their steps

    # ---- writing ----------------------------------------------------------------------------------------------

    def add(
        self,
        observations: Any,
        privileged_observations: Any = None,
        actions: Any = None,
        rewards: Any = None,
        dones: Any = None,
        values: Any = None,
        log_probs: Any = None,
        truncated: Any = None,
        final_values: Any = None,
        *,
        hidden_states: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> None:
        """Adds one step of every environment.

        Args:
            observations: The policy's observations, (num_envs, ...).
            privileged_observations: The critic's further observations; required if declared.
            actions: The policy's actions. The first add decides their shape and dtype if the constructor did not.
            rewards, values, log_probs: One number for each environment. ``values`` are of ``observations``.
            dones: Whether the step ended an episode, for any reason; bool, or numbers where 0 means no. On the CPU, NaN
                and numbers that a field's dtype cannot hold are refused. On a GPU checking them would wait for the
                device: there NaN counts as yes.
            truncated: Which of those ends were truncations (time limits) and not terminations. If an environment
                reports both for a step, pass ``truncated & ~terminated``.
            final_values: Values of the last observations of truncated episodes; used only where ``truncated``.
            hidden_states: Of recurrent networks, before the step; required if declared.
            **extras: The further fields; required if declared.

        Raises:
            BufferFull: The rollout is complete; use it, then ``clear()``.
            SchemaError: Something is missing or does not fit. Nothing was written.
        """
        columns, step = self._columns, self._step
        if columns.writer is not None and step < self._num_steps and len(extras) == len(self._extras):  # the usual step
            step_values = (
                observations,
                privileged_observations,
                actions,
                rewards,
                dones,
                values,
                log_probs,
                truncated,
                final_values,
                hidden_states,
                *map(extras.get, self._extras),
            )
            if columns.put_at_once(step, step_values):
                self._end_step()
                return
        where = "add()"
        if self._step == self._num_steps:
            raise BufferFull(
                f"{where}: the rollout is full: {self.num_steps} of {self.num_steps} steps; use it, then clear()"
            )
        given = {
            "observations": observations,
            "privileged_observations": privileged_observations,
            "actions": actions,
            "rewards": rewards,
            "dones": dones,
            "values": values,
            "log_probs": log_probs,
            "hidden_states": hidden_states,
            **extras,
        }
        given = {name: value for name, value in given.items() if value is not None}
        self._check_names(where, given)
        if (truncated is None) != (final_values is None) and self._autoreset == "same_step":
            there, missing = ("truncated", "final_values") if final_values is None else ("final_values", "truncated")
            raise SchemaError(
                f"{where}: {there}: needs {missing}= as well; without both, every end counts as a termination"
            )
        if final_values is not None and self.autoreset == "next_step":
            raise SchemaError(
                f"{where}: final_values: with autoreset='next_step' the value of the next row is used, which has that "
                "observation; leave them out"
            )
        given |= {"truncated": truncated} if truncated is not None else {}
        given |= {"final_values": final_values} if final_values is not None else {}
        new = [name for name in ("actions", "truncated", "final_values") if name in given]
        new = [name for name in new if name not in self._columns.nodes]
        try:
            for name in new:
                self._columns.declare(name, self._infer(where, name, given[name]))
            lead = (self._num_envs,)
            checked = [part for name, value in given.items() for part in self._columns.check(where, name, value, lead)]
        except BaseException:
            for name in new:
                self._columns.forget(name)
            raise
        for name in ("truncated", "final_values"):
            if name in self._columns.nodes and name not in given:
                self._columns.arrays[name][self._step] = 0  # the row still holds a value of the last rollout
        self._columns.put(self._step, checked)
        if self._columns.writer is None:
            # The next steps will mostly bring the same fields.
            self._columns.use_writer([name if name in given else None for name in (*_STEP, *self._extras)])
        self._end_step()

    def _end_step(self) -> None:
        if self._autoreset == "next_step":
            self._columns.arrays["mask"][self._step] = ~self._was_over
            self._was_over[:] = self._over(self._step)
        state = self.__dict__  # without __setattr__: three calls of it take 5 % of an add
        state["_step"] += 1
        state["_has_returns"] = False
        state["_changes"] += 1

    def _check_names(self, where: str, given: dict[str, Any]) -> None:
        required = ["observations", "actions", "rewards", "dones", "values", "log_probs", *self._extras]
        required += [name for name in ("privileged_observations", "hidden_states") if name in self._columns.nodes]
        missing = [name for name in required if name not in given]
        if missing:
            raise SchemaError(f"{where}: missing {', '.join(missing)}")
        unknown = [name for name in given if name not in required]
        if unknown:
            argument = {"privileged_observations": self._privileged_argument, "hidden_states": "hidden_states="}
            mends = argument.get(unknown[0], "extras=")
            raise SchemaError(f"{where}: {unknown[0]}: the buffer has no such field; declare it with {mends}")

    def _infer(self, where: str, name: str, value: Any) -> Field:
        """The field of a value that no argument of the constructor declared."""
        if name != "actions":
            return Field((), self._flag_dtype if name == "truncated" else "float32")
        array = self._place.read(f"{where}: {name}", value)
        if not array.shape or array.shape[0] != self.num_envs:
            raise SchemaError(f"{where}: {name}: expected shape ({self.num_envs}, ...), got {tuple(array.shape)}")
        return Field(tuple(array.shape[1:]), self._place.dtype_of(array))

    def _over(self, at: Any) -> Any:
        """Which steps ended an episode."""
        over = self._columns.arrays["dones"][at] != 0
        return over | (self._columns.arrays["truncated"][at] != 0) if "truncated" in self._columns.nodes else over

    def clear(self, *, reset: bool = False) -> None:
        """Begins the next rollout. The memory is kept.

        Args:
            reset: Whether you have reset the environments: then the first row of the next rollout is a step of the
                policy, even if the last step ended an episode. Only ``autoreset="next_step"`` uses it.
        """
        truth("clear()", "reset", reset)
        self._changes += 1
        self._rollouts += self._step > 0
        self._steps_before += self._step
        self._step = 0
        self._has_returns = False
        if reset and self.autoreset == "next_step":
            self._was_over[:] = False

    def compute_returns_and_advantages(
        self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95, *, partial: bool = False
    ) -> None:
        """Computes ``advantages`` and ``returns`` by generalized advantage estimation.

        Args:
            last_values: Values of the observations after the last step, one for each environment. Ignored where that
                step ended an episode.
            gamma: Discount.
            gae_lambda: How many steps an advantage covers: 0 is one step, 1 is all of them; 0.9 to 0.97 are usual.
            partial: Whether a rollout with fewer than ``num_steps`` steps is accepted.

        Raises:
            NotReady: Steps are missing.
        """
        where = "compute_returns_and_advantages()"
        gamma = number(where, "gamma", gamma, 0, 1)
        gae_lambda = number(where, "gae_lambda", gae_lambda, 0, 1)
        self._check_complete(where, partial)
        last = self._columns.place.read(f"{where}: last_values", last_values)
        if tuple(last.shape) not in ((self.num_envs,), (self.num_envs, 1)):
            raise SchemaError(f"{where}: last_values: expected shape ({self.num_envs},), got {tuple(last.shape)}")
        arrays: list[Any] = [self._columns.arrays.get(name) for name in _FOR_GAE]
        if self._step < self.num_steps:
            arrays = [None if array is None else array[: self._step] for array in arrays]
        rewards, values, dones, truncated, final_values, mask, advantages, to_returns = arrays
        if isinstance(self._place, Torch):
            self._place.narrow(f"{where}: last_values", last, np.dtype(np.float32))  # checks numbers on the CPU only
            if last.dim() != 1 or last.dtype is not values.dtype or not last.is_contiguous():
                last = last.reshape(self.num_envs).to(values.dtype).contiguous()
            kernels = returns.torch_kernels(where, self.device)
        else:
            last = self._place.narrow(f"{where}: last_values", last, np.dtype(np.float32))
            last = np.ascontiguousarray(last.reshape(self.num_envs), np.float32)
            kernels = _core
        flags = truncated, final_values, mask
        kernels.gae(rewards, values, dones, last, *flags, gamma, gae_lambda, advantages, to_returns)
        self._has_returns = True
        self._changes += 1

    def _check_complete(self, where: str, partial: bool) -> None:
        if self._step == 0 or (self._step < self.num_steps and not truth(where, "partial", partial)):
            or_else = ", or pass partial=True to use those" if self._step else ""
            raise NotReady(f"{where}: the rollout has {self._step} of {self.num_steps} steps; add the others{or_else}")

    # ---- reading ----------------------------------------------------------------------------------------------

    def all(self, *, normalize_advantages: bool = False) -> dict[str, Any]:
        """The whole rollout as one batch; step t of environment n is row t * num_envs + n.

        The arrays are not copies: the next rollout overwrites them.

        Args:
            normalize_advantages: Whether the batch has advantages of mean 0 and deviation 1 over all rows whose
                ``mask`` is True. Those are a copy; the stored advantages do not change.

        Returns:
            observations, actions, old_log_probs, advantages, returns, values; privileged_observations and the extras if
            they were declared; and ``mask`` with ``autoreset="next_step"``.

        Raises:
            NotReady: ``compute_returns_and_advantages`` was not called since the last ``add``.
        """
        self._check_returns("all()")
        return self._whole(truth("all()", "normalize_advantages", normalize_advantages))

    def _whole(self, normalize_advantages: bool) -> dict[str, Any]:
        batch = {key: self._rows(name) for name, key in self._names().items()}
        if normalize_advantages:
            batch["advantages"] = self._place.normalize(batch["advantages"], batch.get("mask"))
        return batch

    def minibatches(
        self,
        num_minibatches: int,
        epochs: int = 1,
        *,
        drop_remainder: bool = False,
        normalize_advantages: Literal["rollout", "minibatch"] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Batches of rows in random order. Each row comes once in an epoch, in a new order each epoch.

        Args:
            num_minibatches: Batches of an epoch.
            epochs: Passes over the rollout.
            drop_remainder: Leaves out some rows, others each epoch, so that all batches have the same size. Otherwise
                the first batches have one row more.
            normalize_advantages: To mean 0 and deviation 1 over the ``"rollout"`` or over each ``"minibatch"``.
        """
        where = "minibatches()"
        count, epochs = whole(where, "num_minibatches", num_minibatches), whole(where, "epochs", epochs)
        over = self._read_normalization(where, normalize_advantages)
        truth(where, "drop_remainder", drop_remainder)
        self._check_returns(where)
        rows = self._step * self.num_envs
        if count > rows:
            raise SchemaError(f"{where}: num_minibatches: expected at most the {rows} rows, got {count}")
        return self._minibatches(self._changes, rows, count, epochs, drop_remainder, over)

    def _minibatches(
        self, changes: int, rows: int, count: int, epochs: int, drop: bool, over: str | None
    ) -> Iterator[dict[str, Any]]:
        self._check_unchanged("minibatches()", changes)
        flat = self._whole(over == "rollout")
        place = self._place
        sizes = [rows // count + (not drop and i < rows % count) for i in range(count)]
        for _ in range(epochs):
            order, start = place.permutation(rows), 0
            for size in sizes:
                self._check_unchanged("minibatches()", changes)
                index = order[start : start + size]
                start += size
                batch = {key: _nested(value, lambda array: place.take(array, index)) for key, value in flat.items()}  # noqa: B023 - used at once
                if over == "minibatch":
                    batch["advantages"] = place.normalize(batch["advantages"], batch.get("mask"))
                yield batch

    def recurrent_minibatches(
        self,
        num_minibatches: int,
        epochs: int = 1,
        *,
        normalize_advantages: Literal["rollout", "minibatch"] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Batches of sequences for recurrent networks. Each environment comes once in an epoch.

        The steps of an environment are cut where episodes ended. A batch has the pieces side by side,
        (length, pieces, ...), padded with zeros; ``mask`` is True for steps and False for padding. ``hidden_states``
        are those stored with the first step of each piece, (pieces, ...).

        Args:
            num_minibatches: Batches of an epoch. Environments are divided evenly; the first batches may have one more.
            epochs: Passes over the rollout.
            normalize_advantages: As in ``minibatches``.
        """
        where = "recurrent_minibatches()"
        count, epochs = whole(where, "num_minibatches", num_minibatches), whole(where, "epochs", epochs)
        over = self._read_normalization(where, normalize_advantages)
        self._check_returns(where)
        if count > self.num_envs:
            raise SchemaError(f"{where}: num_minibatches: expected at most the {self.num_envs} envs, got {count}")
        return self._recurrent_minibatches(self._changes, count, epochs, over)

    def _recurrent_minibatches(
        self, changes: int, count: int, epochs: int, over: str | None
    ) -> Iterator[dict[str, Any]]:
        place = self._place
        self._check_unchanged("recurrent_minibatches()", changes)
        flat = self._whole(over == "rollout")
        flat.pop("mask", None)
        hidden = self._rows("hidden_states") if "hidden_states" in self._columns.nodes else None
        # One read of the device: the pieces are computed on the host.
        needed = [self._over(slice(self._step))]
        needed += [self._columns.arrays["mask"][: self._step]] if "mask" in self._columns.nodes else []
        pieces = Pieces(*place.to_host(*needed))
        for _ in range(epochs):
            for envs in np.array_split(place.host_permutation(self.num_envs), count):
                self._check_unchanged("recurrent_minibatches()", changes)
                cut = pieces.of(envs)
                if not len(cut.rows):
                    continue  # these environments have no step of the policy
                rows, at, starts = (place.index(part) for part in (cut.rows, cut.places, cut.starts))
                shape = cut.length, len(cut.starts)

                def lay(array: Any) -> Any:
                    laid = place.zeros((shape[0] * shape[1], *array.shape[1:]), place.dtype_of(array))  # noqa: B023
                    laid[at] = place.take(array, rows)  # noqa: B023
                    return laid.reshape(*shape, *array.shape[1:])  # noqa: B023

                batch = {key: _nested(value, lay) for key, value in flat.items()}
                mask = place.zeros((shape[0] * shape[1],), np.dtype(bool))
                mask[at] = True
                batch["mask"] = mask.reshape(shape)
                if over == "minibatch":
                    normal = place.normalize(batch["advantages"], batch["mask"])
                    batch["advantages"] = place.where(batch["mask"], normal)
                if hidden is not None:
                    batch["hidden_states"] = _nested(hidden, lambda array: place.take(array, starts))  # noqa: B023
                yield batch

    def _names(self) -> dict[str, str]:
        """Fields of a batch: stored name to name in the batch."""
        names = {name: key for name, key in _BATCH_NAMES.items() if name in self._columns.nodes}
        names |= {name: name for name in self._extras}
        return names | ({"mask": "mask"} if "mask" in self._columns.nodes else {})

    def _rows(self, name: str) -> Any:
        """A field as rows, (steps * num_envs, ...): the same memory."""
        return self._columns.tree(name, lambda array: array[: self._step].reshape(-1, *array.shape[2:]))

    def _check_returns(self, where: str) -> None:
        if not self._has_returns:
            raise NotReady(f"{where}: advantages are not computed yet; call compute_returns_and_advantages() first")

    def _check_unchanged(self, where: str, changes: int) -> None:
        if changes != self._changes:
            raise NotReady(f"{where}: the rollout has changed since the iteration began; call {where} again")

    def _read_normalization(self, where: str, over: Any) -> str | None:
        return None if over is None else one_of(where, "normalize_advantages", over, ("rollout", "minibatch"))

    # ---- facts ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows of the rollout so far: steps times environments."""
        return self._step * self._num_envs

    @property
    def capacity(self) -> int:
        """Rows of a full rollout: ``num_steps * num_envs``."""
        return self._num_steps * self._num_envs

    @property
    def num_envs(self) -> int:
        """Environments that step together."""
        return self._num_envs

    @property
    def num_steps(self) -> int:
        """Steps of a rollout."""
        return self._num_steps

    @property
    def autoreset(self) -> str:
        """What the vector environment does after an episode ends."""
        return self._autoreset

    @property
    def device(self) -> Any:
        """Where the arrays are; None for NumPy arrays."""
        return self._place.device if isinstance(self._place, Torch) else None

    @property
    def step(self) -> int:
        """Steps of the rollout so far."""
        return self._step

    @property
    def is_full(self) -> bool:
        return self._step == self.num_steps

    def stats(self) -> dict[str, Any]:
        """Counts and sizes as plain numbers, for a logger.

        ``rollouts``: how many were finished: cleared with steps in them, or full now. ``rows_added``: rows of all
        rollouts, finished or not.
        """
        return {
            "size": len(self),
            "capacity": self.capacity,
            "rows_added": (self._steps_before + self._step) * self._num_envs,
            "rollouts": self._rollouts + self.is_full,
            "num_envs": self._num_envs,
            "num_steps": self._num_steps,
            "step": self._step,
            "device": "numpy" if self.device is None else str(self.device),
            "storage_bytes": sum(array.nbytes for array in self._columns.arrays.values()),
            "seed": self._seed,
        }

    def __getattr__(self, name: str) -> Any:
        # The stored arrays, (num_steps, num_envs, ...), by the names of add().
        state = self.__dict__
        if "_fields" in state and name in (*_STATE, *state["_fields"]):
            raise ClosedError("the buffer is closed")
        columns = state.get("_columns")
        if columns is None or name not in columns.nodes:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return columns.tree(name, lambda array: array)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] == "_":
            return object.__setattr__(self, name, value)
        # roll.advantages = normalised: copied into the array that batches read. The array stays the same object.
        state = self.__dict__
        if name in state.get("_fields", ()):
            raise ClosedError("the buffer is closed")
        columns = state.get("_columns")
        if columns is not None and name in columns.nodes:
            checked = columns.check(f"{type(self).__name__}.{name}", name, value, columns.lead)
            columns.place.copy([columns.arrays[path] for path, _ in checked], [array for _, array in checked])
            self._changes += 1
            return
        check_settable(self, name)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        where = "in memory" if self.device is None else f"on {self.device}"
        if self._is_closed:
            return f"<RolloutBuffer {where}: closed>"
        fields = ", ".join(name for name in self._columns.nodes if name not in COMPUTED)
        state = f"{self._step} of {self._num_steps} steps x {self._num_envs} environments"
        return f"<RolloutBuffer {where}: {state}, fields {fields}>"

    # ---- life -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rollout, complete or partial, to a file: the whole file or none.

        The file has the arrays (with ``advantages`` and ``returns`` if they were computed), the counters, the random
        state and, with ``autoreset="next_step"``, which environments ended an episode in the last step.
        ``sharpwave.open(path)`` loads it as NumPy arrays, ``sharpwave.open(path, device=...)`` as tensors. The arrays
        are stored as safetensors. Waits for the device.

        Args:
            path: Where to; folders are made. An older file of a rollout is replaced, any other file is not.

        Raises:
            StorageError: It cannot be written there. The older file is unchanged.
        """
        self._check_open()
        write_rollout(save_path(path), self._state())

    async def save_async(self, path: str | os.PathLike[str]) -> None:
        """``save`` for an event loop: copies the rollout, then writes the copy in a thread. The file has the rollout as
        it was when the coroutine began to run."""
        import asyncio

        self._check_open()
        target, state = save_path(path).absolute(), self._state(copy=True)
        await asyncio.to_thread(write_rollout, target, state)

    def _state(self, *, copy: bool = False) -> RolloutState:
        """``copy``: False lets arrays on the CPU share the buffer's memory."""

        def read(array: Any) -> np.ndarray[Any, Any]:
            (host,) = self._place.to_host(array)
            return host.copy() if copy else host

        place = self._place if isinstance(self._place, Torch) else None
        return RolloutState(
            num_envs=self._num_envs,
            num_steps=self._num_steps,
            autoreset=self._autoreset,
            seed=self._seed,
            extras=list(self._extras),
            step=self._step,
            has_returns=self._has_returns,
            rollouts=self._rollouts,
            steps_before=self._steps_before,
            stream=dict(self._place.stream.bit_generator.state),
            generator_on=None if place is None else place.device.type,
            nodes=dict(self._columns.nodes),
            arrays={path: read(array) for path, array in self._columns.arrays.items()},
            was_over=read(self._was_over) if self._autoreset == "next_step" else None,
            generator=None if place is None else place.generator.get_state().numpy(),
        )

    @classmethod
    def _load(cls, path: Path, device: Any) -> RolloutBuffer:
        """What ``save`` wrote. On a device of another type than it was saved on, the permutations start again from the
        seed: torch's generators cannot be converted."""
        state = read_rollout(path)
        place = place_of("open()", device, state.seed)
        place.stream.bit_generator.state = state.stream
        if isinstance(place, Torch) and state.generator is not None and state.generator_on == place.device.type:
            try:
                place.generator.set_state(place.torch.from_numpy(state.generator))
            except (RuntimeError, TypeError) as error:
                raise StorageError(f"open(): {str(path)!r}: the random state does not fit: {error}") from None
        made = cls.__new__(cls)
        made._set_up(state.num_envs, state.num_steps, state.autoreset, state.seed, state.extras, place)
        made._columns.nodes = state.nodes
        made._columns.arrays = {name: place.from_host(array) for name, array in state.arrays.items()}
        if state.was_over is not None:
            made._was_over = place.from_host(state.was_over)
        made._step, made._has_returns = state.step, state.has_returns
        made._rollouts, made._steps_before = state.rollouts, state.steps_before
        return made

    def flush(self) -> None:
        """Nothing to do: a rollout is in memory. ``save`` writes it to a file."""
        self._check_open()

    async def flush_async(self) -> None:
        """Nothing to do, as in ``flush``."""
        self.flush()

    def close(self) -> None:
        """Frees the memory. Arrays that you still hold stay valid. A second call does nothing."""
        if not self._is_closed:
            self._fields = tuple(self._columns.nodes)  # these attributes are a ClosedError from now on
            for name in _STATE:
                self.__dict__.pop(name, None)

    @property
    def _is_closed(self) -> bool:
        return "_fields" in self.__dict__

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed")

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        return self.__dict__

    def __enter__(self) -> RolloutBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _nested(value: Any, of: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nested(part, of) for key, part in value.items()}
    return of(value)
