"""The experience store for reinforcement learning.

A buffer writes rows described by a schema into a table, whose bytes live in a storage; a sampler picks row numbers and
a view shapes them into a batch.

    import sharpwave as sw

    buf = sw.ReplayBuffer(1_000_000, obs_shape=(17,), action_shape=(6,))
    buf.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated, truncated=truncated)
    batch = buf.sample(256)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import adapters, compat, errors, returns
from .buffers.replay import ReplayBuffer
from .collect import collect
from .pace import Pace
from .sampling import Fifo, Lifo, Linear, Prioritized, Recent, Shuffle, Uniform
from .schema import Field
from .views import Hindsight, Transitions, Windows

if TYPE_CHECKING:
    from . import llm as llm
    from .buffers.distillation import DistillationBuffer
    from .buffers.mix import Mix
    from .buffers.open import open
    from .buffers.rollout import RolloutBuffer
    from .buffers.sequence import SequenceBuffer
    from .buffers.trajectory import TrajectoryReplayBuffer
    from .sequences.dataflow import Consumer, Dataflow
    from .sequences.sample import SequenceSample
    from .service.server import serve
    from .trajectories.trajectory import Trajectory

    __version__: str

__all__ = [
    "Consumer",
    "Dataflow",
    "DistillationBuffer",
    "Field",
    "Fifo",
    "Hindsight",
    "Lifo",
    "Linear",
    "Mix",
    "Pace",
    "Prioritized",
    "Recent",
    "ReplayBuffer",
    "RolloutBuffer",
    "SequenceBuffer",
    "SequenceSample",
    "Shuffle",
    "Trajectory",
    "TrajectoryReplayBuffer",
    "Transitions",
    "Uniform",
    "Windows",
    "adapters",
    "collect",
    "compat",
    "errors",
    "open",
    "returns",
    "serve",
]

# Imported when first used: together they take as long as all the rest. The module `collect` is not among them, because
# importing it would put the module in the place of the function.
_LATER = {
    "Consumer": ".sequences.dataflow",
    "Dataflow": ".sequences.dataflow",
    "DistillationBuffer": ".buffers.distillation",
    "Mix": ".buffers.mix",
    "RolloutBuffer": ".buffers.rollout",
    "SequenceBuffer": ".buffers.sequence",
    "SequenceSample": ".sequences.sample",
    "Trajectory": ".trajectories.trajectory",
    "TrajectoryReplayBuffer": ".buffers.trajectory",
    "open": ".buffers.open",
    "serve": ".service.server",
}

if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value = version("sharpwave")
        elif name == "llm":  # not in __all__: it needs torch
            value = import_module(".llm", __name__)
        elif name in _LATER:
            value = getattr(import_module(_LATER[name], __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value  # the next use does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
