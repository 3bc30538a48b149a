"""`Agent`: an async function from an item and `generate` to an episode with a reward; two that are often enough."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import os
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from ..checks import told
from ..errors import SchemaError, SharpwaveError
from .characters import Tokenizer
from .episode import Episode
from .generators.answer import Answer
from .generators.protocol import Generator
from .generators.sampling import Sampling
from .items import Item
from .permits import derive_seed

__all__ = ["Agent", "Generate", "Reward", "several_turns", "single_turn"]


class Generate:
    """What an agent asks the model with. One for each episode.

    Every answer has a seed of its own, made of the episode's seed and the number of the answer. So an episode that is
    made again from the same weights is the same.
    """

    def __init__(self, generator: Generator, tokenizer: Tokenizer, sampling: Sampling | None = None, seed: int = 0):
        self.generator, self._tokenizer = generator, tokenizer
        self.sampling = Sampling() if sampling is None else sampling
        self.seed = seed

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    async def __call__(self, episode: Episode, **changes: Any) -> Answer:
        """One answer to all tokens of the episode so far. It is part of the episode from then on.

        Args:
            changes: Fields of `Sampling` that differ from the run's, for instance `max_tokens=8`.
        """
        answer = await self.answer(episode.tokens, episode.answers, **changes)
        episode.take(answer)
        return answer

    async def answer(self, ids: Sequence[int], number: int, **changes: Any) -> Answer:
        """One answer to these tokens, for an agent that makes its episodes by itself.

        Args:
            number: Of the answer, from 0. Equal numbers draw with equal random numbers.
            changes: As of a call.
        """
        sampling = self.sampling.seeded(derive_seed(self.seed, number))
        return await self.generator.generate(ids, dataclasses.replace(sampling, **changes) if changes else sampling)


Agent = Callable[[Item, Generate], "Awaitable[Episode | Sequence[Episode]]"]
"""One episode, or several: parts of the same attempt that are no single sequence."""
Reward = Callable[[Item, str], "float | Awaitable[float]"]
"""From an item and the text of an answer; `Rewards` calls one in other processes."""


_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",  # made while it runs, such as the constructor of a dataclass
)
"""How paths of files begin that are no code of a user."""


async def reward_of(reward: Reward, item: Item, text: str) -> float:
    found = reward(item, text)
    value = await found if inspect.isawaitable(found) else found
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        hint = "; give it as float(...)" if isinstance(value, bool) else ""
        raise SchemaError(f"reward: expected a finite number, got {value!r} for {text[:80]!r}{hint}")
    return float(value)


def describe_error(error: BaseException) -> str:
    """In one line, with the last place in the user's own code. An error of Sharpwave has no other place."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # its text has the place
        return said
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(_LIBRARIES)]
    if not own and isinstance(error, SharpwaveError):
        return said
    last = (own or frames)[-1]
    return f"{said} ({last.filename.rpartition('/')[2]}:{last.lineno})"


async def play(agent: Agent, item: Item, generate: Generate, where: str) -> Sequence[Episode]:
    """What an agent makes of one item, checked: at least one episode.

    Raises:
        SchemaError: The agent is no async function, returns no episode, or one without an answer or a reward.
    """
    found: Any = agent(item, generate)
    if not inspect.isawaitable(found):
        raise SchemaError(f"{where}: agent: expected an async function, got one that returns {told(found)}")
    made = await found
    episodes = [made] if isinstance(made, Episode) else made
    if not isinstance(episodes, (list, tuple)) or not episodes or any(not isinstance(e, Episode) for e in episodes):
        raise SchemaError(f"{where}: agent: expected it to return an Episode, or a list of them, got {told(made)}")
    for episode in episodes:
        episode.check(where)
    return episodes


def _prompt(item: Item, key: str, where: str) -> Any:
    if key not in item:
        raise SchemaError(f"{where}: the item has no key {key!r}, it has {', '.join(item)}; give prompt_key=")
    return item[key]


def single_turn(reward: Reward, *, prompt_key: str = "prompt") -> Agent:
    """An agent that asks once: the item's prompt, one answer, its reward.

    Example:
        >>> agent = single_turn(lambda item, text: float(text == item["answer"]))
    """

    async def agent(item: Item, generate: Generate) -> Episode:
        episode = Episode(generate.encode(_prompt(item, prompt_key, "single_turn()")))
        answer = await generate(episode)
        episode.reward = await reward_of(reward, item, generate.decode(answer.tokens))
        return episode

    return agent


Tool = Callable[[Item, str, int], "tuple[str, float | None] | Awaitable[tuple[str, float | None]]"]


def _read_turn(found: Any) -> tuple[str, float | None]:
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], str):
        raise SchemaError(f"several_turns(): tool: expected a text and a reward (None goes on), got {told(found)}")
    return found


def several_turns(tool: Tool, *, turns: int, prompt_key: str = "prompt", late: float = 0.0) -> Agent:
    """An agent that gives each answer to a tool and the tool's text to the model, until the tool gives a reward.

    Args:
        tool: From an item, the text of an answer and its number, from 0, to the text that the model reads next, and
            the reward, which ends the episode; None goes on.
        turns: Most answers.
        prompt_key: The item's key that has the first text.
        late: The reward where the last turn brought none.
    """
    if turns < 1:
        raise SchemaError(f"several_turns(): turns={turns}, expected at least 1")

    async def agent(item: Item, generate: Generate) -> Episode:
        episode = Episode(generate.encode(_prompt(item, prompt_key, "several_turns()")))
        for turn in range(turns):
            answer = await generate(episode)
            found = tool(item, generate.decode(answer.tokens), turn)
            said, reward = _read_turn(await found if inspect.isawaitable(found) else found)
            if reward is not None or turn == turns - 1:
                episode.reward = late if reward is None else float(reward)
                break
            episode.tell(generate.encode(said))
        return episode

    return agent
