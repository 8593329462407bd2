"""Makes the virtual environment of the Makefile: `python build_tools/environment.py .venv`.

It takes over the torch of the interpreter that it is made from, keeps the one that it has, or
installs the pinned one.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_tools.messages import BuildError, fail, say
from build_tools.toolchain import check_platform, find_gxx, find_torch, python_include

OLDEST_PYTHON = (3, 10)


def check_prerequisites() -> None:
    """Names the first thing that is missing, with the command that installs it."""
    check_platform()
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise BuildError(
            f"Python {version} is too old; {oldest} or newer is needed:"
            " apt install python3, or make PYTHON=/path/to/python"
        )
    if not importlib.util.find_spec("ensurepip") or not importlib.util.find_spec("venv"):
        raise BuildError(f"the venv module is missing: apt install python{version}-venv")
    python_include()
    find_gxx()
    if not shutil.which("git"):
        raise BuildError("git is missing: apt install git")


def site_of(python: Path) -> list[Path]:
    """Where this interpreter finds packages."""
    code = "import sys; print('\\n'.join(p for p in sys.path if p))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return [Path(line) for line in done.stdout.splitlines()]


def pip_install(python: Path, words: list[str], what: str) -> None:
    """Runs pip quietly, with a line before; raises BuildError if it fails."""
    say(f"installing {what}")
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*command, *words]).returncode != 0:
        raise BuildError(f"pip could not install {what}; its reason is above")


def make(venv: Path, torch: list[str]) -> None:
    """Creates the environment if it is not there, and gives it torch and setuptools."""
    check_prerequisites()
    python = venv / "bin/python"
    if not python.exists():
        create(venv)
    found = find_torch(site_of(python))
    if found:
        say(f"torch {found.version} in {found.include.parent} is kept")
    else:
        pip_install(python, torch, f"{torch[0]} (TORCH=... chooses another)")
    pip_install(python, ["setuptools>=70.1"], "setuptools")


def create(venv: Path) -> None:
    """Creates the environment; the packages around it are visible if torch is among them."""
    outer = find_torch([Path(sysconfig.get_paths()["purelib"]), *map(Path, sys.path)])
    inside_another = sys.prefix != sys.base_prefix
    options = ["--system-site-packages"] if outer and not inside_another else []
    say(f"creating {venv}")
    done = subprocess.run([sys.executable, "-m", "venv", *options, str(venv)])
    if done.returncode != 0:
        raise BuildError(f"{venv} could not be created; the reason is above")
    if outer and inside_another:
        # --system-site-packages would show what is around the other environment, not in it.
        site = Path(site_of(venv / "bin/python")[-1])
        (site / "outer_environment.pth").write_text(f"{outer.include.parents[1]}\n")


def main() -> None:
    """Parses the command line and makes the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", required=True, help="what pip is told to install, as words")
    arguments = parser.parse_args()
    try:
        make(arguments.venv, arguments.torch.split())
    except BuildError as error:
        raise fail(error) from None


if __name__ == "__main__":
    main()
