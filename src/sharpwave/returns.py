"""Advantages and returns of rollouts: NumPy arrays and torch tensors, on the CPU by the engine, on a GPU by one kernel.

Arrays are (steps, envs), or (steps,) for one environment; further axes count as environments. ``dones[t]`` says that
step t ended an episode, for any reason: nothing that comes later reaches back over it. ``truncated[t]`` says which of
those ends were time limits and the like, after which the episode would have gone on: there the value of the observation
that the episode ended with, ``final_values[t]``, stands for the rest. It is not the value of the next row: that one
begins another episode. Where a value must not be used it is not looked at: a NaN in it stays there.

No gradient flows through any of these.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from . import _core
from .arrays import narrow, refuse_masked
from .checks import number, one_of, told, whole
from .errors import SchemaError

__all__ = ["discounted_returns", "gae", "group_relative_advantages", "lambda_returns", "vtrace"]


class _Rollout(NamedTuple):
    """Arrays as the kernels take them: contiguous, (steps, envs), one float dtype, flags as bool or as that dtype."""

    rewards: Any
    values: Any
    dones: Any
    last_values: Any
    truncated: Any
    final_values: Any
    mask: Any
    kernels: Any
    shape: tuple[int, ...]

    def give(self, *results: Any) -> Any:
        """Results in the shape that came."""
        if len(self.shape) != 2:
            results = tuple(result.reshape(self.shape) for result in results)
        return results if len(results) > 1 else results[0]

    def empty(self) -> Any:
        if isinstance(self.rewards, np.ndarray):
            return np.empty(self.rewards.shape, self.rewards.dtype)
        return self.rewards.new_empty(self.rewards.shape)


def gae(
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    truncated: Any = None,
    final_values: Any = None,
    *,
    mask: Any = None,
) -> tuple[Any, Any]:
    """Generalized advantage estimation.

    Args:
        rewards: Of each step.
        values: Of the observation that each step started from.
        dones: Whether each step ended an episode, for any reason; bool, or numbers of which 0 is no.
        last_values: Of the observations after the last step, one an environment. Ignored where the last step ended.
        gamma: Discount.
        gae_lambda: How far advantages look: 0 is one step, 1 all of them.
        truncated: Which ends were not terminations; where an environment says both, ``truncated & ~terminated``. Needs
            ``final_values``.
        final_values: Of the observations that truncated episodes ended with; looked at only there. ``"next"`` says that
            the next row starts from that very observation: Gymnasium's next-step autoreset, whose row ``mask`` leaves
            out.
        mask: False where a row is no step of the policy's: its advantage is 0, its return its value, and nothing passes
            it backwards.

    Returns:
        Advantages and returns (advantages plus values), of the shape of ``rewards``.

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> advantages, returns = sw.returns.gae(
        ...     np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0]), np.array([0, 1, 0]), 40.0, 0.9, 0.5,
        ...     truncated=np.array([0, 1, 0]), final_values=np.array([0.0, 25.0, 0.0]))
        >>> advantages.round(3).tolist()
        [11.025, 4.5, 9.0]
    """
    where = "gae()"
    gamma = number(where, "gamma", gamma, 0, 1)
    gae_lambda = number(where, "gae_lambda", gae_lambda, 0, 1)
    _need_values(where, values)
    r = _read(where, rewards, values, dones, last_values, truncated, final_values, mask)
    advantages, returns = r.empty(), r.empty()
    r.kernels.gae(*r[:7], gamma, gae_lambda, advantages, returns)
    made: tuple[Any, Any] = r.give(advantages, returns)
    return made


def lambda_returns(
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    gamma: float = 0.99,
    lam: float = 0.95,
    truncated: Any = None,
    final_values: Any = None,
    *,
    mask: Any = None,
) -> Any:
    """TD(lambda) returns: what ``gae`` gives as returns. Arguments as there."""
    return gae(rewards, values, dones, last_values, gamma, lam, truncated, final_values, mask=mask)[1]


def discounted_returns(
    rewards: Any, dones: Any, last_values: Any, gamma: float = 0.99, truncated: Any = None, final_values: Any = None
) -> Any:
    """Sums of discounted rewards up to the end of each episode, and of what stands behind it.

    Args:
        rewards, dones, last_values, gamma, truncated, final_values: As of ``gae``; with zeros as ``last_values`` an
            episode that goes on counts as if it had ended.
    """
    where = "discounted_returns()"
    gamma = number(where, "gamma", gamma, 0, 1)
    if isinstance(final_values, str):
        raise SchemaError(f"{where}: final_values: expected an array, got {final_values!r}; there are no values here")
    r = _read(where, rewards, None, dones, last_values, truncated, final_values, None)
    returns = r.empty()
    r.kernels.discounted(r.rewards, r.dones, r.last_values, r.truncated, r.final_values, gamma, returns)
    return r.give(returns)


def vtrace(
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    log_probs: Any,
    behaviour_log_probs: Any,
    gamma: float = 0.99,
    lam: float = 1.0,
    truncated: Any = None,
    final_values: Any = None,
    *,
    mask: Any = None,
    rho_clip: float | None = 1.0,
    c_clip: float | None = 1.0,
    pg_rho_clip: float | None = 1.0,
) -> tuple[Any, Any]:
    """V-trace: value targets and advantages for steps that another policy took.

    Args:
        rewards, values, dones, last_values, gamma, truncated, final_values, mask: As of ``gae``.
        log_probs: Of the steps' actions, under the policy that learns.
        behaviour_log_probs: The same under the policy that acted.
        lam: Shortens how far corrections reach back.
        rho_clip: Most that a step's ratio counts in its temporal difference; None clips nothing.
        c_clip: The same for how far corrections reach back.
        pg_rho_clip: The same for the advantages.

    Returns:
        Value targets and advantages, of the shape of ``rewards``.
    """
    where = "vtrace()"
    gamma, lam = number(where, "gamma", gamma, 0, 1), number(where, "lam", lam, 0, 1)
    clips = [
        math.inf
        if clip is None or (isinstance(clip, float) and clip == math.inf)
        else number(where, name, clip, 0, math.inf)
        for name, clip in (("rho_clip", rho_clip), ("c_clip", c_clip), ("pg_rho_clip", pg_rho_clip))
    ]
    _need_values(where, values)
    r = _read(where, rewards, values, dones, last_values, truncated, final_values, mask)
    take = _taker(where, r.rewards)
    target = take.numbers("log_probs", log_probs, r.rewards, r.shape)
    behaviour = take.numbers("behaviour_log_probs", behaviour_log_probs, r.rewards, r.shape)
    targets, advantages = r.empty(), r.empty()
    r.kernels.vtrace(*r[:7], target, behaviour, gamma, lam, *clips, targets, advantages)
    made: tuple[Any, Any] = r.give(targets, advantages)
    return made


def group_relative_advantages(
    rewards: Any,
    *,
    group_size: int | None = None,
    groups: Any = None,
    baseline: Literal["mean", "others"] = "mean",
    scale: Literal["std"] | None = "std",
    eps: float = 1e-6,
) -> Any:
    """How much better each answer did than the others to the same prompt (GRPO, RLOO).

    Args:
        rewards: One a row.
        group_size: Rows of a group, where groups stand one after the other.
        groups: Or a group's number for each row, in any order.
        baseline: ``"mean"`` of the group, or of the ``"others"`` in it (leave one out).
        scale: ``"std"`` divides by the group's standard deviation (with n - 1) plus ``eps``; None does not.

    Returns:
        Advantages, one a row; 0 for a row that is alone in its group.
    """
    where = "group_relative_advantages()"
    one_of(where, "baseline", baseline, ("mean", "others"))
    if scale is not None and not (isinstance(scale, str) and scale == "std"):
        raise SchemaError(f"{where}: scale: expected 'std' or None, got {told(scale)}")
    eps = number(where, "eps", eps, 0, math.inf)
    if (group_size is None) == (groups is None):
        raise SchemaError(f"{where}: expected group_size= or groups=, one of the two")
    take = _taker(where, rewards)
    rewards = take.floats("rewards", rewards)
    shape = tuple(rewards.shape)
    rows = math.prod(shape)
    if group_size is not None:
        group_size = whole(where, "group_size", group_size, 1)
        if rows % group_size:
            raise SchemaError(f"{where}: group_size: {rows} rows are no multiple of {group_size}")
    else:
        groups = take.shaped("groups", take.array("groups", groups), shape)
    return take.group_relative(rewards, group_size, groups, scale == "std", baseline == "others", eps).reshape(shape)


# ---- reading what comes -----------------------------------------------------------------------------------------


def _read(
    where: str,
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    truncated: Any,
    final_values: Any,
    mask: Any,
) -> _Rollout:
    if final_values is not None and truncated is None:
        raise SchemaError(f"{where}: final_values: needs truncated=, which says where they count")
    if truncated is not None and final_values is None:
        raise SchemaError(
            f"{where}: truncated: needs final_values=, the values of the observations that those episodes ended with; "
            "final_values=values takes those of the step before instead, and without truncated= every end counts as a "
            "termination"
        )
    for name, value in (("dones", dones), ("last_values", last_values)):
        if value is None:
            raise SchemaError(f"{where}: {name}: expected an array, got None")
    if isinstance(final_values, str) and final_values != "next":
        raise SchemaError(f"{where}: final_values: expected an array or 'next', got {final_values!r}")
    take = _taker(where, rewards)
    rewards = take.floats("rewards", rewards, values)
    shape = tuple(rewards.shape)
    if not shape or 0 in shape:
        raise SchemaError(f"{where}: rewards: expected shape (steps,) or (steps, envs), got {shape}")
    if len(shape) != 2:
        rewards = rewards.reshape(shape[0], -1)
    if isinstance(final_values, str):
        final_values = None
    named = [(name, flag) for name, flag in (("dones", dones), ("truncated", truncated)) if flag is not None]
    flags = [take.flags(name, take.shaped(name, take.array(name, flag), shape)) for name, flag in named]
    if any(flag.dtype != rewards.dtype for flag in flags):
        flags = [take.truths(flag) for flag in flags]
    flags = [take.fit(flag, flag.dtype, rewards.shape) for flag in flags]
    if isinstance(last_values, (int, float, np.number)):
        try:
            last_values = take.full(rewards, float(last_values)).reshape(shape[1:])
        except (TypeError, OverflowError):
            raise SchemaError(f"{where}: last_values: expected an array or a number, got {told(last_values)}") from None
    return _Rollout(
        rewards,
        None if values is None else take.numbers("values", values, rewards, shape),
        flags[0],
        take.fit(
            take.shaped("last_values", take.array("last_values", last_values), shape[1:]),
            rewards.dtype,
            rewards.shape[1:],
            "last_values",
        ),
        flags[1] if truncated is not None else None,
        None if final_values is None else take.numbers("final_values", final_values, rewards, shape),
        None if mask is None else take.truth_of("mask", mask, rewards, shape),
        take.kernels(),
        shape,
    )


def _need_values(where: str, values: Any) -> None:
    if values is None:
        raise SchemaError(f"{where}: values: expected an array, got None; discounted_returns() needs none")


def _taker(where: str, rewards: Any) -> _Numpy | _Torch:
    if hasattr(rewards, "detach") and hasattr(rewards, "device"):
        return _Torch(where, rewards.device)
    return _Numpy(where)


class _Numpy:
    """Reads NumPy arrays and what can be made one."""

    def __init__(self, where: str) -> None:
        self.where = where

    def array(self, name: str, value: Any) -> np.ndarray[Any, Any]:
        if hasattr(value, "detach") and hasattr(value, "device"):
            raise SchemaError(f"{self.where}: {name}: expected a NumPy array like rewards, got a torch tensor")
        if type(value) is np.ndarray:
            if value.dtype.kind in "biuf":
                return value
        else:
            refuse_masked(f"{self.where}: {name}", value)
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise SchemaError(
                f"{self.where}: {name}: expected an array, got {type(value).__name__} ({error})"
            ) from None
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"{self.where}: {name}: expected numbers, got {array.dtype}")
        return array

    def floats(self, name: str, value: Any, other: Any = None) -> np.ndarray[Any, Any]:
        array = self.array(name, value)
        wide = any(getattr(each, "dtype", None) in (np.float64, np.longdouble) for each in (array, other))
        fitted: np.ndarray[Any, Any] = self.fit(array, np.dtype(np.float64 if wide else np.float32), array.shape, name)
        return fitted

    def shaped(self, name: str, array: Any, shape: tuple[int, ...]) -> Any:
        if tuple(array.shape) != shape:
            raise SchemaError(f"{self.where}: {name}: expected shape {shape}, got {tuple(array.shape)}")
        return array

    def numbers(self, name: str, value: Any, like: Any, shape: tuple[int, ...]) -> Any:
        return self.fit(self.shaped(name, self.array(name, value), shape), like.dtype, like.shape, name)

    def truth_of(self, name: str, value: Any, like: Any, shape: tuple[int, ...]) -> Any:
        array = self.truths(self.flags(name, self.shaped(name, self.array(name, value), shape)))
        return self.fit(array, array.dtype, like.shape)

    def truths(self, array: Any) -> Any:
        return array if array.dtype == bool else array != 0

    def flags(self, name: str, array: Any) -> Any:
        """Refuses NaN, which is neither yes nor no."""
        # The least of numbers with a NaN among them is NaN.
        if array.dtype.kind == "f" and array.size and (least := np.minimum.reduce(array, axis=None)) != least:
            raise SchemaError(f"{self.where}: {name}: expected 0 or 1, or truth values, got NaN")
        return array

    def fit(self, array: Any, dtype: Any, shape: tuple[int, ...], name: str = "") -> Any:
        """Contiguous, and of that dtype: what it cannot hold is refused."""
        if array.dtype != dtype:
            array = narrow(f"{self.where}: {name}", array, dtype)
        return np.ascontiguousarray(array).reshape(shape)

    def full(self, like: Any, value: float) -> Any:
        return np.full(like.shape[1:], value)

    def kernels(self) -> Any:
        return _Engine

    def group_relative(
        self, rewards: Any, size: int | None, groups: Any, scales: bool, others: bool, eps: float
    ) -> Any:
        if size is not None:
            of, count = np.arange(rewards.size) // size, rewards.size // size
        else:
            names, of = np.unique(np.asarray(groups), return_inverse=True)
            count = len(names)
        out = np.empty_like(rewards)
        _core.group_relative(rewards, np.ascontiguousarray(of, np.int64).reshape(-1), count, scales, others, eps, out)
        return out


class _Torch(_Numpy):
    """Reads tensors of one device."""

    def __init__(self, where: str, device: Any) -> None:
        import torch

        super().__init__(where)
        self.torch, self.device = torch, device

    def array(self, name: str, value: Any) -> Any:
        if not isinstance(value, self.torch.Tensor):
            raise SchemaError(f"{self.where}: {name}: expected a tensor like rewards, got {type(value).__name__}")
        if value.device != self.device:
            raise SchemaError(f"{self.where}: {name}: expected a tensor on {self.device}, got one on {value.device}")
        if value.layout is not self.torch.strided or value.dtype.is_complex:
            raise SchemaError(f"{self.where}: {name}: expected a dense tensor of numbers, got {told(value)}")
        return value.detach() if value.requires_grad else value

    def floats(self, name: str, value: Any, other: Any = None) -> Any:
        tensor = self.array(name, value)
        wide = self.torch.float64 in (tensor.dtype, getattr(other, "dtype", None))
        return self.fit(tensor, self.torch.float64 if wide else self.torch.float32, tensor.shape, name)

    def truths(self, array: Any) -> Any:
        return array if array.dtype is self.torch.bool else array.bool()

    def flags(self, name: str, array: Any) -> Any:
        # On a GPU the host would have to wait for the answer: there NaN counts as yes.
        if self.device.type == "cpu" and array.dtype.is_floating_point and array.numel():
            super().flags(name, array.float().numpy())
        return array

    def fit(self, array: Any, dtype: Any, shape: tuple[int, ...], name: str = "") -> Any:
        # Each call costs more on the host than the kernel on the device: none where there is nothing to do.
        if array.dtype is not dtype:
            given, array = array, array.to(dtype)
            # Asked on the host alone: elsewhere the answer would have to be waited for.
            if given.dtype is self.torch.float64 and self.device.type == "cpu":
                narrow(f"{self.where}: {name}", given.numpy(), np.dtype(np.float32))
        if not array.is_contiguous():
            array = array.contiguous()
        return array if array.shape == shape else array.reshape(shape)

    def full(self, like: Any, value: float) -> Any:
        return self.torch.full(like.shape[1:], value, dtype=self.torch.float64, device=like.device)

    def kernels(self) -> Any:
        return torch_kernels(self.where, self.device)

    def group_relative(
        self, rewards: Any, size: int | None, groups: Any, scales: bool, others: bool, eps: float
    ) -> Any:
        if self.device.type == "cpu":
            of = None if groups is None else self.array("groups", groups).numpy()
            made = super().group_relative(rewards.numpy(), size, of, scales, others, eps)
            return self.torch.from_numpy(made)
        out = rewards.new_empty(rewards.shape)
        if size is not None:
            self.kernels().group_relative(rewards, size, scales, others, eps, out)
            return out
        # Which rows belong together is data: torch sorts it, and the host waits for how many groups there are.
        _, of = self.torch.unique(self.array("groups", groups).reshape(-1), return_inverse=True)
        return self.kernels().group_relative_of(rewards.reshape(-1), of, scales, others, eps)


class _Engine:
    """The engine's kernels over NumPy arrays."""

    gae = staticmethod(_core.gae)
    discounted = staticmethod(_core.discounted)

    @staticmethod
    def vtrace(*arguments: Any) -> None:
        engine: Any = _core.vtrace
        engine(*arguments[:7], np.exp(arguments[7] - arguments[8]), *arguments[9:])


class _OnHost:
    """The same over tensors on the CPU: the same memory."""

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(_Engine, name)

        def call(*arguments: Any) -> None:
            kernel(*(value.numpy() if hasattr(value, "numpy") else value for value in arguments))

        self.__dict__[name] = call
        return call


_on_host = _OnHost()


@functools.cache
def torch_kernels(where: str, device: Any) -> Any:
    """What works on tensors of that device."""
    if device.type == "cpu":
        return _on_host
    if device.type != "cuda":
        raise SchemaError(f"{where}: expected tensors on 'cpu' or 'cuda', got {device}; pass .cpu()")
    try:
        from .device import returns as kernels
    except ImportError:
        raise SchemaError(f"{where}: tensors on a GPU need Triton; pip install triton, or pass .cpu()") from None
    return kernels
