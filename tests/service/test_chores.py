"""Calls of clients that wait beside the server's thread."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from patience import HANG_S

pytest.importorskip("zmq")

from sharpwave.errors import ClosedError
from sharpwave.service.chores import Chores
from sharpwave.service.hosted import Later


def test_a_call_that_is_given_up_before_its_first_step_ends() -> None:
    """Else the calls behind it in its channel would wait for ever."""
    told, go_on = threading.Event(), threading.Event()
    chores = Chores(told.set)
    chores._loop.call_soon(go_on.wait)  # the event loop is busy: it begins the call and ends it in one turn
    guest: Any = SimpleNamespace(tasks=set())
    chore = chores.add(guest, "place", Later(lambda: asyncio.sleep(1e6)))
    chore.give_up()
    go_on.set()
    assert told.wait(HANG_S)
    ((place, result),) = chores.finished()
    assert place == "place"
    assert isinstance(result, ClosedError)
    assert len(chores) == 0
    chores.close()
