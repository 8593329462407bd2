"""8-bit inputs (e4m3) with scales for each sequence and KV head; the forward alone."""

from __future__ import annotations

import pytest
import torch

from .cases import AttentionCase, build, grid
from .check import Backend, check, with_cases

FP8 = AttentionCase(dtype="float8_e4m3fn", rows=(64, 64), keys=(70, 70), heads=4, heads_kv=2)


@with_cases(
    grid(FP8, descale=(False, True), head_dim=(64, 128, 256), window_right=(-1, 0)),
    grid(
        AttentionCase(dtype="float8_e4m3fn", descale=True, heads=4, heads_kv=2),
        rows__keys=[
            ((1,), (257,)),
            ((129,), (63,)),
            ((65, 3), (64, 130)),
            ((0,), (9,)),
            ((9,), (0,)),
        ],
        window_right=(-1, 0),
    ),
    grid(
        AttentionCase(dtype="float8_e4m3fn", descale=True, rows=(20, 0, 33), keys=(41, 8, 90)),
        layout=("packed", "paged", "cache", "packed_paged"),
        slack=(0, 3),
        window_right=(0,),
    ),
    grid(FP8, softcap=(20.0,), sink=(False, True), window_left=(-1, 30), num_splits=(0, 3)),
)
def test_fp8(case: AttentionCase, backend: Backend) -> None:
    check(case, backend)


def test_scales_are_applied_where_they_belong() -> None:
    """Scaled fp8 inputs equal the same values in bfloat16 (exact there) without scales."""
    case = AttentionCase(dtype="float8_e4m3fn", rows=(9, 9), keys=(33, 33), heads=4, heads_kv=2)
    kw = build(case).kw
    kw = {n: kw[n] for n in "qkv"}
    powers = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    scaled = {n: x.float() * powers[:, None, :, None] for n, x in kw.items() if n != "q"}
    scaled["q"] = kw["q"].float() * powers.repeat_interleave(2, 1)[:, None, :, None]
    got = torch.ops.flash_cuda.fwd(**kw, q_descale=powers, k_descale=powers, v_descale=powers)
    want = torch.ops.flash_cuda.fwd(**{n: x.bfloat16() for n, x in scaled.items()})
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


def test_output_is_bfloat16_and_gradients_are_refused() -> None:
    q = torch.randn(1, 8, 2, 32).to(torch.float8_e4m3fn)
    out, lse = torch.ops.flash_cuda.fwd(q, q, q)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    with pytest.raises((TypeError, ValueError), match="float8"):
        torch.ops.flash_cuda.bwd(out.float().to(q.dtype), None, q, q, q, out.to(q.dtype), lse)
