"""collect: steps environments, adds the transitions to a buffer, yields finished episodes or every k rows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias

import numpy as np

from .buffers.replay import ReplayBuffer
from .checks import whole
from .errors import SchemaError

__all__ = ["collect"]

_SINGLE, _NEXT_STEP, _SAME_STEP, _DISABLED = "single", "NextStep", "SameStep", "Disabled"
_HOST_TYPES = frozenset({int, float, bool, np.ndarray, np.int64, np.int32, np.float32, np.float64})  # never on a device
_FILLED = {"obs", "action", "reward", "next_obs", "done"}

# Around a run; gives the function that shows the rows added so far, or None.
_Bar: TypeAlias = "contextlib.AbstractContextManager[Callable[[int], None] | None]"


def collect(
    envs: Any,
    policy: Callable[[Any], Any],
    buffer: ReplayBuffer,
    steps: int | None,
    *,
    every: int | None = None,
    seed: int | None = None,
    progress: bool = False,
) -> Generator[dict[str, Any], None, None]:
    """Steps Gymnasium environments, adds every transition to a buffer and yields each episode that ends.

    With ``every=k`` it yields every k rows instead: a training loop learns there.

    All three autoreset modes of vector environments are handled (next-step, same-step, disabled): a step that is only a
    reset is never stored, and the last row of an episode has its true final observation.

    Environments are stepped only while the result is iterated; iteration may stop at any point and continue later, if
    the iterator is kept. When it ends, by ``steps``, ``close()`` or an error, open episodes end in the buffer as
    truncated. A ``break`` ends it too, where only the ``for`` loop refers to the iterator. Each call resets the
    environments: to continue open episodes, keep the iterator.

    Args:
        envs: A Gymnasium environment, single or vector.
        policy: Maps observations to actions; batched for vector environments. Actions may be tensors on any device.
            If the buffer has fields besides obs, action, reward, next_obs and done, the policy returns a pair: the
            action, and a dict with a value for each of these fields (log-probabilities, recurrent states).
        buffer: Made with ``ReplayBuffer.for_env(envs, ...)``, or with the same fields and ``num_envs``.
        steps: Rows to add, over all environments. The last vector step is added whole. None continues without end.
        every: Yields each time this many more rows were added, and once at the end if rows came since. Vector
            environments add ``num_envs`` rows at once: it yields after the first step that reaches a multiple.
        seed: Seed of the first reset.
        progress: Shows a progress bar. Needs the extra ``cli``.

    Yields:
        A dict per episode: ``env`` (its number), ``step`` (rows added so far), ``length``, ``return``, ``terminated``,
        ``truncated``. With ``every``: a dict with ``step``, and ``episodes``, a list of those that ended since the last
        one.

    Raises:
        SchemaError: An argument is wrong. Raised before any environment is stepped.

    Example:
        >>> import gymnasium as gym, sharpwave as sw
        >>> envs = gym.make_vec("CartPole-v1", num_envs=4)
        >>> envs.action_space.seed(0)
        0
        >>> buf = sw.ReplayBuffer.for_env(envs, capacity=10_000)
        >>> episodes = list(sw.collect(envs, lambda obs: envs.action_space.sample(), buf, 1_000, seed=0))
        >>> len(buf) >= 1_000 and all(episode["terminated"] for episode in episodes)
        True
    """
    mode = _read_envs(envs)
    _check_buffer(buffer, None if mode == _SINGLE else envs.num_envs)
    if not callable(policy):
        raise SchemaError(f"collect(): policy: expected a function of observations, got {type(policy).__name__}")
    if steps is not None:
        steps = whole("collect()", "steps", steps)
    if every is not None:
        every = whole("collect()", "every", every)
    bar = _bar(steps) if progress else contextlib.nullcontext(None)
    if mode == _SINGLE:
        return _run_single(envs, policy, buffer, steps, every, seed, bar)
    return _run_vector(envs, mode, policy, buffer, steps, every, seed, bar)


class _Reports:
    """When a run with ``every`` yields, and what."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.due = every  # rows at which the next report is made
        self.episodes: list[dict[str, Any]] = []

    def make(self, added: int) -> dict[str, Any]:
        episodes, self.episodes = self.episodes, []
        self.due = (added // self.every + 1) * self.every
        return {"step": added, "episodes": episodes}


def _run_single(
    env: Any,
    policy: Callable[[Any], Any],
    buffer: ReplayBuffer,
    steps: int | None,
    every: int | None,
    seed: int | None,
    bar: _Bar,
) -> Generator[dict[str, Any], None, None]:
    """One environment: its numbers and flags stay Python's, because NumPy's calls on arrays of one element would take
    longer than the rest."""
    keeps_next, extra_names = "next_obs" in buffer.schema, _extra_names(buffer)
    # By position, which is the shorter call.
    is_usual = list(buffer.schema) == ["obs", "action", "reward", "next_obs", "done"]
    added = begun = 0
    total = 0.0
    limit = sys.maxsize if steps is None else steps
    extras: dict[str, Any] = {}
    reports = None if every is None else _Reports(every)
    stop = limit if reports is None else min(reports.due, limit)
    plain_types = frozenset() if extra_names else _HOST_TYPES  # with extras, the policy's result is a pair
    # A separate writer: when it closes, open episodes end as truncated, whether the run ended normally or not.
    with buffer.writer() as writer, bar as show:
        add, step, array, references = writer.add, env.step, np.ndarray, sys.getrefcount
        obs = _copy(env.reset(seed=seed)[0])
        while True:
            while added < stop:
                action = policy(obs)
                if type(action) not in plain_types:
                    if extra_names:
                        action, extras = _split(action, extra_names)
                    action = _to_host(action)
                next_obs, reward, terminated, truncated, _ = step(action)
                # Environments may return the same array at every step. One that nothing else refers to, and whose
                # memory is its own, cannot change: it needs no copy. (Two references: the variable here and the
                # argument.)
                if type(next_obs) is not array:
                    next_obs = _copy(next_obs)
                elif references(next_obs) > 2 or not next_obs.flags.owndata:
                    next_obs = next_obs.copy()
                is_over = terminated or truncated
                if is_usual and not is_over:
                    add(obs, action, reward, next_obs, terminated)
                elif extra_names:
                    if keeps_next:
                        extras["next_obs"] = next_obs
                    add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, **extras)
                elif keeps_next:
                    add(
                        obs=obs,
                        action=action,
                        reward=reward,
                        terminated=terminated,
                        truncated=truncated,
                        next_obs=next_obs,
                    )
                else:
                    add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
                added += 1
                total += reward if type(reward) is float else float(np.asarray(reward).item())
                if show is not None:
                    show(added)
                if not is_over:
                    obs = next_obs
                    continue
                finished = {
                    "env": 0,
                    "step": added,
                    "length": added - begun,
                    "return": float(total),
                    "terminated": bool(terminated),
                    "truncated": bool(truncated),
                }
                begun, total = added, 0.0
                obs = _copy(env.reset()[0])
                if reports is None:
                    yield finished
                else:
                    reports.episodes.append(finished)
            if reports is not None:
                yield reports.make(added)
            if added >= limit:
                return
            assert reports is not None
            stop = min(reports.due, limit)


def _run_vector(
    envs: Any,
    mode: str,
    policy: Callable[[Any], Any],
    buffer: ReplayBuffer,
    steps: int | None,
    every: int | None,
    seed: int | None,
    bar: _Bar,
) -> Generator[dict[str, Any], None, None]:
    width = envs.num_envs
    keeps_next, extra_names = "next_obs" in buffer.schema, _extra_names(buffer)
    limit = sys.maxsize if steps is None else steps
    extras: dict[str, Any] = {}
    reports = None if every is None else _Reports(every)
    returns, lengths = np.zeros(width), np.zeros(width, np.int64)
    resets: np.ndarray[Any, Any] | None = None  # environments whose next step is only a reset, if any
    added = 0
    with buffer.writer() as writer, bar as show:
        obs = _copy(envs.reset(seed=seed)[0])
        while added < limit:
            action = policy(obs)
            if extra_names:
                action, extras = _split(action, extra_names)
            action = _to_host(action)
            next_obs, reward, terminated, truncated, info = envs.step(action)
            next_obs = _copy(next_obs)  # environments may return the same array at every step
            ended = np.atleast_1d(np.logical_or(terminated, truncated))
            ends = np.flatnonzero(ended)
            row = {"obs": obs, "action": action, "reward": reward, "terminated": terminated, "truncated": truncated}
            row |= extras
            if keeps_next:
                row["next_obs"] = _with_finals(next_obs, ends, info) if mode == _SAME_STEP else next_obs
            if resets is None:
                writer.add(**row)
                added += width
                returns += reward
                lengths += 1
            else:
                counts = width - int(resets.sum())
                if counts:
                    writer.add(**row, mask=~resets)
                added += counts
                returns += np.where(resets, 0.0, reward)
                lengths += ~resets
            if show is not None:
                show(added)
            obs = next_obs
            resets = None
            if not len(ends):
                if reports is not None and added >= min(reports.due, limit):
                    yield reports.make(added)
                continue
            finished = [
                {
                    "env": int(i),
                    "step": added,
                    "length": int(lengths[i]),
                    "return": float(returns[i]),
                    "terminated": bool(np.atleast_1d(terminated)[i]),
                    "truncated": bool(np.atleast_1d(truncated)[i]),
                }
                for i in ends
            ]
            returns[ends], lengths[ends] = 0.0, 0
            if mode == _NEXT_STEP:
                resets = ended
            elif mode == _DISABLED:
                fresh = envs.reset(options={"reset_mask": ended.copy()})[0]
                for i in ends:
                    _put(obs, i, _row(fresh, i))
            if reports is None:
                yield from finished
                continue
            reports.episodes += finished
            if added >= min(reports.due, limit):
                yield reports.make(added)


def _read_envs(envs: Any) -> str:
    """The autoreset mode of the environments."""
    if not hasattr(envs, "single_observation_space"):
        if hasattr(envs, "num_envs") or not hasattr(envs, "observation_space"):
            raise SchemaError(f"collect(): envs: expected a Gymnasium environment, got {type(envs).__name__}")
        return _SINGLE
    from gymnasium import vector

    # Gymnasium 1.0 has only next-step autoreset and does not name it.
    mode = (envs.metadata or {}).get("autoreset_mode", None if hasattr(vector, "AutoresetMode") else _NEXT_STEP)
    name = getattr(mode, "value", mode)
    if name not in (_NEXT_STEP, _SAME_STEP, _DISABLED):
        raise SchemaError(
            f"collect(): envs: expected an AutoresetMode in envs.metadata['autoreset_mode'], got {mode!r}; set it to "
            "what the environments do: with a wrong mode, wrong transitions would be stored"
        )
    return str(name)


def _check_buffer(buffer: Any, num_envs: int | None) -> None:
    if not isinstance(buffer, ReplayBuffer):
        raise SchemaError(f"collect(): buffer: expected a ReplayBuffer, got {type(buffer).__name__}")
    if buffer.num_envs != num_envs and not (num_envs is None and buffer.num_envs == 1):
        raise SchemaError(
            f"collect(): buffer: expected num_envs={num_envs} as the environments have, got {buffer.num_envs}; give "
            f"num_envs={num_envs} to its constructor, or make it with ReplayBuffer.for_env(envs, ...)"
        )
    missing = [name for name in ("obs", "action") if name not in buffer.schema]
    if missing:
        raise SchemaError(
            f"collect(): buffer: expected the fields obs and action, got no {' and no '.join(missing)}; give it "
            "another schema=, or step the environments yourself"
        )


def _extra_names(buffer: ReplayBuffer) -> frozenset[str]:
    """The fields that the policy fills."""
    return frozenset(name for name in buffer.schema if name not in _FILLED)


def _split(made: Any, names: frozenset[str]) -> tuple[Any, dict[str, Any]]:
    """What the policy returned for a buffer with fields of its own: the action, and their values."""
    asked = f"the buffer has the fields {', '.join(sorted(names))} besides; expected (action, dict of these fields)"
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise SchemaError(f"collect(): policy: {asked}, got {got}")
    action, given = made
    if given.keys() != names:
        parts = [f"no {name}" for name in sorted(names - given.keys())]
        parts += [f"{name!r}, which is none of them" for name in given if name not in names]
        raise SchemaError(f"collect(): policy: {asked}, got {' and '.join(parts)}")
    return action, {name: _to_host(value) for name, value in given.items()}


def _copy(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {name: _copy(part) for name, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_copy(part) for part in obs)
    return obs.copy() if isinstance(obs, np.ndarray) else obs


def _row(batch: Any, i: Any) -> Any:
    """The part of one environment in a batched value, or in an array with one object per environment."""
    if isinstance(batch, dict):
        return {name: _row(part, i) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(part, i) for part in batch)
    return batch[i]


def _put(batch: Any, i: Any, value: Any) -> None:
    if isinstance(batch, dict):
        for name, part in batch.items():
            _put(part, i, value[name])
    elif isinstance(batch, tuple):
        for part, item in zip(batch, value, strict=True):
            _put(part, i, item)
    else:
        batch[i] = value


def _with_finals(next_obs: Any, ends: np.ndarray[Any, Any], info: Any) -> Any:
    """Same-step autoreset: where an episode ended, ``next_obs`` is the first observation of the next episode. Returns
    the true next observations."""
    if not len(ends):
        return next_obs
    if "final_obs" not in info:
        raise SchemaError(
            f"collect(): envs: expected info['final_obs'] at an episode's end, as same-step autoreset gives it, got "
            f"{', '.join(info) or 'an empty info'}; use environments with AutoresetMode.NEXT_STEP"
        )
    true_next = _copy(next_obs)
    for i in ends:
        _put(true_next, i, _row(info["final_obs"], i))
    return true_next


def _to_host(action: Any) -> Any:
    """Tensors of any device as NumPy arrays; other values unchanged."""
    if isinstance(action, dict):
        return {name: _to_host(part) for name, part in action.items()}
    if isinstance(action, tuple):
        return tuple(_to_host(part) for part in action)
    if hasattr(action, "detach") and hasattr(action, "cpu"):
        return action.detach().cpu().numpy()[()]  # a single number as a NumPy scalar, which may be a key
    return action


def _bar(steps: int | None) -> _Bar:
    try:
        from rich.progress import MofNCompleteColumn, Progress
    except ImportError:
        raise SchemaError('collect(): progress: needs rich; pip install "sharpwave[cli]"') from None

    @contextlib.contextmanager
    def show() -> Iterator[Callable[[int], None]]:
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as shown:
            task = shown.add_task("collect", total=steps)
            most = sys.maxsize if steps is None else steps
            yield lambda added: shown.update(task, completed=min(added, most))

    return show()
