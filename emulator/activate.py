"""Loads an emulated library into flash_cuda and sets how it schedules."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from .library import build

_libraries: dict[str, ctypes.CDLL] = {}


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name in ("flash_cuda_emulator_configure", "flash_cuda_emulator_settings",
                 "flash_cuda_emulator_take_warnings"):
        getattr(library, name).restype = ctypes.c_char_p
    library.flash_cuda_emulator_configure.argtypes = [ctypes.c_char_p]
    library.flash_cuda_emulator_launches.restype = ctypes.c_uint64
    library.flash_cuda_emulator_seconds.restype = ctypes.c_double
    return library


def _configure(library: ctypes.CDLL, text: str) -> None:
    error = library.flash_cuda_emulator_configure(text.encode())
    if error:
        raise ValueError(error.decode())


def activate(
    arch: str,
    policy: str | None = None,
    seed: int | None = None,
    *,
    num_sms: int | None = None,
    race_check: bool | None = None,
) -> Path:
    """Makes `FLASH_CUDA_KERNEL=emulated:ARCH` mean the kernels of csrc/<arch>, building them.

    What is None keeps its value: from FLASH_CUDA_EMULATOR ("policy=lazy,seed=3,sms=4,race=1") at
    first, by default policy random, seed 1, 4 SMs, no race check.

    Args:
        arch: "sm80", "sm90", "sm100".
        policy: when asynchronous work happens: "eager", "lazy" or "random".
        seed: of the schedule; the same seed gives the same schedule for the same launch.
        num_sms: SMs of the device, which bounds the thread blocks alive at a time.
        race_check: whether unordered accesses are errors even if the numbers are right.

    Returns:
        The path of the library.

    Raises:
        ValueError: for an unknown arch, policy or number.
        EmulatorBuildError: the library cannot be built.
    """
    path = build(arch)
    fresh = arch not in _libraries
    if fresh:
        _libraries[arch] = _open(path)
    library = _libraries[arch]
    pairs = {"policy": policy, "seed": seed, "sms": num_sms,
             "race": None if race_check is None else int(race_check)}
    _configure(library, ",".join(f"{k}={v}" for k, v in pairs.items() if v is not None))
    if fresh:
        from flash_cuda import _C  # the emulator also works on kernels outside the package

        text = settings(arch)
        _C.load_emulated(str(path), num_sms=int(text["sms"]))
    os.environ["FLASH_CUDA_KERNEL"] = f"emulated:{arch}"
    return path


def configure(arch: str, text: str) -> None:
    """Changes settings of a library that is active: "policy=lazy,seed=3".

    Raises:
        ValueError: names the pair that is not understood.
        KeyError: the architecture is not active.
    """
    _configure(_libraries[arch], text)


def settings(arch: str) -> dict[str, str]:
    """The settings of an active library, as strings."""
    text = _libraries[arch].flash_cuda_emulator_settings().decode()
    return dict(pair.split("=") for pair in text.split(","))


def take_warnings(arch: str) -> str:
    """Warnings of an active library since the last call; "" if there were none."""
    text = _libraries[arch].flash_cuda_emulator_take_warnings()
    return text.decode() if text else ""
