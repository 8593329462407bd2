"""flash_cuda in place of torch's scaled dot product attention.

Two ways in: :func:`scaled_dot_product_attention` has the signature of torch's function, and takes
masks without falling back to a slow path; or, with no change to the code that calls torch's own,

    import flash_cuda.compat.sdpa
    torch.nn.attention.activate_flash_attention_impl("flash_cuda")

makes flash_cuda serve what torch would have given to its flash backend on a GPU. Importing this
module registers that name and activates nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cuda import _ops
from flash_cuda._names import calls_them
from flash_cuda.options import as_bool, fwd_options, refuse_others

IMPLEMENTATION = "flash_cuda"


@calls_them(q="query", k="key", v="value", bias="attn_mask", softmax_scale="scale")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: ``(..., num_heads_q, seqlen_q, head_dim)``.
        key: ``(..., num_heads_kv, seqlen_kv, head_dim)``.
        value: ``(..., num_heads_kv, seqlen_kv, head_dim_v)``.
        attn_mask: broadcasts to ``(..., num_heads_q, seqlen_q, seqlen_kv)``; bool (True takes
            part) or added to the logits, then with a gradient.
        dropout_p: probability of dropping a weight.
        is_causal: top-left aligned, as in torch; not together with `attn_mask`.
        scale: default ``head_dim ** -0.5``.
        enable_gqa: num_heads_kv may be a divisor of num_heads_q.

    Returns:
        ``(..., num_heads_q, seqlen_q, head_dim_v)``. A row without keys gives zeros.

    Raises:
        TypeError, ValueError, NotImplementedError: as :func:`flash_cuda.attention`.
    """
    refuse_others(query=query, key=key, value=value)
    is_causal, enable_gqa = as_bool("is_causal", is_causal), as_bool("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal=True must not both be given")
    ndim = max(query.dim(), key.dim(), value.dim())
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(
            "query, key and value must have at least 2 dimensions, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        )
    q, k, v = (t[(None,) * (4 - t.dim())] if t.dim() < 4 else t for t in (query, key, value))
    if not enable_gqa and k.shape[-3] not in (1, q.shape[-3]):
        raise ValueError(
            f"query has {q.shape[-3]} heads and key {k.shape[-3]}: enable_gqa=True allows that"
        )
    try:
        batch: torch.Size = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            q.shape[:-3], k.shape[:-3], v.shape[:-3]
        )
    except RuntimeError:
        raise ValueError(
            "the dimensions of query, key and value before the heads must broadcast, got shapes "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        ) from None
    bias = None if attn_mask is None else _bias(attn_mask, q, k, batch)
    q, k, v = (t.expand(*batch, *t.shape[-3:]).flatten(0, -4).transpose(1, 2) for t in (q, k, v))
    options = fwd_options(
        q,
        causal=is_causal,
        window=(None, None),
        top_left=is_causal,
        softmax_scale=scale,
        dropout_p=dropout_p,
        bias=bias,
    )
    out, _ = _ops.attention_forward(q, k, v, options)
    out = out.transpose(1, 2)
    out = out.reshape(*batch, *out.shape[1:])
    return out[(0,) * (4 - ndim)] if ndim < 4 else out


def _bias(mask: Tensor, q: Tensor, k: Tensor, batch: torch.Size) -> Tensor:
    """Returns the mask as (batch or 1, heads or 1, seqlen_q or 1, seqlen_kv) to add."""
    refuse_others(attn_mask=mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        kind = str(mask.dtype).removeprefix("torch.")
        raise TypeError(f"attn_mask must be bool or of a floating-point type, got {kind}")
    shape = (*batch, q.shape[-3], q.shape[-2], k.shape[-2])
    sizes = (1,) * (len(shape) - mask.dim()) + mask.shape
    if len(sizes) > len(shape) or any(n not in (1, m) for n, m in zip(sizes, shape, strict=True)):
        raise ValueError(f"attn_mask must broadcast to {shape}, got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    else:
        bias = mask if mask.dtype == torch.float32 else mask.to(q.dtype)
    bias = bias.view(sizes)
    if any(n != 1 for n in sizes[:-3]):
        bias = bias.expand(*batch, *sizes[-3:])
    return bias.flatten(0, -4).expand(-1, -1, -1, k.shape[-2])


# ---- torch's flash backend -----------------------------------------------------------------------
# What follows has the signatures of the aten ops, whose layout is (B, H, S, D) for those named
# after the scaled dot product and (B, S, H, D) or packed for the others.


class _Handle:
    """Keeps the kernels registered; torch calls remove() to go back to its own."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Takes the kernels out again."""
        self._library = None


def _rng_words(rng_state: Tensor | None, q: Tensor) -> Tensor:
    """Seed and offset in the dtype that torch's own kernels return."""
    if rng_state is None:
        return torch.zeros(2, dtype=torch.uint64, device=q.device)
    return rng_state.view(torch.uint64)


def _window(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    left = -1 if left is None else left
    return left, 0 if causal else (-1 if right is None else right)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    out: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if block_table is not None and seqused_k is None and cum_seq_k is not None:
        seqused_k = cum_seq_k.diff()
    options = fwd_options(
        query,
        causal=False,
        window=_window(is_causal, window_size_left, window_size_right),
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=None if block_table is not None else cum_seq_k,
        max_seqlen_q=None if cum_seq_q is None else max_q,
        max_seqlen_k=None if cum_seq_k is None or block_table is not None else max_k,
        softmax_scale=scale,
        dropout_p=dropout_p,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        num_splits=num_splits or 0,
    )
    result, lse = _ops.attention_forward(query, key, value, options)
    if out is not None:
        result = out.copy_(result)
    words = _rng_words(options.get("rng_state"), query)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return result, lse, words, offset, query.new_empty(0)


def _flash_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _flash_forward(*args, **kwargs, out=out)[1]


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    left, right = _window(is_causal, window_size_left, window_size_right)
    dq, dk, dv, _, _ = _ops.backward(
        grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous(),
        None,
        query,
        key,
        value,
        out,
        logsumexp,
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        max_seqlen_q=None if cum_seq_q is None else max_q,
        max_seqlen_k=None if cum_seq_k is None else max_k,
        softmax_scale=scale,
        window_left=left,
        window_right=right,
        dropout_p=dropout_p,
        rng_state=rng_state.view(torch.int64) if dropout_p > 0 else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, words, offset, debug = _flash_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, False, scale=scale
    )
    out = out.transpose(1, 2)
    if value.shape == query.shape and out.stride() != (layout := torch.empty_like(query)).stride():
        out = layout.copy_(out)  # compiled code counts on query's layout
    return out, lse, None, None, q.shape[1], k.shape[1], words, offset, debug


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    dq, dk, dv = _flash_backward(
        dout, q, k, v, o, logsumexp, None, None, max_q, max_k, dropout_p, is_causal,
        philox_seed, philox_offset, scale=scale,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


_ATEN_KERNELS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}


def _activate() -> _Handle:
    library: Any = torch.library.Library("aten", "IMPL", "CUDA")  # type: ignore[no-untyped-call]
    for name, kernel in _ATEN_KERNELS.items():
        if hasattr(torch.ops.aten, name):  # older versions of torch lack one
            library.impl(name, kernel, "CUDA")
    return _Handle(library)


def _register() -> bool:
    """Returns whether this torch can be told about another flash backend."""
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        return False
    register(IMPLEMENTATION, register_fn=_activate)
    return True


registered = _register()
