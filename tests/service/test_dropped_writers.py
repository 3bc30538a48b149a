"""Writers of a served table that are dropped without close(): they end as local ones do."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import pytest
from patience import until
from service.server_child import ServerChild

import sharpwave as sw


def small() -> sw.ReplayBuffer:
    return sw.ReplayBuffer(1000, obs_shape=(2,), seed=0, writers=3)


def row(number: int, done: bool = False) -> tuple[Any, ...]:
    return [number, number], number, number, [number, number], done


@pytest.mark.parametrize("window", [None, 100])
def test_a_dropped_writer_gives_its_place_back_and_its_rows_arrive(window: int | None) -> None:
    with ServerChild(small) as server, sw.open(server.address, direct=False) as buffer:
        for number in range(10):  # more than there are places
            writer = buffer.writer(window=window)
            writer.add(*row(number))
            del writer
        gc.collect()
        until(lambda: buffer.stats()["writers"] == 0, "the end of all writers")
        assert sorted(int(one) for part in buffer.rows() for one in part["action"]) == list(range(10))
        # Their episodes have ended, as truncated.
        assert [len(episode["action"]) for episode in buffer.episodes()] == [1] * 10


def test_a_writer_ends_although_an_error_of_what_is_collected_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test runners and debuggers keep errors of destructors, and with them the frames in which these ran."""

    class Fails:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            raise ValueError("not collected in peace")

    kept: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", kept.append)
    with ServerChild(small) as server, sw.open(server.address, direct=False) as buffer:
        gc.disable()
        try:
            for _ in range(3):
                buffer.writer()
            Fails()
            writer = buffer.writer()  # there is no place: what nobody has any more is collected
            assert len(kept) == 1
            del writer
            gc.collect()
        finally:
            gc.enable()
        until(lambda: buffer.stats()["writers"] == 0, "the end of all writers")


def test_a_writer_that_is_in_use_is_opened_again_and_a_dropped_one_is_not(tmp_path: Any) -> None:
    with ServerChild(on_file, str(tmp_path / "it.sw")) as server, sw.open(server.address, direct=False) as buffer:
        kept, dropped = buffer.writer(), buffer.writer()
        kept.add(*row(0))
        dropped.add(*row(1))
        server.kill()
        del dropped
        gc.collect()
        server.start()
        kept.add(*row(2))
        until(lambda: buffer.stats()["writers"] == 1, "the end of the dropped writer")
        assert sorted(int(one) for part in buffer.rows() for one in part["action"]) == [0, 1, 2]
        kept.close()


def test_a_child_process_does_not_end_the_writers_of_its_parent() -> None:
    with ServerChild(small) as server, sw.open(server.address, direct=False) as buffer:
        writer = buffer.writer()
        writer.add(*row(0))
        child = os.fork()
        if child == 0:
            del writer
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.add(*row(1))
        assert len(buffer) == 2
        writer.close()


def on_file(path: str) -> sw.ReplayBuffer:
    if os.path.exists(path):
        return sw.open(f"file://{path}")
    return sw.ReplayBuffer(1000, obs_shape=(2,), seed=0, writers=3, storage=f"file://{path}")
