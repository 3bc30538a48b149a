"""RLinf's datasets: batches of a replay buffer, or half of them of demonstrations."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from sharpwave.checks import whole

__all__ = ["PreloadReplayBufferDataset", "ReplayBufferDataset", "replay_buffer_collate_fn"]

_LOOK_EVERY_S = 0.05  # at buffers that are not ready, and at whether the dataset was closed


class ReplayBufferDataset(IterableDataset[dict[str, Any]]):
    """Batches without end, as soon as the buffers hold enough trajectories.

    Args:
        replay_buffer, demo_buffer: Anything with ``is_ready(n)`` and ``sample(n)``. With demonstrations, half of each
            batch comes from either; None: all from the replay buffer.
        min_replay_buffer_size, min_demo_buffer_size: Trajectories before the first batch.
        options: Not used, as upstream has it: both datasets are built by the same call.
    """

    def __init__(
        self,
        replay_buffer: Any,
        demo_buffer: Any,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        **options: Any,
    ) -> None:
        self.replay_buffer, self.demo_buffer = replay_buffer, demo_buffer
        self.batch_size = whole("ReplayBufferDataset", "batch_size", batch_size, 1 if demo_buffer is None else 2)
        self.min_replay_buffer_size, self.min_demo_buffer_size = min_replay_buffer_size, min_demo_buffer_size
        self._ended = threading.Event()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (batch := self._draw()) is not None:
            yield batch

    def _draw(self) -> dict[str, Any] | None:
        """A batch, once there is one; None: the dataset was closed."""
        while not self._ended.is_set():
            if self.replay_buffer.is_ready(self.min_replay_buffer_size) and (
                self.demo_buffer is None or self.demo_buffer.is_ready(self.min_demo_buffer_size)
            ):
                if self.demo_buffer is None:
                    return dict(self.replay_buffer.sample(self.batch_size))
                half = self.batch_size // 2
                return _joined(self.replay_buffer.sample(half), self.demo_buffer.sample(half))
            time.sleep(_LOOK_EVERY_S)
        return None

    def close(self) -> None:
        """Ends the iterators. The buffers stay open."""
        self._ended.set()


class PreloadReplayBufferDataset(ReplayBufferDataset):
    """The same; a thread draws up to ``prefetch_size`` batches ahead.

    An error of the buffers is raised by the iterator.
    """

    def __init__(
        self,
        replay_buffer: Any,
        demo_buffer: Any,
        batch_size: int,
        min_replay_buffer_size: int,
        min_demo_buffer_size: int,
        prefetch_size: int = 5,
    ) -> None:
        super().__init__(replay_buffer, demo_buffer, batch_size, min_replay_buffer_size, min_demo_buffer_size)
        self.prefetch_size = whole("PreloadReplayBufferDataset", "prefetch_size", prefetch_size)
        self._ahead: queue.Queue[dict[str, Any]] = queue.Queue(prefetch_size)
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._draw_ahead, name="sharpwave-preload", daemon=True)
            self._thread.start()
        while not self._ended.is_set():
            try:
                yield self._ahead.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                if self._failure is not None:
                    raise RuntimeError(f"drawing ahead failed: {self._failure}") from self._failure

    def _draw_ahead(self) -> None:
        try:
            while (batch := self._draw()) is not None:
                while not self._ended.is_set():
                    try:
                        self._ahead.put(batch, timeout=_LOOK_EVERY_S)
                        break
                    except queue.Full:
                        continue
        except Exception as error:
            self._failure = error

    def close(self) -> None:
        """Ends the thread and the iterators. The buffers stay open."""
        super().close()
        if self._thread is not None:
            self._thread.join()


def replay_buffer_collate_fn(batch: list[dict[str, Any]]) -> dict[str, Any]:
    """For a DataLoader with ``batch_size=1``: the datasets give whole batches."""
    return batch[0]


def _joined(one: dict[str, Any], other: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Rows of both, of the fields that both have: demonstrations need not have all."""
    left_out = sorted(f"{path}{key}" for key in one.keys() ^ other.keys())
    if left_out:
        warnings.warn(f"a batch of two buffers has only what both have; left out: {', '.join(left_out)}", stacklevel=4)
    made: dict[str, Any] = {}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict):
            made[key] = _joined(one[key], other[key], f"{path}{key}/")
        else:
            made[key] = torch.cat([one[key], other[key]])
    return {key: made[key] for key in one if key in made}
