"""Installs for real: into an empty environment, beside a torch, from an sdist, in place.

Each takes a copy of the sources, without kernels so that it takes seconds. torch comes from pip
where the test needs a fresh one, and is a link to the torch of these tests elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch

from build_tools.build import commit
from build_tools.plan import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# From another folder: the main job, compared with PyTorch's.
USE = """
import torch, flash_cuda
q, k, v = torch.randn(3, 2, 4, 37, 16).unbind()
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
out = flash_cuda.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
torch.testing.assert_close(out.transpose(1, 2), expected)
print(flash_cuda.__file__)
print(flash_cuda._C.build_info())
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command as on a user's machine and returns its output."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "FLASH_CUDA"))}
    environ["FLASH_CUDA_ARCHS"] = "none"
    # Isolated builds may not choose another torch: it could be a CUDA build of several GB.
    constraint = cwd / "constraint.txt"
    constraint.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    environ["PIP_CONSTRAINT"] = environ["PIP_BUILD_CONSTRAINT"] = str(constraint)
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is tracked (all of it where the tree is no git checkout)."""
    target = tmp_path_factory.mktemp("source") / "flash_cuda"
    names = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True
    ).stdout.split("\0")
    if names == [""]:
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if "build" not in p.parts]
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
    (target / ".commit").write_text("0123456789ab\n")
    return target


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where pip reaches no packages."""
    folder = tmp_path_factory.mktemp("index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", folder, "setuptools>=68"]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("pip reaches no package index from here")


def new_environment(folder: Path, with_torch: bool) -> Path:
    """The interpreter of a fresh virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    if with_torch:
        site = folder / "venv" / Path(sysconfig.get_paths()["purelib"]).relative_to(sys.prefix)
        for package in Path(torch.__file__).parents[1].iterdir():
            name = package.name.lower()
            own = name.startswith(("flash_cuda", "__editable__", "_distutils", "distutils"))
            if not own and not (site / package.name).exists():
                (site / package.name).symlink_to(package)
    return python


def use(python: Path, folder: Path) -> str:
    """Runs USE from a folder without sources, and returns where the package was found."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    return run(python, "-c", USE, cwd=elsewhere).splitlines()[0]


@pytest.mark.usefixtures("index")
def test_isolated_install_into_an_empty_environment(source: Path, tmp_path: Path) -> None:
    if torch.version.cuda:
        pytest.skip("pip would fetch a CUDA build of torch")
    python = new_environment(tmp_path, with_torch=False)
    run(python, "-m", "pip", "install", source, cwd=tmp_path)
    assert use(python, tmp_path).startswith(str(tmp_path / "venv"))


@pytest.mark.usefixtures("index")
def test_isolated_install_takes_the_torch_that_is_there(source: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path, with_torch=True)
    log = run(python, "-m", "pip", "install", "-v", "--no-deps", source, cwd=tmp_path)
    assert f"torch {torch.__version__} in {tmp_path / 'venv'}" in log
    assert "it will be downloaded" not in log
    assert use(python, tmp_path).startswith(str(tmp_path / "venv"))


@pytest.mark.usefixtures("index")
def test_isolated_editable_install(source: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path, with_torch=True)
    run(python, "-m", "pip", "install", "--no-deps", "-e", source, cwd=tmp_path)
    assert use(python, tmp_path) == str(source / "flash_cuda/__init__.py")


def test_sdist_becomes_a_wheel_for_this_python(source: Path, tmp_path: Path) -> None:
    make = (
        "import sys; sys.path.insert(0, 'build_tools'); import backend; backend.build_sdist('..')"
    )
    run(sys.executable, "-c", make, cwd=source)
    sdist = source.parent / "flash_cuda-0.1.0.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"csrc/module.cpp", "build_tools/backend.py", "Makefile", "LICENSE"} <= names
    assert {"third_party/nvcc.txt", "tests/test_build.py", "examples/train_gpt.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]

    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation",
        "-w", tmp_path, sdist, cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"flash_cuda-0.1.0-{version}-{version}-linux_")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        text = archive.read("flash_cuda-0.1.0.dist-info/METADATA").decode()
    assert tops == {"flash_cuda", "flash_cuda-0.1.0.dist-info"}
    metadata = Parser().parsestr(text)
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line]
    assert required == ["torch>=2.10"]
    assert set(metadata.get_all("Provides-Extra", [])) == {"bench", "test", "dev"}
    assert "Apache-2.0" in (metadata["License"], metadata["License-Expression"])

    python = new_environment(tmp_path, with_torch=True)
    run(python, "-m", "pip", "install", "--no-deps", wheel, cwd=tmp_path)
    assert use(python, tmp_path).startswith(str(tmp_path / "venv"))
    # The sdist remembers the commit of the tree that it was made from.
    shown = run(python, "-c", USE, cwd=tmp_path / "elsewhere")
    assert "0123456789ab" in shown


def test_a_second_build_takes_seconds(source: Path) -> None:
    run(sys.executable, "-m", "build_tools", cwd=source)
    started = time.monotonic()
    log = run(sys.executable, "-m", "build_tools", cwd=source)
    assert time.monotonic() - started < 10
    assert "compiling" not in log


def test_the_installed_build_knows_its_commit() -> None:
    import flash_cuda

    known = flash_cuda._C.build_info()["commit"]
    assert known in ("", commit()) or len(known) == 12
