"""Attention over two sets of keys from the attention over each."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merges two partial results of the same queries on different keys.

    Differentiable in all four tensors. Merging is associative, so any number of parts folds into
    one. A sink must have taken part in one part only.

    Args:
        first: the output ``(batch, seqlen_q, num_heads_q, head_dim_v)`` and its log-sum-exp
            ``(batch, num_heads_q, seqlen_q)``, or packed ``(total_q, num_heads_q, head_dim_v)``
            and ``(num_heads_q, total_q)``.
        second: the same for the other keys.

    Returns:
        Output and log-sum-exp over both sets of keys. A row without keys in either part has
        ``-inf`` there and counts for nothing; without keys in both it gets zeros and ``-inf``.

    Raises:
        ValueError: the shapes do not match.
        TypeError: a tensor is not of a floating-point type.
    """
    (out1, lse1), (out2, lse2) = first, second
    _check(first, second)
    top = torch.maximum(lse1, lse2).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    e1, e2 = torch.exp(lse1 - top), torch.exp(lse2 - top)
    total = e1 + e2
    empty = total == 0
    safe = total.masked_fill(empty, 1.0)
    lse = (top + torch.log(safe)).masked_fill(empty, -torch.inf)
    out = _weighted(out1, e1 / safe) + _weighted(out2, e2 / safe)
    return out.to(torch.promote_types(out1.dtype, out2.dtype)), lse


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    weight = weight.transpose(-1, -2).unsqueeze(-1)
    # What counts for nothing may be anything, also NaN.
    return out.to(weight.dtype).masked_fill(weight == 0, 0.0) * weight


def _check(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    (out1, lse1), (out2, lse2) = first, second
    if out1.shape != out2.shape or lse1.shape != lse2.shape:
        raise ValueError(
            "merge needs two results of the same shapes, got outputs "
            f"{tuple(out1.shape)} and {tuple(out2.shape)}, lse {tuple(lse1.shape)} and "
            f"{tuple(lse2.shape)}"
        )
    for name, tensor in zip(("output", "lse") * 2, (out1, lse1, out2, lse2), strict=True):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating-point type, got {tensor.dtype}")
    if lse1.transpose(-1, -2).shape != out1.shape[:-1]:
        raise ValueError(
            f"lse must be (batch, heads, seqlen) or (heads, total) for an output "
            f"{tuple(out1.shape)}, got {tuple(lse1.shape)}"
        )
