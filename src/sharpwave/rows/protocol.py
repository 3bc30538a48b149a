"""The operations that a face calls on its rows, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from ..sampling import Linear, Sampler
from .spec import RowSpec

__all__ = ["Batch", "BatchMap", "Drawn", "Rows"]

Batch = dict[str, Any]
BatchMap = Callable[[Batch], Batch]
Result = TypeVar("Result")


class Drawn(NamedTuple):
    """A batch whose rows are still reserved, and what a mixture of several tables needs to know of the draw. Where rows
    are on a device, the two numbers are 0-d tensors there."""

    batch: Batch
    handles: Any  # for ``settle``; None where nothing is reserved
    rows: Any  # that could be drawn: without priorities each has the probability 1 / rows
    scale: Any  # the weight before normalisation of the rows whose weight in the batch is 1


class Rows(Protocol):
    """A ring of rows that is written in order and drawn from. ``HostRows`` and ``DeviceRows`` are two.

    Every argument and every result is a batch (a dict of arrays), a handle (the serial of a row, an int64) or a plain
    number: no address of memory, so that rows may as well be in another process or on another machine.
    """

    spec: RowSpec
    address: str | None  # of the file behind them; None where they belong to this process alone
    device: Any  # torch's device that holds them; None for the host
    where: str  # for messages: 'memory', an address, or the device
    is_remote: bool  # every call waits for a server: an event loop calls it in a thread

    @property
    def open_options(self) -> dict[str, Any]: ...  # besides the view, with which another process opens the address

    @property
    def closed(self) -> bool: ...

    # Writing. ``adder`` returns the function that adds rows: for rows on the host it is the engine's.
    def adder(self) -> Callable[..., Any]: ...
    def writer(self, window: int | None) -> Any: ...

    # Reading. ``drawer`` returns what ``sample`` is to users: for rows on the host the engine's, where it can be.
    # The rows of a draw with deliver=False stay reserved until ``settle``.
    def drawer(self) -> Callable[..., Batch]: ...
    def sample(
        self,
        batch_size: int,
        *,
        out: Batch | None = None,
        device: Any = None,
        timeout: float | None = None,
        deliver: bool = True,
    ) -> Batch: ...
    def draw(
        self, batch_size: int, *, out: Batch | None = None, device: Any = None, timeout: float | None = None
    ) -> Drawn: ...
    def settle(self, handles: Any, delivered: bool) -> None: ...
    def batches(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]: ...
    def stream(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]: ...
    async def in_turn(self, attempt: Callable[[], Result], timeout: float | None) -> Result: ...
    async def in_thread(self, call: Callable[[], Result]) -> Result: ...  # in the caller's CUDA stream, if any

    # By handle.
    def handles(self) -> Any: ...
    def positions(self, handles: Any) -> Any: ...  # numbers in which neighbours in the ring differ by 1
    def get(self, handles: Any, device: Any = None) -> Batch: ...
    def rows(self, batch_size: int, ids: bool = False) -> Iterator[Batch]: ...
    def episodes(self, partial: bool, unfinished: bool) -> Iterator[Batch]: ...
    def update_priorities(self, handles: Any, priorities: Any, mask: Any, timeout: float | None) -> dict[str, Any]: ...
    # New values of mutable fields; ``fields`` by name, nested as in an add. -1 among the handles names no row.
    def write(
        self, handles: Any, fields: dict[str, Any], skips_stale: bool, timeout: float | None
    ) -> dict[str, Any]: ...
    def tune(self, alpha: float | None, beta: float | Linear | None) -> None: ...

    # Facts and life.
    def __len__(self) -> int: ...
    def sampler(self) -> Sampler: ...
    def stats(self) -> dict[str, Any]: ...
    def huge_page_bytes(self) -> int: ...
    def clear(self) -> None: ...
    def save(self, path: Any, incremental: bool) -> None: ...
    def flush(self) -> None: ...
    def close(self, unlink: bool) -> None: ...
