"""Autograd kernels of the ops.

`torch.library.register_autograd` binds every argument of the schema again at each call, 260 us for
one as wide as `fwd`; these kernels read the few that count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from flash_cuda import _C, _engine
from flash_cuda._handles import (
    BWD,
    BWD_NAMES,
    COMBINE,
    DENSE_FROM,
    DENSE_OPTIONS,
    DENSE_TO,
    FWD,
    FWD_DEFAULTS,
    FWD_DENSE,
    FWD_NAMES,
    Options,
    OutLse,
    nothing_listens,
)
from flash_cuda.override import use_kernel

# What `bwd` knows of a forward call. Any other option (cache, pages, scales, qv) has no gradient.
_BWD_OPTIONS = frozenset(BWD_NAMES) & frozenset(FWD_NAMES)
# How a forward call is cut into parts changes nothing that its gradient needs to know.
_SCHEDULE_OPTIONS = frozenset(("num_splits", "split_size", "pack_gqa"))


class _DeterministicScope(threading.local):
    """Whether the call in progress asked for `deterministic`, which `fwd` has no argument for."""

    deterministic = False

    @contextmanager
    def within(self, deterministic: bool) -> Iterator[None]:
        before, self.deterministic = self.deterministic, deterministic
        try:
            yield
        finally:
            self.deterministic = before


call_scope = _DeterministicScope()
_below_autograd = torch._C._AutoDispatchBelowAutograd


@contextmanager
def _below_this_autograd() -> Iterator[None]:
    """Inside an autograd function: its op, without the Autograd kernel that called the function.

    The function runs without gradients, which is right for its own level; levels of functorch
    below it, as of a gradient of a gradient, are told to go on listening.
    """
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(torch.enable_grad())
            stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(_below_autograd())
        yield


def _refuse_forward_mode() -> NoReturn:
    raise NotImplementedError(
        "forward-mode derivatives (jvp, jacfwd, dual numbers) of flash_cuda's attention are not "
        "supported: use reverse mode, or torch.nn.functional.scaled_dot_product_attention with "
        "the math backend"
    )


class _State(FunctionCtx):
    """What the backward pass finds: tensors through save_for_backward, the rest as attributes."""

    saved_tensors: tuple[Any, ...]  # Tensor, or None for what was not given
    needs_input_grad: tuple[bool, ...]
    names: tuple[str, ...]
    options: Options
    deterministic: bool
    kernel: str


class Attention(torch.autograd.Function):
    """`fwd` with `bwd` as its gradient for q, k, v, bias and sink, from out and from lse."""

    @staticmethod
    def forward(
        ctx: _State,
        deterministic: bool,
        options: Options,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
    ) -> OutLse:
        """Runs the op; `options` are its other arguments by name."""
        call = options if bias is None and sink is None else {**options, "bias": bias, "sink": sink}
        out, lse = _fwd_without_grad(q, k, v, call)
        names = tuple(n for n, value in options.items() if isinstance(value, Tensor))
        saved: list[Any] = [q, k, v, out, lse, bias, sink, *(options[n] for n in names)]
        ctx.save_for_backward(*saved)
        ctx.names = names
        ctx.options = {n: value for n, value in options.items() if n not in names}
        ctx.deterministic = deterministic
        ctx.kernel = "" if torch.compiler.is_dynamo_compiling() else _C.override_name()
        ctx.set_materialize_grads(False)  # a loss that ignores lse should not pay for it
        return out, lse

    @staticmethod
    def backward(
        ctx: _State, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; None for those not wanted."""
        nothing: tuple[Tensor | None, ...] = (None,) * 7
        if dout is None and dlse is None:
            return nothing
        q, k, v, out, lse, bias, sink, *rest = ctx.saved_tensors
        options = {**ctx.options, **dict(zip(ctx.names, rest, strict=True))}
        _refuse_gradient(options)
        if dout is None:
            dout = torch.zeros_like(out)
        elif dout.stride(-1) != 1:
            dout = dout.contiguous()
        needs = ctx.needs_input_grad[2:]
        wanted = sum(1 << bit for bit, need in enumerate(needs) if need)
        options = {n: value for n, value in options.items() if n in _BWD_OPTIONS}
        options.update(bias=bias, sink=sink, deterministic=ctx.deterministic, wanted=wanted)
        grads = _bwd_by_kernel(ctx.kernel, (dout, dlse, q, k, v, out, lse), options)
        return (None, None, *_as_inputs(grads, needs, bias, sink))


def _as_inputs(
    grads: tuple[Tensor, ...],
    needs: tuple[bool, ...],
    bias: Tensor | None,
    sink: Tensor | None,
) -> list[Tensor | None]:
    """Drops what was not wanted; dbias and dsink, which the op gives in float32, are cast back."""
    result: list[Tensor | None] = [g if n else None for g, n in zip(grads, needs, strict=True)]
    for i, tensor in ((3, bias), (4, sink)):
        grad = result[i]
        if grad is not None and tensor is not None and grad.dtype != tensor.dtype:
            result[i] = grad.to(tensor.dtype)
    return result


def _refuse_gradient(options: Options) -> None:
    for name, value in options.items():
        if name in _BWD_OPTIONS or name in _SCHEDULE_OPTIONS or value is None:
            continue
        raise NotImplementedError(
            f"gradients of attention with {name} are not supported: "
            "call it under torch.no_grad(), or without that argument"
        )


def _fwd_without_grad(q: Tensor, k: Tensor, v: Tensor, options: Options) -> OutLse:
    if torch.compiler.is_dynamo_compiling():  # the guard below means nothing in a traced graph
        return FWD(q, k, v, **options)
    if not torch._C._are_functorch_transforms_active():
        return fwd_below_autograd(q, k, v, options)
    with _below_this_autograd():
        return FWD(q, k, v, **options)


def fwd_below_autograd(q: Tensor, k: Tensor, v: Tensor, options: Options) -> OutLse:
    """The kernel, by the op with the fewest arguments that says the call: host time counts."""
    if options.keys() <= DENSE_OPTIONS and nothing_listens(q, k, v):
        return FWD_DENSE(q, k, v, **options)
    with _below_autograd():
        return FWD(q, k, v, **options)


def _bwd_by_kernel(
    kernel: str, tensors: tuple[Tensor | None, ...], options: Options
) -> tuple[Tensor, ...]:
    """Calls `bwd` under the override that the forward call ran under.

    Gradients of CUDA tensors are computed in a thread of their own, which knows of no override.
    """
    if torch.compiler.is_dynamo_compiling():
        return BWD(*tensors, **options)
    try:
        with use_kernel(kernel) if kernel else nullcontext():
            # With create_graph=True gradients stay on, and the op's own Autograd kernel has to see
            # the call.
            if torch.is_grad_enabled():
                return BWD(*tensors, **options)
            with _below_autograd():
                return BWD(*tensors, **options)
    except ValueError as error:
        _engine.raise_as_refused(error)


class _OnceDifferentiable(torch.autograd.Function):
    """An op whose results carry a graph that refuses: a second derivative must not be silent."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, call: Callable[..., tuple[Tensor, ...]], options: Options, *args: Tensor
    ) -> tuple[Tensor, ...]:
        with _below_this_autograd():
            return call(*args, **options)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            "the second derivative of flash_cuda's attention is not supported: "
            "use torch.nn.functional.scaled_dot_product_attention with the math backend"
        )


def apply_at_this_level(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` for an Autograd kernel, and 2 us faster.

    `apply` itself turns away every call inside a functorch transform. By the time an Autograd
    kernel runs, functorch has peeled off the level that wants this gradient, and a plain apply is
    right also below vmap.
    """
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    if not torch._C._are_functorch_transforms_active():
        return apply(*args)
    with enable_single_level_autograd_function():
        return apply(*args)


def wants_grad(*args: Any, **kwargs: Any) -> bool:
    if forward_ad._current_level >= 0 and _has_tangent(*args, *kwargs.values()):
        _refuse_forward_mode()
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs)


def _has_tangent(*args: Any) -> bool:
    return any(
        isinstance(arg, Tensor)
        and arg.is_floating_point()
        and forward_ad.unpack_dual(arg).tangent is not None  # type: ignore[no-untyped-call]
        for arg in args
    )


def fwd_kernel(*args: Any, **kwargs: Any) -> OutLse:
    """Autograd kernel of `fwd`; torch leaves out trailing arguments that have their default."""
    if wants_grad(*args, **kwargs):
        options = {**_given(args[3:]), **kwargs}
        q, k, v = args[:3]
        bias, sink = options.pop("bias", None), options.pop("sink", None)
        refuse_untracked(options)
        deterministic = torch.are_deterministic_algorithms_enabled() or call_scope.deterministic
        result: OutLse = apply_at_this_level(Attention, deterministic, options, q, k, v, bias, sink)
        return result
    if _is_dense_call(args, kwargs) and nothing_listens(*args[:3]):
        return FWD_DENSE(*args[:3], *args[DENSE_FROM:])
    with _below_autograd():
        return FWD(*args, **kwargs)


def _given(args: tuple[Any, ...]) -> Options:
    """Arguments behind q, k, v by name, without those that only stand ahead of one that counts."""
    return {
        name: value
        for name, value, default in zip(FWD_NAMES[3:], args, FWD_DEFAULTS)  # noqa: B905
        if value is not default and (default is None or value != default)
    }


def _is_dense_call(args: tuple[Any, ...], kwargs: Options) -> bool:
    """Positional arguments of `fwd` that `_fwd_dense` has too; the tensors between are None."""
    tensors = args[3:DENSE_FROM]
    return not kwargs and len(args) <= DENSE_TO and tensors.count(None) == len(tensors)


def refuse_untracked(options: Options) -> None:
    for name in ("qv", "alibi_slopes", "q_descale", "k_descale", "v_descale"):
        tensor = options.get(name)
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(
                f"{name} must not require a gradient: flash_cuda computes none for it "
                "(it does for q, k, v, bias and sink); pass a detached tensor"
            )


def bwd_kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    if wants_grad(*args, **kwargs):
        grads: tuple[Tensor, ...] = apply_at_this_level(_OnceDifferentiable, BWD, kwargs, *args)
        return grads
    with _below_autograd():
        return BWD(*args, **kwargs)


class _Combine(torch.autograd.Function):
    """Gradient of `combine`: out is a mean of the parts with weights exp(lse_i - lse)."""

    @staticmethod
    def forward(ctx: _State, options: Options, out_partial: Tensor, lse_partial: Tensor) -> OutLse:
        with _below_this_autograd():
            out, lse = COMBINE(out_partial, lse_partial, **options)
        ctx.save_for_backward(out_partial, lse_partial, lse)
        return out, lse

    @staticmethod
    def backward(ctx: _State, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out_partial, lse_partial, lse = ctx.saved_tensors
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # no part has a key there: weights are 0
        weight = torch.exp(lse_partial - lse)  # (splits, B, H, S)
        # Zeroed, since a part without weight may hold anything.
        part = out_partial.masked_fill(weight.transpose(-1, -2)[..., None] == 0, 0.0)
        dout = dout.to(out_partial.dtype)
        share = weight * (part * dout).sum(-1).transpose(-1, -2)
        dlse_partial = share - weight * share.sum(0) + weight * dlse
        return None, weight.transpose(-1, -2)[..., None] * dout, dlse_partial


def combine_kernel(out_partial: Tensor, lse_partial: Tensor, *args: Any, **kwargs: Any) -> OutLse:
    options = {**dict(zip(("dtype",), args)), **kwargs}  # noqa: B905
    if wants_grad(out_partial, lse_partial):
        result: OutLse = apply_at_this_level(_Combine, options, out_partial, lse_partial)
        return result
    with _below_autograd():
        return COMBINE(out_partial, lse_partial, **options)
