"""The forward pass: tiles of queries outside, tiles of keys inside, an online softmax between."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .combine import merge
from .exponential import exp2_
from .options import EngineOptions
from .problem import Part, Problem
from .scores import LN_2, LOG2_E, Scores


class OnlineSoftmax:
    """Running softmax of the rows of one tile of queries, in powers of two.

    Attributes:
        reference: (..., rows, 1) what is subtracted from the scores: the running maximum, or
            one that was, while the maximum exceeds it by at most options.rescale_threshold.
        row_sum: (..., rows, 1) sum of 2^(s - reference) so far.
    """

    def __init__(self, like: Tensor, sink: Tensor | None, options: EngineOptions) -> None:
        """Starts without keys, or with the sink, which is one more logit and has no value.

        Args:
            like: (..., rows, dim), for shape and dtype.
            sink: (..., rows, 1), in powers of two.
            options: numerics.
        """
        self.options = options
        if sink is None:
            self.reference = like.new_full((*like.shape[:-1], 1), -math.inf)
            self.row_sum = torch.zeros_like(self.reference)
        else:
            self.reference = sink
            self.row_sum = (sink > -math.inf).to(like.dtype)

    def step(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in a tile of scores, in place.

        Returns:
            P relative to the new reference, and the factor (..., rows, 1) that brings what was
            accumulated before to that reference.
        """
        reference = torch.maximum(self.reference, s.amax(-1, keepdim=True))
        if self.options.rescale_threshold > 0.0:
            behind = reference - self.reference
            near = behind <= self.options.rescale_threshold
            reference = torch.where(near, self.reference, reference)
        # A row that has seen nothing but masked keys keeps the reference -inf; with 0 in its
        # place the exponentials below are 0, not NaN.
        finite = reference.masked_fill(reference == -math.inf, 0.0)
        p = exp2_(s.sub_(finite), self.options.exp_share, self.options.exp_degree)
        rescale = torch.exp2(self.reference - finite)
        self.row_sum = self.row_sum * rescale + p.sum(-1, keepdim=True)
        self.reference = reference
        return p, rescale

    def finish(self, o: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the normalised output (0 in rows without keys) and lse, natural, (..., rows)."""
        out = o / torch.where(self.row_sum == 0.0, 1.0, self.row_sum)
        lse = (self.reference + self.row_sum.log2()) * LN_2
        return out, lse[..., 0]


def _attend(
    scores: Scores, v: Tensor, q0: int, q1: int, kv0: int, kv1: int, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of the query rows [q0, q1) to the keys [kv0, kv1) of a part.

    Args:
        scores: S of the part.
        v: (n * kv_heads, keys, head_dim_v).
        q0: first row.
        q1: row after the last.
        kv0: first key.
        kv1: key after the last.
        sink: (n, kv_heads, group, 1, 1) or None, in powers of two.

    Returns:
        out (n, kv_heads, group, rows, head_dim_v) and lse (n, kv_heads, group, rows).
    """
    problem = scores.problem
    q_tile = scores.q_tile(q0, q1)
    o = q_tile.new_zeros(*q_tile.shape[:2], v.shape[-1])
    if sink is not None:
        shape = (*scores.q.shape[:3], q1 - q0, 1)
        sink = sink.expand(shape).flatten(2, 3).flatten(0, 1)
    softmax = OnlineSoftmax(o, sink, problem.options)
    tiles = scores.visited(q0, q1, kv0, kv1)
    for begin in tiles:
        end = min(begin + tiles.step, tiles.stop)
        s, _ = scores.tile(q_tile, q0, q1, begin, end)
        p, rescale = softmax.step(s)
        kept = scores.kept(q0, q1, begin, end)
        if kept is not None:
            p.mul_(kept)  # after the row sum: dropout acts on the normalised P, lse is without it
        if problem.options.round_p:
            p = p.to(problem.q.dtype).to(problem.dtype)
        o.mul_(rescale).baddbmm_(p, v[:, begin:end])
    out, lse = softmax.finish(o)
    return scores.split_rows(out), scores.split_rows(lse[..., None])[..., 0]


def _splits(seqlen_kv: int, num_splits: int, split_size: int) -> list[tuple[int, int]]:
    """Cuts [0, seqlen_kv) into the parts that are worked on apart and merged."""
    if split_size <= 0:
        split_size = -(-seqlen_kv // max(num_splits, 1))
    if split_size <= 0 or seqlen_kv <= split_size:
        return [(0, seqlen_kv)]
    return [(i, min(i + split_size, seqlen_kv)) for i in range(0, seqlen_kv, split_size)]


def _forward_part(
    problem: Problem, part: Part, out: Tensor, lse: Tensor, splits: list[tuple[int, int]]
) -> None:
    scores = Scores(problem, part)
    v = problem.values(part).flatten(0, 1)
    out, lse = problem.query_view(out, part), problem.lse_view(lse, part)
    sink = None
    if problem.sink is not None:
        sink = problem.head_view(problem.sink, part).to(problem.dtype) * LOG2_E
    block_q = problem.block_q(part)
    for q0 in range(0, part.seqlen_q, block_q):
        q1 = min(q0 + block_q, part.seqlen_q)
        partials = [
            _attend(scores, v, q0, q1, kv0, kv1, sink if kv0 == 0 else None) for kv0, kv1 in splits
        ]
        if len(partials) == 1:
            tile_out, tile_lse = partials[0]
        else:
            tile_out, tile_lse = merge([o for o, _ in partials], [x for _, x in partials])
        out[..., q0:q1, :] = tile_out
        lse[..., q0:q1] = tile_lse


def forward(problem: Problem, num_splits: int, split_size: int) -> tuple[Tensor, Tensor]:
    """Returns out and lse of a call; rows that do not count get out 0 and lse -inf."""
    q = problem.q
    out_dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_zeros(*q.shape[:-1], problem.v.shape[-1], dtype=out_dtype)
    if problem.packed_q:
        lse_shape = [problem.num_heads_q, q.shape[0]]
    else:
        lse_shape = [q.shape[0], problem.num_heads_q, q.shape[1]]
    lse = q.new_full(lse_shape, -math.inf, dtype=problem.dtype)
    for part in problem.parts():
        _forward_part(problem, part, out, lse, _splits(part.seqlen_kv, num_splits, split_size))
    return out, lse
