"""`ProcessLearner`: the learner of a run in a child process; on a GPU a run has its learner there."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import SharpwaveError
from ..sequences.sample import SequenceSample
from .channel import PlainChannel
from .child import Child, enter
from .cut import Cut
from .experiment import Experiment
from .full_disk import tell_full_disk
from .parts import make_learner, runs_children
from .run_folder import RunFolder
from .run_learner import RunLearner
from .tasks import Task

__all__ = ["ProcessLearner", "main", "start_learner"]

TRAIN, PUBLISH, SAVE = range(2, 5)


class ProcessLearner:
    """A learner whose steps do not wait for this process's interpreter, which agents keep busy.

    Samples go to the child as bytes, a copy or two of what a step takes. Weights and checkpoints go to the run's folder
    from there. `RunLearner` says what the calls do.

    Attributes:
        said: The cut of the checkpoint that the learner goes on from, as JSON; None for a run that begins.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self.said: Any = child.said

    @classmethod
    async def start(cls, folder: RunFolder) -> ProcessLearner:
        """Starts the child, which makes the learner of the run, resumes and compiles.

        Raises:
            SchemaError, StorageError: As `make_learner` and `RunLearner.resume` raise them.
            NotReady: The child ended and said nothing.
        """
        return cls(await Child.start(__name__, [str(folder.path)], "the learner"))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def train(self, batch: SequenceSample) -> Mapping[str, float]:
        """One step on a batch; see `RunLearner.train`."""
        told: dict[str, float] = await self._child.call(TRAIN, batch.to_bytes())[1]
        return told

    async def publish(self) -> int:
        """See `RunLearner.publish`."""
        version: int = await self._child.call(PUBLISH)[1]
        return version

    async def save(self, cut: Cut) -> None:
        """See `RunLearner.save`."""
        await self._child.call(SAVE, json.dumps(cut.to_json()).encode())[1]

    async def join(self) -> None:
        """Waits until the child has ended.

        Raises:
            NotReady: It ended by itself.
        """
        await self._child.join()

    async def close(self) -> None:
        """Ends the child. A second call does nothing."""
        await self._child.close()


async def start_learner(folder: RunFolder, experiment: Experiment, task: Task) -> RunLearner | ProcessLearner:
    """A run's learner, ready for its first step: in this process on a CPU, in one of its own on a GPU."""
    if runs_children(experiment):
        return await ProcessLearner.start(folder)
    learner = make_learner(experiment, task, folder)
    learner.resume()
    await asyncio.to_thread(learner.warm_up)
    return learner


def main() -> None:
    """`python -c "...main()" FD FOLDER`. Errors of calls are told; the process ends with its parent."""
    parent, folder = PlainChannel(*enter(sys.argv[1])), RunFolder(sys.argv[2])
    try:
        experiment = folder.experiment()
        torch.manual_seed(experiment.seed)
        task = experiment.load_task()
        learner = make_learner(experiment, task, folder)
        learner.resume()
        learner.warm_up()
    except Exception as error:
        parent.fail_all(error)
        raise
    parent.is_ready(learner.said)
    for kind, number, body in parent.frames():
        try:
            with tell_full_disk(folder.path):
                parent.reply(number, _do(learner, kind, body))
        except Exception as error:
            if not isinstance(error, SharpwaveError):
                traceback.print_exc()
            parent.fail(number, error)
        parent.flush(waits=True)


def _do(learner: RunLearner, kind: int, body: bytes) -> Any:
    if kind == TRAIN:
        return learner.train_now(SequenceSample.from_bytes(body))
    if kind == PUBLISH:
        return learner.publish_now()
    return learner.save_now(Cut.from_json(json.loads(body)))
