"""`ProcessAgents`: the agents of a run in a child process; on a GPU a run has its agents there."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import traceback
from typing import Any

import torch

from ..errors import NotReady, SchemaError, SharpwaveError
from ..sequences.sample import SequenceSample
from .agent_frames import pack_sample, unpack_sample
from .agent_worker import AgentWorker, Gate
from .channel import Channel
from .child import Child, enter
from .clock import WallClock
from .generators.process import ProcessGenerator
from .items import Items
from .parts import make_worker
from .permits import Permit, derive_seed
from .position import Position
from .run_folder import RunFolder

__all__ = ["ProcessAgents", "main"]

RUN, START, FINISH, REJECT, HEAR = range(2, 7)
_NUMBER_BYTES = 8
_SENT = ("number", "key", "owner", "version", "seed", "began_s")  # of a permit
_LOOKS = 4  # in the time after which a silent child is ended


class ProcessAgents:
    """An `AgentWorker` whose agents do not take the interpreter of the controller.

    The child asks its parent for permits and hands samples in. It asks an engine for answers over a channel of its own.

    Args:
        name: Of the owner of permits.

    Attributes:
        finished: Samples that were handed in.
    """

    def __init__(self, name: str) -> None:
        self.finished = 0
        self._name = name
        self._child: Child
        self._controller: Gate
        self._permits: dict[int, Permit] = {}  # that the child has
        self._calls: set[asyncio.Future[None]] = set()
        self._heard_s = time.monotonic()

    @classmethod
    async def start(cls, folder: RunFolder, name: str, engine: socket.socket) -> ProcessAgents:
        """Starts the child.

        Args:
            engine: The end of a channel whose other end an engine has.

        Raises:
            SchemaError, StorageError: What making the task raised.
            NotReady: The child ended and said nothing.
        """
        made = cls(name)
        said = [str(folder.path), name]
        made._child = await Child.start(__name__, said, f"the agents {name!r}", made._take, ends=[engine])
        return made

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        return self._child.has_ended

    async def run(self, controller: Gate, items: Items, timeout_s: float | None = None) -> None:
        """Works until the controller has no more items.

        Args:
            items: Those of the controller.
            timeout_s: A child that was not heard for so long is ended.

        Raises:
            NotReady: The child has ended, or was ended. Its permits are out: `Controller.lose` takes them back.
            SchemaError: The child's task has other items.
        """
        if self._child.said != items.describe():
            raise SchemaError(
                f"Experiment(): task: the process of the agents {self._name!r} made other items ({self._child.said}) "
                f"than the run ({items.describe()}); items may depend on the task's arguments and its seed only"
            )
        self._controller = controller
        call = self._child.call(RUN)[1]
        watching = asyncio.ensure_future(self._watch(timeout_s))
        try:
            await call
        finally:
            watching.cancel()

    async def close(self) -> None:
        """Ends the child. A second call does nothing."""
        for call in self._calls:
            call.cancel()
        await self._child.close()

    async def _watch(self, timeout_s: float | None) -> None:
        """Calls `Controller.hear` while frames of the child arrive; ends a child that is silent for `timeout_s`."""
        period_s = 1.0 if timeout_s is None else timeout_s / _LOOKS
        self._heard_s = looked_s = time.monotonic()
        while True:
            await asyncio.sleep(period_s)
            now = time.monotonic()
            was_late, looked_s = now - looked_s > 2 * period_s, now
            # An event loop that was held up itself has not read yet what the child said meanwhile.
            if timeout_s is not None and now - self._heard_s > timeout_s and not was_late:
                self._child.kill(
                    f"the process of the agents {self._name!r} was silent for owner_timeout_s={timeout_s:g} and was "
                    "ended; await code of an agent that takes long (asyncio.to_thread), or raise owner_timeout_s"
                )
                return
            self._controller.hear(self._name)

    def _take(self, kind: int, number: int, body: bytes) -> None:
        self._heard_s = time.monotonic()
        if kind == HEAR:
            return
        call = asyncio.ensure_future(self._answer(number, kind, body))
        self._calls.add(call)  # an event loop itself keeps no task alive
        call.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, kind: int, body: bytes) -> None:
        try:
            self._child.reply(number, await self._do(kind, body))
        except Exception as error:
            self._child.fail(number, error)
        except asyncio.CancelledError:  # by `Controller.lose`, or at the end
            self._child.fail(number, NotReady(f"the controller has given up the agents {self._name!r}"))
            raise

    async def _do(self, kind: int, body: bytes) -> Any:
        if kind == START:
            permit = await self._controller.start(self._name)
            if permit is None:
                return None
            self._permits[permit.number] = permit
            return [getattr(permit, name) for name in _SENT]
        permit = self._permits[int.from_bytes(body[:_NUMBER_BYTES], "little")]
        rest, told = body[_NUMBER_BYTES:], None
        if kind == FINISH:
            told = await self._controller.finish(permit, unpack_sample(rest))
            self.finished += 1
        else:
            await self._controller.reject(permit, rest.decode())
        del self._permits[permit.number]
        return told


class _Gate:
    """The controller, as the child sees it. Items are those of the child's own task, so they may hold anything."""

    def __init__(self, parent: Channel, items: Items) -> None:
        self._parent, self._items = parent, items

    async def start(self, owner: str) -> Permit | None:
        said = await self._parent.call(START)[1]
        if said is None:
            return None
        known = dict(zip(_SENT, said, strict=True))
        return Permit(item=self._items[Position.split(known["key"])[1]], **known)

    async def finish(self, permit: Permit, sample: SequenceSample) -> str:
        told: str = await self._parent.call(FINISH, _numbered(permit, pack_sample(sample)))[1]
        return told

    async def reject(self, permit: Permit, why: str) -> None:
        await self._parent.call(REJECT, _numbered(permit, why.encode(errors="backslashreplace")))[1]

    def hear(self, owner: str) -> None:
        self._parent.send(HEAR, 0)


def _numbered(permit: Permit, body: bytes) -> bytes:
    return permit.number.to_bytes(_NUMBER_BYTES, "little") + body


async def _serve(parent: socket.socket, engine: socket.socket, path: str, name: str) -> None:
    asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    channel = Channel(parent, "the run", lambda kind, number, body: asked.set_result(number))  # the only call is RUN
    try:
        experiment = RunFolder(path).experiment()
        torch.manual_seed(derive_seed(experiment.seed, name))
        task = experiment.load_task()
        gate = _Gate(channel, task.items)
        generator = ProcessGenerator.meet(engine)
        worker = make_worker(experiment, task, name, gate, generator, WallClock())
        said = task.items.describe()
    except Exception as error:
        channel.fail(0, error)
        await asyncio.sleep(0)  # it is sent
        raise
    channel.reply(0, said)
    working = asyncio.ensure_future(_work(channel, asked, worker))
    # Until the parent is gone, or has closed its end; or the engine's process, which another one may still serve.
    ends = [asyncio.ensure_future(one.join()) for one in (channel, generator)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not ends[0].done():
        print(f"agents {name!r}: {ends[1].exception()}", file=sys.stderr)
    for one in (working, *ends):
        one.cancel()
    await asyncio.gather(working, *ends, return_exceptions=True)


async def _work(channel: Channel, asked: asyncio.Future[int], worker: AgentWorker) -> None:
    number = await asked
    try:
        await worker.run()
    except asyncio.CancelledError:  # this process ends, and the run starts another one
        raise
    except BaseException as error:
        if not isinstance(error, SharpwaveError):
            traceback.print_exc()
        channel.fail(number, error)
        raise
    else:
        channel.reply(number, None)


def main() -> None:
    """`python -c "...main()" FD,FD FOLDER NAME`. The process ends with its parent."""
    parent, engine = enter(sys.argv[1])
    asyncio.run(_serve(parent, engine, sys.argv[2], sys.argv[3]))
