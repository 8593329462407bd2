"""The functions of FlashAttention-4's ``flash_attn.cute``.

They always return a pair; lse is None unless it was asked for or a gradient is wanted. Window ends
of ``None`` are unlimited; negative ends, which shift the band there, are refused. Code that it
compiles at run time (score_mod, mask_mod, block-sparse tensors) is refused too: flash_cuda has no
compiler in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cuda import flash_attn
from flash_cuda._names import calls_them
from flash_cuda.compat import fa3
from flash_cuda.options import Window, as_bool, refuse_others, window_ends

OutMaybeLse = tuple[Tensor, Tensor | None]


@calls_them(sink="learnable_sink")
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> OutMaybeLse:
    """:func:`flash_cuda.flash_attn_func`, returning ``(out, lse or None)``."""
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    result = flash_attn.flash_attn_func(
        q,
        k,
        v,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=_window(window_size),
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        return_attn_probs=True,
    )
    return _pair(result, return_lse)


@calls_them(sink="learnable_sink", split_size="seqlen_k_per_split", block_table="page_table")
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> OutMaybeLse:
    """:func:`flash_cuda.flash_attn_varlen_func`, returning ``(out, lse or None)``.

    q and k may each be packed (with cu_seqlens) or dense.
    """
    _refuse(
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    out, lse = flash_attn.attend(
        q,
        k,
        v,
        deterministic,
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=flash_attn.host_number(max_seqlen_q),
        max_seqlen_k=flash_attn.host_number(max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        block_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window=_window(window_size),
        sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        split_size=seqlen_k_per_split,
        pack_gqa=pack_gqa,
    )
    return _pair((out, lse, None), return_lse)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> OutMaybeLse:
    """Merges partial results, ``(splits, batch, seqlen, heads, head_dim_v)`` or packed.

    Packed partials are ``(splits, total, heads, head_dim_v)`` with lse ``(splits, total, heads)``.
    Every row is merged, so `cu_seqlens` and `seqused` need not be looked at.
    """
    _refuse(virtual_batch_idx=virtual_batch_idx)
    refuse_others(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() != 4:
        merged, lse = fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    elif lse_partial.dim() != 3:
        raise ValueError(
            f"lse_partial must be (splits, total, heads), got {tuple(lse_partial.shape)}"
        )
    else:
        one_batch = out_partial[:, None], lse_partial.mT[:, None]
        merged, lse = fa3.combine(*one_batch, out, out_dtype, lambda x: x[0])
    return merged, lse if as_bool("return_lse", return_lse) else None


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """Returns None: there is nothing to plan on the host."""
    return


def _window(window: Window) -> Window:
    window_ends(False, window)  # a pair of integers or None
    if any(end is not None and end < 0 for end in window):
        raise NotImplementedError(
            f"window_size ends must be None or at least 0, got {window}: a negative end, which "
            "shifts the window, is not supported"
        )
    return window


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is not supported: flash_cuda compiles nothing at run time. It has causal, "
                "window, chunk, softcap, ALiBi, bias and sink as arguments"
            )


def _pair(result: Tensor | flash_attn.WithProbs, return_lse: bool) -> OutMaybeLse:
    assert isinstance(result, tuple)
    out, lse, _ = result
    return out, lse if as_bool("return_lse", return_lse) or lse.requires_grad else None
