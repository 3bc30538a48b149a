"""Everything combines: each cell of the table in docs/how-to/combinations.md is filled with a short real stream, or has
a reason why it has no meaning, which the constructor gives."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_model import Pair

import sharpwave as sw
from sharpwave.errors import SchemaError

SAMPLERS: dict[str, dict[str, Any] | None] = {
    "Uniform()": None,
    "Prioritized()": {},
    "Prioritized(rank_based=True)": {"rank_based": True},
}
VIEWS = {"Transitions()": 1, "Transitions(n_step=3)": 3}
NEXT_OBS = ("stored", "derived", None)
STACKS = (1, 4)
COMPRESSIONS = (None, "lz4", "zstd")
RAGGED = (False, True, "padded")
NUM_ENVS = (None, 1, 3)
STORAGES = ("memory", "shm", "file")

# Pairs without a meaning: what they are, and a word of the reason that the constructor gives.
NO_MEANING = {("ragged", "stack"): "stack"}

CAPACITY = 9
# Ends of every kind, a reset that nobody flags, masked steps; one and a half laps, newest episode open.
STREAM = "..T..U.R.M...B.."


def has_meaning(stack: int, ragged: Any) -> bool:
    return not (ragged and stack > 1)


def field(stack: int, compression: str | None, ragged: Any) -> sw.Field:
    return sw.Field((6, 2), "uint8", stack=stack, compression=compression, ragged=ragged)


def walk(pair: Pair, num_envs: int | None) -> None:
    """The stream, and at every few steps all rows and a batch against the model."""
    width = num_envs or 1
    stream = np.random.default_rng(0)
    given = pair.model.prioritized is not None
    for i, code in enumerate(STREAM):
        # Environments are at different places of the stream.
        letters = "".join(STREAM[(i + 5 * env) % len(STREAM)] for env in range(width)) if width > 1 else code
        lead: tuple[int, ...] = () if num_envs is None else (width,)
        pair.add(letters, lead, priority=stream.lognormal(size=width).tolist() if given and i % 3 == 0 else None)
        if i % 6 == 5 or i == len(STREAM) - 1:
            pair.check()
            batch = pair.sample(24)
            if given:
                pair.update(batch["indices"].tolist(), stream.normal(size=24).tolist())
                pair.sample(8)


@pytest.mark.parametrize("next_obs", NEXT_OBS)
@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_every_cell_works_or_says_why_not(
    sampler: str, view: str, next_obs: str | None, shm_address: str, tmp_path: Path
) -> None:
    cells = itertools.product(STACKS, COMPRESSIONS, RAGGED, NUM_ENVS, STORAGES)
    for cell, (stack, compression, ragged, num_envs, place) in enumerate(cells):
        if not has_meaning(stack, ragged):
            with pytest.raises(SchemaError, match="stack") as caught:
                field(stack, compression, ragged)
            assert "ragged" in str(caught.value)
            assert "\n" not in str(caught.value)
            continue
        storage = {"memory": None, "shm": f"{shm_address}-{cell}", "file": f"file://{tmp_path}/{cell}.sw"}[place]
        pair = Pair(
            CAPACITY * (num_envs or 1),
            {"obs": {"seen": field(stack, compression, ragged), "state": sw.Field((2,))}, "action": sw.Field((2,))},
            next_obs=next_obs,
            num_envs=num_envs,
            prioritized=SAMPLERS[sampler],
            n_step=VIEWS[view],
            storage=storage,
            writers=2,
        )
        try:
            walk(pair, num_envs)
            if cell % 10 == 0:
                pair.check_counts()
        except Exception as error:
            raise AssertionError(f"{stack=} {compression=} {ragged=} {num_envs=} {place=}") from error
        finally:
            pair.close()


def test_derived_observations_need_observations() -> None:
    with pytest.raises(SchemaError, match="obs") as caught:
        sw.ReplayBuffer(10, schema={"image": sw.Field((2,))}, next_obs="derived")
    assert "\n" not in str(caught.value)


def test_page_of_the_docs_lists_the_same_axes() -> None:
    page = Path(__file__).parents[2] / "docs/how-to/combinations.md"
    text = page.read_text()
    for names in (SAMPLERS, VIEWS, NEXT_OBS, STACKS, COMPRESSIONS, RAGGED, NUM_ENVS, STORAGES):
        for name in names:
            assert f"`{name!r}`" in text or f"`{name}`" in text, name
