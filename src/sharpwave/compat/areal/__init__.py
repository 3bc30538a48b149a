"""AReaL's buffer, samples, graph and stream by their own names: a snippet runs with only its import line changed.

What differs on purpose, and why, stands in ``docs/how-to/feed-an-llm-trainer.md``.
"""

from .buffer import AsyncIOSequenceBuffer, BufferFull
from .data import MicroBatchSpec, SequenceSample, SequenceSplitSpec, ffd_allocate
from .graph import MFCDef, ModelInterfaceType, ModelName, OffloadHook, ParamReallocHook, build_graph
from .stream import (
    NameResolvingZmqPuller,
    NameResolvingZmqPusher,
    PullerStreamDataset,
    ZMQJsonPuller,
    ZMQJsonPusher,
    grouping,
)

__all__ = [
    "AsyncIOSequenceBuffer",
    "BufferFull",
    "MFCDef",
    "MicroBatchSpec",
    "ModelInterfaceType",
    "ModelName",
    "NameResolvingZmqPuller",
    "NameResolvingZmqPusher",
    "OffloadHook",
    "ParamReallocHook",
    "PullerStreamDataset",
    "SequenceSample",
    "SequenceSplitSpec",
    "ZMQJsonPuller",
    "ZMQJsonPusher",
    "build_graph",
    "ffd_allocate",
    "grouping",
]
