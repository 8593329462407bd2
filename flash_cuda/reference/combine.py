"""Merging attention over parts of the keys: each part has its output and its lse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges partial results over disjoint keys.

    Each part counts with the weight exp(lse - largest lse). A part without keys (lse -inf) is
    ignored whatever its output holds; without any keys, out is 0 and lse -inf.

    Args:
        outs: (..., rows, dim) each, normalised.
        lses: (..., rows) each, natural logarithms.

    Returns:
        out and lse, as if computed at once.
    """
    highest = lses[0]
    for lse in lses[1:]:
        highest = torch.maximum(highest, lse)
    finite = highest.masked_fill(highest == -math.inf, 0.0)
    out, total = torch.zeros_like(outs[0]), torch.zeros_like(finite)
    for partial, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse - finite)
        total += weight
        out += torch.where(weight[..., None] == 0.0, 0.0, weight[..., None] * partial)
    out /= torch.where(total == 0.0, 1.0, total)[..., None]
    return out, finite + total.log()
