"""A process that opens files which may be damaged and uses what it opened. It lives through many of them; when it dies
of one, that is the finding, and another one takes its place."""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.make_corpus import TABLES, fill

import sharpwave as sw
from sharpwave.errors import SharpwaveError

PATIENCE_S = 60.0  # more than the lock of the index waits, on a loaded machine

Rows = dict[int, dict[str, bytes]]


def flatten(node: Any, i: int, path: str = "") -> dict[str, bytes]:
    """One row of a batch, by the path of each array."""
    if isinstance(node, dict) and set(node) == {"values", "offsets"}:
        return {path: node["values"][node["offsets"][i] : node["offsets"][i + 1]].tobytes()}
    if isinstance(node, dict):
        return {leaf: part for name in node for leaf, part in flatten(node[name], i, f"{path}/{name}").items()}
    return {path: np.ascontiguousarray(node[i]).tobytes()}


def rows_of(buffer: sw.ReplayBuffer) -> Rows:
    """By serial. Ends of episodes are flags of the row's word, which no checksum covers."""
    found: Rows = {}
    for batch in buffer.rows():
        serials = batch.pop("indices")
        batch.pop("truncated")
        for i, serial in enumerate(serials.tolist()):
            found[serial] = flatten(batch, i)
    return found


def use(table: str, address: str, recover: bool = False) -> dict[str, Any]:
    """Opens and uses: what a refusal said, or the rows that were there; and every error that was not one of ours."""
    strange: list[str] = []

    @contextlib.contextmanager
    def step(name: str) -> Iterator[None]:
        try:
            yield
        except SharpwaveError:
            pass
        except Exception as error:
            strange.append(f"{name}: {type(error).__name__}: {error}")

    view = TABLES[table].get("view")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows that were lost: their number is told below
            buffer = sw.open(address, view=view, recover=recover)
    except SharpwaveError as refusal:
        return {"refused": str(refusal), "strange": strange}
    except Exception as error:
        return {"refused": str(error), "strange": [f"open: {type(error).__name__}: {error}"]}
    rows: Rows = {}
    lost = 0
    with step("facts"):
        len(buffer), repr(buffer), buffer.is_full, buffer.sampler
        lost = buffer.stats()["rows_lost"]
    with step("rows"):
        rows = rows_of(buffer)
    with step("sample"):
        batch = buffer.sample(5)
        buffer.get(batch["indices"])
        buffer.sample(16, out=None)
        if isinstance(buffer.sampler, sw.Prioritized):
            buffer.update_priorities(batch["indices"], np.arange(5.0))
            buffer.tune(alpha=0.3)
    with step("add"):
        fill(buffer, 3)
    with step("wrap"):
        fill(buffer, 20)
        rows_of(buffer)
    with step("save"):
        saved = Path(f"{address.removeprefix('file://')}.saved")
        saved.unlink(missing_ok=True)
        buffer.save(saved)
        with sw.open(saved, view=view) as copy:
            rows_of(copy)
            copy.sample(3)
    with step("clear"):
        buffer.clear()
        fill(buffer, 2)
    with step("flush"):
        buffer.flush()
    with step("close"):
        buffer.close()
    return {"rows": rows, "lost": lost, "strange": strange}


def serve(pipe: Connection) -> None:
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        pipe.send(use(*call))


class Opener:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.start()

    def start(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        self.process = self.context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def use(self, table: str, address: str, recover: bool = False) -> dict[str, Any]:
        """What use() says; {"died": how} where it did not live to."""
        self.pipe.send((table, address, recover))
        try:
            if self.pipe.poll(PATIENCE_S):
                return self.pipe.recv()  # type: ignore[no-any-return]
            died = f"hung for {PATIENCE_S:g} s"
            self.process.kill()
        except (EOFError, ConnectionResetError):
            died = ""
        self.process.join()
        self.start_again()
        return {"died": died or f"exit code {self.exit_code}", "strange": []}

    def start_again(self) -> None:
        self.exit_code = self.process.exitcode
        self.pipe.close()
        self.start()

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(PATIENCE_S)
