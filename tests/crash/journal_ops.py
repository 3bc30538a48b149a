"""A SequenceBuffer under random calls whose payload proves itself, and a slow model of what a restart has to find.

Every value says which sample, key and revision it belongs to, so a sample that comes back torn or mixed is seen without
a record of what was written.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.errors import NotReady

FLOW = sw.Dataflow([sw.Consumer("inf", {"a"}, {"b"}, 4), sw.Consumer("train", {"a", "b"}, batch_size=4)])
STALENESS = 3
Op = dict[str, Any]
WEIGHTS = (5, 5, 5, 1, 1, 2, 0.3)  # of the calls that a driver makes


def open_journal(path: Path, **options: Any) -> sw.SequenceBuffer:
    return sw.SequenceBuffer(1000, flow=FLOW, journal=path, max_staleness=STALENESS, **options)


def payload(name: str, key: str, revision: int) -> np.ndarray[Any, Any]:
    seed = zlib.crc32(f"{name}/{key}/{revision}".encode())
    length = 40_000 if seed % 30 == 0 else 2 + seed % 60  # a large one is torn more easily
    made = np.random.default_rng(seed).integers(0, 2**40, length)
    made[0], made[1] = revision, seed
    return made


def sample(name: str, key: str, revision: int) -> sw.SequenceSample:
    values = payload(name, key, revision)
    return sw.SequenceSample([name], {key: [len(values)]}, {key: values})


def revisions(batch: sw.SequenceSample, key: str) -> list[int]:
    """Of each datum; every value is checked."""
    found = []
    for part in batch.unpack():
        values = part[key]
        np.testing.assert_array_equal(values, payload(part.ids[0], key, int(values[0])))
        found.append(int(values[0]))
    return found


def observe(seq: sw.SequenceBuffer) -> dict[str, Any]:
    """Everything that a restart has to bring back, by public calls alone."""
    seen: dict[str, Any] = {"ids": seq.ids(), "used": list(seq.used_ids), "version": seq.version}
    for name, keys in (("inf", ("a",)), ("train", ("a", "b"))):
        seen[name] = {}
        try:
            lease = seq.get(name, batch_size=1000, timeout=0, partial=True)
        except NotReady:
            continue
        per_key = [revisions(lease.batch, key) for key in keys]
        seen[name] = dict(zip(lease.batch.ids, zip(*per_key, strict=True), strict=True))
        lease.release()
    return seen


class Model:
    """What the operations so far have led to."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}
        self.used: list[str] = []
        self.version = 0
        self.marks: list[tuple[str, Model, list[Op]]] = []  # name, this moment, operations since

    def apply(self, op: Op, undone: bool = False) -> None:
        """``undone``: behind the mark that a restart resumed from."""
        kind = op["op"]
        for _, _, since in self.marks:
            since.append(op)
        if kind == "put":
            for name in op["ids"]:
                self.held[name] = {
                    "a": op["revision"],
                    "b": None,
                    "inf": False,
                    "train": False,
                    "version": op["version"],
                }
        elif kind == "amend":
            for name in op["ids"]:
                if name in self.held:
                    self.held[name][op["key"]] = op["revision"]
        elif kind == "ack" and not (undone and op["consumer"] == "train"):
            for name in op["ids"]:
                if name not in self.held:
                    continue
                self.held[name][op["consumer"]] = True
                if self.held[name]["inf"] and self.held[name]["train"]:
                    del self.held[name]
                    self.used.append(name)
        elif kind == "clear":
            self.held.clear()
        elif kind == "version":
            for name in op["evicted"]:
                self.held.pop(name, None)
            if not undone:
                self.version = op["version"]
        elif kind == "mark" and not undone:
            now = copy.copy(self)
            now.held, now.used, now.marks = copy.deepcopy(self.held), list(self.used), []
            self.marks = [*self.marks[-1:], (op["name"], now, [])]

    def stale(self, version: int) -> list[str]:
        return [name for name, entry in self.held.items() if entry["version"] < version - STALENESS]

    def resumed(self, name: str) -> Model:
        at = [mark[0] for mark in self.marks].index(name)
        _, then, since = self.marks[at]
        made = copy.copy(then)
        made.held, made.used = copy.deepcopy(then.held), list(then.used)
        made.marks = [copy.deepcopy(mark) for mark in self.marks[:at]]  # an older one is still there
        made.marks = [(mark, moment, [*ops[: len(ops) - len(since)]]) for mark, moment, ops in made.marks]
        made.marks.append((name, copy.deepcopy(then), []))
        for op in since:
            if op["op"] != "mark":
                made.apply(op, undone=True)
        return made

    def seen(self) -> dict[str, Any]:
        return {
            "ids": list(self.held),
            "used": list(self.used),
            "version": self.version,
            "inf": {name: (one["a"],) for name, one in self.held.items() if not one["inf"]},
            "train": {
                name: (one["a"], one["b"])
                for name, one in self.held.items()
                if one["b"] is not None and not one["train"]
            },
        }


class Driver:
    """Random calls on a buffer. ``before`` and ``after`` get each operation around its call."""

    def __init__(self, seq: sw.SequenceBuffer, model: Model, seed: int) -> None:
        self.seq, self.model, self.stream = seq, model, random.Random(seed)
        self.count = seed * 100_000
        self.before: Callable[[Op], None] = lambda op: None
        self.after: Callable[[Op], None] = lambda op: None
        self.handles = _handles(seq)

    def step(self) -> None:
        kind = self.stream.choices(("put", "inf", "train", "again", "version", "mark", "clear"), WEIGHTS)[0]
        getattr(self, f"_{kind}")()

    def _do(self, op: Op, call: Callable[[], Any]) -> Any:
        self.before(op)
        result = call()
        self.model.apply(op)
        self.after(op)
        return result

    def _put(self) -> None:
        if len(self.model.held) > 40:
            return
        self.count += 1
        names = [f"{self.count}-{at}" for at in range(self.stream.randint(1, 5))]
        version, revision = self.model.version, self.count % 1000
        samples = [sample(name, "a", revision) for name in names]
        op = {"op": "put", "ids": names, "version": version, "revision": revision}
        handles = self._do(op, lambda: self.seq.put(samples, version=version))
        self.handles.update(zip(names, map(int, handles), strict=True))

    def _amend(self, names: list[str], key: str) -> None:
        self.count += 1
        revision = self.count % 1000
        parts = [sample(name, key, revision) for name in names]
        op = {"op": "amend", "ids": names, "key": key, "revision": revision}
        self._do(op, lambda: self.seq.amend([self.handles[name] for name in names], parts))

    def _again(self) -> None:
        names = list(self.model.held)[:2]
        if names:
            self._amend(names, "a")

    def _inf(self) -> None:
        try:
            lease = self.seq.get("inf", batch_size=self.stream.randint(1, 4), timeout=0, partial=True, owner="driver")
        except NotReady:
            return
        if self.stream.random() < 0.2:
            return lease.release()
        names = lease.batch.ids
        self._amend(list(names), "b")
        self._do({"op": "ack", "ids": list(names), "consumer": "inf"}, lease.ack)

    def _train(self) -> None:
        try:
            lease = self.seq.get("train", timeout=0, partial=True, owner="driver")
        except NotReady:
            return
        for key in ("a", "b"):
            revisions(lease.batch, key)
        self._do({"op": "ack", "ids": list(lease.batch.ids), "consumer": "train"}, lease.ack)

    def _version(self) -> None:
        version = self.model.version + self.stream.randint(1, 2)
        op = {"op": "version", "version": version, "evicted": self.model.stale(version)}
        self._do(op, lambda: self.seq.set_version(version))

    def _clear(self) -> None:
        self._do({"op": "clear"}, self.seq.clear)

    def _mark(self) -> None:
        self.count += 1
        name = f"mark-{self.count}"
        self._do({"op": "mark", "name": name}, lambda: self.seq.checkpoint(name))


def _handles(seq: sw.SequenceBuffer) -> dict[str, int]:
    return {entry.sample.ids[0]: serial for serial, entry in seq._store.index.entries.items()}
