"""Finding what is compiled with: g++, nvcc, torch's headers, Python's headers."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .messages import BuildError

OLDEST_TORCH = (2, 10)
OLDEST_GXX = 9
CUTLASS_WHEEL_INCLUDE = "cutlass_library/source/include"

# The newest g++ that an nvcc accepts as its host compiler.
NEWEST_GXX = {(12, 0): 12, (12, 4): 13, (12, 8): 14, (13, 0): 15}


@dataclass(frozen=True)
class Torch:
    """A torch to build against."""

    include: Path
    lib: Path
    version: str  # "2.13.0+cpu"
    cuda: str | None  # "13.0", None for a CPU build


@dataclass(frozen=True)
class Gxx:
    """The host compiler."""

    command: tuple[str, ...]  # may begin with a wrapper such as ccache
    version: str


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler with its headers and static runtime."""

    path: Path
    found_by: str  # "CUDA_HOME", "PATH", "wheels"
    version: str  # "13.0.88"
    include: Path
    lib: Path  # holds libcudart_static.a

    @property
    def toolkit(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


def check_platform() -> None:
    """Refuses what the sources do not build on."""
    if sys.platform != "linux":
        name = {"win32": "Windows", "darwin": "macOS"}.get(sys.platform, sys.platform)
        raise BuildError(f"flash_cuda builds on Linux; {name} is not supported")
    if platform.machine() not in ("x86_64", "aarch64"):
        raise BuildError(
            f"flash_cuda builds on x86_64 (and, untested, aarch64), not {platform.machine()}"
        )


def _run(command: Iterable[str | Path]) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True, text=True
    ).stdout


def find_gxx(newest: int | None = None) -> Gxx:
    """The compiler of CXX, else g++; `newest` is the newest major version that nvcc accepts."""
    asked_for = os.environ.get("CXX")
    candidates = [tuple(shlex.split(asked_for))] if asked_for else [("g++",)]
    if not asked_for and newest:
        candidates += [(f"g++-{major}",) for major in range(newest, OLDEST_GXX - 1, -1)]
    too_new = ""
    for command in candidates:
        if not shutil.which(command[0]):
            continue
        is_gcc = "clang" not in Path(command[-1]).name
        flags = ["-dumpfullversion", "-dumpversion"] if is_gcc else ["-dumpversion"]
        try:
            version = _run([*command, *flags]).strip()
        except (OSError, subprocess.CalledProcessError):
            raise BuildError(
                f"{shlex.join(command)} does not run; set CXX to a C++17 compiler"
            ) from None
        major = int(version.split(".")[0])
        if is_gcc and major < OLDEST_GXX:
            raise BuildError(
                f"{command[-1]} {version} is too old; {OLDEST_GXX} or newer is needed"
                " (apt install g++, or set CXX)"
            )
        if is_gcc and newest and major > newest:
            too_new = too_new or f"{command[-1]} {version}"
            continue
        return Gxx(command, version)
    if too_new:
        raise BuildError(
            f"{too_new} is newer than this nvcc accepts; install g++-{newest} (apt install"
            f" g++-{newest}) or set CXX"
        )
    missing = asked_for or "g++"
    raise BuildError(f"{missing} was not found; install a C++17 compiler: apt install g++")


def newest_gxx(toolkit: tuple[int, int]) -> int | None:
    """The newest g++ that nvcc of this version accepts, None if it is newer than the table."""
    if toolkit > max(NEWEST_GXX):
        return None
    return max((v for k, v in NEWEST_GXX.items() if k <= toolkit), default=11)


def python_include() -> Path:
    """The folder of Python.h."""
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise BuildError(
            f"Python.h was not found in {include}; install it: apt install python{version}-dev"
        )
    return include


def site_folders() -> list[Path]:
    """Where packages may lie: this environment, and the one around a build environment of pip."""
    paths = sysconfig.get_paths()
    folders = [Path(p) for p in sys.path if p] + [Path(paths["purelib"]), Path(paths["platlib"])]
    return list(dict.fromkeys(folders))


def find_torch(folders: Iterable[Path] | None = None) -> Torch | None:
    """The first torch that is new enough; found by its files, so that it need not be importable."""
    for folder in site_folders() if folders is None else folders:
        root = folder / "torch"
        if not (root / "include/torch/csrc/stable/library.h").exists():
            continue
        text = (root / "version.py").read_text()
        version = re.search(r"^__version__\s*=\s*'([^']+)'", text, re.M)
        cuda = re.search(r"^cuda\s*(?::[^=]+)?=\s*'([^']+)'", text, re.M)
        if version and version_tuple(version[1]) >= OLDEST_TORCH:
            return Torch(root / "include", root / "lib", version[1], cuda[1] if cuda else None)
    return None


def require_torch() -> Torch:
    """find_torch(), or an error that says how to get one."""
    torch = find_torch()
    if torch is None:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise BuildError(f"torch >= {oldest} was not found; pip install 'torch>={oldest}'")
    return torch


def version_tuple(text: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = text.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index]


def _nvcc_candidates(fetched: Path | None) -> list[tuple[Path, str]]:
    found = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found.append((Path(os.environ[variable]) / "bin/nvcc", variable))
    on_path = shutil.which("nvcc")
    if on_path:
        found.append((Path(on_path), "PATH"))
    found.append((Path("/usr/local/cuda/bin/nvcc"), "/usr/local/cuda"))
    folders = [*site_folders(), *([fetched] if fetched else [])]
    found += [(folder / "nvidia/cu13/bin/nvcc", "wheels") for folder in folders]
    return found


def find_nvcc(fetched: Path | None = None) -> Nvcc | None:
    """nvcc of CUDA_HOME, of PATH, of /usr/local/cuda, or of the wheels; None without one.

    Args:
        fetched: where wheels were unpacked that are in no environment.
    """
    for path, found_by in _nvcc_candidates(fetched):
        if not path.exists():
            if found_by.startswith("CUDA_"):
                raise BuildError(f"{found_by} is {path.parents[1]}, but there is no bin/nvcc in it")
            continue
        try:
            text = _run([path, "--version"])
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildError(f"{path} does not run: {error}") from None
        version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
        if not version:
            raise BuildError(f"{path} --version does not name a version")
        return _with_folders(path, found_by, version[1])
    return None


def _with_folders(path: Path, found_by: str, version: str) -> Nvcc:
    """Completes an nvcc by its headers and libcudart_static.a, wherever a distribution put them."""
    # nvcc itself knows its top folder, also where what is on PATH is a script that calls it.
    dry_run = subprocess.run(
        [path, "--dryrun", "-c", "x.cu"], capture_output=True, text=True
    ).stderr
    told = re.search(r"^#\$ TOP=(.+)$", dry_run, re.M)
    top = Path(told[1].strip() if told else path.resolve().parent.parent).resolve()
    target = top / f"targets/{'sbsa' if platform.machine() == 'aarch64' else 'x86_64'}-linux"
    roots = (top, target, path.parent.parent, Path("/usr"))
    include = next((r / "include" for r in roots if (r / "include/cuda_runtime.h").exists()), None)
    libs = [r / name for r in roots for name in ("lib64", "lib", "lib/x86_64-linux-gnu")]
    lib = next((folder for folder in libs if (folder / "libcudart_static.a").exists()), None)
    if include is None or lib is None:
        missing = "cuda_runtime.h" if include is None else "libcudart_static.a"
        raise BuildError(
            f"nvcc {version} in {path} comes without {missing}; install the whole toolkit or set"
            " CUDA_HOME"
        )
    return Nvcc(path, found_by, version, include, lib)


def find_cutlass() -> Path | None:
    """The include folder of CUTLASS: of CUTLASS_HOME, or of the nvidia-cutlass wheel."""
    home = os.environ.get("CUTLASS_HOME")
    if home:
        if not (Path(home) / "include/cute").is_dir():
            raise BuildError(f"CUTLASS_HOME is {home}, but there is no include/cute in it")
        return Path(home) / "include"
    folders = (folder / CUTLASS_WHEEL_INCLUDE for folder in site_folders())
    return next((folder for folder in folders if (folder / "cute").is_dir()), None)
