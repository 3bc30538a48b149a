"""`LocalGenerator`: our engine in this process as a `Generator`, stepped by a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

from ...errors import ClosedError, NotReady, SchemaError
from .answer import Answer, Request
from .engine import Engine
from .ongoing import Ongoing, Piece
from .protocol import Health
from .sampling import Sampling

__all__ = ["LocalGenerator", "PauseMode"]

PauseMode = Literal["abort", "wait", "keep"]
T = TypeVar("T")

_MOST_FAILURES = 5  # steps in a row: an error of the device stays


class LocalGenerator:
    """The engine in this process. Its thread steps while there is something to do and sleeps otherwise.

    Args:
        engine: Nothing else may step it. It stays usable after `close`.

    Example:
        >>> import asyncio
        >>> from sharpwave.llm.generators import Engine, Sampling
        >>> from sharpwave.llm.model import small_model
        >>> async def main():
        ...     async with LocalGenerator(Engine(small_model(), slots=4, context=64)) as generator:
        ...         return await generator.generate([5, 6, 7], Sampling(max_tokens=8, ignore_eos=True))
        >>> len(asyncio.run(main()).tokens)
        8
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._work = threading.Condition()  # guards everything below
        self._ongoing: dict[Request, Ongoing] = {}
        self._streams: dict[Request, Ongoing] = {}  # those of them that are read in pieces
        self._held: dict[Request, None] = {}  # came in a pause; not in the engine's queue
        self._has_aborts = False
        self._is_paused = self._is_frozen = False  # new requests are held; no steps
        self._is_stepping = False
        self._is_closed = self._has_ended = False
        self._joins: set[asyncio.Future[None]] = set()
        self._broken: Exception | None = None
        self._failures = 0  # steps in a row
        self._pauses: dict[asyncio.Future[None], Callable[[], bool]] = {}  # not quiet yet; whether they are now
        # A thread for each: an update waits for no score, and neither for what the program runs in asyncio's own pool.
        self._scoring = ThreadPoolExecutor(1, "sharpwave-score")
        self._updating = ThreadPoolExecutor(1, "sharpwave-update")
        self._wakes = _Wakes()
        self._thread = threading.Thread(target=self._run, name="sharpwave-generator", daemon=True)
        self._thread.start()

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        """One answer; see `Generator.generate`."""
        return await self.begin(ids, sampling).answer()

    async def stream(self, ids: Sequence[int], sampling: Sampling | None = None) -> AsyncGenerator[Piece, None]:
        """The tokens of an answer as they are made. An iterator that is closed early aborts its answer."""
        async with contextlib.aclosing(self.begin(ids, sampling, has_pieces=True).pieces()) as pieces:
            async for piece in pieces:
                yield piece

    def begin(self, ids: Sequence[int], sampling: Sampling | None = None, *, has_pieces: bool = False) -> Ongoing:
        """Begins an answer without waiting for it, from within the event loop.

        Raises:
            SchemaError: Ids or settings are wrong, or do not fit. Nothing was begun.
            ClosedError: The generator was closed.
            NotReady: The engine has failed for good.
        """
        (request,) = self.engine.prepare(ids, sampling)
        ongoing = Ongoing(request, self._abort)
        with self._work:
            self._check_life("generate()")
            self._ongoing[request] = ongoing
            if has_pieces:
                self._streams[request] = ongoing
            if self._is_paused:
                self._held[request] = None
            else:
                self.engine.enqueue([request])
                self._work.notify_all()
        return ongoing

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of given tokens; see `Generator.score`."""
        self._check_life("score()")
        return await _beside(self._scoring, lambda: self.engine.score(ids))

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        """New weights from a folder; see `Generator.update`. They are read and checked beside the steps."""
        self._check_life("update()")
        await _beside(self._updating, lambda: self.engine.update(str(path), version, kv=kv))

    async def abort(self) -> int:
        """Ends every answer on its way with the tokens it has. Returns how many."""
        ongoing = self._all()
        for one in ongoing:
            one.abort()
        return len(ongoing)

    async def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        """Stops generation until `resume`. Requests that come meanwhile wait, in every mode.

        A `resume` of another task ends this call: with "wait" it then returns although answers are not complete.

        Args:
            mode: "keep" stops answers where they are, and they go on later; "abort" ends them with the tokens they
                have; "wait" returns when all of them are complete.
            clear_cache: Keys and values are computed again, also those of answers that go on.
        """
        if mode not in ("abort", "wait", "keep"):
            raise SchemaError(f"pause(): mode={mode!r}, expected 'abort', 'wait' or 'keep'")
        with self._work:
            self._check_life("pause()")
            before = [one for request, one in self._ongoing.items() if request not in self._held]
            self._is_paused, self._is_frozen = True, mode != "wait"
            self._work.notify_all()
        if mode == "abort":
            for one in before:
                one.abort()
        await self._wait_for_quiet(before if mode != "keep" else [])
        if clear_cache:
            self._check_life("pause()")
            await _beside(self._updating, self.engine.clear_cache)

    async def resume(self) -> None:
        """Ends a pause, also one that waits for answers. Without one it does nothing."""
        with self._work:
            self._check_life("resume()")
            self._is_paused = self._is_frozen = False
            held, self._held = self._held, {}
            self.engine.enqueue(list(held))
            self._end_pauses(are_over=True)
            self._work.notify_all()

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    async def health(self) -> Health:
        """See `Generator.health`."""
        self._check_life("health()")
        return Health(self.engine.version, self.engine.running, self.engine.waiting + len(self._held))

    async def close(self) -> None:
        """Ends the thread. Answers on their way fail with ClosedError. A second call does nothing."""
        with self._work:
            self._is_closed = True
            self._end_pauses()
            self._work.notify_all()
        self._scoring.shutdown(wait=False)
        self._updating.shutdown(wait=False)
        await asyncio.to_thread(self._thread.join)

    async def join(self) -> None:
        """Waits until the generator was closed.

        Raises:
            NotReady: Its engine has failed for good.
        """
        # Not in asyncio's threads: calls that wait for many generators would leave none of them to others.
        ended = asyncio.get_running_loop().create_future()
        with self._work:
            self._joins.add(ended)
            if self._has_ended:
                ended.set_result(None)
        try:
            await ended
        finally:
            with self._work:
                self._joins.remove(ended)
        if not self._is_closed:
            self._check_life("join()")

    async def __aenter__(self) -> LocalGenerator:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _all(self) -> list[Ongoing]:
        with self._work:
            return list(self._ongoing.values())

    def _check_life(self, where: str) -> None:
        if self._is_closed:
            raise ClosedError(f"{where}: the generator was closed")
        if self._broken is not None:
            raise NotReady(f"{where}: the engine failed and cannot go on: {self._broken!r}") from self._broken

    def _abort(self, ongoing: Ongoing) -> None:
        with self._work:
            request = ongoing.request
            if request not in self._ongoing:
                return
            if request in self._held:
                del self._held[request]
                request.finish("abort")
                self._forget(request)
                told = [ongoing] if ongoing.tell() else []
            else:
                self.engine.abort(request)
                self._has_aborts, told = True, []
                self._work.notify_all()
        self._wakes.wake(told)

    async def _wait_for_quiet(self, ending: Sequence[Ongoing]) -> None:
        """Until no step runs and these answers have ended, or the pause has been ended. It blocks no thread."""

        def is_quiet() -> bool:
            if self._is_closed or self._broken is not None:
                return True
            is_still = not (self._is_frozen and self._is_stepping)
            return is_still and not any(one.request in self._ongoing for one in ending)

        future = asyncio.get_running_loop().create_future()
        with self._work:
            self._pauses[future] = is_quiet
            self._end_pauses()
        try:
            await future
        finally:
            with self._work:
                self._pauses.pop(future, None)

    def _end_pauses(self, *, are_over: bool = False) -> None:
        """Wakes the pauses that are quiet by now, or all of them. Its caller holds `_work`."""
        for future in [future for future, is_quiet in self._pauses.items() if are_over or is_quiet()]:
            del self._pauses[future]
            with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits
                future.get_loop().call_soon_threadsafe(_set, future)

    def _has_work(self) -> bool:
        return self._is_closed or self._has_aborts or (not self._is_frozen and self.engine.is_busy)

    def _run(self) -> None:
        while self._broken is None:
            with self._work:
                self._work.wait_for(self._has_work)
                if self._is_closed:
                    break
                self._has_aborts, self._is_stepping, is_frozen = False, True, self._is_frozen
            try:
                self._tell(self.engine.end_aborted() if is_frozen else self.engine.step())
                self._failures = 0
            except Exception as error:
                self._fail(error)
            with self._work:
                self._is_stepping = False
                self._end_pauses()  # they wait for the end of this step, or of the last answer
        self._end()

    def _tell(self, done: Iterable[Request]) -> None:
        with self._work:
            ended = [one for request in done if (one := self._forget(request)) is not None]
            growing = [one for one in self._streams.values() if one.has_news]
        self._wakes.wake([one for one in [*ended, *growing] if one.tell()])

    def _forget(self, request: Request) -> Ongoing | None:
        self._streams.pop(request, None)
        return self._ongoing.pop(request, None)

    def _fail(self, error: Exception) -> None:
        """Fails the answers in the engine. Later ones may succeed, unless step after step fails, or the engine cannot
        even be emptied."""
        self._failures += 1
        try:
            dropped = self.engine.drop()
        except Exception:
            self._broken = error
            return
        if self._failures == _MOST_FAILURES:
            self._broken = error
        told = []
        for request in dropped:
            with self._work:
                one = self._forget(request)
            if one is not None and one.tell(_failure(error)):
                told.append(one)
        self._wakes.wake(told)

    def _end(self) -> None:
        with self._work:
            left, self._held = list(self._ongoing.values()), {}
            self._ongoing.clear()
            self._streams.clear()
            self._end_pauses()
        with contextlib.suppress(Exception):  # a broken engine may refuse
            self.engine.drop()
        closed = ClosedError("generate(): the generator was closed before the answer ended")
        error = closed if self._broken is None else _failure(self._broken)
        self._wakes.wake([one for one in left if one.tell(error)])
        with self._work:
            self._has_ended = True
            for ended in self._joins:
                with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits
                    ended.get_loop().call_soon_threadsafe(_set, ended)


async def _beside(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():  # the task that paused was cancelled
        future.set_result(None)


def _failure(error: Exception) -> NotReady:
    made = NotReady(f"generate(): a step of the engine failed: {error!r}")
    made.__cause__ = error
    return made


class _Wakes:
    """Answers with news on their way into event loops. A loop is called once however many steps passed meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.AbstractEventLoop, list[Ongoing]] = {}

    def wake(self, told: Sequence[Ongoing]) -> None:
        for loop in {one.loop for one in told}:
            with self._lock:
                waiting = self._waiting.setdefault(loop, [])
                is_called = bool(waiting)
                waiting += [one for one in told if one.loop is loop]
            if not is_called:
                try:
                    loop.call_soon_threadsafe(self._run, loop)
                except RuntimeError:  # the loop was closed, so no task waits
                    self._take(loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        for one in self._take(loop):
            one.wake()

    def _take(self, loop: asyncio.AbstractEventLoop) -> list[Ongoing]:
        with self._lock:
            return self._waiting.pop(loop, [])
