"""The functions of FlashAttention-3's ``flash_attn_interface``.

Arguments that tune its scheduler (``sm_margin``, ``scheduler_metadata``) are taken and not used:
flash_cuda plans on the device. New keys must be dense (``cu_seqlens_k_new`` is refused).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_cuda import _ops, flash_attn, kvcache
from flash_cuda.options import Window, as_integer, refuse_others, shown, write_to


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_cuda.flash_attn_func`; with `return_attn_probs` returns ``(out, lse)``."""
    return _two(
        flash_attn.flash_attn_func(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            qv=qv,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            window_size=window_size,
            attention_chunk=attention_chunk,
            softcap=softcap,
            num_splits=num_splits,
            pack_gqa=pack_gqa,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
        )
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` on ``(batch, seqlen, 3, heads, head_dim)``.

    With `num_heads_q` the tensor is ``(batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim)``.
    """
    refuse_others(qkv=qkv)
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[-3] != 3:
            raise ValueError(
                f"qkv must be (batch, seqlen, 3, heads, head_dim), got {tuple(qkv.shape)}"
            )
        q, k, v = qkv.unbind(-3)
    else:
        num_heads_q = as_integer("num_heads_q", num_heads_q)
        heads = qkv.shape[-2] if qkv.dim() == 4 else 0
        num_heads_kv = (heads - num_heads_q) // 2
        if not 0 < num_heads_q < heads or num_heads_kv * 2 + num_heads_q != heads:
            raise ValueError(
                "qkv must be (batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with "
                f"num_heads_q {num_heads_q}, got {tuple(qkv.shape)}"
            )
        q, k, v = torch.split(qkv, [num_heads_q, num_heads_kv, num_heads_kv], dim=-2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_cuda.flash_attn_varlen_func`; `return_attn_probs` gives ``(out, lse)``."""
    return _two(
        flash_attn.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            softmax_scale=softmax_scale,
            causal=causal,
            qv=qv,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            window_size=window_size,
            attention_chunk=attention_chunk,
            softcap=softcap,
            num_splits=num_splits,
            pack_gqa=pack_gqa,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
        )
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None, None]:
    """:func:`flash_cuda.flash_attn_with_kvcache`.

    With `return_softmax_lse` returns ``(out, lse, None, None)``: the partial results that stand in
    the last two places elsewhere stay inside.
    """
    if cu_seqlens_k_new is not None:
        raise NotImplementedError(
            "cu_seqlens_k_new (packed new keys) is not supported: give k and v as "
            "(batch, seqlen_new, heads, head_dim)"
        )
    result = kvcache.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        return_softmax_lse=return_softmax_lse,
    )
    return (*result, None, None) if isinstance(result, tuple) else result


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges partial results.

    Args:
        out_partial: ``(splits, batch, seqlen, heads, head_dim_v)`` float32.
        lse_partial: ``(splits, batch, seqlen, heads)`` float32.
        out: of the result's shape, written to and returned, if given.
        out_dtype: dtype of the result; default that of `out`, else float32.

    Returns:
        ``(batch, seqlen, heads, head_dim_v)`` and ``(batch, seqlen, heads)``.
    """
    refuse_others(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.dim() != 4:
        raise ValueError(
            f"lse_partial must be (splits, batch, seqlen, heads), got {tuple(lse_partial.shape)}"
        )
    return combine(out_partial, lse_partial.mT, out, out_dtype, lambda x: x)


def combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    unpack: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Merges partial results of the op's shapes; `unpack` takes its results to the caller's."""
    if out is not None:
        refuse_others(out=out)
        out_dtype = out.dtype if out_dtype is None else out_dtype
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be one of torch's dtypes, got {shown(out_dtype)}")
    merged, lse = map(unpack, _ops.combine(out_partial, lse_partial, out_dtype))
    return (merged if out is None else write_to("out", out, merged)), lse.mT


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """Returns None, which flash_attn_with_kvcache takes: there is nothing to plan on the host."""
    return


def _two(result: Tensor | flash_attn.WithProbs) -> Tensor | tuple[Tensor, Tensor]:
    return result[:2] if isinstance(result, tuple) else result
