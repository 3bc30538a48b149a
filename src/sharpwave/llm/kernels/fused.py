"""The kernels that run on a GPU, under the names of `plain`."""

from .attention import attend
from .draws import draw
from .layers import add_and_norm, gate, place_heads

__all__ = ["add_and_norm", "attend", "draw", "gate", "place_heads"]
