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
from cpp_cases import CASES, OPTIONS, compare
from cpp_programs import CppError, Probe, program

import sharpwave as sw

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


@pytest.mark.parametrize("case", CASES)
def test_cpp_adds_and_draws_as_python_does(case, shm_address):
    with (
        sw.ReplayBuffer(**OPTIONS | CASES[case]) as twin,
        sw.ReplayBuffer(**OPTIONS | CASES[case], storage=shm_address) as shared,
        Probe(shm_address) as probe,
    ):
        compare(twin, shared, probe)


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
