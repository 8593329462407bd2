"""Rotary position embedding of queries, as an ordinary differentiable function."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor,
    interleaved: bool = True,
) -> Tensor:
    """Rotates pairs of columns of `x` by the angle of each row's position.

    Args:
        x: ``(batch, seqlen, heads, head_dim)`` or packed ``(total, heads, head_dim)``.
        cos: ``(max_position, rotary_dim / 2)``; the first ``rotary_dim`` columns of `x` turn.
        sin: like `cos`.
        positions: integer position of each row, ``(batch, seqlen)`` or ``(total,)``. Positions
            past the table take its last row, so a length read on the device needs no check here.
        interleaved: pairs are the columns (0, 1), (2, 3), ...; otherwise column ``i`` is paired
            with ``i + rotary_dim / 2``.

    Returns:
        The rotated tensor, of `x`'s shape and dtype. The products are formed in float32 (float64
        for float64).

    Raises:
        ValueError: the tables do not fit `x`.
    """
    half = _check_tables(x, cos, sin)
    at = positions.long().clamp(0, cos.shape[0] - 1)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[at].to(compute).unsqueeze(-2) for table in (cos, sin))
    turned, rest = x[..., : 2 * half].to(compute), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, a * s + b * c), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, a * s + b * c), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def _check_tables(x: Tensor, cos: Tensor, sin: Tensor) -> int:
    """Returns rotary_dim / 2."""
    if cos.dim() != 2 or sin.shape != cos.shape:
        raise ValueError(
            "rotary_cos and rotary_sin must both be (positions, rotary_dim / 2), got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    half = cos.shape[1]
    if not 0 < 2 * half <= x.shape[-1]:
        raise ValueError(f"rotary_dim must be between 2 and head_dim {x.shape[-1]}, got {2 * half}")
    if cos.shape[0] == 0:
        raise ValueError("rotary_cos must hold at least one position, got 0")
    return half
