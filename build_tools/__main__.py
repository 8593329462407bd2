"""`python -m build_tools`: builds flash_cuda/_C in place, only what changed."""

from __future__ import annotations

import argparse
import sysconfig

from .build import build_library
from .messages import BuildError, fail
from .plan import ROOT


def main() -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(prog="python -m build_tools", description=__doc__)
    parser.parse_args()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    try:
        build_library(ROOT / "flash_cuda" / f"_C{suffix}")
    except BuildError as error:
        raise fail(error) from None


if __name__ == "__main__":
    main()
