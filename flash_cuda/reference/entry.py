"""The ops' entry points, with exactly the arguments of their schemas."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cuda.rotary import apply_rotary

from .backward import backward
from .combine import merge
from .forward import forward
from .kv_append import append
from .options import current_options
from .problem import Problem


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    rng_state: Tensor | None = None,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    top_left: bool = False,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    num_splits: int = 0,
    split_size: int = 0,
    pack_gqa: int = -1,
    strict: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, forward.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim), or (total_q, ...) with cu_seqlens_q.
        k: (batch, seqlen_kv, num_heads_kv, head_dim), (total_kv, ...) with cu_seqlens_k, a cache
            with cache_batch_idx, or pages (pages, page_size, ...) with block_table.
        v: like k, with head_dim_v.
        bias: (batch | 1, num_heads_q | 1, seqlen_q | 1, seqlen_kv), added to the scores.
        alibi_slopes: (num_heads_q) or (batch, num_heads_q).
        sink: (num_heads_q), one more logit for each row, without a value.
        cu_seqlens_q: (batch + 1), where sequences start in packed queries.
        cu_seqlens_k: (batch + 1), where they start in packed keys.
        seqused_q: (batch), rows that count.
        seqused_k: (batch), keys that count, padding on the left included.
        leftpad_k: (batch), the first key that counts.
        block_table: (batch, pages a sequence), the pages of each sequence in order.
        cache_batch_idx: (batch), the row of the cache that a sequence reads.
        qv: (batch, seqlen_q, num_heads_q, head_dim_v), adds qv.v to q.k.
        q_descale: (batch, num_heads_kv), factors of an fp8 q (and qv).
        k_descale: likewise of k.
        v_descale: likewise of v.
        rng_state: (2,) int64, seed and offset of the dropout mask; see dropout.py.
        softmax_scale: factor of q.k; None for head_dim^-0.5 ((head_dim + head_dim_v)^-0.5 with
            qv).
        window_left: keys before the own position that a query sees; -1 for all.
        window_right: keys after it; -1 for all, 0 is causal.
        attention_chunk: queries see only keys of their own chunk of this size; 0 for all.
        top_left: positions are counted from the first key, not so that the last ones meet.
        softcap: scores become softcap * tanh(scores / softcap); 0 for none.
        dropout_p: probability of dropping an entry of P.
        num_splits: parts of the keys to work on apart; 0 or 1 for one.
        split_size: keys of a part; 0 leaves it to num_splits.
        pack_gqa: for kernels; the engine always packs.
        strict: no numeric shortcuts, whatever the current options are.
        max_seqlen_q: a hint, not needed here.
        max_seqlen_k: a hint, not needed here.

    Returns:
        out, like q with head_dim_v, in q's dtype (bfloat16 for fp8); and lse, natural log,
        float32 (float64 for float64), (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q).
        Rows without keys: out 0, lse -inf, or the sink. Rows that do not count: out 0, lse -inf.
    """
    del pack_gqa, max_seqlen_q, max_seqlen_k
    options = current_options()
    problem = Problem(
        q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        leftpad_k, block_table, cache_batch_idx, qv, q_descale, k_descale, v_descale, rng_state,
        softmax_scale, window_left, window_right, attention_chunk, top_left, softcap, dropout_p,
        options.strict() if strict else options,
    )  # fmt: skip
    with torch.no_grad():
        return forward(problem, num_splits, split_size)


def bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    rng_state: Tensor | None = None,
    softmax_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    top_left: bool = False,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    strict: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    wanted: int = 7,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attention, backward.

    Args:
        dout: gradient of out, like out.
        dlse: gradient of lse, like lse; None for none.
        q: as in fwd, like all that follow; k and v are dense or packed.
        k: see q.
        v: see q.
        out: result of fwd.
        lse: result of fwd.
        bias: see fwd.
        alibi_slopes: see fwd; constants, without a gradient.
        sink: see fwd.
        cu_seqlens_q: see fwd.
        cu_seqlens_k: see fwd.
        seqused_q: see fwd.
        seqused_k: see fwd.
        rng_state: see fwd.
        softmax_scale: see fwd.
        window_left: see fwd.
        window_right: see fwd.
        attention_chunk: see fwd.
        top_left: see fwd.
        softcap: see fwd.
        dropout_p: see fwd.
        strict: see fwd.
        max_seqlen_q: see fwd.
        max_seqlen_k: see fwd.
        deterministic: for kernels; the engine always is.
        wanted: sum of 1 dq, 2 dk, 4 dv, 8 dbias, 16 dsink.

    Returns:
        dq, dk, dv, dbias, dsink, shaped like what they are gradients of; dbias and dsink in
        float32 (float64 for float64). What is not wanted has 0 elements. Rows and keys that do
        not count get zeros.
    """
    del max_seqlen_q, max_seqlen_k, deterministic
    options = current_options()
    problem = Problem(
        q, k, v, bias, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
        rng_state=rng_state, softmax_scale=softmax_scale, window_left=window_left,
        window_right=window_right, attention_chunk=attention_chunk, top_left=top_left,
        softcap=softcap, dropout_p=dropout_p, options=options.strict() if strict else options,
    )  # fmt: skip
    with torch.no_grad():
        grads = backward(problem, dout, dlse, out, lse, wanted)

    missing = q.new_empty(0)
    missing_sum = q.new_empty(0, dtype=problem.dtype)
    return (
        missing if grads.dq is None else grads.dq,
        missing if grads.dk is None else grads.dk,
        missing if grads.dv is None else grads.dv,
        missing_sum if grads.dbias is None else grads.dbias,
        missing_sum if grads.dsink is None else grads.dsink,
    )


def combine(
    out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint parts of the keys.

    Args:
        out_partial: (splits, batch, seqlen, num_heads, head_dim_v).
        lse_partial: (splits, batch, num_heads, seqlen), natural log, -inf for a part without keys.
        dtype: of out; None for that of out_partial.

    Returns:
        out (batch, seqlen, num_heads, head_dim_v) and lse (batch, num_heads, seqlen).
    """
    with torch.no_grad():
        outs = out_partial.transpose(2, 3).unbind(0)
        if not outs:
            shape = out_partial.shape[1:]
            out = out_partial.new_zeros(shape, dtype=dtype or out_partial.dtype)
            return out, lse_partial.new_full(lse_partial.shape[1:], -torch.inf)
        out, lse = merge(outs, lse_partial.unbind(0))
        return out.transpose(1, 2).to(dtype or out.dtype).contiguous(), lse


def kv_append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
) -> None:
    """Writes new keys and values into a cache, in place, at the end of each sequence.

    Args:
        k_cache: (cache rows, capacity, num_heads_kv, head_dim), or pages with block_table.
        v_cache: like k_cache, with head_dim_v.
        k: (batch, seqlen_new, num_heads_kv, head_dim).
        v: like k, with head_dim_v.
        cache_seqlens: (batch), lengths before; row t goes to position cache_seqlens + t.
        block_table: (batch, pages a sequence).
        cache_batch_idx: (batch), the row of the cache that belongs to a sequence.
        rotary_cos: (positions, rotary_dim / 2); keys are rotated by their position.
        rotary_sin: like rotary_cos.
        rotary_interleaved: neighbours are rotated together; else the two halves.
    """
    with torch.no_grad():
        if rotary_cos is not None and rotary_sin is not None:
            positions = cache_seqlens.long()[:, None] + torch.arange(k.shape[1])
            k = apply_rotary(
                k, rotary_cos, rotary_sin, positions=positions, interleaved=rotary_interleaved
            )
        append(k_cache, v_cache, k, v, cache_seqlens, block_table, cache_batch_idx)
