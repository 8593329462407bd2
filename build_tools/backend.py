"""The PEP 517 backend: setuptools', with the build requirements that this machine lacks."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import build_meta

# As a backend this file is imported alone, from backend-path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from build_tools.toolchain import OLDEST_TORCH, find_torch  # noqa: E402

build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable


def get_requires_for_build_sdist(config_settings: dict[str, str] | None = None) -> list[str]:
    """An sdist needs nothing more."""
    return []


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    """torch, unless the environment to install into has one."""
    return [] if find_torch() else [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]


get_requires_for_build_editable = get_requires_for_build_wheel
