"""Test kernels as functions over numpy arrays."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from emulator.activate import open_library, set_options
from emulator.library import Recipe, build_recipe

KERNELS = Path(__file__).resolve().parent / "kernels"


class Failure(Exception):
    """What an emulated kernel was stopped for, or a CUDA error."""


class TestLibrary:
    """One .cu file of `kernels/`: `library.name(*args)` calls `flash_cuda_test_name`."""

    __test__ = False  # not a test class

    def __init__(self, path: Path) -> None:
        self._library = open_library(path)

    def configure(self, policy: str = "random", seed: int = 1, sms: int = 4, **more: int) -> None:
        """Sets all options that tests change."""
        options = {"policy": policy, "seed": seed, "sms": sms, "race": 0, "proxy": 1, **more}
        set_options(self._library, ",".join(f"{k}={v}" for k, v in options.items()))

    def warnings(self) -> str:
        text = self._library.flash_cuda_emulator_take_warnings()
        return text.decode() if text else ""

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"flash_cuda_test_{name}")
        function.restype = ctypes.c_char_p

        def call(*args: np.ndarray | int) -> None:
            error = function(*(_argument(a) for a in args))
            if error:
                raise Failure(error.decode())

        return call


def _argument(a: np.ndarray | int) -> ctypes.c_void_p | ctypes.c_int:
    if isinstance(a, np.ndarray):
        assert a.flags.c_contiguous
        return ctypes.c_void_p(a.ctypes.data)
    return ctypes.c_int(a)


@cache
def load(name: str, arch: str = "sm90") -> TestLibrary:
    """Builds `kernels/NAME.cu` (from the cache if nothing changed)."""
    recipe = Recipe(f"test_{name}", arch, [KERNELS / f"{name}.cu"])
    return TestLibrary(build_recipe(recipe, progress=True))


def aligned(shape: int | tuple[int, ...], dtype: Any, alignment: int = 128) -> np.ndarray:
    """An array of zeros at an aligned address, as device allocations are."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)
