"""The specification of rows with an end for each agent, slow and obvious.

`done` has one truth value for each agent: an array of them, or a dict or tuple of arrays. `truncated=` has the same
form, or one truth value for each row. Of a row with values for each agent:

- it is terminated when every agent is done;
- it is truncated when every agent is done or truncated, and one of them is truncated;
- it is cut when an agent is truncated and another one goes on.

A row that is terminated or truncated ends its episode. A row that is cut does not; n-step examples stop there, because
its next observation is the last one of an agent that is not done. An agent's own rewards are summed up to its own done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import sharpwave as sw


def end_paths(fields: dict[str, sw.Field]) -> list[str]:
    return [path for path in fields if path.split("/")[0] == "done"]


def is_by_agent(fields: dict[str, sw.Field]) -> bool:
    paths = end_paths(fields)
    return paths != ["done"] or fields["done"].shape != ()


def row_ends(dones: dict[str, np.ndarray], truncated: dict[str, np.ndarray]) -> tuple[bool, bool, bool]:
    """Whether a row is terminated, truncated, cut."""
    done = np.concatenate([dones[path].reshape(-1) for path in dones]).astype(bool)
    told = np.concatenate([truncated[path].reshape(-1) for path in dones]).astype(bool)
    is_over = bool((done | told).all())
    return bool(done.all()), is_over and bool(told.any()), not is_over and bool(told.any())


def draw_ends(code: str, number: int, fields: dict[str, sw.Field]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What each agent is in a row of this letter: done, truncated, both, neither. C is a row that is cut."""
    stream = np.random.default_rng([number, 77])
    paths = end_paths(fields)
    sizes = [int(np.prod(fields[path].shape, dtype=int)) for path in paths]
    agents = sum(sizes)
    done = stream.random(agents) < 0.3
    told = np.zeros(agents, bool)
    someone = stream.integers(agents)
    if code in "TBZ":
        done[:] = True
        told[someone] = code == "B"
    elif code in "UY":
        done[someone] = False
        told = ~done | (stream.random(agents) < 0.2)
    else:
        done[someone] = False  # goes on
        if code == "C" and agents > 1:
            told = stream.random(agents) < 0.4
            told[(someone + 1) % agents] = True
            told[someone] = False
    parts = zip(paths, np.split(done, np.cumsum(sizes)[:-1]), np.split(told, np.cumsum(sizes)[:-1]), strict=True)
    dones, truncated = {}, {}
    for path, its_done, its_told in parts:
        leaf = fields[path]
        dones[path] = its_done.astype(leaf.dtype).reshape(leaf.shape)
        truncated[path] = its_told.reshape(leaf.shape)
    return dones, truncated


def example(chain: list[Any], fields: dict[str, sw.Field], gamma: float) -> dict[str, np.ndarray]:
    """Rewards, discounts and dones of an n-step example: each agent's own, up to its own done."""
    values: dict[str, np.ndarray] = {}
    for path in end_paths(fields):
        suffix = path.removeprefix("done")
        of_reward = fields[f"reward{suffix}"]
        done = np.zeros(fields[path].shape, fields[path].dtype)
        discount = np.zeros(fields[path].shape, np.float32)
        reward = np.zeros(of_reward.shape, np.float64)
        for agent in np.ndindex(fields[path].shape):
            for k, link in enumerate(chain):
                reward[agent] += gamma**k * link.values[f"reward{suffix}"][agent].astype(np.float64)
                done[agent], discount[agent] = link.dones[path][agent], gamma ** (k + 1)
                if link.dones[path][agent]:
                    break
        values[path], values[f"discount{suffix}"] = done, discount
        values[f"reward{suffix}"] = reward.astype(of_reward.dtype)
    return values
