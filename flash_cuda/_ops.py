"""Calls of the ops, and what torch needs to know beside their CUDA kernels.

- CPU: the checks of `_C`, then flash_cuda.reference, or a library of emulated kernels (_engine.py).
- Autograd and autocast: _autograd.py, _autocast.py.
- Fakes and FLOP formulas: _fake.py; vmap: _vmap.py.

`attention_forward` is the way in for interface.py. It reaches the kernel without a second pass
through Python where nothing is listening (no gradient wanted, no transform, no compiler).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cuda import _C, _autocast, _autograd, _engine
from flash_cuda._autograd import (
    Attention,
    apply_at_this_level,
    call_scope,
    fwd_below_autograd,
    refuse_untracked,
    wants_grad,
)
from flash_cuda._handles import (
    BWD,
    BWD_NAMES,
    COMBINE,
    DENSE_OPTIONS,
    FWD,
    KV_APPEND,
    Options,
    OutLse,
    nothing_listens,
)
from flash_cuda.options import as_bool, refuse_negated, refuse_types

# Owns what is registered below.
_library: Any = torch.library.Library("flash_cuda", "IMPL")  # type: ignore[no-untyped-call]


def is_plain_call(q: Any, k: Any, v: Any, options: Options) -> bool:
    """Whether `_fwd_dense` is all that a call of `fwd` comes to."""
    return (
        options.keys() <= DENSE_OPTIONS
        and nothing_listens(q, k, v)
        and not torch._C._is_any_autocast_enabled()
        and not wants_grad(q, k, v)
    )


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, deterministic: bool = False
) -> OutLse:
    """Calls `fwd`; `options` are its arguments by name, those at their default left out.

    Raises:
        TypeError, ValueError, NotImplementedError: as the checks say, on every device.
    """
    if deterministic is not False and deterministic is not True:
        deterministic = as_bool("deterministic", deterministic)
    try:
        if torch.compiler.is_dynamo_compiling():
            return _traced_forward(q, k, v, options, deterministic)
        if torch._C._are_functorch_transforms_active() or torch._C._is_any_autocast_enabled():
            with call_scope.within(deterministic):
                return FWD(q, k, v, **options)
        if not wants_grad(q, k, v, **options):
            return fwd_below_autograd(q, k, v, options)
        return _apply(apply_at_this_level, q, k, v, options, deterministic)
    except ValueError as error:
        _engine.raise_as_refused(error)
    except RuntimeError:  # also what torch says of arguments that the schema does not take
        refuse_types(FWD, {"q": q, "k": k, "v": v, **options})
        raise


def check_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Refuses what `attention_forward` would refuse by its shapes and numbers; runs nothing."""
    if torch.compiler.is_dynamo_compiling():
        return  # the ops check when they are traced
    refuse_types(FWD, {"q": q, "k": k, "v": v, **options})
    _C.check_fwd(q, k, v, **options)


def combine(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None) -> OutLse:
    """Calls `combine`, with the errors of the checks on every device."""
    try:
        return COMBINE(out_partial, lse_partial, dtype)
    except ValueError as error:
        _engine.raise_as_refused(error)


def backward(*args: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    """Calls `bwd`, with the errors of the checks on every device."""
    try:
        return BWD(*args, **options)
    except ValueError as error:
        _engine.raise_as_refused(error)
    except RuntimeError:  # as in attention_forward
        refuse_types(BWD, dict(zip(BWD_NAMES, args)) | options)  # noqa: B905
        raise


def check_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, options: Options
) -> None:
    """Refuses what `kv_append` would refuse; writes nothing."""
    if not torch.compiler.is_dynamo_compiling():
        _C.check_kv_append(k_cache, v_cache, k, v, seqlens, **options)


def kv_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, seqlens: Tensor, options: Options
) -> None:
    """Calls `kv_append_`, with the errors of the checks on every device."""
    options = {name: value for name, value in options.items() if value is not None}
    try:
        KV_APPEND(k_cache, v_cache, k, v, seqlens, **options)
    except ValueError as error:
        _engine.raise_as_refused(error)
    except RuntimeError:  # as in attention_forward
        tensors = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "cache_seqlens": seqlens}
        refuse_types(KV_APPEND, tensors | options)
        refuse_negated(k_cache=k_cache, v_cache=v_cache)
        raise


def _apply(
    apply: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    deterministic: bool,
) -> OutLse:
    options = dict(options)
    bias, sink = options.pop("bias", None), options.pop("sink", None)
    refuse_untracked(options)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    result: OutLse = apply(Attention, deterministic, options, q, k, v, bias, sink)
    return result


def _plain_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """The form of apply that torch.compile knows."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def _traced_forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, deterministic: bool
) -> OutLse:
    # `fwd` does not carry `deterministic`, so a graph that needs it holds the autograd function.
    if not deterministic or not torch.is_grad_enabled():
        return FWD(q, k, v, **options)
    q, k, v, options = _autocast.cast_call(q, k, v, options)
    # Dynamo does not take the same tensor twice; as k and v may be one, views stand in.
    return _apply(_plain_apply, q, k.view_as(k), v.view_as(v), options, deterministic)


# ---- registration --------------------------------------------------------------------------------


def _register() -> None:
    for op, kernel in (
        ("fwd", _engine.fwd),
        ("_fwd_dense", _engine.fwd_dense),
        ("bwd", _engine.bwd),
        ("combine", _engine.combine),
        ("kv_append_", _engine.kv_append_),
    ):
        _library.impl(op, kernel, "CPU")
    _library.impl("fwd", _autograd.fwd_kernel, "Autograd")
    # Whoever calls it has seen to gradients: half a microsecond less than keeping autograd out.
    _library.impl("_fwd_dense", torch.library.fallthrough_kernel, "Autograd")
    _library.impl("bwd", _autograd.bwd_kernel, "Autograd")
    _library.impl("combine", _autograd.combine_kernel, "Autograd")
    _library.impl("fwd", _autocast.fwd_kernel("cpu"), "AutocastCPU")
    _library.impl("fwd", _autocast.fwd_kernel("cuda"), "AutocastCUDA")


_register()
