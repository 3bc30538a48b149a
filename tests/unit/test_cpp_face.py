"""A C++ program and Python share a buffer: the rows that one adds the other draws, and both draw the same.

tests/cpp/test_open.cpp has the calls of the C++ interface one by one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import sharpwave as sw
from tests.cpp_programs import CppError, Probe, program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how-to/use-from-cpp.md"
CART = {"obs": sw.Field((4,)), "action": sw.Field((), "int64")}


def run(path, *words):
    done = subprocess.run([path, *map(str, words)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_learner_draws_what_a_cpp_actor_adds(shm_address):
    (actor,) = program("actor")
    with sw.ReplayBuffer(1000, schema=CART, storage=shm_address) as buf:
        assert run(actor, shm_address, 300) == "added 300 rows; the buffer has 300 of 1000\n"
        rows = next(buf.rows(batch_size=300))
        assert rows["action"].tolist() == [int(step % 3 == 0) for step in range(300)]
        ends = rows["done"] | rows["truncated"]
        assert ends[:-1].any()
        assert ends[-1]  # an open episode ends with its program
        inside = ~ends[:-1]
        np.testing.assert_array_equal(rows["next_obs"][:-1][inside], rows["obs"][1:][inside])
        batch = buf.sample(64)
        np.testing.assert_array_equal(batch["obs"], rows["obs"][batch["indices"]])


def test_cpp_learner_draws_what_a_python_actor_adds(shm_address):
    (learner,) = program("learner")
    twin = sw.ReplayBuffer(1000, schema=CART, sampler=sw.Prioritized(), seed=5)
    with sw.ReplayBuffer(1000, schema=CART, sampler=sw.Prioritized(), seed=5, storage=shm_address) as buf:
        for step in range(200):
            for to in (buf, twin):
                to.add(
                    obs=np.full(4, step), action=step, reward=step, next_obs=np.full(4, step + 1), done=step % 9 == 8
                )
        said = run(learner, shm_address, 3, 16)
        assert "field action <i8\n" in said
        for line in re.findall(r"batch \d: (.*)", said):
            batch = twin.sample(16)
            twin.update_priorities(batch["indices"], 1.0 + np.arange(16, dtype=np.float32))
            rows = " ".join(map(str, batch["indices"].tolist()))
            assert line == f"rows {rows}; sum of rewards {batch['reward'].sum(dtype=float):.6f}"
        assert buf.stats()["updates_applied"] == twin.stats()["updates_applied"]


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


@pytest.mark.parametrize("case", CASES)
def test_cpp_adds_and_draws_as_python_does(case, shm_address):
    options = {"schema": {"obs": sw.Field((3,)), "action": sw.Field((), "int32")}} | CASES[case]
    twin = sw.ReplayBuffer(64, seed=3, **options)
    shared = sw.ReplayBuffer(64, seed=3, storage=shm_address, **options)
    rng = np.random.default_rng(0)
    with shared, twin, Probe(shm_address) as probe:
        for number, row in enumerate(steps(twin.schema, rng, 90, options.get("num_envs"))):
            if number % 3 == 0 and "sampler" in options and "Prioritized" in repr(options["sampler"]):
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
            if "weights" in ours:
                errors = rng.normal(size=6).astype(np.float32)
                done = twin.update_priorities(ours["indices"], errors)
                assert probe.update(ours["indices"], errors) == (done["applied"], done["stale"])
        assert probe.size() == len(twin) == len(shared)
        for ours, theirs in zip(twin.rows(batch_size=32), shared.rows(batch_size=32), strict=True):
            for name, array in leaves(ours).items():
                np.testing.assert_array_equal(leaves(theirs)[name], array, err_msg=name)


def test_cpp_reads_and_writes_observations_of_different_lengths(tmp_path):
    schema = {"obs": sw.Field((6, 2), "float32", ragged=True), "action": sw.Field()}
    address = f"file://{tmp_path / 'ragged.sw'}"
    rng = np.random.default_rng(1)
    with (
        sw.ReplayBuffer(64, schema=schema, seed=2) as twin,
        sw.ReplayBuffer(64, schema=schema, seed=2, storage=address),
        Probe(address) as probe,
    ):
        for rows in (1, 3, 1, 4, 2, 5) * 3:
            obs, after = ([rng.random((rng.integers(0, 7), 2), np.float32) for _ in range(rows)] for _ in range(2))
            rest = {"action": np.arange(rows, dtype=np.float32), "reward": np.ones(rows, np.float32)}
            rest["done"] = np.zeros(rows, bool)
            twin.add(obs=obs, next_obs=after, **rest)
            probe.add(obs=obs, next_obs=after, **rest)
        ours, theirs = twin.sample(20), probe.sample(20)
        np.testing.assert_array_equal(theirs["indices"], ours["indices"])
        for name in ("obs", "next_obs"):
            offsets = ours[name]["offsets"]
            for i, items in enumerate(theirs[name]):
                np.testing.assert_array_equal(items, ours[name]["values"][offsets[i] : offsets[i + 1]].reshape(-1))
        probe.ask("flush")


def test_views_with_python_functions_are_refused_by_name(shm_address):
    schema = {"obs": {"achieved_goal": sw.Field((2,)), "desired_goal": sw.Field((2,))}, "action": sw.Field()}
    view = sw.Transitions(hindsight=sw.Hindsight("future", 0.8, reward_of_goals))
    refusal = pytest.raises(CppError, match=r"a function of Python \(.*:reward_of_goals\); C\+\+ cannot call it")
    with sw.ReplayBuffer(64, schema=schema, view=view, storage=shm_address), refusal:
        Probe(shm_address)


def reward_of_goals(achieved, desired):
    return -np.abs(achieved - desired).max(axis=-1)


def test_every_block_of_the_page_compiles(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    blocks = re.findall(r"^```cpp\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    headers = ["<array>", "<cstdio>", "<vector>", *re.findall(r"#include (.*)", "".join(blocks))]
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith("#include")]
    main = ["int main() {", 'sharpwave::Buffer clouds = sharpwave::open("shm://clouds");', *lines, "}"]
    (tmp_path / "page.cpp").write_text("\n".join([*(f"#include {header}" for header in headers), *main]))
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unused-variable"]
    folders = [f"-I{ROOT / 'core'}", f"-I{ROOT / 'core/include'}"]
    done = subprocess.run([compiler, *flags, *folders, tmp_path / "page.cpp"], capture_output=True, text=True)
    assert len(blocks) >= 5
    assert done.returncode == 0, done.stderr


def test_killed_cpp_actor_leaves_its_rows_and_a_truncated_episode(shm_address):
    with sw.ReplayBuffer(1000, schema=CART, storage=shm_address, view=sw.Transitions(truncated=True)) as buf:
        with Probe(shm_address) as probe:
            for step in range(20):
                obs = np.full(4, step, np.float32)
                probe.add(obs=obs, action=np.int64(step), reward=np.float32(1), next_obs=obs, done=np.bool_(False))
        buf.stats()  # gives back what the dead process held
        rows = next(buf.rows(batch_size=100))
        assert rows["action"].tolist() == list(range(20))
        assert rows["truncated"].tolist() == [False] * 19 + [True]
