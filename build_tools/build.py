"""The build of flash_cuda/_C from start to end, as setup.py and `python -m build_tools` call it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from . import archs, plan, ptxas, runner
from .fetch import fetch
from .jobs import job_count
from .messages import BuildError, duration, say
from .plan import ROOT, Plan, Toolchain, Unit, default_build_folder
from .toolchain import (
    CUTLASS_WHEEL_INCLUDE,
    Nvcc,
    check_platform,
    find_cutlass,
    find_gxx,
    find_nvcc,
    newest_gxx,
    python_include,
    require_torch,
)


def find_tools(build: Path) -> Toolchain:
    """Finds compilers and headers, fetches what lacks, and says what will be built."""
    torch = require_torch()
    none_wanted = os.environ.get("FLASH_CUDA_ARCHS", "").strip().lower() == "none"
    nvcc = None if none_wanted else find_nvcc(build / "fetched/nvcc")
    wanted, why = archs.requested(nvcc is not None, torch.cuda is not None)
    if wanted and nvcc is None and archs.kernel_folders(plan.CSRC, wanted):
        nvcc = _fetch_nvcc(torch.cuda, build)
    if nvcc:
        wanted = archs.limit_to_toolkit(wanted, nvcc.toolkit, why == "FLASH_CUDA_ARCHS")
    gxx = find_gxx(newest_gxx(nvcc.toolkit) if wanted and nvcc else None)
    strict = os.environ.get("FLASH_CUDA_STRICT", "0") == "1"
    tools = Toolchain(gxx, torch, python_include(), nvcc if wanted else None, wanted, strict=strict)
    say(f"g++ {gxx.version}, torch {torch.version} in {torch.include.parent}")
    say(kernels_line(tools, why))
    if wanted and nvcc:
        _warn_of_old_driver(nvcc)
    if plan.needs_cutlass(wanted):
        tools = replace(tools, cutlass=find_cutlass() or _fetch_cutlass(build))
    return tools


def _fetch_nvcc(torch_cuda: str | None, build: Path) -> Nvcc:
    if torch_cuda and torch_cuda.startswith("12"):
        raise BuildError(
            f"no nvcc found, and torch is built for CUDA {torch_cuda}: install a CUDA toolkit 12.8"
            " or 12.9 and set CUDA_HOME (or FLASH_CUDA_ARCHS=none for the CPU engine alone)"
        )
    nvcc = find_nvcc(fetch("nvcc", 105, build))
    assert nvcc is not None
    return nvcc


def _fetch_cutlass(build: Path) -> Path:
    return fetch("cutlass", 7, build) / CUTLASS_WHEEL_INCLUDE


def _warn_of_old_driver(nvcc: Nvcc) -> None:
    driver = archs.driver_cuda()
    if driver and driver[0] < nvcc.toolkit[0]:
        say(
            f"warning: the driver serves CUDA up to {driver[0]}.{driver[1]}, and kernels of nvcc"
            f" {nvcc.version} need {nvcc.toolkit[0]}.0; update the driver, or set CUDA_HOME to an"
            " older toolkit"
        )


def kernels_line(tools: Toolchain, why: str) -> str:
    """What will be built of the kernels, why, and by which compiler."""
    if not tools.archs:
        return (
            f"no GPU kernels ({why}): the CPU engine alone. For kernels: FLASH_CUDA_ARCHS=all"
            f" (or some of {', '.join(map(str, archs.CAPABILITIES))})"
        )
    names = ", ".join(f"{arch / 10}" for arch in tools.archs)
    if tools.nvcc is None:
        return f"kernels for {names} ({why})"
    nvcc = tools.nvcc
    return f"kernels for {names} ({why}); nvcc {nvcc.version}: {nvcc.path} (by {nvcc.found_by})"


@contextmanager
def _lock(build: Path) -> Iterator[None]:
    """One build at a time in a folder; a second one waits."""
    import fcntl  # not at the top: where there is none, check_platform() has the clear words

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
    check_platform()
    build = default_build_folder()
    with _lock(build):
        tools = find_tools(build)
        whole = plan.make_plan(tools, build)
        write_build_info(tools, whole, build)
        _compile_stale(whole.units, build)
        _check_logs(whole.units, tools.strict)
        library = build / "lib" / out.name
        objects = [unit.object for unit in whole.units]
        linked = runner.link(objects, tools.gxx.command, whole.link_flags, library)
        if linked or not out.exists() or out.stat().st_mtime_ns < library.stat().st_mtime_ns:
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_suffix(f".{os.getpid()}.tmp")
            shutil.copy(library, partial)
            partial.replace(out)
    megabytes = out.stat().st_size / 1e6
    say(f"{out.name}: {megabytes:.1f} MB, built in {duration(time.time() - started)}")


def compile_only(patterns: Sequence[str]) -> None:
    """Compiles the files whose path contains one of the patterns, and links nothing."""
    check_platform()
    build = default_build_folder()
    with _lock(build):
        tools = find_tools(build)
        whole = plan.make_plan(tools, build)
        write_build_info(tools, whole, build)
        units = [u for u in whole.units if any(pattern in u.name for pattern in patterns)]
        if not units:
            raise BuildError(f"no source file of this build matches {' or '.join(patterns)}")
        _compile_stale(units, build)
        _check_logs(units, tools.strict)


def write_compile_commands(out: Path) -> None:
    """Writes the compiler calls for editors and clang-tidy."""
    build = default_build_folder()
    tools = find_tools(build)
    whole = plan.make_plan(tools, build)
    entries = [
        {"directory": str(ROOT), "file": str(unit.source), "arguments": list(unit.command)}
        for unit in whole.units
    ]
    out.write_text(json.dumps(entries, indent=1) + "\n")
    say(f"wrote {out.name}: {len(entries)} files")


def _compile_stale(units: Sequence[Unit], build: Path) -> None:
    stale = [unit for unit in units if not runner.is_current(unit)]
    if not stale:
        return
    jobs = min(job_count(), len(stale))
    seconds = runner.expected_wall_seconds(stale, jobs)
    say(
        f"compiling {len(stale)} of {len(units)} files, {jobs} at a time: about {duration(seconds)}"
    )
    runner.compile_all(stale, jobs)
    _report(stale, units, build)


def _report(compiled: Sequence[Unit], units: Sequence[Unit], build: Path) -> None:
    """Says time and size of each file that was compiled; writes all that is known to a file."""
    entries = []
    for unit in units:
        stamp = runner.read_stamp(unit)
        if stamp:
            kernels = [asdict(kernel) for kernel in ptxas.parse(stamp.log)]
            entries.append(
                {
                    "file": unit.name,
                    "seconds": round(stamp.seconds, 2),
                    "bytes": stamp.size,
                    "kernels": kernels,
                }
            )
    (build / "report.json").write_text(json.dumps(entries, indent=1) + "\n")
    names = {unit.name for unit in compiled}
    say("  seconds       kB  file")
    for entry in sorted(entries, key=lambda e: -e["seconds"]):  # type: ignore[operator]
        if entry["file"] in names:
            say(f"{entry['seconds']:9.1f} {entry['bytes'] // 1000:8}  {entry['file']}")  # type: ignore[operator]


def _check_logs(units: Sequence[Unit], strict: bool) -> None:
    """Compiler warnings, spills and serialized wgmma: errors if strict, else a line each.

    They are read from the logs, so that being strict or not compiles nothing anew.
    """
    found: list[str] = []
    for unit in units:
        stamp = runner.read_stamp(unit)
        if stamp:
            found += runner.warnings(stamp.log)
            found += ptxas.faults(unit.source, stamp.log) if unit.source.suffix == ".cu" else []
    if found and strict:
        raise BuildError("not clean, and FLASH_CUDA_STRICT=1:\n  " + "\n  ".join(found))
    for line in found:
        say(f"not clean: {line}")


def commit() -> str:
    """The commit of the source tree; of an sdist, the one that it was made from; else ""."""
    noted = ROOT / ".commit"
    if noted.exists():
        return noted.read_text().strip()
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def write_build_info(tools: Toolchain, whole: Plan, build: Path) -> None:
    """Writes what `_C.build_info()` reports: macros, and the commit as a constant."""
    codes = [
        f"{folder}:sm_{code}"
        for folder in whole.folders
        if folder != "common"
        for code in archs.folder_codes(folder, tools.archs)
    ]
    nvcc = tools.nvcc if whole.folders else None
    values = {
        "ARCHS": ",".join(map(str, tools.archs if nvcc else ())),
        "CODES": ",".join(codes),
        "NVCC": nvcc.version if nvcc else "",
        "CUDART": ".".join(map(str, nvcc.toolkit)) if nvcc else "",
        "TORCH": tools.torch.version,
    }
    macros = [f'#define FLASH_CUDA_BUILD_{name} "{value}"' for name, value in values.items()]
    constant = "flash_cuda_build_commit"
    header = [
        "// Generated by build_tools/build.py.",
        "#pragma once",
        f"extern const char* const {constant};",
        *macros,
        f"#define FLASH_CUDA_BUILD_COMMIT {constant}",
    ]
    _write_if_changed(build / "generated/build_info.h", header)
    source = ['#include "build_info.h"', f'const char* const {constant} = "{commit()}";']
    _write_if_changed(build / plan.COMMIT_SOURCE, source)


def _write_if_changed(path: Path, lines: Sequence[str]) -> None:
    """An equal file keeps its time, so that nothing is compiled again."""
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
