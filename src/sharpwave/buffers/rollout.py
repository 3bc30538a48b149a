"""RolloutBuffer: the steps of one policy in, minibatches with advantages and returns out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from .. import _core, returns
from ..checks import check_settable, number, one_of, truth, whole
from ..errors import BufferFull, NotReady, SchemaError
from ..rows.columns import Columns, Torch, place_of, read_names, read_node
from ..schema import Field

__all__ = ["RolloutBuffer"]

# What add() takes, and what batches call it.
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
_OTHERS = {"rewards", "dones", "truncated", "final_values", "mask", "hidden_states"}


class RolloutBuffer:
    """The last steps of all environments, on the device where the policy is.

    Memory is taken once and used again for every rollout. On a GPU no call waits for the device, but
    ``recurrent_minibatches``, which asks it once where episodes ended.

    The arrays are attributes, (num_steps, num_envs, ...), by the names of ``add``, and ``advantages`` and ``returns``.
    Assigning to one (``roll.advantages = normalised``) copies the values into it; batches have them from then on.

    Args:
        num_envs: Environments that step together.
        num_steps: Steps of a rollout.
        obs_shape: Of one observation: a shape (float32), a ``Field``, or a dict of them.
        device: None keeps NumPy arrays; anything that torch knows, tensors there.
        num_privileged_obs: Numbers that the critic sees besides; 0 is none.
        privileged_obs_shape: The same as a shape, a ``Field`` or a dict of them.
        action_shape, action_dtype: Of one action; taken from the first one where not given.
        hidden_states: Of recurrent networks, by name: what ``add`` gets before each step, one an environment.
        extras: Further fields by name (the policy's mean and deviation, say): ``add`` takes them by that name, batches
            have them.
        autoreset: What a vector environment does after an end. ``"same_step"``: it shows the next episode's first
            observation at once, and ``final_values`` are of what it showed before. ``"next_step"`` (Gymnasium's
            default): the step after an end only resets. That row is no step of the policy's: it gets no advantage, and
            batches have a ``mask`` that is False there; values behind truncated ends are taken from it.
        seed: Of the permutations.

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

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        obs_shape: Any,
        device: Any = None,
        num_privileged_obs: int = 0,
        *,
        privileged_obs_shape: Any = None,
        action_shape: Any = None,
        action_dtype: Any = None,
        hidden_states: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        autoreset: Literal["same_step", "next_step"] = "same_step",
        seed: int | None = None,
    ) -> None:
        where = "RolloutBuffer()"
        self._num_envs = whole(where, "num_envs", num_envs)
        self._num_steps = whole(where, "num_steps", num_steps)
        self._autoreset = one_of(where, "autoreset", autoreset, ("same_step", "next_step"))
        seed = None if seed is None else whole(where, "seed", seed, 0, 2**63 - 1)
        privileged = whole(where, "num_privileged_obs", num_privileged_obs, 0)
        if privileged and privileged_obs_shape is not None:
            raise SchemaError(f"{where}: expected num_privileged_obs= or privileged_obs_shape=, got both")
        if privileged:
            privileged_obs_shape = (privileged,)
        nodes = {"observations": read_node(where, "obs_shape", obs_shape)}
        if privileged_obs_shape is not None:
            nodes["privileged_observations"] = read_node(where, "privileged_obs_shape", privileged_obs_shape)
        if action_dtype is not None and action_shape is None:
            raise SchemaError(f"{where}: action_dtype: needs action_shape= as well; without both, the first add tells")
        if action_shape is not None:
            dtype = "float32" if action_dtype is None else action_dtype
            nodes["actions"] = read_node(where, "action_shape", action_shape, dtype)
        extras = read_names(where, "extras", extras)
        self._extras = list(extras)
        for name, node in extras.items():
            if name in {*_BATCH_NAMES, *_BATCH_NAMES.values(), *_OTHERS}:
                raise SchemaError(f"{where}: extras: the name {name!r} is taken; give another")
            nodes[name] = read_node(where, f"extras[{name!r}]", node)
        if hidden_states is not None:
            hidden_states = read_names(where, "hidden_states", hidden_states)
            nodes["hidden_states"] = read_node(where, "hidden_states", hidden_states)
        self._place = place_of(where, device, seed)
        self._columns = Columns(self._place, (self.num_steps, self.num_envs))
        for name, node in nodes.items():
            self._columns.declare(name, node)
        for name in _NUMBERS:
            self._columns.declare(name, Field())
        self._columns.declare("dones", Field((), self._flag_dtype))
        if self.autoreset == "next_step":
            self._columns.declare("mask", Field((), "bool"))
            self._was_over = self._place.zeros((self.num_envs,), np.dtype(bool))
        self._step = 0
        self._has_returns = False
        self._changes = 0  # an iteration over minibatches notices them

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
            observations: What the policy saw, (num_envs, ...).
            privileged_observations: What the critic saw besides; required where declared.
            actions: What it did; the first add tells their shape and dtype where the constructor did not.
            rewards, values, log_probs: One an environment. ``values`` are of ``observations``.
            dones: Whether the step ended an episode, for any reason; bool, or numbers of which 0 is no. On the host NaN
                is refused, and so is a number that a field's dtype cannot hold; on a GPU the call would have to wait
                for the answer, and NaN counts as yes.
            truncated: Which of those ends were time limits and the like, and no terminations: where an environment says
                both, ``truncated & ~terminated``.
            final_values: Values of the observations that truncated episodes ended with; looked at only there.
            hidden_states: Of recurrent networks, before the step; required where declared.
            **extras: The further fields; required where declared.

        Raises:
            BufferFull: The rollout is complete; use it, then ``clear()``.
            SchemaError: Something is missing or does not fit. Nothing was written.
        """
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
                f"{where}: final_values: with autoreset='next_step' the next row starts from that observation, and its "
                "value is taken; leave them out"
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
                self._columns.arrays[name][self._step] = 0  # the last rollout's must not stay
        self._columns.put(self._step, checked)
        if self._autoreset == "next_step":
            self._columns.arrays["mask"][self._step] = ~self._was_over
            self._was_over[:] = self._over(self._step)
        state = self.__dict__  # past __setattr__, whose three calls would be a twentieth of an add
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
            argument = {"privileged_observations": "num_privileged_obs=", "hidden_states": "hidden_states="}
            mends = argument.get(unknown[0], "extras=")
            raise SchemaError(f"{where}: {unknown[0]}: the buffer has no such field; declare it with {mends}")

    def _infer(self, where: str, name: str, value: Any) -> Field:
        """A field that the first value tells."""
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
        """Makes room for the next rollout; nothing is freed.

        Args:
            reset: The environments were reset by hand: the first row of the next rollout is a step of the policy's,
                whatever the last one ended with. Matters with ``autoreset="next_step"`` alone.
        """
        truth("clear()", "reset", reset)
        self._step = 0
        self._has_returns = False
        self._changes += 1
        if reset and self.autoreset == "next_step":
            self._was_over[:] = False

    def compute_returns_and_advantages(
        self, last_values: Any, gamma: float = 0.99, gae_lambda: float = 0.95, *, partial: bool = False
    ) -> None:
        """Works out ``advantages`` and ``returns`` by generalized advantage estimation.

        Args:
            last_values: Of the observations after the last step, one an environment. Ignored where that step ended an
                episode.
            gamma: Discount.
            gae_lambda: How far advantages look: 0 is one step, 1 all of them; 0.9 to 0.97 are usual.
            partial: Take the steps that are there, where the rollout is not complete.
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
            self._place.narrow(f"{where}: last_values", last, np.dtype(np.float32))  # looked at on the host alone
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
            or_else = ", or pass partial=True to take those" if self._step else ""
            raise NotReady(f"{where}: {self._step} of {self.num_steps} steps are there; add the others{or_else}")

    # ---- reading ----------------------------------------------------------------------------------------------

    def get_all_data(self, *, normalize_advantages: bool = False) -> dict[str, Any]:
        """The whole rollout as one batch, row t * num_envs + n. No copies: the next rollout writes over it.

        Args:
            normalize_advantages: To mean 0 and deviation 1 over all rows that count; a copy, what is stored stays.

        Returns:
            observations, privileged_observations (None where there are none), actions, old_log_probs, advantages,
            returns, values; the extras; and ``mask`` where rows are left out.
        """
        self._check_returns("get_all_data()")
        return self._whole(truth("get_all_data()", "normalize_advantages", normalize_advantages))

    def _whole(self, normalize_advantages: bool) -> dict[str, Any]:
        batch = {key: self._rows(name) for name, key in self._names().items()}
        batch.setdefault("privileged_observations", None)
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
        """Batches of rows in random order: each row once an epoch, in another order each time.

        Args:
            num_minibatches: Batches of an epoch.
            epochs: How often to go through the rollout.
            drop_remainder: Leave out rows, other ones each epoch, so that all batches have the same size; else the
                first ones have one more.
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
        """Batches of sequences for recurrent networks, each env once an epoch.

        The steps of an env are cut where episodes ended. The pieces stand side by side, (length, pieces, ...), padded
        with zeros; ``mask`` is True where a step is. ``hidden_states`` holds what was stored at the start of each
        piece, (pieces, ...).

        Args:
            num_minibatches: Batches of an epoch; each gets an equal share of the environments, or one more.
            epochs: How often to go through the rollout.
            normalize_advantages: As of ``minibatches``.
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
        # Where episodes ended is asked once; what follows from it is worked out on the host.
        asked = [self._over(slice(self._step))]
        asked += [self._columns.arrays["mask"][: self._step]] if "mask" in self._columns.nodes else []
        pieces = _Pieces(*place.to_host(*asked))
        for _ in range(epochs):
            for envs in np.array_split(place.host_permutation(self.num_envs), count):
                self._check_unchanged("recurrent_minibatches()", changes)
                cut = pieces.of(envs)
                if not len(cut.rows):
                    continue  # nothing but resets
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
        """Fields of a batch: what they are here, and there."""
        names = {name: key for name, key in _BATCH_NAMES.items() if name in self._columns.nodes}
        names |= {name: name for name in self._extras}
        return names | ({"mask": "mask"} if "mask" in self._columns.nodes else {})

    def _rows(self, name: str) -> Any:
        """A field as rows, (steps * num_envs, ...): the same memory."""
        return self._columns.tree(name, lambda array: array[: self._step].reshape(-1, *array.shape[2:]))

    def _check_returns(self, where: str) -> None:
        if not self._has_returns:
            raise NotReady(f"{where}: there are no advantages yet; call compute_returns_and_advantages() first")

    def _check_unchanged(self, where: str, changes: int) -> None:
        if changes != self._changes:
            raise NotReady(f"{where}: the rollout has changed since the iteration began; begin it anew")

    def _read_normalization(self, where: str, over: Any) -> str | None:
        return None if over is None else one_of(where, "normalize_advantages", over, ("rollout", "minibatch"))

    # ---- looking ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows of the rollout so far: steps times environments."""
        return self._step * self.num_envs

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
        """What the vector environment does after an end."""
        return self._autoreset  # type: ignore[no-any-return]

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

    def __getattr__(self, name: str) -> Any:
        # The stored arrays, (num_steps, num_envs, ...), by the names of add().
        columns = self.__dict__.get("_columns")
        if columns is None or name not in columns.nodes:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return columns.tree(name, lambda array: array)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] == "_":
            return object.__setattr__(self, name, value)
        # roll.advantages = normalised: stored where batches read it. The arrays stay the same ones.
        columns = self.__dict__.get("_columns")
        if columns is not None and name in columns.nodes:
            checked = columns.check(f"{type(self).__name__}.{name}", name, value, columns.lead)
            columns.place.copy([columns.arrays[path] for path, _ in checked], [array for _, array in checked])
            self._changes += 1
            return
        check_settable(self, name)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        where = "NumPy" if self.device is None else str(self.device)
        return (
            f"RolloutBuffer({self.num_steps} steps x {self.num_envs} envs, {where}, "
            f"{self._step} of {self.num_steps} steps there)"
        )


class _Cut:
    def __init__(self, rows: Any, places: Any, starts: Any, length: int) -> None:
        self.rows, self.places, self.starts, self.length = rows, places, starts, length


class _Pieces:
    """The steps of each env, cut behind ends. Rows that do not count belong to no piece."""

    def __init__(self, ends: np.ndarray[Any, Any], counts: np.ndarray[Any, Any] | None = None) -> None:
        counts = np.ones_like(ends) if counts is None else counts
        first = np.ones_like(ends)
        first[1:] = ends[:-1] | ~counts[:-1]
        self.counts, self.starts = counts.T, (first & counts).T  # (envs, steps)

    def of(self, envs: np.ndarray[Any, Any]) -> _Cut:
        """Rows of these envs' pieces, where each goes in a (length, pieces) batch, and the rows that start one."""
        counts, starts = self.counts[envs], self.starts[envs]
        env, step = np.nonzero(counts)
        is_start = starts[env, step]
        piece = np.cumsum(is_start) - 1
        begin = step[is_start][piece] if len(piece) else piece
        rows = step * len(self.counts) + envs[env]
        pieces = int(is_start.sum())
        length = int((step - begin).max()) + 1 if len(rows) else 0
        return _Cut(rows, (step - begin) * pieces + piece, rows[is_start], length)


def _nested(value: Any, of: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nested(part, of) for key, part in value.items()}
    return None if value is None else of(value)
