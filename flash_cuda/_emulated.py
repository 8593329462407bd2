"""Finding the emulator, which is a test tool beside the package in a source checkout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from flash_cuda import _C

_ready: set[str] = set()


def ensure_emulated(name: str) -> None:
    """Builds and loads the kernels that an override asks for, unless they are loaded.

    Args:
        name: ``"emulated:sm90"`` (or another folder), or ``"emulated"``.

    Raises:
        NotImplementedError: flash_cuda does not run from a source checkout, or it has no kernels
            of that folder.
    """
    if name in _ready:
        return
    try:
        _C.kernel_table(emulated=True)
    except NotImplementedError:
        _load(name)
    _ready.add(name)


def _load(name: str) -> None:
    root = Path(__file__).resolve().parents[1]
    if not (root / "emulator" / "__init__.py").exists():
        raise NotImplementedError(
            f"the kernel override {name!r} needs a source checkout of flash_cuda (its emulator/ "
            f"is not part of the installed package); this one is in {root}"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    emulator = importlib.import_module("emulator")
    archs: list[str] = emulator.architectures()
    _, _, arch = name.partition(":")
    if (arch and arch not in archs) or not archs:
        raise NotImplementedError(
            f"the kernel override {name!r} names a folder without kernels; this checkout has "
            f"{', '.join(archs) or 'none'}"
        )
    emulator.load(arch or archs[-1])
