"""Everything combines: each pair of values in the table of docs/how-to/combinations.md is given a short real stream,
and every sampler and view with each value of the other axes; or it has no meaning, and the constructor says why."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from oracle import leaf_in
from order_model import Draw, OrderPair, Single, Slices
from replay_model import Pair, assert_leaf

import sharpwave as sw
from sharpwave.errors import SchemaError


def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    return (achieved.astype(np.int64) - desired).sum(axis=1) % 1009


SAMPLERS: dict[str, Draw] = {
    "Uniform()": Draw(),
    "Uniform(newest=2)": Draw(newest=2),
    "Uniform(max_reads=2)": Draw(max_reads=2),
    "Prioritized()": Draw("Prioritized"),
    "Prioritized(rank_based=True)": Draw("Prioritized", settings={"rank_based": True}),
    "Recent(5)": Draw("Recent", n=5),
    "Shuffle()": Draw("Shuffle"),
    "Fifo()": Draw("Fifo", max_reads=1),
    "Lifo()": Draw("Lifo", max_reads=1),
}
VIEWS: dict[str, Single | Slices] = {
    "Transitions()": Single(),
    "Transitions(n_step=3, truncated=True)": Single(n_step=3, truncated=True),
    "Transitions(hindsight=...)": Single(hindsight={"strategy": "future", "ratio": 0.8, "reward": reward}),
    "Windows(3, burn_in=2, bootstrap=1)": Slices(3, burn_in=2, bootstrap=1),
    "Windows(3, stride=2, end='stop')": Slices(3, stride=2, end="stop"),
    "Windows(3, end='cross', truncated=True)": Slices(3, end="cross", truncated=True),
    "Windows(3, n_step=2, place_indices=True)": Slices(3, n_step=2, place_indices=True),
    "Windows(3, start='episode')": Slices(3, start="episode"),
    "Windows(3, start='per_episode')": Slices(3, start="per_episode"),
}
NEXT_OBS = ("stored", "derived", None)
STACKS = (1, 4)
COMPRESSIONS = (None, "lz4", "zstd")
RAGGED = (False, True, "padded")
NUM_ENVS = (None, 1, 3)
STORAGES = ("memory", "shm", "file")
PACES = (None, "Pace(...)")

CAPACITY = 9
CELLS = 12  # of each sampler and view
# Ends of every kind, a reset that nobody flags, masked steps; one and a half laps, newest episode open.
STREAM = "..T..U.R.M...B.."


class Cell(NamedTuple):
    next_obs: str | None
    kind: tuple[int, Any]  # stack and ragged
    compression: str | None
    num_envs: int | None
    storage: str
    pace: str | None


KINDS = [(stack, ragged) for stack, ragged in itertools.product(STACKS, RAGGED) if stack == 1 or not ragged]


def has_meaning(sampler: str, view: str) -> bool:
    return "start='per_episode'" not in view or sampler.startswith("Uniform")


def cells_of(sampler: str, view: str) -> list[Cell]:
    """Every value of every axis comes as often as any other; which come together is drawn."""
    stream = random.Random(f"{sampler} {view}")
    hindsight = "hindsight" in view
    axes = (NEXT_OBS[:2] if hindsight else NEXT_OBS, KINDS, COMPRESSIONS, NUM_ENVS, STORAGES, PACES)
    columns = []
    for values in axes:
        column = list(itertools.islice(itertools.cycle(values), CELLS))
        stream.shuffle(column)
        columns.append(column)
    return [Cell(*values) for values in zip(*columns, strict=True)]


def field(stack: int, compression: str | None, ragged: Any) -> sw.Field:
    return sw.Field((6, 2), "uint8", stack=stack, compression=compression, ragged=ragged)


def make_pair(sampler: str, view: str, cell: Cell, address: str | None) -> Pair:
    (stack, ragged), draw, shape = cell.kind, SAMPLERS[sampler], VIEWS[view]
    obs = {"seen": field(stack, cell.compression, ragged), "state": sw.Field((2,))}
    options: dict[str, Any] = {"next_obs": cell.next_obs, "num_envs": cell.num_envs, "storage": address, "writers": 2}
    if cell.pace:
        options["pace"] = sw.Pace.samples_per_insert(10.0, min_size=1, error=1e6)  # asks and counts, and never waits
    capacity = CAPACITY * (cell.num_envs or 1)
    is_plain = draw.kind == "Prioritized" or draw == Draw()
    if is_plain and isinstance(shape, Single) and not shape.hindsight:
        prioritized = draw.settings if draw.kind == "Prioritized" else None
        schema = {"obs": obs, "action": sw.Field((2,))}
        asked = {"n_step": shape.n_step, "truncated": shape.truncated}
        return Pair(capacity, schema, prioritized=prioritized, **asked, **options)
    if isinstance(shape, Single) and shape.hindsight:
        obs |= {"achieved_goal": sw.Field((2,), "int32"), "desired_goal": sw.Field((2,), "int32")}
    pair = OrderPair(capacity, {"obs": obs, "action": sw.Field((2,))}, view=shape, draw=draw, **options)
    if cell.pace:
        # Where every row was read out, a sample would wait for somebody to add.
        pair.buffer.sample = functools.partial(pair.buffer.sample, timeout=0)  # type: ignore[method-assign]
    return pair


def walk(pair: Pair, num_envs: int | None) -> None:
    """The stream, and at every few steps all rows and a batch against the model."""
    width = num_envs or 1
    stream = np.random.default_rng(0)
    given = pair.model.prioritized is not None
    for i, code in enumerate(STREAM):
        # Environments are at different places of the stream.
        letters = "".join(STREAM[(i + 5 * env) % len(STREAM)] for env in range(width)) if width > 1 else code
        lead: tuple[int, ...] = () if num_envs is None else (width,)
        priority = stream.lognormal(size=width).tolist() if given and i % 3 == 0 else None
        pair.add(letters, lead, priority=priority, indices=i % 2 == 0)
        if i % 6 == 5 or i == len(STREAM) - 1:
            pair.check()
            for size in (24, 2):
                batch = draw(pair, size)
                if given and batch is not None:
                    pair.update(batch["indices"].tolist(), stream.normal(size=size).tolist())
    assert pair.calls > 0  # not everything was refused


def draw(pair: Pair, size: int) -> dict[str, Any] | None:
    if not isinstance(pair, OrderPair):
        return pair.sample(size)
    batch = pair.refuse_or_sample(size)
    if batch is not None and isinstance(pair.model.view, Single) and pair.model.view.hindsight:
        check_goals(pair, batch)
    return batch


def check_goals(pair: OrderPair, batch: dict[str, Any]) -> None:
    """Goals that the episode reached at this step or later, and their rewards; the rest is as it was added."""
    model, new = pair.model, batch["relabelled"]
    by_serial = {step.serial: step for step in model.rows()}
    steps = [by_serial[serial] for serial in batch["indices"].tolist()]
    examples = [model.example([step]) for step in steps]
    for path, leaf in model.fields.items():
        if path != "reward" and not path.endswith("desired_goal"):
            assert_leaf(path, leaf, leaf_in(batch, path), [example[path] for example in examples])
    desired = batch["obs"]["desired_goal"]
    assert new.any() or len(new) < 24
    assert (batch["next_obs"]["desired_goal"][new] == desired[new]).all()
    for i, step in enumerate(steps):
        reached = [other.values["next_obs/achieved_goal"].tolist() for other in model.goals(step, "future")]
        assert desired[i].tolist() in (reached if new[i] else [examples[i]["obs/desired_goal"].tolist()])
    again = reward(batch["next_obs"]["achieved_goal"], desired)
    own = np.array([example["reward"] for example in examples])
    assert (batch["reward"] == np.where(new, again, own)).all()


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_every_cell_works_or_says_why_not(sampler: str, view: str, shm_address: str, tmp_path: Path) -> None:
    if not has_meaning(sampler, view):
        with pytest.raises(SchemaError, match="start='per_episode'") as caught:
            sw.ReplayBuffer(9, obs_shape=(1,), sampler=SAMPLERS[sampler].public(), view=VIEWS[view].public())
        assert type(SAMPLERS[sampler].public()).__name__ in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    for number, cell in enumerate(cells_of(sampler, view)):
        places = {"memory": None, "shm": f"{shm_address}-{number}", "file": f"file://{tmp_path}/{number}.sw"}
        pair = make_pair(sampler, view, cell, places[cell.storage])
        try:
            walk(pair, cell.num_envs)
            if number % 6 == 0 and not isinstance(pair, OrderPair):
                pair.check_counts()
        except Exception as error:
            raise AssertionError(str(cell)) from error
        finally:
            pair.close()


def test_all_pairs_are_walked() -> None:
    """And with every sampler and view, every value of the other axes."""
    walked: set[Any] = set()
    for sampler, view in itertools.product(SAMPLERS, VIEWS):
        for cell in cells_of(sampler, view) if has_meaning(sampler, view) else []:
            walked |= {(sampler, view, axis, value) for axis, value in cell._asdict().items()}
            walked |= set(itertools.combinations(cell._asdict().items(), 2))
    values = {"next_obs": NEXT_OBS, "kind": KINDS, "compression": COMPRESSIONS, "num_envs": NUM_ENVS}
    axes = {**values, "storage": STORAGES, "pace": PACES}
    for (one, ones), (other, others) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product(ones, others):
            assert ((one, pair[0]), (other, pair[1])) in walked
    for sampler, view in itertools.product(SAMPLERS, VIEWS):
        for axis, value in ((axis, value) for axis, values in axes.items() for value in values):
            no_next = "hindsight" in view and (axis, value) == ("next_obs", None)
            assert (sampler, view, axis, value) in walked or no_next or not has_meaning(sampler, view)


@pytest.mark.parametrize("ragged", RAGGED[1:])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_ragged_values_make_no_stack(compression: str | None, ragged: Any) -> None:
    with pytest.raises(SchemaError, match="stack") as caught:
        field(4, compression, ragged)
    assert "ragged" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hindsight_needs_the_observation_after() -> None:
    goals = {"achieved_goal": sw.Field((2,)), "desired_goal": sw.Field((2,))}
    view = VIEWS["Transitions(hindsight=...)"].public()
    with pytest.raises(SchemaError, match="next_obs") as caught:
        sw.ReplayBuffer(10, schema={"obs": goals}, next_obs=None, view=view)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Shuffle", "Fifo", "Lifo"])
def test_an_order_of_its_own_has_no_newest(kind: str) -> None:
    with pytest.raises(SchemaError, match="newest"):
        getattr(sw, kind)(newest=1)


def test_derived_observations_need_observations() -> None:
    with pytest.raises(SchemaError, match="obs") as caught:
        sw.ReplayBuffer(10, schema={"image": sw.Field((2,))}, next_obs="derived")
    assert "\n" not in str(caught.value)


def test_page_of_the_docs_lists_the_same_axes() -> None:
    page = Path(__file__).parents[2] / "docs/how-to/combinations.md"
    text = page.read_text()
    for names in (SAMPLERS, VIEWS, NEXT_OBS, STACKS, COMPRESSIONS, RAGGED, NUM_ENVS, STORAGES, PACES):
        for name in names:
            assert f"`{name!r}`" in text or f"`{name}`" in text, name
