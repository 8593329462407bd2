"""Attention over two sets of keys from the attention over each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_cuda.options import refuse_others, shown


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
        ValueError: the shapes or the devices do not match.
        TypeError: `first` or `second` is no pair of tensors, or a tensor is not of a floating-point
            type of 16 bits or more.
    """
    (out1, lse1), (out2, lse2) = _pair("first", first), _pair("second", second)
    _check((out1, lse1), (out2, lse2))
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


def _pair(name: str, part: Any) -> tuple[Tensor, Tensor]:
    is_pair = isinstance(part, (tuple, list)) and len(part) == 2
    if not is_pair or not all(isinstance(t, Tensor) for t in part):
        raise TypeError(
            f"{name} must be a pair (out, lse) of tensors, as return_lse=True gives, "
            f"got {shown(part)}"
        )
    out, lse = part
    refuse_others(**{f"out of {name}": out, f"lse of {name}": lse})
    return out, lse


def _check(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
    (out1, lse1), (out2, lse2) = first, second
    if out1.shape != out2.shape or lse1.shape != lse2.shape:
        raise ValueError(
            "first and second must have the same shapes, got out "
            f"{tuple(out1.shape)} and {tuple(out2.shape)}, lse {tuple(lse1.shape)} and "
            f"{tuple(lse2.shape)}"
        )
    names = ("out of first", "lse of first", "out of second", "lse of second")
    for name, tensor in zip(names, (out1, lse1, out2, lse2), strict=True):
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise TypeError(
                f"{name} must be of a floating-point type, 16 bits or more, "
                f"got {str(tensor.dtype).removeprefix('torch.')}"
            )
        if tensor.device != out1.device:
            raise ValueError(
                f"{name} must be on the device of out of first ({out1.device}), got {tensor.device}"
            )
    # Batch and head dimensions swap places with the rows; a packed lse has no batch.
    if lse1.dim() not in (2, 3) or lse1.transpose(-1, -2).shape != out1.shape[:-1]:
        raise ValueError(
            "lse must be (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q) for an out of "
            f"shape {tuple(out1.shape)}, got {tuple(lse1.shape)}"
        )
