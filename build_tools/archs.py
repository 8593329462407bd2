"""FLASH_CUDA_ARCHS: which GPUs are built for, and what nvcc is told for each folder of kernels."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .messages import BuildError, say

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120)
CHOICES = f"{', '.join(map(str, CAPABILITIES))}, or all, native, none"

# Folder -> compute capability -> the machine code that serves it. sm_80 code also runs on 8.6 and
# 8.9. The `a` targets have the instructions that only that generation has.
FOLDER_CODES: dict[str, dict[int, str]] = {
    "sm80": {80: "80", 86: "80", 89: "80", 90: "90", 100: "100", 103: "103", 120: "120"},
    "sm90": {90: "90a"},
    "sm100": {100: "100a", 103: "103a"},
    "sm120": {120: "120"},
}

# The first CUDA toolkit that knows a capability.
OLDEST_TOOLKIT = (12, 0)
FIRST_TOOLKIT = {100: (12, 8), 103: (12, 9), 120: (12, 8)}


def parse(text: str) -> tuple[int, ...] | None:
    """Reads FLASH_CUDA_ARCHS: capabilities, () for none, None for native.

    Raises:
        BuildError: for a word that is not among CHOICES.
    """
    words = [word for word in text.replace(",", " ").replace(";", " ").lower().split() if word]
    if not words:
        raise BuildError(f"FLASH_CUDA_ARCHS is empty; give some of {CHOICES}")
    if len(words) == 1:
        if words[0] == "all":
            return CAPABILITIES
        if words[0] == "none":
            return ()
        if words[0] == "native":
            return None
    found = set()
    for word in words:
        number = word.replace(".", "").removeprefix("sm_").removesuffix("a")
        if not number.isdigit() or int(number) not in CAPABILITIES:
            raise BuildError(f"FLASH_CUDA_ARCHS: {word!r} is not known; give some of {CHOICES}")
        found.add(int(number))
    return tuple(sorted(found))


def serving_capability(capability: int) -> int:
    """The entry of CAPABILITIES whose code runs best on a card of this compute capability."""
    if capability < 80:
        raise BuildError(
            f"this machine's GPU has compute capability {capability / 10}; flash_cuda needs 8.0"
            " (Ampere) or newer. FLASH_CUDA_ARCHS=none builds the CPU engine alone"
        )
    same_generation = [c for c in CAPABILITIES if c <= capability and c // 10 == capability // 10]
    # A generation that is not in the table runs sm_80's PTX, compiled by its driver.
    return max(same_generation, default=80)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver serves, None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def visible_gpus() -> list[int]:
    """Compute capabilities of the GPUs that the driver shows (80 is 8.0); empty without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    major_attribute, minor_attribute = 75, 76
    capabilities = []
    for device in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), major_attribute, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), minor_attribute, device)
        capabilities.append(major.value * 10 + minor.value)
    return sorted(set(capabilities))


def requested(
    has_compiler: bool,
    torch_has_cuda: bool,
    gpus: Callable[[], Sequence[int]] = visible_gpus,
    environ: dict[str, str] | None = None,
) -> tuple[tuple[int, ...], str]:
    """What to build for, and why, as words for the announcement.

    FLASH_CUDA_ARCHS decides; without it the GPUs of this machine do; without those, everything is
    built if there is an nvcc or torch is a CUDA build, and nothing otherwise.
    """
    text = (os.environ if environ is None else environ).get("FLASH_CUDA_ARCHS")
    if text is not None:
        named = parse(text)
        if named is not None:
            return named, "FLASH_CUDA_ARCHS"
        present = gpus()
        if not present:
            raise BuildError(
                "FLASH_CUDA_ARCHS=native, but no GPU is visible; give some of "
                f"{', '.join(map(str, CAPABILITIES))}, or all, none"
            )
        return tuple(sorted({serving_capability(c) for c in present})), "this machine's GPUs"
    present = gpus()
    if present:
        return tuple(sorted({serving_capability(c) for c in present})), "this machine's GPUs"
    if has_compiler:
        return CAPABILITIES, "no GPU visible, nvcc found"
    if torch_has_cuda:
        return CAPABILITIES, "no GPU visible, torch is a CUDA build"
    return (), "no GPU, no nvcc, no CUDA build of torch"


def limit_to_toolkit(
    archs: Sequence[int], toolkit: tuple[int, int], named_by_user: bool
) -> tuple[int, ...]:
    """Drops what this nvcc cannot compile for, with a line, or refuses if it was asked for."""
    version = ".".join(map(str, toolkit))
    if archs and toolkit < OLDEST_TOOLKIT:
        raise BuildError(
            f"nvcc {version} is too old; flash_cuda needs {'.'.join(map(str, OLDEST_TOOLKIT))} or"
            " newer (or FLASH_CUDA_ARCHS=none)"
        )
    kept = []
    for arch in archs:
        first = FIRST_TOOLKIT.get(arch, OLDEST_TOOLKIT)
        if toolkit >= first:
            kept.append(arch)
            continue
        text = f"compute capability {arch / 10} needs nvcc {first[0]}.{first[1]}, this is {version}"
        if named_by_user:
            raise BuildError(f"FLASH_CUDA_ARCHS: {text}")
        say(f"left out: {text}")
    return tuple(kept)


def folder_codes(folder: str, archs: Sequence[int]) -> tuple[str, ...]:
    """Machine codes to build a folder for, e.g. ("80", "90"); empty if it serves none of archs."""
    codes = FOLDER_CODES["sm80" if folder == "common" else folder]
    wanted = [codes[arch] for arch in archs if arch in codes]
    return tuple(dict.fromkeys(wanted))


def gencode_flags(folder: str, archs: Sequence[int]) -> list[str]:
    """nvcc's -gencode flags of a folder.

    The targets of common come from one front-end pass over compute_80, those of sm80 from one over
    compute_80 and one over compute_90, whose additions to global memory are wider. The PTX of the
    first pass goes along for cards that do not exist yet. The other folders compile once for each
    target.
    """
    codes = folder_codes(folder, archs)
    if not codes:
        return []
    if folder in ("sm80", "common"):
        passes = {"80": codes, "90": ()}
        if folder == "sm80":
            passes = {
                "80": tuple(code for code in codes if int(code) < 90),
                "90": tuple(code for code in codes if int(code) >= 90),
            }
        flags: list[str] = []
        for base, served in passes.items():
            if served:
                targets = [f"sm_{code}" for code in served] + ([] if flags else [f"compute_{base}"])
                flags.append(f"-gencode=arch=compute_{base},code=[{','.join(targets)}]")
        return flags
    return [f"-gencode=arch=compute_{code},code=sm_{code}" for code in codes]


def kernel_folders(csrc: Path, archs: Sequence[int]) -> list[str]:
    """Folders of kernels that exist and serve one of archs, oldest generation first."""
    return [
        folder
        for folder in FOLDER_CODES
        if folder_codes(folder, archs) and any((csrc / folder).glob("*.cu"))
    ]
