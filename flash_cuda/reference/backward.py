"""The backward pass: P is computed again from lse, tile by tile, and never stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Problem
from .scores import Scores
from .softmax import exponential_

WANT_DQ, WANT_DK, WANT_DV, WANT_DBIAS, WANT_DSINK = 1, 2, 4, 8, 16


@dataclass
class Gradients:
    """The results of a backward pass; None where not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None


# Where lse is beyond this, its last place moves P by more than 2^-12: P is normalised again.
_COARSE_LSE = 4096.0


@dataclass
class _Rows:
    """What the rows of a part bring to its backward pass, (n, kv_heads, group, rows, ...).

    Attributes:
        dout: gradient of out.
        lse: natural.
        delta: dout.out - dlse, what the softmax subtracts from every dP of the row.
        reference: P is exp(s - reference) * weight; in units of S, +inf in rows without keys, so
            that their P is 0.
        weight: 1, unless lse says too little (see `normalise`).
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor
    reference: Tensor
    weight: Tensor

    @staticmethod
    def make(scores: Scores, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> _Rows:
        problem, part = scores.problem, scores.part
        do = problem.query_view(dout, part).to(problem.dtype).contiguous()
        o = problem.query_view(out, part).to(problem.dtype)
        natural = problem.lse_view(lse, part).to(problem.dtype)[..., None]
        empty = natural == -math.inf
        delta = (do * o).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - problem.lse_view(dlse, part).to(problem.dtype)[..., None]
        # Nothing flows through a row without keys, whatever arrives at its lse.
        reference = (natural / scores.one).masked_fill(empty, math.inf)
        delta = delta.masked_fill(empty, 0.0)
        return _Rows(do, natural, delta, reference, torch.ones_like(reference))

    def normalise(self, scores: Scores) -> None:
        """Finds maximum and sum again in tiles of rows whose lse is too large to tell P.

        Next to a logit of -1e8 (of a row that a finite bias masks) or 1e10 (of a huge
        softmax_scale) neither the sum nor the differences of the scores are left in lse, and
        exp(s - lse) could be anything, infinity included.
        """
        coarse = (self.lse.abs() > _COARSE_LSE) & self.lse.isfinite()
        rows, block_q = scores.part.seqlen_q, scores.problem.block_q(scores.part)
        for q0 in range(0, rows, block_q):
            q1 = min(q0 + block_q, rows)
            here = coarse[..., q0:q1, :]
            if not here.any():
                continue
            q_tile, softmax = scores.q_tile(q0, q1), scores.softmax(q0, q1)
            tiles = scores.visited(q0, q1, 0, scores.part.seqlen_kv)
            for kv0 in tiles:
                kv1 = min(kv0 + tiles.step, tiles.stop)
                softmax.step(scores.tile(q_tile, q0, q1, kv0, kv1)[0])
            reference, row_sum, own_lse = (
                scores.split_rows(x) for x in (softmax.reference, softmax.row_sum, softmax.lse())
            )
            # The caller's lse may be that of more keys than these.
            share = torch.exp((own_lse - self.lse[..., q0:q1, :]).clamp(max=0.0))
            self.reference[..., q0:q1, :][here] = reference[here]
            self.weight[..., q0:q1, :][here] = (share / row_sum)[here]

    def tile(self, q0: int, q1: int) -> tuple[Tensor, ...]:
        """Returns dout, delta, reference and weight of some rows, heads of a group as rows."""
        return tuple(
            x[..., q0:q1, :].flatten(2, 3).flatten(0, 1)
            for x in (self.dout, self.delta, self.reference, self.weight)
        )


def _add_dbias(
    scores: Scores, dbias: Tensor, ds: Tensor, q0: int, q1: int, kv0: int, kv1: int
) -> None:
    """Adds a tile of dS to dbias, summed over the dimensions along which bias was repeated."""
    target = scores.bias_tile(dbias, q0, q1, kv0, kv1)
    tile = scores.split_rows(ds)
    target += tile.sum_to_size(target.shape).to(target.dtype)


def _backward_part(scores: Scores, rows: _Rows, grads: Gradients) -> None:
    """Adds the gradients of one part."""
    problem, part, options = scores.problem, scores.part, scores.problem.options
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
        do, delta, reference, weight = rows.tile(q0, q1)
        weighted = bool((weight != 1.0).any())
        dq = torch.zeros_like(q_tile)
        tiles = scores.visited(q0, q1, 0, part.seqlen_kv)
        for kv0 in tiles:
            kv1 = min(kv0 + tiles.step, tiles.stop)
            s, slope = scores.tile(q_tile, q0, q1, kv0, kv1, with_slope=True)
            p = exponential_(s.sub_(reference), scores.one, share, options.exp_degree)
            if weighted:
                p.mul_(weight)
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


def _add_dsink(scores: Scores, rows: _Rows, dsink: Tensor) -> None:
    """Adds the gradient of the sink: its probability times minus delta, summed over the rows."""
    assert scores.sink is not None
    probability = exponential_(scores.sink - rows.reference, scores.one) * rows.weight
    part, group = scores.part, scores.problem.group
    heads = slice(part.h0 * group, part.h1 * group)
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
        scores = Scores(problem, part)
        rows = _Rows.make(scores, dout, dlse, out, lse)
        rows.normalise(scores)
        _backward_part(scores, rows, grads)
        if grads.dsink is not None:
            _add_dsink(scores, rows, grads.dsink)
    return grads
