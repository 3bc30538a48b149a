"""The intake of a SequenceBuffer: samples from users, read and checked before anything is changed."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..checks import told, whole
from ..errors import SchemaError
from ..files import Body
from .change import Later
from .column import Column, concatenate
from .dataflow import Dataflow
from .history import pack_samples, pack_survey, pack_whole
from .incoming import Form, Incoming, Survey
from .index import SampleIndex
from .lines import HeldSample
from .sample import SequenceSample
from .staleness import VERSIONS, first_version

__all__ = ["Intake", "OtherId", "read_handles", "read_ids", "unpack"]


class OtherId(SchemaError):
    """An amend names a handle whose sample has another id."""


class Intake:
    """The checks of one buffer. ``read`` needs no lock; ``check``, ``keep`` and ``merge`` are called under it."""

    def __init__(self, flow: Dataflow, index: SampleIndex, duplicates: bool, needs_version: bool) -> None:
        self._index = index
        self.duplicates = duplicates
        self._needs_version = needs_version
        self._groups = any(consumer.group_size for consumer in flow)
        self._forms: dict[
            str, Form
        ] = {}  # of each key that was ever put: trailing shape, dtype, whether there are values
        self._births: bool | None = None  # whether births are given; None before the first put
        self.coming: list[Incoming] = []  # admitted, and not yet in the index: their records are being written

    def read(
        self,
        samples: SequenceSample | Sequence[SequenceSample],
        version: int | Sequence[int] | None,
        births: Sequence[int] | None,
        journal: bool,
    ) -> Incoming:
        parts = list(samples) if isinstance(samples, (list, tuple)) else []
        survey = Survey.of(parts) if parts else None
        if survey is None:
            parts = unpack("put()", samples)
            survey = Survey.of(parts)
            assert survey is not None
        versions = self._read_versions(version, parts, survey)
        listed = None if births is None else self._read_births(births, len(parts))
        incoming = self.incoming(parts, survey, versions, listed)
        if journal:
            whole = samples if isinstance(samples, SequenceSample) and parts else None
            incoming.body = Body(pack_survey(parts, survey) if whole is None else pack_whole(whole))
        return incoming

    def prepare(self, incoming: Incoming) -> None:
        """Does what the worker would do next, while it writes. It may be left out, or be cut short by an interrupt."""
        if incoming.body is not None:
            incoming.body.checksum.compute()
        incoming.entries = HeldSample.make_all(incoming)

    @property
    def has_births(self) -> bool:
        return bool(self._births)

    def body(self, samples: Any, parts: list[SequenceSample]) -> list[Any]:
        """Of the record of an amend."""
        return pack_whole(samples) if isinstance(samples, SequenceSample) and parts else pack_samples(parts)

    def incoming(
        self, samples: list[SequenceSample], survey: Survey, versions: list[int | None], births: list[int] | None
    ) -> Incoming:
        made = Incoming(samples, survey, versions, births)
        made.masks = [self._index.mask(frozenset(samples[end - 1]._columns)) for end in survey.ends]
        if self._groups:
            made.groups = [self._group(sample) for sample in samples]
        return made

    def _group(self, sample: SequenceSample) -> Any:
        if "group" not in sample._metadata:
            raise SchemaError(f"put(): metadata: expected 'group' for {sample._ids[0]!r}: a consumer has group_size=")
        group = sample._metadata["group"][0]
        # What a file gives back equal: a tuple would come back as a list, which is no key of a dict.
        if not isinstance(group, (str, numbers.Real, type(None))):
            raise SchemaError(
                f"put(): metadata: group of {sample._ids[0]!r}: expected text or a number, got {told(group)}"
            )
        return group

    def _read_versions(self, version: Any, parts: list[SequenceSample], survey: Survey) -> list[int | None]:
        if version is None:
            found: list[int | None] = [None] * len(parts)
            if any(VERSIONS in parts[end - 1]._columns for end in survey.ends):
                found = [first_version(part) if VERSIONS in part._columns else None for part in parts]
            if self._needs_version and None in found:
                name = parts[found.index(None)]._ids[0]
                raise SchemaError(
                    f"put(): version: expected one, since the buffer has max_staleness=, got none for {name!r}; give "
                    "version=, or the key 'versions' with one a token"
                )
            return found
        if isinstance(version, (Sequence, np.ndarray)) and not isinstance(version, str):
            if len(version) != len(parts):
                raise SchemaError(f"put(): version: expected one or {len(parts)}, got {len(version)}")
            return [whole("put()", "version", one, 0) for one in version]
        return [whole("put()", "version", version, 0)] * len(parts)

    def _read_births(self, births: Sequence[int], count: int) -> list[int]:
        if not isinstance(births, (Sequence, np.ndarray)) or isinstance(births, str):
            raise SchemaError(f"put(): births: expected a list of {count}, one a datum, got {births!r}")
        if len(births) != count:
            raise SchemaError(f"put(): births: expected {count}, one a datum, got {len(births)}")
        return [whole("put()", "births", birth) for birth in births]

    def check(self, incoming: Incoming) -> None:
        """Refuses samples that do not fit to those that are held."""
        if self._births is not None and self._births != (incoming.births is not None):
            raise SchemaError(
                "put(): births: given in some puts and left out in others; the order of puts and a clock of yours do "
                "not compare"
            )
        if not self.duplicates:
            held, names = self._index.by_id, incoming.survey.names
            if len(names) != len(incoming) or not held.keys().isdisjoint(names):
                seen: set[str] = set()
                for name in incoming.survey.ids:
                    if name in held or name in seen:
                        raise SchemaError(
                            f"put(): id {name!r}: held already; give other ids, wait until it is used, or allow "
                            "SequenceBuffer(duplicate_ids=True)"
                        )
                    seen.add(name)
            if not all(names.isdisjoint(other.survey.names) for other in self.coming):
                raise Later  # one of them will have the same id
        incoming.forms = self._forms_of("put()", incoming)

    def _forms_of(self, where: str, incoming: Incoming) -> dict[str, Form]:
        return self._new_forms(where, [incoming.samples[end - 1] for end in incoming.survey.ends])

    def is_first(self, incoming: Incoming) -> bool:
        """Whether it decides what later samples must have."""
        return bool(incoming.forms) or self._births is None

    def keep(self, incoming: Incoming) -> None:
        self._births = incoming.births is not None
        self._forms.update(incoming.forms)

    def keep_forms(self, forms: dict[str, Form]) -> None:
        self._forms.update(forms)

    def forget(self) -> None:
        """Nothing is held any more: the next put decides the forms and whether births are given."""
        self._forms, self._births = {}, None

    def learn(self, incoming: Incoming, has_births: bool) -> None:
        """From a journal."""
        self._forms.update(self._forms_of("journal", incoming))
        if len(incoming):
            self._births = has_births

    def merge(
        self, entries: list[HeldSample], parts: list[SequenceSample]
    ) -> tuple[list[tuple[SequenceSample, int, int, int]], dict[str, Form]]:
        """Each entry's sample with its new keys, its tokens and bytes and the bits of the keys; and the forms of keys
        that are new."""
        forms = self._new_forms("amend()", parts)
        merged = []
        masks, make = _Masks(self._index), SequenceSample._make
        for entry, part in zip(entries, parts, strict=True):
            old = entry.sample
            if old._ids != part._ids:
                raise OtherId(
                    f"amend(): handle {entry.serial}: expected the id {entry.sample._ids[0]!r}, got {part._ids[0]!r}; "
                    "handles and samples come in the same order"
                )
            columns = {**old._columns, **part._columns}
            metadata = {**old._metadata, **part._metadata} if part._metadata else old._metadata
            tokens, nbytes = _weigh(columns)
            merged.append((make(old._ids, columns, metadata), tokens, nbytes, masks.of(part)))
        if len({entry.serial for entry in entries}) != len(entries):
            raise SchemaError("amend(): handles: expected each once")
        return merged, forms

    def gather(self, samples: list[SequenceSample], keys: list[str]) -> SequenceSample:
        """What ``SequenceSample.gather`` gives, less the checks that every sample has passed on its way in."""
        columns = {}
        for key in keys:
            parts = [sample._columns[key] for sample in samples]
            data = concatenate([part.data for part in parts])
            columns[key] = Column([row for part in parts for row in part.lens], data, parts[0].shape, parts[0].dtype)
        names = dict.fromkeys(name for sample in samples for name in sample._metadata)
        metadata = {name: [s._metadata[name][0] if name in s._metadata else None for s in samples] for name in names}
        return SequenceSample._make([sample._ids[0] for sample in samples], columns, metadata)

    def _new_forms(self, where: str, samples: list[SequenceSample]) -> dict[str, Form]:
        known = self._forms
        new: dict[str, Form] = {}
        for sample in samples:
            for key, (_, data, shape, dtype) in sample._columns.items():
                first = known.get(key) or new.get(key)
                if first is not None and first[1] is dtype and first[0] == shape and first[2] == (data is None):
                    continue  # most are: NumPy and torch have one object a dtype
                form = (shape, dtype, data is None)
                if first is None:
                    new[key] = form
                elif first != form:
                    raise SchemaError(
                        f"{where}: key {key!r} of {sample._ids[0]!r}: expected {_said(first)} as before, got "
                        f"{_said(form)}"
                    )
        return new


def unpack(where: str, samples: SequenceSample | Sequence[SequenceSample]) -> list[SequenceSample]:
    """One sample a datum."""
    if isinstance(samples, SequenceSample):
        return samples.unpack()
    parts: list[SequenceSample] = []
    if not isinstance(samples, Iterable):
        raise SchemaError(f"{where}: samples: expected SequenceSamples, got {type(samples).__name__}")
    for sample in samples:
        if not isinstance(sample, SequenceSample):
            raise SchemaError(f"{where}: samples: expected SequenceSamples, got {type(sample).__name__}")
        if len(sample._ids) == 1:
            parts.append(sample)
        else:
            parts += sample.unpack()
    return parts


def read_handles(where: str, handles: Any) -> list[int]:
    try:
        listed = np.asarray(handles).reshape(-1)
    except ValueError:
        listed = np.empty(1, object)
    if listed.size and listed.dtype.kind not in "iu":
        raise SchemaError(f"{where}: handles: expected whole numbers of put() or of a lease, got {handles!r:.100}")
    return [int(one) for one in listed]


def read_ids(where: str, ids: Any) -> list[str]:
    if not isinstance(ids, Iterable):
        raise SchemaError(f"{where}: ids: expected a list, got {ids!r}")
    return [str(one) for one in ids]


class _Masks:
    """The bits of samples' keys. Neighbours mostly have the same keys, and comparing is faster than hashing them."""

    def __init__(self, index: SampleIndex) -> None:
        self._index = index
        self._keys: Any = None
        self._mask = 0

    def of(self, sample: SequenceSample) -> int:
        keys = sample._columns.keys()
        if keys != self._keys:
            self._keys, self._mask = keys, self._index.mask(frozenset(keys))
        return self._mask


def _weigh(columns: dict[str, Column]) -> tuple[int, int]:
    """Tokens and bytes of one datum."""
    tokens = nbytes = 0
    for lens, data, _, _ in columns.values():
        held = sum(lens[0])
        if held > tokens:
            tokens = held
        if data is not None:
            nbytes += data.nbytes
    return tokens, nbytes


def _said(form: Form) -> str:
    shape, dtype, described = form
    return f"{dtype} of trailing shape {shape}{' without values' if described else ''}"
