"""Loads an emulated library into flash_cuda and sets how it schedules."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from .library import build

_libraries: dict[str, ctypes.CDLL] = {}


def open_library(path: Path) -> ctypes.CDLL:
    """The C functions of a library, typed."""
    library = ctypes.CDLL(str(path))
    for name in (
        "flash_cuda_emulator_configure",
        "flash_cuda_emulator_settings",
        "flash_cuda_emulator_take_warnings",
        "flash_cuda_emulator_plantable",
    ):
        getattr(library, name).restype = ctypes.c_char_p
    library.flash_cuda_emulator_configure.argtypes = [ctypes.c_char_p]
    library.flash_cuda_emulator_launches.restype = ctypes.c_uint64
    library.flash_cuda_emulator_seconds.restype = ctypes.c_double
    return library


def set_options(library: ctypes.CDLL, text: str) -> None:
    """Changes settings: "policy=lazy,seed=3"; ValueError names what is not understood."""
    error = library.flash_cuda_emulator_configure(text.encode())
    if error:
        raise ValueError(error.decode())


def load(
    arch: str,
    policy: str | None = None,
    seed: int | None = None,
    *,
    num_sms: int | None = None,
    race_check: bool | None = None,
) -> Path:
    """Builds the kernels of csrc/<arch>, gives them to flash_cuda and sets their schedule.

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
    path = Path(str(_libraries[arch]._name)) if arch in _libraries else build(arch)
    library = _libraries.get(arch) or open_library(path)
    pairs = {
        "policy": policy,
        "seed": seed,
        "sms": num_sms,
        "race": None if race_check is None else int(race_check),
    }
    set_options(library, ",".join(f"{k}={v}" for k, v in pairs.items() if v is not None))
    if arch not in _libraries or num_sms is not None:
        from flash_cuda import _C  # here: the emulator also runs kernels outside the package

        _libraries[arch] = library
        _C.load_emulated(str(path), num_sms=int(settings(arch)["sms"]))
    return path


def activate(
    arch: str,
    policy: str | None = None,
    seed: int | None = None,
    *,
    num_sms: int | None = None,
    race_check: bool | None = None,
) -> Path:
    """`load`, and from now on CPU tensors of this thread and of new processes use these kernels."""
    path = load(arch, policy, seed, num_sms=num_sms, race_check=race_check)
    from flash_cuda import _C

    os.environ["FLASH_CUDA_KERNEL"] = f"emulated:{arch}"
    _C.set_override(f"emulated:{arch}")
    return path


def configure(arch: str, text: str) -> None:
    """Changes settings of a library that is active: "policy=lazy,seed=3".

    Raises:
        ValueError: names the pair that is not understood.
        KeyError: the architecture is not active.
    """
    set_options(_libraries[arch], text)


def settings(arch: str) -> dict[str, str]:
    """The settings of an active library, as strings."""
    text = _libraries[arch].flash_cuda_emulator_settings().decode()
    return dict(pair.split("=") for pair in text.split(","))


def take_warnings(arch: str) -> str:
    """Warnings of an active library since the last call; "" if there were none."""
    text = _libraries[arch].flash_cuda_emulator_take_warnings()
    return text.decode() if text else ""


def plantable(arch: str) -> dict[str, str]:
    """Mistakes that fit the launches since "plant=observe" was configured.

    Returns:
        From "parity:123", a value of the setting `plant`, to the source line.
    """
    text: bytes = _libraries[arch].flash_cuda_emulator_plantable()
    return dict(line.split(" ", 1) for line in text.decode().splitlines())
