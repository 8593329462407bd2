"""The Python functions: arguments, returns, errors, and FlashAttention's names for the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flash_cuda
from flash_cuda.flash_attn import _attend_padded
from tests.tensors import HK, B, D, H, S, T, int32, qkv, rand, same

OPS = torch.ops.flash_cuda


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention in one line each, (batch, rows, heads, dim)."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    p = torch.exp(logits - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


# ---- attention -----------------------------------------------------------------------------------


def test_returns() -> None:
    q, k, v = qkv()
    out = flash_cuda.attention(q, k, v)
    pair = flash_cuda.attention(q, k, v, return_lse=True)
    assert isinstance(out, Tensor)
    assert isinstance(pair, tuple)
    want = dense(q, k, v)
    same(out, want[0])
    same(pair, want)


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({"causal": True}, None, 0),
        ({"causal": True, "window": (2, 5)}, 2, 0),
        ({"window": (2, None)}, 2, None),
        ({"window": (-1, 1)}, None, 1),
        ({"window": (None, -1)}, None, None),
        ({"window": [0, 0]}, 0, 0),
    ],
)
def test_windows(options: dict[str, Any], left: int | None, right: int | None) -> None:
    q, k, v = qkv()
    distance = torch.arange(T) - (torch.arange(S)[:, None] + T - S)
    seen = torch.ones(S, T, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    same(flash_cuda.attention(q, k, v, return_lse=True, **options), dense(q, k, v, seen))


@pytest.mark.parametrize("window", [(-2, 0), (0, -3), (-5, -1)])
def test_a_window_end_below_minus_one_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window"):
        flash_cuda.attention(*qkv(), window=window)


@pytest.mark.parametrize("window", [None, 3, (1, 2, 3)])
def test_what_is_no_window_is_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="window"):
        flash_cuda.attention(*qkv(), window=window)


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (TypeError, "dtype", lambda q, k, v: (q, k.float(), v)),
        (TypeError, "int32", lambda q, k, v: (q.int(), k.int(), v.int())),
        (ValueError, "heads", lambda q, k, v: (q[:, :, :3], k, v)),
        (ValueError, "head_dim", lambda q, k, v: (q[..., :8], k, v)),
        (ValueError, "batch", lambda q, k, v: (q, k[:1], v[:1])),
        (ValueError, "stride", lambda q, k, v: (q.mT.contiguous().mT, k, v)),
        (ValueError, "shape", lambda q, k, v: (q[0], k, v)),
    ],
)
def test_wrong_tensors(error: type[Exception], text: str, change: Callable[..., Any]) -> None:
    """Same text from the function and from the op."""
    tensors = change(*qkv())
    with pytest.raises(error, match=text) as function:
        flash_cuda.attention(*tensors)
    with pytest.raises(error, match=text) as op:
        OPS.fwd(*tensors)
    assert str(function.value) == str(op.value)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": -1.0},
        {"dropout_p": 1.5},
        {"attention_chunk": -2},
        {"num_splits": -1},
        {"sink": torch.zeros(3)},
        {"alibi_slopes": torch.zeros(B, 3)},
        {"bias": torch.zeros(1, 1, 1, T - 1)},
        {"seqused_k": int32(1, 2, 3)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_wrong_options(options: dict[str, Any]) -> None:
    """The text names the argument."""
    with pytest.raises(ValueError, match=next(iter(options))):
        flash_cuda.attention(*qkv(torch.float32), **options)


def test_lengths_of_other_types() -> None:
    q, k, v = rand(1, 1, H, D), rand(1, 5, HK, D), rand(1, 5, HK, D)
    length: Any = np.int64(3)
    for call in (flash_cuda.attention_decode, flash_cuda.flash_attn_with_kvcache):
        assert torch.equal(call(q, k, v, cache_seqlens=length), call(q, k, v, cache_seqlens=3))
        wrong: Any
        for wrong in (3.0, [3]):
            with pytest.raises(TypeError, match="cache_seqlens must be an int32 tensor"):
                call(q, k, v, cache_seqlens=wrong)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": [1.0]}, r"q must be a tensor, got \[1.0\] \(list\)"),
        ({"k": None}, r"k must be a tensor, got None"),
        ({"bias": 3.0}, r"bias must be a tensor, got 3.0 \(float\)"),
        ({"window": (1.5, 0)}, r"window must be an integer, got 1.5 \(float\)"),
        ({"attention_chunk": 2.5}, r"attention_chunk must be an integer, got 2.5"),
    ],
)
def test_what_is_of_another_type(change: dict[str, Any], text: str) -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=text):
        flash_cuda.attention(**{"q": q, "k": k, "v": v, **change})


def test_sizes_of_one_and_none() -> None:
    """No queries' heads is a result without elements; one column lies well at any stride."""
    _, k, v = qkv()
    assert flash_cuda.attention(k[:, :, :0], k, v).shape == (*k.shape[:2], 0, v.shape[-1])
    lengths = torch.tensor([3, 9], dtype=torch.int32)[::2]  # one entry, stride 2
    narrow = torch.randn(1, 5, 2, 4)[..., ::4]  # one column, stride 4
    flash_cuda.attention_decode(narrow, narrow, narrow, cache_seqlens=lengths)


def test_sinks_and_slopes_of_any_float_type() -> None:
    q, k, v = qkv(torch.float32)
    sink, slopes = rand(H, dtype=torch.bfloat16), rand(H, dtype=torch.float16)
    same(
        flash_cuda.attention(q, k, v, sink=sink, alibi_slopes=slopes),
        flash_cuda.attention(q, k, v, sink=sink.float(), alibi_slopes=slopes.float()),
    )
    with pytest.raises(TypeError, match="sink"):
        flash_cuda.attention(q, k, v, sink=torch.zeros(H, dtype=torch.int32))


def test_dropout_moves_the_generator_only_when_it_draws() -> None:
    q, k, v = qkv()
    before = torch.get_rng_state()
    flash_cuda.attention(q, k, v, dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    one = flash_cuda.attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(torch.get_rng_state(), before)
    two = flash_cuda.attention(q, k, v, dropout_p=0.5)
    torch.set_rng_state(before)
    assert torch.equal(flash_cuda.attention(q, k, v, dropout_p=0.5), one)
    assert not torch.equal(one, two)


# ---- packed and cached ---------------------------------------------------------------------------


def test_varlen_is_attention_on_each_sequence() -> None:
    cu_q, cu_k = int32(0, 2, 2, 6), int32(0, 4, 5, 9)
    q, k, v = rand(7, H, D), rand(9, HK, D), rand(9, HK, D)
    out, lse = flash_cuda.attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, max_seqlen_q=4, return_lse=True
    )
    for (a, b), (c, d) in (((0, 2), (0, 4)), ((2, 6), (5, 9))):
        want = flash_cuda.attention(
            q[None, a:b], k[None, c:d], v[None, c:d], causal=True, return_lse=True
        )
        same((out[None, a:b], lse[None, :, a:b]), want)
    assert not out[6:].any()
    assert (lse[:, 6:] == -torch.inf).all()


@pytest.mark.parametrize("lengths", [5, None, "tensor"])
def test_decode_lengths(lengths: Any) -> None:
    q, k, v = rand(B, 2, H, D), rand(B, T, HK, D), rand(B, T, HK, D)
    given = int32(5, 5) if lengths == "tensor" else lengths
    used = T if lengths is None else 5
    k[:, used:], v[:, used:] = torch.nan, torch.nan
    same(
        flash_cuda.attention_decode(q, k, v, cache_seqlens=given, causal=True, return_lse=True),
        flash_cuda.attention(q, k[:, :used], v[:, :used], causal=True, return_lse=True),
    )


def test_decode_on_pages_and_packed_queries() -> None:
    page, lengths = 4, [7, 3]
    k, v = rand(5, page, HK, D), rand(5, page, HK, D)
    table = int32(3, 1, 4, 0).view(2, 2)
    q, cu = rand(3, H, D), int32(0, 1, 3)
    out = flash_cuda.attention_decode(
        q, k, v, cache_seqlens=int32(*lengths), block_table=table, cu_seqlens_q=cu, causal=True
    )
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        keys, values = (t[table[b].long()].flatten(0, 1)[None, :n] for t in (k, v))
        same(out[None, rows], flash_cuda.attention(q[None, rows], keys, values, causal=True))


# ---- merge ---------------------------------------------------------------------------------------


def test_merge_is_attention_over_both_parts() -> None:
    tensors = [t.requires_grad_() for t in qkv()]
    q, k, v = tensors
    whole = flash_cuda.attention(q, k, v, return_lse=True)
    parts = [
        flash_cuda.attention(q, k[:, a:b], v[:, a:b], return_lse=True)
        for a, b in ((0, 0), (0, 4), (4, T))
    ]
    merged = flash_cuda.merge(flash_cuda.merge(parts[0], parts[1]), parts[2])
    same(merged, whole)
    upstream = [torch.randn_like(t) for t in whole]
    same(
        torch.autograd.grad(merged, tensors, upstream),
        torch.autograd.grad(whole, tensors, upstream),
    )


def test_merge_gradcheck_and_rows_without_keys() -> None:
    out, lse = rand(1, 3, 2, 4), rand(1, 2, 3)
    other, empty = rand(1, 3, 2, 4), rand(1, 2, 3)
    empty[..., 0] = -torch.inf
    args = [t.requires_grad_() for t in (out, lse, other)]
    assert torch.autograd.gradcheck(
        lambda out, lse, other: flash_cuda.merge((out, lse), (other, empty)), args
    )
    nothing = torch.full_like(empty, -torch.inf)
    merged = flash_cuda.merge((out * 0, nothing), (other * 0, nothing))
    assert not merged[0].any()
    assert (merged[1] == -torch.inf).all()
    assert torch.isfinite(torch.autograd.grad(merged[0].sum(), out)[0]).all()


def test_merge_takes_anything_for_what_counts_for_nothing() -> None:
    out, lse = torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    lse.requires_grad_()
    merged = flash_cuda.merge((out, lse), nothing)
    assert torch.equal(merged[0], out)
    assert torch.equal(merged[1], lse)
    merged[0].sum().backward()
    assert lse.grad is not None
    assert not lse.grad.any()
    with pytest.raises(
        TypeError, match=r"out of first must be of a floating-point type, 16 bits .* got int64"
    ):
        flash_cuda.merge((out.long(), lse), nothing)


def test_a_hint_of_no_rows_does_not_empty_the_call() -> None:
    x, cu = torch.randn(5, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    served = str(flash_cuda.explain(x, x, x, **call, max_seqlen_q=0, max_seqlen_k=0, device="H100"))
    assert "nothing to attend to" not in served
    out = flash_cuda.attention_varlen(x, x, x, **call, max_seqlen_q=0, max_seqlen_k=0)
    assert torch.equal(out, flash_cuda.attention_varlen(x, x, x, **call))


def test_merge_of_packed_low_precision() -> None:
    out, lse = rand(5, H, D, dtype=torch.bfloat16), rand(H, 5, dtype=torch.float32)
    merged, total = flash_cuda.merge((out, lse), (out, lse))
    assert merged.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    same(merged, out)
    same(total, lse + torch.log(torch.tensor(2.0)))
    with pytest.raises(ValueError, match="shapes"):
        flash_cuda.merge((out, lse), (out[1:], lse))
    with pytest.raises(ValueError, match="lse"):
        flash_cuda.merge((out, lse.mT), (out, lse.mT))


# ---- FlashAttention's names ----------------------------------------------------------------------

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_varlen_func": (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}, block_table=None"
    ),
    "flash_attn_varlen_kvpacked_func": (
        f"q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}"
    ),
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
}
EXTRA = {
    "flash_attn_func": (
        "learnable_sink attention_chunk qv q_descale k_descale v_descale seqused_q seqused_k "
        "num_splits pack_gqa bias"
    ),
    "flash_attn_varlen_func": (
        "learnable_sink attention_chunk qv q_descale k_descale v_descale seqused_q seqused_k "
        "page_table num_splits pack_gqa"
    ),
    "flash_attn_with_kvcache": (
        "learnable_sink attention_chunk qv q_descale k_descale v_descale page_table pack_gqa"
    ),
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_signatures_are_those_of_flash_attention_2(name: str) -> None:
    """Same names, order and defaults by position; ours may only leave out what was required."""
    parameters = list(inspect.signature(getattr(flash_cuda, name)).parameters.values())
    ours = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    namespace: dict[str, Any] = {}
    exec(f"def theirs({SIGNATURES[name]}): pass", namespace)
    theirs = list(inspect.signature(namespace["theirs"]).parameters.values())
    assert [p.name for p in ours] == [p.name for p in theirs]
    for own, other in zip(ours, theirs, strict=True):
        if other.default is not other.empty:
            assert own.default == other.default, own.name
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert set(EXTRA.get(name, "").split()) <= keywords


def test_flash_attn_func() -> None:
    q, k, v = qkv()
    want = flash_cuda.attention(q, k, v, causal=True, window=(3, None), return_lse=True)
    out = flash_cuda.flash_attn_func(q, k, v, 0.0, None, True, (3, -1))
    same(out, want[0])
    triple = flash_cuda.flash_attn_func(
        q, k, v, causal=True, window_size=(3, None), return_attn_probs=True
    )
    same(triple[:2], want)
    assert triple[2] is None


def test_packed_tensors() -> None:
    qkv_, kv = rand(B, S, 3, H, D), rand(B, T, 2, HK, D)
    q = rand(B, S, H, D)
    same(
        flash_cuda.flash_attn_qkvpacked_func(qkv_, causal=True),
        flash_cuda.attention(*qkv_.unbind(2), causal=True),
    )
    same(flash_cuda.flash_attn_kvpacked_func(q, kv), flash_cuda.attention(q, *kv.unbind(2)))
    cu_q, cu_k = int32(0, 2, 6), int32(0, 4, 9)
    same(
        flash_cuda.flash_attn_varlen_qkvpacked_func(qkv_[0], cu_q, 4, causal=True),
        flash_cuda.attention_varlen(
            *qkv_[0].unbind(1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_q, causal=True
        ),
    )
    same(
        flash_cuda.flash_attn_varlen_kvpacked_func(q[0], kv[0], cu_q, cu_k, 4, 5, softcap=2.0),
        flash_cuda.attention_varlen(
            q[0], *kv[0].unbind(1), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, softcap=2.0
        ),
    )
    sink = rand(H)
    same(
        flash_cuda.flash_attn_kvpacked_func(q, kv, learnable_sink=sink),
        flash_cuda.attention(q, *kv.unbind(2), sink=sink),
    )
    with pytest.raises(ValueError, match="qkv"):
        flash_cuda.flash_attn_qkvpacked_func(kv)
    with pytest.raises(TypeError, match="unexpected"):
        flash_cuda.flash_attn_kvpacked_func(q, kv, nonsense=1)


def test_a_last_dimension_that_is_not_contiguous_is_copied() -> None:
    q, k, v = qkv()
    strided = q.mT.contiguous().mT
    same(flash_cuda.flash_attn_func(strided, k, v), flash_cuda.attention(q, k, v))


def test_padding_of_head_sizes_changes_nothing() -> None:
    """What CUDA tensors of odd head sizes go through."""
    q, k, v = (
        t.requires_grad_() for t in (rand(B, S, H, 20), rand(B, T, HK, 20), rand(B, T, HK, 11))
    )
    call = {"causal": True, "window": (None, None), "softcap": 3.0}
    padded = _attend_padded(q, k, v, False, **call)
    want = flash_cuda.attention(q, k, v, return_lse=True, **call)
    same(padded, want)
    dout = rand(B, S, H, 11)
    same(
        torch.autograd.grad(padded[0], [q, k, v], dout),
        torch.autograd.grad(want[0], [q, k, v], dout),
    )


def test_varlen_with_pages() -> None:
    q, k, v = rand(3, H, D), rand(5, 4, HK, D), rand(5, 4, HK, D)
    table, cu_q, cu_k = int32(3, 1, 4, 0).view(2, 2), int32(0, 1, 3), int32(0, 7, 10)
    want = flash_cuda.attention_decode(
        q, k, v, cache_seqlens=int32(7, 3), block_table=table, cu_seqlens_q=cu_q, causal=True
    )
    for names in ({"block_table": table}, {"page_table": table}):
        same(
            flash_cuda.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 2, 7, causal=True, **names), want
        )
    with pytest.raises(ValueError, match="page_table"):
        flash_cuda.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 2, 7, block_table=table, page_table=table
        )
    with pytest.raises(ValueError, match="seqused_k"):
        flash_cuda.flash_attn_varlen_func(q, k, v, cu_q, None, 2, 7, block_table=table)


# ---- the override --------------------------------------------------------------------------------


def test_use_kernel() -> None:
    q, k, v = qkv()
    with flash_cuda.use_kernel("cpu"):
        flash_cuda.attention(q, k, v)
    with flash_cuda.use_kernel("sm80"):
        with pytest.raises(NotImplementedError, match="sm80"):
            flash_cuda.attention(q, k, v)
        with flash_cuda.use_kernel("cpu"):
            flash_cuda.attention(q, k, v)
    flash_cuda.attention(q, k, v)
    with pytest.raises(ValueError, match="sm90"), flash_cuda.use_kernel("nonsense"):
        pass


def test_backward_runs_where_forward_ran() -> None:
    """Under the override of the forward call, whatever holds by the time of the backward pass."""
    q, k, v = (t.requires_grad_() for t in qkv())
    with flash_cuda.use_kernel("cpu"):
        out = flash_cuda.attention(q, k, v)
    with flash_cuda.use_kernel("sm80"):
        out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("name", flash_cuda.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(flash_cuda, name))
