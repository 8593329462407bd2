"""The same attention in other orders, each short enough to read at once.

These work on plain dense tensors, (heads, rows, head_dim), and exist to be compared: the tests
prove them equal to the engine and to dense attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .combine import merge


def _scores(q: Tensor, k: Tensor, row0: int, key0: int, shift: int, causal: bool) -> Tensor:
    """Returns q.k^T / sqrt(head_dim) of a tile; query i stands at key position i + shift."""
    s = torch.matmul(q, k.transpose(-1, -2)).mul(q.shape[-1] ** -0.5)
    if causal:
        rows = torch.arange(row0, row0 + q.shape[1])[:, None] + shift
        s = s.masked_fill(torch.arange(key0, key0 + k.shape[1]) > rows, -math.inf)
    return s


def kv_outer(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block: int = 64
) -> tuple[Tensor, Tensor]:
    """FlashAttention-1's loop order: keys outside, queries inside.

    All rows of the output stay in memory, normalised, and are brought up to date by each block
    of keys; the loop over queries needs no order, but out, maximum and sum of every row are read
    and written once for each block of keys. With the queries outside they stay in registers.

    Returns:
        out (heads, rows, head_dim_v) and lse (heads, rows).
    """
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    row_max = q.new_full((*q.shape[:2], 1), -math.inf)
    row_sum = torch.zeros_like(row_max)
    shift = k.shape[1] - q.shape[1]
    for j in range(0, k.shape[1], block):
        k_tile, v_tile = k[:, j : j + block], v[:, j : j + block]
        for i in range(0, q.shape[1], block):
            rows = slice(i, i + block)
            s = _scores(q[:, rows], k_tile, i, j, shift, causal)
            new_max = torch.maximum(row_max[:, rows], s.amax(-1, keepdim=True))
            finite = new_max.masked_fill(new_max == -math.inf, 0.0)
            p = torch.exp(s - finite)
            old_sum = row_sum[:, rows] * torch.exp(row_max[:, rows] - finite)
            new_sum = old_sum + p.sum(-1, keepdim=True)
            safe = torch.where(new_sum == 0.0, 1.0, new_sum)
            out[:, rows] = (out[:, rows] * old_sum + p @ v_tile) / safe
            row_max[:, rows], row_sum[:, rows] = new_max, new_sum
    return out, (row_max + row_sum.log())[..., 0]


def split_and_merge(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, splits: int = 4
) -> tuple[Tensor, Tensor]:
    """Flash-decoding: attention to parts of the keys on their own, merged by their lse.

    Returns:
        out (heads, rows, head_dim_v) and lse (heads, rows).
    """
    shift = k.shape[1] - q.shape[1]
    size = max(1, -(-k.shape[1] // splits))
    outs, lses = [], []
    for j in range(0, k.shape[1], size):
        s = _scores(q, k[:, j : j + size], 0, j, shift, causal)
        lse = s.logsumexp(-1)
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        outs.append(torch.exp(s - finite[..., None]) @ v[:, j : j + size])
        lses.append(lse)
    if not outs:
        return q.new_zeros(*q.shape[:2], v.shape[-1]), q.new_full(q.shape[:2], -math.inf)
    return merge(outs, lses)


def conditional_rescaling(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    threshold: float = 8.0,
    block: int = 64,
) -> tuple[Tensor, Tensor, int]:
    """FlashAttention-4's rescaling: only when the maximum has grown by more than a threshold.

    Output and sum carry the same factor 2^-reference, so their ratio does not depend on which
    reference was subtracted, and lse = reference + log2(sum) does not either. What is given up
    is only that P <= 1: here P <= 2^threshold.

    Returns:
        out (heads, rows, head_dim_v), lse (heads, rows), and how often a row was rescaled.
    """
    log2_e = math.log2(math.e)
    o = q.new_zeros(*q.shape[:2], v.shape[-1])
    reference = q.new_full((*q.shape[:2], 1), -math.inf)
    row_sum = torch.zeros_like(reference)
    rescaled = 0
    for j in range(0, k.shape[1], block):
        s = _scores(q, k[:, j : j + block], 0, j, k.shape[1] - q.shape[1], causal) * log2_e
        row_max = torch.maximum(reference, s.amax(-1, keepdim=True))
        moves = ~(row_max - reference <= threshold) & (row_max > -math.inf)
        new_reference = torch.where(moves, row_max, reference)
        finite = new_reference.masked_fill(new_reference == -math.inf, 0.0)
        factor = torch.exp2(reference - finite)
        p = torch.exp2(s - finite)
        o = o * factor + p @ v[:, j : j + block]
        row_sum = row_sum * factor + p.sum(-1, keepdim=True)
        rescaled += int((moves & (reference > -math.inf)).sum())
        reference = new_reference
    lse = (reference + row_sum.log2())[..., 0] / log2_e
    return o / torch.where(row_sum == 0.0, 1.0, row_sum), lse, rescaled
