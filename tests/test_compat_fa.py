"""FlashAttention's own module layouts: their names, orders and returns over the same results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_cuda
from flash_cuda.compat import bert_padding, fa2, fa3, fa4

B, S, T, H, HK, D = 2, 6, 9, 4, 2, 16


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return rand(B, S, H, D), rand(B, T, HK, D), rand(B, T, HK, D)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b)


FA3_DESCALES = "q_descale=None, k_descale=None, v_descale=None"
FA3_TAIL = "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
FA4_MASKS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
SIGNATURES = {
    (fa2, "_flash_attn_forward"): (
        "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
        "alibi_slopes, return_softmax"
    ),
    (fa2, "_flash_attn_backward"): (
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
        "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None"
    ),
    (fa3, "flash_attn_func"): (
        f"q, k, v, softmax_scale=None, causal=False, qv=None, {FA3_DESCALES}, "
        f"window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, {FA3_TAIL}"
    ),
    (fa3, "flash_attn_varlen_func"): (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        f"seqused_k=None, softmax_scale=None, causal=False, qv=None, {FA3_DESCALES}, "
        f"window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, {FA3_TAIL}"
    ),
    (fa3, "flash_attn_qkvpacked_func"): (
        f"qkv, softmax_scale=None, causal=False, {FA3_DESCALES}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
        "return_attn_probs=False"
    ),
    (fa3, "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{FA3_DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    (fa3, "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
    (fa4, "flash_attn_func"): (
        "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        f"deterministic=False, {FA4_MASKS}, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False"
    ),
    (fa4, "flash_attn_varlen_func"): (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
        "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        f"deterministic=False, {FA4_MASKS}, block_sparse_tensors=None, aux_tensors=None, "
        "aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
        "disable_scheduler_metadata=False"
    ),
    (fa4, "flash_attn_combine"): (
        "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
        "virtual_batch_idx=None, return_lse=True"
    ),
}


@pytest.mark.parametrize(
    ("module", "name"), list(SIGNATURES), ids=lambda x: getattr(x, "__name__", x)
)
def test_signature(module: Any, name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def theirs({SIGNATURES[module, name]}): pass", namespace)
    theirs = inspect.signature(namespace["theirs"]).parameters
    ours = inspect.signature(getattr(module, name)).parameters
    assert list(ours) == list(theirs)
    for parameter in theirs.values():
        if parameter.default is not parameter.empty:
            assert ours[parameter.name].default == parameter.default, parameter.name


def test_fa2_exports_the_functions_of_flash_cuda() -> None:
    for name in fa2.__all__:
        assert getattr(fa2, name) is getattr(flash_cuda, name)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_fa2_private_forward_and_backward(dropout_p: float) -> None:
    """As ring attention calls them: gradients go into tensors that it hands in."""
    q, k, v = (t.requires_grad_() for t in qkv())
    torch.manual_seed(3)
    out, lse, probabilities, rng_state = fa2._flash_attn_forward(
        q, k, v, dropout_p, 0.3, True, -1, -1, 0.0, None, False
    )
    assert probabilities is None
    assert (rng_state is None) == (dropout_p == 0)
    torch.manual_seed(3)
    want = flash_cuda.attention(
        q, k, v, softmax_scale=0.3, causal=True, dropout_p=dropout_p, return_lse=True
    )
    same((out, lse), tuple(t.detach() for t in want))
    dout = torch.randn_like(out)
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    delta = fa2._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, dropout_p, 0.3, True, -1, -1, 0.0, None, True, rng_state
    )
    same(tuple(grads), torch.autograd.grad(want[0], [q, k, v], dout))
    same(delta, (dout * out).sum(-1).mT.float())


def test_fa2_private_varlen() -> None:
    cu_q, cu_k = int32(0, 2, 6), int32(0, 5, 9)
    q, k, v = (t.requires_grad_() for t in (rand(6, H, D), rand(9, HK, D), rand(9, HK, D)))
    out, lse, _, _ = fa2._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, 4, 5, 0.0, None, True, -1, -1, 3.0
    )
    want = flash_cuda.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, softcap=3.0, return_lse=True
    )
    same((out, lse), tuple(t.detach() for t in want))
    dout = torch.randn_like(out)
    dk = torch.empty_like(k)
    fa2._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, None, dk, None, cu_q, cu_k, 4, 5, 0.0, None, True, -1, -1, 3.0,
        None, False,
    )  # fmt: skip
    same(dk, torch.autograd.grad(want[0], k, dout)[0])


def test_fa3() -> None:
    q, k, v = qkv()
    want = flash_cuda.attention(q, k, v, causal=True, softmax_scale=0.3, return_lse=True)
    same(fa3.flash_attn_func(q, k, v, 0.3, True), want[0])
    same(fa3.flash_attn_func(q, k, v, 0.3, True, return_attn_probs=True), want)
    cu_q, cu_k = int32(0, 2, 6), int32(0, 5, 9)
    pair = fa3.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_k, 4, 5, causal=True, return_attn_probs=True
    )
    packed = flash_cuda.attention_varlen(
        q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True
    )
    same(pair, packed)
    qkv_ = rand(B, S, H + 2 * HK, D)
    q, k, v = qkv_[:, :, :H], qkv_[:, :, H : H + HK], qkv_[:, :, H + HK :]
    same(fa3.flash_attn_qkvpacked_func(qkv_, num_heads_q=H), flash_cuda.attention(q, k, v))
    same(
        fa3.flash_attn_qkvpacked_func(rand(1, 3, 3, 2, 8)[:, :, :1].expand(1, 3, 3, 2, 8)).shape,
        torch.Size((1, 3, 2, 8)),
    )
    with pytest.raises(ValueError, match="qkv"):
        fa3.flash_attn_qkvpacked_func(qkv_, num_heads_q=H - 1)


def test_fa3_kvcache() -> None:
    q, k_cache, v_cache = rand(B, 1, H, D), rand(B, 8, HK, D), rand(B, 8, HK, D)
    metadata = fa3.get_scheduler_metadata(B, 1, 8, H, HK, D, int32(3, 8))
    four = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=int32(3, 8), scheduler_metadata=metadata,
        return_softmax_lse=True,
    )  # fmt: skip
    want = flash_cuda.attention_decode(
        q, k_cache, v_cache, cache_seqlens=int32(3, 8), return_lse=True
    )
    same(four[:2], want)
    assert four[2:] == (None, None)
    with pytest.raises(NotImplementedError, match="cu_seqlens_k_new"):
        fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cu_seqlens_k_new=int32(0, 1, 2))


def test_fa3_rotary_positions_of_their_own() -> None:
    q, k = rand(B, 1, H, D), rand(B, 1, HK, D)
    cos, sin = rand(16, 4), rand(16, 4)
    results = []
    for lengths, rotary_seqlens in ((int32(3, 5), int32(6, 8)), (int32(6, 8), None)):
        caches = [torch.zeros(B, 16, HK, D, dtype=torch.float64) for _ in range(2)]
        fa3.flash_attn_with_kvcache(
            q, *caches, k, k, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            rotary_seqlens=rotary_seqlens, causal=True,
        )  # fmt: skip
        results.append(torch.stack([caches[0][b, int(n)] for b, n in enumerate(lengths)]))
    same(results[0], results[1])


def test_combine() -> None:
    q, k, v = (t.float() for t in qkv())
    parts = [
        flash_cuda.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 4), (4, T))
    ]
    out_partial = torch.stack([out for out, _ in parts])
    lse_partial = torch.stack([lse.mT for _, lse in parts])
    out, lse = flash_cuda.attention(q, k, v, return_lse=True)
    same(fa3.flash_attn_combine(out_partial, lse_partial), (out, lse.mT))
    into = torch.empty_like(out, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(out_partial, lse_partial, into)[0] is into
    same(into, out.bfloat16())
    same(fa4.flash_attn_combine(out_partial, lse_partial, return_lse=False)[1], None)
    packed = fa4.flash_attn_combine(out_partial[:, 0], lse_partial[:, 0])
    same(packed, (out[0], lse[0].mT))


def test_fa4_always_returns_a_pair() -> None:
    q, k, v = qkv()
    want = flash_cuda.attention(q, k, v, causal=True, return_lse=True)
    assert fa4.flash_attn_func(q, k, v, causal=True)[1] is None
    same(fa4.flash_attn_func(q, k, v, causal=True, return_lse=True), want)
    assert fa4.flash_attn_func(q.requires_grad_(), k, v)[1] is not None
    sink = rand(H)
    out, _ = fa4.flash_attn_func(q, k, v, learnable_sink=sink, window_size=(2, None))
    same(out, flash_cuda.attention(q, k, v, sink=sink, window=(2, None)))


def test_fa4_varlen_mixes_packed_and_dense() -> None:
    q, k, v = rand(3, H, D), rand(B, T, HK, D), rand(B, T, HK, D)
    cu, used = int32(0, 1, 3), int32(4, 9)
    out, lse = fa4.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, seqused_k=used, causal=True, return_lse=True
    )
    want = flash_cuda.attention_decode(
        q, k, v, cache_seqlens=used, cu_seqlens_q=cu, causal=True, return_lse=True
    )
    same((out, lse), want)


@pytest.mark.parametrize("name", ["score_mod", "mask_mod", "block_sparse_tensors"])
def test_fa4_refuses_code(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        fa4.flash_attn_func(*qkv(), **{name: object()})
    with pytest.raises(NotImplementedError, match=name):
        fa4.flash_attn_varlen_func(*qkv(), **{name: object()})


def test_fa4_refuses_shifted_windows() -> None:
    with pytest.raises(NotImplementedError, match="window_size"):
        fa4.flash_attn_func(*qkv(), window_size=(-1, 4))


def test_padding_and_packing_undo_each_other() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    q = torch.randn(3, 5, 2, 8, dtype=torch.float64, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = bert_padding.unpad_input(q, mask)
    assert rows.shape == (5, 2, 8)
    assert cu_seqlens.tolist() == [0, 3, 5, 5]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert (longest, used.tolist()) == (3, [3, 2, 0])
    packed = flash_cuda.flash_attn_varlen_func(
        rows, rows, rows, cu_seqlens, cu_seqlens, longest, longest, causal=True
    )
    padded = bert_padding.pad_input(packed, indices, 3, 5)
    for b, first, last in ((0, 1, 4), (1, 0, 2)):
        alone = q[b : b + 1, first:last]
        want = flash_cuda.attention(alone, alone, alone, causal=True)
        torch.testing.assert_close(padded[b : b + 1, first:last], want)
    assert not padded[mask == 0].any()
    padded.sum().backward()
    assert q.grad is not None
    assert not q.grad[mask == 0].any()


def test_rows_that_are_kept_and_do_not_count() -> None:
    mask, unused = torch.tensor([[1, 1, 0, 0]]), torch.tensor([[0, 0, 1, 0]])
    x = torch.randn(1, 4, 8)
    rows, _, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert torch.equal(rows, x[0, :3])
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3], 3, [2])
    with pytest.raises(ValueError, match=r"attention_mask must .* = \(1, 4\), got \(1, 3\)"):
        bert_padding.unpad_input(x, mask[:, :3])
    with pytest.raises(ValueError, match=r"indices must .* = \(3,\), got a tensor"):
        bert_padding.pad_input(rows, torch.arange(4), 1, 4)
