"""The machine code of the Blackwell kernels: registers that spill, and the unit that multiplies."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import roofline
from build_tools.toolchain import find_nvcc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path.stem for path in ROOT.glob("csrc/sm100/*.cu"))
# Kernels that multiply; the others prepare and convert.
_MULTIPLIES = re.compile(r"(fwd|bwd|bwd_pair|bwd_wide)_kernelI")

pytestmark = pytest.mark.slow


def nvdisasm(nvcc: Path) -> str | None:
    """The disassembler: on PATH, beside nvcc, or of a wheel."""
    packages = Path(pytest.__file__).parents[1]
    places = [nvcc.parent, *packages.glob("nvidia/*/bin")]
    found = shutil.which("nvdisasm")
    return found or next((str(x / "nvdisasm") for x in places if (x / "nvdisasm").exists()), None)


@pytest.mark.parametrize("arch", ["100a", "103a"])
@pytest.mark.parametrize("source", SOURCES)
def test_machine_code(source: str, arch: str, tmp_path: Path) -> None:
    nvcc = find_nvcc(ROOT / "build" / "fetched" / "nvcc")
    if nvcc is None or nvcc.toolkit < (12, 9):
        pytest.skip("needs nvcc 12.9")
    cubin = tmp_path / "kernel.cubin"
    command = [
        nvcc.path, "-std=c++17", "-O3", "-Xptxas=-v", f"-arch=sm_{arch}", f"-I{ROOT / 'csrc'}",
        "-cubin", ROOT / "csrc" / "sm100" / f"{source}.cu", "-o", cubin,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert set(spills) == {"0"}, done.stderr

    disassembler = nvdisasm(Path(nvcc.path))
    if disassembler is None:
        pytest.skip("no spills; needs nvdisasm for the rest")
    sass = subprocess.run(
        [disassembler, "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    assert not re.search(r"\bHMMA\b", sass)
    kernels = {x for x in re.findall(r"^\.text\.(\S+):", sass, re.M) if _MULTIPLIES.search(x)}
    loops = {line.split(":")[0] for line in roofline.count(sass) if ": MMA " in line}
    assert kernels
    assert loops == kernels
