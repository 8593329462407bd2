"""Tensors beyond 2^31 elements and 4 GiB: offsets inside them do not fit into 32 bits.

Only what lies far out is compared, with the same sequence cut out and computed alone; the rest of
the tensor is NaN that nothing may touch, or the same few rows again.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_cuda

pytestmark = pytest.mark.gpu
GIB = 1 << 30
HEADS, HEADS_KV, HEAD_DIM = 16, 2, 128
BEYOND = 2**31 + 2**24  # elements


def needs(gib: int) -> None:
    """Skips where the card has less memory left than a test takes."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"takes {gib} GiB of GPU memory, {free / GIB:.0f} are free")


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def beyond(tail: Tensor, fill: float = torch.nan) -> Tensor:
    """Returns rows of `fill` that `tail` is the end of, more than 2^31 elements together."""
    rows = BEYOND // tail[0].numel()
    whole = torch.full((rows + tail.shape[0], *tail.shape[1:]), fill, device="cuda",
                       dtype=tail.dtype)  # fmt: skip
    whole[rows:] = tail
    return whole


@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_far_out(causal: bool) -> None:
    """Forward and backward of a sequence behind an unused gap (of a sequence that is empty)."""
    needs(60)
    tail = [rand(300, HEADS, HEAD_DIM), rand(300, HEADS, HEAD_DIM), rand(300, HEADS, HEAD_DIM)]
    alone = [t[None].clone().requires_grad_() for t in tail]
    want = flash_cuda.attention(*alone, causal=causal, deterministic=True)
    dout = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, alone, dout)
    far = [beyond(t).requires_grad_() for t in tail]
    gap = far[0].shape[0] - 300
    cu, used = int32(0, gap, gap + 300), int32(0, 300)
    out = flash_cuda.attention_varlen(
        *far, cu_seqlens_q=cu, cu_seqlens_k=cu, seqused_q=used, seqused_k=used, causal=causal,
        max_seqlen_q=gap, max_seqlen_k=gap, deterministic=True,
    )  # fmt: skip
    torch.testing.assert_close(out[gap:], want[0], rtol=0, atol=2**-7)
    assert not out[:gap].any()
    upstream = torch.zeros_like(out)
    upstream[gap:] = dout[0]
    grads = torch.autograd.grad(out, far, upstream)
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got[gap:], expected[0], rtol=2**-6, atol=2**-6)
        assert not got[:gap].any()


def test_last_sequence_of_a_dense_batch() -> None:
    needs(40)
    tail = [rand(1, 512, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]
    want = flash_cuda.attention(*tail, causal=True)
    q = beyond(tail[0], 0.0)
    k, v = (t.repeat(q.shape[0], 1, 1, 1) for t in tail[1:])
    out, lse = flash_cuda.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out[-1:], want, rtol=0, atol=2**-7)
    assert not lse[::97].isnan().any()


@pytest.mark.parametrize("num_splits", [1, 0, 4])
def test_last_pages_of_a_large_cache(num_splits: int) -> None:
    needs(20)
    page, length = 64, 1000
    pages = -(-length // page)
    tail = [rand(pages, page, HEADS_KV, HEAD_DIM) for _ in range(2)]
    k, v = (beyond(t) for t in tail)
    q = rand(1, 1, HEADS, HEAD_DIM)
    table = torch.arange(k.shape[0] - pages, k.shape[0], device="cuda", dtype=torch.int32)[None]
    out = flash_cuda.attention_decode(
        q, k, v, cache_seqlens=length, block_table=table, num_splits=num_splits
    )
    want = flash_cuda.attention(q, *(t.flatten(0, 1)[None, :length] for t in tail))
    torch.testing.assert_close(out, want, rtol=0, atol=2**-7)


def test_append_to_the_last_page_of_a_large_cache() -> None:
    needs(20)
    k_cache, v_cache = (beyond(torch.zeros(1, 64, HEADS_KV, HEAD_DIM, device="cuda",
                                           dtype=torch.bfloat16)) for _ in range(2))  # fmt: skip
    k, v = (rand(1, 3, HEADS_KV, HEAD_DIM) for _ in range(2))
    table = int32(k_cache.shape[0] - 1)[None]
    torch.ops.flash_cuda.kv_append_(k_cache, v_cache, k, v, int32(5), block_table=table)
    assert torch.equal(k_cache[-1, 5:8], k[0])
    assert torch.equal(v_cache[-1, 5:8], v[0])
    assert not k_cache[-1, :5].any()
    assert k_cache[-2].isnan().all()
