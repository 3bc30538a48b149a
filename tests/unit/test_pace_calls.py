"""Pace from the outside: what is refused, who waits and how long, what the words say, threads, asyncio, iterators."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from numbered import make, row, rows, unchanged
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError

INFINITE = float("inf")


def paced(pace: Any, count: int = 0, capacity: int = 100, **options: Any) -> sw.ReplayBuffer:
    buffer = make(capacity, pace=pace, num_envs=1, **options)
    if count:
        buffer.add(**rows(range(count)))
    return buffer


def counts(buffer: sw.ReplayBuffer) -> tuple[int, int]:
    stats = buffer.stats()
    return stats["pace_inserts"], stats["pace_samples"]


@contextmanager
def somebody_else() -> Iterator[None]:
    """A second thread, so that waiting makes sense."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def in_thread(job: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """What it returned or raised is in the list when the thread has ended."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(job())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def numbers_of(error: BaseException) -> str:
    """The words without thousands separators, on one line."""
    assert "\n" not in str(error)
    return str(error).replace(",", "")


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"samples_per_insert": 0},
        {"samples_per_insert": -1.0},
        {"samples_per_insert": float("nan")},
        {"samples_per_insert": INFINITE},
        {"samples_per_insert": "2"},
        {"min_size": 0},
        {"min_size": -1},
        {"min_size": 1.5},
        {"min_size": None},
        {"min_size": True},
        {"min_diff": float("nan")},
        {"max_diff": float("nan")},
        {"max_diff": None},
        {"min_diff": 3, "max_diff": 2, "min_size": 10},
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=next(iter(settings))):
        sw.Pace(**settings)


def test_certain_deadlock_is_refused() -> None:
    with pytest.raises(SchemaError, match="min_diff"):
        sw.Pace(min_size=10, samples_per_insert=2.0, min_diff=20.5, max_diff=100)
    sw.Pace(min_size=10, samples_per_insert=2.0, min_diff=20, max_diff=100)


def test_likely_deadlock_is_warned_of() -> None:
    with pytest.warns(Warning, match="max_diff"):
        paced(sw.Pace(min_size=10, samples_per_insert=2.0, min_diff=0, max_diff=19))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paced(sw.Pace(min_size=10, samples_per_insert=2.0, min_diff=0, max_diff=20))
        paced(sw.Pace.queue(1))
        paced(sw.Pace.min_size(10))
        paced(sw.Pace.samples_per_insert(2.0, 10, 8))


@pytest.mark.parametrize(
    ("ratio", "error"),
    [
        (1.0, 0.9),
        (0.1, 0.9),
        (4.0, 3.9),
        (1.0, (0, 1.9)),
        (4.0, (-2, 5.9)),
        (1.0, -1),
        (1.0, "small"),
        (1.0, (1, 2, 3)),
    ],
    ids=str,
)
def test_room_that_is_too_small_for_the_ratio_is_refused(ratio: float, error: Any) -> None:
    with pytest.raises(SchemaError, match="error"):
        sw.Pace.samples_per_insert(ratio, 10, error)


def test_presets_are_paces() -> None:
    assert repr(sw.Pace.queue(7)) == repr(sw.Pace(1, 1.0, 0, 7))
    assert repr(sw.Pace.min_size(500)) == repr(sw.Pace(500, 1.0, -INFINITE, INFINITE))
    assert repr(sw.Pace.samples_per_insert(4.0, 10, 8)) == repr(sw.Pace(10, 4.0, 32, 48))
    assert repr(sw.Pace.samples_per_insert(4.0, 10, (0, 60))) == repr(sw.Pace(10, 4.0, 0, 60))
    assert repr(sw.Pace()) == repr(sw.Pace(1, 1.0, -INFINITE, INFINITE))
    assert repr(sw.Pace.queue(7)) != repr(sw.Pace.queue(8))


def test_pace_tells_its_numbers() -> None:
    pace = sw.Pace.samples_per_insert(4.0, 10, 8)
    assert pace.numbers == {"min_size": 10, "samples_per_insert": 4.0, "min_diff": 32.0, "max_diff": 48.0}
    assert sw.Pace(**pace.numbers) == pace
    pace.numbers["min_size"] = 11  # a copy: a pace does not change
    assert pace.numbers["min_size"] == 10


def test_smallest_room_that_is_allowed() -> None:
    sw.Pace.samples_per_insert(1.0, 10, 1)
    sw.Pace.samples_per_insert(4.0, 10, 4)
    sw.Pace.samples_per_insert(4.0, 10, (36, 44))


def test_capacity_must_have_room_for_the_pace() -> None:
    with pytest.raises(SchemaError, match="pace: min_size 11 is more than the capacity 10"):
        paced(sw.Pace.min_size(11), capacity=10)
    with pytest.raises(SchemaError, match="pace: a queue of 11 rows needs a capacity of at least 11, got 10"):
        paced(sw.Pace.queue(11), capacity=10)
    paced(sw.Pace.min_size(10), capacity=10)
    paced(sw.Pace.queue(10), capacity=10)


def test_only_a_pace_is_a_pace() -> None:
    with pytest.raises(SchemaError, match="pace"):
        paced("fast")


def test_pace_in_force_is_told(tmp_path: Path, shm_address: str) -> None:
    pace = sw.Pace(5, 2.0, 0, 40)
    buffer = paced(pace, 6, storage=shm_address)
    buffer.sample(4)
    buffer.save(tmp_path / "snapshot")
    for held in (buffer, sw.open(tmp_path / "snapshot"), sw.open(shm_address)):
        assert repr(held.pace) == repr(pace)
        assert counts(held) == (6, 4)
    buffer.close(unlink=True)


def test_buffer_without_a_pace_never_waits() -> None:
    buffer = make(10)
    with somebody_else(), pytest.raises(NotReady):  # nobody adds a row: a wait has no end
        buffer.sample(1, timeout=None)
    buffer.add(**row(0), timeout=0)
    assert buffer.sample(100, timeout=0)["reward"].tolist() == [0.0] * 100


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
def test_wrong_timeout_is_refused(timeout: Any) -> None:
    buffer = paced(sw.Pace.queue(4), 2)
    with unchanged(buffer), pytest.raises(SchemaError, match="timeout"):
        buffer.sample(1, timeout=timeout)
    with unchanged(buffer), pytest.raises(SchemaError, match="timeout"):
        buffer.add(**rows([7]), timeout=timeout)


# ---- refused at the call ---------------------------------------------------------------------------------------------


def test_batch_that_nobody_could_ever_let_is_refused() -> None:
    buffer = paced(sw.Pace(4, 1.0, 0, 10), 6)
    with unchanged(buffer), pytest.raises(SchemaError, match="11"):
        buffer.sample(11)
    buffer.sample(6, timeout=0)
    with pytest.raises(NotReady):
        buffer.sample(10, timeout=0)


def test_add_that_nobody_could_ever_let_is_refused() -> None:
    buffer = paced(sw.Pace(8, 2.0, 0, 16))
    buffer.add(**rows(range(8)), timeout=0)
    with unchanged(buffer), pytest.raises(SchemaError, match="9"):
        buffer.add(**rows(range(9)))
    with unchanged(buffer), pytest.raises(NotReady):
        buffer.add(**rows(range(8)), timeout=0)
    buffer.sample(16, timeout=0)
    buffer.add(**rows(range(8)), timeout=0)
    assert counts(buffer) == (16, 16)


def test_add_below_the_minimum_size_is_free() -> None:
    buffer = paced(sw.Pace(50, 2.0, 90, 110))
    buffer.add(**rows(range(50)), timeout=0)
    assert counts(buffer) == (50, 0)


def test_masked_rows_do_not_count() -> None:
    buffer = paced(sw.Pace.queue(4))
    buffer.add(**rows(range(6)), mask=[True, False, True, False, True, True], timeout=0)
    assert counts(buffer) == (4, 0)
    with pytest.raises(NotReady):
        buffer.add(**rows([9]), timeout=0)


def test_windows_and_n_steps_count_as_examples() -> None:
    for view in (sw.Windows(3, burn_in=1), sw.Transitions(n_step=3)):
        buffer = paced(sw.Pace.queue(8), 8, view=view)
        buffer.sample(6, timeout=0)
        assert counts(buffer) == (8, 6)


def test_cleared_buffer_counts_from_nothing() -> None:
    buffer = paced(sw.Pace.queue(4), 4)
    buffer.sample(2)
    buffer.clear()
    assert counts(buffer) == (0, 0)
    with pytest.raises(NotReady):
        buffer.sample(1, timeout=0)
    buffer.add(**rows(range(4)), timeout=0)


def test_consumed_rows_do_not_count_as_size() -> None:
    buffer = paced(sw.Pace.min_size(3), 4, sampler=sw.Fifo())
    buffer.sample(2, timeout=0)
    with pytest.raises(NotReady):
        buffer.sample(1, timeout=0)  # two are left, three are asked for
    buffer.add(**rows([9]), timeout=0)
    assert buffer.sample(1, timeout=0)["reward"].tolist() == [2]


def test_writers_of_their_own_are_paced() -> None:
    buffer = paced(sw.Pace.queue(4))
    with buffer.writer() as writer:
        writer.add(**rows(range(4)), timeout=0)
        with pytest.raises(NotReady):
            writer.add(**rows([4]), timeout=0)
    assert counts(buffer) == (4, 0)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_words_of_a_sample_that_waits() -> None:
    buffer = paced(sw.Pace(4, 8.0, 0, 40_000), capacity=5000, count=4096)
    for _ in range(127):
        buffer.sample(256, timeout=0)
    buffer.sample(248, timeout=0)
    with pytest.raises(NotReady) as caught:
        buffer.sample(256, timeout=0)
    text = numbers_of(caught.value)
    for word in ("4096", "8", "32760", "256", "min_diff", "writer", "last insert", " s ago"):
        assert word in text, (word, text)
    assert "<" in text


def test_words_of_an_add_that_waits() -> None:
    buffer = paced(sw.Pace(4, 2.0, 0, 30), 15)
    with pytest.raises(NotReady) as caught:
        buffer.add(**rows([1, 2]), timeout=0)
    text = numbers_of(caught.value)
    for word in ("15", "2", "max_diff", "30", "last sample"):
        assert word in text, (word, text)
    assert ">" in text


def test_words_of_a_buffer_that_is_too_small_still() -> None:
    buffer = paced(sw.Pace.min_size(1000), 512, capacity=2000)
    with pytest.raises(NotReady) as caught:
        buffer.sample(4, timeout=0)
    text = numbers_of(caught.value)
    for word in ("512", "1000", "min_size"):
        assert word in text, (word, text)


# ---- waiting ---------------------------------------------------------------------------------------------------------


def test_wait_ends_at_its_deadline() -> None:
    buffer = paced(sw.Pace.queue(4), 4)
    calls = [lambda: buffer.add(**rows([1]), timeout=0.2), lambda: buffer.sample(4, timeout=0.2)]
    with somebody_else():
        for call in calls:
            before, began = counts(buffer), time.monotonic()
            with pytest.raises(NotReady):
                call()
            assert 0.15 <= time.monotonic() - began < HANG_S
            assert counts(buffer) == before
            assert buffer.stats()["pace_waiting"] == 0
            buffer.sample(4, timeout=0) if before == (4, 0) else None


def test_sample_goes_on_when_rows_come() -> None:
    buffer = paced(sw.Pace.queue(4))
    thread, outcome = in_thread(lambda: buffer.sample(2)["reward"].tolist())
    until(lambda: buffer.stats()["pace_waiting"] == 1)
    buffer.add(**rows([5]))
    time.sleep(0.05)
    assert thread.is_alive()
    buffer.add(**rows([5]))
    thread.join(HANG_S)
    assert outcome == [[5.0, 5.0]]
    assert buffer.stats()["pace_waiting"] == 0


def test_add_goes_on_when_rows_are_taken() -> None:
    buffer = paced(sw.Pace.queue(4), 4)
    thread, outcome = in_thread(lambda: buffer.add(**rows([7, 8]), timeout=None))
    until(lambda: buffer.stats()["pace_waiting"] == 1)
    assert len(buffer) == 4
    buffer.sample(1)
    time.sleep(0.05)
    assert thread.is_alive()
    buffer.sample(1)
    thread.join(HANG_S)
    assert outcome == [None]
    assert counts(buffer) == (6, 2)


def test_clear_wakes_who_waits() -> None:
    buffer = paced(sw.Pace.queue(4), 4)
    thread, outcome = in_thread(lambda: buffer.add(**rows([7]), timeout=HANG_S))
    until(lambda: buffer.stats()["pace_waiting"] == 1)
    buffer.clear()
    thread.join(HANG_S)
    assert outcome == [None]
    assert counts(buffer) == (1, 0)


def test_close_wakes_who_waits() -> None:
    buffer = paced(sw.Pace.queue(4))
    thread, outcome = in_thread(lambda: buffer.sample(2, timeout=HANG_S))
    until(lambda: buffer.stats()["pace_waiting"] == 1)
    buffer.close()
    thread.join(HANG_S)
    assert isinstance(outcome[0], sw.errors.ClosedError)


def test_waiting_lets_python_go_on() -> None:
    buffer = paced(sw.Pace.queue(4))
    thread, outcome = in_thread(lambda: buffer.sample(2, timeout=HANG_S / 2)["reward"].tolist())
    until(lambda: buffer.stats()["pace_waiting"] == 1)
    buffer.add(**rows([5, 5]))  # where this thread could not go on, the other's time would be up first
    thread.join(HANG_S)
    assert outcome == [[5.0, 5.0]]


def test_another_process_lets_us_go_on(shm_address: str) -> None:
    buffer = paced(sw.Pace.queue(4), storage=shm_address)
    code = f"""
        import numpy as np, sharpwave as sw
        buffer = sw.open({shm_address!r})
        obs = np.zeros((3, 2), np.float32)
        buffer.add(obs, np.zeros(3), np.full(3, 5.0), obs, np.zeros(3, bool), timeout=60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    assert buffer.sample(3, timeout=HANG_S)["reward"].tolist() == [5.0] * 3
    assert child.wait(HANG_S) == 0
    buffer.close(unlink=True)


# ---- one thread alone ------------------------------------------------------------------------------------------------


def alone(code: str) -> str:
    """Runs it where there is one thread and nobody else; a hang fails."""
    start = """
        import time, numpy as np, sharpwave as sw
        from sharpwave.errors import NotReady
        def add(buffer, n, **more):
            obs = np.zeros((n, 2), np.float32)
            buffer.add(obs, np.zeros(n), np.zeros(n), obs, np.zeros(n, bool), **more)
        def refused(call):
            began = time.monotonic()
            try:
                call()
            except NotReady as error:
                assert time.monotonic() - began < 60  # nobody else is there: a wait has no end
                print(str(error).replace(",", ""))
            else:
                raise AssertionError("must not go")
    """
    script = textwrap.dedent(start) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_thread_that_would_wait_for_itself_is_told_at_once() -> None:
    said = alone("""
        buffer = sw.ReplayBuffer(100, obs_shape=2, num_envs=1, pace=sw.Pace(4, 2.0, 0, 12))
        refused(lambda: buffer.sample(3))
        add(buffer, 6)
        refused(lambda: add(buffer, 5))
        buffer.sample(12)
        refused(lambda: buffer.sample(2))
        assert buffer.stats()["pace_samples"] == 12
        assert buffer.stats()["pace_inserts"] == 6
        add(buffer, 3)
    """).splitlines()
    assert len(said) == 3
    assert "min_size" in said[0]
    assert "max_diff" in said[1]
    assert "12" in said[1]
    assert "min_diff" in said[2]
    assert "12" in said[2]


def test_threads_that_redraw_progress_bars_end_no_wait() -> None:
    said = alone("""
        import threading, rich.progress, tqdm._monitor
        buffer = sw.ReplayBuffer(100, obs_shape=2, num_envs=1, pace=sw.Pace.queue(4))
        monitor = tqdm._monitor.TMonitor(type("Bars", (), {"_instances": []}), 1)
        with rich.progress.Progress():
            assert threading.active_count() >= 3
            refused(lambda: buffer.sample(3))
        monitor.exit()
    """)
    assert "this thread is the only one and waits for itself: add first" in said


def test_iterator_and_event_loop_of_one_thread_do_not_hang_either() -> None:
    alone("""
        import asyncio
        buffer = sw.ReplayBuffer(100, obs_shape=2, num_envs=1, pace=sw.Pace.queue(8))
        add(buffer, 8)
        batches = buffer.batches(4, timeout=0.3)
        next(batches); next(batches)
        refused(lambda: next(batches))
        batches.close()
        refused(lambda: asyncio.run(buffer.sample_async(4, timeout=0.3)))
    """)


# ---- asyncio ---------------------------------------------------------------------------------------------------------


def test_event_loop_goes_on_while_a_coroutine_waits() -> None:
    buffer = paced(sw.Pace.queue(4))

    async def main() -> int:
        ticks = 0
        waiting = asyncio.create_task(buffer.sample_async(3))
        for _ in range(10):
            await asyncio.sleep(0.01)
            ticks += 1
        assert not waiting.done()
        await buffer.add_async(**rows([1, 2, 3]))
        batch = await asyncio.wait_for(waiting, HANG_S)
        assert set(batch["reward"].tolist()) <= {1, 2, 3}
        return ticks

    assert asyncio.run(main()) == 10
    assert counts(buffer) == (3, 3)


def test_add_waits_for_samples_in_an_event_loop() -> None:
    buffer = paced(sw.Pace.queue(4), 4)

    async def main() -> None:
        waiting = asyncio.create_task(buffer.add_async(**rows([7, 8])))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert len(buffer) == 4
        await buffer.sample_async(2)
        await asyncio.wait_for(waiting, HANG_S)

    asyncio.run(main())
    assert counts(buffer) == (6, 2)


def test_cancelled_calls_leave_no_trace() -> None:
    buffer = paced(sw.Pace.queue(4))

    async def main() -> None:
        for _ in range(5):
            waiting = asyncio.create_task(buffer.sample_async(3))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert counts(buffer) == (0, 0)
        await buffer.add_async(**rows([1, 2, 3, 4]))
        for _ in range(5):
            adding = asyncio.create_task(buffer.add_async(**rows([9])))
            await asyncio.sleep(0.01)
            adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
        assert counts(buffer) == (4, 0)
        assert len(buffer) == 4
        # All credit is there.
        batch = await asyncio.wait_for(buffer.sample_async(4), HANG_S)
        assert 9 not in batch["reward"]
        until(lambda: buffer.stats()["pace_waiting"] == 0)

    asyncio.run(main())
    assert counts(buffer) == (4, 4)


def test_deadline_in_an_event_loop() -> None:
    buffer = paced(sw.Pace.queue(4))

    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(NotReady):
            await buffer.sample_async(3, timeout=0.2)
        assert 0.15 <= time.monotonic() - began < HANG_S
        with pytest.raises(NotReady):
            await buffer.sample_async(3, timeout=0)
        with pytest.raises(SchemaError):
            await buffer.sample_async(5)

    with somebody_else():
        asyncio.run(main())
    assert counts(buffer) == (0, 0)


def test_many_coroutines_share_the_credit() -> None:
    buffer = paced(sw.Pace.queue(8))

    async def main() -> None:
        async def act() -> None:
            for number in range(50):
                await buffer.add_async(**rows([number]), timeout=HANG_S)

        async def learn() -> None:
            for _ in range(50):
                await buffer.sample_async(2, timeout=HANG_S)

        await asyncio.wait_for(asyncio.gather(*(act() for _ in range(4)), *(learn() for _ in range(2))), 2 * HANG_S)

    asyncio.run(main())
    assert counts(buffer) == (200, 200)


# ---- iterators -------------------------------------------------------------------------------------------------------


def test_batch_counts_when_it_is_handed_out() -> None:
    buffer = paced(sw.Pace(1, 1.0, 0, 100), 80)
    batches = buffer.batches(8, prefetch=8)
    assert [next(batches)["reward"].shape for _ in range(2)] == [(8,), (8,)]
    assert counts(buffer) == (80, 16)
    batches.close()
    assert counts(buffer) == (80, 16)
    # What it had drawn ahead is free again: another client gets all that the inequality gives.
    thread, outcome = in_thread(lambda: [buffer.sample(8, timeout=HANG_S) for _ in range(8)])
    thread.join(HANG_S)
    assert len(outcome[0]) == 8
    assert counts(buffer) == (80, 80)
    with pytest.raises(NotReady):
        buffer.sample(1, timeout=0)


def test_iterator_that_nobody_holds_returns_its_credit() -> None:
    buffer = paced(sw.Pace(1, 1.0, 0, 100), 80)
    batches = buffer.batches(8, prefetch=8)
    next(batches)
    del batches
    gc.collect()
    until(lambda: counts(buffer) == (80, 8))
    with somebody_else():
        for _ in range(9):
            buffer.sample(8, timeout=HANG_S)
    assert counts(buffer) == (80, 80)


def test_writers_wait_for_batches_that_are_only_drawn_ahead() -> None:
    """What was not handed out was not sampled."""
    buffer = paced(sw.Pace.queue(8), 8)
    batches = buffer.batches(4, prefetch=2)
    next(batches)
    with pytest.raises(NotReady):
        buffer.add(**rows(range(5)), timeout=0.1)
    buffer.add(**rows(range(4)), timeout=HANG_S)
    batches.close()


def test_iterator_waits_for_rows_and_ends_with_its_deadline() -> None:
    buffer = paced(sw.Pace.queue(8))
    batches = buffer.batches(4, prefetch=2, timeout=HANG_S)
    thread, outcome = in_thread(lambda: [next(batches)["reward"].tolist() for _ in range(2)])
    time.sleep(0.05)
    buffer.add(**rows([1] * 4), timeout=HANG_S)
    buffer.add(**rows([1] * 4), timeout=HANG_S)
    thread.join(HANG_S)
    assert outcome == [[[1.0] * 4] * 2]
    batches.close()
    short = buffer.batches(4, timeout=0.2)
    with somebody_else(), pytest.raises(NotReady):  # nobody adds a row: without its deadline the wait has no end
        next(short)
    short.close()
    assert buffer.stats()["pace_waiting"] == 0


def test_closed_iterator_is_over() -> None:
    buffer = paced(None, 10)
    batches = buffer.batches(4, prefetch=3)
    next(batches)
    batches.close()
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)
    before = threading.active_count()
    for _ in range(5):
        one = buffer.batches(4)
        next(one)
        one.close()
    until(lambda: threading.active_count() <= before)


def test_closed_iterator_gives_back_rows_that_it_had_not_handed_out() -> None:
    """A row is read when it is delivered; a queue must not lose what was only drawn ahead."""
    buffer = paced(sw.Pace.queue(40), 40, sampler=sw.Fifo())
    batches = buffer.batches(4, prefetch=5)
    got = [number for _ in range(2) for number in next(batches)["reward"].astype(int).tolist()]
    assert got == list(range(8))
    until(lambda: buffer.stats()["sample_calls"] >= 4, "a batch that is drawn ahead")
    batches.close()
    assert buffer.stats()["rows_consumed"] == 8
    rest = buffer.sample(32, timeout=HANG_S)["reward"].astype(int).tolist()
    assert rest == list(range(8, 40))


@pytest.mark.parametrize(
    "settings", [{"prefetch": 0}, {"prefetch": -1}, {"prefetch": 1.5}, {"prefetch": True}], ids=str
)
def test_wrong_prefetch_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="prefetch"):
        paced(None, 4).batches(4, **settings)


def test_batches_on_a_device() -> None:
    torch = pytest.importorskip("torch")
    batches = paced(None, 10).batches(4, device="cpu")
    assert isinstance(next(batches)["obs"], torch.Tensor)
    batches.close()


def test_iterator_draws_what_sample_would() -> None:
    ours, theirs = paced(None, 10), paced(None, 10)
    batches = ours.batches(4, prefetch=3)
    for _ in range(6):
        assert next(batches)["reward"].tolist() == theirs.sample(4)["reward"].tolist()
    batches.close()


def test_learner_is_not_starved_by_an_idle_one() -> None:
    """One takes two batches and then nothing; the other goes on for ever once it has gone."""
    buffer = paced(sw.Pace(1, 1.0, 0, 64), 64)
    idle = buffer.batches(8, prefetch=8)
    next(idle)
    next(idle)
    idle.close()
    thread, outcome = in_thread(lambda: [buffer.sample(8, timeout=HANG_S) for _ in range(20)])
    for _ in range(14):
        buffer.add(**rows(range(8)), timeout=HANG_S)
    thread.join(HANG_S)
    assert isinstance(outcome[0], list)
    assert counts(buffer) == (64 + 14 * 8, 16 + 160)
