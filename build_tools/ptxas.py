"""Reads ptxas's report of each kernel, and finds what would make a kernel slow without an error.

A spill that is meant is declared in the .cu file that has it, with its limit and its reason:

    // build: spills allowed in bwd_kernel up to 64 bytes: the general variant of head_dim 256

where the name is part of the kernel's demangled name.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_WGMMA = re.compile(r"\(C75\d\d\)")
_ALLOWED = re.compile(r"^// build: spills allowed in (\S+) up to (\d+) bytes: \S", re.M)


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel for one target."""

    name: str
    code: str  # "sm_90a"
    registers: int = 0
    stack: int = 0  # bytes
    spill_stores: int = 0  # bytes
    spill_loads: int = 0  # bytes
    smem: int = 0  # static shared memory, bytes


def parse(log: str) -> list[Kernel]:
    """The kernels of a compiler's log, with mangled names."""
    kernels: list[Kernel] = []
    for line in log.splitlines():
        entry, frame, used = _ENTRY.search(line), _FRAME.search(line), _USED.search(line)
        if entry:
            kernels.append(Kernel(entry[1], entry[2]))
        elif frame and kernels:
            stack, stores, loads = map(int, frame.groups())
            kernels[-1] = replace(kernels[-1], stack=stack, spill_stores=stores, spill_loads=loads)
        elif used and kernels:
            kernels[-1] = replace(kernels[-1], registers=int(used[1]), smem=int(used[2] or 0))
    return kernels


def demangle(names: Sequence[str]) -> list[str]:
    """C++ names of mangled ones; as they are where c++filt is missing."""
    try:
        done = subprocess.run(
            ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return list(names)
    return done.stdout.splitlines()


def serialized_wgmma(log: str) -> list[str]:
    """Lines by which ptxas says that it made wgmma wait: info to ptxas, a fault to us."""
    return [line.strip() for line in log.splitlines() if _WGMMA.search(line)]


def faults(source: Path, log: str) -> list[str]:
    """What is wrong with the kernels of one file, a line each: serialized wgmma and spills."""
    found = serialized_wgmma(log)
    spilling = [k for k in parse(log) if k.spill_stores or k.spill_loads]
    if spilling:
        allowed = [(name, int(limit)) for name, limit in _ALLOWED.findall(source.read_text())]
        for kernel, name in zip(spilling, demangle([k.name for k in spilling]), strict=True):
            spilled = max(kernel.spill_stores, kernel.spill_loads)
            if spilled > _limit(name, allowed):
                found.append(f"{name} spills {spilled} bytes for {kernel.code}")
    return [f"{source.name}: {line}" for line in found]


def _limit(name: str, allowed: Iterable[tuple[str, int]]) -> int:
    return max((limit for part, limit in allowed if part in name), default=0)
