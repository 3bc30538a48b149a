"""The names of ApexRL's buffers: torch tensors in, torch tensors out.

    from sharpwave.compat.apexrl import DistillationBuffer, ReplayBuffer, RolloutBuffer, TensorLeafSpec

Both forms of ApexRL's constructors and calls are taken: those of its documentation (commit 8488801) and those of its
newest commit (49815f4), whose tests and whose PPO, DQN and SAC run on these classes. With equal torch seeds they give
equal losses.

What differs from upstream, on purpose. ``ReplayBuffer``: the action dtype is taken from the first action when it is not
given, where upstream's default of int64 turns 0.5 into 0; one unbatched transition is one row, where upstream reads an
observation of four numbers as four rows; and its columns are read as copies that refuse to be written to.
``RolloutBuffer``: the shape of actions is taken from the first ones when it is not given; privileged observations are
required once they are declared, where upstream keeps old ones; and rows of the last rollout are never returned as rows
of the current one. ``DistillationBuffer`` is a name without code upstream: here it is ``sharpwave.DistillationBuffer``
with tensors, and with tuples as batches.
"""

from .distillation import DistillationBuffer
from .observations import TensorLeafSpec
from .replay import ReplayBuffer
from .rollout import RolloutBuffer

__all__ = ["DistillationBuffer", "ReplayBuffer", "RolloutBuffer", "TensorLeafSpec"]
