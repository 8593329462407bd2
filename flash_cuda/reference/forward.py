"""The forward pass: tiles of queries outside, tiles of keys inside, an online softmax between."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .problem import Part, Problem
from .scores import Scores
from .softmax import OnlineSoftmax


def _attend(
    scores: Scores, v: Tensor, q0: int, q1: int, kv0: int, kv1: int
) -> tuple[Tensor, OnlineSoftmax]:
    """Attention of the query rows [q0, q1) to the keys [kv0, kv1) of a part.

    Args:
        scores: S of the part.
        v: (n * kv_heads, keys, head_dim_v).
        q0: first row.
        q1: row after the last.
        kv0: first key; the sink goes with key 0.
        kv1: key after the last.

    Returns:
        The output before it is normalised, (n * kv_heads, group * rows, head_dim_v), and the
        softmax of its rows.
    """
    problem = scores.problem
    q_tile = scores.q_tile(q0, q1)
    o = q_tile.new_zeros(*q_tile.shape[:2], v.shape[-1])
    softmax = scores.softmax(q0, q1, with_sink=kv0 == 0)
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
    return o, softmax


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
    block_q = problem.block_q(part)
    for q0 in range(0, part.seqlen_q, block_q):
        q1 = min(q0 + block_q, part.seqlen_q)
        o, softmax = _attend(scores, v, q0, q1, *splits[0])
        for kv0, kv1 in splits[1:]:
            part_o, part_softmax = _attend(scores, v, q0, q1, kv0, kv1)
            here, there = softmax.join(part_softmax)
            o.mul_(here).add_(part_o.mul_(there))
        out[..., q0:q1, :] = scores.split_rows(softmax.finish(o))
        lse[..., q0:q1] = scores.split_rows(softmax.lse())[..., 0]


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
