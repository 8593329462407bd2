"""The scores of one tile, forward and back: softcap, ALiBi, bias, masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dropout import keep_mask
from .problem import Part, Problem
from .softmax import LN_2, OnlineSoftmax


class Scores:
    """Computes the tiles of S of one part, and what dropout leaves of P.

        s = softcap(softmax_scale * q.k) + ALiBi + bias, then the masks

    The factors that act on q.k are moved into q, so that a plain tile is one matrix product:
    softmax_scale / one, or softmax_scale / softcap ahead of the tanh.

    Attributes:
        q: the query rows, scaled, (n, kv_heads, group, rows, head_dim).
        k: (n * kv_heads, keys, head_dim).
        one: what one unit of S is in natural logits: ln 2, so that P is a power of two. With a
            bias it is 1, since the lowest finite number, which many masks are made of, has to
            stay finite and as coarse as PyTorch's sum of it and q.k.
        unit: what one unit of the scaled q.k is in natural logits.
        sink: (1, kv_heads, group, 1, 1) or None, in units of S.
    """

    def __init__(self, problem: Problem, part: Part) -> None:
        """Brings the operands of `part` into the compute dtype."""
        self.problem, self.part, self.mask = problem, part, part.mask
        self.one = LN_2 if problem.bias is None else 1.0
        self.unit = problem.softcap if problem.softcap > 0.0 else self.one
        self.q = problem.queries(part, problem.scale / self.unit)
        self.k = problem.keys(part).flatten(0, 1)
        self.bias = None if problem.bias is None else problem.bias_view(problem.bias, part)
        self.slopes: Tensor | None = None
        if problem.alibi_slopes is not None:
            slopes = problem.head_view(problem.alibi_slopes, part).to(problem.dtype)
            self.slopes = slopes / self.one
        self.sink: Tensor | None = None
        if problem.sink is not None:
            self.sink = problem.head_view(problem.sink, part).to(problem.dtype) / self.one

    def q_tile(self, q0: int, q1: int) -> Tensor:
        """Returns (n * kv_heads, group * rows, head_dim): the heads of a group are rows."""
        return self.q[..., q0:q1, :].flatten(2, 3).flatten(0, 1)

    def split_rows(self, tile: Tensor) -> Tensor:
        """Returns a (n * kv_heads, group * rows, x) tile as (n, kv_heads, group, rows, x)."""
        n, heads, group = self.q.shape[:3]
        rows = tile.shape[1] // group
        return tile.view(n, heads, group, rows, tile.shape[2])

    def tile(
        self, q_tile: Tensor, q0: int, q1: int, kv0: int, kv1: int, with_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Computes S for rows [q0, q1) and keys [kv0, kv1).

        Returns:
            S, (n * kv_heads, group * rows, keys), -inf where masked, and, if asked for and if
            there is a softcap, its slope 1 - tanh^2.
        """
        s = torch.bmm(q_tile, self.k[:, kv0:kv1].transpose(1, 2))
        slope = None
        if self.problem.softcap > 0.0:
            s.tanh_()
            if with_slope:
                slope = 1.0 - s * s
            s.mul_(self.problem.softcap / self.one)
        view = self.split_rows(s)
        if self.slopes is not None:
            view.sub_(self.slopes * self.mask.distance(q0, q1, kv0, kv1))
        if self.bias is not None:
            view.add_(self.bias_tile(self.bias, q0, q1, kv0, kv1))
        hidden = self.mask.hidden(q0, q1, kv0, kv1)
        if hidden is not None:
            view.masked_fill_(hidden, -math.inf)
        return s, slope

    def softmax(self, q0: int, q1: int, with_sink: bool = True) -> OnlineSoftmax:
        """Returns the softmax of rows [q0, q1), which has seen no key yet."""
        n, heads, group = self.q.shape[:3]
        like = self.q.new_empty(n * heads, group * (q1 - q0), 0)
        sink = self.sink if with_sink else None
        if sink is not None:
            sink = sink.expand(n, heads, group, q1 - q0, 1).flatten(2, 3).flatten(0, 1)
        return OnlineSoftmax(like, sink, self.one, self.problem.options)

    def bias_tile(self, bias: Tensor, q0: int, q1: int, kv0: int, kv1: int) -> Tensor:
        """Cuts a tile out of a view of bias (or of its gradient)."""
        rows = bias if bias.shape[3] == 1 else bias[:, :, :, q0:q1]
        return rows[..., kv0:kv1]

    def kept(self, q0: int, q1: int, kv0: int, kv1: int) -> Tensor | None:
        """Returns the dropout mask of a tile as factors, 0 or 1 / (1 - p); None without dropout."""
        problem = self.problem
        if problem.dropout_p <= 0.0 or problem.rng_state is None:
            return None
        pairs = problem.batch_heads(self.part)
        keep = keep_mask(problem.rng_state, problem.dropout_p, pairs, q0, q1, kv0, kv1)
        factor = 1.0 / (1.0 - problem.dropout_p) if problem.dropout_p < 1.0 else 0.0
        return (keep.to(problem.dtype) * factor).flatten(2, 3).flatten(0, 1)

    def visited(self, q0: int, q1: int, kv0: int, kv1: int) -> range:
        """Returns the first keys of the tiles that rows [q0, q1) visit in [kv0, kv1)."""
        begin = max(kv0, self.mask.kv_begin(q0))
        end = min(kv1, self.mask.kv_end(q1 - 1))
        return range(begin, end, self.problem.block_kv(self.part))
