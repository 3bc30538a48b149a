"""SIGKILL at any instant of a SequenceBuffer with a journal: what was acknowledged is there, and nothing else."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
from crash.journal_ops import Driver, Model, Op, observe, open_journal, revisions, sample

from sharpwave.sequences import store

KILLS = 500 if os.environ.get("SHARPWAVE_SOAK") == "1" else 12  # of each kind


def run_child(path: Path, model: Model, seed: int, sync: bool, say: int) -> None:
    """Calls without end; before and after each one a line."""

    def tell(state: str, op: Op) -> None:
        os.write(say, json.dumps([state, op]).encode() + b"\n")

    driver = Driver(open_journal(path, sync=sync), model, seed)
    driver.before = lambda op: tell("begins", op)
    driver.after = lambda op: tell("done", op)
    while True:
        driver.step()


def kill_one(
    path: Path, model: Model, seed: int, sync: bool, after_s: float, from_start: bool
) -> tuple[list[Op], Op | None]:
    """The operations that a child finished before it was killed, and the one that it was in.

    The time counts from the end of its first operation, or ``from_start``: then it may die while it opens the file.
    """
    read, say = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            run_child(path, model, seed, sync, say)
        except BaseException:
            os.write(say, json.dumps(["failed", traceback.format_exc()]).encode() + b"\n")
        os._exit(1)
    os.close(say)
    said = b""
    end = time.monotonic() + after_s if from_start else None
    while end is None or time.monotonic() < end:
        left = 60 if end is None else max(0.0, end - time.monotonic())
        if not select.select([read], [], [], left)[0]:
            continue
        part = os.read(read, 1 << 16)
        if not part:
            break  # it failed, and said why
        said += part
        if end is None and b'["done"' in said:
            end = time.monotonic() + after_s
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while part := os.read(read, 1 << 16):
        said += part
    os.close(read)
    done: list[Op] = []
    pending: Op | None = None
    for line in said.split(b"\n")[:-1]:
        state, op = json.loads(line)
        assert state != "failed", op
        if state == "done":
            done.append(op)
        pending = op if state == "begins" else None
    return done, pending


def reopen(path: Path, told: dict[str, int], **options: Any) -> Any:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        seq = open_journal(path, **options)
    cut = seq.stats()["cut_bytes"]
    assert len(said) == (cut > 0), [str(one.message) for one in said]
    assert seq.stats()["lost_records"] == 0
    told["torn"] += cut > 0
    return seq


def has_marks(found: list[str], model: Model) -> bool:
    """Those of the model come last; after a resume the file may know one before them."""
    names = [mark[0] for mark in model.marks]
    return found[len(found) - len(names) :] == names


def is_amended(seq: Any, op: Op) -> bool:
    """Whether an amend was made. Its new values may be hidden from ``observe``: a sample that the trainer has
    acknowledged is shown again only when a resume undoes that."""
    key, held = op["key"], seq._store.index.by_id
    samples = [held[name].sample for name in op["ids"] if name in held]
    return all(key in one and int(one[key][0]) == op["revision"] for one in samples)


@pytest.mark.parametrize("sync", [False, True])
def test_killed_buffers_come_back_as_they_were_acknowledged(tmp_path: Path, monkeypatch: Any, sync: bool) -> None:
    monkeypatch.setattr(store, "_SLACK", 3000)  # rewrites come often
    path = tmp_path / "journal"
    stream = random.Random(11 + sync)
    model = Model()
    told = {"kills": 0, "operations": 0, "in doubt and made": 0, "in doubt and not made": 0, "torn": 0, "resumed": 0}
    for seed in range(1, KILLS + 1):
        done, pending = kill_one(path, model, seed, sync, stream.uniform(0, 0.03), stream.random() < 0.3)
        for op in done:
            model.apply(op)
        told["kills"] += 1
        told["operations"] += len(done)
        maybe = None
        if pending is not None:
            maybe = Model()
            maybe.__dict__.update({**model.__dict__, "held": {k: dict(v) for k, v in model.held.items()}})
            maybe.used = list(model.used)
            maybe.marks = [(name, then, list(since)) for name, then, since in model.marks]
            maybe.apply(pending)
        seq = reopen(path, told)
        found = observe(seq)
        marks = [mark.name for mark in seq._store.ledger.marks]
        is_refuted = pending is not None and pending["op"] == "amend" and not is_amended(seq, pending)
        if maybe is not None and found == maybe.seen() and has_marks(marks, maybe) and not is_refuted:
            model = maybe
            told["in doubt and made"] += 1
        elif pending is not None:
            told["in doubt and not made"] += 1
        assert found == model.seen(), f"kill {seed}, in {pending}"
        assert has_marks(marks, model), f"kill {seed}, in {pending}: {marks}"
        seq.close()
        if model.marks and stream.random() < 0.5:
            name = stream.choice(model.marks)[0]
            seq = reopen(path, told, resume=name)
            model = model.resumed(name)
            assert observe(seq) == model.seen(), f"kill {seed}, resumed from {name}"
            seq.close()
            told["resumed"] += 1
    print(told)
    assert told["operations"] > 0
    # A second name of the file that was about to replace it: the next rewrite takes it away.
    assert set(os.listdir(tmp_path)) <= {"journal", "journal.next"}


def put_by_threads(path: Path, turn: int, sync: bool, say: int) -> None:
    """Several threads put and amend without end, so that their records share writes."""
    seq = open_journal(path, sync=sync)

    def work(number: int) -> None:
        for count in range(10**6):
            name = f"{turn}.{number}.{count}"
            os.write(say, f"begins {name}\n".encode())
            handles = seq.put(sample(name, "a", 0), version=0)
            os.write(say, f"put {name}\n".encode())
            seq.amend(handles, sample(name, "b", 1))
            os.write(say, f"amended {name}\n".encode())

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("sync", [False, True])
def test_killed_in_shared_writes_every_acknowledged_call_is_there(tmp_path: Path, sync: bool) -> None:
    stream = random.Random(5 + sync)
    acknowledged = unacknowledged = 0
    for turn in range(KILLS):
        path = tmp_path / f"journal {turn}"
        read, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                put_by_threads(path, turn, sync, say)
            except BaseException:
                os.write(say, f"failed {traceback.format_exc()!r}\n".encode())
            os._exit(1)
        os.close(say)
        assert select.select([read], [], [], 60)[0]
        time.sleep(stream.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(read, "rb") as pipe:
            lines = pipe.read().decode().split("\n")[:-1]
        said: dict[str, set[str]] = {"begins": set(), "put": set(), "amended": set()}
        for line in lines:
            state, _, name = line.partition(" ")
            assert state != "failed", name
            said[state].add(name)
        seq = reopen(path, {"torn": 0})
        held = {entry.sample.ids[0]: entry.sample for entry in seq._store.index.entries.values()}
        assert said["put"] <= set(held) <= said["begins"]
        for name, one in held.items():
            assert revisions(one, "a") == [0]
            assert "b" in one.keys or name not in said["amended"]
            assert "b" not in one.keys or revisions(one, "b") == [1]
        serials = sorted(seq._store.index.entries)
        assert serials == list(range(len(serials))), "no handle was given twice or skipped"
        acknowledged += len(said["put"])
        unacknowledged += len(held) - len(said["put"])
        seq.close()
        path.unlink()
    print({"kills": KILLS, "acknowledged": acknowledged, "in doubt and made": unacknowledged})
    assert acknowledged > 0
