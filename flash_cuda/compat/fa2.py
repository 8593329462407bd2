"""The functions of FlashAttention-2's ``flash_attn`` package.

The public ones are flash_cuda's own, which have FlashAttention-2's parameters in its order. The
four with an underscore are the private ones that sequence-parallel libraries call; they write the
gradients into tensors that the caller hands in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_cuda import _ops
from flash_cuda._handles import Options
from flash_cuda.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    last_contiguous,
)
from flash_cuda.kvcache import flash_attn_with_kvcache
from flash_cuda.options import fwd_options, refuse_others, window_ends, write_to

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

# out, lse, the probabilities (never given), rng_state (None without dropout)
Forward = tuple[Tensor, Tensor, None, Tensor | None]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool = False,
) -> Forward:
    refuse_others(q=q, k=k, v=v)
    options = fwd_options(
        q,
        causal=causal,
        window=(window_size_left, window_size_right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
    )
    with torch.no_grad():
        out, lse = _ops.attention_forward(
            last_contiguous(q), last_contiguous(k), last_contiguous(v), options
        )
    return out, lse, None, options.get("rng_state")


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Forward:
    if block_table is not None and seqused_k is None:
        seqused_k = cu_seqlens_k.diff()
    refuse_others(q=q, k=k, v=v)
    options = fwd_options(
        q,
        causal=causal,
        window=(window_size_left, window_size_right),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k if block_table is None else None,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        block_table=block_table,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    with torch.no_grad():
        out, lse = _ops.attention_forward(
            last_contiguous(q), last_contiguous(k), last_contiguous(v), options
        )
    return out, lse, None, options.get("rng_state")


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    options = _bwd_options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        dropout_p, rng_state, deterministic,
    )  # fmt: skip
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    options = _bwd_options(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        dropout_p, rng_state, deterministic,
    )  # fmt: skip
    options.update(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)


def _bwd_options(
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    rng_state: Tensor | None,
    deterministic: bool,
) -> Options:
    left, right = window_ends(causal, (window_left, window_right))
    return {
        "softmax_scale": softmax_scale,
        "window_left": left,
        "window_right": right,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "rng_state": rng_state,
        "deterministic": deterministic,
    }


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: Options,
) -> Tensor:
    """Fills `into` with the gradients and returns sum(dout * out), shaped like lse."""
    refuse_others(dout=dout, q=q, k=k, v=v)
    q, k, v, dout = (last_contiguous(t) for t in (q, k, v, dout))
    with torch.no_grad():
        grads = _ops.backward(dout, None, q, k, v, out, lse, **options)
        for name, target, grad in zip(("dq", "dk", "dv"), into, grads[:3], strict=True):
            if target is not None:
                write_to(name, target, grad)
        delta: Tensor = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    return delta
