"""Mistakes planted at every synchronising instruction of the real forward kernels.

The emulator leaves an instruction out, or does it wrong, at one site at a time; nothing is
compiled anew. A mistake counts as caught if a policy stops the kernel or makes the numbers wrong,
or if the race check names it.
"""

from __future__ import annotations

import os

import pytest
import torch

import emulator

from .test_kernels import ARCHS, inputs, reference

flash_cuda = pytest.importorskip("flash_cuda")

RUNS = (
    "policy=random,seed=1,race=1",
    "policy=eager,seed=1,race=0",
    "policy=lazy,seed=1,race=0",
    "policy=random,seed=2,race=0",
)
# Wrong wherever it is planted. Of the other kinds a site may be redundant on this shape (a fence
# after a fence, the release of a stage that nobody fills again), but most are not.
ALWAYS_WRONG = (
    "parity",
    "bytes",
    "wgmma_wait",
    "bulk_wait",
    "cp_wait",
    "proxy_fence",
    "init_fence",
)


class Case:
    """A causal forward call with ragged lengths, and one SM: a block reuses its buffers."""

    def __init__(self, arch: str) -> None:
        torch.manual_seed(0)
        self.arch = arch
        self.q, self.k, self.v = inputs((300, 500), 64)
        wide = [x.repeat_interleave(2, 2) for x in (self.k, self.v)]
        self.expected = reference(self.q, *wide, True)

    def run(self, settings: str) -> str:
        """ "" if nothing is noticed, else the first line of what is."""
        emulator.configure(self.arch, settings + ",sms=1")
        try:
            with flash_cuda.use_kernel(f"emulated:{self.arch}"):
                out = flash_cuda.attention(self.q, self.k, self.v, causal=True)
        except RuntimeError as e:
            return str(e).splitlines()[0]
        right = (out.double() - self.expected).abs().max() <= 3e-2
        return "" if right else "wrong numbers"


# Hundreds of faults in one process: it takes minutes, and once a thread did not start afterwards.
# sm100's mistakes are planted in its sources: test_sm100_mistakes.py.
@pytest.mark.skipif(
    "FLASH_CUDA_PLANT_EVERY_SITE" not in os.environ,
    reason="set FLASH_CUDA_PLANT_EVERY_SITE=1: minutes, and better alone in its process",
)
@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm100"])
def test_every_site(arch: str) -> None:
    emulator.load(arch)
    case = Case(arch)
    try:
        assert case.run("policy=random,seed=1,plant=observe") == ""
        sites = emulator.plantable(arch)
        assert sites
        survivors = []
        for site in sites:
            if not any(case.run(f"{run},plant={site}") for run in RUNS):
                survivors.append(site)
        kinds = sorted({s.split(":")[0] for s in sites})
        print(
            f"{arch}: {len(sites)} mistakes of kinds {', '.join(kinds)}; not noticed: {survivors}"
        )
        assert not [s for s in survivors if s.split(":")[0] in ALWAYS_WRONG], survivors
        assert len(survivors) <= len(sites) // 4, survivors
        for run in RUNS:
            assert case.run(f"{run},plant=nothing") == ""
    finally:
        emulator.configure(arch, "policy=random,seed=1,sms=4,race=0,plant=nothing")
