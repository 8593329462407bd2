"""flash_attn_with_kvcache: append new keys to a cache and attend to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cuda import _ops
from flash_cuda._handles import Options
from flash_cuda.flash_attn import last_contiguous, one_of
from flash_cuda.options import (
    Window,
    as_bool,
    batch_of,
    cache_lengths,
    fwd_options,
    refuse_beyond,
    refuse_lengths,
    refuse_others,
)
from flash_cuda.rotary import apply_rotary


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    pack_gqa: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes new keys and values into the cache, in place, and attends to all of it.

    It is ``kv_append_`` (if there are new keys) and ``fwd``; no gradient flows through the cache.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, or packed ``(total_q, ...)`` with
            `cu_seqlens_q`.
        k_cache: ``(cache_rows, capacity, num_heads_kv, head_dim)``, or with `block_table`
            ``(num_pages, page_size, num_heads_kv, head_dim)``. Written to.
        v_cache: like `k_cache`, with head_dim_v. Written to.
        k: new keys ``(batch, seqlen_new, num_heads_kv, head_dim)``, put behind the cached ones.
        v: new values, given together with `k`.
        rotary_cos: ``(positions, rotary_dim / 2)``. New keys are rotated at their place in the
            cache; queries too if the call is causal or has a window, all of them at
            `cache_seqlens` otherwise.
        rotary_sin: like `rotary_cos`.
        cache_seqlens: ``(batch,)`` int32 keys in the cache before this call, or one number for
            all; ``None``, without new keys, is the whole capacity.
        cache_batch_idx: ``(batch,)`` int32, the cache row of each sequence.
        cache_leftpad: ``(batch,)`` int32, the first key that counts; positions are counted from
            it.
        block_table: ``(batch, max_pages)`` int32, the pages of each sequence in order.
        softmax_scale: see :func:`flash_cuda.flash_attn_func`.
        causal: see :func:`flash_cuda.flash_attn_func`.
        window_size: see :func:`flash_cuda.flash_attn_func`.
        softcap: see :func:`flash_cuda.flash_attn_func`.
        rotary_interleaved: pairs are columns (0, 1), (2, 3), ...; otherwise (0, rotary_dim / 2).
        alibi_slopes: see :func:`flash_cuda.flash_attn_func`.
        num_splits: see :func:`flash_cuda.flash_attn_func`.
        return_softmax_lse: also return the log-sum-exp.
        page_table: another name of `block_table`.
        qv: see :func:`flash_cuda.flash_attn_func`.
        q_descale: see :func:`flash_cuda.flash_attn_func`.
        k_descale: see :func:`flash_cuda.flash_attn_func`.
        v_descale: see :func:`flash_cuda.flash_attn_func`.
        cu_seqlens_q: ``(batch + 1,)`` int32, where each sequence of a packed q starts.
        max_seqlen_q: hint for packed queries; never needed.
        rotary_seqlens: ``(batch,)`` int32, the first new position, in place of `cache_seqlens`.
        learnable_sink: see :func:`flash_cuda.flash_attn_func`.
        attention_chunk: see :func:`flash_cuda.flash_attn_func`.
        pack_gqa: see :func:`flash_cuda.flash_attn_func`.

    Returns:
        The output, or ``(out, lse)``.

    Raises:
        ValueError: the new keys do not fit (checked where the lengths are on the host: a number,
            or CPU tensors; a CUDA kernel leaves out rows past the capacity).
        TypeError, ValueError, NotImplementedError: as :func:`flash_cuda.attention`.
    """
    table = one_of("block_table", block_table, "page_table", page_table)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    if rotary_cos is not None and (k is None or cache_seqlens is None):
        raise ValueError("rotary_cos needs new keys k, v and cache_seqlens")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with new keys k, v")
    lengths = cache_lengths(cache_seqlens, batch_of(q, cu_seqlens_q), q.device)
    return_softmax_lse = as_bool("return_softmax_lse", return_softmax_lse)
    refuse_others(k_cache=k_cache, v_cache=v_cache)
    new_keys = 0 if k is None else _new_keys(k, v)
    refuse_beyond(cache_seqlens, new_keys, k_cache, table)
    options = fwd_options(
        q,
        causal=causal,
        window=window_size,
        seqused_k=lengths + new_keys if lengths is not None and new_keys else lengths,
        block_table=table,
        cache_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sink=learnable_sink,
        attention_chunk=attention_chunk,
        pack_gqa=pack_gqa,
    )
    q = last_contiguous(q)
    if k is not None and v is not None and lengths is not None:
        rotary = (rotary_cos, rotary_sin, as_bool("rotary_interleaved", rotary_interleaved))
        q = _append(q, (k_cache, v_cache), (k, v), lengths, options, rotary, rotary_seqlens)
    out, lse = _ops.attention_forward(q, k_cache, v_cache, options)
    return (out, lse) if return_softmax_lse else out


_ROTARY = ("rotary_cos", "rotary_sin", "rotary_interleaved")


# cos and sin, both or none, and whether pairs are neighbours.
Rotary = tuple[Tensor | None, Tensor | None, bool]


def _append(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    lengths: Tensor,
    options: Options,
    rotary: Rotary,
    rotary_seqlens: Tensor | None,
) -> Tensor:
    """Puts the new keys into the cache; returns the queries, rotated as they are.

    What would be refused is refused before anything is written.
    """
    _ops.check_forward(q, *caches, options)
    k, v = map(last_contiguous, new)
    places: Options = {n: options[n] for n in ("block_table", "cache_batch_idx") if n in options}
    cos, sin, interleaved = rotary
    if cos is not None and sin is not None:
        _ops.check_append(*caches, k, v, lengths, places)
        tables = (cos, sin, interleaved)
        start = _first_position(lengths, rotary_seqlens, options.get("leftpad_k"))
        steps = "window_left" in options or "window_right" in options  # causal is a right end
        q = _rotated("q", q, tables, _positions(q, start, options.get("cu_seqlens_q"), steps))
        if start is lengths:
            places.update(zip(_ROTARY, tables, strict=True))
        else:  # the op rotates at the place in the cache only
            k = _rotated("k", k, tables, _positions(k, start, None, True))
    _ops.kv_append(*caches, k, v, lengths, places)
    return q


def _new_keys(k: Tensor, v: Any) -> int:
    refuse_others(k=k, v=v)
    if k.dim() != 4:
        raise ValueError(
            f"k must have shape (batch, seqlen_new, num_heads_kv, head_dim), got {tuple(k.shape)}"
        )
    return k.shape[1]


def _first_position(
    lengths: Tensor, rotary_seqlens: Tensor | None, cache_leftpad: Tensor | None
) -> Tensor:
    """Position of the first new key of each sequence; `lengths` itself where it is that."""
    if rotary_seqlens is not None:
        refuse_lengths("rotary_seqlens", rotary_seqlens, lengths.shape[0], lengths.device)
        return rotary_seqlens
    return lengths if cache_leftpad is None else lengths - cache_leftpad


def _rotated(
    name: str, x: Tensor, cos_sin: tuple[Tensor, Tensor, bool], positions: Tensor
) -> Tensor:
    cos, sin, interleaved = cos_sin
    for table, values in (("rotary_cos", cos), ("rotary_sin", sin)):
        refuse_others(**{table: values})
        if values.dtype != x.dtype:
            raise TypeError(f"{table} must have the dtype of {name}, {x.dtype}, got {values.dtype}")
        if values.device != x.device:
            raise ValueError(
                f"{table} must be on the device of {name} ({x.device}), got {values.device}"
            )
    return apply_rotary(x, cos, sin, positions=positions, interleaved=interleaved)


def _positions(x: Tensor, start: Tensor, cu_seqlens: Tensor | None, steps: bool) -> Tensor:
    """Position of each row: `start` of its sequence, counting up if `steps`."""
    if cu_seqlens is None:
        where = start[:, None].expand(-1, x.shape[1])
        return where + torch.arange(x.shape[1], device=x.device) if steps else where
    rows = torch.arange(x.shape[0], device=x.device)
    # Rows past the last sequence belong to none; they take the last one's and are not used.
    sequence = torch.searchsorted(cu_seqlens, rows, right=True, out_int32=True) - 1
    sequence = sequence.clamp(0, start.shape[0] - 1)
    return start[sequence] + (rows - cu_seqlens[sequence] if steps else 0)
