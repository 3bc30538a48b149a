"""`RunLog`: what a run tells: a line for each step, events, and who was busy when."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..sequences.sample import SequenceSample

__all__ = ["RunLog", "describe_batch", "read_lines"]

STEPS, EVENTS, SPANS = "steps.jsonl", "events.jsonl", "spans.jsonl"
_RECENT = 20


class RunLog:
    """Writes JSON lines into a folder; several processes of a run may append to the same files.

    `s` is Unix time in seconds, so that a run goes on in its logs after a reboot. Durations come from a clock that only
    grows.

    Args:
        folder: Made where it is missing.
        tensorboard: Whether numbers of steps also go to TensorBoard, where it is installed.
        show: Called with every line of a step and every score, for the console.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        tensorboard: bool = False,
        show: Callable[[str, dict[str, Any]], None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, IO[str]] = {}
        self._show = show
        self._board = _board(self.folder / "tensorboard") if tensorboard else None
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        """The last lines of steps."""

    def __call__(self, event: str, **about: Any) -> None:
        """An event of the controller, of the evaluation or of the launcher."""
        self._write(EVENTS, {"s": round(time.time(), 6), "event": event, **about})
        if event == "score":
            self._to_board("held_out/reward", about["reward"], about["version"])
        if self._show is not None:
            self._show(event, about)

    def fail(self, error: Exception) -> None:
        """The error that ended the run. A full disk, which may be that error, keeps no line of it."""
        with suppress(OSError):
            self("fail", why=f"{type(error).__name__}: {error}")

    def step(self, line: Mapping[str, Any]) -> None:
        """The numbers of one training step."""
        said = {"s": round(time.time(), 6), **line}
        self._write(STEPS, said)
        self.recent.append(said)
        for name, value in said.items():
            if isinstance(value, (int, float)) and name not in ("s", "step"):
                self._to_board(f"train/{name}", value, said["step"])
        if self._show is not None:
            self._show("step", said)

    def span(self, who: str, what: str, began_s: float, took_s: float, **about: Any) -> None:
        """Somebody was busy for a while, from a time of `time.monotonic` on."""
        self.span_at(who, what, time.time() + began_s - time.monotonic(), took_s, **about)

    def span_at(self, who: str, what: str, s: float, took_s: float, **about: Any) -> None:
        """The same, from a Unix time on."""
        self._write(SPANS, {"who": who, "what": what, "s": round(s, 6), "took_s": round(took_s, 6), **about})

    @contextmanager
    def busy(self, who: str, what: str, **about: Any) -> Iterator[None]:
        """A span around the body."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.span(who, what, began, time.monotonic() - began, **about)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._board is not None:
            self._board.close()

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        if name not in self._files:
            path = self.folder / name
            is_cut = _is_cut(path)
            # Line by line: one write() for each, so lines of several processes do not mix.
            self._files[name] = path.open("a", buffering=1, encoding="utf-8")
            if is_cut:
                self._files[name].write("\n")
        self._files[name].write(json.dumps(line) + "\n")

    def _to_board(self, name: str, value: float, step: int) -> None:
        if self._board is not None:
            self._board.add_scalar(name, value, step)


def _is_cut(path: Path) -> bool:
    """Whether the last line was left half written, by a process that was killed or by a full disk."""
    try:
        with path.open("rb") as file:
            return bool(file.seek(0, os.SEEK_END)) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def _board(folder: Path) -> Any:
    with suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder))
    return None


def describe_batch(batch: SequenceSample, version: int) -> dict[str, Any]:
    """Numbers of a batch: rewards, lengths, and how many versions behind its tokens are.

    Args:
        version: Of the weights that train on it.
    """
    made = np.asarray(batch["loss_mask"], bool)
    rewards = np.asarray(batch["rewards"], np.float64)
    lags = version - np.asarray(batch["versions"], np.int64)[made]
    found, counts = np.unique(lags, return_counts=True)
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "tokens_made": int(made.sum()),
        "staleness": float(lags.mean()) if len(lags) else 0.0,
        "staleness_max": int(lags.max(initial=0)),
        "staleness_histogram": dict(zip(map(str, found.tolist()), counts.tolist(), strict=True)),
    }


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a log. A last line that a killed process left half written is left out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n"):
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
