"""Rows on a GPU: the same calls as rows on the host, and no wait for the device."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from .. import _core, arrays
from ..checks import seconds, truth, whole
from ..errors import ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from ..sampling import (
    Linear,
    Prioritized,
    Sampler,
    Uniform,
    beta_numbers,
    exponents,
    read_alpha,
    read_beta,
    sampler_from_plain,
    sampler_to_plain,
)
from ..schema import Field, is_next
from ..settings import engine_settings
from ..views import Transitions
from .batch_memory import BatchMemory
from .columns import Torch
from .handles import as_handles, lap_positions
from .priorities import one_each
from .protocol import Batch, BatchMap, Drawn
from .spec import RowSpec
from .staging import Load
from .tensors import read_device
from .write_back import fit_value, leaf_values, refuse_shape

__all__ = ["DeviceRows", "check_on_device"]

Result = TypeVar("Result")


class DeviceRows:
    """Rows that are tensors on a GPU. Calls run in the order of the current CUDA stream. They do not wait for the
    device, except those that return a Python number or read rows by handle."""

    address: str | None = None
    is_remote = False

    def __init__(self, where: str, spec: RowSpec, device: Any, storage: str | None = None) -> None:
        check_on_device(where, spec, storage)
        self.spec = spec
        self.place = Torch(where, device, spec.seed)
        self.device: Any = self.place.device
        if self.device.type not in ("cuda", "cpu"):
            raise SchemaError(
                f"{where}: device: expected 'cuda' or 'cpu', got {device!r}; rows live on no other device"
            )
        self.where = str(self.device)
        self._is_gpu = self.device.type == "cuda"
        self._lock = threading.Lock()
        self._closed = False
        self._may_have_rows = self._adds_in_graphs = False
        self.table = self._make_table(where)
        self.memory = BatchMemory(spec, self.place, self.table)
        self._slabs = self.memory.slabs  # read by every sample
        self._let_go = weakref.finalize(self, _wait_for, self.place.torch, self.device, self.table.alarms)
        self._let_go.atexit = False
        # The tensors that _add_at_once takes: none if done is not one byte, or if fields are nested.
        leaves, dtypes = self.table.leaves, self.table.dtypes
        is_plain = self.memory.is_flat and not spec.schema.by_agent
        is_plain = is_plain and leaves[spec.schema.dones[0]].dtype.itemsize == 1
        self._fits = [(leaf.name, kind, leaf.shape) for leaf, kind in zip(leaves, dtypes, strict=True) if is_plain]

    @property
    def open_options(self) -> dict[str, Any]:
        return {}

    @property
    def closed(self) -> bool:
        return self._closed

    def _make_table(self, where: str) -> Any:
        try:
            from ..device.table import DeviceField, DeviceTable, PrioritySettings
        except ImportError as error:
            raise SchemaError(f"{where}: device: rows on a GPU need Triton ({error}); pip install triton") from None

        spec, schema = self.spec, self.spec.schema
        leaves = [
            DeviceField(
                name,
                field.shape,
                field.dtype,
                is_last=leaf in schema.dones or is_next(name),
                is_mutable=field.mutable,
            )
            for leaf, (name, field) in enumerate(schema.leaves)
        ]
        for leaf in leaves:
            self.place._dtype(leaf.dtype)  # refused before memory is taken
        names = [leaf.name for leaf in leaves]
        reward = dict(schema.leaves).get("reward")
        if spec.n_step > 1 and (reward is None or reward.dtype not in (np.float32, np.float64)):
            got = None if reward is None else reward.dtype
            raise SchemaError(f"{where}: field 'reward': n_step > 1 sums it: expected float32 or float64, got {got}")
        blocks, rows = _core.plan_blocks(schema.engine_fields(), spec.capacity, spec.num_envs or 1, spec.writers)
        settings = engine_settings(schema, spec.sampler, spec.view, None).index
        index = None
        if settings is not None:
            index = PrioritySettings(
                settings.eps,
                settings.stratified,
                int(settings.normalize),
                settings.mix,
                int(settings.new_rows),
                settings.new_priority,
            )
        torch = self.place.torch
        marks = 8 if index is None and schema.mutable else 0
        need = spec.capacity * (sum(leaf.bytes for leaf in leaves) + (1 if index is None else 26) + marks)
        if self.device.type == "cuda" and need > torch.cuda.mem_get_info(self.device)[0]:
            free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
            if need > free:
                raise StorageError(
                    f"{where}: device: {spec.capacity} rows need {need / 2**30:.1f} GiB on {self.where}, "
                    f"{free / 2**30:.1f} GiB are free; give a smaller capacity"
                )
        return DeviceTable(
            self.device,
            leaves,
            spec.capacity,
            blocks * rows,
            spec.num_envs or 1,
            spec.seed,
            n_step=spec.n_step,
            gamma=getattr(spec.view, "gamma", 1.0),
            truncated=spec.view.truncated,
            reward=0 if reward is None else names.index("reward"),
            newest=getattr(spec.sampler, "newest", 0),
            index=index,
            exponents=exponents(spec.sampler),
        )

    def heed(self, where: str) -> None:
        """Raises the error that a kernel of an earlier call reported after that call had returned."""
        if self._closed:
            raise ClosedError("the buffer is closed")
        heard = self.table.alarm
        if not (heard[0] or heard[1]):
            return
        is_empty, not_finite = self.table.heard.astype(bool)
        self.table.heard[:] = 0
        if not_finite:
            raise SchemaError(
                f"{where}: an earlier update_priorities() or add(priority=...) on {self.where} had a number that is "
                "not finite; the update changed nothing, the rows of the add have the priority of new rows"
            )
        if is_empty:
            raise NotReady(f"{where}: the buffer was empty in an earlier sample() on {self.where}; discard its batch")

    # ---- writing ----------------------------------------------------------------------------------------------

    def adder(self) -> Callable[..., Any]:
        return self.add

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Tensors on the device are read there; all other values are copied there in one transfer. Numbers on the
        device are not checked, so a tensor's dtype must be the field's or one that converts without loss."""
        if self._add_at_once(args, kwargs):
            return None
        if "return_indices" in kwargs:
            rest = {name: value for name, value in kwargs.items() if name != "return_indices"}
            if truth("add()", "return_indices", kwargs["return_indices"]):
                return self._add_named(args, rest)
            return self.add(*args, **rest)
        self._add_with_care(args, kwargs)
        return None

    def _add_named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The serials as a tensor on the device, without a wait for it."""
        serials: list[Any] = []
        if not self._add_at_once(args, kwargs, serials):
            self._add_with_care(args, kwargs, serials)
        return serials[0]

    def _tell_serials(self, rows: int, serials: list[Any] | None) -> None:
        """Under the lock, after the rows were added: no other add comes between."""
        if serials is not None:
            with self.place.torch.inference_mode(False):
                serials.append(self.table.newest_serials(rows))

    def _add_with_care(self, args: tuple[Any, ...], kwargs: dict[str, Any], serials: list[Any] | None = None) -> None:
        self.heed("add()")
        named = dict(kwargs)
        seconds("add()", named.pop("timeout", None))  # there is nothing to wait for
        priority = named.pop("priority", None)
        if priority is not None and not self.spec.is_prioritized:
            raise SchemaError("add(): priority: rows are drawn uniformly; give the buffer sampler=Prioritized()")
        values, truncated, mask = arrays.match(self.spec.schema, args, named)
        raw: list[tuple[str, Field, Any]] = []
        for name, node in self.spec.schema.fields.items():
            arrays.flatten(name, node, values[name], raw, self._read)
        lead, rows = arrays.count_rows(self.spec.schema, self.spec.capacity, self.spec.num_envs, raw)
        order = None if self.spec.num_envs is not None else self.spec.order_reason
        if order is not None and rows > 1:
            raise SchemaError(
                f"add(): got {rows} rows, and {order} needs their order; give the buffer num_envs= (1 if they are "
                "successive steps of one environment), or add one row at a time"
            )
        load = Load(self.place)
        counted = raw[self.spec.schema.rows_from][0]
        sources = [self._fit(load, name, field, value, lead, rows, counted) for name, field, value in raw]
        if self.spec.schema.by_agent:
            ends = self._agents_end(load, sources, truncated, lead, rows)
        else:
            ends = self._ends(load, raw, sources), self._truths(load, "truncated", truncated, lead)
        flags = [*ends, self._truths(load, "mask", mask, lead)]
        given = None if priority is None else self._magnitudes(load, "add()", "priority", priority, lead)
        addresses = load.addresses()
        with self._lock:
            self.table.add(
                tuple(addresses[at] for at in sources),
                rows,
                tuple(0 if at is None else addresses[at] for at in flags),
                0 if given is None else addresses[given],
            )
            self.note_rows()
            self._tell_serials(rows, serials)

    def _add_at_once(self, args: tuple[Any, ...], kwargs: dict[str, Any], serials: list[Any] | None = None) -> bool:
        """The common case: one contiguous tensor for each field, on the device, of the field's dtype. False: not this
        case, and nothing was changed. ``serials`` gets those of the rows."""
        fits = self._fits
        if self._closed or len(args) + len(kwargs) != len(fits):
            return False
        alarm = self.table.alarm
        if alarm[0] or alarm[1]:
            return False
        tensor, device = self.place.torch.Tensor, self.device
        addresses = []
        count = -1
        for at, (name, dtype, shape) in enumerate(fits):
            value: Any = args[at] if at < len(args) else kwargs.get(name)
            if value is None and name == "done":
                value = kwargs.get("terminated")
            if type(value) is not tensor or value.dtype is not dtype or value.device != device:
                return False
            size = value.shape
            if len(size) != len(shape) + 1 or size[1:] != shape or not value.is_contiguous():
                return False
            if count < 0:
                count = size[0]
            if size[0] != count:
                return False
            address = value.data_ptr()
            if address % 16:
                return False
            addresses.append(address)
        if not 0 < count <= self.spec.capacity or count % (self.spec.num_envs or 1):
            return False
        if self.spec.num_envs is None and count > 1 and self.spec.order_reason is not None:
            return False
        with self._lock:
            self.table.add(tuple(addresses), count, (addresses[self.spec.schema.dones[0]], 0, 0), 0)
            self.note_rows()
            self._tell_serials(count, serials)
        return True

    def note_rows(self, are_there: bool = True) -> None:
        """After rows were written: lets ``sample`` refuse an empty buffer without waiting for the device."""
        self._may_have_rows = are_there
        if self._is_gpu and self.place.torch._C._cuda_isCurrentStreamCapturing():
            self._adds_in_graphs = True

    def _read(self, what: str, value: Any) -> Any:
        if isinstance(value, self.place.torch.Tensor) and value.device == self.device:
            return value.detach() if value.requires_grad else value
        return arrays.as_array(what, value)

    def _fit(self, load: Load, name: str, field: Field, value: Any, lead: Any, rows: int, counted: str) -> int:
        if isinstance(value, np.ndarray):
            return load.put(arrays.fit(name, field, value, lead, rows, counted))
        shape = (*lead, *field.shape)
        if tuple(value.shape) != shape:
            raise SchemaError(
                f"add(): field {name!r}: expected shape {shape} as {counted!r} has its rows, got {tuple(value.shape)}"
            )
        return load.put(self._cast("add()", name, field, value))

    def _cast(self, where: str, name: str, field: Field, value: Any) -> Any:
        """A tensor of the device in the field's dtype."""
        if self.place.dtype_of(value) == field.dtype and "bfloat16" not in str(value.dtype):
            return value
        if not self.place.fits(value, field.dtype):
            raise SchemaError(
                f"{where}: field {name!r}: expected {field.dtype}, got {value.dtype}, and the cast would lose "
                "meaning; convert it, or give the field that dtype"
            )
        return value.to(self.place._dtype(field.dtype))

    def _ends(self, load: Load, raw: list[tuple[str, Field, Any]], sources: list[int]) -> int:
        done = self.spec.schema.dones[0]
        part = load.parts[sources[done]]
        if raw[done][1].dtype.itemsize == 1:
            return sources[done]
        return load.put(part != 0)

    def _agents_end(
        self, load: Load, sources: list[int], truncated: Any, lead: tuple[int, ...], rows: int
    ) -> tuple[int, int | None]:
        """Which rows are terminated and which are truncated, where each agent has its own done."""
        torch, schema = self.place.torch, self.spec.schema
        parts = [load.parts[sources[leaf]].reshape(rows, -1) != 0 for leaf in schema.dones]
        done = torch.cat([torch.as_tensor(part, device=self.device) for part in parts], dim=1)
        ends = load.put(done.all(dim=1))
        if truncated is None:
            return ends, None
        if isinstance(truncated, torch.Tensor) and truncated.device.type != "cpu":
            truncated = truncated.cpu()  # waits for the device
        told = arrays.agents_truncated(schema, truncated, lead, rows)
        if told is None:
            return ends, self._truths(load, "truncated", truncated, lead)
        there = torch.as_tensor(told, device=self.device)
        return ends, load.put((done | there).all(dim=1) & there.any(dim=1))

    def _truths(self, load: Load, name: str, value: Any, lead: tuple[int, ...]) -> int | None:
        if value is None:
            return None
        read = self._read(name, value)
        if isinstance(read, np.ndarray):
            return load.put(arrays.truths(name, read, lead))
        if tuple(read.shape) != lead:
            raise SchemaError(f"add(): {name}: expected shape {lead}, one truth value per row, got {tuple(read.shape)}")
        return load.put(read if read.element_size() == 1 else read != 0)

    def _magnitudes(self, load: Load, where: str, name: str, value: Any, lead: tuple[int, ...]) -> int:
        read = value
        if not (isinstance(value, self.place.torch.Tensor) and value.device == self.device):
            return load.put(arrays.priorities(where, name, value, lead))
        if tuple(read.shape) != lead:
            raise SchemaError(f"{where}: {name}: expected shape {lead}, one number per row, got {tuple(read.shape)}")
        if read.dtype.is_complex:
            raise SchemaError(f"{where}: {name}: expected numbers, got {read.dtype}")
        return load.put(read.detach().to(self.place.torch.float32))

    def writer(self, window: int | None) -> Any:
        raise SchemaError(f"writer(): rows on {self.where} have one writer, the buffer's own add(); call that")

    # ---- reading ----------------------------------------------------------------------------------------------

    def drawer(self) -> Callable[..., Batch]:
        return self.sample

    def sample(
        self,
        batch_size: int,
        *,
        out: Batch | None = None,
        device: Any = None,
        timeout: float | None = None,
        deliver: bool = True,
    ) -> Batch:
        """Tensors on the rows' device, drawn and gathered by one kernel."""
        if out is None and device is None and self._is_gpu and not self._closed:
            batch = self._sample_at_once(batch_size)
            if batch is not None:
                return batch
        size = self._read_draw(batch_size, device)
        with self._lock:
            return self._draw(size, out)

    def _read_draw(self, batch_size: Any, device: Any) -> int:
        self.heed("sample()")
        size: int = batch_size
        if type(size) is not int or not 0 < size < 2**31:
            size = whole("sample()", "batch_size", batch_size, 1, 2**31 - 1)
        newest = self.table.newest
        if size < newest:
            raise SchemaError(f"sample(): batch_size: expected at least newest={newest}, got {size}")
        self._check_device(device)
        if not self._may_have_rows:
            raise NotReady("sample(): the buffer is empty; add rows first")
        return size

    def _draw(self, size: int, out: Batch | None) -> Batch:
        """The caller holds the lock."""
        if out is None:
            batch, draws, i = self.memory.new(size)
            self.table.draw(size, draws, i)
            return batch
        self.table.draw(size, self.memory.check_out(size, out))
        return out

    def draw(
        self, batch_size: int, *, out: Batch | None = None, device: Any = None, timeout: float | None = None
    ) -> Drawn:
        size = self._read_draw(batch_size, device)
        with self._lock:  # no other draw comes between
            return Drawn(self._draw(size, out), None, *self.table.odds())

    def settle(self, handles: Any, delivered: bool) -> None:
        """Nothing is reserved: rows on a device have no pace."""

    def batches(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]:
        """Nothing is drawn ahead: no call waits for the device."""
        self._check_device(device)
        if change is None:
            return (self.sample(batch_size) for _ in itertools.count())
        return (change(self.sample(batch_size)) for _ in itertools.count())

    def stream(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]:
        return self.batches(batch_size, prefetch, device, timeout, change)

    async def in_turn(self, attempt: Callable[[], Result], timeout: float | None) -> Result:
        return attempt()

    async def in_thread(self, call: Callable[[], Result]) -> Result:
        import asyncio

        if not self._is_gpu:
            return await asyncio.to_thread(call)
        cuda = self.place.torch.cuda
        stream = cuda.current_stream(self.device)  # calls of another stream are not ordered with the caller's

        def run() -> Result:
            with cuda.stream(stream):
                return call()

        return await asyncio.to_thread(run)

    def _check_device(self, device: Any) -> None:
        if device is None:
            return
        asked = read_device("sample(): device", device)[1]
        if asked.type != self.device.type or asked.index not in (None, self.device.index):
            raise SchemaError(
                f"sample(): device: rows are on {self.where}, got {device!r}; leave it out, or move the batch"
            )

    def _sample_at_once(self, size: Any) -> dict[str, Any] | None:
        """The common case: the memory of a batch and the launch that fills it are ready. None: not this case."""
        if type(size) is not int or not self._may_have_rows:
            return None
        getters, alarm = self.place.torch._C, self.table.alarm
        number = self.device.index
        slab = self._slabs.get((size, getters._cuda_getCurrentRawStream(number)))
        if slab is None or alarm[0] or alarm[1] or getters._cuda_getDevice() != number:
            return None
        if getters._cuda_isCurrentStreamCapturing():
            return None
        with self._lock:
            if not slab.batches:
                return None
            batch = slab.batches.pop()
            self.table.draw_here(size, slab.draws, len(slab.batches))
        return batch

    def update_priorities(self, indices: Any, priorities: Any, mask: Any, timeout: float | None) -> dict[str, Any]:
        """The counts are tensors on the device. Numbers on the device are checked there: if one is not finite, the call
        changes nothing and the next call raises. No other process shares the index, so nothing waits."""
        where = "update_priorities()"
        self.heed(where)
        if mask is not None:
            raise SchemaError(f"{where}: mask: expected with Windows() and one error a place, shape (windows, places)")
        load = Load(self.place)
        torch = self.place.torch
        if isinstance(indices, torch.Tensor) and indices.device == self.device:
            if indices.dim() != 1 or indices.is_floating_point() or indices.dtype is torch.bool:
                raise SchemaError(
                    f"{where}: indices: expected a list of whole numbers, got {indices.dtype} of {tuple(indices.shape)}"
                )
            names = load.put(indices.to(torch.int64))
        else:
            names = load.put(as_handles(where, indices))
        count = len(load.parts[names])
        values = self._magnitudes(load, where, "priorities", one_each(priorities, count), (count,))
        serials, magnitudes = load.tensors(names, values)
        with self._lock:
            applied, stale = self.table.update(serials, magnitudes).unbind()
        return {"applied": applied, "stale": stale}

    def write(self, handles: Any, fields: dict[str, Any], skips_stale: bool, timeout: float | None) -> dict[str, Any]:
        """Waits for the device unless stale rows are skipped; then the counts are tensors on the device. There is one
        writer, so nothing else is waited for."""
        where = "write()"
        self.heed(where)
        leaves, values = leaf_values(self.spec.schema, fields)
        seconds(where, timeout)
        load, torch = Load(self.place), self.place.torch
        if isinstance(handles, torch.Tensor) and handles.device == self.device:
            if handles.is_floating_point() or handles.dtype is torch.bool or handles.is_complex():
                raise SchemaError(
                    f"{where}: indices: expected whole numbers, got {handles.dtype} of {tuple(handles.shape)}"
                )
            serials = handles.to(torch.int64)
        else:
            serials = torch.from_numpy(as_handles(where, handles, any_shape=True)).to(self.device)
        lead = tuple(serials.shape)
        names = load.put(serials.reshape(-1))
        sources = [
            load.put(self._new_values(*self.spec.schema.leaves[leaf], value, lead))
            for leaf, value in zip(leaves, values, strict=True)
        ]
        parts = load.tensors(names, *sources)
        addresses = tuple(part.data_ptr() for part in parts[1:])
        with self._lock:
            if not skips_stale:
                gone = parts[0][(self.table.slots_of(parts[0]) < 0) & (parts[0] != -1)]
                if len(gone):
                    raise StaleHandle(
                        f"write(): row {int(gone[0])} is not in the buffer: it was overwritten, cleared or never "
                        'added; nothing was written. Give stale="skip" to leave such rows out'
                    )
            counts = self.table.write_back(parts[0], tuple(leaves), addresses)
        applied, stale = counts.unbind() if skips_stale else counts.tolist()
        return {"applied": applied, "stale": stale}

    def _new_values(self, name: str, field: Field, value: Any, lead: tuple[int, ...]) -> Any:
        read = value
        if not (isinstance(value, self.place.torch.Tensor) and value.device == self.device):
            return fit_value(name, field, value, lead)
        if tuple(read.shape) != (*lead, *field.shape):
            raise refuse_shape(name, lead, field, tuple(read.shape))
        return self._cast("write()", name, field, read.detach())

    def tune(self, alpha: float | None, beta: float | Linear | None) -> None:
        self.heed("tune()")
        new_alpha = None if alpha is None else read_alpha("tune()", alpha)
        new_beta = None if beta is None else read_beta("tune()", beta)
        with self._lock:
            if new_alpha is not None:
                self.table.write_reals(alpha=new_alpha)
                self.table.remake()
            if new_beta is not None:
                first, last, steps = beta_numbers(new_beta)
                self.table.write_reals(beta_start=first, beta_end=last, beta_steps=steps)

    def positions(self, handles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return lap_positions(handles, self.table.span, self.spec.capacity)

    def get(self, indices: Any, device: Any = None) -> dict[str, Any]:
        """Waits for the device."""
        self.heed("get()")
        self._check_device(device)
        torch = self.place.torch
        if isinstance(indices, torch.Tensor) and indices.device == self.device and indices.dim() == 1:
            serials = indices.to(torch.int64)
        else:
            serials = torch.from_numpy(as_handles("get()", indices)).to(self.device)
        slots = self.table.slots_of(serials)
        gone = serials[slots < 0]
        if len(gone):
            raise StaleHandle(
                f"get(): row {int(gone[0])} is not in the buffer: it was overwritten, cleared or never added"
            )
        return self._read_rows(slots, serials)

    def _read_rows(self, slots: Any, serials: Any) -> dict[str, Any]:
        truncated = (self.table.flags[slots] & 4) != 0
        return self.memory.tree([*self.table.read(slots), truncated, serials], ["truncated", "indices"])

    def handles(self) -> Any:
        """Waits for the device."""
        self.heed("rows()")
        return self.table.serials()

    def rows(self, batch_size: int, ids: bool = False) -> Iterator[Batch]:
        """Waits for the device."""
        from ..device.episodes import EpisodeIds

        serials, size = self.handles(), batch_size
        numbers = EpisodeIds(self.table) if ids else None

        def parts() -> Iterator[dict[str, Any]]:
            for first in range(0, len(serials), size):
                part = serials[first : first + size]
                slots = self.table.slots_of(part)
                there = slots >= 0
                if numbers is not None and not bool(there.all()):
                    numbers.forget()
                if bool(there.any()):
                    batch = self._read_rows(slots[there], part[there])
                    if numbers is not None:
                        batch["stream"], batch["episode"], _ = numbers.of(part[there], slots[there])
                    yield batch

        return parts()

    def episodes(self, partial: bool, unfinished: bool) -> Iterator[Batch]:
        """Waits for the device. The rows do not say which of them start an episode, so one whose first row is the
        oldest of its environment is given only with ``partial``, unless no row was overwritten yet."""
        from ..device.episodes import list_episodes

        self.heed("episodes()")
        with self._lock:
            found = list_episodes(self.table)
        width, torch = self.table.num_envs, self.place.torch

        def given() -> Iterator[Batch]:
            for serial, first, last, is_whole, is_finished in zip(*found, strict=True):
                if not ((is_whole or partial) and (is_finished or unfinished)):
                    continue
                self.heed("episodes()")
                t = torch.arange(first, last + 1, width, device=self.device)
                slots = t % self.spec.capacity
                handles = torch.div(t, self.spec.capacity, rounding_mode="floor") * self.table.span + slots
                with self._lock:  # no add of another thread between the check and the copy
                    numbers = self.table.read_numbers()
                    if first < max(numbers["origin"], numbers["head"] - self.spec.capacity):
                        continue  # overwritten meanwhile
                    is_live = (self.table.flags[slots] & 1) != 0  # the others were masked out
                    batch = self._read_rows(slots[is_live], handles[is_live])
                yield batch | {"stream": first % width, "episode": serial}

        return given()

    # ---- facts ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        self.heed("len()")
        return self.table.read_numbers()["live"]  # type: ignore[no-any-return]

    def sampler(self) -> Sampler:
        built = self.spec.sampler
        if not isinstance(built, Prioritized):
            return built
        real = self.table.read_reals()
        steps = int(real["beta_steps"])
        beta = [real["beta_start"], real["beta_end"], steps] if steps else real["beta_end"]
        return sampler_from_plain(sampler_to_plain(built) | {"alpha": real["alpha"], "beta": beta})

    def huge_page_bytes(self) -> int:
        return 0  # a notion of the host's memory

    def stats(self) -> dict[str, Any]:
        """Counts and sizes, as plain numbers. Waits for the device."""
        self.heed("stats()")
        numbers, table = self.table.read_numbers(), self.table
        tensors = (table.rows, table.flags, table.priorities, table.nodes, table.winners)
        stats: dict[str, Any] = {
            "storage": self.where,
            "size": numbers["live"],
            "capacity": self.spec.capacity,
            "rows_added": numbers["added"],
            "rows_voided": numbers["voided"],
            "episodes": numbers["episodes"],
            "rows_sampled": numbers["sampled"],
            "sample_calls": numbers["calls"],
            "redraws": numbers["redraws"],
            "row_bytes": table.stride,
            "payload_bytes": sum(leaf.bytes for leaf in table.leaves),
            "storage_bytes": sum(t.numel() * t.element_size() for t in tensors if t is not None),
            "seed": self.spec.seed,
            "updates_applied": numbers["applied"],
            "updates_stale": numbers["stale"],
        }
        if self.spec.is_prioritized:
            real = table.read_reals()
            done = min(1.0, numbers["calls"] / real["beta_steps"]) if real["beta_steps"] else 1.0
            stats["alpha"] = real["alpha"]
            stats["beta"] = real["beta_start"] + (real["beta_end"] - real["beta_start"]) * done
        return stats

    # ---- life -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes all rows. Serials and the random stream continue."""
        self.heed("clear()")
        with self._lock:
            self.table.clear()
            self._may_have_rows = self._adds_in_graphs  # a graph's replay adds rows without a call of add()

    def save(self, path: Any, incremental: bool) -> None:
        """Waits for the device."""
        self.heed("save()")
        if incremental:
            raise SchemaError(f"save(): incremental: rows on {self.where} are saved whole; leave it out")
        from .transfer import to_host

        with self._lock:  # the copy takes many launches: another thread's add must not come between them
            host = to_host(self)
        try:
            host.save(path, False)
        finally:
            host.close(False)

    def flush(self) -> None:
        """Returns when the device has finished all calls so far."""
        self.heed("flush()")
        self.table.read_numbers()

    def close(self, unlink: bool) -> None:
        """Frees the device's memory after the last kernel that uses it."""
        self._closed = True
        self._let_go()
        self._slabs.clear()
        self.table = self.memory = None  # type: ignore[assignment]


def _wait_for(torch: Any, device: Any, alarms: Any) -> None:
    """Called before the memory of a buffer is freed: kernels of any stream may still use it."""
    if device.type != "cuda":
        return
    if torch.cuda.is_current_stream_capturing():  # a wait would break the capture
        _kept.append(alarms)
    else:
        torch.cuda.synchronize(device)


_kept: list[Any] = []


def check_on_device(where: str, spec: RowSpec, storage: str | None = None) -> None:
    """Refuses settings that only rows on the host have."""
    mend = "leave out device=, and let sample(device=...) or stream(device=...) bring batches there"

    def refuse(what: str, got: Any) -> None:
        raise SchemaError(f"{where}: device: rows on a GPU have {what}, got {got!r}; {mend}")

    sampler, view = spec.sampler, spec.view
    if not isinstance(sampler, (Uniform, Prioritized)) or sampler.max_reads is not None:
        refuse("sampler Uniform() or Prioritized(), without max_reads", sampler)
    if isinstance(sampler, Prioritized) and sampler.rank_based:
        refuse("priorities that are not rank_based", sampler)
    if not isinstance(view, Transitions) or view.hindsight is not None:
        refuse("view Transitions(), without hindsight", view)
    if spec.schema.by_agent and spec.n_step > 1:
        refuse("n_step=1 where each agent has its own done", view)
    if spec.schema.derives_next:
        refuse("next_obs='stored' or None", "derived")
    for name, field in spec.schema.leaves:
        if field._options().keys() - {"mutable"}:
            refuse(f"plain fields; {name!r} is not one", field)
    if spec.pace is not None:
        refuse("no pace", spec.pace)
    if storage is not None:
        refuse("no storage: they belong to one process", storage)
