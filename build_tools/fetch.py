"""Fetching pinned wheels that the machine lacks, after saying so. See third_party/README.md."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .messages import BuildError, say

PINS = Path(__file__).resolve().parents[1] / "third_party"


def fetch(name: str, megabytes: int, build: Path) -> Path:
    """Unpacks the wheels of third_party/NAME.txt and returns the folder that they lie in.

    They are fetched once for a build folder, without their dependencies.

    Raises:
        BuildError: where neither pip nor uv can fetch them.
    """
    pins = PINS / f"{name}.txt"
    folder = build / "fetched" / name
    done = folder / ".complete"
    if done.exists() and done.read_text() == pins.read_text():
        return folder
    wheels = pins.read_text().split()
    say(f"downloading {megabytes} MB into {folder}: {', '.join(wheels)}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [*_installer(), "--no-deps", "--target", str(folder), *wheels]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        words = (run.stderr or run.stdout).strip().splitlines()
        raise BuildError(f"{name} could not be downloaded ({words[-1] if words else 'no reason'})")
    done.write_text(pins.read_text())
    return folder


def _installer() -> list[str]:
    """pip of this interpreter, or uv."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet"]
    # In pip's build environment a site hook hides pip; -I leaves the hook out.
    isolated = [sys.executable, "-I", "-m", "pip"]
    if subprocess.run([*isolated, "--version"], capture_output=True).returncode == 0:
        return [*isolated, "install", "--quiet"]
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise BuildError("neither pip nor uv was found to download the CUDA compiler; set CUDA_HOME")
