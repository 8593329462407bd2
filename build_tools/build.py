"""The build of flash_cuda/_C from start to end, as setup.py and `python -m build_tools` call it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import archs, runner
from .jobs import job_count
from .messages import BuildError, duration, say
from .plan import ROOT, Plan, Toolchain, default_build_folder, make_plan
from .toolchain import (
    NVCC_WHEELS,
    Nvcc,
    check_platform,
    find_gxx,
    find_nvcc,
    newest_gxx,
    python_include,
    require_torch,
)


def find_tools() -> Toolchain:
    """Finds compilers and headers, and decides what to build for; says so."""
    check_platform()
    torch = require_torch()
    none_wanted = os.environ.get("FLASH_CUDA_ARCHS", "").strip().lower() == "none"
    nvcc = None if none_wanted else find_nvcc()
    wanted, why = archs.requested(nvcc is not None, torch.cuda is not None)
    if wanted and nvcc is None:
        raise BuildError(no_compiler_text(torch.cuda))
    if wanted and nvcc:
        wanted = archs.limit_to_toolkit(wanted, nvcc.toolkit, why == "FLASH_CUDA_ARCHS")
    gxx = find_gxx(newest_gxx(nvcc.toolkit) if wanted and nvcc else None)
    strict = os.environ.get("FLASH_CUDA_STRICT", "0") == "1"
    tools = Toolchain(gxx, torch, python_include(), nvcc if wanted else None, wanted, strict)
    say(f"g++ {gxx.version}, torch {torch.version} in {torch.include.parent}")
    say(kernels_line(wanted, why, nvcc))
    return tools


def no_compiler_text(torch_cuda: str | None) -> str:
    """The line for kernels that are wanted where no nvcc is."""
    if torch_cuda and torch_cuda.startswith("12"):
        return (
            f"no nvcc found, and torch is built for CUDA {torch_cuda}; install a CUDA toolkit 12.8"
            " or 12.9 and set CUDA_HOME (or FLASH_CUDA_ARCHS=none for the CPU engine alone)"
        )
    wheels = " ".join(f"'{wheel}'" for wheel in NVCC_WHEELS)
    return (
        f"no nvcc found; set CUDA_HOME, or pip install {wheels} (or FLASH_CUDA_ARCHS=none for the"
        " CPU engine alone)"
    )


def kernels_line(wanted: tuple[int, ...], why: str, nvcc: Nvcc | None) -> str:
    """What will be built of the kernels, why, and by which compiler."""
    if not wanted:
        return (
            f"no GPU kernels ({why}): the CPU engine alone. For kernels: FLASH_CUDA_ARCHS=all"
            " (or 80, 90, 100, ...) with CUDA_HOME set or nvcc on PATH"
        )
    assert nvcc is not None
    names = ", ".join(f"{arch / 10}" for arch in wanted)
    return f"kernels for {names} ({why}); nvcc {nvcc.version} in {nvcc.path} ({nvcc.found_by})"


@contextmanager
def _lock(build: Path) -> Iterator[None]:
    """One build at a time in a folder; a second one waits."""
    build.mkdir(parents=True, exist_ok=True)
    with (build / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build in {build}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_library(out: Path) -> None:
    """Compiles what changed, links it and copies it to `out`."""
    started = time.time()
    tools = find_tools()
    build = default_build_folder()
    with _lock(build):
        plan = make_plan(tools, build)
        write_build_info(tools, plan, build / "generated/build_info.h")
        stale = [unit for unit in plan.units if not runner.is_current(unit)]
        if stale:
            jobs = min(job_count(), len(stale))
            seconds = sum(runner.expected_seconds(unit) for unit in stale) / jobs
            say(f"compiling {len(stale)} of {len(plan.units)} files, {jobs} at a time:"
                f" about {duration(seconds)}")
            runner.compile_all(stale, jobs)
        library = build / "lib" / out.name
        objects = [unit.object for unit in plan.units]
        linked = runner.link(objects, tools.gxx.command, plan.link_flags, library)
        out.parent.mkdir(parents=True, exist_ok=True)
        if linked or not out.exists() or out.stat().st_mtime_ns < library.stat().st_mtime_ns:
            partial = out.with_suffix(f".{os.getpid()}.tmp")
            shutil.copy(library, partial)
            partial.replace(out)
    say(f"built {out.name} in {duration(time.time() - started)}")


def commit() -> str:
    """The commit of the source tree, "" if it is not a git checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
            check=True, capture_output=True, text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def write_build_info(tools: Toolchain, plan: Plan, header: Path) -> None:
    """Writes the macros that `_C.build_info()` reports; leaves an equal file untouched."""
    codes = [
        f"{folder}:{code}"
        for folder in plan.folders
        if folder != "common"
        for code in archs.folder_codes(folder, tools.archs)
    ]
    nvcc = tools.nvcc if plan.folders else None
    values = {
        "ARCHS": ",".join(map(str, tools.archs if plan.folders else ())),
        "CODES": ",".join(codes),
        "NVCC": nvcc.version if nvcc else "",
        "CUDART": ".".join(map(str, nvcc.toolkit)) if nvcc else "",
        "TORCH": tools.torch.version,
        "COMMIT": commit(),
    }
    lines = ["// Generated by build_tools/build.py.", "#pragma once"]
    lines += [f'#define FLASH_CUDA_BUILD_{name} "{value}"' for name, value in values.items()]
    text = "\n".join(lines) + "\n"
    if not header.exists() or header.read_text() != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
