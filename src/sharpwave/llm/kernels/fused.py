"""The kernels that run on a GPU, under the names of `plain`."""

from .attention import attend
from .copies import copy_places
from .draws import draw
from .layers import add_and_norm, gate, place_heads

__all__ = ["add_and_norm", "attend", "copy_places", "draw", "gate", "place_heads"]
