"""The functions to call: attention on dense, packed and cached keys, and the merge of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from flash_cuda import _ops
from flash_cuda._names import calls_them
from flash_cuda.options import (
    Window,
    batch_of,
    cache_lengths,
    fwd_options,
    plain_options,
    refuse_beyond,
    with_lse,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Of `attention`'s numbers and flags, in its order.
_OFF = (0.0, 0, False, 0.0, 0, 0, False)


class ScoreOptions(TypedDict, total=False):
    """What every function of this module takes; see :func:`attention`."""

    causal: bool
    window: Window
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    sink: Tensor | None
    attention_chunk: int
    qv: Tensor | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    num_splits: int
    split_size: int
    pack_gqa: bool | None
    strict: bool


class AttentionOptions(ScoreOptions, total=False):
    """Options of :func:`attention`."""

    bias: Tensor | None
    top_left: bool
    dropout_p: float
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    leftpad_k: Tensor | None
    deterministic: bool


class VarlenOptions(ScoreOptions, total=False):
    """Options of :func:`attention_varlen`."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    top_left: bool
    dropout_p: float
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    deterministic: bool


class DecodeOptions(ScoreOptions, total=False):
    """Options of :func:`attention_decode`."""

    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    leftpad_k: Tensor | None
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    top_left: bool = False,
    dropout_p: float = 0.0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 0,
    split_size: int = 0,
    pack_gqa: bool | None = None,
    strict: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, ``softmax(q @ k.T * softmax_scale) @ v``.

    The logits are ``softcap * tanh(softmax_scale * q.k / softcap)``, plus ALiBi and bias, then
    masked, and the sink takes part in the softmax. Gradients flow to q, k, v, bias and sink, from
    the output and from the log-sum-exp.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``; bfloat16, float16 or (without gradient,
            output bfloat16) float8_e4m3fn; on the CPU also float32 and float64.
        k: ``(batch, seqlen_kv, num_heads_kv, head_dim)``; num_heads_kv divides num_heads_q.
        v: ``(batch, seqlen_kv, num_heads_kv, head_dim_v)``.
        causal: query ``i`` sees keys up to ``i + seqlen_kv - seqlen_q``; takes the place of the
            right end of `window`.
        window: keys seen to the left and right of that place, both ends inclusive; ``None`` or -1
            is all of them.
        softmax_scale: ``None`` is ``head_dim ** -0.5``, with `qv`
            ``(head_dim + head_dim_v) ** -0.5``.
        softcap: bounds the scaled logits; 0 is off.
        alibi_slopes: ``(num_heads_q,)`` or ``(batch, num_heads_q)``; adds
            ``-slope * abs(i + seqlen_kv - seqlen_q - j)``.
        bias: ``(batch or 1, num_heads_q or 1, seqlen_q or 1, seqlen_kv)``, q's dtype or float32,
            added after softcap and ALiBi.
        sink: ``(num_heads_q,)``, any float dtype; one more logit a head, unscaled, that has no
            value.
        attention_chunk: a query at position p sees only the keys of its chunk
            ``[p // c * c, p // c * c + c)``; 0 is off.
        top_left: masks and ALiBi take ``i`` itself as the place of query ``i``.
        dropout_p: probability of dropping a weight; drawn from torch's generator of q's device.
        seqused_q: ``(batch,)`` int32; only that many first queries count, the others give 0 and
            ``-inf``.
        seqused_k: ``(batch,)`` int32; only that many first keys count.
        leftpad_k: ``(batch,)`` int32; the first key that counts. No gradient.
        qv: ``(batch, seqlen_q, num_heads_q, head_dim_v)``; adds ``qv . v`` to ``q . k`` (absorbed
            latent attention). No gradient.
        q_descale: ``(batch, num_heads_kv)`` float32, multiplies q; for fp8 inputs.
        k_descale: like `q_descale`, for k.
        v_descale: like `q_descale`, for v.
        deterministic: the gradient has the same bits in every run (the output always has);
            ``torch.use_deterministic_algorithms(True)`` does the same.
        num_splits: parts that the keys are cut into; 0 chooses, 1 is none.
        split_size: keys a part, so that a sequence's bits do not depend on its neighbours; 0 is
            not fixed. Every part takes memory like the output's: 4096 parts at most.
        pack_gqa: query heads of one KV head share a tile; ``None`` chooses.
        strict: exact row maxima and exponentials instead of the faster equivalents.
        return_lse: also return the log-sum-exp.

    Returns:
        The output ``(batch, seqlen_q, num_heads_q, head_dim_v)`` in q's dtype; with `return_lse`
        also the natural log-sum-exp ``(batch, num_heads_q, seqlen_q)``, float32 (float64 for
        float64 inputs). A query that sees no key gets zeros and ``-inf`` (with a sink: the sink).

    Raises:
        TypeError: a dtype is not supported or dtypes do not match.
        ValueError: a shape, stride, device or option is wrong.
        NotImplementedError: the call is right, but no kernel for it is built or supported here;
            the text names what serves it. See also :func:`flash_cuda.explain`.
    """
    # Most calls are plain, and host time counts.
    no_tensors = (
        alibi_slopes is bias is sink is seqused_q is seqused_k is leftpad_k is qv is q_descale
        is k_descale is v_descale is None
    )  # fmt: skip
    try:
        numbers = (
            softcap, attention_chunk, top_left, dropout_p, num_splits, split_size, strict
        )  # fmt: skip
        plain = no_tensors and pack_gqa is None and numbers == _OFF
    except (RuntimeError, ValueError):  # one is a tensor or an array: fwd_options names it
        plain = False
    if plain:
        options = plain_options(causal, window, softmax_scale)
        out, lse = _ops.attention_forward(q, k, v, options, deterministic)
        return with_lse(out, lse, return_lse)
    options = fwd_options(
        q,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        bias=bias,
        sink=sink,
        attention_chunk=attention_chunk,
        top_left=top_left,
        dropout_p=dropout_p,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
        split_size=split_size,
        pack_gqa=pack_gqa,
        strict=strict,
    )
    out, lse = _ops.attention_forward(q, k, v, options, deterministic)
    return with_lse(out, lse, return_lse)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    top_left: bool = False,
    dropout_p: float = 0.0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 0,
    split_size: int = 0,
    pack_gqa: bool | None = None,
    strict: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention on sequences of different lengths, packed behind each other.

    Options that are not listed mean the same as in :func:`attention`.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``.
        k: ``(total_kv, num_heads_kv, head_dim)``.
        v: ``(total_kv, num_heads_kv, head_dim_v)``.
        cu_seqlens_q: ``(batch + 1,)`` int32 on q's device; sequence ``b`` has the rows
            ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])``. Rows past the last entry give 0 and
            ``-inf``, and get zero gradients.
        cu_seqlens_k: the same for the rows of k and v.
        max_seqlen_q: hint, the longest sequence of q or more; never needed.
        max_seqlen_k: hint, the longest sequence of k or more; never needed.
        causal: see :func:`attention`; the corner is the end of each sequence.
        window: see :func:`attention`.
        softmax_scale: see :func:`attention`.
        softcap: see :func:`attention`.
        alibi_slopes: see :func:`attention`.
        sink: see :func:`attention`.
        attention_chunk: see :func:`attention`.
        top_left: see :func:`attention`.
        dropout_p: see :func:`attention`.
        seqused_q: ``(batch,)`` int32; only that many rows from a sequence's start count.
        seqused_k: like `seqused_q`, for k and v.
        qv: ``(total_q, num_heads_q, head_dim_v)``; see :func:`attention`.
        q_descale: see :func:`attention`.
        k_descale: see :func:`attention`.
        v_descale: see :func:`attention`.
        deterministic: see :func:`attention`.
        num_splits: see :func:`attention`.
        split_size: see :func:`attention`.
        pack_gqa: see :func:`attention`.
        strict: see :func:`attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        The output ``(total_q, num_heads_q, head_dim_v)``; with `return_lse` also the log-sum-exp
        ``(num_heads_q, total_q)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`.
    """
    options = fwd_options(
        q,
        causal=causal,
        window=window,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        attention_chunk=attention_chunk,
        top_left=top_left,
        dropout_p=dropout_p,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
        split_size=split_size,
        pack_gqa=pack_gqa,
        strict=strict,
    )
    out, lse = _ops.attention_forward(q, k, v, options, deterministic)
    return with_lse(out, lse, return_lse)


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...


@overload
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...


@calls_them(k="k_cache", v="v_cache", seqused_k="cache_seqlens")
def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | int | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    pack_gqa: bool | None = None,
    strict: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of new queries on a cache of keys and values. No gradient.

    The newest keys must be in the cache already (``torch.ops.flash_cuda.kv_append_`` puts them
    there; :func:`flash_cuda.flash_attn_with_kvcache` does both). Options that are not listed mean
    the same as in :func:`attention`.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, or packed
            ``(total_q, num_heads_q, head_dim)`` with `cu_seqlens_q`.
        k_cache: ``(cache_rows, capacity, num_heads_kv, head_dim)``, or with `block_table`
            ``(num_pages, page_size, num_heads_kv, head_dim)``.
        v_cache: like `k_cache`, with head_dim_v.
        cache_seqlens: ``(batch,)`` int32, keys in the cache, or one number for all, at most the
            capacity; ``None`` is the whole capacity. What lies behind may be anything, also NaN.
        block_table: ``(batch, max_pages)`` int32, the pages of each sequence in order.
        cache_batch_idx: ``(batch,)`` int32, the cache row of each sequence; default its own.
        leftpad_k: ``(batch,)`` int32, the first key that counts.
        cu_seqlens_q: ``(batch + 1,)`` int32, see :func:`attention_varlen`.
        max_seqlen_q: hint for packed queries; never needed.
        causal: query ``i`` sees keys up to ``i + cache_seqlens - seqlen_q``.
        window: see :func:`attention`.
        softmax_scale: see :func:`attention`.
        softcap: see :func:`attention`.
        alibi_slopes: see :func:`attention`.
        sink: see :func:`attention`.
        attention_chunk: see :func:`attention`.
        qv: see :func:`attention`.
        q_descale: see :func:`attention`.
        k_descale: see :func:`attention`.
        v_descale: see :func:`attention`.
        num_splits: see :func:`attention`.
        split_size: see :func:`attention`.
        pack_gqa: see :func:`attention`.
        strict: see :func:`attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        The output, shaped like q with head_dim_v; with `return_lse` also the log-sum-exp
        ``(batch, num_heads_q, seqlen_q)`` or ``(num_heads_q, total_q)``.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`attention`.
    """
    batch = batch_of(q, cu_seqlens_q)
    lengths = cache_lengths(cache_seqlens, batch, q.device)
    refuse_beyond(cache_seqlens, 0, k_cache, block_table)
    options = fwd_options(
        q,
        causal=causal,
        window=window,
        seqused_k=lengths,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        leftpad_k=leftpad_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        attention_chunk=attention_chunk,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
        split_size=split_size,
        pack_gqa=pack_gqa,
        strict=strict,
    )
    out, lse = _ops.attention_forward(q, k_cache, v_cache, options)
    return with_lse(out, lse, return_lse)
