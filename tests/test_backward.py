"""Gradients on dense tensors: of q, k, v, and through lse; which are wanted; determinism."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash_cuda

from .cases import AttentionCase, build, each, grid
from .check import BITS, FORWARD_ONLY, Backend, check, with_cases
from .test_forward import ALL_DTYPES, EMPTY, HEAD_DIMS, LENGTHS

GRADS = AttentionCase(grads=True)
CAUSAL = {"window_right": (-1, 0)}


@with_cases(
    grid(AttentionCase(grads=True, rows=(64,), keys=(64,)), dtype=ALL_DTYPES, **CAUSAL),
    grid(GRADS, rows__keys=LENGTHS, dtype=("bfloat16", "float32"), **CAUSAL),
    grid(AttentionCase(grads=True, top_left=True), rows__keys=LENGTHS[4:12], window_right=(0,)),
)
def test_lengths(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(grid(GRADS, rows__keys=EMPTY, sink=(False, True), dlse=(False, True), **CAUSAL))
def test_empty(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(grads=True, rows=(40,), keys=(70,), window_right=0),
        head_dim__head_dim_v=[*HEAD_DIMS, (192, 128), (128, 64), (64, 128), (72, 40)],
    ),
    grid(AttentionCase(grads=True, dtype="float32", rows=(9,), keys=(50,)), head_dim=(1, 46, 65)),
)
def test_head_dims(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


TURNS = AttentionCase(grads=True, head_dim=96, heads=4, heads_kv=2, rows=(200,), keys=(150,))


# At this head dim the warpgroups of the Hopper kernel take turns at dQ, and columns end in a panel.
@with_cases(
    grid(replace(TURNS, dlse=True), deterministic=(False, True), **CAUSAL),
    grid(replace(TURNS, window_right=0), bias=("b1qk", "11qk"), deterministic=(False, True)),
    grid(
        replace(TURNS, layout="packed", rows=(65, 0, 150), keys=(70, 33, 129), slack=3),
        head_dim__head_dim_v=[(96, 96), (88, 72), (72, 40)],
        **CAUSAL,
    ),
    grid(replace(TURNS, rows=(70,), keys=(131,)), dtype=("float16",), alibi=("", "head")),
)
def test_head_dim_in_turns(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(grads=True, rows=(40, 40), keys=(75, 75), head_dim=32, window_right=0),
        heads__heads_kv=[(4, 1), (4, 2), (6, 2), (7, 1), (5, 5)],
        dtype=("bfloat16", "float32"),
    )
)
def test_grouped_heads(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(grads=True, dlse=True, rows=(33, 33), keys=(66, 66), heads=4, heads_kv=2),
        strides=("sliced", "head_major", "shared_heads"),
        dtype=("bfloat16", "float32"),
    )
)
def test_strides(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(grads=True, dlse=True),
        rows__keys=[((65,), (65,)), ((90,), (30,)), ((20,), (70,))],
        dtype=ALL_DTYPES,
        sink=(False, True),
        **CAUSAL,
    )
)
def test_gradient_through_lse(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(AttentionCase(grads=True, rows=(65,), keys=(70,)), scale=(0.0, -0.2, 0.5), **CAUSAL),
    grid(
        AttentionCase(grads=True, rows=(65,), keys=(130,), window_right=0),
        spread=(10.0, 0.01),
        dtype=("bfloat16", "float32"),
    ),
)
def test_scales(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(grads=True, rows=(20, 33, 0, 1), keys=(64, 0, 7, 33), slack=5, dlse=True),
        dtype=ALL_DTYPES,
    )
)
def test_used_lengths(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    grid(
        AttentionCase(
            grads=True, rows=(33,), keys=(50,), heads=4, bias="b1qk", sink=True, dtype="float32"
        ),
        wanted=range(32),
    ),
    grid(AttentionCase(grads=True, rows=(33,), keys=(50,)), wanted=range(8)),
)
def test_wanted(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@with_cases(
    each(
        [
            AttentionCase(
                grads=True, rows=(300,), keys=(300,), heads=4, heads_kv=2, window_right=0
            ),
            AttentionCase(grads=True, rows=(280,), keys=(520,), dtype="float32", dlse=True),
            AttentionCase(grads=True, rows=(40,) * 9, keys=(40,) * 9, heads=8, heads_kv=8),
        ],
        tiles=None,
    )
)
def test_default_tiles(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


@pytest.mark.parametrize(
    "case",
    grid(
        AttentionCase(grads=True, deterministic=True, rows=(130, 130), keys=(150, 150), heads=4),
        heads_kv=(4, 1),
        bias=("", "11qk"),
        window_right=(-1, 0),
    ),
    ids=str,
)
def test_deterministic_gives_equal_bits(case: AttentionCase, backend: Backend) -> None:
    inputs = build(case, backend.device)
    kw = {n: x for n, x in inputs.kw.items() if n not in FORWARD_ONLY}
    q, k, v = (kw.pop(n) for n in "qkv")
    wanted = 7 + (BITS["dbias"] if case.bias else 0)
    out, lse = backend.call(case, "fwd", **inputs.kw)
    runs = [
        backend.call(
            case, "bwd", inputs.dout, None, q, k, v, out, lse,
            deterministic=True, wanted=wanted, **kw,
        )
        for _ in range(3)
    ]  # fmt: skip
    for other in runs[1:]:
        for name, a, b in zip(BITS, runs[0], other, strict=True):
            assert torch.equal(a, b), f"{name} differs between two equal calls"


def test_upstream_gradient_with_zero_strides(backend: Backend) -> None:
    """out.sum().backward() sends an expanded scalar."""
    q, k, v = (torch.randn(1, 40, 2, 64, device=backend.device).bfloat16() for _ in "qkv")
    out, lse = backend.call(AttentionCase(), "fwd", q, k, v, window_right=0)
    ones = torch.ones_like(out)
    whole = backend.call(AttentionCase(), "bwd", ones, None, q, k, v, out, lse, window_right=0)
    expanded = torch.ones(1, 1, 1, 64, dtype=out.dtype, device=out.device).expand(out.shape)
    got = backend.call(AttentionCase(), "bwd", expanded, None, q, k, v, out, lse, window_right=0)
    for a, b in zip(whole[:3], got[:3], strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_gradient_of_a_lse_of_minus_infinity_is_ignored(value: float, backend: Backend) -> None:
    """A loss on lse (its square, say) has no finite gradient in rows without keys."""
    q, k, v = (torch.randn(1, n, 2, 64, device=backend.device).bfloat16() for n in (50, 20, 20))
    case = AttentionCase()
    out, lse = backend.call(case, "fwd", q, k, v, window_right=0)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    empty = lse == -torch.inf
    assert empty.sum() == 60
    bad = dlse.masked_fill(empty, value)
    fine = dlse.masked_fill(empty, 0.0)
    got = backend.call(case, "bwd", dout, bad, q, k, v, out, lse, window_right=0)
    want = backend.call(case, "bwd", dout, fine, q, k, v, out, lse, window_right=0)
    for a, b in zip(got[:3], want[:3], strict=True):
        assert not torch.isnan(a).any()
        assert torch.allclose(a.float(), b.float(), atol=2e-2, rtol=1e-2)
    assert (got[0][:, :30] == 0.0).all()


def test_gradcheck_through_autograd() -> None:
    """Numerical gradients of the op itself, float64, every differentiable input, out and lse."""
    q = torch.randn(1, 7, 4, 5, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 9, 2, 5, dtype=torch.float64, requires_grad=True) for _ in "kv")
    bias = torch.randn(1, 4, 1, 9, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, bias, sink = tensors
        out, lse = torch.ops.flash_cuda.fwd(
            q, k, v, bias=bias, sink=sink, window_left=4, window_right=1, softcap=3.0
        )
        return out, lse

    with flash_cuda.use_kernel("cpu"):  # whatever FLASH_CUDA_KERNEL says
        assert torch.autograd.gradcheck(attend, (q, k, v, bias, sink))
