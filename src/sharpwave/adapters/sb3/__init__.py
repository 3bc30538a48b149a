"""Stable-Baselines3 and CleanRL over Sharpwave's buffers.

    from sharpwave.adapters.sb3 import HerReplayBuffer, PrioritizedDQN, ReplayBuffer

    model = DQN("MlpPolicy", env, replay_buffer_class=ReplayBuffer)
    model = DQN("MultiInputPolicy", goal_env, replay_buffer_class=HerReplayBuffer)
    model = PrioritizedDQN(
        "MlpPolicy", env, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"sampler": sw.Prioritized()}
    )

``ReplayBuffer`` needs torch and Gymnasium; the other names need Stable-Baselines3.
"""

from typing import TYPE_CHECKING, Any

try:
    from .buffer import ReplayBuffer
    from .samples import HAS_SB3, PrioritizedSamples
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: pip install "sharpwave[torch,gym]"', name=error.name) from None

if TYPE_CHECKING or HAS_SB3:
    from .algorithms import PrioritizedDDPG, PrioritizedDQN, PrioritizedSAC, PrioritizedTD3
    from .her import HerReplayBuffer

__all__ = [
    "HerReplayBuffer",
    "PrioritizedDDPG",
    "PrioritizedDQN",
    "PrioritizedSAC",
    "PrioritizedSamples",
    "PrioritizedTD3",
    "ReplayBuffer",
]

if not HAS_SB3:
    _NEED_SB3 = {"HerReplayBuffer", "PrioritizedDDPG", "PrioritizedDQN", "PrioritizedSAC", "PrioritizedTD3"}
    __all__ = [name for name in __all__ if name not in _NEED_SB3]

    def __getattr__(name: str) -> Any:
        if name in _NEED_SB3:
            raise ModuleNotFoundError(
                f"sharpwave.adapters.sb3: {name} needs Stable-Baselines3, which is not installed: pip install "
                '"sharpwave[sb3]"',
                name="stable_baselines3",
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
