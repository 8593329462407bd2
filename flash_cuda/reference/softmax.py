"""The online softmax: the running state of the rows of one tile of queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .exponential import exp2_
from .options import EngineOptions

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def exponential_(s: Tensor, one: float, share: float = 0.0, degree: int = 3) -> Tensor:
    """Replaces differences of scores, in units of `one` natural logits, by their exponentials."""
    return exp2_(s if one == LN_2 else s.mul_(one * LOG2_E), share, degree)


class OnlineSoftmax:
    """Running softmax of the rows of one tile of queries.

    Attributes:
        reference: (..., rows, 1) what is subtracted from the scores: the running maximum, or
            one that was, while the maximum exceeds it by at most options.rescale_threshold.
        row_sum: (..., rows, 1) sum of exp(s - reference) so far.
    """

    def __init__(
        self, like: Tensor, sink: Tensor | None, one: float, options: EngineOptions
    ) -> None:
        """Starts without keys, or with the sink, which is one more logit and has no value.

        Args:
            like: (..., rows, dim), for shape and dtype.
            sink: (..., rows, 1), in units of the scores.
            one: what one unit of the scores is in natural logits.
            options: numerics.
        """
        self.one, self.options = one, options
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
            behind = (reference - self.reference) * (self.one * LOG2_E)
            near = behind <= self.options.rescale_threshold
            reference = torch.where(near, self.reference, reference)
        finite = _or_zero(reference)
        share, degree = self.options.exp_share, self.options.exp_degree
        p = exponential_(s.sub_(finite), self.one, share, degree)
        rescale = exponential_(self.reference - finite, self.one)
        self.row_sum = self.row_sum * rescale + p.sum(-1, keepdim=True)
        self.reference = reference
        return p, rescale

    def join(self, other: OnlineSoftmax) -> tuple[Tensor, Tensor]:
        """Takes in what the same rows saw among other keys.

        Returns:
            The factors (..., rows, 1) of what was accumulated here and there. lse would not do in
            place of the two attributes: next to a logit of -1e8 it cannot tell one key from ten.
        """
        reference = torch.maximum(self.reference, other.reference)
        finite = _or_zero(reference)
        here = exponential_(self.reference - finite, self.one)
        there = exponential_(other.reference - finite, self.one)
        self.row_sum = self.row_sum * here + other.row_sum * there
        self.reference = reference
        return here, there

    def finish(self, o: Tensor) -> Tensor:
        """Returns the normalised output, 0 in rows without keys."""
        return o / torch.where(self.row_sum == 0.0, 1.0, self.row_sum)

    def lse(self) -> Tensor:
        """Returns lse, natural, (..., rows, 1)."""
        return self.reference * self.one + self.row_sum.log()


def _or_zero(reference: Tensor) -> Tensor:
    """A row that has seen nothing but masked keys has the reference -inf.

    With 0 in its place the exponentials are 0, not NaN.
    """
    return reference.masked_fill(reference == -math.inf, 0.0)
