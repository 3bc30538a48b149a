"""`Checkpoints`: learners, the position in the data and the buffer's mark, saved together as one cut."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Module

from ..buffers.sequence import SequenceBuffer
from ..checks import whole
from ..errors import SchemaError, StorageError
from .learner import Learner
from .manifest import compare, describe, sync_to_disk
from .model.folder import read_state, write_state

__all__ = ["Checkpoint", "Checkpoints"]

_NAME = re.compile(r"(\d{6,})-step-(\d{12})")  # the number of the save, and the step
_STATE, _OPTIMIZER, _CONFIG = "state.json", "optimizer.safetensors", "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint. Each learner has a folder in `path`; the one of a `Transformer` is a Hugging Face folder."""

    step: int
    path: Path

    @property
    def mark(self) -> str | None:
        """The buffer's mark of the same moment: `SequenceBuffer(..., resume=mark)`. None if no buffer was given."""
        found: str | None = self._state()["mark"]
        return found

    @property
    def position(self) -> Any:
        """What was given to `save` as `position`."""
        return self._state()["position"]

    def load(self, learners: Mapping[str, Learner]) -> None:
        """Sets learners back to the moment of the checkpoint: weights, optimizer, steps and random state.

        Raises:
            SchemaError: It is of another model or of other learners. Nothing was changed.
            StorageError: A file is missing or damaged. Nothing was changed.
        """
        state = self._state()
        saved = state["learners"]
        self._compare_names("load()", saved, learners)
        for name, said in state["files"].items():
            compare(self.path / name, said)
        ready = [self._read(name, learner, saved[name]) for name, learner in learners.items()]
        for learner, said, weights, moments in ready:
            with torch.no_grad():
                for name, parameter in learner.model.named_parameters():
                    parameter.copy_(weights[name])
            _set_moments(learner, moments)
            learner.random.bit_generator.state = said["random"]
            learner.steps = said["steps"]

    def check(self, model: Module, learners: Collection[str] = ("policy",)) -> None:
        """Looks at settings alone, without reading weights.

        Args:
            model: Of the learner "policy".
            learners: Names of all learners.

        Raises:
            SchemaError: It is of another model or of other learners.
        """
        saved = self._state()["learners"]
        self._compare_names("check()", saved, learners)
        self._compare(f"check(): {self.path / 'policy'}", model, saved["policy"])

    def _compare_names(self, where: str, saved: Collection[str], learners: Collection[str]) -> None:
        if set(saved) != set(learners):
            raise SchemaError(f"{where}: {self.path} has the learners {_listed(saved)}; expected {_listed(learners)}")

    def _compare(self, where: str, model: Module, said: dict[str, Any]) -> None:
        kind = type(model).__name__
        if said["model"] != kind:
            raise SchemaError(f"{where} is a checkpoint of a {said['model']}; the learner's model is a {kind}")
        theirs, ours = said["config"], _config(model)
        other = [key for key in sorted({*theirs, *ours} - {"dtype", "torch_dtype"}) if theirs.get(key) != ours.get(key)]
        if other:
            key = other[0]
            raise SchemaError(
                f"{where} is a checkpoint of another model: its {key} is {theirs.get(key)!r}, the learner's model "
                f"has {ours.get(key)!r}"
            )

    def _read(self, name: str, learner: Learner, said: dict[str, Any]) -> tuple[Learner, Any, Any, Any]:
        where = f"load(): {self.path / name}"
        self._compare(where, learner.model, said)
        try:
            weights, moments = read_state(self.path / name), load_file(self.path / name / _OPTIMIZER)
        except SafetensorError as error:
            raise StorageError(f"{where} is damaged: {error}") from error
        for key, parameter in learner.model.named_parameters():
            if key not in weights or weights[key].shape != parameter.shape:
                raise SchemaError(f"{where} is a checkpoint of another model: {key} is missing or has another shape")
        return learner, said, weights, moments

    def _state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.path / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.path / _STATE} cannot be read: {error}") from error
        return state


class Checkpoints:
    """The last checkpoints of a run in a folder.

    A checkpoint is written aside and flushed to the disk, then the buffer's journal is marked, then one rename puts the
    checkpoint in place. A process that dies in between, or a full disk, leaves the checkpoint before, and the buffer
    can still be resumed from that one's mark.

    Args:
        folder: Made where it is missing.
        keep: So many of the newest stay. A buffer can be resumed from its last two marks only.

    Example:
        >>> import tempfile
        >>> from sharpwave.llm.model import small_model
        >>> from sharpwave.llm.objectives import SFT
        >>> learner, checkpoints = Learner(small_model(), SFT()), Checkpoints(tempfile.mkdtemp())
        >>> checkpoints.save({"policy": learner}, step=10, position={"epoch": 0}).step
        10
        >>> checkpoints.latest().load({"policy": learner})
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), whole("Checkpoints()", "keep", keep)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"Checkpoints(): {folder} cannot be made: {error.strerror}") from error

    def save(
        self,
        learners: Mapping[str, Learner],
        *,
        step: int,
        buffer: SequenceBuffer | None = None,
        mark: str | None = None,
        position: Any = None,
    ) -> Checkpoint:
        """Saves. No lease of a trainer may be acknowledged meanwhile: it would be in the mark and not in the weights.

        Args:
            learners: By name: `{"policy": learner}`.
            step: Of the run. It may be that of an earlier checkpoint: the one that was saved last counts.
            buffer: Is marked with the checkpoint's name.
            mark: Or a mark that was just made by the process that has the buffer.
            position: Anything that JSON holds: where the data loader is, the version, ...

        Raises:
            SchemaError: JSON does not hold the position, or both a buffer and a mark are given. Nothing was changed.
            StorageError: The folder cannot be written. The checkpoints that were there stay.
        """
        step = whole("save()", "step", step, 0, 10**12 - 1)
        if buffer is not None and mark is not None:
            raise SchemaError("save(): expected buffer= or mark=, got both")
        saved = self._saved()
        place = self.folder / f"{saved[-1][0] + 1 if saved else 0:06}-step-{step:012}"
        try:
            said = json.dumps(position)
        except (TypeError, ValueError) as error:
            raise SchemaError(f"save(): position: expected what JSON holds: {error}") from None
        for left in [*self.folder.glob(".new-*"), *self.folder.glob(".old-*")]:
            shutil.rmtree(left, ignore_errors=True)
        aside = self.folder / f".new-{uuid.uuid4().hex}"
        try:
            self._write(aside, learners, place.name if buffer is not None else mark, json.loads(said))
            if buffer is not None:
                buffer.checkpoint(place.name)
                buffer.flush()
            aside.rename(place)
            sync_to_disk(self.folder)
        except (OSError, SafetensorError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"save(): {self.folder} cannot be written: {error}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)  # gone after the rename
        for old in [*(one.path for _, one in saved), place][: -self.keep]:
            self._remove(old)
        return Checkpoint(step, place)

    def latest(self) -> Checkpoint | None:
        """The checkpoint that was saved last, or None."""
        saved = self._saved()
        return saved[-1][1] if saved else None

    def _write(self, aside: Path, learners: Mapping[str, Learner], mark: str | None, position: Any) -> None:
        aside.mkdir(mode=0o700)
        state: dict[str, Any] = {"format": 1, "mark": mark, "position": position, "learners": {}, "files": {}}
        for name, learner in learners.items():
            own = aside / name
            own.mkdir(mode=0o700)
            files = write_state(dict(learner.model.named_parameters()), own)
            save_file(_moments(learner), own / _OPTIMIZER)
            (own / _CONFIG).write_text(json.dumps(_config(learner.model), indent=2) + "\n")
            state["learners"][name] = {
                "model": type(learner.model).__name__,
                "config": _config(learner.model),
                "steps": learner.steps,
                "random": learner.random.bit_generator.state,
                "optimizer": asdict(learner.config),
            }
            state["files"] |= {f"{name}/{file}": describe(own / file) for file in [*files, _OPTIMIZER, _CONFIG]}
        (aside / _STATE).write_text(json.dumps(state, indent=2) + "\n")
        for path in [*aside.rglob("*"), aside]:
            sync_to_disk(path)

    def _saved(self) -> list[tuple[int, Checkpoint]]:
        """Numbers and checkpoints, the oldest first."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be read: {error.strerror}; it was there before") from error
        found = [(match, self.folder / name) for name in names if (match := _NAME.fullmatch(name))]
        return sorted(
            ((int(match[1]), Checkpoint(int(match[2]), path)) for match, path in found), key=lambda one: one[0]
        )

    def _remove(self, path: Path) -> None:
        # Renamed first: no reader sees a checkpoint without some of its files.
        gone = self.folder / f".old-{uuid.uuid4().hex}"
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _config(model: Any) -> dict[str, Any]:
    """As it is written and read: JSON knows no tuples."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    read: dict[str, Any] = json.loads(json.dumps(model.config.replace(dtype=dtype).to_json()))
    return read


def _moments(learner: Learner) -> dict[str, Tensor]:
    """The optimizer's tensors, each named after its parameter."""
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    state = learner.optimizer.state
    return {
        f"{names[id(parameter)]}.{field}": tensor.detach().cpu().contiguous()
        for parameter in learner.model.parameters()
        for field, tensor in state.get(parameter, {}).items()
    }


def _set_moments(learner: Learner, moments: Mapping[str, Tensor]) -> None:
    numbers = {name: number for number, (name, _) in enumerate(learner.model.named_parameters())}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in moments.items():
        parameter, _, field = name.rpartition(".")
        state.setdefault(numbers[parameter], {})[field] = tensor
    groups = learner.optimizer.state_dict()["param_groups"]
    learner.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
