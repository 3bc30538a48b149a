"""The experience store for reinforcement learning.

A buffer writes rows described by a schema into a table, whose bytes live in a storage; a sampler picks row numbers and
a view shapes them into a batch.

    import sharpwave as sw

    buf = sw.ReplayBuffer(1_000_000, obs_shape=(17,), action_shape=(6,))
    buf.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated, truncated=truncated)
    batch = buf.sample(256)
"""

from importlib.metadata import version

from . import compat, errors
from .buffers.replay import ReplayBuffer, open
from .sampling import Linear, Prioritized, Transitions, Uniform
from .schema import Field

__version__ = version("sharpwave")
__all__ = ["Field", "Linear", "Prioritized", "ReplayBuffer", "Transitions", "Uniform", "compat", "errors", "open"]
