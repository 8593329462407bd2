"""Planted mistakes: each must be caught by at least one policy, and most are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from .library import Failure, aligned, load

POLICIES = ("eager", "lazy", "random")
SEEDS = (1, 2, 3)

# Number in pipeline.cu, what is wrong, and words of which some policy's report must have one.
# None: the numbers are wrong, no more can be known.
PIPELINE = [
    (1, "the producer ignores the empty barrier", "more arrivals|deadlock|out of range"),
    (2, "the consumer ignores the full barrier", None),
    (3, "wrong parity in the producer", "deadlock"),
    (4, "wrong parity in the consumer", None),
    (5, "too few transaction bytes", "deadlock"),
    (6, "too many transaction bytes", "deadlock"),
    (7, "the empty barrier expects two arrivals", "deadlock"),
    (8, "the stage is released before wgmma has read it", None),
    (9, "no wgmma.wait_group", "in flight"),
    (10, "no wgmma.fence", "without a wgmma.fence"),
    (11, "no fence.proxy.async before the bulk store", "without a fence.proxy.async"),
    (12, "no wait_group.read before the staging buffer is written again", None),
    (13, "wgmma.wait_group by one warp of the warpgroup", "some warps of the warpgroup"),
    (14, "no fence after mbarrier.init", "fence.mbarrier_init"),
    (15, "the first wgmma accumulates", None),
    (16, "no barrier between the writers and the bulk store", None),
    (17, "no wait for the last bulk store", "may still read its shared memory"),
    (18, "a warp skips the barrier of its group", "deadlock"),
    (19, "the wrong stage is read", None),
    (20, "no wgmma.commit_group", "in flight"),
]  # fmt: skip


class Gemm:
    """The inputs and the right answer of pipeline.cu."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rows, self.columns, self.depth, self.blocks = 128, 192, 256, 2
        a = torch.randn(self.rows, self.depth).bfloat16()
        b = torch.randn(self.columns, self.depth).bfloat16()
        self.a, self.b = aligned(a.shape, np.int16), aligned(b.shape, np.int16)
        self.a[:] = a.view(torch.int16).numpy()
        self.b[:] = b.view(torch.int16).numpy()
        product = (a.double() @ b.double().T).numpy()
        self.expected = product.reshape(2, 64, 3, 64).transpose(0, 2, 1, 3)

    def run(self, library: Any, mistake: int) -> str:
        """ "" if all is well, "wrong numbers", or the report."""
        out = aligned(self.expected.shape, np.float32)
        out[:] = np.nan
        library.warnings()
        try:
            library.pipeline(
                self.a, self.b, out, self.rows, self.columns, self.depth, self.blocks, mistake
            )
        except Failure as e:
            return str(e)
        wrong = not np.abs(out - self.expected).max() < 1e-3
        return "wrong numbers" if wrong else library.warnings()


@pytest.fixture(scope="module")
def gemm() -> Gemm:
    return Gemm()


@pytest.mark.parametrize("race", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_right_pipeline(gemm: Gemm, policy: str, race: int) -> None:
    library = load("pipeline")
    for seed in SEEDS:
        library.configure(policy, seed, race=race)
        assert gemm.run(library, 0) == ""


@pytest.mark.parametrize(("mistake", "what", "words"), PIPELINE, ids=[w for _, w, _ in PIPELINE])
def test_pipeline_mistake(gemm: Gemm, mistake: int, what: str, words: str | None) -> None:
    library = load("pipeline")
    found = set()
    for policy in POLICIES:
        for seed in SEEDS:
            library.configure(policy, seed)
            found.add(gemm.run(library, mistake))
    found.discard("")
    assert found, f"not caught: {what}"
    if words:
        reports = "\n".join(found)
        assert any(w in reports for w in words.split("|")), reports
    library.configure()
    assert gemm.run(library, 0) == "", "the next launch must be sound"


# A race must be named even when the numbers are right: no schedule has to go wrong for it.
PIPELINE_RACES = [2, 4, 8, 12, 16]


@pytest.mark.parametrize("mistake", PIPELINE_RACES, ids=lambda m: PIPELINE[m - 1][1])
def test_race_check_names_it(gemm: Gemm, mistake: int) -> None:
    library = load("pipeline")
    reports = []
    for policy in POLICIES:
        library.configure(policy, 1, race=1)
        reports.append(gemm.run(library, mistake))
    assert any("race:" in r for r in reports), reports


def test_report(gemm: Gemm) -> None:
    library = load("pipeline")
    library.configure("lazy", 7, sms=3)
    report = gemm.run(library, 3)
    for part in (
        "deadlock in an emulated kernel",
        "pipeline_kernel",
        "block     (0,0,0) of grid (2,1,1)",
        "warp 4, lane 0",
        "tests/emulator/kernels/pipeline.cu:",
        "inlined at tests/emulator/kernels/pipeline.cu:",
        ".ptx:",
        "waits for mbarrier shared+0x",
        "parity 0; it has phase 0, 1 of 1 arrivals and 0 bytes missing",
        "FLASH_CUDA_EMULATOR=policy=lazy,seed=7,sms=3",
        "test_mistakes.py::test_report",
    ):
        assert part in report, f"{part!r} is not in\n{report}"
