"""The ops of flash_cuda as torch sees them: CPU kernels, autograd and autocast.

Importing the compiled module `_C` defines the schemas and the CUDA kernels. What torch needs
beside a kernel is registered here (fakes and FLOP formulas: _fake.py, vmap: _vmap.py):

- CPU: the checks of `_C`, then flash_cuda.reference, or a library of emulated kernels.
- Autograd: a kernel of our own around `Attention`. `torch.library.register_autograd` binds every
  argument of the schema again at each call, 260 us for one as wide as this.
- Autocast: casts q, k, v (and qv, bias) and nothing else: lengths, slopes, sinks and scales keep
  the types that the kernels read.

`attention_forward` is the way in for interface.py. It reaches the kernel without a second pass
through Python where nothing is listening (no gradient wanted, no transform, no compiler).
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
from flash_cuda.options import as_bool, refuse_negated, refuse_types
from flash_cuda.override import use_kernel

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
_DEFAULTS = tuple(argument.default_value for argument in FWD._schema.arguments[3:])  # type: ignore[attr-defined]
_DENSE_NAMES = _argument_names(FWD_DENSE)
_DENSE_OPTIONS = frozenset(_DENSE_NAMES[3:])
# Those options in `fwd`, where they stand side by side.
_DENSE_FROM = FWD_NAMES.index(_DENSE_NAMES[3])
_DENSE_TO = _DENSE_FROM + len(_DENSE_OPTIONS)
assert FWD_NAMES[_DENSE_FROM:_DENSE_TO] == _DENSE_NAMES[3:]
BWD_NAMES = _argument_names(BWD)
# What `bwd` knows of a forward call. Any other option (cache, pages, scales, qv) has no gradient.
_BWD_OPTIONS = frozenset(BWD_NAMES) & frozenset(FWD_NAMES)
# How a forward call is cut into parts changes nothing that its gradient needs to know.
_SCHEDULE_OPTIONS = frozenset(("num_splits", "split_size", "pack_gqa"))
_PLAIN_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_CAST_BY_AUTOCAST = ("q", "k", "v", "qv", "bias")


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


_scope = _DeterministicScope()
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


# Owns what is registered below.
_library: Any = torch.library.Library("flash_cuda", "IMPL")  # type: ignore[no-untyped-call]


# ---- autograd ------------------------------------------------------------------------------------


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
        return _fwd_below_autograd(q, k, v, options)
    with _below_this_autograd():
        return FWD(q, k, v, **options)


def _fwd_below_autograd(q: Tensor, k: Tensor, v: Tensor, options: Options) -> OutLse:
    """The kernel, by the op with the fewest arguments that says the call: host time counts."""
    if options.keys() <= _DENSE_OPTIONS and _nothing_listens(q, k, v):
        return FWD_DENSE(q, k, v, **options)
    with _below_autograd():
        return FWD(q, k, v, **options)


def is_plain_call(q: Any, k: Any, v: Any, options: Options) -> bool:
    """Whether `_fwd_dense` is all that a call of `fwd` comes to."""
    return (
        options.keys() <= _DENSE_OPTIONS
        and _nothing_listens(q, k, v)
        and not torch._C._is_any_autocast_enabled()
        and not _wants_grad(q, k, v)
    )


def _nothing_listens(q: Any, k: Any, v: Any) -> bool:
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


def _apply_at_this_level(function: type[torch.autograd.Function], *args: Any) -> Any:
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


def _wants_grad(*args: Any, **kwargs: Any) -> bool:
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


def _fwd_autograd(*args: Any, **kwargs: Any) -> OutLse:
    """Autograd kernel of `fwd`; torch leaves out trailing arguments that have their default."""
    if _wants_grad(*args, **kwargs):
        options = {**_given(args[3:]), **kwargs}
        q, k, v = args[:3]
        bias, sink = options.pop("bias", None), options.pop("sink", None)
        _refuse_untracked(options)
        deterministic = torch.are_deterministic_algorithms_enabled() or _scope.deterministic
        result: OutLse = _apply_at_this_level(
            Attention, deterministic, options, q, k, v, bias, sink
        )
        return result
    if _is_dense_call(args, kwargs) and _nothing_listens(*args[:3]):
        return FWD_DENSE(*args[:3], *args[_DENSE_FROM:])
    with _below_autograd():
        return FWD(*args, **kwargs)


def _given(args: tuple[Any, ...]) -> Options:
    """Arguments behind q, k, v by name, without those that only stand ahead of one that counts."""
    return {
        name: value
        for name, value, default in zip(FWD_NAMES[3:], args, _DEFAULTS)  # noqa: B905
        if value is not default and (default is None or value != default)
    }


def _is_dense_call(args: tuple[Any, ...], kwargs: Options) -> bool:
    """Positional arguments of `fwd` that `_fwd_dense` has too; the tensors between are None."""
    tensors = args[3:_DENSE_FROM]
    return not kwargs and len(args) <= _DENSE_TO and tensors.count(None) == len(tensors)


def _refuse_untracked(options: Options) -> None:
    for name in ("qv", "alibi_slopes", "q_descale", "k_descale", "v_descale"):
        tensor = options.get(name)
        if tensor is not None and tensor.requires_grad:
            raise NotImplementedError(
                f"{name} must not require a gradient: flash_cuda computes none for it "
                "(it does for q, k, v, bias and sink); pass a detached tensor"
            )


def _bwd_autograd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    if _wants_grad(*args, **kwargs):
        grads: tuple[Tensor, ...] = _apply_at_this_level(_OnceDifferentiable, BWD, kwargs, *args)
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


def _combine_autograd(
    out_partial: Tensor, lse_partial: Tensor, *args: Any, **kwargs: Any
) -> OutLse:
    options = {**dict(zip(("dtype",), args)), **kwargs}  # noqa: B905
    if _wants_grad(out_partial, lse_partial):
        result: OutLse = _apply_at_this_level(_Combine, options, out_partial, lse_partial)
        return result
    with _below_autograd():
        return COMBINE(out_partial, lse_partial, **options)


# ---- autocast ------------------------------------------------------------------------------------


def _autocast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Casts float32 and 16-bit tensors, as torch's own ops do: float64 and fp8 stay."""
    if tensor is None or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return tensor
    return tensor.to(dtype)


def _fwd_autocast(device_type: str) -> Callable[..., OutLse]:
    key = getattr(torch._C.DispatchKey, "AutocastCPU" if device_type == "cpu" else "AutocastCUDA")
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> OutLse:
        options = {**dict(zip(FWD_NAMES, args)), **kwargs}  # noqa: B905
        dtype = torch.get_autocast_dtype(device_type)
        for name in _CAST_BY_AUTOCAST:
            if name in options:
                options[name] = _autocast(options[name], dtype)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return FWD(**options)

    return kernel


# ---- the way in ----------------------------------------------------------------------------------


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
            with _scope.within(deterministic):
                return FWD(q, k, v, **options)
        if not _wants_grad(q, k, v, **options):
            return _fwd_below_autograd(q, k, v, options)
        return _apply(_apply_at_this_level, q, k, v, options, deterministic)
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
    _refuse_untracked(options)
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
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        tensors = {"q": q, "k": k, "v": v, **options}
        dtype = torch.get_autocast_dtype(device_type)
        tensors.update({n: _autocast(tensors.get(n), dtype) for n in _CAST_BY_AUTOCAST})
        q, k, v = tensors.pop("q"), tensors.pop("k"), tensors.pop("v")
        options = {n: value for n, value in tensors.items() if value is not None}
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
    _library.impl("fwd", _fwd_autograd, "Autograd")
    # Whoever calls it has seen to gradients: half a microsecond less than keeping autograd out.
    _library.impl("_fwd_dense", torch.library.fallthrough_kernel, "Autograd")
    _library.impl("bwd", _bwd_autograd, "Autograd")
    _library.impl("combine", _combine_autograd, "Autograd")
    _library.impl("fwd", _fwd_autocast("cpu"), "AutocastCPU")
    _library.impl("fwd", _fwd_autocast("cuda"), "AutocastCUDA")


_register()
