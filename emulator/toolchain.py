"""Compilers and flags of the emulated libraries."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from build_tools.toolchain import find_gxx, find_nvcc, newest_gxx

from .errors import EmulatorBuildError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CSRC = ROOT / "csrc"

# -O1 halves the time of -O2 for kernels of thousands of registers and runs as fast. IEEE results
# need -ffp-contract=off: PTX says itself where a multiplication and an addition are fused.
KERNEL_FLAGS = [
    "-std=c++17",
    "-O1",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
]
RUNTIME_FLAGS = [
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
INDEX_FLAGS = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-w"]
# Of kernels that are objects of their own; their index exports what they name.
SEPARATE_FLAGS = ["-DPX_SEPARATE"]
SEPARATE_INDEX_FLAGS = ["-DPX_SEPARATE", "-fvisibility=default"]
HOST_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"]
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--keep",
    "-Wno-deprecated-gpu-targets",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]
# What nvcc is told to compile for; only PTX, so that ptxas has nothing to do.
PTX_TARGETS = {"sm80": "80", "sm90": "90a", "sm100": "100a", "sm120": "120"}


@dataclass(frozen=True)
class Tools:
    """Commands and versions; `key` identifies them and the CPU in cache keys."""

    gxx: tuple[str, ...]
    nvcc: Path
    cuda_include: Path
    key: str


def _cpu() -> str:
    """Model and features: objects made with -march=native do not move between CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


@cache
def find_tools() -> Tools:
    """Finds g++ and nvcc as the build does.

    Raises:
        EmulatorBuildError: without nvcc.
    """
    nvcc = find_nvcc(ROOT / "build" / "fetched" / "nvcc")
    if nvcc is None:
        raise EmulatorBuildError(
            "the emulator needs nvcc (only as a compiler): put it on PATH or set CUDA_HOME"
        )
    gxx = find_gxx(newest_gxx(nvcc.toolkit))
    text = f"{gxx.command} {gxx.version} {nvcc.version} {_cpu()}"
    return Tools(
        tuple(gxx.command), nvcc.path, nvcc.include, hashlib.sha256(text.encode()).hexdigest()
    )


def cache_folder() -> Path:
    """Where objects and libraries are kept: FLASH_CUDA_EMULATOR_CACHE or build/emulator."""
    return Path(
        os.environ.get("FLASH_CUDA_EMULATOR_CACHE") or ROOT / "build" / "emulator"
    ).resolve()


def run(command: list[str], what: str, folder: Path | None = None) -> None:
    """Runs a compiler, in `folder`.

    Raises:
        EmulatorBuildError: with the end of its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        lines = (done.stdout + done.stderr).splitlines()
        raise EmulatorBuildError(f"{what} failed:\n" + "\n".join(lines[:60]))
