"""The ops as objects, what their schemas say, and whether anybody listens to a call of one.

Importing the compiled module `_C` defines the schemas and the CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cuda import _C  # noqa: F401  it defines the ops

Options = dict[str, Any]
OutLse = tuple[Tensor, Tensor]

FWD: Callable[..., OutLse] = torch.ops.flash_cuda.fwd.default
FWD_DENSE: Callable[..., OutLse] = torch.ops.flash_cuda._fwd_dense.default
BWD: Callable[..., tuple[Tensor, ...]] = torch.ops.flash_cuda.bwd.default
COMBINE: Callable[..., OutLse] = torch.ops.flash_cuda.combine.default
KV_APPEND: Callable[..., None] = torch.ops.flash_cuda.kv_append_.default


def _argument_names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


FWD_NAMES = _argument_names(FWD)
# Of what follows q, k and v.
FWD_DEFAULTS = tuple(argument.default_value for argument in FWD._schema.arguments[3:])  # type: ignore[attr-defined]
_DENSE_NAMES = _argument_names(FWD_DENSE)
DENSE_OPTIONS = frozenset(_DENSE_NAMES[3:])
# Those options in `fwd`, where they stand side by side.
DENSE_FROM = FWD_NAMES.index(_DENSE_NAMES[3])
DENSE_TO = DENSE_FROM + len(DENSE_OPTIONS)
assert FWD_NAMES[DENSE_FROM:DENSE_TO] == _DENSE_NAMES[3:]
BWD_NAMES = _argument_names(BWD)
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))


def nothing_listens(q: Any, k: Any, v: Any) -> bool:
    """No mode, tracer, transform or tensor subclass is there, which would miss `fwd`.

    Below one level of functorch there may be another, which wants the gradient that this does not.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._get_tracing_state() is None
        and not torch._C._are_functorch_transforms_active()
        and type(q) in _PLAIN_TENSORS
        and type(k) in _PLAIN_TENSORS
        and type(v) in _PLAIN_TENSORS
    )
