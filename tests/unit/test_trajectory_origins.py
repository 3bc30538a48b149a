"""Calls that a client sends again are executed once, also after the folder was opened again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slabs import make

import sharpwave as sw
from sharpwave.errors import StorageError
from sharpwave.files import Entry, Journal
from sharpwave.files.origin import Origin
from sharpwave.trajectories.executed_calls import ExecutedCalls
from sharpwave.trajectories.index import ADD, CLEAR, INDEX, KIND, ORIGINS, joined, read_index
from sharpwave.trajectories.store import TrajectoryStore

ONE, OTHER = b"1" * 16, b"2" * 16


def open_store(folder: Path | None, **options: Any) -> TrajectoryStore:
    cache = None if folder is None else 2
    return TrajectoryStore("open()", folder, format="pt", seed=0, cache=cache, device="cpu", **options)


def add(store: TrajectoryStore, numbers: Any, token: bytes, number: int, oldest: int = 0) -> None:
    store.add("add()", [make(one) for one in numbers], Origin(token, number, oldest))


def held(store: TrajectoryStore) -> list[int]:
    return [int(one.rewards[0, 0]) // 1000 for _, one in store.trajectories("trajectories()")]


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = open_store(None if request.param == "memory" else tmp_path / "live")
    yield made
    made.close("close()")


def test_call_that_is_sent_again_adds_nothing(store: TrajectoryStore) -> None:
    for _ in range(3):
        add(store, [0, 1], ONE, 7, 7)
    assert held(store) == [0, 1]
    add(store, [2], ONE, 8, 7)
    add(store, [3], OTHER, 7, 7)
    add(store, [0, 1], ONE, 7, 7)
    assert held(store) == [0, 1, 2, 3]
    assert store.stats("stats()")["added"] == 4


def test_call_below_the_oldest_was_answered_and_adds_nothing(store: TrajectoryStore) -> None:
    add(store, [0], ONE, 7, 7)
    add(store, [1], ONE, 8, 8)
    add(store, [0], ONE, 7, 7)
    assert held(store) == [0, 1]


def test_refused_call_is_not_remembered(store: TrajectoryStore) -> None:
    add(store, [0], ONE, 0)
    with pytest.raises(sw.errors.SchemaError, match="trajectory 1 of this call"):
        store.add("add()", [make(1), make(1, obs=4)], Origin(ONE, 1, 1))
    assert held(store) == [0]
    add(store, [1], ONE, 1, 1)
    assert held(store) == [0, 1]


def test_clear_that_is_sent_again_deletes_nothing(store: TrajectoryStore) -> None:
    add(store, [0], ONE, 0)
    for _ in range(2):
        store.clear("clear()", origin=Origin(ONE, 1, 1))
        add(store, [1], OTHER, 0)
        add(store, [0], ONE, 0)
        assert held(store) == [1]


def test_load_that_is_sent_again_replaces_nothing(store: TrajectoryStore, tmp_path: Path) -> None:
    add(store, [0], ONE, 0)
    store.save("save()", tmp_path / "saved")
    add(store, [1], ONE, 1, 1)
    for _ in range(2):
        store.load("load()", tmp_path / "saved", None, origin=Origin(ONE, 2, 2))
        add(store, [2], OTHER, 0)
        add(store, [1], ONE, 1, 1)
        assert held(store) == [0, 2]


def test_loaded_checkpoint_knows_whose_calls_it_holds(store: TrajectoryStore, tmp_path: Path) -> None:
    add(store, [0, 1], ONE, 3, 3)
    store.save("save()", tmp_path / "saved")
    for place in (None, tmp_path / "other"):
        other = open_store(place)
        add(other, [5], OTHER, 0)
        other.load("load()", tmp_path / "saved", None)
        add(other, [0, 1], ONE, 3, 3)
        add(other, [5], OTHER, 0)
        assert held(other) == [0, 1]
        other.close("close()")


def close(store: TrajectoryStore, folder: Path) -> Path:
    store.close("close()")
    return folder


def copy(store: TrajectoryStore, folder: Path) -> Path:
    """As a kill leaves the folder."""
    return Path(shutil.copytree(folder, folder.with_name("killed")))


@pytest.mark.parametrize("leave", [close, copy])
def test_folder_that_is_opened_again_knows_the_calls(
    tmp_path: Path, leave: Callable[[TrajectoryStore, Path], Path]
) -> None:
    store = open_store(tmp_path / "live", capacity=3)
    add(store, [0], ONE, 0)
    add(store, [1, 2], OTHER, 0)
    store.clear("clear()", origin=Origin(ONE, 1, 1))
    add(store, range(3, 8), ONE, 2, 1)  # more than the capacity, in one call
    folder = leave(store, tmp_path / "live")
    again = open_store(folder, capacity=3)
    add(again, [0], ONE, 0)
    add(again, [1, 2], OTHER, 0)
    again.clear("clear()", origin=Origin(ONE, 1, 1))
    add(again, range(3, 8), ONE, 2, 1)
    assert held(again) == [5, 6, 7]
    assert again.stats("stats()")["added"] == 0
    again.close("close()")
    store.close("close()")


def test_rewritten_journal_knows_the_calls(tmp_path: Path) -> None:
    store = open_store(tmp_path / "live", capacity=2)
    for number in range(1_100):
        add(store, [number], (ONE, OTHER)[number % 2], number, max(0, number - 3))
    size = (tmp_path / "live" / INDEX).stat().st_size
    store.close("close()")
    assert (tmp_path / "live" / INDEX).stat().st_size < size // 10, "the journal was not rewritten"
    again = open_store(tmp_path / "live", capacity=2)
    for number in (0, 500, 1_097, 1_098, 1_099):
        add(again, [number], (ONE, OTHER)[number % 2], number, max(0, number - 3))
    assert held(again) == [1_098, 1_099]
    assert again.stats("stats()")["added"] == 0
    again.close("close()")


def test_call_returns_when_its_files_are_listed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "live")
    for number in range(5):
        add(store, range(number * 20, number * 20 + 20), ONE, number)
        listed = read_index(tmp_path / "live", "test")
        assert [entry.id for entry in listed.entries] == list(range(number * 20 + 20))
        assert Origin(ONE, number, 0) in listed.origins
    assert store.stats("stats()")["unsaved"] == 0
    store.close("close()")


def test_call_whose_files_cannot_be_written_is_completed_by_the_next_try(tmp_path: Path) -> None:
    live, away = tmp_path / "live", tmp_path / "away"
    store = open_store(live)
    add(store, [0], ONE, 0)
    live.rename(away)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"add\(\): 2 trajectories are not saved: .*No such file"):
            add(store, [1, 2], ONE, 1)
    away.rename(live)
    add(store, [1, 2], ONE, 1)
    assert held(store) == [0, 1, 2]
    assert [entry.id for entry in read_index(live, "test").entries] == [0, 1, 2]
    live.rename(away)
    with pytest.raises(StorageError):
        add(store, [3, 4], ONE, 2)
    with pytest.raises(StorageError, match=r"close\(\): 2 trajectories are not saved"):
        store.close("close()")
    away.rename(live)
    again = open_store(live)
    assert held(again) == [0, 1, 2]
    add(again, [3, 4], ONE, 2)
    assert held(again) == [0, 1, 2, 3, 4], "what was not saved is not remembered"
    again.close("close()")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ADD, {"add": [], "origins": [["31" * 15, 0, 0]]}),
        (ADD, {"add": [], "origins": [["3 " * 16, 0, 0]]}),
        (ADD, {"add": [], "origins": [["31" * 16, -1, 0]]}),
        (ADD, {"add": [], "origins": [["31" * 16, 0, 2**62]]}),
        (ADD, {"add": [], "origins": [["31" * 16, 0]]}),
        (CLEAR, {"clear": True, "origins": [[7, 0, 0]]}),
        (ORIGINS, {"origins": [["31" * 16, 0, 5]]}),
        (ORIGINS, {"origins": [["31" * 16, 0, [1.5]]]}),
        (ORIGINS, {"origins": 5}),
    ],
)
def test_impossible_origins_in_a_journal_are_refused(tmp_path: Path, kind: int, said: Any) -> None:
    open_store(tmp_path / "live").close("close()")
    journal = Journal(tmp_path / "live" / INDEX, KIND)
    journal.append([Entry(kind, said)])
    journal.close()
    with pytest.raises(StorageError, match="is intact, but its content is wrong"):
        open_store(tmp_path / "live")


def test_records_of_several_calls_become_one_with_all_origins() -> None:
    one, two = Origin(ONE, 1, 0).to_json(), Origin(OTHER, 2, 2).to_json()
    records = [Entry(ADD, {"add": [1]}), Entry(ADD, {"add": [2], "origins": [one]}), Entry(ADD, {"add": [3]})]
    assert joined(records) == [Entry(ADD, {"add": [1, 2, 3], "origins": [one]})]
    records.append(Entry(ADD, {"add": [], "origins": [two]}))
    assert joined(records)[0].head["origins"] == [one, two]
    assert joined(records[:1] * 2) == [Entry(ADD, {"add": [1, 1]})]
    assert Origin.read(two) == Origin(OTHER, 2, 2)


def test_clients_that_were_silent_for_longest_are_forgotten() -> None:
    origins = ExecutedCalls()
    for client in range(5_000):
        origins.add(Origin(client.to_bytes(16, "big"), 0, 0))
        origins.add(Origin(ONE, client, max(0, client - 2)))
    assert len(origins.rows()) == 4_096
    assert Origin((0).to_bytes(16, "big"), 0, 0) not in origins
    assert Origin((4_999).to_bytes(16, "big"), 0, 0) in origins
    assert Origin(ONE, 0, 0) in origins
    assert Origin(ONE, 5_000, 0) not in origins
    assert len(origins.rows()[-1][2]) == 3, "only calls that may be sent again are kept by number"
    again = ExecutedCalls()
    for row in origins.rows():
        again.take_row(row)
    assert again.rows() == origins.rows()


@pytest.mark.parametrize("leave", [close, copy])
def test_folder_that_is_opened_again_is_known_by_its_uuid(
    tmp_path: Path, leave: Callable[[TrajectoryStore, Path], Path]
) -> None:
    store = open_store(tmp_path / "live")
    add(store, [0], ONE, 0)
    store.save("save()", tmp_path / "saved")
    store.load("load()", tmp_path / "saved", None)
    again = open_store(leave(store, tmp_path / "live"))
    assert again.uuid == store.uuid
    other = open_store(None)
    known = other.uuid
    other.load("load()", tmp_path / "saved", None)
    assert other.uuid == known != store.uuid
    for one in (again, other, store):
        one.close("close()")
