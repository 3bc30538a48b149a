"""`Episode`: the tokens of one conversation, and the sample that a group of them makes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from ..checks import told
from ..errors import SchemaError
from ..sequences.dataflow import Consumer, Dataflow
from ..sequences.sample import SequenceSample
from .generators.answer import Answer

__all__ = ["SAMPLE_KEYS", "Episode", "read_rewards", "to_sample", "train_flow"]

SAMPLE_KEYS = ("input_ids", "logprobs", "loss_mask", "rewards", "versions")


@dataclass
class Episode:
    """Tokens in their order: a prompt, answers of the model, and what tools or users said between them.

    The learner trains on the tokens of answers. An agent sets `reward` before it returns the episode.

    Example:
        >>> episode = Episode([1, 2])
        >>> episode.take(Answer([7, 8], [-0.1, -0.2], [3, 3], "stop"))
        >>> episode.tell([5])
        >>> episode.tokens, episode.is_made
        ([1, 2, 7, 8, 5], [False, False, True, True, False])
    """

    tokens: list[int] = field(default_factory=list)
    reward: float | None = None
    is_made: list[bool] = field(default_factory=list)  # by the model
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of made tokens only
    answers: int = 0

    def __post_init__(self) -> None:
        given, self.tokens = list(self.tokens), []
        self.tell(given)

    def tell(self, tokens: Iterable[int]) -> None:
        """Tokens that the model did not make."""
        listed = list(map(int, tokens))
        self.tokens += listed
        self.is_made += [False] * len(listed)
        self.logprobs += [0.0] * len(listed)

    def take(self, answer: Answer) -> None:
        """Tokens that the model made.

        Raises:
            SchemaError: The answer ended in an error, or its versions are below those of an earlier answer.
        """
        if answer.stop in ("error", "abort"):
            raise SchemaError(f"take(): the answer ended by {answer.stop!r} and cannot be trained on")
        if self.versions and answer.versions and answer.versions[0] < self.versions[-1]:
            raise SchemaError(
                f"take(): the answer begins with version {answer.versions[0]}, after one of version "
                f"{self.versions[-1]}; the generators of one episode have to go forward"
            )
        self.tokens += answer.tokens
        self.is_made += [True] * len(answer.tokens)
        self.logprobs += answer.logprobs
        self.versions += answer.versions
        self.answers += 1

    def check(self, where: str) -> None:
        """Raises:
        SchemaError: There is no answer, or the reward is not a finite number.
        """
        if not any(self.is_made):
            raise SchemaError(f"{where}: the episode has no token of the model; call generate(episode)")
        reward = self.reward
        # The first test is the usual case: numbers.Real is asked in Python.
        is_number = type(reward) is float or (isinstance(reward, numbers.Real) and not isinstance(reward, bool))
        if not is_number or not math.isfinite(float(reward or 0)):
            raise SchemaError(f"{where}: reward: expected a finite number, got {self.reward!r}")


def to_sample(key: str, episodes: Sequence[Episode]) -> SequenceSample:
    """The episodes of one item as a sample of the id `key`, a sequence each.

    Raises:
        SchemaError: An episode has no answer, or its reward is not a finite number.
    """
    for episode in episodes:
        episode.check(repr(key))
    lens = [[len(episode.tokens) for episode in episodes]]
    is_made = _flat((one.is_made for one in episodes), np.bool_)
    data = {
        "input_ids": _flat((one.tokens for one in episodes), np.int64),
        "loss_mask": is_made,
        "logprobs": _flat((one.logprobs for one in episodes), np.float32),
        "versions": _token_versions(episodes, is_made, lens[0]),
        "rewards": np.array([one.reward for one in episodes], np.float32),
    }
    seqlens = {**dict.fromkeys(data, lens), "rewards": [[1] * len(episodes)]}
    return SequenceSample([key], seqlens, data)


def _flat(lists: Iterable[list[Any]], dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    """One array of all: making one for each list takes longer than what is in them."""
    return np.array(list(chain.from_iterable(lists)), dtype)


def _token_versions(
    episodes: Sequence[Episode], is_made: np.ndarray[Any, np.dtype[np.bool_]], lens: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One a token: a token from outside has the version of the next one that the model made, or of the last."""
    versions = _flat((one.versions for one in episodes), np.int64)
    before = np.cumsum(is_made) - is_made  # how many the model made before each token
    last = np.cumsum([len(episode.versions) for episode in episodes]) - 1  # of each episode
    found: np.ndarray[Any, np.dtype[np.int64]] = versions[np.minimum(before, np.repeat(last, lens))]
    return found


def read_rewards(where: str, sample: SequenceSample, key: str, keys: Collection[str]) -> np.ndarray[Any, Any]:
    """The rewards of a sample, one a sequence.

    Raises:
        SchemaError: It is not one sample of the id `key`, lacks one of `keys`, or has rewards that are not finite.
    """
    if list(sample.ids) != [key]:
        raise SchemaError(f"{where}: expected one sample with the permit's key as its id, got {told(sample.ids)}")
    if lacking := sorted(set(keys) - sample.keys):
        raise SchemaError(f"{where}: the sample lacks {', '.join(lacking)}")
    rewards = np.asarray(sample["rewards"])
    if not np.isfinite(rewards).all():
        raise SchemaError(f"{where}: rewards: expected finite numbers, got {told(rewards.tolist())}")
    return rewards


def train_flow(batch: int, *, reference: bool = False) -> Dataflow:
    """The consumers of a run's samples: the learner, which reads what agents make.

    Args:
        reference: With a stage before it, which adds the log-probabilities of the reference model.
    """
    if not reference:
        return Dataflow([Consumer("train", inputs=SAMPLE_KEYS, batch_size=batch)])
    return Dataflow(
        [
            Consumer("reference", inputs={"input_ids"}, outputs={"ref_logprobs"}, batch_size=batch),
            Consumer("train", inputs={*SAMPLE_KEYS, "ref_logprobs"}, batch_size=batch),
        ]
    )
