"""The CPU engine: the ops in plain PyTorch, as the tiled algorithm itself.

This is the embedded default for CPU tensors and the executable specification of the kernels.
The entry points take exactly the arguments of the ops and expect them to be checked. Read
forward.py first, then scores.py, backward.py and problem.py; forms.py has the algorithm in other
orders. Memory is linear in the lengths: no tensor is larger than the inputs or one tile.
"""

from .entry import bwd, combine, fwd, kv_append_
from .options import EngineOptions, current_options, use_options

__all__ = [
    "EngineOptions",
    "bwd",
    "combine",
    "current_options",
    "fwd",
    "kv_append_",
    "use_options",
]
