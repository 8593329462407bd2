"""The CPU kernels of the ops: the checks, then the engine, or kernels run by the emulator.

The checks are those of the CUDA ops, so a wrong call is refused with the same text everywhere.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flash_cuda import _C, reference
from flash_cuda._emulated import ensure_emulated

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """CPU kernel of `fwd`."""
    _C.check_fwd(*args, **kwargs)
    if emulated():
        return torch.ops.flash_cuda._fwd_emulated(*args, **kwargs)  # type: ignore[no-any-return]
    with _without_autocast():
        return reference.fwd(*args, **kwargs)


def fwd_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
) -> tuple[Tensor, Tensor]:
    """CPU kernel of `_fwd_dense`, which is `fwd` with fewer arguments."""
    options = {"softmax_scale": softmax_scale}
    return fwd(q, k, v, **options, window_left=window_left, window_right=window_right)


def bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """CPU kernel of `bwd`."""
    _C.check_bwd(*args, **kwargs)
    if emulated():
        grads = torch.ops.flash_cuda._bwd_emulated(*args, **kwargs)
    else:
        with _without_autocast():
            grads = reference.bwd(*args, **kwargs)
    # torch takes two tensors without storage for aliases of each other, which results must not be.
    return tuple(g.new_empty(1)[:0] if g.shape == (0,) else g for g in grads)


def combine(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """CPU kernel of `combine`."""
    _C.check_combine(*args, **kwargs)
    if emulated():
        return torch.ops.flash_cuda._combine_emulated(*args, **kwargs)  # type: ignore[no-any-return]
    with _without_autocast():
        return reference.combine(*args, **kwargs)


def kv_append_(*args: Any, **kwargs: Any) -> None:
    """CPU kernel of `kv_append_`."""
    _C.check_kv_append(*args, **kwargs)
    if emulated():
        torch.ops.flash_cuda._kv_append_emulated_(*args, **kwargs)
        return
    with _without_autocast():
        reference.kv_append_(*args, **kwargs)


def raise_as_refused(error: ValueError) -> NoReturn:
    """Raises what the refusal of an op stands for: an op itself can only raise ValueError."""
    kind = _C.refusal_type(str(error))
    if kind is None or isinstance(error, kind):
        raise error
    raise kind(str(error)) from None


def _without_autocast() -> Any:
    """Autocast is about the caller's products; the engine's own are float32 on purpose."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


def emulated() -> bool:
    """Whether the override asks for emulated kernels; one for CUDA tensors is refused."""
    name = _C.override_name()
    if name in ("", "cpu"):
        return False
    if name.startswith("emulated"):
        ensure_emulated(name)
        return True
    raise NotImplementedError(
        f"the kernel override {name!r} serves CUDA tensors, got q on cpu; 'cpu' and "
        "'emulated:ARCH' serve CPU tensors"
    )
