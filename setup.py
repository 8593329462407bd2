"""The extension module flash_cuda._C. Metadata is in pyproject.toml, the build in build_tools/."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools.build import build_library  # noqa: E402
from build_tools.messages import BuildError, fail  # noqa: E402


class BuildKernels(build_ext):
    """Hands the extension to build_tools."""

    def build_extension(self, ext: Extension) -> None:
        """Builds flash_cuda._C where setuptools wants it."""
        try:
            build_library(Path(self.get_ext_fullpath(ext.name)).resolve())
        except BuildError as error:
            raise fail(error) from None


setup(ext_modules=[Extension("flash_cuda._C", sources=[])], cmdclass={"build_ext": BuildKernels})
