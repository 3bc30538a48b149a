"""One contract for every sampler and view: the same order of calls gives the same bytes wherever the buffer lives,
whichever process learns, and however it was saved, closed and opened on the way."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.attached import Attached
from contract.cases import CASES, NEXT_OBS, SAMPLERS, VIEWS, Answer, Case, Environments, Learner, script
from contract.served import TRANSPORTS, close_servers, serve

import sharpwave as sw

STORAGES = ("memory", "shm", "file")
Place = Callable[[str], Any]


@pytest.fixture(scope="module")
def attached() -> Iterator[Attached]:
    process = Attached()
    yield process
    process.stop()
    assert process.process.exitcode == 0


@pytest.fixture
def place(shm_address: str, tmp_path: Path) -> Place:
    """A new address in a storage, every time."""
    numbers = itertools.count()

    def new(storage: str) -> str | None:
        number = next(numbers)
        return {"memory": None, "shm": f"{shm_address}-{number}", "file": f"file://{tmp_path}/{number}.sw"}[storage]

    return new


def assert_same(answers: list[Answer | None], expected: list[Answer | None], how: str) -> None:
    """Says which call and which arrays differ, and not all their bytes."""
    assert len(answers) == len(expected), how
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        if answer == wanted:
            continue
        one, other = answer or {}, wanted or {}
        paths = [path for path in sorted(one.keys() | other.keys()) if one.get(path) != other.get(path)]
        pytest.fail(f"{how}: answer {number} of {len(expected)} differs in {paths}")


# ---- ways to make the same calls -------------------------------------------------------------------------------------


def in_one_process(case: Case, address: str | None, **options: Any) -> list[Answer | None]:
    learner = Learner(case.make(address))
    answers = [learner.do(call) for call in script(case.by_priority, **options) if call[0] != "cut"]
    learner.buffer.close(unlink=True)
    return answers


@functools.cache
def in_memory(case: Case, **options: Any) -> list[Answer | None]:
    return in_one_process(case, None, **options)


def from_another_process(case: Case, address: str, attached: Attached) -> list[Answer | None]:
    """The rows are added here; all else is done there."""
    adder = Learner(case.make(address))
    attached.open(case, address)
    calls = [call for call in script(case.by_priority) if call[0] != "cut"]
    answers = [(adder if call[0] == "add" else attached).do(call) for call in calls]
    attached.close()
    adder.buffer.close(unlink=True)
    return answers


def at_a_server(case: Case, transport: str) -> list[Answer | None]:
    """The buffer is in the server's memory; every call is made by its client."""
    learner = Learner(sw.open(serve(case.make(None), transport), view=VIEWS[case.view]))
    answers = [learner.do(call) for call in script(case.by_priority) if call[0] != "cut"]
    learner.buffer.close()
    close_servers()
    return answers


def interrupted(
    case: Case, address: str | None, go_on: Callable[[sw.ReplayBuffer], sw.ReplayBuffer], **options: Any
) -> list[Answer | None]:
    """At the cut, what `go_on` makes of the buffer goes on."""
    learner = Learner(case.make(address))
    answers = []
    for call in script(case.by_priority, **options):
        if call[0] == "cut":
            learner.buffer = go_on(learner.buffer)
        else:
            answers.append(learner.do(call))
    learner.buffer.close(unlink=True)
    return answers


def save_and_open(case: Case, snapshot: Path) -> Callable[[sw.ReplayBuffer], sw.ReplayBuffer]:
    def go_on(buffer: sw.ReplayBuffer) -> sw.ReplayBuffer:
        buffer.save(snapshot)
        buffer.close(unlink=True)
        return case.open(str(snapshot))

    return go_on


def close_and_open(case: Case, address: str) -> Callable[[sw.ReplayBuffer], sw.ReplayBuffer]:
    def go_on(buffer: sw.ReplayBuffer) -> sw.ReplayBuffer:
        buffer.close()
        return case.open(address)

    return go_on


# ---- every sampler and view ------------------------------------------------------------------------------------------


def by_sampler_and_view() -> Any:
    """Runs a test for each sampler and view that go together."""
    pairs = [
        pytest.param(sampler, view, id=f"{sampler}-{view}")
        for sampler, view in itertools.product(SAMPLERS, VIEWS)
        if any((case.sampler, case.view) == (sampler, view) for case in CASES)
    ]
    return pytest.mark.parametrize(("sampler", "view"), pairs)


def test_every_sampler_and_view_is_a_case() -> None:
    assert {type(sampler) for sampler in SAMPLERS.values()} == set(sw.sampling.KINDS.values())
    assert {type(view) for view in VIEWS.values()} == {sw.Transitions, sw.Windows}
    pairs = {(case.sampler, case.view) for case in CASES}
    for sampler, view in set(itertools.product(SAMPLERS, VIEWS)) - pairs:
        with pytest.raises(sw.errors.SchemaError, match="start='per_episode'"):
            Case(sampler, view, "stored").make(None)
    assert {case.next_obs for case in CASES} == set(NEXT_OBS)


@by_sampler_and_view()
def test_same_calls_give_the_same_bytes_in_every_storage_and_from_a_second_process(
    sampler: str, view: str, place: Place, attached: Attached
) -> None:
    for case in (Case(sampler, view, next_obs) for next_obs in NEXT_OBS):
        expected = in_memory(case)
        drawn = [answer for answer in expected if answer and "/indices" in answer]
        assert len(drawn) > 5, "nearly everything was refused"
        for storage in ("shm", "file"):
            assert_same(in_one_process(case, place(storage)), expected, f"{case}: {storage}")
            answers = from_another_process(case, place(storage), attached)
            assert_same(answers, expected, f"{case}: {storage}, a second process learns")


@by_sampler_and_view()
def test_same_calls_give_the_same_bytes_at_a_server(sampler: str, view: str) -> None:
    for case, transport in zip((Case(sampler, view, next_obs) for next_obs in NEXT_OBS), TRANSPORTS, strict=True):
        assert_same(at_a_server(case, transport), in_memory(case), f"{case}: {transport}")


@by_sampler_and_view()
def test_what_was_saved_or_closed_and_opened_goes_on_as_if_nothing_had_happened(
    sampler: str, view: str, place: Place, tmp_path: Path
) -> None:
    for case in (Case(sampler, view, next_obs) for next_obs in NEXT_OBS):
        expected = in_memory(case)
        for storage in STORAGES:
            answers = interrupted(case, place(storage), save_and_open(case, tmp_path / "snapshot"))
            assert_same(answers, expected, f"{case}: {storage}, saved and opened")
        for storage in ("shm", "file"):
            address = place(storage)
            answers = interrupted(case, address, close_and_open(case, address))
            assert_same(answers, expected, f"{case}: {storage}, closed and opened")


@by_sampler_and_view()
def test_open_episodes_are_cut_alike_in_every_storage(sampler: str, view: str, place: Place, tmp_path: Path) -> None:
    """An episode that is open when its writer goes is over: who opens the buffer begins another one."""
    for case in (Case(sampler, view, next_obs) for next_obs in NEXT_OBS):
        ways: list[tuple[str, list[list[Answer | None]]]] = [("saved", []), ("closed", [])]
        for storage in STORAGES:
            go_on = save_and_open(case, tmp_path / "snapshot")
            ways[0][1].append(interrupted(case, place(storage), go_on, cut_at_ends=False))
        for storage in ("shm", "file"):
            address = place(storage)
            ways[1][1].append(interrupted(case, address, close_and_open(case, address), cut_at_ends=False))
        for way, (first, *others) in ways:
            for other in others:
                assert_same(other, first, f"{case}: {way}")
        # Until the next row comes a copy is what the original is.
        whole, cut = in_memory(case, cut_at_ends=False), ways[0][1][0]
        calls = [call[0] for call in script(case.by_priority, cut_at_ends=False)]
        until = calls.index("add", calls.index("cut")) - 1
        assert_same(cut[:until], whole[:until], f"{case}: before the next add")


# ---- beside the matrix -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["shm", "file"])
@pytest.mark.parametrize("case", [case for case in CASES if case.sampler in ("Uniform()", "Prioritized()")], ids=str)
def test_two_processes_that_add_by_turns_are_two_writers(
    case: Case, storage: str, place: Place, attached: Attached
) -> None:
    address = place(storage)
    here, buffer = case.make(address), case.make(None)
    attached.open(case, address)
    one, other = Learner(buffer), Learner(here)
    streams = Environments(0), Environments(7)
    with buffer.writer() as first, buffer.writer() as second:
        for turn in range(24):
            mine, theirs = streams[0].add(1 + turn % 2), streams[1].add(1 + turn % 3)
            first.add(**mine)
            here.add(**mine)
            second.add(**theirs)
            attached.do(("add", theirs))
            expected = [one.sample(4), one.rows(), one.sample(4)]
            answers = [other.sample(4), attached.do(("rows",)), attached.do(("sample", 4))]
            assert_same(answers, expected, f"turn {turn}")
    attached.close()
    here.close(unlink=True)


@pytest.mark.parametrize("way", ["saved", "closed"])
def test_order_of_ranks_is_as_old_after_opening_as_it_was_before(way: str, place: Place, tmp_path: Path) -> None:
    """Fewer changes than a sixteenth of the rows: the order is not refreshed yet."""

    def run(address: str | None, go_on: Callable[[sw.ReplayBuffer], sw.ReplayBuffer]) -> Answer:
        stream = np.random.default_rng(0)
        sampler = sw.Prioritized(rank_based=True)
        buffer = sw.ReplayBuffer(400, obs_shape=(1,), sampler=sampler, seed=0, storage=address)
        for number in range(300):
            buffer.add([number], number, number, [number], False, priority=stream.random())
        drawn = buffer.sample(8)
        buffer.update_priorities(drawn["indices"], 5 + np.arange(8))
        buffer = go_on(buffer)
        answer = Learner(buffer).sample(64)
        buffer.close(unlink=True)
        return answer

    case, address = CASES[0], place("file")
    go_on = save_and_open(case, tmp_path / "snapshot") if way == "saved" else close_and_open(case, address)
    assert run(address, go_on) == run(None, lambda buffer: buffer)
