"""The experience store for reinforcement learning.

A buffer writes rows described by a schema into a table, whose bytes live in a storage; a sampler picks row numbers and
a view shapes them into a batch.

    import sharpwave as sw

    buf = sw.ReplayBuffer(1_000_000, obs_shape=(17,), action_shape=(6,))
    buf.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated, truncated=truncated)
    batch = buf.sample(256)
"""

from importlib.metadata import version

from . import adapters, compat, errors, returns
from .buffers.distillation import DistillationBuffer
from .buffers.open import open
from .buffers.replay import ReplayBuffer
from .buffers.rollout import RolloutBuffer
from .buffers.sequence import SequenceBuffer
from .buffers.trajectory import TrajectoryReplayBuffer
from .collect import collect
from .pace import Pace
from .sampling import Fifo, Lifo, Linear, Prioritized, Recent, Shuffle, Uniform
from .schema import Field
from .sequences.dataflow import Consumer, Dataflow
from .sequences.sample import SequenceSample
from .trajectories.trajectory import Trajectory
from .views import Hindsight, Transitions, Windows

__version__ = version("sharpwave")
__all__ = [
    "Consumer",
    "Dataflow",
    "DistillationBuffer",
    "Field",
    "Fifo",
    "Hindsight",
    "Lifo",
    "Linear",
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
]
