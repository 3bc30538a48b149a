"""Wrong messages to a live server, for a few seconds; `make soak` sends them for a minute."""

from __future__ import annotations

import pytest

pytest.importorskip("zmq")

import wrong_messages


def test_wrong_messages_harm_neither_the_server_nor_its_other_clients() -> None:
    found = wrong_messages.run(seconds=5, seed=1)
    assert sum(found["attacks"].values()) > 10
