"""Builds emulated libraries and prints their paths: `python -m emulator.build sm90`."""

from __future__ import annotations

import argparse
import sys

from .errors import EmulatorBuildError
from .library import architectures, build


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m emulator.build", description=__doc__)
    parser.add_argument("arch", nargs="*", help="sm80, sm90, ...; by default all that have kernels")
    parser.add_argument("--jobs", type=int, help="compilers at a time")
    parser.add_argument(
        "--no-kernels", action="store_true", help="leaves each kernel to its first launch"
    )
    arguments = parser.parse_args()
    try:
        for arch in arguments.arch or architectures():
            print(build(arch, jobs=arguments.jobs, kernels=not arguments.no_kernels))
    except (EmulatorBuildError, ValueError) as e:
        sys.exit(f"emulator: error: {e}")


if __name__ == "__main__":
    main()
