"""Writing new keys and values behind those in a cache, keys rotated on the way."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates pairs of the first dimensions of each head (rotary embedding), in float32.

    Args:
        x: (batch, seqlen, heads, head_dim).
        cos: (batch, seqlen, rotary_dim / 2).
        sin: like cos.
        interleaved: pairs are (0, 1), (2, 3), ...; else (0, rotary_dim / 2), ...

    Returns:
        x in its dtype, dimensions from rotary_dim on unchanged.
    """
    half = cos.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos[:, :, None].to(dtype), sin[:, :, None].to(dtype)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> None:
    """Writes row t of sequence b at position cache_seqlens[b] + t of its cache, in place."""
    batch, seqlen_new = k.shape[:2]
    positions = cache_seqlens.long()[:, None] + torch.arange(seqlen_new)
    if block_table is not None:
        page_size = k_cache.shape[1]
        places = torch.gather(block_table.long(), 1, positions // page_size)
        positions = positions % page_size
    elif cache_batch_idx is not None:
        places = cache_batch_idx.long()[:, None]
    else:
        places = torch.arange(batch)[:, None]
    k_cache[places, positions] = k.to(k_cache.dtype)
    v_cache[places, positions] = v.to(v_cache.dtype)
