"""A short cut for plain calls of the public op `fwd`.

torch reads the 31 arguments of `fwd` once to reach the autograd kernel, which is Python, and the
few that count once more from there: 4.5 us of 18 (docs/tuning.md). A call that wants no gradient,
gives nothing but what `_fwd_dense` takes, and that nobody listens to, goes to `_fwd_dense` at once.
Everything else, and all that comes through the dispatcher (compiled graphs, modes, transforms,
subclasses), sees `fwd`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from flash_cuda import _handles, _ops
from flash_cuda.options import refuse_types


def _call(op: OpOverload | OpOverloadPacket, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 3 and _ops.is_plain_call(*args, kwargs):
        try:
            return _handles.FWD_DENSE(*args, **kwargs)
        except RuntimeError:  # also what torch says of arguments that the schema does not take
            refuse_types(_handles.FWD, dict(zip("qkv", args, strict=True)) | kwargs)
            raise
    return op._op(*args, **kwargs)


class _Overload(OpOverload):
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs)


class _Packet(OpOverloadPacket):
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _call(self, args, kwargs)


def _register() -> None:
    # torch makes the objects of an op once and tells them by identity: theirs get the new class.
    torch.ops.flash_cuda.fwd.__class__ = _Packet
    torch.ops.flash_cuda.fwd.default.__class__ = _Overload


_register()
