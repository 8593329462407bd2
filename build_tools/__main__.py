"""Builds flash_cuda/_C in place, only what changed."""

from __future__ import annotations

import argparse
import sysconfig

from .build import build_library, compile_only, write_compile_commands
from .messages import BuildError, fail
from .plan import ROOT


def main() -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(
        prog="python -m build_tools",
        description=__doc__,
        epilog="FLASH_CUDA_ARCHS, CUDA_HOME, CXX, MAX_JOBS, FLASH_CUDA_STRICT: see README.md.",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PART",
        help="compile the files whose path contains PART, and don't link (may be repeated)",
    )
    parser.add_argument(
        "--compile-commands", action="store_true", help="write compile_commands.json instead"
    )
    arguments = parser.parse_args()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    try:
        if arguments.compile_commands:
            write_compile_commands(ROOT / "compile_commands.json")
        elif arguments.only:
            compile_only(arguments.only)
        else:
            build_library(ROOT / "flash_cuda" / f"_C{suffix}")
    except BuildError as error:
        raise fail(error) from None


if __name__ == "__main__":
    main()
