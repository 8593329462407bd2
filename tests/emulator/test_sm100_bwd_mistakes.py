"""Mistakes in the sources of the Blackwell backward kernel, of kinds that test_planted.py lacks."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from emulator.library import Recipe, build_recipe
from emulator.toolchain import CSRC, cache_folder

from .library import KERNELS, Failure, TestLibrary, aligned

pytestmark = pytest.mark.slow

SCHEDULES = [(policy, seed) for seed in range(1, 6) for policy in ("lazy", "random", "eager")]
# Of Q and V: dQ in tensor memory of its own, in dP's place, and everything in turns.
HEAD_DIMS = [(64, 64), (128, 128), (192, 128)]


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in a file of csrc/sm100; `report` are words that some report has."""

    name: str
    file: str
    old: str
    new: str = ""
    report: str = ""
    head_dims: tuple[int, int] = (128, 128)


KERNEL, SCORES, REDUCE, SMEM = (f"bwd_{x}.cuh" for x in ("kernel", "scores", "reduce", "smem"))
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
        head_dims=(192, 128),
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
]


@cache
def library(mistake: Mistake | None, head_dims: tuple[int, int]) -> TestLibrary:
    """The kernel with one mistake, or without."""
    number = 0 if mistake is None else MISTAKES.index(mistake) + 1
    name = f"sm100_bwd_{head_dims[0]}_{head_dims[1]}_{number}"
    folder = cache_folder() / "mistakes" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in (KERNELS / "sm100_backward.cu", KERNELS / "test_api.h"):
        shutil.copy(file, folder)
    for file in [*CSRC.glob("sm100/*.h"), *CSRC.glob("sm100/*.cuh")]:
        text = file.read_text()
        if mistake and mistake.file == file.name:
            assert mistake.old in text, f"{file.name} has no {mistake.old!r} any more"
            text = text.replace(mistake.old, mistake.new)
        # The neighbour, not the file in csrc/.
        (folder / file.name).write_text(text.replace('#include "sm100/', '#include "'))
    recipe = Recipe(
        name,
        "sm100",
        [folder / "sm100_backward.cu", CSRC / "common/bwd_preprocess.cu"],
        [CSRC / "common/tensor_map.cpp"],
        nvcc_flags=[f"-DHEAD_DIM={head_dims[0]}", f"-DHEAD_DIM_V={head_dims[1]}"],
    )
    return TestLibrary(build_recipe(recipe))


class Gradients:
    """Inputs of two query heads on one KV head, and what is right."""

    rows, keys, heads = 300, 330, 2
    noise = 8  # columns of dQ

    def __init__(self, head_dims: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        q = normal(self.rows, self.heads, head_dims[0])
        k, v = normal(self.keys, 1, head_dims[0]), normal(self.keys, 1, head_dims[1])
        # dS of a row sums up to 0, so here dQ is what rounding leaves: the order of sums shows.
        q[..., : self.noise], k[..., : self.noise] = 0.0, 256.0
        dout = normal(self.rows, self.heads, head_dims[1])
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
def gradients(head_dims: tuple[int, int]) -> Gradients:
    """With the dQ of a kernel without mistakes."""
    case, kernel = Gradients(head_dims), library(None, head_dims)
    kernel.configure("random", 1, sms=3)
    assert case.run(kernel) == ""
    return case


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize("head_dims", HEAD_DIMS)
def test_without_a_mistake(head_dims: tuple[int, int], race: int) -> None:
    kernel = library(None, head_dims)
    for policy, seed in SCHEDULES[: 3 if race else None]:
        kernel.configure(policy, seed, sms=3, race=race)
        assert gradients(head_dims).run(kernel) == "", (policy, seed)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_caught(mistake: Mistake) -> None:
    case, kernel = gradients(mistake.head_dims), library(mistake, mistake.head_dims)
    reports = []
    for policy, seed in SCHEDULES:
        for race in (0, 1):
            kernel.configure(policy, seed, sms=3, race=race)
            reports.append(case.run(kernel))
            if mistake.report in reports[-1] and reports[-1]:
                return
    pytest.fail(f"not caught, or not as {mistake.report!r}: {reports}")
