"""Buffers of many kinds for tests of the C++ interface, and the comparison of C++ with Python on one of them."""

from __future__ import annotations

import numpy as np
from cpp_programs import Probe

import sharpwave as sw

NESTED = {
    "obs": {"image": sw.Field((2, 3), "uint8"), "pose": (sw.Field((2,)), sw.Field((), "float16"))},
    "action": sw.Field(),
}
CASES = {
    "uniform": {},
    "newest": {"sampler": sw.Uniform(newest=2)},
    "max_reads": {"sampler": sw.Uniform(max_reads=3)},
    "prioritized": {"sampler": sw.Prioritized(alpha=0.7, beta=sw.Linear(0.4, 1.0, 5), newest=1)},
    "ranks": {"sampler": sw.Prioritized(rank_based=True, stratified=False, normalize="buffer", mix=0.1, new_rows=2.5)},
    "recent": {"sampler": sw.Recent(20)},
    "shuffle": {"sampler": sw.Shuffle()},
    "fifo": {"sampler": sw.Fifo(max_reads=2)},
    "lifo": {"sampler": sw.Lifo(max_reads=None)},
    "n_step": {"view": sw.Transitions(n_step=3, gamma=0.9, truncated=True)},
    "windows": {"view": sw.Windows(5, burn_in=2, bootstrap=1, stride=2, end="stop", n_step=2, place_indices=True)},
    "episodes": {"view": sw.Windows(4, start="per_episode", end="cross")},
    "derived": {"next_obs": "derived", "view": sw.Transitions(n_step=2)},
    "stacks": {"schema": {"obs": sw.Field((3,), "uint8", stack=4, padding="zero"), "action": sw.Field()}},
    "derived stacks": {
        "schema": {"obs": sw.Field((3,), "uint8", stack=3), "action": sw.Field()},
        "next_obs": "derived",
    },
    "compressed": {"schema": {"obs": sw.Field((600,), "int16", compression="lz4"), "action": sw.Field()}},
    "nested": {"schema": NESTED},
    "mutable": {"schema": {"obs": sw.Field((2,)), "state": sw.Field((3,), mutable=True)}},
    "envs": {"num_envs": 2, "sampler": sw.Prioritized()},
    "agents": {
        "schema": {"obs": sw.Field((2, 3)), "reward": sw.Field((2,)), "done": sw.Field((2,), "bool")},
        "view": sw.Transitions(n_step=3),
    },
    "pace": {"pace": sw.Pace.samples_per_insert(50, min_size=4, error=10_000)},
}


def leaves(value, path=""):
    """The arrays of a row or a batch by path, as C++ names them."""
    if isinstance(value, (dict, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            name: leaf
            for key, part in parts
            for name, leaf in leaves(part, f"{path}/{key}" if path else str(key)).items()
        }
    return {path: value}


OPTIONS = {"capacity": 64, "seed": 3, "schema": {"obs": sw.Field((3,)), "action": sw.Field((), "int32")}}


def steps(schema, rng, count, width):
    """Rows of a schema, with ends of episodes and steps that were masked out."""

    def value(node, name, lead):
        if isinstance(node, dict):
            return {key: value(part, name, lead) for key, part in node.items()}
        if isinstance(node, tuple):
            return tuple(value(part, name, lead) for part in node)
        if name == "done":
            return rng.random((*lead, *node.shape)) < 0.1
        return rng.integers(0, 100, (*lead, *node.shape)).astype(node.dtype)

    for _ in range(count):
        lead = () if width is None else (width,)
        row = {name: value(node, name, lead) for name, node in schema.items()}
        yield row | {"truncated": rng.random(lead) < 0.05, "mask": rng.random(lead) < (1.0 if width is None else 0.9)}


def compare(twin: sw.ReplayBuffer, shared: sw.ReplayBuffer, probe: Probe) -> None:
    """Python adds to and draws from `twin` what C++ adds to and draws from `shared`: rows and draws are the same."""
    rng = np.random.default_rng(0)
    by_priority = isinstance(twin.sampler, sw.Prioritized)
    for number, row in enumerate(steps(twin.schema, rng, 90, twin.num_envs)):
        if number % 3 == 0 and by_priority:
            row["priority"] = rng.random(np.shape(row["mask"]), np.float32)
        twin.add(**row)
        probe.add(**{name.replace("/", "__"): leaf for name, leaf in leaves(row).items()})
        if number < 30 or number % 4:
            continue
        ours, theirs = leaves(twin.sample(6)), probe.sample(6)
        assert sorted(ours) == sorted(theirs)
        for name, array in ours.items():
            assert np.asarray(theirs[name]).dtype == array.dtype
            np.testing.assert_array_equal(theirs[name], array, err_msg=name)
        if by_priority:
            errors = rng.normal(size=6).astype(np.float32)
            done = twin.update_priorities(ours["indices"], errors)
            assert probe.update(ours["indices"], errors) == (done["applied"], done["stale"])
    assert probe.size() == len(twin) == len(shared)
    for ours, theirs in zip(twin.rows(batch_size=32), shared.rows(batch_size=32), strict=True):
        for name, array in leaves(ours).items():
            np.testing.assert_array_equal(leaves(theirs)[name], array, err_msg=name)
