"""Which keys a query sees: always one interval, so every mask is two numbers for a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNBOUNDED = 1 << 30


@dataclass(frozen=True)
class Mask:
    """The mask of one sequence; the same arithmetic as csrc/common/mask.h.

    Query q stands at key position q + offset and sees the keys [kv_begin(q), kv_end(q)). Both
    ends grow with q, so the first and the last row of a tile bound the whole tile.

    Attributes:
        seqlen_q: query rows.
        seqlen_kv: keys.
        window_left: keys seen before the own position, inclusive; UNBOUNDED for all.
        window_right: keys seen after it; 0 is causal.
        chunk: keys see only queries of their own chunk of this size; 0 for none.
        offset: 0 aligns to the top left corner, seqlen_kv - seqlen_q to the bottom right.
    """

    seqlen_q: int
    seqlen_kv: int
    window_left: int
    window_right: int
    chunk: int
    offset: int

    @staticmethod
    def make(
        seqlen_q: int,
        seqlen_kv: int,
        window_left: int,
        window_right: int,
        chunk: int,
        top_left: bool,
    ) -> Mask:
        """Builds a mask from the arguments of an op, where a window end of -1 is unlimited."""
        return Mask(
            seqlen_q,
            seqlen_kv,
            UNBOUNDED if window_left < 0 else window_left,
            UNBOUNDED if window_right < 0 else window_right,
            chunk,
            0 if top_left else seqlen_kv - seqlen_q,
        )

    def kv_begin(self, q: int) -> int:
        """Returns the first key that query q sees."""
        position = q + self.offset
        begin = max(0, position - self.window_left)
        if self.chunk > 0:
            begin = max(begin, position // self.chunk * self.chunk)
        return begin

    def kv_end(self, q: int) -> int:
        """Returns the key after the last one that query q sees; <= kv_begin(q) if none."""
        position = q + self.offset
        end = min(self.seqlen_kv, position + 1 + self.window_right)
        if self.chunk > 0:
            end = min(end, (position // self.chunk + 1) * self.chunk)
        return end

    def hidden(self, q0: int, q1: int, kv0: int, kv1: int) -> Tensor | None:
        """Returns (q1 - q0, kv1 - kv0) bool, True where a key is not seen; None if all are."""
        if self.kv_begin(q1 - 1) <= kv0 and kv1 <= self.kv_end(q0):
            return None
        rows = range(q0, q1)
        begin = torch.tensor([self.kv_begin(q) for q in rows])[:, None]
        end = torch.tensor([self.kv_end(q) for q in rows])[:, None]
        keys = torch.arange(kv0, kv1)
        return (keys < begin) | (keys >= end)

    def distance(self, q0: int, q1: int, kv0: int, kv1: int) -> Tensor:
        """Returns (q1 - q0, kv1 - kv0) int64: how far each key is from the query's position."""
        position = torch.arange(q0, q1)[:, None] + self.offset
        return (position - torch.arange(kv0, kv1)).abs()
