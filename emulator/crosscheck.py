"""Runs kernels that are known to be right on hardware: CUTLASS's attention examples 77 and 88.

    pip install --no-deps nvidia-cutlass==4.2.0.0
    python -m emulator.crosscheck [NAME ...]

They test the emulator, not this project: its reading of PTX against code that others have run on
Hopper and Blackwell. All four take four minutes of a core, nearly all of it in nvcc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from build_tools.toolchain import find_cutlass

from .errors import EmulatorBuildError
from .library import Recipe, build_recipe
from .toolchain import HERE

# Program, architecture, folder of CUTLASS's examples, settings, arguments of the runs. The
# Blackwell examples read tcgen05.ld registers and hand over tcgen05.st data without waiting, as
# the hardware lets them; the backward also frees tensor memory while it is still read.
PROGRAMS = {
    "blackwell_gemm": ("sm100", "", "", (["256", "256", "512"],)),
    "ex77_fwd": ("sm100", "77_blackwell_fmha", "tmem_ld=issue,tmem_st=issue",
                 (["256", "256"], ["512", "640"])),
    "ex77_bwd": ("sm100", "77_blackwell_fmha", "tmem_ld=issue,tmem_st=issue,tmem=0",
                 (["256", "256"],)),
    "ex88_fwd": ("sm90", "88_hopper_fmha", "", (["256", "256"], ["512", "640"])),
}  # fmt: skip


def check(name: str) -> bool:
    """Builds and runs one program with every policy; returns whether all runs passed.

    Raises:
        EmulatorBuildError: CUTLASS is not there, or something does not compile.
    """
    arch, example, settings, runs = PROGRAMS[name]
    include = find_cutlass()
    if include is None:
        raise EmulatorBuildError(
            "CUTLASS's headers are not there: pip install --no-deps nvidia-cutlass==4.2.0.0"
        )
    source = include.parent
    folders = [include, source / "tools/util/include", source / "examples/common"]
    if example:
        folders.append(source / "examples" / example)
    flags = ["--expt-relaxed-constexpr", "--use_fast_math", *(f"-I{f}" for f in folders)]
    recipe = Recipe(
        name, arch, [HERE / "crosscheck" / f"{name}.cu"], nvcc_flags=flags, program=True
    )
    program = build_recipe(recipe)
    good = True
    for arguments in runs:
        for policy in ("eager", "lazy", "random"):
            text = f"policy={policy}" + ("," + settings if settings else "")
            started = time.monotonic()
            done = subprocess.run(
                [str(program), *arguments],
                capture_output=True,
                text=True,
                env={**os.environ, "FLASH_CUDA_EMULATOR": text},
            )
            passed = done.returncode == 0 and "PASS" in done.stdout
            good &= passed
            print(
                f"{name} {' '.join(arguments)} {text}: {'ok' if passed else 'FAILED'}, "
                f"{time.monotonic() - started:.1f} s",
                flush=True,
            )
            if not passed:
                print(done.stdout + done.stderr)
    return good


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m emulator.crosscheck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="*", choices=[*PROGRAMS, []], help=", ".join(PROGRAMS))
    arguments = parser.parse_args()
    try:
        results = [check(name) for name in arguments.name or PROGRAMS]
    except EmulatorBuildError as e:
        sys.exit(f"emulator: error: {e}")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
