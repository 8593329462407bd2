"""The extension module flash_cuda._C. Metadata is in pyproject.toml, the build in build_tools/."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_tools.build import build_library, commit
from build_tools.messages import BuildError, fail


class BuildKernels(build_ext):
    """Hands the extension to build_tools."""

    def build_extension(self, ext: Extension) -> None:
        """Builds flash_cuda._C where setuptools wants it."""
        try:
            build_library(Path(self.get_ext_fullpath(ext.name)).resolve())
        except BuildError as error:
            raise fail(error) from None


class SourcesWithCommit(sdist):
    """Notes in an sdist the commit that it was made from."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copies the files and adds the note."""
        super().make_release_tree(base_dir, files)
        (Path(base_dir) / ".commit").write_text(commit() + "\n")


setup(
    license="Apache-2.0",
    ext_modules=[Extension("flash_cuda._C", sources=[])],
    cmdclass={"build_ext": BuildKernels, "sdist": SourcesWithCommit},
)
