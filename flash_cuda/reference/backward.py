"""The backward pass: P is computed again from lse, tile by tile, and never stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .exponential import exp2_
from .problem import Part, Problem
from .scores import LOG2_E, Scores

WANT_DQ, WANT_DK, WANT_DV, WANT_DBIAS, WANT_DSINK = 1, 2, 4, 8, 16


@dataclass
class Gradients:
    """The results of a backward pass; None where not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None


@dataclass
class _Rows:
    """What the rows of a part bring to its backward pass, (n, kv_heads, group, rows, ...).

    Attributes:
        dout: gradient of out.
        lse: in powers of two; +inf in rows without keys, so that their P is 0.
        delta: dout.out - dlse, what the softmax subtracts from every dP of the row.
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor

    @staticmethod
    def make(
        problem: Problem, part: Part, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
    ) -> _Rows:
        do = problem.query_view(dout, part).to(problem.dtype).contiguous()
        o = problem.query_view(out, part).to(problem.dtype)
        log2 = problem.lse_view(lse, part).to(problem.dtype)[..., None] * LOG2_E
        empty = log2 == -math.inf
        delta = (do * o).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - problem.lse_view(dlse, part).to(problem.dtype)[..., None]
        # Nothing flows through a row without keys, whatever arrives at its lse.
        return _Rows(do, log2.masked_fill(empty, math.inf), delta.masked_fill(empty, 0.0))

    def tile(self, q0: int, q1: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dout, lse and delta of some rows, (n * kv_heads, group * rows, ...)."""
        dout, lse, delta = (
            x[..., q0:q1, :].flatten(2, 3).flatten(0, 1) for x in (self.dout, self.lse, self.delta)
        )
        return dout, lse, delta


def _add_dbias(
    scores: Scores, dbias: Tensor, ds: Tensor, q0: int, q1: int, kv0: int, kv1: int
) -> None:
    """Adds a tile of dS to dbias, summed over the dimensions along which bias was repeated."""
    target = scores.bias_tile(dbias, q0, q1, kv0, kv1)
    tile = scores.split_rows(ds)
    target += tile.sum_to_size(target.shape).to(target.dtype)


def _backward_part(problem: Problem, part: Part, rows: _Rows, grads: Gradients) -> None:
    """Adds the gradients of one part."""
    scores, options = Scores(problem, part), problem.options
    v = problem.values(part).flatten(0, 1)
    dk, dv = torch.zeros_like(scores.k), torch.zeros_like(v)
    dbias = None if grads.dbias is None else problem.bias_view(grads.dbias, part)
    needs_ds = not (grads.dq is None and grads.dk is None and dbias is None)
    share = options.exp_share if options.exp_in_backward else 0.0

    def rounded(x: Tensor) -> Tensor:
        return x.to(problem.q.dtype).to(problem.dtype) if options.round_p else x

    block_q = problem.block_q(part)
    for q0 in range(0, part.seqlen_q, block_q):
        q1 = min(q0 + block_q, part.seqlen_q)
        q_tile = scores.q_tile(q0, q1)
        do, lse, delta = rows.tile(q0, q1)
        dq = torch.zeros_like(q_tile)
        tiles = scores.visited(q0, q1, 0, part.seqlen_kv)
        for kv0 in tiles:
            kv1 = min(kv0 + tiles.step, tiles.stop)
            s, slope = scores.tile(q_tile, q0, q1, kv0, kv1, with_slope=True)
            p = exp2_(s.sub_(lse), share, options.exp_degree)
            kept = scores.kept(q0, q1, kv0, kv1)
            if grads.dv is not None:
                p_kept = p if kept is None else p * kept
                dv[:, kv0:kv1].baddbmm_(rounded(p_kept).transpose(1, 2), do)
            if not needs_ds:
                continue
            ds = torch.bmm(do, v[:, kv0:kv1].transpose(1, 2))  # dP
            if kept is not None:
                ds.mul_(kept)
            ds.sub_(delta).mul_(p)
            if dbias is not None:
                _add_dbias(scores, dbias, ds, q0, q1, kv0, kv1)
            if slope is not None:
                ds.mul_(slope)
            ds = rounded(ds)
            if grads.dq is not None:
                dq.baddbmm_(ds, scores.k[:, kv0:kv1])
            if grads.dk is not None:
                dk[:, kv0:kv1].baddbmm_(ds.transpose(1, 2), q_tile)
        if grads.dq is not None:
            target = problem.query_view(grads.dq, part)[..., q0:q1, :]
            target.copy_(scores.split_rows(dq.mul_(problem.scale)))
    if grads.dk is not None:  # q_tile carries the scale already, in other units
        target = problem.key_view(grads.dk, part)
        target.copy_(dk.mul_(scores.unit).view(target.shape))
    if grads.dv is not None:
        target = problem.key_view(grads.dv, part)
        target.copy_(dv.view(target.shape))


def _add_dsink(problem: Problem, part: Part, rows: _Rows, dsink: Tensor) -> None:
    """Adds the gradient of the sink: its probability times minus delta, summed over the rows."""
    assert problem.sink is not None
    sink = problem.head_view(problem.sink, part).to(problem.dtype) * LOG2_E
    probability = torch.exp2(sink - rows.lse)
    heads = slice(part.h0 * problem.group, part.h1 * problem.group)
    dsink[heads] -= (probability * rows.delta).sum((0, 3, 4)).flatten()


def backward(
    problem: Problem, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: int
) -> Gradients:
    """Returns the wanted gradients, whole: zeros wherever nothing flows."""
    bias, sink = problem.bias, problem.sink
    grads = Gradients(
        dq=problem.q.new_zeros(problem.q.shape) if wanted & WANT_DQ else None,
        dk=problem.k.new_zeros(problem.k.shape) if wanted & WANT_DK else None,
        dv=problem.v.new_zeros(problem.v.shape) if wanted & WANT_DV else None,
        dbias=None,
        dsink=None,
    )
    if wanted & WANT_DBIAS and bias is not None:
        grads.dbias = torch.zeros(bias.shape, dtype=problem.dtype)
    if wanted & WANT_DSINK and sink is not None:
        grads.dsink = torch.zeros(sink.shape, dtype=problem.dtype)
    for part in problem.parts():
        rows = _Rows.make(problem, part, dout, dlse, out, lse)
        _backward_part(problem, part, rows, grads)
        if grads.dsink is not None:
            _add_dsink(problem, part, rows, grads.dsink)
    return grads
