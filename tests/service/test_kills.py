"""The sweep of kills, in its short form; `make soak` kills a thousand times."""

from __future__ import annotations

import pytest

pytest.importorskip("zmq")

import sweep


@pytest.mark.parametrize(("kind", "kills"), [("rows", 12), ("sequences", 5), ("trajectories", 4)])
def test_what_was_acknowledged_is_there_once_after_random_kills(kind: str, kills: int) -> None:
    kinds = tuple(one for one in sweep.KINDS if one.kind == kind)[:1]
    counts = sweep.run(kills, 20, kinds=kinds)
    assert counts["killed server"] + counts["killed client"] + counts["killed both"] == kills
    assert counts[f"{kind} acknowledged"] > 0
