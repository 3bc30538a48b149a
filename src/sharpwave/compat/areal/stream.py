"""Upstream's names and exceptions of the push/pull stream, over ``sharpwave.sequences.stream``.

JSON documents travel as JSON. A SequenceSample may be pushed as it is: it travels as safetensors, and comes out as one.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError
from sharpwave.files import replace_file
from sharpwave.sequences.stream import Puller, Pusher, grouping

__all__ = [
    "NameResolvingZmqPuller",
    "NameResolvingZmqPusher",
    "PullerStreamDataset",
    "ZMQJsonPuller",
    "ZMQJsonPusher",
    "grouping",
]


class ZMQJsonPusher:
    """Connects to a puller.

    Args:
        hwm: Most items that are not yet taken; a further push waits.
    """

    def __init__(self, host: str, port: int, hwm: int = 1000) -> None:
        self.host, self.port = host, port
        self._pusher = Pusher(f"tcp://{host}:{port}", window=hwm)

    def push(self, data: Any) -> None:
        """Sends what JSON holds, or a SequenceSample.

        Raises:
            TypeError: It is neither.
        """
        try:
            self._pusher.push(data)
        except SchemaError as error:
            raise TypeError(f"Data is not JSON-serializable: {error}") from None

    def close(self, timeout: float = 10.0) -> None:
        """Waits until everything was taken; upstream throws the rest away."""
        self._pusher.close(timeout)


class ZMQJsonPuller:
    """Listens; a port of 0 takes a free one."""

    def __init__(self, host: str, port: int, default_timeout_ms: int = 1000, hwm: int = 1000) -> None:
        self.host = host
        self.default_timeout_ms = default_timeout_ms
        self._puller = Puller(f"tcp://{host}:{port}")
        self.port = int(self._puller.address.rpartition(":")[2])

    def pull(self, timeout_ms: int | None = None) -> Any:
        """The next item.

        Args:
            timeout_ms: 0 does not wait; None waits for ``default_timeout_ms``.

        Raises:
            queue.Empty: None came in time.
        """
        wait = self.default_timeout_ms if timeout_ms is None else timeout_ms
        try:
            return self._puller.pull(wait / 1e3)
        except NotReady:
            raise queue.Empty(f"No data available after {wait}ms timeout") from None

    def close(self) -> None:
        self._puller.close()


def _place(experiment: str, trial: str, puller: int, root: str | os.PathLike[str] | None) -> Path:
    base = Path(tempfile.gettempdir()) / f"sharpwave-streams-{os.getuid()}" if root is None else Path(root)
    return base / experiment / trial / f"puller{puller}"


class NameResolvingZmqPuller(ZMQJsonPuller):
    """Listens on a free port and writes it where pushers look for it: a folder that both can read."""

    def __init__(
        self,
        experiment_name: str,
        trial_name: str,
        puller_index: int,
        *,
        host: str = "127.0.0.1",
        root: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(host, 0, **options)
        self._place = _place(experiment_name, trial_name, puller_index, root)
        self._place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(self._place, [f"{host}:{self.port}".encode()], sync=False)

    def close(self) -> None:
        self._place.unlink(missing_ok=True)
        super().close()


class NameResolvingZmqPusher(ZMQJsonPusher):
    """Connects to the puller that serves it, by ``grouping``; waits until that is there."""

    def __init__(
        self,
        experiment_name: str,
        trial_name: str,
        pusher_index: int,
        pusher_cnt: int,
        puller_cnt: int,
        *,
        root: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        groups = grouping(pusher_cnt, puller_cnt)
        puller = next((one for one, served in groups.items() if pusher_index in served), None)
        if puller is None:
            raise SchemaError(f"NameResolvingZmqPusher(): pusher_index: expected 0 to {pusher_cnt - 1}")
        place = _place(experiment_name, trial_name, puller, root)
        deadline = time.monotonic() + timeout
        while not place.exists():
            if time.monotonic() > deadline:
                raise NotReady(f"NameResolvingZmqPusher(): no puller wrote {place} in {timeout:g} s")
            time.sleep(0.05)
        host, _, port = place.read_text().rpartition(":")
        super().__init__(host, int(port), **options)


class PullerStreamDataset:
    """A data set that is never the same: ``dataset[i]`` is everything that has come since the last look, maybe nothing.

    A thread pulls into a queue. While the queue is full it holds one item and pulls no more, so pushers wait.

    Args:
        puller: A ZMQJsonPuller. The data set owns it.
        dataset_size: What ``len`` says.
        queue_size: Most items that wait; ``dataset_size`` unless told.
    """

    def __init__(self, puller: ZMQJsonPuller, dataset_size: int, queue_size: int | None = None) -> None:
        self._puller = puller
        self._size = dataset_size
        self._queue: queue.Queue[Any] = queue.Queue(dataset_size if queue_size is None else queue_size)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="sharpwave-puller", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    item = self._puller.pull(timeout_ms=50)
                except queue.Empty:
                    continue
                if isinstance(item, sw.SequenceSample) or item is not None:
                    self._hold(item)
        except BaseException as error:
            self._error = error

    def _hold(self, item: Any) -> None:
        while True:
            try:
                return self._queue.put(item, timeout=0.05)
            except queue.Full:
                if self._stop.is_set():  # it was acknowledged: close() hands it out beyond the bound
                    self._queue.maxsize = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> list[Any]:
        """Everything that waits, whatever the index.

        Raises:
            RuntimeError: The thread died.
        """
        if self._error is not None:
            raise RuntimeError(f"PullerStreamDataset: the pulling thread died: {self._error!r}") from self._error
        items: list[Any] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                return items

    def close(self) -> list[Any]:
        """Stops pulling; returns what was taken and not yet looked at."""
        self._stop.set()
        self._thread.join()
        if not isinstance(self._error, ClosedError):
            self._puller.close()
        return [] if self._error is not None else self[0]
