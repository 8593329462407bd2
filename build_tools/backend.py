"""The PEP 517 backend: setuptools', and torch as a build requirement where there is none.

Under pip's build isolation the environment to install into can be seen, and its torch is built
against where it lies. uv hides that environment, so there torch becomes a build requirement.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import build_meta

# As a backend this file is imported alone, from backend-path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_tools.messages import BuildError, Listener, fail, say
from build_tools.toolchain import OLDEST_TORCH, check_platform, find_torch

Listener.captured = True

build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable

Settings = dict[str, str | list[str] | None]


def get_requires_for_build_sdist(config_settings: Settings | None = None) -> list[str]:
    """What setuptools itself needs."""
    return list(build_meta.get_requires_for_build_sdist(config_settings))


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """What setuptools needs, and torch unless the environment to install into has one."""
    try:
        check_platform()
    except BuildError as error:
        raise fail(error) from None
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """The same for `pip install -e`."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch_requirement()]


def _torch_requirement() -> list[str]:
    if find_torch():
        return []
    requirement = f"torch>={'.'.join(map(str, OLDEST_TORCH))}"
    say(
        f"no {requirement} here: it will be downloaded to build against (up to 3 GB, unless a"
        " build constraint names a CPU build). To avoid that, install torch first and use"
        " --no-build-isolation, or under uv --no-build-isolation-package flash-cuda"
    )
    return [requirement]
