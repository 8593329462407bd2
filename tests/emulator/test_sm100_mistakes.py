"""Mistakes planted in the Blackwell forward kernel: every barrier and fence has to be missed."""

from __future__ import annotations

import os
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

SCHEDULES = [(policy, seed) for seed in (1, 2, 3) for policy in ("lazy", "random", "eager")]


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in a file of csrc/sm100; `report` are words that some report has."""

    name: str
    file: str
    old: str
    new: str = ""
    report: str = ""
    head_dim: int = 64
    keys: int = 1500


LOAD, SOFTMAX, CORRECTION = "fwd_kernel.cuh", "fwd_softmax.cuh", "fwd_correction.cuh"
MMA = STORE = KERNEL = LOAD
MISTAKES = [
    Mistake("load ignores the ring's empty barriers", LOAD, "ring.wait_empty(panels);"),
    Mistake(
        "load ignores Q's empty barrier",
        LOAD,
        "ptx::mbarrier_wait(smem.barrier(kQEmpty, tile), used % 2 ^ 1);",
    ),
    Mistake("too few bytes of Q", LOAD, "full, Tile::kQTileBytes)", "full, 16)"),
    Mistake("MMA does not wait for K", MMA, "if (first) ring.wait_full(panels + panel);"),
    Mistake(
        "MMA does not wait for Q", MMA, "ptx::mbarrier_wait(smem.barrier(kQFull, tile), used % 2);"
    ),
    Mistake(
        "MMA does not wait for P",
        MMA,
        "ptx::mbarrier_wait(smem.barrier(kPReady, slot), phase_of<Tile>(blocks));",
    ),
    Mistake(
        "K is released at issue",
        MMA,
        "if (last) ptx::tcgen05_commit(ring.empty(panels + panel));",
        "if (last) ptx::mbarrier_arrive(ring.empty(panels + panel));",
    ),
    Mistake(
        "V is released at issue",
        MMA,
        "        ptx::tcgen05_commit(ring.empty(panels + panel));\n      }\n      panels +=",
        "        ptx::mbarrier_arrive(ring.empty(panels + panel));\n      }\n      panels +=",
    ),
    Mistake(
        "Q is released at issue",
        MMA,
        "ptx::tcgen05_commit(smem.barrier(kQEmpty, tile))",
        "ptx::mbarrier_arrive(smem.barrier(kQEmpty, tile))",
    ),
    Mistake(
        "S is announced at issue",
        MMA,
        "ptx::tcgen05_commit(smem.barrier(kSFull, slot))",
        "ptx::mbarrier_arrive(smem.barrier(kSFull, slot))",
    ),
    Mistake(
        "O is announced at issue",
        MMA,
        "ptx::tcgen05_commit(smem.barrier(kOFull, t))",
        "ptx::mbarrier_arrive(smem.barrier(kOFull, t))",
    ),
    Mistake("the first product accumulates", MMA, "issue_pv(0, i > 1,", "issue_pv(0, true,"),
    Mistake(
        "softmax does not wait for S",
        SOFTMAX,
        "ptx::mbarrier_wait(smem.barrier(kSFull, slot), phase_of<Tile>(blocks));",
    ),
    Mistake("softmax does not wait for its loads", SOFTMAX, "ptx::tcgen05_wait_ld();"),
    Mistake("P is announced before it is stored", SOFTMAX, "ptx::tcgen05_wait_st();"),
    Mistake(
        "correction does not wait for the scale",
        CORRECTION,
        "ptx::mbarrier_wait(smem.barrier(kScaleFull, slot), phase_of<Tile>(blocks));",
    ),
    Mistake(
        "O is announced before it is scaled",
        CORRECTION,
        "ptx::tcgen05_wait_st();",
    ),
    Mistake(
        "softmax overwrites sums that nobody has read",
        SOFTMAX,
        "ptx::mbarrier_wait(smem.barrier(kRowTaken, tile), used % 2 ^ 1);",
        keys=100,
    ),
    Mistake(
        "correction does not wait for the last O",
        CORRECTION,
        "ptx::mbarrier_wait(smem.barrier(kOFull, t), (Tile::",
        "(void)((Tile::",
    ),
    Mistake(
        "correction does not wait for O before it scales",
        CORRECTION,
        "ptx::mbarrier_wait(smem.barrier(kOFull, t), (blocks - 1) % 2);",
        head_dim=256,
    ),
    Mistake(
        "staging memory is written too early",
        CORRECTION,
        "ptx::mbarrier_wait(smem.barrier(kOutEmpty, t), used % 2 ^ 1);",
    ),
    Mistake(
        "no proxy fence before the store",
        CORRECTION,
        "ptx::fence_proxy_async_shared();",
        report="fence.proxy.async",
    ),
    Mistake(
        "store does not wait for O",
        STORE,
        "ptx::mbarrier_wait(smem.barrier(kOutFull, t), used % 2);",
    ),
    Mistake(
        "store releases its memory at issue",
        STORE,
        "if (Tile::kTilesQ == 2 && t == 0) {\n        ptx::bulk_wait_group_read<1>();\n"
        "      } else {\n        ptx::bulk_wait_group_read<0>();\n      }\n",
    ),
    Mistake(
        "Q's memory is released before O is stored",
        STORE,
        "ptx::bulk_wait_group_read<0>();\n",
        head_dim=256,
    ),
    Mistake("the scheduler overwrites work", KERNEL, "ring.wait_empty(tiles);"),
    Mistake(
        "the scheduler does not wait for the answer",
        KERNEL,
        "ptx::mbarrier_wait(smem.barrier(kAnswer), tiles % 2);",
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
    ),
    Mistake(
        "tensor memory is freed under its readers",
        KERNEL,
        "  ptx::tcgen05_fence_before_thread_sync();\n  __syncthreads();\n  if (warp == kMmaWarp) {",
        "  if (warp == kMmaWarp) {",
    ),
]


@cache
def library(mistake: Mistake | None, head_dim: int) -> TestLibrary:
    """The kernel with one mistake, or without."""
    number = 0 if mistake is None else MISTAKES.index(mistake) + 1
    folder = cache_folder() / "mistakes" / f"sm100_{head_dim}_{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in (KERNELS / "sm100_forward.cu", KERNELS / "test_api.h"):
        shutil.copy(file, folder)
    for file in [*CSRC.glob("sm100/*.h"), *CSRC.glob("sm100/*.cuh")]:
        text = file.read_text()
        if mistake and mistake.file == file.name:
            assert mistake.old in text, f"{file.name} has no {mistake.old!r} any more"
            text = text.replace(mistake.old, mistake.new)
        # The neighbour, not the file in csrc/.
        (folder / file.name).write_text(text.replace('#include "sm100/', '#include "'))
    recipe = Recipe(
        f"sm100_{head_dim}_{number}",
        "sm100",
        [folder / "sm100_forward.cu"],
        [CSRC / "common/tensor_map.cpp"],
        nvcc_flags=[f"-DHEAD_DIM={head_dim}"],
    )
    return TestLibrary(build_recipe(recipe))


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


@pytest.mark.skipif(
    "FLASH_CUDA_PLANT_EVERY_SITE" not in os.environ,
    reason="set FLASH_CUDA_PLANT_EVERY_SITE=1: minutes, and better alone in its process",
)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_caught(mistake: Mistake) -> None:
    kernel = library(mistake, mistake.head_dim)
    reports = []
    for policy, seed in SCHEDULES:
        kernel.configure(policy, seed, sms=2)
        reports.append(attention(mistake.head_dim, mistake.keys).run(kernel))
        if mistake.report in reports[-1] and reports[-1]:
            return
    pytest.fail(f"not caught, or not as {mistake.report!r}: {reports}")
