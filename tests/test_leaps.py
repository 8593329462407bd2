"""Logits that leap from one block of keys to the next.

Kernels that keep a row's reference from block to block repair their sums, compute scores again, or
give the fast path up, each from some size of a leap on. Keys are visited from the last to the
first, so the leaps grow towards key 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from .cases import AttentionCase
from .check import Backend

LOG2E = 1.4426950408889634


def leaping(step: float, keys: int, dtype: torch.dtype, head_dim: int) -> list[torch.Tensor]:
    """q, k, v; in every 64 keys one gains `step` log2 units, for all rows of head 0 and about half
    of the rows of head 1."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 2, head_dim, generator=generator).to(dtype) for n in (130, keys, keys)
    )
    sign = torch.ones(130, 2)
    sign[:, 1] -= 2.0 * (torch.rand(130, generator=generator) < 0.5)
    q[0, :, :, 0] = (8.0 * sign).to(dtype)
    key = torch.arange(keys)
    block = key // 64
    hot = key % 64 == block * 29 % 64
    units = torch.where(hot, step * (1.0 + block.max() - block), 0.0)
    k[0, :, :, 0] = (units * math.sqrt(head_dim) / (8.0 * LOG2E))[:, None].to(dtype)
    return [q, k, v]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse in float64; `bias` is one value a key."""
    q, k, v = (x[0].double() for x in (q, k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.double()
    if causal:
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~mask, -math.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    return out[None], scores.logsumexp(-1)[None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("step", [14.0, 40.0, 90.0, 200.0])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16), (192, torch.bfloat16)],
)
def test_leaps(
    head_dim: int, dtype: torch.dtype, step: float, causal: bool, backend: Backend
) -> None:
    inputs = leaping(step, 1300, dtype, head_dim)
    want = reference(*inputs, causal)
    right = 0 if causal else -1
    got = backend.call(
        AttentionCase(), "fwd", *(x.to(backend.device) for x in inputs), window_right=right
    )
    check(got, want)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("step", [14.0, 30.0, 200.0])
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)],
)
def test_leaps_with_a_bias(
    head_dim: int, dtype: torch.dtype, step: float, strict: bool, backend: Backend
) -> None:
    """Half of the leap comes from the bias; the last 70 keys are as good as masked by it."""
    inputs = leaping(step / 2, 1300, dtype, head_dim)
    block = torch.arange(1300) // 64
    bias = (step / 2 / LOG2E * (block.max() - block)).to(dtype)
    bias[-70:] = torch.finfo(dtype).min
    want = reference(*inputs, False, bias)
    got = backend.call(
        AttentionCase(),
        "fwd",
        *(x.to(backend.device) for x in inputs),
        bias=bias[None, None, None].to(backend.device),
        strict=strict,
    )
    check(got, want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_leaps_leave_other_heads_alone(head_dim: int, causal: bool, backend: Backend) -> None:
    """A thread block has tiles of several heads one after the other, which ones depends on time."""
    heads = 3 * backend.num_sms
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 130, heads, head_dim, generator=generator).bfloat16()
    k, v = (torch.randn(1, 700, 1, head_dim, generator=generator).bfloat16() for _ in range(2))
    block = torch.arange(700) // 64
    k[0, :, 0, 0] = 10.0 * (block.max() - block)
    outs = []
    for leap in (0.0, 12.0):
        q[:, :, ::2, 0], q[:, :, 1::2, 0] = leap * math.sqrt(head_dim), 0.0
        call = [x.to(backend.device) for x in (q, k, v)]
        outs.append(backend.call(AttentionCase(), "fwd", *call, window_right=0 if causal else -1))
    (out_alone, lse_alone), (out, lse) = outs
    assert torch.equal(out[:, :, 1::2], out_alone[:, :, 1::2])
    assert torch.equal(lse[:, 1::2], lse_alone[:, 1::2])


def check(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Compares out and lse."""
    # P is rounded at the scale of an older reference: an ulp where an exact softmax has 1.
    for name, tensor, exact, absolute, relative in (
        ("out", got[0], want[0], 1.2e-2, 1e-2),
        ("lse", got[1], want[1], 2e-3, 1e-5),
    ):
        error = (tensor.to(exact.device).double() - exact).abs()
        assert bool((error <= absolute + relative * exact.abs()).all()), (name, error.max())
