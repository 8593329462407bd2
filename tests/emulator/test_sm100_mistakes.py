"""Mistakes in the sources of the Blackwell forward kernel, of kinds that test_planted.py lacks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from . import sm100_mistakes
from .library import Failure, TestLibrary, aligned
from .sm100_mistakes import Mistake

pytestmark = pytest.mark.slow

SCHEDULES = [(policy, seed) for seed in (1, 2, 3) for policy in ("lazy", "random", "eager")]


MISTAKES = [
    Mistake(
        "the first product accumulates",
        "fwd_kernel.cuh",
        "issue_pv(0, i > 1,",
        "issue_pv(0, true,",
    ),
    Mistake(
        "S of the other Q tile is read",
        "fwd_kernel.cuh",
        "const uint32_t p = Tile::kTmemS + slot * 128 + Tile::kTmemP;",
        "const uint32_t p = Tile::kTmemS + (slot ^ 1) * 128 + Tile::kTmemP;",
    ),
    Mistake(
        "P's barrier counts half of the warps",
        "fwd_smem.cuh",
        "barrier(kPReady, i), 8)",
        "barrier(kPReady, i), 4)",
    ),
    Mistake(
        "one reader of work too many",
        "fwd_smem.cuh",
        "(Tile::kTilesQ + 1) + 3;",
        "(Tile::kTilesQ + 1) + 4;",
        "deadlock",
    ),
]


@cache
def library(mistake: Mistake | None, head_dim: int) -> TestLibrary:
    """The kernel with one mistake, or without."""
    number = 0 if mistake is None else MISTAKES.index(mistake) + 1
    return sm100_mistakes.library(
        f"sm100_{head_dim}_{number}",
        "sm100_forward.cu",
        mistake,
        [f"-DHEAD_DIM={head_dim}"],
        ["common/tensor_map.cpp"],
    )


class Attention:
    """Inputs whose maxima climb from block to block, and what is right."""

    def __init__(self, head_dim: int, keys: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows, self.keys, self.heads, self.head_dim = 600, keys, 2, head_dim

        def normal(length: int) -> torch.Tensor:
            return torch.randn(length, self.heads, head_dim, generator=generator).bfloat16()

        q, k, v = normal(self.rows), normal(self.keys), normal(self.keys)
        # Blocks are visited from the last one on: the first keys have the largest scores.
        q[..., 0], k[..., 0] = 4.0, torch.linspace(8.0, 0.0, self.keys)[:, None]
        self.arrays = []
        for x in (q, k, v):
            self.arrays.append(aligned(tuple(x.shape), np.int16))
            self.arrays[-1][:] = x.view(torch.int16).numpy()
        s = torch.einsum("qhd,khd->hqk", q.double(), k.double())
        self.lse = s.logsumexp(-1).numpy()
        self.out = torch.einsum("hqk,khd->qhd", s.softmax(-1), v.double()).numpy()

    def run(self, kernel: TestLibrary) -> str:
        """ "" if all is well, "wrong numbers", or the report."""
        out = aligned(self.out.shape, np.int16)
        lse = aligned(self.lse.shape, np.float32)
        out[:], lse[:] = -1, np.nan
        kernel.warnings()
        try:
            kernel.forward(*self.arrays, out, lse, self.rows, self.keys, self.heads, 0)
        except Failure as failure:
            return str(failure)
        found = torch.from_numpy(out).view(torch.bfloat16).double().numpy()
        right = np.abs(found - self.out).max() <= 2e-2 and np.abs(lse - self.lse).max() <= 1e-3
        return kernel.warnings() if right else "wrong numbers"


@cache
def attention(head_dim: int, keys: int) -> Attention:
    return Attention(head_dim, keys)


@pytest.mark.parametrize("keys", [100, 1500])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_without_a_mistake(head_dim: int, keys: int) -> None:
    kernel = library(None, head_dim)
    for policy, seed in SCHEDULES:
        kernel.configure(policy, seed, sms=2)
        assert attention(head_dim, keys).run(kernel) == "", (policy, seed)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_caught(mistake: Mistake) -> None:
    kernel = library(mistake, 64)
    reports = []
    for policy, seed in SCHEDULES:
        kernel.configure(policy, seed, sms=2)
        reports.append(attention(64, 1500).run(kernel))
        if mistake.report in reports[-1] and reports[-1]:
            return
    pytest.fail(f"not caught, or not as {mistake.report!r}: {reports}")
