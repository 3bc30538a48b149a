"""Samples on their way into a SequenceBuffer."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _core
from ..files import Body
from ..files.origin import Origin
from .sample import SequenceSample

__all__ = ["Form", "Incoming", "Survey"]

Form = tuple[Any, Any, bool]  # of a key: trailing shape, dtype, whether it is described only


class Survey(NamedTuple):
    """What the engine says of samples of one datum, in one go."""

    ids: list[str]
    tokens: list[int]
    bytes: list[int]
    names: set[str]  # the ids
    ends: list[int]  # of runs of samples that have the same keys, shapes, dtypes and names of metadata

    @classmethod
    def of(cls, samples: list[SequenceSample]) -> Survey | None:
        """None where one has several data, or is no SequenceSample."""
        found = _core.survey_samples(samples, SequenceSample)
        if found is None:
            return None
        ids, tokens, nbytes, ends = found
        return cls(ids, tokens, nbytes, set(ids), ends)


class Incoming:
    """Samples that are about to be put, as columns: one entry a datum in each list."""

    def __init__(
        self, samples: list[SequenceSample], survey: Survey, versions: list[int | None], births: list[int] | None
    ) -> None:
        self.samples, self.survey, self.versions, self.births = samples, survey, versions, births
        self.tokens, self.bytes = sum(survey.tokens), sum(survey.bytes)
        self.body: Body | None = None  # of the record, where there is a journal
        self.entries: list[Any] = []  # what the index will hold, where it was made beforehand
        self.groups: list[Any] | None = None
        self.masks: list[int] = []  # the bits of the keys, one a run
        self.forms: dict[str, Form] = {}
        self.origin: Origin | None = None  # of a call that may be sent again

    def __len__(self) -> int:
        return len(self.samples)
