"""Compiles and runs the host tests of this folder: no GPU, no torch, no nvcc."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
# Undefined behaviour, such as an int that overflows, is a failure.
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", f"-I{HERE}"]


def compile_cpp(sources: list[Path], out: Path, *flags: str) -> None:
    command = ["g++", *FLAGS, *flags, *map(str, sources), "-o", str(out), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def api_objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """csrc/api, built without kernels, for the tests that use it."""
    folder = tmp_path_factory.mktemp("api")
    objects = []
    for source in sorted((CSRC / "api").glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        compile_cpp([source], objects[-1], "-c", "-O0")
    return objects


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("source", sorted(HERE.glob("test_*.cpp")), ids=lambda p: p.stem)
def test_host(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    needs_api = '#include "api/' in source.read_text()
    objects = request.getfixturevalue("api_objects") if needs_api else []
    program = tmp_path / source.stem
    compile_cpp([source, *objects], program)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
