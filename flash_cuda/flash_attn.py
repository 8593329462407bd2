"""FlashAttention's function names: FlashAttention-2's parameters, order and defaults.

What newer versions and flash_cuda add comes after, as keywords. Two things are done here that the
rest of the package leaves to the caller, because code written for these names counts on them: a
tensor whose last dimension is not contiguous is copied, and a head size that is no multiple of 8
is padded for the kernels.

Differences that callers may meet: the log-sum-exp of a row without keys is ``-inf`` everywhere,
its gradient is used, and ``return_attn_probs=True`` returns ``None`` in place of the probabilities
(which no tiled kernel has).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cuda import _ops
from flash_cuda.options import Window, as_bool, fwd_options, plain_options, refuse_others

# What return_attn_probs=True gives: out, lse, and None for the probabilities.
WithProbs = tuple[Tensor, Tensor, None]
_PAD_TO = 8  # columns; 16 bytes, the unit of the kernels' copies
_OFF = (0.0, 0.0, 0, 0)  # of flash_attn_func's numbers


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    bias: Tensor | None = None,
) -> Tensor | WithProbs:
    """Attention on dense tensors; :func:`flash_cuda.attention` says what the arguments mean.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``.
        k: ``(batch, seqlen_kv, num_heads_kv, head_dim)``.
        v: ``(batch, seqlen_kv, num_heads_kv, head_dim_v)``.
        dropout_p: probability of dropping a weight.
        softmax_scale: ``None`` is ``head_dim ** -0.5``.
        causal: bottom-right aligned.
        window_size: keys seen to the left and right, inclusive; -1 or ``None`` is all.
        softcap: bounds the logits; 0 is off.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)`` float32.
        deterministic: same bits of the gradient in every run.
        return_attn_probs: return ``(out, lse, None)``.
        learnable_sink: ``(num_heads_q,)``, one more logit a head.
        attention_chunk: keys of the own chunk only; 0 is off.
        qv: second query that meets v, ``(batch, seqlen_q, num_heads_q, head_dim_v)``.
        q_descale: ``(batch, num_heads_kv)`` float32 scale of an fp8 q.
        k_descale: like `q_descale`, for k.
        v_descale: like `q_descale`, for v.
        seqused_q: ``(batch,)`` int32 rows that count.
        seqused_k: ``(batch,)`` int32 keys that count.
        num_splits: parts of the keys; 0 chooses.
        pack_gqa: query heads of one KV head share a tile.
        bias: ``(batch or 1, num_heads_q or 1, seqlen_q or 1, seqlen_kv)`` added to the logits.

    Returns:
        The output, or ``(out, lse, None)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flash_cuda.attention`.
    """
    # Most calls are plain, and host time counts.
    no_tensors = (
        alibi_slopes is learnable_sink is qv is q_descale is k_descale is v_descale is seqused_q
        is seqused_k is bias is None
    )  # fmt: skip
    try:
        numbers = (dropout_p, softcap, attention_chunk, num_splits)
        plain = no_tensors and pack_gqa is None and numbers == _OFF
    except (RuntimeError, ValueError):  # one is a tensor or an array: fwd_options names it
        plain = False
    if plain:
        out, lse = attend_plain(q, k, v, deterministic, causal, window_size, softmax_scale)
        return _with_probs(out, lse, return_attn_probs)
    out, lse = attend(
        q,
        k,
        v,
        deterministic,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=learnable_sink,
        attention_chunk=attention_chunk,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        bias=bias,
    )
    return _with_probs(out, lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extra: Any,
) -> Tensor | WithProbs:
    """:func:`flash_attn_func` with keys and values in one tensor.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``.
        kv: ``(batch, seqlen_kv, 2, num_heads_kv, head_dim)``.
        dropout_p: see :func:`flash_attn_func`.
        softmax_scale: see :func:`flash_attn_func`.
        causal: see :func:`flash_attn_func`.
        window_size: see :func:`flash_attn_func`.
        softcap: see :func:`flash_attn_func`.
        alibi_slopes: see :func:`flash_attn_func`.
        deterministic: see :func:`flash_attn_func`.
        return_attn_probs: see :func:`flash_attn_func`.
        **extra: the keyword arguments of :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`.
    """
    k, v = _unpack("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **extra,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extra: Any,
) -> Tensor | WithProbs:
    """:func:`flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: ``(batch, seqlen, 3, num_heads, head_dim)``.
        dropout_p: see :func:`flash_attn_func`.
        softmax_scale: see :func:`flash_attn_func`.
        causal: see :func:`flash_attn_func`.
        window_size: see :func:`flash_attn_func`.
        softcap: see :func:`flash_attn_func`.
        alibi_slopes: see :func:`flash_attn_func`.
        deterministic: see :func:`flash_attn_func`.
        return_attn_probs: see :func:`flash_attn_func`.
        **extra: the keyword arguments of :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`.
    """
    q, k, v = _unpack("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, **extra,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
) -> Tensor | WithProbs:
    """Attention on packed sequences; see :func:`flash_cuda.attention_varlen`.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``.
        k: ``(total_kv, num_heads_kv, head_dim)``, or with `block_table`
            ``(num_pages, page_size, num_heads_kv, head_dim)``.
        v: like `k`, with head_dim_v.
        cu_seqlens_q: ``(batch + 1,)`` int32, where each sequence starts.
        cu_seqlens_k: the same for keys. With `block_table` only the lengths are read off it, and
            it may be ``None`` if `seqused_k` is given.
        max_seqlen_q: hint, never needed; one that lies on the device is not read.
        max_seqlen_k: like `max_seqlen_q`, for keys.
        dropout_p: see :func:`flash_attn_func`.
        softmax_scale: see :func:`flash_attn_func`.
        causal: see :func:`flash_attn_func`.
        window_size: see :func:`flash_attn_func`.
        softcap: see :func:`flash_attn_func`.
        alibi_slopes: see :func:`flash_attn_func`.
        deterministic: see :func:`flash_attn_func`.
        return_attn_probs: see :func:`flash_attn_func`; lse is ``(num_heads_q, total_q)``.
        block_table: ``(batch, max_pages)`` int32, the pages of each sequence. No gradient.
        page_table: another name of `block_table`.
        learnable_sink: see :func:`flash_attn_func`.
        attention_chunk: see :func:`flash_attn_func`.
        qv: see :func:`flash_attn_func`.
        q_descale: see :func:`flash_attn_func`.
        k_descale: see :func:`flash_attn_func`.
        v_descale: see :func:`flash_attn_func`.
        seqused_q: see :func:`flash_attn_func`.
        seqused_k: see :func:`flash_attn_func`.
        num_splits: see :func:`flash_attn_func`.
        pack_gqa: see :func:`flash_attn_func`.

    Returns:
        As :func:`flash_attn_func`.
    """
    table = one_of("block_table", block_table, "page_table", page_table)
    if table is not None:
        if seqused_k is None:
            if cu_seqlens_k is None:
                raise ValueError("block_table needs the lengths of the keys: give seqused_k")
            seqused_k = cu_seqlens_k.diff()
        cu_seqlens_k = None
    out, lse = attend(
        q,
        k,
        v,
        deterministic,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=host_number(max_seqlen_q),
        max_seqlen_k=host_number(max_seqlen_k),
        block_table=table,
        sink=learnable_sink,
        attention_chunk=attention_chunk,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )
    return _with_probs(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extra: Any,
) -> Tensor | WithProbs:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``.
        kv: ``(total_kv, 2, num_heads_kv, head_dim)``.
        cu_seqlens_q: see :func:`flash_attn_varlen_func`.
        cu_seqlens_k: see :func:`flash_attn_varlen_func`.
        max_seqlen_q: see :func:`flash_attn_varlen_func`.
        max_seqlen_k: see :func:`flash_attn_varlen_func`.
        dropout_p: see :func:`flash_attn_func`.
        softmax_scale: see :func:`flash_attn_func`.
        causal: see :func:`flash_attn_func`.
        window_size: see :func:`flash_attn_func`.
        softcap: see :func:`flash_attn_func`.
        alibi_slopes: see :func:`flash_attn_func`.
        deterministic: see :func:`flash_attn_func`.
        return_attn_probs: see :func:`flash_attn_func`.
        **extra: the keyword arguments of :func:`flash_attn_varlen_func`.

    Returns:
        As :func:`flash_attn_varlen_func`.
    """
    k, v = _unpack("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **extra,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extra: Any,
) -> Tensor | WithProbs:
    """:func:`flash_attn_varlen_func` with queries, keys and values in one tensor.

    Args:
        qkv: ``(total, 3, num_heads, head_dim)``.
        cu_seqlens: ``(batch + 1,)`` int32, where each sequence starts.
        max_seqlen: see :func:`flash_attn_varlen_func`.
        dropout_p: see :func:`flash_attn_func`.
        softmax_scale: see :func:`flash_attn_func`.
        causal: see :func:`flash_attn_func`.
        window_size: see :func:`flash_attn_func`.
        softcap: see :func:`flash_attn_func`.
        alibi_slopes: see :func:`flash_attn_func`.
        deterministic: see :func:`flash_attn_func`.
        return_attn_probs: see :func:`flash_attn_func`.
        **extra: the keyword arguments of :func:`flash_attn_varlen_func`.

    Returns:
        As :func:`flash_attn_varlen_func`.
    """
    q, k, v = _unpack("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, **extra,
    )  # fmt: skip


# ---- shared with compat/ and kvcache.py ----------------------------------------------------------


def one_of(name: str, value: Tensor | None, other: str, synonym: Tensor | None) -> Tensor | None:
    """Returns the one that was given of two names of the same argument."""
    if value is not None and synonym is not None:
        raise ValueError(f"{name} and {other} are the same argument: give one of them")
    return value if synonym is None else synonym


def host_number(hint: int | Tensor | None) -> int | None:
    """Returns a hint that is known without waiting for a device."""
    return None if isinstance(hint, Tensor) else hint


def last_contiguous(tensor: Tensor) -> Tensor:
    """Copies a tensor whose last dimension is not contiguous."""
    if tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    # The op says what is wrong with another layout.
    return tensor.contiguous() if tensor.layout is torch.strided else tensor


def _with_probs(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Tensor | WithProbs:
    return (out, lse, None) if as_bool("return_attn_probs", return_attn_probs) else out


def _unpack(name: str, packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    refuse_others(**{name: packed})
    if packed.dim() != ndim or packed.shape[-3] != parts:
        rows = "batch, seqlen" if ndim == 5 else "total"
        raise ValueError(
            f"{name} must be ({rows}, {parts}, heads, head_dim), got {tuple(packed.shape)}"
        )
    return packed.unbind(-3)


def attend(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    refuse_others(q=q, k=k, v=v)
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    if q.is_cuda and (q.shape[-1] % _PAD_TO or v.shape[-1] % _PAD_TO):
        return _attend_padded(q, k, v, deterministic, **options)
    return _ops.attention_forward(q, k, v, fwd_options(q, **options), deterministic)


def attend_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    deterministic: bool,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor]:
    """:func:`attend` without other options."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        refuse_others(q=q, k=k, v=v)
    if q.is_cuda and (q.shape[-1] % _PAD_TO or v.shape[-1] % _PAD_TO):
        return attend(
            q, k, v, deterministic, causal=causal, window=window, softmax_scale=softmax_scale
        )
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    options = plain_options(causal, window, softmax_scale)
    return _ops.attention_forward(q, k, v, options, deterministic)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """Zero columns change neither the logits nor, once cut off, the output."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    qv = options.get("qv")
    if options.get("softmax_scale") is None:
        options["softmax_scale"] = (head_dim + (0 if qv is None else head_dim_v)) ** -0.5

    def pad(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % _PAD_TO))

    if qv is not None:
        options["qv"] = pad(qv)
    call = fwd_options(q, **options)
    out, lse = _ops.attention_forward(pad(q), pad(k), pad(v), call, deterministic)
    return out[..., :head_dim_v], lse
