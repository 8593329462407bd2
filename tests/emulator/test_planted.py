"""Mistakes planted at the synchronising instructions of the real kernels: each has to be noticed.

By default at every site of the forward kernels of head dim 64, and at two of each kind in other
kernels; FLASH_CUDA_PLANT_EVERY_SITE=1 takes every site of those, too. See planting.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import emulator
from emulator.toolchain import ROOT

from .test_kernels import ARCHS

pytest.importorskip("flash_cuda")

LIMIT_S = 1700  # of a process, also on a busy machine; a mistake can make it hang
# Kinds that are wrong wherever they are planted. Of the others a site may be redundant (a fence
# after a fence, a barrier that only brings a warp together), but most are not.
ALWAYS_WRONG = (
    "parity",
    "bytes",
    "wgmma_wait",
    "bulk_wait",
    "cp_wait",
    "tmem_wait",
    "proxy_fence",
    "init_fence",
)
_EMPTY = "smem.work_ring().wait_empty(count + 1);"
_ANSWER = "ptx::mbarrier_arrive_expect_tx(smem.barrier(kAnswer), 16);"
# What cannot be noticed: kind, the source line and the next one.
UNOBSERVABLE = {
    # The kernel's last one: the sources have been read, and the end of a grid completes its writes.
    ("bulk_wait", "ptx::bulk_wait_group<0>();", "}"),
    # The loop before it, of at least one turn, has waited, and its last turn issues nothing.
    ("cp_wait", "ptx::cp_async_wait<0>();", "__syncthreads();  // the buffers of K and V are free"),
    # When a tile is drawn decides which block computes it, and how fast the whole is.
    *(
        (kind, "ptx::mbarrier_wait(smem.draw_barrier(), count % 2);", _EMPTY)
        for kind in ("parity", "mbarrier_wait")
    ),
    ("mbarrier_wait", "ptx::mbarrier_wait(smem.barrier(kNearEnd), tiles % 2);", _ANSWER),
}


def source_lines(source: str) -> list[str]:
    """The line outside of the wrappers in csrc/ptx and CUDA's headers, and the next one."""
    for place in source.split(", inlined at "):
        file, _, number = place.rpartition(":")
        if file.startswith("csrc/") and not file.startswith("csrc/ptx/"):
            lines = (ROOT / file).read_text().splitlines()
            return [line.strip() for line in lines[int(number) - 1 : int(number) + 1]]
    return []


def planted(arch: str) -> list[dict[str, str]]:
    command = [sys.executable, "-m", "tests.emulator.planting", arch]
    if "FLASH_CUDA_PLANT_EVERY_SITE" in os.environ:
        command.append("--every-site")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(LIMIT_S + 100)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_mistake_is_noticed(arch: str) -> None:
    emulator.build(arch)  # outside of the time limit
    tried = [x for x in planted(arch) if "site" in x]
    assert tried
    survivors = [
        (kind, f"{x['case']}: {x['site']}: {x['source']}")
        for x in tried
        if not x["noticed"]
        and ((kind := x["site"].split(":")[0]), *source_lines(x["source"])) not in UNOBSERVABLE
    ]
    shown = [text for _, text in survivors]
    print(f"{arch}: {len(tried)} mistakes; not noticed:", *shown, sep="\n  ")
    assert not [text for kind, text in survivors if kind in ALWAYS_WRONG], "\n".join(shown)
    assert len(survivors) <= len(tried) // 5, "\n".join(shown)
