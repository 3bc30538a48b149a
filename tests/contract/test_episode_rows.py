"""episodes() and the ids of rows() in every storage, and on a GPU."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.device_place import PLACES, device_of, here, on_device
from model.test_episodes import SHAPES, Pair
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import ClosedError, SchemaError
from sharpwave.rows import transfer


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("storage", ["memory", "shm", "file"])
def test_storages_give_the_episodes_of_the_model(storage: str, width: int, shm_address: str, tmp_path: Path) -> None:
    place = {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/live.sw"}[storage]
    buffer = sw.ReplayBuffer(64 * width, num_envs=width, writers=4, storage=place, seed=0, **SHAPES["stored"])
    pair = Pair(buffer)
    for turn in range(30):
        pair.add(turn % 3 if turn % 7 else 0, 1 + turn % 11, seed=turn)
        pair.check()
        if turn % 9 == 8:
            pair.close(1 + turn % 2)
        if turn == 20:
            pair.clear()
    buffer.close(unlink=True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("width", [1, 3])
def test_rows_on_a_gpu_give_the_episodes_of_the_model(place: str, width: int) -> None:
    buffer = on_device(24 * width, device=device_of(place), num_envs=width, seed=0, **SHAPES["stored"])
    pair = Pair(OnHost(buffer), can_tell_starts=False)
    for turn in range(12):
        pair.add(0, 1 + turn * 5 % 11, seed=turn)
        pair.check(batch_size=1 + turn)
        if turn == 8:
            pair.clear()


class OnHost:
    """A buffer whose batches come as NumPy arrays, from whatever device."""

    def __init__(self, buffer: sw.ReplayBuffer) -> None:
        self.buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    def rows(self, *args: Any, **kwargs: Any) -> Any:
        return (here(part) for part in self.buffer.rows(*args, **kwargs))

    def episodes(self, **kwargs: Any) -> Any:
        for one in self.buffer.episodes(**kwargs):
            numbers = {name: one.pop(name) for name in ("stream", "episode")}
            yield here(one) | numbers

    def get(self, handles: Any) -> Any:
        return here(self.buffer.get(handles))


@pytest.mark.parametrize("place", PLACES)
def test_incomplete_episodes_stay_incomplete_from_the_host_to_a_gpu_and_back(place: str) -> None:
    device = device_of(place)

    def given(buffer: Any, **options: Any) -> list[list[int]]:
        return [here(one["id"]).tolist() for one in buffer.episodes(**options)]

    host = filled(20, [5, 8, 4, 9, 2])  # the first row left is the fourth of the second episode
    assert given(host) == [[13, 14, 15, 16], list(range(17, 26)), [26, 27]]
    on_gpu = sw.ReplayBuffer._over(transfer.to_device(host._rows, device))
    assert given(on_gpu) == given(host)
    assert given(on_gpu, partial=True) == given(host, partial=True)
    back = sw.ReplayBuffer._over(transfer.to_host(on_gpu._rows))
    assert given(back) == given(host)
    assert given(back, partial=True) == given(host, partial=True)


def test_rows_of_several_writers_make_no_whole_episodes_on_a_gpu_that_they_are_not() -> None:
    device = device_of(PLACES[0])
    host = sw.ReplayBuffer(64, writers=2, seed=0, num_envs=1, schema={"obs": sw.Field(()), "id": sw.Field((), "int64")})
    other = host.writer()
    for number in range(20):  # blocks of both lie between each other
        for add, first in ((host.add, 0), (other.add, 100)):
            add(obs=[0.0], next_obs=[0.0], id=[first + number], reward=[0.0], done=[number % 10 == 9])
    on_gpu = sw.ReplayBuffer._over(transfer.to_device(host._rows, device))
    whole = [here(one["id"]).tolist() for one in on_gpu.episodes()]
    assert all(numbers[0] % 10 == 0 and numbers[-1] % 10 == 9 and len(numbers) == 10 for numbers in whole)
    host.close()


def filled(capacity: int, lengths: list[int]) -> sw.ReplayBuffer:
    """A ring of one environment with episodes of these lengths."""
    schema = {"obs": sw.Field(()), "id": sw.Field((), "int64")}
    buffer = sw.ReplayBuffer(capacity, schema=schema, next_obs=None, num_envs=1, seed=0)
    add_episodes(buffer, lengths)
    return buffer


def add_episodes(buffer: sw.ReplayBuffer, lengths: list[int], first: int = 0) -> None:
    ends = {first + end - 1 for end in np.cumsum(lengths)}
    for number in range(first, first + sum(lengths)):
        buffer.add(obs=0.0, id=number, reward=0.0, done=number in ends)


def test_ids_stay_until_an_episode_loses_rows() -> None:
    buffer = filled(20, [6, 6, 6])

    def ids() -> dict[int, int]:
        return {
            int(i): int(e) for part in buffer.rows(ids=True) for i, e in zip(part["id"], part["episode"], strict=True)
        }

    before = ids()
    assert sorted(set(before.values())) == [0, 6, 12]
    add_episodes(buffer, [4], first=18)  # two rows of the first episode are overwritten
    after = ids()
    assert {number: after[number] for number in range(6, 18)} == {number: before[number] for number in range(6, 18)}
    assert {after[number] for number in range(2, 6)} == {2}


def test_an_episode_whose_rows_are_overwritten_meanwhile_is_left_out() -> None:
    buffer = filled(20, [6, 6, 6])
    given = buffer.episodes()
    assert next(given)["id"].tolist() == list(range(6))
    add_episodes(buffer, [9], first=18)  # up to the second row of the second episode
    assert [one["id"].tolist() for one in given] == [list(range(12, 18))], "and what came later is not in this call"


def test_a_writer_in_another_thread_never_makes_an_incomplete_episode() -> None:
    schema = {"obs": sw.Field((8,)), "id": sw.Field((), "int64"), "of": sw.Field((), "int64")}
    buffer = sw.ReplayBuffer(1000, schema=schema, next_obs=None, num_envs=1, writers=2, seed=0)
    stop, begun = threading.Event(), threading.Event()

    def write() -> None:
        episode = 0
        while not stop.is_set():
            length = 3 + episode % 7
            done = np.arange(length) == length - 1
            values = {"obs": np.zeros((length, 8), np.float32), "id": np.arange(length), "reward": np.zeros(length)}
            buffer.add(**values, of=np.full(length, episode), done=done)
            begun.set()
            episode += 1
            if episode % 20 == 0:
                time.sleep(0.0005)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert begun.wait(HANG_S)  # on a busy machine 60 looks at an empty buffer are over before the first add
        seen = 0
        for _ in range(60):
            for one in buffer.episodes():
                episode = int(one["of"][0])
                assert one["id"].tolist() == list(range(3 + episode % 7))
                assert set(one["of"].tolist()) == {episode}
                seen += 1
            last: dict[int, int] = {}
            for part in buffer.rows(50, ids=True):
                for of, name in zip(part["of"].tolist(), part["episode"].tolist(), strict=True):
                    assert last.setdefault(name, of) == of, "two episodes with one id"
        assert seen
    finally:
        stop.set()
        thread.join()


def test_a_stream_is_unknown_only_where_a_slow_writer_keeps_older_rows() -> None:
    """A writer claims the block of old rows and stops; another one goes round the ring and overwrites all that follows
    them."""
    schema = {"obs": sw.Field(()), "id": sw.Field((), "int64")}
    buffer = sw.ReplayBuffer(64, schema=schema, next_obs=None, num_envs=1, writers=4, seed=0)
    assert buffer.stats()["block_rows"] == 4
    old, slow = buffer.writer(), buffer.writer()

    def add(writer: Any, count: int, first: int) -> None:
        for number in range(first, first + count):
            writer.add(obs=0.0, id=number, reward=0.0, done=number % 3 == 2)

    add(old, 64, 0)
    add(slow, 1, 1000)  # in the block of rows 0 to 3
    add(buffer, 3, 2000)

    def streams_of() -> dict[int, int]:
        parts = buffer.rows(ids=True)
        return {int(i): int(s) for part in parts for i, s in zip(part["id"], part["stream"], strict=True)}

    streams = streams_of()
    assert {streams[number] for number in (1, 2, 3)} == {0}, "the block after it still tells"
    add(buffer, 80, 3000)
    streams = streams_of()
    assert {streams[number] for number in (1, 2, 3)} == {-1}
    assert {stream for number, stream in streams.items() if number >= 1000} == {1, 2}
    partial = [one["id"].tolist() for one in buffer.episodes(partial=True, unfinished=True)]
    assert [1, 2] in partial
    assert [3] in partial
    buffer.close()


def test_names_and_arguments_are_checked() -> None:
    for name in ("stream", "episode"):
        with pytest.raises(SchemaError, match="reserved"):
            sw.ReplayBuffer(10, schema={"obs": sw.Field(()), name: sw.Field(())})
    buffer = filled(20, [3])
    for call in (
        lambda: buffer.rows(ids=1),
        lambda: buffer.episodes(partial=1),
        lambda: buffer.episodes(unfinished="a"),
    ):
        with pytest.raises(SchemaError, match="expected True or False"):
            call()
    given = buffer.episodes()
    buffer.close()
    for call in (lambda: next(given), buffer.episodes, lambda: buffer.rows(ids=True)):
        with pytest.raises(ClosedError):
            call()
