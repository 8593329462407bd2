#!/usr/bin/env python3
"""Writes the support table of README.md anew, from the dispatch table of the installed build.

    python tools/feature_table.py           # rewrite README.md
    python tools/feature_table.py --check   # exit 1 if README.md is out of date

The build must have the kernels of every folder (FLASH_CUDA_ARCHS=all); no GPU is needed.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from flash_cuda import _support

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
_BLOCK = re.compile(re.escape(BEGIN) + r".*?" + re.escape(END), re.DOTALL)


def folders() -> list[str]:
    """The folders of kernels in this checkout."""
    return sorted(path.parent.name for path in (ROOT / "csrc").glob("sm*/table.cpp"))


def block() -> str:
    """The table between its markers."""
    return f"{BEGIN}\n{_support.markdown()}{END}"


def replaced(text: str) -> str:
    """Returns `text` with the table in it written anew; raises ValueError without markers."""
    if not _BLOCK.search(text):
        raise ValueError(f"no '{BEGIN}' ... '{END}'")
    return _BLOCK.sub(lambda _: block(), text)


def main() -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()
    missing = _support.missing_folders(folders())
    if missing:
        print(
            f"this build lacks the kernels of {', '.join(missing)}: FLASH_CUDA_ARCHS=all has them"
        )
        return 1
    text = README.read_text()
    try:
        new = replaced(text)
    except ValueError as error:
        print(f"{README.name}: {error}")
        return 1
    if new == text:
        return 0
    if arguments.check:
        print(f"{README.name} is out of date: run python tools/feature_table.py")
        return 1
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
