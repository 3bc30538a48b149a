"""RLinf's trajectory buffer. Where RLinf is not installed, change the import:

    from sharpwave.compat.rlinf import Trajectory, TrajectoryReplayBuffer

Both names of every argument work: those of the first version (``storage_dir``, ``storage_format``,
``save_trajectories``) and today's (``auto_save_path``, ``trajectory_format``, ``auto_save``); so do both orders of
positional arguments. docs/how-to/train-from-disk.md lists what differs on purpose, and why; ``as_upstream=True`` brings
back what can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .buffer import TrajectoryReplayBuffer
from .priority_store import PriorityStore
from .trajectory import Trajectory

if TYPE_CHECKING:
    from .datasets import PreloadReplayBufferDataset, ReplayBufferDataset, replay_buffer_collate_fn

__all__ = [
    "PreloadReplayBufferDataset",
    "PriorityStore",
    "ReplayBufferDataset",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "replay_buffer_collate_fn",
]


def __getattr__(name: str) -> Any:
    """The datasets are torch's: the rest, and the tools, need no torch."""
    if name in __all__:
        from . import datasets

        return getattr(datasets, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
