"""Blackwell kernels by themselves, with a mistake in their sources or without."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from emulator.library import Recipe, build_recipe
from emulator.toolchain import CSRC, cache_folder

from .library import KERNELS, TestLibrary


@dataclass(frozen=True)
class Mistake:
    """`old` becomes `new` in a file of csrc/sm100; `report` are words that some report has.

    Attributes:
        variant: of the kernel, a name that the test knows.
    """

    name: str
    file: str
    old: str
    new: str = ""
    report: str = ""
    variant: str = ""


def library(
    name: str, kernel: str, mistake: Mistake | None, flags: list[str], others: list[str]
) -> TestLibrary:
    """`kernels/KERNEL` beside copies of the headers of csrc/sm100, of which one is changed.

    Args:
        name: of the library, one for each mistake.
        others: files of csrc that it needs.
    """
    folder = cache_folder() / "mistakes" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in (KERNELS / kernel, KERNELS / "test_api.h"):
        shutil.copy(file, folder)
    for file in [*CSRC.glob("sm100/*.h"), *CSRC.glob("sm100/*.cuh")]:
        text = file.read_text()
        if mistake and mistake.file == file.name:
            assert mistake.old in text, f"{file.name} has no {mistake.old!r} any more"
            text = text.replace(mistake.old, mistake.new)
        # The neighbour, not the file in csrc/.
        (folder / file.name).write_text(text.replace('#include "sm100/', '#include "'))
    kernels = [CSRC / x for x in others if x.endswith(".cu")]
    hosts = [CSRC / x for x in others if x.endswith(".cpp")]
    recipe = Recipe(name, "sm100", [folder / kernel, *kernels], hosts, nvcc_flags=flags)
    return TestLibrary(build_recipe(recipe))
