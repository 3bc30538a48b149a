"""Upstream's names and exceptions of the push/pull stream, over ``sharpwave.service.stream``.

JSON documents travel as JSON. A SequenceSample may be pushed as it is: it travels as safetensors, and comes out as one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sharpwave as sw
from sharpwave.checks import whole
from sharpwave.errors import NotReady, SchemaError
from sharpwave.files import replace_file
from sharpwave.service.stream import Puller, Pusher, grouping

from .data import SequenceSample

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "NameResolvingZmqPuller",
    "NameResolvingZmqPusher",
    "PullerStreamDataset",
    "ZMQJsonPuller",
    "ZMQJsonPusher",
    "grouping",
]

ROOT = "SHARPWAVE_STREAM_ROOT"


class ZMQJsonPusher:
    """Connects to a puller.

    Args:
        hwm: Most items that are not yet taken; a further push waits.
    """

    def __init__(self, host: str = "localhost", port: int = 5555, hwm: int = 1000) -> None:
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
        """Waits until everything was taken; upstream throws the rest away.

        Raises:
            NotReady: Some was not taken in time, and is lost.
        """
        self._pusher.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(NotReady):  # the exception of the block is the one that counts
            self.close(0)


class ZMQJsonPuller:
    """Listens; a port of 0 takes a free one."""

    def __init__(
        self, host: str = "localhost", port: int = 5555, default_timeout_ms: int = 1000, hwm: int = 1000
    ) -> None:
        whole("ZMQJsonPuller()", "hwm", hwm)  # each pusher has its own bound: what it sent and was not taken
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
            return _ours(self._puller.pull(wait / 1e3))
        except NotReady:
            raise queue.Empty(f"No data available after {wait}ms timeout") from None

    def close(self) -> None:
        self._puller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _ours(item: Any) -> Any:
    """A sample with upstream's names."""
    if isinstance(item, sw.SequenceSample):
        return SequenceSample._make(item._ids, item._columns, item._metadata)
    return item


def _folder(experiment: str, trial: str, root: str | os.PathLike[str] | None) -> Path:
    base = os.environ.get(ROOT) if root is None else root
    place = Path(tempfile.gettempdir()) / f"sharpwave-streams-{os.getuid()}" if not base else Path(base)
    return place / str(experiment) / str(trial)


class NameResolvingZmqPuller(ZMQJsonPuller):
    """Listens on a free port and writes it where pushers look for it: a folder that both can read.

    Args:
        args: Anything with ``experiment_name`` and ``trial_name``: AReaL's configuration is that.
        puller_index: From 0; the data-parallel rank.
        host: A loopback address. Connections are not authenticated, so other machines are not let in.
        root: The folder; the environment variable SHARPWAVE_STREAM_ROOT unless told, else one in the temporary folder.
    """

    def __init__(
        self,
        args: Any,
        puller_index: int,
        *,
        host: str = "127.0.0.1",
        root: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        puller_index = whole("NameResolvingZmqPuller()", "puller_index", puller_index, 0)
        folder = _folder(args.experiment_name, args.trial_name, root)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        super().__init__(host, 0, **options)
        self._place = folder / f"puller{puller_index}"
        try:
            replace_file(self._place, [f"{host}:{self.port}".encode()], sync=False)
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        self._place.unlink(missing_ok=True)
        super().close()


class NameResolvingZmqPusher(ZMQJsonPusher):
    """Connects to the puller that serves it, by ``grouping``; waits until that is there.

    Args:
        puller_cnt: How many pullers there are; those that are there already unless told, at least one. Start the
            pullers first then, as AReaL does: its trainers listen before its rollout workers start.
        timeout: Seconds to wait for the puller.

    Raises:
        NotReady: It was not there in time.
    """

    def __init__(
        self,
        experiment_name: str,
        trial_name: str,
        pusher_index: int,
        pusher_cnt: int,
        puller_cnt: int | None = None,
        *,
        root: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        where = "NameResolvingZmqPusher()"
        pusher_index = whole(where, "pusher_index", pusher_index, 0, whole(where, "pusher_cnt", pusher_cnt) - 1)
        folder = _folder(experiment_name, trial_name, root)
        deadline = time.monotonic() + timeout
        while True:
            there = sorted(int(place.name[6:]) for place in folder.glob("puller*") if place.name[6:].isdigit())
            count = len(there) if puller_cnt is None else puller_cnt
            whole_set = there == list(range(count)) if puller_cnt is None else True
            if count and whole_set:
                puller = next(one for one, served in grouping(pusher_cnt, count).items() if pusher_index in served)
                if puller in there:
                    break
            if time.monotonic() > deadline:
                raise NotReady(
                    f"{where}: {folder} has the pullers {there} after {timeout:g} s; start the others, or "
                    "give puller_cnt= or timeout="
                )
            time.sleep(0.05)
        host, _, port = (folder / f"puller{puller}").read_text().rpartition(":")
        super().__init__(host, int(port), **options)


class PullerStreamDataset:
    """A data set that is never the same: ``dataset[i]`` is every sample that has come since the last look, maybe none.

    A thread pulls into a queue. While the queue is full it holds one message and pulls no more, so pushers wait. A
    message is a list of samples, or of documents that ``as_json_compatible`` gave.

    Args:
        util: AReaL's DatasetUtility, or anything with ``dp_rank`` and ``world_size``.
        args: As of NameResolvingZmqPuller.
        dataset_cfgs: Data sets, whose lengths say how long an epoch is; or AReaL's descriptions of them, which its own
            ``make_dataset`` makes (then ``realhf`` must be installed).
        pull_timeout_ms: The longest wait of one pull.
        options: Of NameResolvingZmqPuller.
    """

    def __init__(
        self, util: Any, args: Any, dataset_cfgs: Sequence[Any], pull_timeout_ms: int = 100, **options: Any
    ) -> None:
        self.util, self.args, self.pull_timeout_ms = util, args, pull_timeout_ms
        self.dataset_size = sum(len(_dataset(one, util)) for one in dataset_cfgs)
        self.data_queue: queue.Queue[list[SequenceSample]] = queue.Queue(self.dataset_size * util.world_size)
        self._options = options
        self._stop_event, self._is_made = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.worker_thread = threading.Thread(target=self._work, name="sharpwave-puller", daemon=True)
        self.worker_thread.start()
        self._is_made.set()

    def _work(self) -> None:
        self._is_made.wait()  # nothing is pulled before the constructor is done
        try:
            # Made here: a socket belongs to one thread.
            stream = NameResolvingZmqPuller(self.args, puller_index=self.util.dp_rank, **self._options)
            try:
                while not self._stop_event.is_set():
                    try:
                        message = stream.pull(timeout_ms=self.pull_timeout_ms)
                    except queue.Empty:
                        self._stop_event.wait(0.01)  # a puller may come back at once
                        continue
                    self._hold([_sample(one) for one in message])
            finally:
                stream.close()
        except BaseException as error:
            self._error = error

    def _hold(self, samples: list[SequenceSample]) -> None:
        while True:
            try:
                return self.data_queue.put(samples, timeout=0.05)
            except queue.Full:
                if self._stop_event.is_set():  # it was acknowledged: close() hands it out beyond the bound
                    self.data_queue.maxsize = 0

    def __len__(self) -> int:
        return self.dataset_size

    def __getitem__(self, index: int) -> list[SequenceSample]:
        """Every sample that waits, whatever the index.

        Raises:
            RuntimeError: The thread died, or was stopped.
        """
        if not self.worker_thread.is_alive():
            cause = "it was stopped" if self._error is None else repr(self._error)
            raise RuntimeError(f"PullerStreamDataset: the pulling thread is not alive: {cause}") from self._error
        return self._drain()

    def _drain(self) -> list[SequenceSample]:
        samples: list[SequenceSample] = []
        while True:
            try:
                samples += self.data_queue.get_nowait()
            except queue.Empty:
                return samples

    def close(self) -> list[SequenceSample]:
        """Stops pulling; returns what was taken and not yet looked at. Upstream has no such thing."""
        self._stop_event.set()
        self.worker_thread.join()
        return self._drain()


def _sample(one: Any) -> SequenceSample:
    return _ours(one) if isinstance(one, sw.SequenceSample) else SequenceSample.from_json_compatible(one)


def _dataset(given: Any, util: Any) -> Any:
    """A data set, or what AReaL makes of its description."""
    if not hasattr(given, "type_"):
        return given
    try:
        from realhf.api.core.data_api import make_dataset
    except ImportError:
        raise ImportError(
            f"PullerStreamDataset(): {given!r} is made by AReaL's make_dataset(), and realhf is not installed; "
            "give a data set, or anything that has its length"
        ) from None
    return make_dataset(
        given,
        seed=util.seed,
        dp_rank=util.dp_rank,
        world_size=util.world_size,
        tokenizer_or_tokenizer_name=util.tokenizer,
    )
