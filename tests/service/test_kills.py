"""The sweep of kills, in its short form; `make soak` kills a thousand times."""

from __future__ import annotations

import pytest

pytest.importorskip("zmq")

import sweep


def test_every_acknowledged_row_is_there_once_after_random_kills() -> None:
    counts = sweep.run(rounds=12, seed=20)
    assert counts["killed server"] + counts["killed client"] + counts["killed both"] == 12
    assert counts["acknowledged"] > 0
