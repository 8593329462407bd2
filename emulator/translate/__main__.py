"""Translates FOLDER/module.ptx into files of that folder, in a process of its own.

python -m emulator.translate PREFIX FOLDER ROOT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .module import translate
from .ptx import TranslationError


def main() -> None:
    """Command line."""
    prefix, folder, root = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    ptx = folder / "module.ptx"
    try:
        out = translate(ptx.read_text(), prefix, ptx, folder / "module.sites", root)
    except TranslationError as e:
        sys.exit(f"{prefix}: {e}")
    files = {f"{stem}.cpp": code for stem, code in out.kernels.items()}
    files[f"{prefix}.index.cpp"] = out.index
    files["module.sites"] = out.sites
    files["done.json"] = json.dumps(sorted(out.kernels))  # the last one
    for name, text in files.items():
        # Another process may do the same, or read what is there.
        unfinished = folder / f"{name}.{os.getpid()}.tmp"
        unfinished.write_text(text)
        unfinished.replace(folder / name)


if __name__ == "__main__":
    main()
