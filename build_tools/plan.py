"""What is compiled into flash_cuda/_C: one Unit a source file, found by folder.

A new .cpp or .cu in a folder of csrc/ needs no edit here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import archs
from .toolchain import Gxx, Nvcc, Torch

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"

# Torch 2.10: the stable ABI of that version, which every later torch has too.
TORCH_TARGET_VERSION = "0x020a000000000000"

# First guesses of compile times, per target of a file; later builds know the last time.
SECONDS_PER_CODE = {"common": 0.5, "sm80": 7.0}
OTHER_SECONDS_PER_CODE = 10.0

# Generated, in a file of its own: a new commit compiles nothing else.
COMMIT_SOURCE = "generated/commit.cpp"

HOST_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The line tables quote the PTX: compressed, an object is a sixth of its size.
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "-Xfatbin=-compress-all", "-Xptxas=-v", "--keep"]
NVCC_FLAGS += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-Wno-deprecated-gpu-targets"]


@dataclass(frozen=True)
class Unit:
    """One compiler call: `command` makes `object` of `source`."""

    source: Path
    object: Path
    command: tuple[str, ...]
    identity: str  # equal means that the same compiler would do the same
    expected_seconds: float
    keep: Path | None = None  # nvcc's intermediate files, PTX among them

    @property
    def name(self) -> str:
        """The source's path as shown."""
        return str(self.source.relative_to(ROOT) if ROOT in self.source.parents else self.source)

    @property
    def depfile(self) -> Path:
        """The compiler's list of the headers that it read."""
        return self.object.with_suffix(".d")


@dataclass(frozen=True)
class Toolchain:
    """What was found to build with. Without `nvcc`, `archs` is empty and no kernel is built."""

    gxx: Gxx
    torch: Torch
    python_include: Path
    nvcc: Nvcc | None = None
    archs: tuple[int, ...] = ()
    cutlass: Path | None = None  # include folder
    strict: bool = False  # compiler warnings and slow kernels are errors


@dataclass
class Plan:
    """The units of the extension, and its link line."""

    units: list[Unit]
    folders: list[str]  # of kernels
    link_flags: list[str] = field(default_factory=list)


def make_plan(tools: Toolchain, build: Path) -> Plan:
    """Lists what to compile and link for these tools, with objects under `build`."""
    folders = archs.kernel_folders(CSRC, tools.archs) if tools.nvcc else []
    if folders:
        folders.insert(0, "common")
    units = [_kernel_unit(tools, s, f, build) for f in folders for s in _sources(f, ".cu")]
    host_sources = [CSRC / "torch_binding.cpp", CSRC / "module.cpp", *_sources("api", ".cpp")]
    host_sources += [source for folder in folders for source in _sources(folder, ".cpp")]
    host_sources.append(build / COMMIT_SOURCE)
    units += [_host_unit(tools, source, folders, build) for source in host_sources]
    # The longest first, so that no core waits for a late straggler.
    units.sort(key=lambda unit: (-unit.expected_seconds, unit.name))
    return Plan(units, folders, _link_flags(tools, folders))


def needs_cutlass(wanted: Sequence[int]) -> bool:
    """Whether a kernel that would be built includes headers of CUTLASS."""
    if "sm100" not in archs.kernel_folders(CSRC, wanted):
        return False
    files = [f for f in (CSRC / "sm100").iterdir() if f.suffix in (".cu", ".cuh", ".h")]
    return any("#include <cut" in file.read_text() for file in files)


def _sources(folder: str, suffix: str) -> list[Path]:
    return sorted((CSRC / folder).glob(f"*{suffix}"))


def _object(source: Path, build: Path) -> Path:
    base = build if build in source.parents else ROOT
    return build / "obj" / source.relative_to(base).with_suffix(".o")


def _kernel_unit(tools: Toolchain, source: Path, folder: str, build: Path) -> Unit:
    assert tools.nvcc is not None
    obj = _object(source, build)
    keep = obj.with_suffix(".keep")
    gencode = archs.gencode_flags(folder, tools.archs)
    command = [str(tools.nvcc.path), f"-ccbin={tools.gxx.command[-1]}", *NVCC_FLAGS]
    command += [f"--keep-dir={keep}", *gencode, f"-I{CSRC}"]
    if tools.cutlass and folder == "sm100":
        command += ["-isystem", str(tools.cutlass)]
    command += ["-MMD", "-MF", str(obj.with_suffix(".d")), "-c", str(source), "-o", str(obj)]
    identity = f"nvcc {tools.nvcc.version} g++ {tools.gxx.version} {' '.join(command[2:])}"
    codes = sum(flag.count(",") + 1 for flag in gencode)
    seconds = 3.0 + SECONDS_PER_CODE.get(folder, OTHER_SECONDS_PER_CODE) * codes
    return Unit(source, obj, tuple(command), identity, seconds, keep)


def _host_unit(tools: Toolchain, source: Path, folders: Sequence[str], build: Path) -> Unit:
    obj = _object(source, build)
    own = [*HOST_FLAGS, f"-I{CSRC}", f"-I{build / 'generated'}"]
    own += [f"-DFLASH_CUDA_WITH_{f.upper()}" for f in folders if f != "common"]
    seconds = 2.0
    system: list[Path] = []
    if tools.nvcc and folders:
        system.append(tools.nvcc.include)
    if source.name in ("torch_binding.cpp", "module.cpp"):
        # -isystem: warnings in other people's headers are theirs.
        api = tools.torch.include / "torch/csrc/api/include"
        system += [tools.torch.include, api, tools.python_include]
        seconds = 10.0
    if source.name == "torch_binding.cpp":
        own.append(f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}")
    own += ["-MMD", "-MF", str(obj.with_suffix(".d")), "-c", str(source), "-o", str(obj)]
    command = [*tools.gxx.command, *[w for folder in system for w in ("-isystem", str(folder))]]
    # Versions stand for the folders of headers: a build environment's own are at random paths.
    cuda = tools.nvcc.version if tools.nvcc else ""
    identity = f"g++ {tools.gxx.version} torch {tools.torch.version} cuda {cuda} "
    identity += f"{tools.python_include.name} {' '.join(own)}"
    return Unit(source, obj, (*command, *own), identity, seconds)


def _link_flags(tools: Toolchain, folders: Sequence[str]) -> list[str]:
    # No rpath: flash_cuda/__init__.py imports torch first, and the build's torch may be gone.
    flags = ["-shared", "-Wl,--exclude-libs,ALL"]
    flags += [f"-L{tools.torch.lib}", "-ltorch_cpu", "-lc10"]
    if folders and tools.nvcc:
        flags += [f"-L{tools.nvcc.lib}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    else:
        flags += ["-ldl"]
    return flags


def default_build_folder() -> Path:
    """`build/` in the source tree, or FLASH_CUDA_BUILD_DIR."""
    return Path(os.environ.get("FLASH_CUDA_BUILD_DIR") or ROOT / "build").resolve()
