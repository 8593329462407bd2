"""What changes scores: softcap, ALiBi, bias and its gradient, the sink and its gradient."""

from __future__ import annotations

import pytest
import torch

from . import oracle
from .cases import AttentionCase, grid
from .check import Backend, check, with_cases

BASE = AttentionCase(rows=(50, 50), keys=(75, 75), heads=4, heads_kv=2, head_dim=32, grads=True)
KERNEL_AND_EXACT = ("bfloat16", "float16", "float32", "float64")


@with_cases(
    grid(BASE, softcap=(1.0, 15.0, 50.0), dtype=KERNEL_AND_EXACT, window_right=(-1, 0)),
    grid(AttentionCase(rows=(40,), keys=(50,), spread=3.0, grads=True), softcap=(5.0,)),
)
def test_softcap(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        BASE,
        alibi=("head", "batch"),
        dtype=KERNEL_AND_EXACT,
        window_right=(-1, 0),
        top_left=(False, True),
    )
)
def test_alibi(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(BASE, bias=("bhqk", "11qk", "b1qk", "1h1k", "bh1k", "111k", "1hqk", "b11k")),
    grid(BASE, bias=("bhqk", "1h1k"), bias_dtype=("float32", "same"), dtype=KERNEL_AND_EXACT),
    grid(
        AttentionCase(rows=(20, 0, 37), keys=(64, 7, 3), slack=2, heads=2, grads=True),
        bias=("bhqk", "1hqk", "111k"),
        window_right=(-1, 0),
    ),
    grid(
        AttentionCase(rows=(70,), keys=(140,), heads=2, heads_kv=1, grads=True),
        head_dim=(64, 128),
        bias=("bhqk", "11qk", "1h1k"),
        deterministic=(False, True),
    ),
    grid(
        AttentionCase(rows=(130,), keys=(140,), heads=1, heads_kv=1, head_dim=128, grads=True),
        bias=("bhqk",),
        bias_dtype=("same",),
        alibi=("", "head"),
        window_left=(60,),
        window_right=(0,),
    ),
    # Rows at multiples of 16 bytes, which copy engines read and add to in tiles.
    grid(
        AttentionCase(rows=(150,), keys=(208,), heads=2, heads_kv=1, grads=True),
        head_dim=(64, 128),
        bias=("bhqk", "1hqk"),
        bias_dtype=("float32", "same"),
        softcap=(0.0, 5.0),
        deterministic=(False, True),
        window_right=(0,),
    ),
    grid(
        AttentionCase(rows=(150, 150), keys=(208, 208), heads=2, heads_kv=1, grads=True),
        head_dim=(64, 192),
        bias=("bhqk", "1hqk", "1h1k"),
        bias_dtype=("float32", "same"),
        deterministic=(False, True),
    ),
    grid(
        AttentionCase(rows=(150,), keys=(208,), heads=2, heads_kv=1, head_dim=192, grads=True),
        bias=("bhqk", "11qk"),
        bias_dtype=("same",),
        alibi=("head",),
        window_left=(-1, 60),
        window_right=(0,),
    ),
    grid(
        AttentionCase(rows=(70, 70), keys=(136, 136), heads=2, heads_kv=1, grads=True),
        head_dim=(64, 128),
        bias=("b1qk", "11qk", "1h1k"),
        bias_dtype=("same",),
        alibi=("head",),
        softcap=(0.0, 5.0),
    ),
)
def test_bias(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(BASE, sink=(True,), dtype=KERNEL_AND_EXACT, dlse=(False, True), window_right=(-1, 0)),
    grid(
        AttentionCase(rows=(60,), keys=(20,), sink=True, grads=True, dlse=True),
        window_left__window_right=[(-1, 0), (4, 4)],
    ),
)
def test_sink(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(rows=(50,), keys=(75,), heads=4, heads_kv=2, grads=True, dlse=True),
        softcap=(0.0, 5.0),
        alibi=("", "batch"),
        bias=("", "b1qk"),
        sink=(False, True),
        dropout_p=(0.0, 0.2),
        window_right=(0,),
        dtype=("bfloat16", "float32"),
    )
)
def test_together(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


def test_bias_of_minus_infinity_is_a_mask(backend: Backend) -> None:
    """Also where it leaves a row without keys: out 0, lse -inf, no gradient, no NaN."""
    device = backend.device
    q, k, v = (torch.randn(1, 40, 2, 64, device=device).bfloat16() for _ in "qkv")
    bias = torch.zeros(1, 1, 40, 40, device=device)
    bias[..., 30:] = -torch.inf
    bias[:, :, 7] = -torch.inf
    case = AttentionCase()
    out, lse = backend.call(case, "fwd", q, k, v, bias=bias)
    short, short_lse = backend.call(case, "fwd", q, k[:, :30], v[:, :30])
    others = torch.arange(40, device=device) != 7
    assert torch.allclose(out[:, others].float(), short[:, others].float(), atol=1e-2)
    assert torch.allclose(lse[:, :, others], short_lse[:, :, others], atol=2e-4)
    assert (out[:, 7] == 0).all()
    assert (lse[:, :, 7] == -torch.inf).all()
    dout = torch.randn(out.shape, device=device).bfloat16()
    grads = backend.call(case, "bwd", dout, None, q, k, v, out, lse, bias=bias, wanted=15)
    for grad in grads[:4]:
        assert not torch.isnan(grad).any()
    assert (grads[0][:, 7] == 0).all()
    assert (grads[1][:, 30:] == 0).all()
    assert (grads[3][..., 30:] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["-1e4", "-1e8", "-1e30", "lowest"])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_a_finite_bias_masks_nothing(
    mask: str, bias_dtype: torch.dtype, head_dim: int, backend: Backend
) -> None:
    """Rows of nothing but one low number are means of their keys, and spoil no gradient."""
    low = torch.finfo(bias_dtype).min if mask == "lowest" else float(mask)
    dead, alive = slice(20, 37), [*range(20), *range(37, 90)]
    torch.manual_seed(3)
    q, k, v, dout = (torch.randn(1, 90, 2, head_dim, device=backend.device) for _ in range(4))
    q, k, v, dout = (x.bfloat16() for x in (q, k, v, dout))
    dout[:, dead] = 0  # as for rows of padding
    bias = torch.randn(1, 1, 90, 96, device=backend.device).to(bias_dtype)[..., :90]
    bias[..., 60:71] = low
    bias[:, :, dead] = low
    case = AttentionCase()
    out, lse = backend.call(case, "fwd", q, k, v, bias=bias)
    grads = backend.call(case, "bwd", dout, None, q, k, v, out, lse, bias=bias, wanted=7)
    want = oracle.solve({"q": q, "k": k, "v": v, "bias": bias}, dout)
    rows = alive if mask == "-1e8" else [*range(90)]  # floats are in steps of eight there
    for name, got in {"out": out[:, rows], "dq": grads[0], "dk": grads[1], "dv": grads[2]}.items():
        right = want[name][:, rows] if name == "out" else want[name]
        assert got.isfinite().all(), name
        assert (got.double() - right).abs().max() < 0.05, name
    torch.testing.assert_close(
        lse[:, :, alive].double(), want["lse"][:, :, alive], atol=1e-3, rtol=1e-5
    )


def test_strided_bias(backend: Backend) -> None:
    """A transposed view of a bias, as relative-position tables give it."""
    device = backend.device
    q, k, v = (torch.randn(1, 33, 2, 64, device=device).bfloat16() for _ in "qkv")
    table = torch.randn(33, 33, 2, device=device)
    bias = table.permute(2, 0, 1)[None]
    case = AttentionCase()
    got = backend.call(case, "fwd", q, k, v, bias=bias)
    want = backend.call(case, "fwd", q, k, v, bias=bias.contiguous())
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("head_dim", [64, 192])
@pytest.mark.parametrize("keys", [33, 64])
def test_gradient_of_an_expanded_bias(keys: int, head_dim: int, backend: Backend) -> None:
    """One row of numbers that stands for many: every row has a gradient of its own."""
    torch.manual_seed(4)
    device = backend.device
    q, dout = (torch.randn(1, 40, 2, head_dim, device=device).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, keys, 2, head_dim, device=device).bfloat16() for _ in "kv")
    bias = torch.randn(1, 2, 1, keys, device=device).expand(1, 2, 40, keys)
    case = AttentionCase()
    out, lse = backend.call(case, "fwd", q, k, v, bias=bias)
    got = backend.call(case, "bwd", dout, None, q, k, v, out, lse, bias=bias, wanted=8)[3]
    whole = bias.contiguous()
    want = backend.call(case, "bwd", dout, None, q, k, v, out, lse, bias=whole, wanted=8)[3]
    assert got.shape == want.shape
    assert torch.allclose(got, want, atol=1e-5)
