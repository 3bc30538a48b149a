"""`Evaluation`: scores held-out items beside training, and keeps the best version."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checks import whole
from ..errors import NotReady, StaleHandle, StorageError
from .agent import Agent, Generate, describe_error, play
from .characters import Tokenizer
from .clock import Clock
from .coroutines import is_cancelled, to_its_end, together
from .generators.protocol import Generator
from .generators.sampling import Sampling
from .items import Items
from .permits import derive_seed
from .training import Versions
from .weights import Published

__all__ = ["Evaluation", "Score"]

_BEST = "best"
_SCORE = "score.json"


@dataclass(frozen=True)
class Score:
    """The mean reward of one version over all items. An episode that failed counts as 0, and in `failed`.

    `began_s` and `ended_s` are Unix time, as in all logs.
    """

    version: int
    reward: float
    episodes: int
    failed: int
    began_s: float
    ended_s: float


class Evaluation:
    """A lane of its own: it has a generator for itself, and training never waits for it.

    It takes the newest version each time, so a slow evaluation skips versions. The version that is being scored is
    linked aside first: the publisher may remove it meanwhile.

    Args:
        versions: Where versions are published.
        generator: Used by nobody else, so that every token of a score is of one version.
        agent: As in training.
        items: Held out from training.
        tokenizer: Of the model.
        clock: Time.
        every: After a score, the next one is of a version from the next multiple of this number on.
        concurrent: Episodes at once.
        sampling: As in training, but for the temperature.
        temperature: 0 takes the likeliest tokens; None is that of `sampling`.
        folder: Where the best version is kept, as the Hugging Face folder `best`; None keeps none.
        poll_s: How often it looks for a new version.
        log: Called with each score; where episodes failed, `why` is the error of the last one.
    """

    def __init__(
        self,
        versions: Versions,
        generator: Generator,
        agent: Agent,
        items: Items,
        *,
        tokenizer: Tokenizer,
        clock: Clock,
        every: int = 1,
        concurrent: int = 32,
        sampling: Sampling | None = None,
        temperature: float | None = 0.0,
        folder: str | Path | None = None,
        poll_s: float = 0.01,
        log: Callable[..., None] | None = None,
    ) -> None:
        self._versions, self._generator, self._agent, self._items = versions, generator, agent, items
        self._tokenizer, self._clock, self._poll_s, self._log = tokenizer, clock, poll_s, log
        self._every = whole("Evaluation()", "every", every)
        self._concurrent = asyncio.Semaphore(whole("Evaluation()", "concurrent", concurrent))
        sampling = Sampling() if sampling is None else sampling
        self._sampling = sampling if temperature is None else dataclasses.replace(sampling, temperature=temperature)
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self.scores: list[Score] = []
        self.best: Score | None = self._read_best()

    async def run(self) -> None:
        """Scores new versions, for ever."""
        due = 0
        while True:
            found = self._versions.latest()
            if found is None or found.version < due:
                await self._clock.sleep(self._poll_s)
                continue
            try:
                await self.score(found)
            except StaleHandle:  # it was removed before it was linked aside: there is a newer one
                continue
            due = (found.version // self._every + 1) * self._every

    async def score(self, published: Published) -> Score:
        """Scores one version, and keeps it where it is the best.

        Raises:
            StaleHandle: The version was removed.
        """
        began, aside = self._clock.now(), None
        if self._folder is not None:
            aside = self._folder / f".scoring-{os.getpid()}"
        try:
            if aside is not None:
                await to_its_end(self._clock.outside(lambda: self._link(published, aside)))
            path = published.path if aside is None else aside
            if (await self._generator.health()).version < published.version:
                # To its end: it may go on where its caller is cancelled, and the next score would ask for it again.
                await to_its_end(self._generator.update(path, published.version))
            found = await together([self._episode(name) for name in self._items.ids])
            failures = [one for one in found if isinstance(one, BaseException)]
            mean = sum(one for one in found if not isinstance(one, BaseException)) / len(found)
            times = [self._clock.unix(moment) for moment in (began, self._clock.now())]
            score = Score(published.version, mean, len(found), len(failures), *times)
            await to_its_end(self._note(score, aside, failures))
        finally:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)  # gone where it was kept
        return score

    async def _note(self, score: Score, aside: Path | None, failures: Sequence[BaseException]) -> None:
        if self.best is None or score.reward > self.best.reward:
            if aside is not None:
                await self._clock.outside(lambda: self._keep(aside, score))
            self.best = score
        self.scores.append(score)
        if self._log is not None:
            why = {"why": describe_error(failures[-1])} if failures else {}
            self._log("score", **asdict(score), **why)

    async def _episode(self, name: str) -> float | BaseException:
        """Its reward, or why it failed."""
        async with self._concurrent:
            seed = derive_seed("evaluation", name)
            generate = Generate(self._generator, self._tokenizer, self._sampling, seed)
            try:
                episodes = await play(self._agent, self._items[name], generate, repr(name))
            except NotReady:
                raise
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                return error
            return sum(float(episode.reward or 0.0) for episode in episodes) / len(episodes)

    def _link(self, published: Published, aside: Path) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        try:
            shutil.copytree(published.path, aside, copy_function=_link)
        except (OSError, shutil.Error) as error:
            if not published.path.exists():
                raise StaleHandle(f"version {published.version} was removed; score a newer one") from error
            raise StorageError(f"Evaluation(): {self._folder} cannot be written: {error}") from error

    def _keep(self, aside: Path, score: Score) -> None:
        assert self._folder is not None
        (aside / _SCORE).write_text(json.dumps(asdict(score), indent=2) + "\n")
        best, old = self._folder / _BEST, self._folder / f".old-{os.getpid()}"
        if best.exists():
            best.rename(old)
        aside.rename(best)
        shutil.rmtree(old, ignore_errors=True)

    def _read_best(self) -> Score | None:
        """Of an earlier process of the same run. What it left when it was killed is removed."""
        if self._folder is None:
            return None
        best = self._folder / _BEST
        for old in self._folder.glob(".old-*"):
            if best.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:  # killed between the two renames
                old.rename(best)
        for left in self._folder.glob(".scoring-*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            said: dict[str, Any] = json.loads((best / _SCORE).read_text())
        except FileNotFoundError:
            return None
        return Score(**said)


def _link(source: str, target: str) -> None:
    """A second name for the same bytes; a copy where the two are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
