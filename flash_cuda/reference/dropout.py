"""The dropout mask: a pure function of seed, offset, batch, head, row and column.

Generator: Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011). The layout is part of the interface: every backend yields this mask.

    key      = (seed bits 0-31, seed bits 32-63)
    counter  = (column // 4, row, batch * num_heads_q + head, offset bits 0-31)
    word     = column % 4

Rows and columns count inside the sequence: for packed tensors from its first row, for a cache
from the first key that counts. With p rounded to float32, an entry of P is kept if its word >=
floor(p * 2^32 + 1/2), and is then divided by 1 - p. The tile sizes and the order of the loops have
no part in it.
"""

from __future__ import annotations

from math import floor

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _high_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    # The product wraps modulo 2^64, which keeps its bits; the mask undoes the sign of the shift.
    product = b * a
    return (product >> 32) & _WORD, product & _WORD


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> Tensor:
    """Runs Philox4x32-10.

    Args:
        counter: four int64 tensors with values below 2^32, broadcast against each other.
        seed: 64 bits.

    Returns:
        (..., 4) int64, words below 2^32.
    """
    c0, c1, c2, c3 = counter  # after a few rounds each depends on, and is broadcast with, all
    key0, key1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _high_low(_MULTIPLIERS[0], c0)
        high1, low1 = _high_low(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _KEY_STEPS[0]) & _WORD, (key1 + _KEY_STEPS[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), dim=-1)


def keep_mask(
    rng_state: Tensor,
    dropout_p: float,
    batch_heads: Tensor,
    q0: int,
    q1: int,
    kv0: int,
    kv1: int,
) -> Tensor:
    """Returns which entries of a tile of P survive.

    Args:
        rng_state: (2,) int64, seed and offset.
        dropout_p: probability of dropping an entry.
        batch_heads: any shape, int64, batch * num_heads_q + head of each row of tiles.
        q0: first row of the tile.
        q1: row after the last.
        kv0: first column of the tile.
        kv1: column after the last.

    Returns:
        (*batch_heads.shape, q1 - q0, kv1 - kv0) bool.
    """
    seed, offset = (int(x) for x in rng_state.tolist())
    first, last = kv0 // 4, (kv1 + 3) // 4
    words = philox(
        (
            torch.arange(first, last),
            torch.arange(q0, q1)[:, None],
            batch_heads[..., None, None],
            torch.tensor(offset & _WORD),
        ),
        seed,
    )
    words = words.flatten(-2)[..., kv0 - 4 * first : kv1 - 4 * first]
    p = torch.tensor(dropout_p, dtype=torch.float32).item()
    return words >= floor(p * 2**32 + 0.5)
