"""Runs the kernels' PTX on the CPU; see README.md."""

from .activate import activate, configure, load, plantable, settings, take_warnings
from .errors import EmulatorBuildError
from .library import architectures, build

__all__ = [
    "EmulatorBuildError",
    "activate",
    "architectures",
    "build",
    "configure",
    "load",
    "plantable",
    "settings",
    "take_warnings",
]
