"""Properties of whole runs in simulated time: what holds whatever dies, and how long a run takes."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_system import System, coin_agent
from staleness_reference import async_step_s, sync_step_s

from sharpwave.errors import NotReady
from sharpwave.llm.permits import derive_seed
from sharpwave.llm.simulation import Costs, log_normal_lengths, simulate, simulate_steps

ROLES = ("controller", "learner", "generator", "worker0", "worker1", "reference")
ROLE = st.sampled_from(ROLES)
# Alone, or several at nearly one moment: while the first is being started again.
CLUSTER = st.tuples(
    st.floats(0, 1.5), st.lists(st.tuples(st.sampled_from([0.0, 1e-3, 2e-2, 5e-2, 6e-2]), ROLE), max_size=5)
)
DEATHS = st.one_of(
    st.lists(st.tuples(st.floats(0, 1.5), ROLE), max_size=20).map(sorted),
    st.lists(CLUSTER, max_size=6).map(lambda all_: sorted((at + gap, role) for at, near in all_ for gap, role in near)),
)


def run(limit_s=120.0, outside_s=1e-3, agent_of=None, **options):
    """A run to its end: the system and what the controller counted. `agent_of` gives the agent of a system."""

    async def main(clock):
        with tempfile.TemporaryDirectory() as folder:
            system = System(clock, Path(folder), **options)
            system.agent = system.agent if agent_of is None else agent_of(system)
            await asyncio.wait_for(system.run(), limit_s)
            controller = system.link.controller
            counted = controller.stats()
            controller.close()
            return system, counted

    return simulate(main, outside_s=outside_s)


@settings(max_examples=60)
@given(
    deaths=DEATHS,
    max_staleness=st.integers(0, 3),
    stale=st.sampled_from(["mask", "drop"]),
    batch=st.integers(1, 5),
    save_every=st.integers(1, 4),
    seed=st.integers(0, 1000),
    outside_s=st.sampled_from([0.0, 1e-3, 0.1]),
    train_s=st.sampled_from([1e-3, 2e-2]),
    reference_s=st.sampled_from([None, 1e-3, 5e-2]),
    restart_s=st.sampled_from([0.0, 5e-2, 0.3]),
    save_s=st.sampled_from([0.0, 5e-2]),
)
@example(
    deaths=[(0.1, "learner")], max_staleness=2, stale="mask", batch=3, save_every=2, seed=0, outside_s=0.0,
    train_s=2e-2, reference_s=None, restart_s=5e-2, save_s=0.0,
)  # fmt: skip
@example(
    deaths=[], max_staleness=1, stale="drop", batch=1, save_every=2, seed=0, outside_s=0.1, train_s=1e-3,
    reference_s=None, restart_s=5e-2, save_s=0.0,
)  # fmt: skip
@example(
    deaths=[(0.1, "reference"), (0.2, "learner"), (0.3, "controller")], max_staleness=2, stale="drop", batch=3,
    save_every=3, seed=0, outside_s=1e-3, train_s=2e-2, reference_s=1e-3, restart_s=5e-2, save_s=0.0,
)  # fmt: skip
@example(
    deaths=[(0.0, "controller")] * 5 + [(0.5, "controller")], max_staleness=0, stale="mask", batch=1, save_every=1,
    seed=0, outside_s=0.0, train_s=1e-3, reference_s=5e-2, restart_s=5e-2, save_s=0.0,
)  # fmt: skip
@example(
    deaths=[
        (0.0, "controller"), (0.036, "reference"), (0.042, "learner"), (0.5, "worker1"), (0.5, "worker1"),
        (0.5, "worker1"), (1.0164, "controller"), (1.0167, "controller"), (1.066, "controller"), (1.497, "controller"),
    ],
    max_staleness=3, stale="mask", batch=4, save_every=3, seed=1000, outside_s=0.1, train_s=2e-2, reference_s=5e-2,
    restart_s=5e-2, save_s=0.0,
)  # fmt: skip
@example(
    deaths=[(0.0962, "worker0"), (0.5567, "controller"), (0.9631, "controller")], max_staleness=2, stale="drop",
    batch=2, save_every=3, seed=67451, outside_s=1e-3, train_s=2e-2, reference_s=None, restart_s=0.0, save_s=0.3,
)  # fmt: skip
@example(
    deaths=[(0.25, "controller"), (1.0, "controller")], max_staleness=0, stale="mask", batch=5, save_every=3, seed=5,
    outside_s=1e-2, train_s=0.1, reference_s=None, restart_s=0.0, save_s=0.1,
)  # fmt: skip
def test_every_item_is_trained_once_an_epoch_whatever_dies(max_staleness, batch, reference_s, train_s, **options):
    bounds = {"max_staleness": max_staleness, "batch": batch, "reference_s": reference_s}
    system, counted = run(costs=Costs(decode_s=1e-3, train_s=train_s), **bounds, **options)
    learnt = Counter(system.learner.learnt)  # by the weights that are left, without what dead learners had learnt
    assert max(learnt.values(), default=1) == 1
    assert system.learner.keys >= ({"ref_logprobs"} if reference_s is not None and system.learner.ends else set())
    assert len(learnt) == counted["trained"]
    assert counted["trained"] + counted["no_signal"] + counted["rejected"] == system.items * system.epochs
    assert counted["rejected"] == 0
    assert counted["running"] == counted["buffer"]["size"] == 0
    assert system.highest <= (max_staleness + 1) * batch  # started and not trained, whenever an item started
    assert max(system.learner.staleness, default=0) <= max_staleness  # of the tokens that were trained on
    assert system.learner.saved[0].step == counted["step"] == system.tasks["learner"].result()
    assert not system.learner.untaught  # no item counts as trained whose tokens are all too old
    assert system.weights.versions == sorted(set(system.weights.versions))


@settings(max_examples=10)
@given(
    deaths=st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from(["generator", "worker0", "worker1"])), max_size=4),
    max_staleness=st.integers(0, 2),
)
def test_a_run_that_cannot_go_on_says_so(deaths, max_staleness):
    """Dead processes stay dead: the run ends, or the watchdog says who waits for whom."""
    said = ""
    try:
        _, counted = run(deaths=sorted(deaths), max_staleness=max_staleness, restarts=False, watchdog_s=5.0)
        said = f"{counted['trained'] + counted['no_signal']} items settled"
    except NotReady as error:
        said = str(error)
    stands = bool(deaths) and "nothing has moved for watchdog_s=5: The learner waits for" in said
    assert stands or said == "24 items settled"


@settings(max_examples=20)
@given(
    deaths=DEATHS, max_staleness=st.integers(0, 2), batch=st.integers(1, 5), reference_s=st.sampled_from([None, 1e-3])
)
def test_a_run_that_has_nothing_left_to_learn_ends_in_order_whatever_dies(deaths, **options):
    def agent_of(system):
        async def agent(item, generate):
            """Answers are right as soon as a checkpoint says that items were trained; no death takes that back."""
            episode, saved = await coin_agent(item, generate), system.learner.saved
            if saved is not None and saved[0].position["outcomes"].get("trained", 0) > 5:
                episode.reward = 1.0
            return episode

        return agent

    system, counted = run(deaths=deaths, agent_of=agent_of, epochs=None, **options)
    assert counted["running"] == counted["buffer"]["size"] == 0
    assert "nothing is left to learn from" in system.link.controller.why_over
    assert counted["trained"] == len(set(system.learner.learnt)) == len(system.learner.learnt)
    assert system.learner.saved[0].step == counted["step"] == system.tasks["learner"].result()
    said = system.learner.saved[0].position
    assert (said["outcomes"]["trained"], said["open"]) == (counted["trained"], {})


def test_synchronous_training_is_no_staleness_at_all():
    system, counted = run(max_staleness=0, items=20, follow_s=0.05)  # agents would be first, if they did not wait
    assert set(system.learner.staleness) == {0}
    assert counted["buffer"]["stale_tokens"] == 0  # nothing was masked
    system, _ = run(max_staleness=3, items=20)
    assert max(system.learner.staleness) > 0  # else the test above would say nothing


def test_dropped_items_are_made_again():
    lengths = Costs(decode_s=5e-3, train_s=1e-3)  # answers outlive versions
    options = {"stale": "drop", "max_staleness": 1, "batch": 2, "items": 20, "costs": lengths, "concurrent": 4}
    system, counted = run(**options)
    stale = [line for line in system.log.lines if '"event": "stale"' in line]
    assert stale
    assert counted["trained"] + counted["no_signal"] == 40
    assert max(system.learner.staleness) <= 1


def log_of(seed):
    deaths = [(0.11, "worker0"), (0.2, "controller"), (0.31, "learner"), (0.5, "generator"), (0.7, "worker1")]
    system, _ = run(deaths=deaths, seed=seed)
    return "\n".join(system.log.lines)


def test_equal_seeds_give_equal_logs():
    """Byte by byte, also in another process, whose sets have another order."""
    mine = log_of(3)
    assert mine == log_of(3)
    assert mine != log_of(4)
    code = "import sys, test_simulated_runs; sys.stdout.write(test_simulated_runs.log_of(3))"
    there = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=there, check=True).stdout
        == mine
    )


def lengths_of(count, length):
    return [length(derive_seed(derive_seed(derive_seed(0, f"0/{place}", 0), 0, 0), 0)) for place in range(count)]


@pytest.mark.parametrize("sigma", [1.0, 0.3])
def test_a_run_takes_as_long_as_the_cost_model_says(sigma):
    batch, steps, warm, costs = 48, 12, 4, Costs()
    length = log_normal_lengths(sigma=sigma)
    common = {"batch": batch, "steps": steps, "warm_steps": warm, "length": length}
    sync = simulate_steps(slots=batch, max_staleness=0, **common).step_s
    told = sync_step_s(lengths_of(batch * steps, length)[warm * batch :], batch, costs)
    assert told <= sync < told + 2e-3  # workers look for a new version once a millisecond
    overlapped = simulate_steps(slots=2 * batch, max_staleness=4, **common).step_s
    told = async_step_s(lengths_of(batch * steps * 2, length), batch, 2 * batch, 4, steps, costs, warm)
    assert overlapped == pytest.approx(told, rel=0.15)  # chunks that overlap the end of a step differ
    assert sync / overlapped > (3 if sigma == 1.0 else 1.3)
