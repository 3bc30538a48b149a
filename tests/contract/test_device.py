"""The contract on a GPU: the same calls as on the host. Uniform draws give the same bytes; draws by priority follow the
same law, with the same rows behind the same serials."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.cases import CAPACITY, SAMPLERS, WIDTH, Environments, flatten, script
from contract.device_place import HAS_GPU, PLACES, SOAK, device_of, here, on_device

import sharpwave as sw
from sharpwave.errors import SchemaError
from sharpwave.rows import transfer

VIEWS = {"one step": sw.Transitions(), "three steps": sw.Transitions(n_step=3, gamma=0.9, truncated=True)}
ON_DEVICE = ["Uniform()", "Uniform(newest=2)", "Prioritized()"]
MORE = {
    "Prioritized(newest=2, mix=0.25)": sw.Prioritized(newest=2, mix=0.25, stratified=False, normalize="buffer"),
    "Prioritized(running_max)": sw.Prioritized(alpha=0.5, new_rows="running_max", normalize="none"),
    "Prioritized(new_rows=2.0)": sw.Prioritized(alpha=1.0, eps=0.0, new_rows=2.0),
}
ALL = {name: SAMPLERS[name] for name in ON_DEVICE} | MORE


def to_host(buffer: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer._over(transfer.to_host(buffer._rows))


def to_device(buffer: Any, device: str) -> sw.ReplayBuffer:
    return sw.ReplayBuffer._over(transfer.to_device(buffer._rows, device))


def settings(sampler: str, view: str) -> dict[str, Any]:
    seen = {"seen": sw.Field((12, 8), "uint8"), "state": sw.Field((3,))}
    return {
        "schema": {"obs": seen, "action": sw.Field((), "int64")},
        "sampler": ALL[sampler],
        "view": VIEWS[view],
        "num_envs": WIDTH,
        "writers": 2,
        "seed": 7,
    }


def pair(place: str, sampler: str, view: str) -> tuple[sw.ReplayBuffer, sw.ReplayBuffer]:
    options = settings(sampler, view)
    return sw.ReplayBuffer(CAPACITY, **options), on_device(CAPACITY, device=device_of(place), **options)


def values(call: tuple[Any, ...]) -> dict[str, Any]:
    keep = {name: call[1][name] for name in call[1]}
    for name in ("obs", "next_obs"):
        keep[name] = {part: keep[name][part] for part in ("seen", "state")}
    return keep


def drawn_alike(host: dict[str, Any], device: dict[str, Any]) -> None:
    assert flatten(here(device)) == flatten(host)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", ["Uniform()", "Uniform(newest=2)"])
def test_uniform_draws_are_the_hosts_to_the_byte(place: str, sampler: str, view: str) -> None:
    host, device = pair(place, sampler, view)
    batch = None
    for call in script(False):
        if call[0] == "add":
            serials = host.add(**values(call), return_indices=True)
            told = device.add(**values(call), return_indices=True)
            assert told.device == device.device
            drawn_alike({"added": serials}, {"added": told})
        elif call[0] == "sample":
            batch = host.sample(call[1])
            drawn_alike(batch, device.sample(call[1]))
        elif call[0] == "clear":
            host.clear()
            device.clear()
        elif call[0] == "rows":
            for one, other in zip(host.rows(7), device.rows(7), strict=True):
                drawn_alike(one, other)
        elif call[0] == "get":
            serials = [serial for part in host.rows() for serial in part["indices"]][-3:]
            drawn_alike(host.get(serials), device.get(serials))
    one, other = host.stats(), device.stats()
    for name in ("size", "rows_added", "rows_voided", "episodes", "rows_sampled", "sample_calls", "redraws"):
        assert one[name] == other[name], name
    assert len(host) == len(device)


# Kernels take seconds in Triton's interpreter: of the samplers that differ by one setting, one view is enough there.
BY_PRIORITY = [name for name in ALL if name.startswith("Prioritized")]
LAWS = [(sampler, view) for sampler in BY_PRIORITY for view in VIEWS]
FEWER_LAWS = [law for law in LAWS if law[0] == BY_PRIORITY[0] or law[1] == list(VIEWS)[-1]]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("sampler", "view"), LAWS if HAS_GPU or SOAK else FEWER_LAWS)
def test_draws_by_priority_have_the_hosts_law(place: str, sampler: str, view: str) -> None:
    """The host's own priorities tell what each row's probability and weight must be."""
    host, device = pair(place, sampler, view)
    newest = ALL[sampler].newest
    for turn, call in enumerate(script(True)):
        if call[0] == "add":
            host.add(**values(call))
            device.add(**values(call))
        elif call[0] == "sample":
            of_host, batch = host.sample(call[1]), here(device.sample(call[1]))
            assert batch.keys() == of_host.keys()
            np.testing.assert_array_equal(batch["indices"][:newest], of_host["indices"][:newest])
            expected = probabilities(host)
            for serial, chance in zip(batch["indices"][newest:], batch["probabilities"][newest:], strict=True):
                assert chance == pytest.approx(expected[serial], rel=1e-6)
            np.testing.assert_allclose(batch["weights"], weights(host, batch, expected, newest), rtol=1e-5)
            rows = here(device.get(batch["indices"]))
            np.testing.assert_array_equal(rows["obs"]["state"], batch["obs"]["state"])
            for name in ("action", "obs"):
                assert flatten(host.get(batch["indices"])[name]) == flatten(batch[name])
            serials = np.concatenate([of_host["indices"], batch["indices"], [10**6]])
            errors = np.random.default_rng(turn).normal(size=len(serials)).astype(np.float32)
            told = host.update_priorities(serials, errors)
            assert {name: int(n) for name, n in device.update_priorities(serials, errors).items()} == told
        elif call[0] == "tune":
            host.tune(alpha=call[1])
            device.tune(alpha=call[1])
        elif call[0] == "clear":
            host.clear()
            device.clear()
    assert host.stats()["updates_applied"] == device.stats()["updates_applied"]
    assert host.stats()["updates_stale"] == device.stats()["updates_stale"]
    assert str(host.sampler) == str(device.sampler)


def probabilities(host: sw.ReplayBuffer) -> dict[int, float]:
    sampler: Any = host.sampler
    serials = host._rows.table.live_serials()
    priorities = np.empty(len(serials), np.float32)
    host._rows.table.priorities_of(serials, priorities)
    masses = ((priorities.astype(np.float64) + sampler.eps) ** sampler.alpha).astype(np.float32).astype(np.float64)
    chance = masses / masses.sum() * (1 - sampler.mix) + sampler.mix / len(serials)
    return dict(zip(serials.tolist(), chance.tolist(), strict=True))


def weights(host: sw.ReplayBuffer, batch: Any, expected: dict[int, float], newest: int) -> Any:
    sampler: Any = host.sampler
    chances = batch["probabilities"]
    reference = 1 / len(expected)
    if sampler.normalize == "batch":
        reference = chances[newest:].min()
    if sampler.normalize == "buffer":
        reference = min(expected.values())
    call = host.stats()["sample_calls"] - 1
    beta = sampler.beta
    if isinstance(beta, sw.Linear):
        beta = beta.start + (beta.end - beta.start) * min(1.0, call / beta.steps)
    made = (chances / reference) ** -beta
    made[:newest] = 1
    return made


@pytest.mark.parametrize("place", PLACES)
def test_many_draws_by_priority_come_as_often_as_they_should(place: str) -> None:
    device = on_device(200, obs_shape=(2,), device=device_of(place), sampler=sw.Prioritized(alpha=1.0), seed=3)
    row = np.arange(150, dtype=np.float32)
    device.add(np.stack([row, row], 1), row, row, np.stack([row, row], 1), row < 0)
    priorities = np.random.default_rng(0).exponential(size=150).astype(np.float32)
    priorities[::7] = 0
    device.update_priorities(np.arange(150), priorities)
    counts = np.zeros(150)
    rounds = 400 if place == "cuda" else 5
    for _ in range(rounds):
        batch = here(device.sample(512))
        np.add.at(counts, batch["indices"], 1)
    expected = (priorities + 1e-6) / (priorities + 1e-6).sum() * counts.sum()
    large = expected > 5
    squares = (counts[large] - expected[large]) ** 2 / expected[large]
    assert squares.sum() < large.sum() + 5 * np.sqrt(2 * large.sum())
    assert counts[::7].sum() <= 5


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", ALL)
def test_what_was_saved_and_opened_goes_on(place: str, sampler: str, view: str, tmp_path: Path) -> None:
    """From a GPU through a file to a GPU and to the host: the same rows, serials, counters, priorities, draws."""
    device = device_of(place)
    host, first = pair(place, sampler, view)
    environments = Environments()
    for turn in range(9):
        call = ("add", environments.add(1 + turn % 4, ends=turn == 8))
        for buffer in (host, first):
            if turn == 3:
                buffer.clear()
            buffer.add(**values(call))
        first.sample(4)
        host.sample(4)
        if "Prior" in sampler and turn > 3:
            serials = host._rows.table.live_serials()[:5]
            for buffer in (host, first):
                buffer.update_priorities(serials, np.arange(5.0) + turn)
    first.save(tmp_path / "snapshot")
    loaded = sw.open(tmp_path / "snapshot")
    again = to_device(loaded, device) if device == "cpu" else sw.open(tmp_path / "snapshot", device=device)
    assert again.device.type == device_of(place)
    for one, other in zip(host.rows(), loaded.rows(), strict=True):
        drawn_alike(one, other)
    for one, other in zip(host.rows(), again.rows(), strict=True):
        drawn_alike(one, other)
    counted = ("size", "rows_added", "rows_voided", "episodes", "rows_sampled", "sample_calls")
    for name in counted + (("updates_applied", "updates_stale") if "Prior" in sampler else ()):
        assert host.stats()[name] == loaded.stats()[name] == again.stats()[name], name
    if "Prior" in sampler:
        assert probabilities(host) == probabilities(loaded)
        assert flatten(here(first.sample(16))) == flatten(here(again.sample(16)))
    else:
        batch = host.sample(16)
        for buffer in (first, loaded, again):
            drawn_alike(batch, buffer.sample(16))
    call = ("add", environments.add(4))
    host.add(**values(call))
    for buffer in (loaded, again):
        buffer.add(**values(call))
        for one, other in zip(host.rows(), buffer.rows(), strict=True):
            drawn_alike(one, other)


@pytest.mark.parametrize("place", PLACES)
def test_table_of_several_writers_comes_to_the_device_without_joining_their_episodes(place: str) -> None:
    device = device_of(place)
    host = sw.ReplayBuffer(64, obs_shape=(1,), view=sw.Transitions(n_step=4, gamma=0.5), num_envs=1, writers=4, seed=1)
    with host.writer() as one, host.writer() as other:
        for step, writer in itertools.product(range(40), (one, other)):
            name = np.float32(step + (1000 if writer is other else 0))
            writer.add([[name]], [0.0], [name], [[name + 1]], [False])
    buffer = to_device(host, device)
    rows = {int(s) for part in host.rows() for s in part["indices"]}
    assert {int(s) for part in buffer.rows() for s in here(part["indices"])} <= rows
    for _ in range(20):
        batch = here(buffer.sample(32))
        first, last = batch["obs"][:, 0], batch["next_obs"][:, 0]
        steps = np.round(np.log(batch["discount"]) / np.log(0.5))
        np.testing.assert_array_equal(last - first, steps)
    with to_host(buffer) as back:
        assert len(back) == len(buffer)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sampler": sw.Fifo()}, "Uniform.. or Prioritized"),
        ({"sampler": sw.Uniform(max_reads=2)}, "max_reads"),
        ({"sampler": sw.Prioritized(rank_based=True)}, "rank_based"),
        ({"view": sw.Windows(3)}, "Transitions"),
        ({"next_obs": "derived"}, "stored"),
        ({"pace": sw.Pace.min_size(3)}, "no pace"),
        ({"storage": "shm://never"}, "no storage"),
        ({"schema": {"obs": sw.Field((3,), stack=2), "action": sw.Field()}, "obs_shape": None}, "plain fields"),
    ],
)
def test_what_only_the_host_can_do_is_refused(options: dict[str, Any], what: str) -> None:
    device = "cuda" if HAS_GPU else "cpu"
    with pytest.raises(SchemaError, match=what):
        on_device(8, device=device, **({"obs_shape": (3,)} | options))
