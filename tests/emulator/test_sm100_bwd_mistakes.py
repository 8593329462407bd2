"""Mistakes in the sources of the Blackwell backward kernel, of kinds that test_planted.py lacks."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from . import sm100_mistakes
from .library import Failure, TestLibrary, aligned
from .sm100_mistakes import Mistake

pytestmark = pytest.mark.slow

SCHEDULES = [(policy, seed) for seed in range(1, 6) for policy in ("lazy", "random", "eager")]
# Head dims of Q and V, and flags: dQ in tensor memory of its own, in dP's place, everything in
# turns; pairs of thread blocks; two passes.
VARIANTS: dict[str, tuple[int, int, list[str]]] = {
    "64": (64, 64, []),
    "128": (128, 128, []),
    "192/128": (192, 128, []),
    "pair": (128, 128, ["-DPAIR"]),
    "256": (256, 256, ["-DWIDE"]),
}

KERNEL, SCORES, REDUCE, SMEM, PAIR = (
    f"bwd_{x}.cuh" for x in ("kernel", "scores", "reduce", "smem", "pair_kernel")
)
WIDE, WIDE_SCORES, BLOCK = "bwd_wide_kernel.cuh", "bwd_wide_scores.cuh", "block.cuh"
MISTAKES = [
    Mistake("the first products accumulate", KERNEL, "count > 0);", "true);"),
    Mistake(
        "dQ accumulates",
        KERNEL,
        "kInstruction<true, true, Tile::kHeadDim>, k > 0)",
        "kInstruction<true, true, Tile::kHeadDim>, true)",
    ),
    Mistake(
        "dQ is issued before dK has read dS",
        KERNEL,
        "issue_dk(i);\n      if (i + 1 == num_steps) ptx::tcgen05_commit(smem.barrier(kBwdDkFull));"
        "\n      if (args.workspace.dq) {\n        if (!Tile::kDqOverDp) wait_dq_taken(i);\n"
        "        issue_dq();\n      }\n",
        "issue_dq();\n      issue_dk(i);\n"
        "      if (i + 1 == num_steps) ptx::tcgen05_commit(smem.barrier(kBwdDkFull));\n",
    ),
    Mistake(
        "dQ is released before it is read",
        REDUCE,
        "if (batch + 1 == kBatches) {",
        "if (batch == 0) {",
    ),
    Mistake(
        "P covers scores that nobody has read",
        SCORES,
        "ptx::named_barrier_sync(kPairBarrier + warp, 64);",
        variant="192/128",
    ),
    Mistake(
        "nobody waits for a turn",
        REDUCE,
        "while (ptx::load_acquire(turn) != mine) __nanosleep(32);",
    ),
    Mistake("barriers count half of the warps", SMEM, "kWarpsScores = 8", "kWarpsScores = 4"),
    Mistake(
        "a warp too many is waited for",
        SMEM,
        "kWarpsReduce = 4",
        "kWarpsReduce = 5",
        "deadlock",
    ),
    Mistake(
        "nobody waits for the peer's dS",
        PAIR,
        "ptx::mbarrier_wait(arrived, i % 2);",
        variant="pair",
    ),
    Mistake(
        "the peer's dS is told of without a relay",
        SMEM,
        "kBlocks * (4 + 1)",
        "kBlocks * 4 + 1",
        variant="pair",
    ),
    Mistake(
        "dS covers what dQ reads",
        SCORES,
        "if (blocks > 0) ptx::mbarrier_wait(smem.barrier(kBwdDqFull), (blocks - 1) % 2);",
        variant="pair",
    ),
    Mistake(
        "dQ covers scores that nobody has read",
        PAIR,
        "wait_warps(kBwdPReady, i + 1);",
        variant="pair",
    ),
    Mistake(
        "S covers dQ that nobody has read",
        PAIR,
        "if (wants_dq && i > 0) wait_dq_taken(i - 1);",
        variant="pair",
    ),
    Mistake(
        "the last dQ covers the one before",
        PAIR,
        "} else if (i > 0) {\n          wait_dq_taken(i - 1);",
        "} else if (i > 0) {",
        variant="pair",
    ),
    Mistake(
        "the leader expects its own bytes alone",
        PAIR,
        "ptx::mbarrier_arrive_expect_tx(full, 2 * bytes);",
        "ptx::mbarrier_arrive_expect_tx(full, bytes);",
        variant="pair",
    ),
    Mistake(
        "a half of dS stays where it is",
        SCORES,
        "const bool own = half == rank;",
        "const bool own = half == 0;",
        variant="pair",
    ),
    Mistake(
        "blocks of a pair do not wait for each other's barriers",
        BLOCK,
        "meet<kCtas>();\n}\ntemplate",
        "meet<1>();\n}\ntemplate",
        variant="pair",
    ),
    Mistake(
        "a block of a pair ends while the other one uses it",
        BLOCK,
        "meet<kCtas>();\n  if (warp == mma_warp) ptx::tcgen05_dealloc",
        "meet<1>();\n  if (warp == mma_warp) ptx::tcgen05_dealloc",
        variant="pair",
    ),
    Mistake("P covers what dV reads", WIDE_SCORES, "wait_read(1);", variant="256"),
    Mistake("dS covers what dK and dQ read", WIDE_SCORES, "wait_read(0);", variant="256"),
    Mistake(
        "S covers S that nobody has read",
        WIDE,
        "wait_warps(kWidePReady, i);",
        variant="256",
    ),
    Mistake(
        "dP covers dP that nobody has read",
        WIDE,
        "wait_warps(kWideDsReady, i);",
        variant="256",
    ),
    Mistake(
        "a block has the columns of the other",
        WIDE,
        "kInRows ? 0 : rank * Tile::kHalfColumns",
        "kInRows ? 0 : (1 - rank) * Tile::kHalfColumns",
        variant="256",
    ),
]


@cache
def library(mistake: Mistake | None, variant: str) -> TestLibrary:
    """The kernel with one mistake, or without."""
    number = 0 if mistake is None else MISTAKES.index(mistake) + 1
    head_dim, head_dim_v, flags = VARIANTS[variant]
    name = f"sm100_bwd_{variant.replace('/', '_')}_{number}"
    return sm100_mistakes.library(
        name,
        "sm100_backward.cu",
        mistake,
        [f"-DHEAD_DIM={head_dim}", f"-DHEAD_DIM_V={head_dim_v}", *flags],
        ["common/bwd_preprocess.cu", "common/bwd_dbias.cu", "common/tensor_map.cpp"],
    )


class Gradients:
    """Inputs of two query heads on one KV head, and what is right."""

    rows, keys, heads = 300, 330, 2
    noise = 8  # columns of dQ

    def __init__(self, head_dim: int, head_dim_v: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        q = normal(self.rows, self.heads, head_dim)
        k, v = normal(self.keys, 1, head_dim), normal(self.keys, 1, head_dim_v)
        # dS of a row sums up to 0, so here dQ is what rounding leaves: the order of sums shows.
        q[..., : self.noise], k[..., : self.noise] = 0.0, 256.0
        dout = normal(self.rows, self.heads, head_dim_v)
        exact = [x.double().requires_grad_() for x in (q, k[:, 0], v[:, 0])]
        s = torch.einsum("qhd,kd->hqk", exact[0], exact[1]) * 0.125
        out = torch.einsum("hqk,kd->qhd", s.softmax(-1), exact[2])
        grads = torch.autograd.grad(out, exact, dout.double())
        self.expected = [g.reshape(x.shape).numpy() for g, x in zip(grads, (q, k, v), strict=True)]
        self.arrays = []
        for x in (q, k, v, out.detach().bfloat16(), dout):
            self.arrays.append(aligned(tuple(x.shape), np.int16))
            self.arrays[-1][:] = x.view(torch.int16).numpy()
        self.arrays.append(aligned((self.heads, self.rows), np.float32))
        self.arrays[-1][:] = s.detach().logsumexp(-1).numpy()
        self.dq_bits: np.ndarray | None = None

    def run(self, kernel: TestLibrary) -> str:
        """ "" if all is well, "wrong numbers", or the report. The first dQ sets the bits."""
        grads = [aligned(g.shape, np.int16) for g in self.expected]
        for g in grads:
            g[:] = -1
        kernel.warnings()
        try:
            kernel.backward(*self.arrays, *grads, self.rows, self.keys, self.heads, 1)
        except Failure as failure:
            return str(failure)
        if self.dq_bits is None:
            self.dq_bits = grads[0]
        right = np.array_equal(self.dq_bits, grads[0])
        for got, want in zip(grads, self.expected, strict=True):
            if want is self.expected[0]:
                got, want = got[..., self.noise :].copy(), want[..., self.noise :]
            found = torch.from_numpy(got).view(torch.bfloat16).double().numpy()
            right = right and bool(np.abs(found - want).max() <= 1e-2 * np.abs(want).max())
        return kernel.warnings() if right else "wrong numbers"


@cache
def gradients(variant: str) -> Gradients:
    """With the dQ of a kernel without mistakes."""
    case, kernel = Gradients(*VARIANTS[variant][:2]), library(None, variant)
    kernel.configure("random", 1, sms=3)
    assert case.run(kernel) == ""
    return case


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_without_a_mistake(variant: str, race: int) -> None:
    kernel = library(None, variant)
    for policy, seed in SCHEDULES[: 3 if race else None]:
        kernel.configure(policy, seed, sms=3, race=race)
        assert gradients(variant).run(kernel) == "", (policy, seed)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_caught(mistake: Mistake) -> None:
    variant = mistake.variant or "128"
    case, kernel = gradients(variant), library(mistake, variant)
    reports = []
    for policy, seed in SCHEDULES:
        for race in (0, 1):
            kernel.configure(policy, seed, sms=3, race=race)
            reports.append(case.run(kernel))
            if mistake.report in reports[-1] and reports[-1]:
                return
    pytest.fail(f"not caught, or not as {mistake.report!r}: {reports}")
