"""The ops as torch sees them: registration, gradients, autocast, vmap, fakes, FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import flash_cuda

OPS = torch.ops.flash_cuda
B, S, T, H, HK, D = 2, 5, 7, 4, 2, 8
FAR = {"dtype": torch.float64}


def rand(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def qkv(grad: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rand(B, S, H, D, grad=grad, dtype=dtype),
        rand(B, T, HK, D, grad=grad, dtype=dtype),
        rand(B, T, HK, D, grad=grad, dtype=dtype),
    )


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- opcheck -------------------------------------------------------------------------------------


def fwd_samples() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    cu = int32(0, 3, 10)
    packed = (rand(10, H, D, grad=True), rand(10, HK, D, grad=True), rand(10, HK, D, grad=True))
    fp8 = tuple(t.to(torch.float8_e4m3fn) for t in qkv())
    scale = torch.rand(B, HK) + 0.5
    pages = (rand(2, 1, H, D), rand(6, 4, HK, D), rand(6, 4, HK, D))
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    extras = (rand(1, H, S, T, grad=True), torch.rand(H), rand(H, grad=True))
    return {
        "causal": (qkv(True), {"window_right": 0}),
        "scores": ((*qkv(True), *extras), {"softcap": 3.0, "softmax_scale": 0.2}),
        "float64": (qkv(True, torch.float64), {}),
        "bfloat16": (qkv(True, torch.bfloat16), {"window_left": 2, "strict": True}),
        "packed": (packed, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 7}),
        "dropout": (qkv(True), {"dropout_p": 0.3, "rng_state": torch.tensor([1, 2])}),
        "fp8": (fp8, {"q_descale": scale, "k_descale": scale, "v_descale": scale}),
        "pages": (pages, {"block_table": table, "seqused_k": int32(11, 4), "num_splits": 2}),
        "qv": (qkv(), {"qv": rand(B, S, H, D)}),
    }


# opcheck's own comparison does not take fp8 tensors.
@pytest.mark.parametrize("name", [name for name in fwd_samples() if name != "fp8"])
def test_opcheck_fwd(name: str) -> None:
    args, kwargs = fwd_samples()[name]
    opcheck(OPS.fwd.default, args, kwargs)


@pytest.mark.parametrize("wanted", [7, 1, 5, 31])
def test_opcheck_bwd(wanted: int) -> None:
    q, k, v = qkv()
    bias, sink = rand(1, H, S, T), rand(H)
    out, lse = OPS.fwd(q, k, v, bias=bias, sink=sink)
    args = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    opcheck(OPS.bwd.default, args, {"bias": bias, "sink": sink, "wanted": wanted})


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [7, 1])
def test_opcheck_bwd_of_kernels(wanted: int) -> None:
    """Results that are not wanted must not alias each other, and dout may lie in any way."""
    q, k, v = (t.to("cuda", torch.bfloat16).repeat(1, 1, 1, 8) for t in qkv())
    out, lse = OPS.fwd(q, k, v)
    for dout in (torch.randn_like(out), torch.ones_like(out[:1, :1, :1, :1]).expand_as(out)):
        opcheck(OPS.bwd.default, (dout, None, q, k, v, out, lse), {"wanted": wanted})


def test_opcheck_combine() -> None:
    args = (rand(3, B, S, H, D, grad=True), rand(3, B, H, S, grad=True))
    opcheck(OPS.combine.default, args)
    opcheck(OPS.combine.default, tuple(t.detach() for t in args), {"dtype": torch.bfloat16})


def test_opcheck_kv_append() -> None:
    caches = (rand(B, 16, HK, D), rand(B, 16, HK, D))
    new = (rand(B, 3, HK, D), rand(B, 3, HK, D))
    opcheck(OPS.kv_append_.default, (*caches, *new, int32(0, 9)))
    rotary = {"rotary_cos": torch.rand(16, 2), "rotary_sin": torch.rand(16, 2)}
    opcheck(OPS.kv_append_.default, (*caches, *new, int32(0, 9)), rotary)


# ---- fakes ---------------------------------------------------------------------------------------


def layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


@pytest.mark.parametrize("name", list(fwd_samples()))
def test_fake_results_look_like_real_ones(name: str) -> None:
    args, kwargs = fwd_samples()[name]
    args = tuple(t.detach() for t in args)
    real = OPS.fwd(*args, **kwargs)
    with FakeTensorMode() as mode:
        fake = OPS.fwd(*map(mode.from_tensor, args), **{
            n: mode.from_tensor(t) if isinstance(t, Tensor) else t for n, t in kwargs.items()
        })  # fmt: skip
    assert [layout(t) for t in fake] == [layout(t) for t in real]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", range(0, 32, 3))
def test_fake_gradients_look_like_real_ones(wanted: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    statistic = torch.float64 if dtype == torch.float64 else torch.float32
    bias, sink = rand(1, 1, S, T, dtype=dtype), rand(H, dtype=statistic)
    out, lse = OPS.fwd(q, k, v, bias=bias, sink=sink)
    args = (out, None, q, k, v, out, lse, bias)
    real = OPS.bwd(*args, sink=sink, wanted=wanted)
    with FakeTensorMode() as mode:
        faked = [None if t is None else mode.from_tensor(t) for t in args]
        fake = OPS.bwd(*faked, sink=mode.from_tensor(sink), wanted=wanted)
    assert [layout(t) for t in fake] == [layout(t) for t in real]
    assert [t.numel() > 0 for t in real] == [bool(wanted >> bit & 1) for bit in range(5)]


def test_meta_tensors_beside_others_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="k must be on the device of q"):
        flash_cuda.attention(q, k.to("meta"), v)


def test_meta_tensors() -> None:
    q, k, v = (t.to("meta") for t in qkv())
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    assert out.is_meta
    assert lse.shape == (B, H, S)


# ---- gradients -----------------------------------------------------------------------------------


def test_gradcheck() -> None:
    """Every input with a gradient, from out and lse, through everything that bends the logits."""
    tensors = (
        *qkv(dtype=torch.float64),
        rand(1, H, S, T, **FAR),
        rand(H, **FAR),
    )

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        return flash_cuda.attention(
            q, k, v, bias=bias, sink=sink, causal=True, softcap=2.0, return_lse=True
        )

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in tensors])


def test_gradcheck_combine() -> None:
    args = (rand(3, B, S, H, D, grad=True, **FAR), rand(3, B, H, S, grad=True, **FAR))
    try:
        OPS.combine(*args)
    except TypeError:
        pytest.skip("combine takes float32 partials only")
    assert torch.autograd.gradcheck(OPS.combine, args)


@pytest.mark.parametrize("wanted", range(1, 32))
def test_any_subset_of_gradients(wanted: int) -> None:
    """Each subset gives what all of them give."""
    tensors = (*qkv(), rand(1, H, S, T), rand(H))
    dout, dlse = rand(B, S, H, D), rand(B, H, S)

    def gradients(leaves: list[Tensor], subset: int) -> list[Tensor | None]:
        chosen = [t.detach().requires_grad_(bool(subset >> i & 1)) for i, t in enumerate(leaves)]
        q, k, v, bias, sink = chosen
        result = flash_cuda.attention(q, k, v, bias=bias, sink=sink, return_lse=True)
        asked = [t for t in chosen if t.requires_grad]
        found = iter(torch.autograd.grad(result, asked, [dout, dlse]))
        return [next(found) if t.requires_grad else None for t in chosen]

    for alone, together in zip(
        gradients(list(tensors), wanted), gradients(list(tensors), 31), strict=True
    ):
        if alone is not None:
            torch.testing.assert_close(alone, together)


def test_gradient_through_lse_alone() -> None:
    q, k, v = qkv(True, torch.float64)
    _, lse = flash_cuda.attention(q, k, v, return_lse=True)
    dlse = torch.randn_like(lse)
    dq, dk = torch.autograd.grad(lse, [q, k], dlse, retain_graph=True)
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * D**-0.5
    wanted = torch.autograd.grad(torch.logsumexp(logits, -1), [q, k], dlse)
    torch.testing.assert_close((dq, dk), wanted)
    assert not torch.autograd.grad(lse, v, dlse)[0].any()


def test_gradients_keep_the_dtype_of_bias_and_sink() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    bias = rand(1, H, S, T, grad=True, dtype=torch.bfloat16)
    sink = rand(H, grad=True, dtype=torch.bfloat16)
    out = flash_cuda.attention(q, k, v, bias=bias, sink=sink)
    dbias, dsink = torch.autograd.grad(out.sum(), [bias, sink])
    assert dbias.dtype == dsink.dtype == torch.bfloat16
    assert dbias.shape == bias.shape


def test_no_gradient_is_recorded_without_need() -> None:
    q, k, v = qkv(True)
    with torch.no_grad():
        assert not flash_cuda.attention(q, k, v).requires_grad
        assert not OPS.fwd(q, k, v)[0].requires_grad
    with torch.inference_mode():
        assert flash_cuda.attention(q, k, v).is_inference()
    assert flash_cuda.attention(q, k, v).requires_grad
    assert not flash_cuda.attention(*(t.detach() for t in (q, k, v))).requires_grad


def test_bare_op_and_function_give_the_same_gradients() -> None:
    q, k, v = qkv(True)
    one = torch.autograd.grad(OPS.fwd(q, k, v, window_right=0)[0].sin().sum(), [q, k, v])
    two = torch.autograd.grad(flash_cuda.attention(q, k, v, causal=True).sin().sum(), [q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("call", [flash_cuda.attention, lambda *t: OPS.fwd(*t)[0]])
def test_a_second_derivative_is_refused(call: Callable[..., Tensor]) -> None:
    q, k, v = qkv(True)
    gradient, other = torch.autograd.grad(call(q, k, v).sum(), [q, k], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.sum().backward()
    assert other.requires_grad


def test_a_second_derivative_is_refused_inside_transforms() -> None:
    """Gradients within gradients see each other; zeros would be a silent wrong answer."""
    q, k, v = qkv()

    def loss(q: Tensor) -> Tensor:
        return flash_cuda.attention(q, k, v).sin().sum()

    twice = torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())
    for second in (twice, torch.func.hessian(loss), lambda q: torch.func.vmap(twice)(q[None])):
        with pytest.raises(NotImplementedError, match=r"second derivative|forward-mode"):
            second(q)


def test_an_outer_gradient_reaches_through_an_inner_transform() -> None:
    """The inner transform takes the gradient of q alone; the outer one that of the output by k."""
    q, k, v = qkv(dtype=torch.float64)

    def outer(k: Tensor) -> Tensor:
        primal, _ = torch.func.vjp(lambda q: flash_cuda.attention(q, k, v), q)
        return primal.sin().sum()

    got = torch.func.grad(outer)(k)
    k.requires_grad_()
    (want,) = torch.autograd.grad(flash_cuda.attention(q, k, v).sin().sum(), k)
    torch.testing.assert_close(got, want)
    (eager,) = torch.autograd.grad(outer(k), k)
    torch.testing.assert_close(eager, want)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("call", [flash_cuda.attention, OPS.fwd], ids=["attention", "op"])
def test_an_inner_gradient_of_something_else_keeps_the_outer_one(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    """The level that is on top wants nothing of the call, the one below does."""
    q, k, v = qkv(dtype=torch.float64)

    def out(q: Tensor) -> Tensor:
        result = call(q, k, v, **options)
        return result if isinstance(result, Tensor) else result[0]

    def outer(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (y * out(x)).sum())(q).sum()

    torch.testing.assert_close(
        torch.func.grad(outer)(q), torch.func.grad(lambda x: out(x).sum())(q)
    )


def test_forward_mode_is_refused() -> None:
    q, k, v = qkv()
    call = lambda q: flash_cuda.attention(q, k, v)  # noqa: E731
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(call, (q,), (q,))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jacfwd(call)(q)
    with torch.autograd.forward_ad.dual_level():
        call(q)  # nothing to carry
        with pytest.raises(NotImplementedError, match="forward-mode"):
            call(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.parametrize("name", ["qv", "alibi_slopes", "q_descale"])
def test_a_gradient_that_does_not_exist_is_refused(name: str) -> None:
    """A parameter that would silently stay as it is must not look trained."""
    shape = {"qv": (B, S, H, D), "alibi_slopes": (H,), "q_descale": (B, HK)}[name]
    q, k, v = qkv()
    if name == "q_descale":
        q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    with pytest.raises(NotImplementedError, match=name):
        flash_cuda.attention(q, k, v, **{name: rand(*shape, grad=True)})


def test_backward_of_a_call_without_gradient_is_refused() -> None:
    """Forward works, as models call it without no_grad; only asking for the gradient fails."""
    q, k, v = qkv(True)
    out = flash_cuda.attention(q, k, v, qv=rand(B, S, H, D))
    with pytest.raises(NotImplementedError, match="qv"):
        out.sum().backward()


@pytest.mark.parametrize(
    "dout",
    [torch.ones(()).expand(B, S, H, D), rand(B, S, D, H).mT, rand(B, S, H, 2 * D)[..., ::2]],
    ids=["expanded", "transposed", "strided"],
)
def test_gradient_of_any_layout(dout: Tensor) -> None:
    """An upstream gradient counts the same however it lies, for the function and the bare op."""
    q, k, v = qkv(True)
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    want = torch.autograd.grad(out, [q, k, v], dout.contiguous(), retain_graph=True)
    got = torch.autograd.grad(out, [q, k, v], dout)
    bare = OPS.bwd(dout, None, *(t.detach() for t in (q, k, v, out, lse)))
    for a, b, c in zip(want, got, bare[:3], strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


# ---- autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("call", ["function", "op"])
def test_autocast(call: str, deterministic: bool) -> None:
    q, k, v = qkv(True)
    slopes, sink = torch.rand(H), rand(H, grad=True)
    low = [t.detach().to(torch.bfloat16) for t in (q, k, v)]
    want = flash_cuda.attention(*low, alibi_slopes=slopes, sink=sink)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if call == "op":
            out, lse = OPS.fwd(q, k, v, None, slopes, sink)
        else:
            out, lse = flash_cuda.attention(
                q, k, v, alibi_slopes=slopes, sink=sink, deterministic=deterministic,
                return_lse=True,
            )  # fmt: skip
        grads = torch.autograd.grad(out.float().sum(), [q, k, v, sink])
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(out, want)
    assert all(g.dtype == torch.float32 for g in grads)


def test_autocast_makes_mixed_types_one() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match="dtype"):
        flash_cuda.attention(q, k, v.to(torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_cuda.attention(q, k, v.to(torch.bfloat16)).dtype == torch.bfloat16
        double = flash_cuda.attention(*(t.double() for t in (q, k, v)))
    assert double.dtype == torch.float64


# ---- FLOPs ---------------------------------------------------------------------------------------


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_flops_are_those_of_torch() -> None:
    """Two products forward and five backward, whatever is masked, as torch counts its own."""
    q, k, v = (rand(2, 4, 16, 8, grad=True) for _ in range(3))
    own = flops(lambda: flash_cuda.attention(*(t.mT.mT for t in (q, k, v))).sum().backward())
    forward = 2 * 2 * 16 * (4 * 4) * (8 + 8)
    assert own == forward + forward * 5 // 2
    double = flops(
        lambda: flash_cuda.attention(*(torch.cat([t.detach()] * 2) for t in (q, k, v)), causal=True)
    )
    assert double == 2 * forward


def test_flops_of_packed_and_cached_calls() -> None:
    cu_q, cu_k = int32(0, 2, 5), int32(0, 3, 7)
    packed = flops(
        lambda: flash_cuda.attention_varlen(
            rand(6, H, D), rand(7, HK, D), rand(7, HK, D), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
        )
    )
    assert packed == 2 * H * (2 * 3 + 3 * 4) * 2 * D
    cached = flops(
        lambda: flash_cuda.attention_decode(
            rand(2, 1, H, D), rand(6, 4, HK, D), rand(6, 4, HK, 2 * D),
            cache_seqlens=int32(11, 4),
            block_table=torch.arange(6, dtype=torch.int32).view(2, 3),
        )
    )  # fmt: skip
    assert cached == 2 * H * (11 + 4) * 3 * D
