"""Writing new keys and values behind those in a cache."""

from __future__ import annotations

import torch
from torch import Tensor


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
